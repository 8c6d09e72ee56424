"""From inputs to answers: files, streams and a caller's own, window by window, with a count of what was cut or bad."""

import dataclasses
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bert_jax.command import UserError
from bert_jax.progress import Reporter
from bert_jax.tasks import input_lines, reading, registry
from bert_jax.tasks.example import Split
from bert_jax.tasks.inference import FineTuned
from bert_jax.tasks.input_lines import STDIN
from bert_jax.tasks.input_records import InputRecord

ON_ERROR = ("fail", "skip")
GIVEN = Path("inputs")  # in messages
WINDOW = 32  # batches that are read, and sorted by length, at a time


@dataclass
class Counts:
    """What became of the inputs so far."""

    inputs: int = 0
    refused: int = 0  # told as {"error": ...}
    cut: int = 0  # longer than what cut_option of the task says
    what_is_cut: str = "inputs"
    cut_option: str = "max_length"


class Answering:
    """A model's answers to windows of inputs, and the count of them."""

    def __init__(self, model: FineTuned, words: bool, all_scores: bool, on_error: str) -> None:
        if on_error not in ON_ERROR:
            raise UserError(f"--on_error is {on_error!r}; use {' or '.join(ON_ERROR)}")
        self.counts = Counts()
        self.window = WINDOW * model.batch_size
        self._model = model
        self._words = words
        self._all_scores = all_scores
        self._skip = on_error == "skip"

    def of_file(self, path: Path, form: str, quiet: bool = True) -> Iterator[list[dict[str, Any]]]:
        """Of a file, in windows; progress is told on stderr."""
        form = input_lines.form_of(path) if _checked_form(form) == "auto" else form
        if form == "task":
            split = registry.read(self._model.task, path, label_required=False)
            total = len(split.items)
            found = (self.of_split(part) for part in _parts(split, self.window))
        else:
            total = sum(1 for _ in reading.numbered_lines(path))
            lines = input_lines.windows(reading.numbered_lines(path), self.window)
            found = (self.of_lines(path, window, form) for window in lines)
        if not total:
            raise UserError(f"{path} is empty. Give a file with an input a line")
        with Reporter("predicting", total, ["inputs"], quiet) as progress:
            for window in found:
                yield window
                progress.update(self.counts.inputs, self.counts.inputs)

    def of_stream(self, stream: IO[bytes], form: str) -> Iterator[list[dict[str, Any]]]:
        """Of standard input, each window as soon as it is there."""
        if _checked_form(form) == "task":
            raise UserError("--form is task, and standard input holds lines: use text or jsonl, or name a file")
        waits = not stat.S_ISREG(os.fstat(stream.fileno()).st_mode)  # a pipe or a terminal
        lines = input_lines.stream_lines(stream)
        for window in (
            input_lines.ready_windows(lines, self.window) if waits else input_lines.windows(lines, self.window)
        ):
            form = input_lines.form_of_line(window[0][1]) if form == "auto" else form
            yield self.of_lines(STDIN, window, form)

    def of_lines(self, path: Path, lines: Sequence[input_lines.Line], form: str) -> list[dict[str, Any]]:
        """Of some lines."""
        return self.of_records(
            path, [self._tried(input_lines.record_of, path, line, form, self._words) for line in lines]
        )

    def of_given(self, given: Sequence[str | Mapping[str, Any]], first: int) -> list[dict[str, Any]]:
        """Of a caller's own texts and objects, numbered from `first`."""
        read: list[InputRecord | UserError] = []
        for number, content in enumerate(given, start=first):
            if isinstance(content, str):
                read.append(input_lines.record_of(GIVEN, (number, content), "text", self._words))
            else:
                read.append(InputRecord(number, content))
        return self.of_records(GIVEN, read)

    def of_records(self, path: Path, read: Sequence[InputRecord | UserError]) -> list[dict[str, Any]]:
        """Of records, and of what was no record."""
        if self._skip:
            read = [one if isinstance(one, UserError) else self._tried(self._checked, path, one) for one in read]
        good = [one for one in read if isinstance(one, InputRecord)]
        answers = iter(self.of_split(self._model.parse(path, good)) if good else ())
        return [self._refused(one) if isinstance(one, UserError) else _named(one, next(answers)) for one in read]

    def _checked(self, path: Path, record: InputRecord) -> InputRecord:
        self._model.parse(path, [record])
        return record

    def _tried(self, function: Callable[..., InputRecord], *arguments: Any) -> InputRecord | UserError:
        """What the function gives, or what it raises, which is raised unless bad inputs are skipped."""
        try:
            return function(*arguments)
        except UserError as error:
            if not self._skip:
                raise
            return error

    def _refused(self, error: UserError) -> dict[str, Any]:
        self.counts.inputs += 1
        self.counts.refused += 1
        return {"error": str(error)}

    def of_split(self, split: Split[Any]) -> list[dict[str, Any]]:
        """Of a split, whatever labels it has."""
        rows = self._model.encode(dataclasses.replace(split, labelled=False))
        self.counts.inputs += len(split.items)
        self.counts.cut += rows.truncated
        self.counts.what_is_cut, self.counts.cut_option = rows.cut_part or "inputs", rows.cut_option
        found = self._model.predictions(rows)
        hidden = () if self._all_scores else ("scores",)
        return [{name: value for name, value in told.items() if name not in hidden} for told in found]


def _parts(split: Split[Any], size: int) -> Iterator[Split[Any]]:
    for first in range(0, len(split.items), size):
        yield dataclasses.replace(split, items=split.items[first : first + size])


def _named(record: InputRecord, told: dict[str, Any]) -> dict[str, Any]:
    """With the id that the input has."""
    named = isinstance(record.content, Mapping) and "id" in record.content
    return {"id": record.content["id"], **told} if named else told  # type: ignore[index]


def _checked_form(form: str) -> str:
    if form not in input_lines.FORMS:
        raise UserError(f"--form is {form!r}; use one of: {', '.join(input_lines.FORMS)}")
    return form
