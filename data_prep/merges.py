"""Byte-pair merges (Sennrich et al. 2016) over word counts, in an order that depends only on the counts.

The most frequent pair of adjacent pieces becomes a piece, repeatedly. Among pairs of equal count, the one with the
lowest ids (left, then right) is merged, as in the `tokenizers` library's BpeTrainer.
"""

import heapq
import itertools
from array import array
from collections import Counter, defaultdict

Pair = tuple[int, int]


class Merges:
    """Words as sequences of pieces, and the counts of adjacent pairs, kept up to date while pairs are merged."""

    def __init__(self, words: list[list[int]], counts: list[int], min_frequency: int) -> None:
        """`words` holds ids of pieces, and is modified; `counts` holds how often each word occurs.

        Pairs that occur less than `min_frequency` times are not merged.
        """
        self._words = words
        self._word_counts = counts
        self._min_frequency = max(min_frequency, 1)
        self._counts: Counter[Pair] = Counter()
        # Indices of the words that contain, or once contained, the pair.
        self._places: defaultdict[Pair, array[int]] = defaultdict(lambda: array("i"))
        for index, word in enumerate(words):
            for pair in itertools.pairwise(word):
                self._counts[pair] += counts[index]
                self._places[pair].append(index)
        # Most frequent first, then lowest ids. Entries may be out of date.
        self._heap: list[tuple[int, Pair]] = [
            (-count, pair) for pair, count in self._counts.items() if count >= self._min_frequency
        ]
        heapq.heapify(self._heap)

    def most_frequent(self) -> Pair | None:
        """The most frequent pair, with the lowest ids among equals; None if none is frequent enough."""
        while self._heap:
            negative_count, pair = heapq.heappop(self._heap)
            count = self._counts[pair]
            if count == -negative_count:
                return pair
            # Out of date: a pair that grew has a newer entry already, and one that shrank gets one here.
            if self._min_frequency <= count < -negative_count:
                heapq.heappush(self._heap, (-count, pair))
        return None

    def merge(self, pair: Pair, merged: int) -> None:
        """Replaces the pair by one piece, from left to right, wherever it occurs."""
        changes: defaultdict[Pair, int] = defaultdict(int)
        words, counts, places = self._words, self._word_counts, self._places
        left, right = pair
        joined = [merged]
        for index in places.pop(pair):
            word = words[index]
            at = 0
            # A word may be listed twice, or have lost the pair to another merge.
            while left in word[at:-1]:
                at = word.index(left, at) + 1
                if word[at] != right:
                    continue
                word[at - 1 : at + 1] = joined
                # The neighbours of the pair become neighbours of the new piece.
                if at > 1:
                    before = word[at - 2]
                    changes[before, left] -= counts[index]
                    changes[before, merged] += counts[index]
                    places[before, merged].append(index)
                if at < len(word):
                    after = word[at]
                    changes[right, after] -= counts[index]
                    changes[merged, after] += counts[index]
                    places[merged, after].append(index)
        for changed, difference in changes.items():
            self._counts[changed] += difference
            if self._counts[changed] <= 0:
                del self._counts[changed]
                places.pop(changed, None)
            elif difference > 0 and self._counts[changed] >= self._min_frequency:
                heapq.heappush(self._heap, (-self._counts[changed], changed))
        self._counts.pop(pair, None)
