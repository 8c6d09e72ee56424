"""Reads a job's corpus: picks the reader for a file, finds the files, and yields their documents in order."""

import contextlib
import fractions
import functools
import hashlib
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bert_jax.config.options import Valid, check, option
from bert_jax.data.manifest import MANIFEST
from bert_jax.errors import UserError
from bert_jax.storage.files import INCOMPLETE, MARKER, OnRead, ignore_progress
from bert_jax.storage.files import SUFFIXES as COMPRESSED
from bert_jax.storage.remote import find_files, is_remote, is_special
from data_prep import output_files
from data_prep.readers import Items, Omission, Refusal, datasets, ranges, tables, text, web, wiki
from data_prep.readers.ranges import Range


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The options that all commands with --input share: how its files become documents.

    Raises:
        UserError: A choice is unknown, or two exclude each other. The message names the flag.
    """

    input_format: str = option(
        "auto",
        f"of all files: auto (by name), {', '.join(text.FORMATS)}",
        metavar="NAME",
        choices=text.CHOICES,
    )
    text_field: str = option(
        "text",
        "field or column of the text, in tables and JSON lines",
        metavar="NAME",
        aliases=["text"],
    )
    document: str = option(
        "blank_line",
        "what separates documents: blank_line, or file",
        choices=("blank_line", "file"),
    )
    document_separator: str = option(
        "",
        "a line between documents instead of blank ones, such as ---",
        metavar="LINE",
        dashes=True,
    )
    on_error: str = option("fail", "of unusable input: fail, or skip and count it", choices=("fail", "skip"))
    workers: int = option(
        0,
        "processes; 0: one for each core (ray: of the cluster)",
        metavar="N",
        valid=Valid(lambda count: count >= 0, "0 or more (0: one for each core)"),
    )

    def __post_init__(self) -> None:
        check(self)
        if separator := self.document_separator:
            if not separator.strip() or not separator.isprintable():
                raise UserError(
                    f"--document_separator {separator!r}: give one line that holds more than white space, such as "
                    "'---', or leave it out for blank lines"
                )
            if self.document == "file":
                raise UserError(
                    "--document file makes each file one document; give it or --document_separator, not both"
                )
        if self.input_format not in ("auto", "text"):
            self.check_text_flags(f"--input_format {self.input_format}", "its records are the documents")

    def check_text_flags(self, place: str, reason: str) -> None:
        """Checks that no flag for text was given with other input.

        Raises:
            UserError: One was given.
        """
        if self.document_separator or self.document == "file":
            flag = "--document_separator" if self.document_separator else "--document file"
            raise UserError(f"{place}: {reason}, and {flag} is for text. Leave it out")


def read(path: str, reading: Reading = Reading(), on_read: OnRead = ignore_progress) -> Items:
    """Yields a source's documents as UTF-8, with a Refusal in place of an unusable document or rest of the file."""
    try:
        yield from read_range(path, reading, on_read=on_read)
    except Refusal as refusal:
        yield refusal


def read_range(path: str, reading: Reading, span: Range | None = None, on_read: OnRead = ignore_progress) -> Items:
    """Yields the documents in a source, or in a range of it, as `read` does.

    Raises:
        Refusal: The rest of the file cannot be used.
    """
    if not path.startswith(datasets.TFDS_PREFIX):
        _refuse_special(path)
    format = _format(path, reading.input_format)
    text.check_installed(format)
    blocks = None
    if span and not span.is_whole and format != "parquet":
        blocks = ranges.content(path, span, format, reading.document_separator)
        if not span.begin and format in text.CHECKED and reading.input_format != "text":
            blocks = text.checked_blocks(path, format, blocks=blocks)
        path = f"{path}, after byte {span.begin}" if span.begin else path  # for messages
    match format:
        case "tfds":
            yield from datasets.documents(path, reading.text_field, on_read)
        case "jsonl":
            yield from tables.jsonl_documents(path, reading.text_field, on_read, blocks, not (span and span.begin))
        case "parquet":
            inside = None if span is None or span.is_whole else (span.begin, span.end)
            yield from tables.parquet_documents(path, reading.text_field, on_read, inside)
        case "arrow":
            yield from tables.arrow_documents(path, reading.text_field, on_read)
        case "csv" | "tsv":
            yield from tables.table_documents(path, reading.text_field, "," if format == "csv" else "\t", on_read)
        case "warc":
            yield from web.archive_documents(path, on_read, blocks)
        case "mediawiki":
            # Removing markup takes longer than all other reading, so only this reader uses several processes.
            yield from wiki.article_documents(path, on_read, reading.workers)
        case _:
            yield from text.text_documents(
                path,
                on_read,
                whole_file=reading.document == "file",
                separator=reading.document_separator,
                any_content=reading.input_format == "text",
                blocks=blocks,
            )


