"""The lines that predict reads from files and standard input, and their forms."""

import json
import os
import select
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeVar

from bert_jax.command import UserError
from bert_jax.tasks.input_records import InputRecord
from bert_jax.tasks.reading import plain_name

FORMS = ("auto", "text", "jsonl", "task")
PYTHON = "python"  # the form of texts and objects of a caller
STDIN = Path("standard input")  # in messages
FORM_OF_ENDING = {".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "text", ".text": "text", "": "text"}
CHUNK = 1 << 20  # bytes; a pipe returns at most what it holds

Line = tuple[int, str]  # its number, from 1, and its content
Item = TypeVar("Item")


def form_of_file(path: Path) -> str:
    """`text` (one input per line), `jsonl` (one object per line) or `task` (the format of the training files).

    The ending of the name decides; the ending of a compressed file does not count.
    """
    return FORM_OF_ENDING.get(Path(plain_name(path)).suffix, "task")


def form_of_line(text: str) -> str:
    """The form of a stream with this first line: `jsonl` if the line is a JSON object, otherwise `text`."""
    try:
        return "jsonl" if isinstance(json.loads(text), dict) else "text"
    except (ValueError, RecursionError):
        return "text"


def inputs_of(lines: Iterable[Line], form: str) -> Iterator[Line]:
    """The lines that hold inputs: of JSON lines those that are not blank, as in the files of tasks."""
    return (line for line in lines if form != "jsonl" or line[1].strip())


def windows(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """The items in lists of `size`; the last list may be shorter."""
    remaining = iter(items)
    return iter(lambda: list(islice(remaining, size)), [])


def stream_windows(stream: IO[bytes], size: int) -> Iterator[list[Line]]:
    """The lines of a stream, without line ends, in lists of at most `size` lines.

    A list is yielded as soon as reading more would wait. A program that writes a line into a pipe and waits for its
    prediction therefore receives it. Raises UserError for a line that is not UTF-8.
    """
    number, unfinished = 0, b""
    waiting: list[bytes] = []
    while chunk := os.read(stream.fileno(), CHUNK):
        *lines, unfinished = (unfinished + chunk).split(b"\n")
        waiting += lines
        while len(waiting) >= size or (waiting and not select.select([stream], [], [], 0)[0]):
            yield _decoded(waiting[:size], number)
            number += len(waiting[:size])
            del waiting[:size]
    waiting += [unfinished] if unfinished else []
    if waiting:
        yield _decoded(waiting, number)


def _decoded(lines: list[bytes], before: int) -> list[Line]:
    """Lines as text. `before` lines precede them in the stream; a byte-order mark at its start is dropped."""
    found = []
    for number, line in enumerate(lines, before + 1):
        try:
            found.append((number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r")))
        except UnicodeDecodeError as error:
            raise UserError(f"{STDIN} line {number} is not UTF-8 ({error.reason}). Convert it to UTF-8") from error
    return found


def record_of(source: Path, number: int, content: str | Mapping[str, Any], form: str, words: bool) -> InputRecord:
    """A line, or an object of the caller, as an InputRecord.

    With `words`, a line of text holds words separated by white space. Raises UserError for a line of the form jsonl
    that is not a JSON object.
    """
    if form in ("text", PYTHON) and isinstance(content, str) and words and content.split():
        return InputRecord(number, {"tokens": content.split(), "text": content})
    if form in ("text", PYTHON) or not isinstance(content, str):
        return InputRecord(number, content, tabs=form == "text")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source} line {number} is not JSON ({error}). Write one object per line") from None
    if not isinstance(found, Mapping):
        raise UserError(f"{source} line {number} is {content:.40}, which is not a JSON object. Write {{...}} per line")
    return InputRecord(number, found)
