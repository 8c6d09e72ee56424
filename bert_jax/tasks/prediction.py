"""Predicts labels, scores, tags, entities or answers for texts with a fine-tuned checkpoint."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from bert_jax.config.options import Checked, at_least, between, from_keywords, option
from bert_jax.errors import UserError
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model.runtime import COMPUTE_DTYPES
from bert_jax.progress import Reporter, is_watched, print_note
from bert_jax.tasks import registry
from bert_jax.tasks.embedder import refuse_other_inputs
from bert_jax.tasks.inference import FineTuned
from bert_jax.tasks.kinds.tagging import RawWords, unspaced_texts
from bert_jax.tasks.reading import inputs as input_lines
from bert_jax.tasks.reading import tables
from bert_jax.tasks.reading.inputs import InputRecord
from bert_jax.tasks.reading.tables import Columns
from bert_jax.tasks.rows import Split

ON_ERROR = ("fail", "skip")
WINDOW = 32  # batches that are read, and sorted by length, at a time

Predictions = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class PredictOptions(Checked):
    """How inputs are read and labelled: of Model.predict and `bert-jax predict`, which describes them."""

    form: str = option("auto", "of the input, see above", aliases=["input_format"], choices=input_lines.FORMS)
    words: bool = option(False, "each line of text is words separated by spaces")
    all_scores: bool = option(False, "also write scores of all classes or choices, or of the n_best answers")
    on_error: str = option(
        "fail", "fail, or skip: write an error object; not for task files", metavar="ACTION", choices=ON_ERROR
    )
    batch_size: int = option(32, "inputs per batch", metavar="N", valid=at_least(1))
    max_length: int = option(0, "truncate to N tokens; default: as fine-tuned", metavar="N")
    compute_dtype: str = option(
        "auto", "of the model; auto: float32 on CPU, else bfloat16", choices=(*COMPUTE_DTYPES, "auto")
    )
    null_threshold: float | None = option(
        None,
        "give no answer if its probability exceeds P; default: as fine-tuned",
        metavar="P",
        valid=between(0, 1),
    )


class InputPredictor:
    """Predicts windows of inputs, and counts those that are truncated, invalid or without a finite score.

    Raises:
        UserError: A file's form does not use an option. Without on_error="skip", also for an invalid input, which
            otherwise has {"error": ...} in its place.
    """

    def __init__(self, model: FineTuned, options: PredictOptions, with_rows: bool = False) -> None:
        self.rows: Sequence[Mapping[str, Any]] = ()  # the inputs of the last window, by column, if with_rows
        self._with_rows = with_rows
        self.inputs = self.invalid = self.truncated = self.undefined = self._unspaced = self._long = 0
        self._notes: set[str] = set()
        self._limit = "", "max_length"  # the part of an input that is truncated, and the task's option for its length
        self._model = model
        self._form = options.form
        self._words = options.words
        self._hidden = () if options.all_scores else ("scores",)
        self._skip = options.on_error == "skip"
        # Rows are sorted by length within a window, so a window of several batches has little padding.
        self._window = WINDOW * model.batch_size

    def file(self, path: Path, quiet: bool = True, split: Split[Any] | None = None) -> Iterator[Predictions]:
        """Predicts a file, window by window. Unless quiet, progress is shown on stderr.

        Args:
            path: A file, or a pipe such as /dev/stdin or a shell's <(...), which is read as standard input is.
            split: The file's task_split, if the caller has read it.
        """
        if _is_pipe(path):
            with path.open("rb") as stream:
                yield from self.stream(stream)
            return
        form = self._input_form(path)
        self._check_options(path, form)
        split = self.task_split(path) if split is None else split
        if split is not None:
            total = len(split.items)
            starts = range(0, total, self._window)
            parts = (dataclasses.replace(split, items=split.items[first : first + self._window]) for first in starts)
            predicted = self._parts(parts, self._table_rows(path, total))
        else:
            # The file is read twice: progress needs the number of inputs.
            total = sum(1 for _ in input_lines.without_blank_json(tables.numbered_lines(path), form))
            lines = input_lines.windows(input_lines.without_blank_json(tables.numbered_lines(path), form), self._window)
            predicted = (self._lines(path, window, form) for window in lines)
        if not total:
            raise UserError(f"{path} is empty. Give a file with one input per line")
        with Reporter("predicting", total, ["inputs"], quiet) as progress:
            for window in predicted:
                yield window
                progress.update(self.inputs, self.inputs)

    def _parts(self, parts: Iterable[Split[Any]], rows: Sequence[Mapping[str, Any]]) -> Iterator[Predictions]:
        for number, part in enumerate(parts):
            self.rows = rows[number * self._window :][: self._window]
            yield self.split(part)

    def _table_rows(self, path: Path, count: int) -> Sequence[Mapping[str, Any]]:
        """The rows of a table, if they are asked for and are as many as its items."""
        if not self._with_rows or tables.kind_of_file(path) != "table":
            return ()
        columns = self._model.task.columns
        names = [name for name in (columns.text, columns.text_pair, columns.label, *columns.marks) if name]
        rows = tables.whole_rows(path, header=not names or not all(map(tables.is_number, names)))
        # A sentence may have several rows, and a reader may skip some, so only equal numbers pair.
        return rows if len(rows) == count else ()

    def task_split(self, path: Path) -> Split[Any] | None:
        """Reads a file in the training files' format; returns None for a pipe or a file of inputs."""
        if _is_pipe(path) or self._input_form(path) != "task":
            return None
        return registry.read(self._model.task, path, label_required=False)

    def stream(self, stream: IO[bytes]) -> Iterator[Predictions]:
        """Predicts standard input, each window as soon as its lines have arrived."""
        if self._form == "task":
            raise UserError(
                "--form is task, but standard input is read line by line; use text or jsonl, or give a file"
            )
        form = self._form
        # Lines before the first one that shows the form.
        blank: list[input_lines.Line] = []
        for window in input_lines.stream_windows(stream, self._window):
            # The first line that is not blank decides the form of all.
            if form == "auto":
                first = next((text for _, text in window if text.strip()), None)
                if first is None:
                    blank += window
                    continue
                form = input_lines.form_of_line(first)
            self._check_options(input_lines.STDIN, form)
            if inputs := list(input_lines.without_blank_json([*blank, *window], form)):
                yield self._lines(input_lines.STDIN, inputs, form)
            blank = []
        if blank:
            yield self._lines(input_lines.STDIN, blank, "text")

    def objects(self, inputs: Sequence[Any], quiet: bool = True) -> Iterator[Predictions]:
        """Predicts a caller's texts and objects, window by window.

        Unless quiet, the progress of several windows is shown on stderr.

        Raises:
            UserError: `words` is set and no input is a text, or columns are named and all are.
        """
        texts = {isinstance(value, str) for value in inputs}
        if self._words and texts == {False}:
            raise UserError("words is for plain texts, but none of the inputs is one; omit it")
        if self._model.names_columns and texts == {True}:
            raise UserError("columns names the fields of objects, but all inputs are plain texts; omit it")
        with Reporter("predicting", len(inputs), ["inputs"], quiet or len(inputs) <= self._window) as progress:
            for window in input_lines.windows(enumerate(inputs, 1), self._window):
                predictions = self._lines(Path("inputs"), window, input_lines.PYTHON)
                progress.update(self.inputs, self.inputs)
                yield predictions

    def split(self, split: Split[Any]) -> Predictions:
        """Predicts a split, whose labels are ignored."""
        # Unknown labels of a file must not stop a prediction, which needs none.
        rows = self._model.encode(dataclasses.replace(split, labelled=False))
        self.inputs += len(split.items)
        self.truncated += rows.truncated
        self._limit = rows.cut_part, rows.cut_option
        self._unspaced += unspaced_texts(rows.split.items)
        self._long += int((np.bincount(rows.items()) > 1).sum())
        predictions = self._model.predictions(rows)
        self.undefined += sum(map(_is_undefined, predictions))
        return [{name: value for name, value in each.items() if name not in self._hidden} for each in predictions]

    @property
    def limit(self) -> int:
        """The tokens to which inputs are truncated."""
        return int(getattr(self._model.task, self._limit[1]))

    def remarks(self) -> list[str]:
        """Counts the inputs so far with windows, lost tokens, errors or scores that are not finite, one line each."""
        part, option = self._limit
        flag = "--max_length" if option == "max_length" else f"task.{option}"
        parts = part or "inputs"
        were = f"1 {parts.removesuffix('s')} was" if self.truncated == 1 else f"{self.truncated:,} {parts} were"
        rule = task.raw_rule if isinstance(task := self._model.task, RawWords) else ""
        remarks = {
            f"{self._unspaced:,} of {self.inputs:,} inputs have text without spaces between words, which is split "
            f"{rule}": self._unspaced,
            f"{self._long:,} of {self.inputs:,} inputs are longer than {self._model.task.max_length} tokens "
            "(--max_length) and are read in several windows": self._long,
            f"{were} longer than {self.limit} tokens and truncated ({flag})": self.truncated,
            f"{self.invalid:,} of {self.inputs:,} inputs were invalid (see the errors)": self.invalid,
            f"the predictions of {self.undefined:,} of {self.inputs:,} inputs mean nothing, as their scores are "
            "not finite; use an earlier checkpoint or, if its parameters are finite, --compute_dtype float32": (
                self.undefined
            ),
        }
        return [*self._notes, *(line for line, count in remarks.items() if count)]

    def _input_form(self, path: Path) -> str:
        if self._form != "auto":
            return self._form
        form = input_lines.form_of_file(path)
        # A .txt file may hold a table or CoNLL columns. With an option for lines of text, the user has decided.
        if form != "text" or self._words or self._skip or not self._model.task.has_layout(path):
            return form
        self._notes.add(f"{path} is read as the training files are (--form text reads a text on each line)")
        return "task"

    def _check_options(self, source: Path, form: str) -> None:
        refusals = {
            f"--on_error skip is for lines of text and of JSON, but {source} is a task file; omit it": (
                form == "task" and self._skip
            ),
            f"--text and --text_pair name columns, but {source} is read as lines of text, which have none; omit them, "
            "or name the form of the file with --form": form == "text" and self._model.names_columns,
            f"--words is for lines of text, but {source} is read as {form} (--form); omit it": (
                form != "text" and self._words
            ),
        }
        if message := next((message for message, refused in refusals.items() if refused), ""):
            raise UserError(message)

    def _lines(self, source: Path, lines: Iterable[tuple[int, Any]], form: str) -> Predictions:
        lines = list(lines)
        self.rows = [_columns(content, form) for _, content in lines] if self._with_rows else ()
        records: list[InputRecord | None] = []  # None: not an input at all
        valid: list[InputRecord] = []
        errors: dict[int, UserError] = {}  # by place
        for place, (number, content) in enumerate(lines):
            record = None
            try:
                record = self._record(source, number, content, form)
                if self._skip:
                    # Parsed with the first record alone, so that an invalid one does not affect the others.
                    self._model.task.parse(source, [*valid[:1], record])
                valid.append(record)
            except UserError as error:
                if not self._skip:
                    raise
                errors[place] = error
            records.append(record)
        # The valid inputs of a window are predicted together, and go back to their places.
        predictions = iter(self.split(self._model.task.parse(source, valid)) if valid else ())
        self.inputs += len(errors)
        self.invalid += len(errors)
        results: Predictions = []
        for place, record in enumerate(records):
            result = {"error": str(errors[place])} if place in errors else next(predictions)
            if record and isinstance(record.content, Mapping) and "id" in record.content:
                # The id comes first, and as the input has it; questions have an id of their own, which is a text.
                result = {"id": record.content["id"], **{key: result[key] for key in result if key != "id"}}
            results.append(result)
        return results

    def _record(self, source: Path, number: int, content: Any, form: str) -> InputRecord:
        # As in embed, a list or tuple of texts is a pair.
        if isinstance(content, list | tuple) and content and all(isinstance(text, str) for text in content):
            content = tuple(content)
        elif not isinstance(content, str | Mapping):  # of a caller
            raise UserError(
                f"input {number} is {content!r:.60}; expected a text, a tuple of two texts, or an object such as "
                "{'text': ..., 'text_pair': ...}"
            )
        return input_lines.to_record(source, number, content, form, self._words)