def is_text(path: str, chosen: str) -> bool:
    """Whether a source is read as text with this input_format."""
    try:
        return _format(path, chosen) == "text"
    except Refusal:
        return False


def _format(path: str, chosen: str) -> str:
    return "tfds" if path.startswith(datasets.TFDS_PREFIX) else text.format_by_name(path, chosen)


def _refuse_special(path: str) -> None:
    if is_special(path):
        problem = "pipes and devices are not supported"
        raise Refusal("unreadable_file", path, problem, "Write the text to a file and name that")


def source_ranges(source: "Source", reading: Reading) -> list[Range]:
    """Divides a source into the ranges that workers read on their own."""
    with contextlib.suppress(Refusal):  # whoever reads the source meets it again
        if not source.folder:
            format = _format(source.path, reading.input_format)
            return ranges.divide(source.path, source.bytes, format, reading.document == "file")
    return [Range(0, source.bytes, source.bytes)]


class Source(NamedTuple):
    """A file, or a TFDS split."""

    path: str
    bytes: int  # as stored
    weight: float = 1.0  # how often documents are read; a fraction reads that share of them
    folder: bool = False  # whether it is a folder, which no reader can read


def text_bytes(sources: Sequence[Source]) -> int:
    """Estimates the size of the sources' text."""
    return sum(source.bytes * (3 if source.path.endswith(COMPRESSED) else 1) for source in sources)


def find_sources(pattern: str, weights: Sequence[float] = (), own: Sequence[Path] = ()) -> tuple[Source, ...]:
    """Finds the sources that comma-separated patterns match, sorted.

    A file appears once, however many patterns and links lead to it. A folder is a source (and an error) only if it was
    named, or matched by more than stars.

    Args:
        weights: A number per pattern; 1 by default.
        own: Folders in which the job itself writes; their files are left out.

    Raises:
        UserError: A pattern matches nothing, or an output's file (e.g. its vocab.txt), or the weights do not fit the
            patterns.
    """
    parts = patterns(pattern)
    if weights and len(weights) != len(parts):
        raise UserError(
            f"--weights has {len(weights)} numbers and --input {len(parts)} patterns; give one number for each pattern"
        )
    if any(not 0 < weight <= 1000 for weight in weights):
        listed = ",".join(f"{weight:g}" for weight in weights)
        raise UserError(f"--weights {listed}: each weight must be above 0 and at most 1000")
    is_output = functools.cache(_is_output)  # cached for this search only, because outputs come and go
    inside = tuple(os.path.realpath(folder) + os.sep for folder in own)
    sources: dict[str, Source] = {}  # by the path without links and dots
    for part, weight in zip(parts, weights or [1.0] * len(parts), strict=True):
        for source in _sources(part, weight):
            path = source.path
            real = path if is_remote(path) or path.startswith(datasets.TFDS_PREFIX) else os.path.realpath(path)
            if real.startswith(inside):
                continue
            # An output's vocab.txt or manifest is no text. A finished output lists its files, so other files may lie in
            # its folder; an unfinished one owns them all.
            output = next(filter(is_output, Path(real).parents), None) if os.path.isabs(real) else None
            if output and (
                not (output / MANIFEST).exists()
                or Path(real).relative_to(output).as_posix() in output_files.read_sums(output)
            ):
                raise UserError(
                    f"--input {part!r} matches {path}, which belongs to {output}, an output of bert_jax. "
                    "Name only the text, or move the output"
                )
            before = sources.setdefault(real, source)
            if before.weight != weight:
                raise UserError(
                    f"--weights: two patterns of --input match {path}, with weights {before.weight:g} and {weight:g}; "
                    "give both the same weight, or change one pattern"
                )
    return tuple(sorted(sources.values()))


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
        may_be_name = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", pattern)
        hint = f"; hf:{pattern} is a data set of the Hugging Face Hub" if may_be_name else ""
        raise UserError(f"--input {pattern!r} matches no file. Check the path, and quote the pattern{hint}")
    # DIR/* means the files in a folder, so its inner folders are no mistake.
    only_stars = set(pattern.rpartition("/")[2]) == {"*"}
    sources = []
    for match in matches:
        if match.is_folder and (saved := datasets.arrow_files(match.path)) is not None:
            # A missing file counts 0 bytes here, and is reported when it is read.
            sources += [Source(path, sum(file.bytes for file in find_files(path)), weight) for path in saved]
        elif not (match.is_folder and only_stars):
            sources.append(Source(*match[:2], weight, match.is_folder))
    return sources


