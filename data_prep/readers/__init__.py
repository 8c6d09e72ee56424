"""Reading text: the sources of a corpus (local, gs://, s3://, hf://, tfds:) and their documents, one at a time.

Start with corpus.py: its `Corpus` reads all sources in order, and `Reading` says which reader a file has. text.py reads
plain text, and recognizes formats by names and first bytes; tables.py reads JSON lines, Parquet, CSV, TSV and Arrow;
datasets.py finds the files of Hugging Face and TFDS datasets; web.py reads WARC and WET; wiki.py reads dumps of wikis.
This module has what each of them yields for input that is no text: a Refusal or an Omission.
"""

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from bert_jax.errors import UserError, one_line

Reason = Literal[
    "invalid_utf8",
    "nul_character",
    "control_character",
    "document_too_long",
    "not_json",
    "bad_row",  # a row of CSV or TSV with other fields than the header, or with a quote that does not end
    "no_text_field",  # a JSONL line or Parquet row without the field, or with something other than text in it
    "no_text_column",  # a whole file of Parquet, Arrow, CSV or TSV
    "bad_page",  # a page whose content or markup cannot be decoded
    "other_format",  # a whole file that is not text, or not in the format that its name says
    "empty_file",  # a file without a document
    "folder",  # instead of a file
    "damaged_file",  # the rest of a file that is truncated or corrupt
    "unreadable_file",  # the rest of a file that the system or the store cannot read
]

_SKIP = "or use --on_error skip"
# Characters that text never holds: C0 without white space (tab to carriage return), and delete. C1 is accepted: much
# real text has it in place of dashes and quotes (Windows-1252 read as Latin-1), and tokenizers drop it.
_CONTROLS = bytes([*range(9), *range(14, 32), 127])
_CONTROL = re.compile(b"[" + re.escape(_CONTROLS) + b"]")
# RFC 1952; the .xz file format, 2.1.1.1; RFC 8878; bzip2's stream header, whose last six bytes are digits of pi.
_MAGIC = {b"\x1f\x8b": ".gz", b"\xfd7zXZ\0": ".xz", b"\x28\xb5\x2f\xfd": ".zst"} | {
    b"BZh%d1AY&SY" % level: ".bz2" for level in range(1, 10)
}
COMPRESSED = tuple(_MAGIC)


class Refusal(UserError):
    """A document, or the rest of a file, that cannot be used: `reason` for counting, the message for a person."""

    def __init__(self, reason: Reason, where: str, what: str, advice: str) -> None:
        super().__init__(f"{where}: {one_line(what)}. {advice}, {_SKIP}")  # a column may have line breaks in its name
        self.reason = reason
        self._given = reason, where, what, advice

    def __reduce__(self) -> tuple[type["Refusal"], tuple[str, ...]]:
        """Refusals pass between processes; an exception is otherwise created again from its message alone."""
        return Refusal, self._given


def of_flag(error: UserError, flag: str) -> UserError:
    """An error of the readers in the words of a command that reads files named by `flag`, and has no --on_error."""
    return UserError(str(error).partition(f", {_SKIP}")[0].replace("--input", flag))


class Omission(NamedTuple):
    """A record that is no document: it is left out and counted, whatever --on_error."""

    reason: Literal[
        "not_a_page",  # a record of a web archive: no HTML or plain text, or a status other than 200
        "not_an_article",  # a page of a wiki: a redirect, or in another namespace
    ]


Item = bytes | Refusal | Omission
Items = Iterator[Item]


def check(text: bytes, where: str, first_line: int | None = None) -> Item:
    """Returns the text if it can be used, otherwise a Refusal that says what is wrong with it.

    where        what holds the text, for example "a.txt"
    first_line   the line on which the text begins; the message then has the line and the column, in bytes
    """
    if len(text.translate(None, _CONTROLS)) != len(text):
        found = _CONTROL.search(text)
        assert found is not None
        place, column = _place(text, found.start(), where, first_line)
        if character := text[found.start()]:
            what = f"a control character, U+{character:04X} ({column})"
            return Refusal("control_character", place, what, _advice(text, "Remove it"))
        return Refusal("nul_character", place, f"a NUL character ({column})", _advice(text, "Remove it"))
    if text.isascii():
        return text
    try:
        text.decode()
    except UnicodeDecodeError as error:
        place, column = _place(text, error.start, where, first_line)
        what = f"not UTF-8 (byte 0x{text[error.start]:02x} in {column})"
        advice = _advice(text, "Convert the file, for example with iconv -f WINDOWS-1252 -t UTF-8")
        return Refusal("invalid_utf8", place, what, advice)
    return text


def _advice(text: bytes, other: str) -> str:
    """What to do about bytes that are not text; the bytes of other kinds of files are recognized."""
    for magic, suffix in _MAGIC.items():
        if text.startswith(magic):
            return f"It looks compressed: rename the file to end in {suffix}"
    if looks_like_utf16(text):
        return "It looks like UTF-16: convert the file, for example with iconv -f UTF-16 -t UTF-8"
    return other


def looks_like_utf16(text: bytes) -> bool:
    """Whether bytes begin with a mark of UTF-16, or have as many NULs as ASCII text in UTF-16."""
    return text.startswith((b"\xff\xfe", b"\xfe\xff")) or text.count(0) > len(text) // 3


def _place(text: bytes, offset: int, where: str, first_line: int | None) -> tuple[str, str]:
    """The position of the byte at an offset: the file with the line, and the column."""
    if first_line is None:
        return where, f"byte {offset + 1}"
    line, column = first_line + text.count(b"\n", 0, offset), offset - text.rfind(b"\n", 0, offset)
    return f"{where}, line {line}", f"column {column}"
