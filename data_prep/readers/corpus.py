"""The corpus of a job: its files with their weights, and their documents in order, with unusable ones counted."""

import fractions
import functools
import hashlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bert_jax.command import UserError
from bert_jax.data.manifest import MANIFEST
from bert_jax.storage.compression import OnRead, ignore_progress, suffixes
from bert_jax.storage.listing import find_files, is_special
from bert_jax.storage.remote import is_remote
from data_prep import checksums
from data_prep.readers import file_blocks, json_and_parquet, plain_text, tfds_corpus
from data_prep.readers.refusal import Items, Refusal

DOCUMENT = ("blank_line", "file")
ON_ERROR = ("fail", "skip")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")


class Source(NamedTuple):
    """A file, or a split of a TFDS dataset."""

    path: str
    bytes: int  # as stored
    weight: float = 1.0  # how often each document is read; a fraction reads that share of the documents
    folder: bool = False  # a folder, which a pattern matches but no reader can read


@dataclass(frozen=True)
class Reading:
    """How documents are read. Raises UserError for an unknown choice."""

    text_field: str = "text"  # the field of JSON lines, Parquet and TFDS that holds the text
    document: str = "blank_line"  # what separates the documents of a text file; with "file" each file is one document
    on_error: str = "fail"  # what happens to input that cannot be used

    def __post_init__(self) -> None:
        for name, value, known in (("document", self.document, DOCUMENT), ("on_error", self.on_error, ON_ERROR)):
            if value not in known:
                raise UserError(f"unknown --{name} {value}; choose from {', '.join(known)}")


def read(path: str, reading: Reading = Reading(), on_read: OnRead = ignore_progress) -> Items:
    """The documents of one source as UTF-8, with a Refusal in place of each one that cannot be used.

    What makes the rest of a source unusable is its last Refusal.
    """
    try:
        yield from _documents(path, reading, on_read)
    except Refusal as refusal:
        yield refusal


def _documents(path: str, reading: Reading, on_read: OnRead) -> Items:
    if path.startswith(tfds_corpus.PREFIX):
        return tfds_corpus.documents(path, reading.text_field, on_read)
    if is_special(path):
        raise _special(path)
    kind = suffixes(path)[0]
    if kind in JSON_SUFFIXES:
        return json_and_parquet.jsonl_documents(path, reading.text_field, on_read)
    if kind == ".parquet":
        return json_and_parquet.parquet_documents(path, reading.text_field, on_read)
    return plain_text.text_documents(path, on_read, whole=reading.document == "file")


def find_sources(pattern: str, weights: Sequence[float] = ()) -> tuple[Source, ...]:
    """The sorted sources of one or several comma-separated patterns, each pattern with its weight (1 by default).

    A file appears once, whichever patterns and links lead to it. A folder is a source (and an error) only if it was
    named, or matched by more than stars. Raises UserError for a pattern that matches nothing, for one that matches a
    file of a finished output, such as its vocab.txt, and for weights that do not fit the patterns.
    """
    parts = patterns(pattern)
    if weights and len(weights) != len(parts):
        raise UserError(
            f"--weights has {len(weights)} numbers and --input {len(parts)} patterns; give one number for each pattern"
        )
    if any(not 0 < weight <= 1000 for weight in weights):
        given = ",".join(f"{weight:g}" for weight in weights)
        raise UserError(f"--weights {given}: each weight must be above 0 and at most 1000")
    is_output = functools.cache(_is_output)  # for the time of this search
    found: dict[str, Source] = {}  # by the path without links and dots
    for part, weight in zip(parts, weights or [1.0] * len(parts), strict=True):
        for source in _sources(part, weight):
            named = source.path
            real = named if is_remote(named) or named.startswith(tfds_corpus.PREFIX) else os.path.realpath(named)
            if output := _output_of(real, is_output):
                raise UserError(
                    f"--input {part!r} matches {named}, which belongs to {output}, an output of build_examples. "
                    "Name only the text, or move the output"
                )
            before = found.setdefault(real, source)
            if before.weight != weight:
                raise UserError(
                    f"--weights: two patterns of --input match {named}, with weights {before.weight:g} and {weight:g}; "
                    "give both the same weight, or change one pattern"
                )
    return tuple(sorted(found.values()))


def patterns(pattern: str) -> list[str]:
    """Splits comma-separated patterns, unless a file with the whole name exists."""
    parts = [part.strip() for part in pattern.split(",") if part.strip()]
    if len(parts) < 2 or (not is_remote(pattern) and find_files(pattern)):
        return [pattern.strip()]
    return parts


