"""Counts words in bounded memory, and weights the counts for several languages.

Chunks between white space are counted first, which is fast. Then each distinct chunk is split into words once, by the
tokenizer's own rules. The result depends only on the text.
"""

# Two measures bound the memory:
# - In scripts without spaces (Chinese, Japanese, Thai ...) every sentence would be a chunk. Such a chunk, and any with
#   more than LONGEST_WORD characters, is split into words immediately, and a longer word into windows (`windows`); all
#   but the first are marked as word-internal. Only pairs of pieces across such a split are missed.
# - Beyond `max_chunks` distinct chunks, threshold sampling thins the counts (Duffield, Lund and Thorup 2005, "Learn
#   more, sample less"): for a threshold t, a count c >= t stays; a smaller one becomes t with probability c / t and is
#   removed otherwise. Expected counts stay the same, so rare words keep their total weight, and so do their characters
#   and pairs. Dropping rare words instead (lossy counting) would remove unspaced text. The chunk's hash decides, not a
#   random generator.

import itertools
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from bert_jax.array_types import UInt64
from bert_jax.data import order

# Distinct chunks in memory; bert-jax train-tokenizer --help has the memory that they take.
MAX_CHUNKS = 1_000_000
# In characters: German compounds rarely reach it, and a Thai phrase has about as many.
LONGEST_WORD = 32
# Share of the text whose characters get a token (unless tokens are bytes), as in SentencePiece.
CHARACTER_COVERAGE = 0.9995
# Size of the text that is counted in one step.
BLOCK_CHARACTERS = 1 << 20
# Chunks of these scripts are split immediately: Thai, Lao, Tibetan, Burmese, Khmer, kana, and CJK ideographs.
_UNSPACED = re.compile("[\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
# Marks that belong to the character before them and are not separated from it: variation selectors, joiners, and the
# combining marks of the scripts above and of Latin.
_COMBINING = re.compile(
    "[\u0300-\u036f\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u0eb1\u0eb4-\u0ebc\u0ec8-\u0ecd\u0f71-\u0f84\u102b-\u103e\u17b4-\u17d3"
    "\u200c\u200d\u3099\u309a\ufe00-\ufe0f]"
)
_TURKIC = re.compile("[\u0130\u0131]")  # İ and ı
_WORD = "\n"  # prefix of keys that are words already; chunks that begin with it are split into words immediately


@runtime_checkable
class WordSplitter(Protocol):
    """Splits text into words for one kind of vocabulary."""

    def chunks(self, text: str) -> list[str]:
        """Splits a text at white space. Called on all of the text, so it must be fast."""
        ...

    def words(self, chunk: str) -> Iterable[str]:
        """Splits a chunk into words, none longer than a window (see `windows`)."""
        ...

    def unknown(self, chunk: str) -> int:
        """Counts a chunk's characters in words too long for any vocabulary of this kind."""
        return 0

    def changed(self, chunk: str) -> str:
        """A chunk lower-cased or without accents, if the tokenizer's normalization changes it so; otherwise empty."""
        return ""


class ChunkCounter:
    """Counts chunks of text."""

    def __init__(self, splitter: WordSplitter, max_chunks: int = MAX_CHUNKS) -> None:
        self._splitter, self._max_chunks = splitter, max_chunks
        self.counts: dict[str, int] = {}  # by chunk; at most max_chunks after each `add`
        self.characters = 0  # in all texts
        self.unknown = 0  # characters in words that are too long for any vocabulary
        self.split = 0  # chunks that were split into words immediately, without white space alone
        self.changed = 0  # those among them that normalization changes
        self.thinned = 0  # how often the counts were thinned

    def add(self, documents: Iterable[str]) -> None:
        """Counts the documents' chunks."""
        for texts in _blocks(documents):
            self.characters += sum(map(len, texts)) + len(texts) - 1
            block = Counter(itertools.chain.from_iterable(map(self._splitter.chunks, texts)))
            for chunk in list(block):
                if len(chunk) > LONGEST_WORD or chunk[0] == _WORD or (not chunk.isascii() and _UNSPACED.search(chunk)):
                    count = block.pop(chunk)
                    self.unknown += count * self._splitter.unknown(chunk)
                    self.split += 0 if chunk.isspace() else count
                    self.changed += count * bool(self._splitter.changed(chunk))
                    for word in self._splitter.words(chunk):
                        block[_WORD + word] += count
            counts, known = self.counts, self.counts.get  # local names, because this is the innermost loop
            for chunk, count in block.items():
                counts[chunk] = known(chunk, 0) + count
            if len(self.counts) > self._max_chunks:
                self.thin(self._max_chunks // 2)

    def thin(self, limit: int) -> None:
        """Reduces the counts to about `limit` chunks or fewer, without bias, by threshold sampling (see above)."""
        counts = np.fromiter(self.counts.values(), np.int64, len(self.counts))
        # min(c, t) / t is the probability that a chunk stays, and the sum of these the expected number of chunks.
        threshold = 2
        while np.minimum(counts, threshold).sum() > limit * threshold:
            threshold *= 2
        self.thinned += 1
        sampled = (_hashes(self.counts, self.thinned) % np.uint64(threshold)).astype(np.int64)
        raised = np.where(sampled < counts, np.maximum(counts, threshold), 0).tolist()
        self.counts = {chunk: count for chunk, count in zip(self.counts, raised, strict=True) if count}

    def scaled(self, numerator: int, denominator: int) -> dict[str, int]:
        """Multiplies the counts by a fraction, and rounds them by a hash, which keeps expected counts exact."""
        products = np.fromiter(self.counts.values(), np.int64, len(self.counts)) * numerator
        sampled = (_hashes(self.counts, 0) % np.uint64(denominator)).astype(np.int64)
        rounded = products // denominator + (sampled < products % denominator)
        return {chunk: count for chunk, count in zip(self.counts, rounded.tolist(), strict=True) if count}


def count_words(chunks: Mapping[str, int], splitter: WordSplitter) -> dict[str, int]:
    """Turns chunk counts into word counts."""
    counts: Counter[str] = Counter()
    for chunk, count in chunks.items():
        if chunk.startswith(_WORD):
            counts[chunk[len(_WORD) :]] += count
        else:
            for word in splitter.words(chunk):
                counts[word] += count
    return dict(counts)


class Changes(NamedTuple):
    """What lower-casing and stripping accents change."""

    share: float  # of the chunks
    example: tuple[str, str]  # the most frequent changed chunk, before and after; empty if there is none
    turkic: float  # share of the chunks with ı or İ


def count_changes(chunks: Mapping[str, int], splitter: WordSplitter, split: int = 0, changed: int = 0) -> Changes:
    """Counts changed chunks.

    Args:
        split, changed: Those of a ChunkCounter, whose `counts` have no such chunks.
    """
    total, most, example, turkic = split, 0, ("", ""), 0
    for chunk, count in chunks.items():
        if chunk.startswith(_WORD) or chunk.isspace():
            continue
        total += count
        turkic += count * bool(_TURKIC.search(chunk))
        if normal := splitter.changed(chunk):
            changed += count
            if count > most:
                most, example = count, (chunk.strip(), normal.strip())
    return Changes(changed / max(total, 1), example, turkic / max(total, 1))


def windows(word: str) -> list[str]:
    """Splits a word evenly into windows of at most LONGEST_WORD characters, never before a combining mark."""
    parts = -(-len(word) // LONGEST_WORD)
    cuts = [0]
    for part in range(1, parts):
        cut = len(word) * part // parts
        while cut > cuts[-1] + 1 and _COMBINING.match(word, cut):
            cut -= 1
        cuts.append(cut)
    return [word[start:end] for start, end in zip(cuts, [*cuts[1:], len(word)], strict=True)]


def _blocks(documents: Iterable[str]) -> Iterator[list[str]]:
    """Groups documents, or splits them at white space, into texts of about BLOCK_CHARACTERS together."""
    waiting: list[str] = []
    characters = 0
    for document in documents:
        while len(document) > BLOCK_CHARACTERS:
            # Line ends are preferred, because the position of a word in its line may matter.
            cut = max(document.rfind(mark, BLOCK_CHARACTERS // 2, BLOCK_CHARACTERS) for mark in "\n ")
            cut = cut if cut > 0 else BLOCK_CHARACTERS
            yield [document[:cut]]
            document = document[cut:]
        waiting.append(document)
        characters += len(document)
        if characters > BLOCK_CHARACTERS:
            yield waiting
            waiting, characters = [], 0
    if waiting:
        yield waiting


def _hashes(chunks: Iterable[str], salt: int) -> UInt64[np.ndarray, " chunks"]:
    # Hashes by different salts are independent.
    sums = np.fromiter((zlib.crc32(chunk.encode()) for chunk in chunks), np.int64)
    return order.combine(salt, sums)


# Word counts for several languages, weighted so that small ones are not lost (Lample and Conneau 2019, section 3.1).
#
# A language i with the share p_i of all characters counts as if its share were q_i = p_i^alpha / sum_j p_j^alpha. alpha
# is 0.5 in XLM and 0.3 in XLM-R (Conneau et al. 2020); 1 leaves the text as it is, and 0 makes all languages equal.
# (XLM counts sentences; characters do not depend on how a text is divided into lines.) The largest language keeps its
# counts, and the others are multiplied: this gives the expectation of sampling without its noise.

DENOMINATOR = 1000  # of the factors: whole thousandths do not depend on how a machine rounds a power


class Share(NamedTuple):
    """A language's shares."""

    language: str
    text: float  # of the text's characters
    counted: float  # of the weighted counts
    unknown: float  # of its own characters: those in words that are too long


def factors(characters: Sequence[int], alpha: float) -> list[int]:
    """Computes factors for the languages' counts, in units of 1 / DENOMINATOR."""
    largest = max(characters)
    return [round(DENOMINATOR * (size / largest) ** (alpha - 1)) if size else 0 for size in characters]


def count_chunks(
    languages: Iterable[tuple[str, Iterable[str]]], splitter: WordSplitter, alpha: float, max_chunks: int = MAX_CHUNKS
) -> tuple[dict[str, int], list[Share]]:
    """Counts and weights the chunks of several languages, within `max_chunks` chunks of memory.

    Args:
        languages: Names with their documents.

    Returns:
        The weighted counts, and the shares of all languages that have any text.
    """
    counters: dict[str, ChunkCounter] = {}
    for name, documents in languages:
        counter = ChunkCounter(splitter, max_chunks // 2)
        counter.add(documents)
        if counter.characters:
            counters[name] = counter
        # Half of the memory is for finished languages, and half for the one that is being counted.
        while sum(len(counter.counts) for counter in counters.values()) > max_chunks // 2:
            largest = max(counters.values(), key=lambda counter: len(counter.counts))
            largest.thin(len(largest.counts) // 2)
    if not counters:
        return {}, []
    sizes = [counter.characters for counter in counters.values()]
    multiples = factors(sizes, alpha)
    total: Counter[str] = Counter()
    for counter, multiple in zip(counters.values(), multiples, strict=True):
        total.update(counter.scaled(multiple, DENOMINATOR))
    counted = [size * multiple for size, multiple in zip(sizes, multiples, strict=True)]
    shares = [
        Share(name, counter.characters / sum(sizes), weighed / sum(counted), counter.unknown / counter.characters)
        for (name, counter), weighed in zip(counters.items(), counted, strict=True)
    ]
    return dict(total), shares
