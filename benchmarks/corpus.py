"""Text for measuring data preparation: whole documents of real files, in the same mixture at any size in MB."""

import itertools
import string
from collections.abc import Iterator
from pathlib import Path

from data_prep.readers import corpus as readers
from data_prep.sentences import document_sentences

_PERTURBED = 8  # one of so many words changes from pass to pass


def write_mixture(paths: list[Path], megabytes: float, target: Path) -> int:
    """Writes documents, with blank lines between them, up to a size in MB, and returns the bytes.

    Files take turns in proportion to their sizes, so that a short text resembles a long one. After its last document, a
    file starts again, with changed words in every line, so that no cache of words and no deduplication recognizes them.
    """
    sizes = [path.stat().st_size for path in paths]
    streams = [_endless(path) for path in paths]
    given = [0] * len(paths)
    with target.open("wb") as file:
        while sum(given) < megabytes * 1e6:
            turn = min(range(len(paths)), key=lambda number: given[number] / sizes[number])
            given[turn] += file.write(next(streams[turn]).encode() + b"\n\n")
    return sum(given)


def write_sentences(text: Path, target: Path) -> int:
    """Writes the documents with one sentence per line, as google-research/bert needs; returns the sentence count."""
    sentences = 0
    with target.open("w", encoding="utf-8") as file:
        for document in readers.documents(text):
            lines = document_sentences(document)
            sentences += len(lines)
            file.write("\n".join(lines) + "\n\n")
    return sentences


def _endless(path: Path) -> Iterator[str]:
    """The documents of a file, again and again, from the second pass on with changed words."""
    for number in itertools.count():
        for document in readers.documents(path):
            yield "\n".join(_perturbed(line, number) for line in document.split("\n")) if number else document


def _perturbed(line: str, number: int) -> str:
    """A line in which every eighth word, from one that the pass chooses, has letters of the pass in its middle.

    Five of eight runs of five words are then new, so the passes are no near-duplicates of each other.
    """
    words = line.split(" ")
    letters = string.ascii_lowercase[number % 26] * (1 + number // 26)
    for place in range(number % min(_PERTURBED, len(words)), len(words), _PERTURBED):
        middle = len(words[place]) // 2
        words[place] = f"{words[place][:middle]}{letters}{words[place][middle:]}"
    return " ".join(words)
