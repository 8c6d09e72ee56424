"""The whole corpus of a job: its files with their weights, and their documents in order, refused ones counted."""

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
from data_prep import checksums
from data_prep.readers import json_and_parquet, places, plain_text, streams, tfds_corpus
from data_prep.readers.refusal import Items, Refusal
from data_prep.readers.streams import OnRead, nothing

DOCUMENT = ("blank_line", "file")
ON_ERROR = ("fail", "skip")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")


class Source(NamedTuple):
    """A file, or a split of a TFDS dataset."""

    path: str
    bytes: int  # as stored
    weight: float = 1.0  # copies of each document; of a fraction, that share of the documents
    folder: bool = False  # what a pattern names and cannot be read


@dataclass(frozen=True)
class Reading:
    """How documents are read. Raises UserError for a choice that is not there."""

    text_field: str = "text"  # of JSON lines, Parquet and TFDS
    document: str = "blank_line"  # what parts the documents of text: blank_line, or file (a file is one)
    on_error: str = "fail"

    def __post_init__(self) -> None:
        for name, value, known in (("document", self.document, DOCUMENT), ("on_error", self.on_error, ON_ERROR)):
            if value not in known:
                raise UserError(f"--{name} {value} is not here; there is: {', '.join(known)}")


def read(path: str, reading: Reading = Reading(), on_read: OnRead = nothing) -> Items:
    """The documents of one source as UTF-8, each one a Refusal where it cannot be used."""
    if path.startswith(tfds_corpus.PREFIX):
        return tfds_corpus.documents(path, reading.text_field, on_read)
    if places.is_special(path):
        return iter([_special(path)])
    kind = streams.suffixes(path)[0]
    if kind in JSON_SUFFIXES:
        return json_and_parquet.jsonl_documents(path, reading.text_field, on_read)
    if kind == ".parquet":
        return json_and_parquet.parquet_documents(path, reading.text_field, on_read)
    if reading.document == "file":
        return plain_text.file_document(path, on_read)
    return plain_text.text_documents(path, on_read)


def find_sources(pattern: str, weights: Sequence[float] = ()) -> tuple[Source, ...]:
    """The sorted sources of a pattern, or of several parted by commas, each pattern with its weight (1 by default).

    A file comes once, whichever patterns and links name it. A folder comes along only where it was asked for: by its
    name, or by a pattern that ends in more than stars. Raises UserError for a pattern that matches nothing or a file of
    a finished output, as its vocab.txt, and for weights that do not fit the patterns.
    """
    parts = patterns(pattern)
    if weights and len(weights) != len(parts):
        raise UserError(f"--weights has {len(weights)} numbers, --input {len(parts)} patterns; give one for each")
    if any(not 0 < weight <= 1000 for weight in weights):
        raise UserError(
            f"--weights {','.join(f'{weight:g}' for weight in weights)}; each must be above 0, at most 1000"
        )
    is_output = functools.cache(_is_output)  # for the time of this search
    found: dict[str, Source] = {}  # by what is at the end of links and dots
    for part, weight in zip(parts, weights or [1.0] * len(parts), strict=True):
        for source in _sources(part, weight):
            named = source.path
            real = named if places.is_remote(named) or named.startswith(tfds_corpus.PREFIX) else os.path.realpath(named)
            if output := _output_of(real, is_output):
                raise UserError(
                    f"--input {part!r} names {named}, a file of {output}, which build_examples made. Name the text "
                    "alone, or move that elsewhere"
                )
            before = found.setdefault(real, source)
            if before.weight != weight:
                raise UserError(
                    f"--weights: {named} is in two patterns of --input, of weights {before.weight:g} and {weight:g}"
                )
    return tuple(sorted(found.values()))


def patterns(pattern: str) -> list[str]:
    """A name with a comma in it is a name first, and several patterns only if there is no such file."""
    parts = [part.strip() for part in pattern.split(",") if part.strip()]
    if len(parts) < 2 or (not places.is_remote(pattern) and places.matches(pattern)):
        return [pattern.strip()]
    return parts


