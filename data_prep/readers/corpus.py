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
from bert_jax.storage.listing import find_files
from bert_jax.storage.local import INCOMPLETE, MARKER
from bert_jax.storage.remote import is_remote
from data_prep import checksums
from data_prep.readers import file_blocks, hub_dataset, saved_dataset, tfds_corpus
from data_prep.readers.reading import Reading, check_format, read, refuse_special
from data_prep.readers.refusal import Omission, Refusal


class Source(NamedTuple):
    """A file, or a split of a TFDS dataset."""

    path: str
    bytes: int  # as stored
    weight: float = 1.0  # how often each document is read; a fraction reads that share of the documents
    folder: bool = False  # a folder, which a pattern matches but no reader can read


def find_sources(pattern: str, weights: Sequence[float] = (), own: Sequence[Path] = ()) -> tuple[Source, ...]:
    """The sorted sources of one or several comma-separated patterns, each pattern with its weight (1 by default).

    A file appears once, whichever patterns and links lead to it. A folder is a source (and an error) only if it was
    named, or matched by more than stars. Files in the folders `own`, where the job itself writes, are left out. Raises
    UserError for a pattern that matches nothing, for one that matches a file of an output, finished or not, such as its
    vocab.txt, and for weights that do not fit the patterns.
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
    inside = tuple(os.path.realpath(folder) + os.sep for folder in own)
    found: dict[str, Source] = {}  # by the path without links and dots
    for part, weight in zip(parts, weights or [1.0] * len(parts), strict=True):
        for source in _sources(part, weight):
            named = source.path
            real = named if is_remote(named) or named.startswith(tfds_corpus.PREFIX) else os.path.realpath(named)
            if real.startswith(inside):
                continue
            if output := _output_of(real, is_output):
                raise UserError(
                    f"--input {part!r} matches {named}, which belongs to {output}, an output of bert_jax. "
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
    if hub_dataset.is_name(pattern):
        pattern = hub_dataset.parquet_pattern(pattern)
    matches = find_files(pattern)
    if not matches and "://" in pattern and not is_remote(pattern):
        raise UserError(
            f"--input {pattern!r} is not supported. Use local paths, gs://, s3://, hf://, hf:ORG/NAME or tfds:NAME"
        )
    if not matches:
        hint = f"; hf:{pattern} is a data set of the Hugging Face Hub" if hub_dataset.may_be_name(pattern) else ""
        raise UserError(f"--input {pattern!r} matches no file. Check the path, and quote the pattern{hint}")
    only_stars = set(pattern.rpartition("/")[2]) == {"*"}
    sources = []
    for match in matches:
        if match.is_folder and (saved := saved_dataset.arrow_files(match.path)) is not None:
            sources += [Source(path, _stored_bytes(path), weight) for path in saved]
        elif not (match.is_folder and only_stars):
            sources.append(Source(*match[:2], weight, match.is_folder))
    return sources


def _stored_bytes(path: str) -> int:
    """The size of a file; 0 if there is none, which is reported when it is read."""
    return sum(file.bytes for file in find_files(path))


@dataclass
class Corpus:
    """Reads sources in order, in as many passes as the largest weight needs, and counts what it refuses.

    Raises UserError for a folder, a pipe or a file in a format that is not read among the sources, unless
    reading.on_error is skip; and in any case for packages that a format needs and that are not installed.
    """

    sources: tuple[Source, ...]
    reading: Reading = field(default_factory=Reading)
    refused: Counter[str] = field(default_factory=Counter)  # documents, or rests of files, by reason
    bytes_read: int = 0  # of total_bytes, as stored

    def __post_init__(self) -> None:
        self.passes = max((math.ceil(source.weight) for source in self.sources), default=0)
        self.total_bytes = sum(source.bytes * math.ceil(source.weight) for source in self.sources)
        for source in self.sources:  # found now rather than hours into the job
            try:
                check_readable(source)
                check_format(source.path, self.reading)
            except Refusal:
                if self.reading.on_error == "fail":
                    raise

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
            elif isinstance(item, Omission):
                self._count(item.reason, number)
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


def check_readable(source: Source) -> None:
    """Raises Refusal for a folder, a pipe or a device."""
    if source.folder:
        raise file_blocks.folder(source.path)
    refuse_special(source.path)


def _chosen(document: bytes, share: float) -> bool:
    """Whether a document is in a share of all documents, by one half of its hash; the other half chooses for eval."""
    digest = hashlib.blake2b(document, digest_size=16).digest()
    return int.from_bytes(digest[8:]) < math.floor(fractions.Fraction(share) * (1 << 64))


def _output_of(path: str, is_output: Callable[[Path], bool]) -> str:
    """The output that has a local file with an absolute path as its own; empty if there is none.

    A finished one lists its files. All files of an unfinished one are its own.
    """
    around = Path(path).parents if os.path.isabs(path) else ()
    folder = next(filter(is_output, around), None)
    if folder is None:
        return ""
    finished = (folder / MANIFEST).exists()
    return str(folder) if not finished or Path(path).relative_to(folder).as_posix() in checksums.read(folder) else ""


def _is_output(folder: Path) -> bool:
    if folder.name.endswith(INCOMPLETE):
        return (folder / MARKER).exists() or (folder / "job" / "arguments.json").exists()
    return (folder / MANIFEST).exists() and (folder / checksums.SUMS).exists()