def _sources(pattern: str, weight: float) -> list[Source]:
    if pattern.startswith(tfds_corpus.PREFIX):
        return [Source(pattern, tfds_corpus.size(pattern), weight)]
    matches = find_files(pattern)
    if not matches and "://" in pattern and not is_remote(pattern):
        raise UserError(f"--input {pattern!r} is not supported. Use local paths, gs://, s3:// or tfds:NAME")
    if not matches:
        raise UserError(f"--input {pattern!r} matches no file. Check the path, and quote the pattern")
    only_stars = set(pattern.rpartition("/")[2]) == {"*"}
    return [Source(*match[:2], weight, match.is_folder) for match in matches if not (match.is_folder and only_stars)]


@dataclass
class Corpus:
    """Reads sources in order, in as many passes as the largest weight needs, and counts what it refuses.

    Raises UserError for a folder or a pipe among the sources, unless reading.on_error is skip.
    """

    sources: tuple[Source, ...]
    reading: Reading = Reading()
    refused: Counter[str] = field(default_factory=Counter)  # documents, or rests of files, by reason
    bytes_read: int = 0  # of total_bytes, as stored

    def __post_init__(self) -> None:
        self.passes = max((math.ceil(source.weight) for source in self.sources), default=0)
        self.total_bytes = sum(source.bytes * math.ceil(source.weight) for source in self.sources)
        if self.reading.on_error == "fail":  # found now rather than hours into the job
            for source in self.sources:
                if source.folder:
                    raise file_blocks.folder(source.path)
                if is_special(source.path):
                    raise _special(source.path)

    def documents(self) -> Iterator[str]:
        """The documents of all passes. Raises as `texts` does."""
        for document in self.texts():
            if document is not None:
                yield document.decode()

    def texts(self) -> Iterator[bytes | None]:
        """The documents as UTF-8, copies in later passes; None separates the passes.

        What cannot be used raises Refusal (a UserError), or with on_error skip is counted in `refused`.
        """
        for number in range(self.passes):
            if number:
                yield None
            for source in self.sources:
                if source.weight > number:
                    yield from self._texts(source, number)

    def _texts(self, source: Source, number: int) -> Iterator[bytes]:
        share = min(1.0, source.weight - number)
        before, count = self.bytes_read, 0
        folder = iter([file_blocks.folder(source.path)])
        for item in folder if source.folder else read(source.path, self.reading, self._on_read):
            count += 1
            if isinstance(item, Refusal):
                self._refuse(item, number)
            elif not item or item.isspace():
                self._count("empty_text", number)
            elif share == 1.0 or _chosen(item, share):
                yield item
            else:
                self._count("not_sampled", number)
        if not count:
            refusal = Refusal("empty_file", source.path, "no document in it", "Remove it from --input")
            self._refuse(refusal, number)
        self.bytes_read = before + source.bytes

    def _on_read(self, size: int) -> None:
        self.bytes_read += size

    def _refuse(self, refusal: Refusal, number: int) -> None:
        if self.reading.on_error == "fail":
            raise refusal
        self._count(refusal.reason, number)

    def _count(self, reason: str, number: int) -> None:
        """Counts a document that the first pass leaves out; in a later pass only a copy is missing."""
        if not number:
            self.refused[reason] += 1


def _special(path: str) -> Refusal:
    what = "pipes and devices are not supported"
    return Refusal("unreadable_file", path, what, "Write the text to a file and name that")


def _chosen(document: bytes, share: float) -> bool:
    """Whether a document is in a share of all documents, by one half of its hash; the other half chooses for eval."""
    digest = hashlib.blake2b(document, digest_size=16).digest()
    return int.from_bytes(digest[8:]) < math.floor(fractions.Fraction(share) * (1 << 64))


def _output_of(path: str, is_output: Callable[[Path], bool]) -> str:
    """The finished output that lists a local file with an absolute path as its own; empty if there is none."""
    around = Path(path).parents if os.path.isabs(path) else ()
    folder = next(filter(is_output, around), None)
    listed = folder is not None and Path(path).relative_to(folder).as_posix() in checksums.read(folder)
    return str(folder) if listed else ""


def _is_output(folder: Path) -> bool:
    return (folder / MANIFEST).exists() and (folder / checksums.SUMS).exists()