def _sources(pattern: str, weight: float) -> list[Source]:
    if pattern.startswith(tfds_corpus.PREFIX):
        return [Source(pattern, tfds_corpus.size(pattern), weight)]
    matches = places.matches(pattern)
    if not matches and "://" in pattern and not places.is_remote(pattern):
        raise UserError(f"--input {pattern!r} is not read. Give local paths, gs://, s3:// or tfds:NAME")
    if not matches:
        raise UserError(f"--input {pattern!r} matches no file. Check the path, and quote the pattern")
    any_name = set(pattern.rpartition("/")[2]) == {"*"}
    return [Source(*match[:2], weight, match.folder) for match in matches if not (match.folder and any_name)]


@dataclass
class Corpus:
    """Reads sources in order, in as many passes as the greatest weight takes; after that, says what it refused.

    Raises UserError for a folder or a pipe among the sources, unless reading.on_error is skip.
    """

    sources: tuple[Source, ...]
    reading: Reading = Reading()
    refused: Counter[str] = field(default_factory=Counter)  # documents, or rests of files, by reason
    bytes_read: int = 0  # of total_bytes, as stored

    def __post_init__(self) -> None:
        self.passes = max((math.ceil(source.weight) for source in self.sources), default=0)
        self.total_bytes = sum(source.bytes * math.ceil(source.weight) for source in self.sources)
        if self.reading.on_error == "fail":
            for source in self.sources:
                if source.folder:
                    raise _folder(source.path)
                if places.is_special(source.path):
                    raise _special(source.path)

    def documents(self) -> Iterator[str]:
        """The documents of all passes. Raises as `texts` does."""
        for document in self.texts():
            if document is not None:
                yield document.decode()

    def texts(self) -> Iterator[bytes | None]:
        """The documents as UTF-8, copies in later passes; None parts the passes.

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
        before, items = self.bytes_read, 0
        for item in iter([_folder(source.path)]) if source.folder else read(source.path, self.reading, self._on_read):
            items += 1
            if isinstance(item, Refusal):
                self._refuse(item, number)
            elif not item or item.isspace():
                self._count("empty_text", number)
            elif share == 1.0 or _chosen(item, share):
                yield item
            else:
                self._count("not_sampled", number)
        if not items:
            self._refuse(Refusal("empty_file", source.path, "no document in it", "Remove it from --input"), number)
        self.bytes_read = before + source.bytes

    def _on_read(self, size: int) -> None:
        self.bytes_read += size

    def _refuse(self, refusal: Refusal, number: int) -> None:
        if self.reading.on_error == "fail":
            raise refusal
        self._count(refusal.reason, number)

    def _count(self, reason: str, number: int) -> None:
        """Counts what the first pass leaves out; what a later one leaves out is no more than a copy not made."""
        if not number:
            self.refused[reason] += 1


def _folder(path: str) -> Refusal:
    return Refusal("folder", path, "a folder where a file was wanted", f"Name its files, for example '{path}/*.txt'")


def _special(path: str) -> Refusal:
    return Refusal("unreadable_file", path, "pipes and devices are not read", "Write the text to a file and name that")


def _chosen(document: bytes, share: float) -> bool:
    """Whether a document is in a share of all: by its hash, and not by the half of it that chooses for eval."""
    digest = hashlib.blake2b(document, digest_size=16).digest()
    return int.from_bytes(digest[8:]) < math.floor(fractions.Fraction(share) * (1 << 64))


def _output_of(path: str, is_output: Callable[[Path], bool]) -> str:
    """The finished output that lists a local file, an absolute path, as its own; empty for none."""
    around = Path(path).parents if os.path.isabs(path) else ()
    folder = next(filter(is_output, around), None)
    own = folder is not None and Path(path).relative_to(folder).as_posix() in checksums.read(folder)
    return str(folder) if own else ""


def _is_output(folder: Path) -> bool:
    return (folder / MANIFEST).exists() and (folder / checksums.SUMS).exists()
