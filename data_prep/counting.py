"""Counting the words of a corpus, of any size and script, in bounded memory; the result depends on the text alone.

Chunks between white spaces are counted first, which is quick, and parted into words by the tokenizer's own rules only
once each. Two things keep this small:
  - scripts without spaces (Chinese, Japanese, Thai ...) would make every sentence a chunk of its own. Such a chunk,
    and any that is longer than LONGEST_WORD, is parted into words at once, and a word longer than that is cut into
    windows (`windows`), of which all but the first are marked as the inside of a word. Only pairs of pieces across a
    cut go unseen.
  - beyond `max_chunks` distinct chunks, the counts are thinned by threshold sampling (Duffield, Lund and Thorup 2005,
    "Learn more, sample less"): for a threshold t, a count c >= t stays as it is, a smaller one becomes t with
    probability c / t and goes otherwise. The expected count of everything stays what it was, so that the many rare
    words keep their weight together, as the characters and pairs that they hold do; forgetting them (lossy counting)
    would make unspaced text vanish. The choice is by hash of the chunk, never by chance.
"""

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from bert_jax.array_types import UInt64
from bert_jax.data import hashing

# Distinct chunks held at once; see the figures in data_prep.train_tokenizer's help.
MAX_CHUNKS = 1_000_000
# Characters; German compounds seldom reach it, and a Thai phrase holds about as many.
LONGEST_WORD = 32
# Share of the text by the characters that get a token, unless they are bytes; as in SentencePiece.
CHARACTER_COVERAGE = 0.9995
# Text counted in one go.
BLOCK_CHARACTERS = 1 << 20
# Chunks of these scripts are parted at once: Thai, Lao, Tibetan, Burmese, Khmer, kana, and CJK ideographs.
_UNSPACED = re.compile("[\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
# Marks that belong to the character before them, which windows do not part: variation selectors, joiners and the
# combining ones of the scripts above and of Latin.
_CLINGING = re.compile(
    "[\u0300-\u036f\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u0eb1\u0eb4-\u0ebc\u0ec8-\u0ecd\u0f71-\u0f84\u102b-\u103e\u17b4-\u17d3"
    "\u200c\u200d\u3099\u309a\ufe00-\ufe0f]"
)
_WORD = "\n"  # begins the key of what is a word already; no chunk holds a line end


@runtime_checkable
class WordSplitter(Protocol):
    """What a kind of vocabulary takes for a word."""

    def chunks(self, text: str) -> list[str]:
        """The chunks of a text between white spaces; quick."""
        ...

    def words(self, chunk: str) -> Iterable[str]:
        """The words of a chunk, none longer than a window (of `windows`)."""
        ...


class ChunkCounter:
    """How often each chunk of the texts added so far occurs.

    counts       by chunk; no more than max_chunks after each `add`
    characters   of all texts added
    thinned      how often the counts had to be thinned
    """

    def __init__(self, splitter: WordSplitter, max_chunks: int = MAX_CHUNKS) -> None:
        self._splitter = splitter
        self._max_chunks = max_chunks
        self.counts: dict[str, int] = {}
        self.characters = 0
        self.thinned = 0

    def add(self, documents: Iterable[str]) -> None:
        """Counts the chunks of some documents."""
        for text in _blocks(documents):
            self.characters += len(text)
            block = Counter(self._splitter.chunks(text))
            unspaced = [
                chunk
                for chunk in block
                if len(chunk) > LONGEST_WORD or not (chunk.isascii() or _UNSPACED.search(chunk) is None)
            ]
            for chunk in unspaced:
                count = block.pop(chunk)
                for word in self._splitter.words(chunk):
                    block[_WORD + word] += count
            counts, known = self.counts, self.counts.get
            for chunk, count in block.items():
                counts[chunk] = known(chunk, 0) + count
            if len(self.counts) > self._max_chunks:
                self.thin(self._max_chunks // 2)

    def thin(self, limit: int) -> None:
        """Leaves about `limit` chunks or fewer, without bias; see above."""
        counts = np.fromiter(self.counts.values(), np.int64, len(self.counts))
        threshold = 2
        while np.minimum(counts, threshold).sum() > limit * threshold:
            threshold *= 2
        self.thinned += 1
        drawn = _hashes(self.counts, self.thinned) % np.uint64(threshold)
        kept = drawn.astype(np.int64) < counts
        raised = np.maximum(counts, threshold).tolist()
        self.counts = {chunk: raised[index] for index, chunk in enumerate(self.counts) if kept[index]}

    def scaled(self, numerator: int, denominator: int) -> dict[str, int]:
        """The counts times a fraction, each rounded up or down by hash so that the expected one is exact."""
        products = np.fromiter(self.counts.values(), np.int64, len(self.counts)) * numerator
        drawn = _hashes(self.counts, 0) % np.uint64(denominator)
        rounded = products // denominator + (drawn.astype(np.int64) < products % denominator)
        return {chunk: count for chunk, count in zip(self.counts, rounded.tolist(), strict=True) if count}


def count_words(chunks: Mapping[str, int], splitter: WordSplitter) -> dict[str, int]:
    """How often each word occurs, from the counts of chunks."""
    counts: Counter[str] = Counter()
    for chunk, count in chunks.items():
        if chunk.startswith(_WORD):
            counts[chunk[len(_WORD) :]] += count
        else:
            for word in splitter.words(chunk):
                counts[word] += count
    return dict(counts)


def windows(word: str) -> list[str]:
    """A word in pieces of at most LONGEST_WORD characters, about equal, marks left with what they belong to."""
    if len(word) <= LONGEST_WORD:
        return [word]
    parts = -(-len(word) // LONGEST_WORD)
    cuts = [0]
    for part in range(1, parts):
        cut = len(word) * part // parts
        while cut > cuts[-1] + 1 and _CLINGING.match(word, cut):
            cut -= 1
        cuts.append(cut)
    return [word[start:end] for start, end in zip(cuts, [*cuts[1:], len(word)], strict=True)]


def _blocks(documents: Iterable[str]) -> Iterator[str]:
    """Texts of about BLOCK_CHARACTERS, documents joined by line ends, and cut, if need be, at white space."""
    waiting: list[str] = []
    characters = 0
    for document in documents:
        while len(document) > BLOCK_CHARACTERS:
            # A line end first: a word's place in its line may matter.
            cut = max(document.rfind(mark, BLOCK_CHARACTERS // 2, BLOCK_CHARACTERS) for mark in "\n ")
            cut = cut if cut > 0 else BLOCK_CHARACTERS
            yield document[:cut]
            document = document[cut:]
        waiting.append(document)
        characters += len(document)
        if characters > BLOCK_CHARACTERS:
            yield "\n".join(waiting)
            waiting, characters = [], 0
    if waiting:
        yield "\n".join(waiting)


def _hashes(chunks: Iterable[str], salt: int) -> UInt64[np.ndarray, " chunks"]:
    """Independent for each salt."""
    sums = np.fromiter((zlib.crc32(chunk.encode()) for chunk in chunks), np.int64)
    return hashing.combine(salt, sums)
