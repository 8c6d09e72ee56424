"""Inputs of predict as they come: lines of a file or of standard input, in windows, and what form they have."""

import json
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

from bert_jax.command import UserError
from bert_jax.tasks.input_records import InputRecord
from bert_jax.tasks.reading import plain_name

FORMS = ("auto", "text", "jsonl", "task")
STDIN = Path("standard input")  # in messages
LINES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "text", ".text": "text", "": "text"}

Line = tuple[int, str]  # its number, from 1, and what it holds


def form_of(path: Path) -> str:
    """`text` (a line an input), `jsonl` (an object a line) or `task` (files as those it was trained on), by the name's
    ending, that of a compressed file left out."""
    return LINES.get(Path(plain_name(path)).suffix, "task")


def form_of_line(text: str) -> str:
    """The form of a stream by its first line: `jsonl` where that is a JSON object, else `text`."""
    try:
        return "jsonl" if isinstance(json.loads(text), dict) else "text"
    except (ValueError, RecursionError):
        return "text"


def stream_lines(stream: IO[bytes]) -> Iterator[Line]:
    """The lines of standard input, without their ends. Raises UserError for what is not UTF-8."""
    for number, line in enumerate(stream, start=1):
        try:
            yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UserError(f"{STDIN} line {number} is not UTF-8 ({error.reason}). Convert it") from error


def record_of(source: Path, line: Line, form: str, words: bool = False) -> InputRecord:
    """A line as an InputRecord; with `words`, a plain line holds words separated by blanks.

    Raises UserError for bad JSON.
    """
    number, text = line
    if form == "text":
        return InputRecord(number, {"tokens": text.split(), "text": text} if words and text.split() else text)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source} line {number} is not JSON ({error}). Write one object a line") from None
    if not isinstance(found, Mapping):
        raise UserError(f"{source} line {number} is {text:.40}, no JSON object. Write {{...}} on each line")
    return InputRecord(number, found)


def windows(lines: Iterable[Line], size: int) -> Iterator[list[Line]]:
    """As many lines at a time as size says, the last window but fewer."""
    found: list[Line] = []
    for line in lines:
        found.append(line)
        if len(found) == size:
            yield found
            found = []
    if found:
        yield found


def ready_windows(lines: Iterator[Line], size: int) -> Iterator[list[Line]]:
    """Up to size lines at a time, but never waiting for a second one: whoever writes a line into a pipe and waits for
    its answer gets it. A thread reads ahead, no further than size lines."""
    ahead: queue.Queue[Line | BaseException | None] = queue.Queue(maxsize=size)
    threading.Thread(target=_read_ahead, args=(lines, ahead), name="read lines", daemon=True).start()
    while True:
        found = [ahead.get()]
        while len(found) < size and not ahead.empty():
            found.append(ahead.get())
        window: list[Line] = []
        for line in found:
            if not isinstance(line, tuple):  # the end, or what was raised: nothing follows
                if window:
                    yield window
                if line is not None:
                    raise line
                return
            window.append(line)
        yield window


def _read_ahead(lines: Iterator[Line], ahead: "queue.Queue[Line | BaseException | None]") -> None:
    try:
        for line in lines:
            ahead.put(line)
        ahead.put(None)
    except BaseException as error:  # whatever it is, whoever takes the lines is told
        ahead.put(error)
