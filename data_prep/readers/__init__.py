"""Reads text from files (local, gs://, s3://, hf://) and data sets, one document at a time.

Start with corpus.py: `Corpus` reads all sources in order, and `read` picks a file's reader. text.py reads plain text
and recognizes formats; tables.py reads JSON lines, Parquet, CSV, TSV and Arrow; datasets.py finds Hugging Face and TFDS
data sets; web.py reads WARC and WET; wiki.py reads wiki dumps. For unusable input they yield a Refusal or an Omission.
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
# Characters that text never has: C0 without white space (tab to carriage return), and delete. C1 is accepted, because
# much real text has it in place of dashes and quotes (Windows-1252 read as Latin-1), and tokenizers drop it.
CONTROLS = bytes([*range(9), *range(14, 32), 127])
_CONTROL = re.compile(b"[" + re.escape(CONTROLS) + b"]")
# The first bytes of compressed files, with the suffix that their names should have. RFC 1952; the .xz file format,
# 2.1.1.1; RFC 8878; bzip2's stream header, whose last six bytes are digits of pi.
COMPRESSED = {b"\x1f\x8b": ".gz", b"\xfd7zXZ\0": ".xz", b"\x28\xb5\x2f\xfd": ".zst"} | {
    b"BZh%d1AY&SY" % level: ".bz2" for level in range(1, 10)
}
# By reason, the problem and the advice.
_PROBLEMS: dict[Reason, tuple[str, str]] = {
    "nul_character": ("a NUL character ({column})", "Remove it"),
    "control_character": ("a control character, U+{byte:04X} ({column})", "Remove it"),
    "invalid_utf8": (
        "not UTF-8 (byte 0x{byte:02x} in {column})",
        "Convert the file, for example with iconv -f WINDOWS-1252 -t UTF-8",
    ),
}


class Refusal(UserError):
    """An unusable document, or the unusable rest of a file. `reason` is for counts, the message for people."""

    def __init__(self, reason: Reason, place: str, problem: str, advice: str) -> None:
        super().__init__(f"{place}: {one_line(problem)}. {advice}, {_SKIP}")  # a column's name may have line breaks
        self.reason = reason
        self._arguments = reason, place, problem, advice

    def __reduce__(self) -> tuple[type["Refusal"], tuple[str, ...]]:
        """Lets refusals pass between processes; by default, an exception is created again from its message alone."""
        return Refusal, self._arguments


def of_flag(error: UserError, flag: str) -> UserError:
    """Rewords a reader's error for a command that has `flag` instead of --input, and no --on_error."""
    return UserError(str(error).partition(f", {_SKIP}")[0].replace("--input", flag))


class Omission(NamedTuple):
    """A record that is not a document. It is left out and counted, whatever --on_error says."""

    reason: Literal[
        "not_a_page",  # a record of a web archive: no HTML or plain text, or a status other than 200
        "not_an_article",  # a page of a wiki: a redirect, or in another namespace
        "empty_text",
        "not_sampled",  # by a weight below 1
    ]


Item = bytes | Refusal | Omission
Items = Iterator[Item]


def check(text: bytes, place: str, first_line: int | None = None) -> Item:
    """Returns the text if it can be used, otherwise a Refusal.

    Args:
        place: Names the text in messages, e.g. "a.txt".
        first_line: The line on which the text begins. The message then has the line and the column, in bytes.
    """
    # The usual case comes first, and at memory speed: a search by regular expression takes longer than `translate`.
    if len(text.translate(None, CONTROLS)) != len(text):
        control = _CONTROL.search(text)
        assert control is not None
        offset = control.start()
        reason: Reason = "control_character" if text[offset] else "nul_character"
    elif text.isascii():
        return text
    else:
        try:
            text.decode()
            return text
        except UnicodeDecodeError as error:
            reason, offset = "invalid_utf8", error.start
    column = f"byte {offset + 1}"
    if first_line is not None:
        line, in_line = first_line + text.count(b"\n", 0, offset), offset - text.rfind(b"\n", 0, offset)
        place, column = f"{place}, line {line}", f"column {in_line}"
    problem, advice = _PROBLEMS[reason]
    # Bytes that are not text often belong to another kind of file, for which there is better advice.
    if looks_like_utf16(text):
        advice = "It looks like UTF-16: convert the file, for example with iconv -f UTF-16 -t UTF-8"
    for magic, suffix in COMPRESSED.items():
        if text.startswith(magic):
            advice = f"It looks compressed: rename the file to end in {suffix}"
    return Refusal(reason, place, problem.format(byte=text[offset], column=column), advice)


def looks_like_utf16(text: bytes) -> bool:
    """Whether bytes begin with UTF-16's byte-order mark, or have as many NULs as ASCII text in UTF-16."""
    return text.startswith((b"\xff\xfe", b"\xfe\xff")) or text.count(0) > len(text) // 3
