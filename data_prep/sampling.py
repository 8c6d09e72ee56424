"""Word counts of several languages, weighted so that small ones are not lost (Lample and Conneau 2019, section 3.1).

A language i with the share p_i of all characters counts as if its share were q_i = p_i^alpha / sum_j p_j^alpha. alpha
is 0.5 in XLM and 0.3 in XLM-R (Conneau et al. 2020); 1 leaves the text as it is, and 0 makes all languages equal. (XLM
counts sentences; characters do not depend on how a text is divided into lines.) The counts of the largest language
stay, and those of the others are multiplied, which gives the expectation of sampling without its noise.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from data_prep.counting import MAX_CHUNKS, ChunkCounter, WordSplitter

# Factors are fractions of integers, so that the rounding of a power does not depend on the machine.
DENOMINATOR = 1000


@dataclass(frozen=True)
class Share:
    """A language's share of the text and of the weighted counts, and the share of it in words that are too long."""

    language: str
    text: float
    counted: float
    unknown: float


def factors(characters: Sequence[int], alpha: float) -> list[int]:
    """The factors, in units of 1 / DENOMINATOR, by which the counts of each language are multiplied."""
    largest = max(characters)
    return [round(DENOMINATOR * (size / largest) ** (alpha - 1)) if size else 0 for size in characters]


def count_chunks(
    languages: Iterable[tuple[str, Iterable[str]]], splitter: WordSplitter, alpha: float, max_chunks: int = MAX_CHUNKS
) -> tuple[dict[str, int], list[Share]]:
    """The weighted counts of chunks over languages (names with documents), and the shares of those with any text.

    Never holds more than `max_chunks` chunks: the language with the most chunks is thinned first.
    """
    counters: dict[str, ChunkCounter] = {}
    for name, documents in languages:
        counter = ChunkCounter(splitter, max_chunks // 2)
        counter.add(documents)
        if counter.characters:
            counters[name] = counter
        while sum(len(each.counts) for each in counters.values()) > max_chunks // 2:
            largest = max(counters.values(), key=lambda each: len(each.counts))
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
