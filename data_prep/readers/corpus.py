"""The corpus of a job: how each format is read, the files with their weights, and their documents in order."""

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

from bert_jax.data.manifest import MANIFEST
from bert_jax.errors import UserError
from bert_jax.storage.files import INCOMPLETE, MARKER, OnRead, ignore_progress
from bert_jax.storage.remote import find_files, is_remote, is_special
from data_prep import output_files
from data_prep.readers import Items, Omission, Refusal, datasets, tables, text, web, wiki

DOCUMENT = ("blank_line", "file")
ON_ERROR = ("fail", "skip")


@dataclass(frozen=True)
class Reading:
    """How documents are read. Raises UserError for an unknown choice."""

    text_field: str = "text"  # the field or column of records that holds the text
    document: str = "blank_line"  # what separates the documents of a text file; with "file" each file is one document
    on_error: str = "fail"  # what happens to input that cannot be used
    input_format: str = "auto"  # the format of every file; "auto" takes that of its name
    document_separator: str = ""  # the line that separates the documents of a text file; "" for blank lines
    workers: int = 1  # processes that remove the markup of dumps of wikis, which takes longer than all other reading

    def __post_init__(self) -> None:
        choices = {"document": DOCUMENT, "on_error": ON_ERROR, "input_format": text.CHOICES}
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                raise UserError(f"unknown --{name} {value}; choose from {', '.join(known)}")
        if self.document_separator:
            self._check_separator()
        if self.of_text and self.input_format not in ("auto", "text"):
            raise _not_text(self, f"--input_format {self.input_format}", "its records are the documents")

    @property
    def of_text(self) -> str:
        """The flag that was given and that only text has; "" if there is none."""
        if self.document_separator:
            return "--document_separator"
        return "--document file" if self.document == "file" else ""

    def _check_separator(self) -> None:
        separator = self.document_separator
        if not separator.strip() or not separator.isprintable():
            raise UserError(
                f"--document_separator {separator!r}: give one line that holds more than white space, such as '---', "
                "or leave it out for blank lines"
            )
        if self.document == "file":
            raise UserError("--document file makes each file one document; give it or --document_separator, not both")


def read(path: str, reading: Reading = Reading(), on_read: OnRead = ignore_progress) -> Items:
    """The documents of one source as UTF-8, with a Refusal in place of each one that cannot be used.

    What makes the rest of a source unusable is its last Refusal.
    """
    try:
        yield from _documents(path, reading, on_read)
    except Refusal as refusal:
        yield refusal


def _documents(path: str, reading: Reading, on_read: OnRead) -> Items:
    if path.startswith(datasets.TFDS_PREFIX):
        return datasets.documents(path, reading.text_field, on_read)
    refuse_special(path)
    format = text.format_of(path, reading.input_format)
    text.check_installed(format)
    match format:
        case "jsonl":
            return tables.jsonl_documents(path, reading.text_field, on_read)
        case "parquet":
            return tables.parquet_documents(path, reading.text_field, on_read)
        case "arrow":
            return tables.arrow_documents(path, reading.text_field, on_read)
        case "csv" | "tsv":
            delimiter = "," if format == "csv" else "\t"
            return tables.table_documents(path, reading.text_field, delimiter, on_read)
        case "warc":
            return web.archive_documents(path, on_read)
        case "mediawiki":
            return wiki.article_documents(path, on_read, reading.workers)
    chosen = reading.input_format == "text"
    ends = text.ends(reading.document, reading.document_separator)
    return text.text_documents(path, on_read, ends, any_content=chosen)


def check_format(path: str, reading: Reading) -> None:
    """Raises UserError for a file in a format that is not read, or whose packages are not installed.

    So does a file whose format has documents, if a flag states what the documents of text are. It reads the first bytes
    of a local file. Those of a remote one are checked only when it is read.
    """
    format = _format_of(path, reading.input_format)
    if reading.of_text and format != "text":
        raise _not_text(reading, path, f"the records of {format} are the documents")
    if format == "tfds":
        return
    text.check_installed(format)
    if format in text.CHECKED and reading.input_format != "text" and not is_remote(path):
        head, _ = text.split_head(text.file_blocks(path), text.HEAD_BYTES)
        text.check_head(path, head, format)


def is_text(path: str, chosen: str) -> bool:
    """Whether a source is read as text, where `chosen` is the input_format."""
    try:
        return _format_of(path, chosen) == "text"
    except Refusal:
        return False


def _format_of(path: str, chosen: str) -> str:
    return "tfds" if path.startswith(datasets.TFDS_PREFIX) else text.format_of(path, chosen)


def _not_text(reading: Reading, what: str, why: str) -> UserError:
    return UserError(f"{what}: {why}, and {reading.of_text} is for text. Leave it out")


def refuse_special(path: str) -> None:
    """Raises Refusal for a pipe or a device."""
    if is_special(path):
        what = "pipes and devices are not supported"
        raise Refusal("unreadable_file", path, what, "Write the text to a file and name that")


# The corpus of a job: its files with their weights, and their documents in order, with unusable ones counted.


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
            real = named if is_remote(named) or named.startswith(datasets.TFDS_PREFIX) else os.path.realpath(named)
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
    if pattern.startswith(datasets.TFDS_PREFIX):
        return [Source(pattern, datasets.size(pattern), weight)]
    if datasets.is_name(pattern):
        pattern = datasets.parquet_pattern(pattern)
    matches = find_files(pattern)
    if not matches and "://" in pattern and not is_remote(pattern):
        raise UserError(
            f"--input {pattern!r} is not supported. Use local paths, gs://, s3://, hf://, hf:ORG/NAME or tfds:NAME"
        )
    if not matches:
        hint = f"; hf:{pattern} is a data set of the Hugging Face Hub" if datasets.may_be_name(pattern) else ""
        raise UserError(f"--input {pattern!r} matches no file. Check the path, and quote the pattern{hint}")
    only_stars = set(pattern.rpartition("/")[2]) == {"*"}
    sources = []
    for match in matches:
        if match.is_folder and (saved := datasets.arrow_files(match.path)) is not None:
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
        folder = iter([text.folder(source.path)])
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
        raise text.folder(source.path)
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
    return (
        str(folder)
        if not finished or Path(path).relative_to(folder).as_posix() in output_files.read_sums(folder)
        else ""
    )


def _is_output(folder: Path) -> bool:
    if folder.name.endswith(INCOMPLETE):
        return (folder / MARKER).exists() or (folder / "job" / "arguments.json").exists()
    return (folder / MANIFEST).exists() and (folder / output_files.SUMS).exists()


def expand(pattern: str) -> list[Path]:
    """The sorted local files of one or several comma-separated globs (`books/*.txt.xz,more/**/*.txt`).

    Raises UserError if a pattern matches nothing, or a folder.
    """
    sources = find_sources(pattern)
    for source in sources:
        check_readable(source)
        if not Path(source.path).exists():
            raise UserError(f"{source.path} is not a local file. Copy it to this machine first")
    return [Path(source.path) for source in sources]


def documents(path: str | Path, on_read: OnRead = ignore_progress) -> Iterator[str]:
    """The documents of one file. `on_read` gets the number of stored bytes read since its last call.

    Raises UserError at the first document that cannot be used.
    """
    for item in read(str(path), on_read=on_read):
        if isinstance(item, Refusal):
            raise item
        if isinstance(item, bytes):
            yield item.decode()
