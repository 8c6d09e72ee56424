"""What is wrong with input, as a value: a reader yields a Refusal in the place of a document and goes on after it.

Whoever reads decides: with --on_error fail it is raised (it is a UserError), with skip it is counted by its reason.
"""

import re
from collections.abc import Iterator
from typing import Literal

from bert_jax.command import UserError

Reason = Literal[
    "invalid_utf8",
    "nul_character",
    "control_character",
    "document_too_long",
    "not_json",
    "no_text_field",  # a JSONL line or a Parquet row without the field, or with something else than text in it
    "no_text_column",  # a whole Parquet file
    "empty_file",  # no document in it
    "folder",  # where a file was wanted
    "damaged_file",  # the rest of a file that is truncated or corrupt
    "unreadable_file",  # the rest of a file that the system or the store does not give
]

_SKIP = "or give --on_error skip"
# What no text holds: C0 but white space (tab to carriage return), and delete. C1 is let through: it is what is left of
# dashes and quotes in much real text (Windows-1252 read as Latin-1), and tokenizers drop it.
_CONTROLS = bytes([*range(9), *range(14, 32), 127])
_CONTROL = re.compile(b"[" + re.escape(_CONTROLS) + b"]")
# RFC 1952; the .xz file format, 2.1.1.1; RFC 8878.
_MAGIC = {b"\x1f\x8b": ".gz", b"\xfd7zXZ\0": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}


class Refusal(UserError):
    """A document, or the rest of a file, that cannot be used: `reason` for counting, the message for a person."""

    def __init__(self, reason: Reason, where: str, what: str, advice: str) -> None:
        super().__init__(f"{where}: {what}. {advice}, {_SKIP}")
        self.reason = reason


Item = bytes | Refusal
Items = Iterator[Item]


def check(text: bytes, where: str, first_line: int | None = None) -> Item:
    """The text if it can be used, else what is wrong with it.

    where        what holds the text, as "a.txt"; with first_line, the line that the text begins on, "a.txt, line 7"
                 is said, and the column in bytes
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
        return Refusal("invalid_utf8", place, what, _advice(text, "Convert the file, for example with iconv -t UTF-8"))
    return text


def _advice(text: bytes, other: str) -> str:
    """What to do about bytes that are no text: for those of other kinds of files, what that is."""
    for magic, suffix in _MAGIC.items():
        if text.startswith(magic):
            return f"It looks compressed: end the file's name in {suffix}"
    if text.startswith((b"\xff\xfe", b"\xfe\xff")) or text.count(0) > len(text) // 3:
        return "It looks like UTF-16: convert the file, for example with iconv -f UTF-16 -t UTF-8"
    return other


def _place(text: bytes, offset: int, where: str, first_line: int | None) -> tuple[str, str]:
    """Where the byte at an offset stands: the file with the line, and the column."""
    if first_line is None:
        return where, f"byte {offset + 1}"
    line, column = first_line + text.count(b"\n", 0, offset), offset - text.rfind(b"\n", 0, offset)
    return f"{where}, line {line}", f"column {column}"