def _is_output(folder: Path) -> bool:
    if folder.name.endswith(INCOMPLETE):
        return (folder / MARKER).exists() or (folder / "job" / "arguments.json").exists()
    return (folder / MANIFEST).exists() and (folder / output_files.SUMS).exists()


@dataclass
class Corpus:
    """Reads sources in order, in as many passes as the largest weight needs, and counts refused documents.

    Raises:
        UserError: A format needs packages that are not installed; or, unless reading.on_error is skip, a source is a
            folder, a pipe or a file in an unsupported format.
    """

    sources: tuple[Source, ...]
    reading: Reading = field(default_factory=Reading)
    refused: Counter[str] = field(default_factory=Counter)  # documents, or rests of files, by reason
    bytes_read: int = 0  # stored bytes, of total_bytes

    def __post_init__(self) -> None:
        self.passes = max((math.ceil(source.weight) for source in self.sources), default=0)
        self.total_bytes = sum(source.bytes * math.ceil(source.weight) for source in self.sources)
        for source in self.sources:  # found now rather than hours into the job
            try:
                _check_source(source, self.reading)
            except Refusal:
                if self.reading.on_error == "fail":
                    raise

    def documents(self) -> Iterator[str]:
        """Yields the documents in all passes, as `texts` does."""
        return (document.decode() for document in self.texts() if document is not None)

    def texts(self) -> Iterator[bytes | None]:
        """Yields the documents as UTF-8, with copies in later passes; None separates the passes.

        Raises:
            Refusal: Input is unusable. With on_error skip, it is counted in `refused` instead.
        """
        for number in range(self.passes):
            if number:
                yield None
            for source in self.sources:
                if source.weight > number:
                    yield from self._texts(source, number)

    def _texts(self, source: Source, number: int) -> Iterator[bytes]:
        # The last pass of a weight such as 2.5 reads half of the documents.
        share = min(1.0, source.weight - number)
        before = self.bytes_read
        for item in self._items(source):
            if isinstance(item, bytes):
                if not item or item.isspace():
                    item = Omission("empty_text")
                elif share < 1.0 and not is_sampled(hashlib.blake2b(item, digest_size=16).digest(), share):
                    item = Omission("not_sampled")
                else:
                    yield item
                    continue
            if isinstance(item, Refusal) and self.reading.on_error == "fail":
                raise item
            if not number:  # counts a document once: later passes hold copies
                self.refused[item.reason] += 1
        # Readers may stop early, or not report all bytes, so each source ends at its full size.
        self.bytes_read = before + source.bytes

    def _items(self, source: Source) -> Items:
        def on_read(size: int) -> None:
            self.bytes_read += size

        is_empty = True
        for item in [text.folder(source.path)] if source.folder else read(source.path, self.reading, on_read):
            is_empty = False
            yield item
        if is_empty:
            yield Refusal("empty_file", source.path, "no document in it", "Remove it from --input")


def is_sampled(digest: bytes, share: float) -> bool:
    """Samples a share of the documents by their hash's second half; the first half chooses eval documents."""
    return int.from_bytes(digest[8:]) < math.floor(fractions.Fraction(share) * (1 << 64))


def _check_source(source: Source, reading: Reading) -> None:
    """Raises Refusal for a folder, a pipe, a device, or a local file whose first bytes do not fit its format.

    Raises UserError if the format's packages are not installed, or a flag is for text.
    """
    path = source.path
    if source.folder:
        raise text.folder(path)
    _refuse_special(path)
    format = _format(path, reading.input_format)
    if format != "text":
        reading.check_text_flags(path, f"the records of {format} are the documents")
    text.check_installed(format)
    # The first bytes of a remote file cost a request, so they are checked when the file is read.
    if format in text.CHECKED and reading.input_format != "text" and not is_remote(path):
        text.checked_blocks(path, format)


def expand(pattern: str) -> list[Path]:
    """Expands comma-separated globs (`books/*.txt.xz,more/**/*.txt`) to local files, sorted.

    Raises:
        UserError: A pattern matches nothing, a folder, or a file that is not on this machine.
    """
    paths = []
    for source in find_sources(pattern):
        if source.folder:
            raise text.folder(source.path)
        _refuse_special(source.path)
        if not Path(source.path).exists():
            raise UserError(f"{source.path} is not a local file. Copy it to this machine first")
        paths.append(Path(source.path))
    return paths


def documents(path: str | Path, on_read: OnRead = ignore_progress) -> Iterator[str]:
    """Yields a file's documents.

    Args:
        on_read: Gets the number of stored bytes read since its last call.

    Raises:
        UserError: A document cannot be used.
    """
    for item in read(str(path), on_read=on_read):
        if isinstance(item, Refusal):
            raise item
        if isinstance(item, bytes):
            yield item.decode()
