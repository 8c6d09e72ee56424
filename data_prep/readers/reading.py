"""How documents are read, and the reader of each format."""

from dataclasses import dataclass

from bert_jax.command import UserError
from bert_jax.storage.compression import OnRead, ignore_progress
from bert_jax.storage.listing import is_special
from bert_jax.storage.remote import is_remote
from data_prep.readers import (
    arrow_file,
    csv_and_tsv,
    file_blocks,
    input_format,
    json_and_parquet,
    mediawiki_dump,
    plain_text,
    tfds_corpus,
    web_archive,
)
from data_prep.readers.refusal import Items, Refusal

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
        choices = {"document": DOCUMENT, "on_error": ON_ERROR, "input_format": input_format.CHOICES}
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
    if path.startswith(tfds_corpus.PREFIX):
        return tfds_corpus.documents(path, reading.text_field, on_read)
    refuse_special(path)
    format = input_format.format_of(path, reading.input_format)
    input_format.check_installed(format)
    match format:
        case "jsonl":
            return json_and_parquet.jsonl_documents(path, reading.text_field, on_read)
        case "parquet":
            return json_and_parquet.parquet_documents(path, reading.text_field, on_read)
        case "arrow":
            return arrow_file.arrow_documents(path, reading.text_field, on_read)
        case "csv" | "tsv":
            delimiter = "," if format == "csv" else "\t"
            return csv_and_tsv.table_documents(path, reading.text_field, delimiter, on_read)
        case "warc":
            return web_archive.archive_documents(path, on_read)
        case "mediawiki":
            return mediawiki_dump.article_documents(path, on_read, reading.workers)
    chosen = reading.input_format == "text"
    ends = plain_text.ends(reading.document, reading.document_separator)
    return plain_text.text_documents(path, on_read, ends, any_content=chosen)


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
    input_format.check_installed(format)
    if format in input_format.CHECKED and reading.input_format != "text" and not is_remote(path):
        head, _ = file_blocks.split_head(file_blocks.file_blocks(path), input_format.HEAD_BYTES)
        input_format.check_head(path, head, format)


def is_text(path: str, chosen: str) -> bool:
    """Whether a source is read as text, where `chosen` is the input_format."""
    try:
        return _format_of(path, chosen) == "text"
    except Refusal:
        return False


def _format_of(path: str, chosen: str) -> str:
    return "tfds" if path.startswith(tfds_corpus.PREFIX) else input_format.format_of(path, chosen)


def _not_text(reading: Reading, what: str, why: str) -> UserError:
    return UserError(f"{what}: {why}, and {reading.of_text} is for text. Leave it out")


def refuse_special(path: str) -> None:
    """Raises Refusal for a pipe or a device."""
    if is_special(path):
        what = "pipes and devices are not supported"
        raise Refusal("unreadable_file", path, what, "Write the text to a file and name that")
