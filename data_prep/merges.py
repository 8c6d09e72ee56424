"""Byte-pair merges (Sennrich et al. 2016) over word counts, in an order that nothing but the counts decides.

The most frequent pair of neighbouring pieces becomes a piece, again and again. Among pairs of equal count the one of
the lowest ids (left, then right) is merged, as in the `tokenizers` library's BpeTrainer.
"""

import heapq
import itertools
from collections import Counter

Pair = tuple[int, int]


class Merges:
    """Words as sequences of pieces, and the counts of neighbouring pairs, kept up to date while pairs are merged."""

    def __init__(self, words: list[list[int]], counts: list[int]) -> None:
        """`words` holds ids of pieces; `counts` says how often each word occurs."""
        self._words = words
        self._word_counts = counts
        self._counts: Counter[Pair] = Counter()
        self._places: dict[Pair, list[int]] = {}  # words that hold or held the pair
        for index, word in enumerate(words):
            for pair in itertools.pairwise(word):
                self._counts[pair] += counts[index]
                self._places.setdefault(pair, []).append(index)
        # The most frequent first, and among equals the first by id. An entry may be out of date.
        self._heap: list[tuple[int, Pair]] = [(-count, pair) for pair, count in self._counts.items()]
        heapq.heapify(self._heap)

    def most_frequent(self, min_frequency: int) -> Pair | None:
        """The pair that occurs most often, the first by its ids among equals; None if none is frequent enough."""
        while self._heap:
            negative_count, pair = heapq.heappop(self._heap)
            count = self._counts[pair]
            if count == -negative_count and count >= max(min_frequency, 1):
                return pair
            # Out of date: a pair that grew has a newer entry already, one that shrank gets one.
            if min_frequency <= count < -negative_count:
                heapq.heappush(self._heap, (-count, pair))
        return None

    def merge(self, pair: Pair, merged: int) -> None:
        """Makes one piece of the pair, from left to right, wherever it occurs."""
        changes: Counter[Pair] = Counter()
        for index in self._places.pop(pair):
            word, count = self._words[index], self._word_counts[index]
            shorter = _replace(word, pair, merged)
            if len(shorter) == len(word):
                continue  # met already, or another merge took one of the two
            for old in itertools.pairwise(word):
                changes[old] -= count
            for new in itertools.pairwise(shorter):
                changes[new] += count
                if merged in new:
                    self._places.setdefault(new, []).append(index)
            self._words[index] = shorter
        for changed, difference in changes.items():
            self._counts[changed] += difference
            if self._counts[changed] <= 0:
                del self._counts[changed]
            elif difference > 0:
                heapq.heappush(self._heap, (-self._counts[changed], changed))


def _replace(word: list[int], pair: Pair, merged: int) -> list[int]:
    shorter: list[int] = []
    position = 0
    while position < len(word):
        if word[position] == pair[0] and position + 1 < len(word) and word[position + 1] == pair[1]:
            shorter.append(merged)
            position += 2
        else:
            shorter.append(word[position])
            position += 1
    return shorter
