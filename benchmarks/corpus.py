"""Text to measure data preparation on: whole documents of real files, as many MB as wanted, mixed alike at any size."""

import itertools
from collections.abc import Iterator
from pathlib import Path

from data_prep import readers
from data_prep.sentences import document_sentences


def write_mixture(paths: list[Path], megabytes: float, target: Path) -> int:
    """Documents of the files, a blank line after each, until so many MB are written; returns the bytes.

    Each file gives the share of the text that it has of the files' bytes, in turns, so that a shorter text is like a
    longer one; one that has no more documents begins anew.
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
    """The same documents with a sentence a line, as google-research/bert wants them; returns the sentences."""
    sentences = 0
    with target.open("w", encoding="utf-8") as file:
        for document in readers.documents(text):
            lines = document_sentences(document)
            sentences += len(lines)
            file.write("\n".join(lines) + "\n\n")
    return sentences


def _endless(path: Path) -> Iterator[str]:
    return itertools.chain.from_iterable(readers.documents(path) for _ in itertools.repeat(None))