def _columns(content: Any, form: str) -> Mapping[str, Any]:
    """Returns an input by column: an object's fields, or a line's texts."""
    if isinstance(content, str) and form == "jsonl":
        try:
            content = json.loads(content)
        except ValueError:  # an input that is skipped
            return {"text": content}
    if isinstance(content, Mapping):
        return content
    texts = content if isinstance(content, list | tuple) else str(content).split("\t")
    return dict(zip(("text", "text_pair"), texts, strict=False))


def _is_pipe(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def _is_undefined(value: Any) -> bool:
    """Whether a prediction holds a number that is NaN or infinite, at any depth."""
    if isinstance(value, Mapping):
        return any(map(_is_undefined, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_undefined, value))
    return isinstance(value, float) and not math.isfinite(value)


Prediction = dict[str, Any]  # by field, which the kind of task decides


def predict(
    checkpoint: str | Path | LoadedModel,
    inputs: Iterable[Any] | Path,
    *,
    columns: Columns | Mapping[str, str] | None = None,
    average: str = "",
    quiet: bool | None = None,
    on_truncated: Callable[[int, int], None] | None = None,
    **options: Any,
) -> list[Prediction]:
    """Predicts texts with a fine-tuned checkpoint.

    Args:
        inputs: Plain texts, whose tabs are white space, tuples of two texts for pairs, and objects; or the path to a
            file.
        columns: The columns in a task file or in objects, such as {"text": "review", "text_pair": "title"}, if the
            checkpoint does not record them.
        average: The average to read if the checkpoint is a path, as in open_checkpoint.
        quiet: Whether to show only warnings; by default, a terminal or notebook shows progress.
        on_truncated: Receives the number of truncated inputs and the limit, instead of a printed line.
        options: The fields of PredictOptions.

    Returns:
        One object per input, in order. `bert-jax predict --help` lists its fields.

    Raises:
        UserError: The checkpoint was not fine-tuned, an option is unknown or not used, or an input is empty, incomplete
            or malformed; with on_error="skip" its result is {"error": ...} instead.
    """
    given = from_keywords(PredictOptions, options)
    if not isinstance(inputs, Path):
        refuse_other_inputs(inputs)
    loaded = checkpoint if isinstance(checkpoint, LoadedModel) else open_checkpoint(checkpoint, average)
    predictor = InputPredictor(open_model(loaded, given, columns), given)
    quiet = not is_watched() if quiet is None else quiet
    windows = predictor.file(inputs, quiet) if isinstance(inputs, Path) else predictor.objects(list(inputs), quiet)
    # All windows, before the remarks count what they hold.
    predictions = [prediction for window in windows for prediction in window]
    # A caller that receives the number gets no remark about it.
    if on_truncated is not None:
        on_truncated(predictor.truncated, predictor.limit)
        predictor.truncated = 0
    for remark in predictor.remarks():
        print_note(remark)
    return predictions


def open_model(loaded: LoadedModel, options: PredictOptions, columns: Columns | Mapping[str, str] | None) -> FineTuned:
    """Returns the model that predicts with these options. Raises UserError as FineTuned does, and for other columns."""
    if isinstance(columns, Mapping):
        if other := sorted(columns.keys() - {"text", "text_pair"}):
            raise UserError(f"columns names {other[0]!r}; it may name the columns of text and text_pair")
        columns = Columns(columns.get("text", ""), columns.get("text_pair", ""))
    return FineTuned(
        loaded,
        batch_size=options.batch_size,
        max_length=options.max_length,
        compute_dtype=options.compute_dtype,
        columns=columns,
        null_threshold=options.null_threshold,
    )
