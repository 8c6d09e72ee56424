"""Predicts labels, scores, tags, entities or answers for texts with a fine-tuned checkpoint."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bert_jax.config.options import Checked, at_least, between, from_keywords, option
from bert_jax.errors import UserError
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model.runtime import COMPUTE_DTYPES
from bert_jax.progress import Reporter, is_watched, print_note
from bert_jax.tasks import registry
from bert_jax.tasks.embedder import refuse_other_inputs
from bert_jax.tasks.inference import FineTuned
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
    """Predicts windows of inputs with a fine-tuned model; counts those that are truncated, invalid or without a score.

    Without all_scores, predictions have no `scores`. An invalid input raises UserError, or with on_error="skip" it has
    {"error": ...} in its place. Raises UserError for options that the form of a file does not use.
    """

    def __init__(self, model: FineTuned, options: PredictOptions) -> None:
        self.inputs = self.invalid = self.truncated = self.undefined = 0
        self._limit = "", "max_length"  # the part of an input that is truncated, and the task's option for its length
        self._model = model
        self._form = options.form
        self._words = options.words
        self._hidden = () if options.all_scores else ("scores",)
        self._skip = options.on_error == "skip"
        self._window = WINDOW * model.batch_size

    def file(self, path: Path, quiet: bool = True, split: Split[Any] | None = None) -> Iterator[Predictions]:
        """The predictions for a file, window by window. Unless quiet, progress is shown on stderr.

        split is the file's task_split, where the caller has read it. A pipe, such as /dev/stdin or the file of <(...)
        in a shell, is read as standard input is.
        """
        if _is_pipe(path):
            with path.open("rb") as stream:
                yield from self.stream(stream)
            return
        form = self._form_of(path)
        self._check_options(path, form)
        split = self.task_split(path) if split is None else split
        if split is not None:
            total = len(split.items)
            starts = range(0, total, self._window)
            parts = (dataclasses.replace(split, items=split.items[first : first + self._window]) for first in starts)
            predicted = (self.split(part) for part in parts)
        else:
            total = sum(1 for _ in input_lines.inputs_of(tables.numbered_lines(path), form))
            lines = input_lines.windows(input_lines.inputs_of(tables.numbered_lines(path), form), self._window)
            predicted = (self._lines(path, window, form) for window in lines)
        if not total:
            raise UserError(f"{path} is empty. Give a file with one input per line")
        with Reporter("predicting", total, ["inputs"], quiet) as progress:
            for window in predicted:
                yield window
                progress.update(self.inputs, self.inputs)

    def task_split(self, path: Path) -> Split[Any] | None:
        """The content of a file that has the format of the training files; None for a pipe or a file of inputs."""
        if _is_pipe(path) or self._form_of(path) != "task":
            return None
        return registry.read(self._model.task, path, label_required=False)

    def stream(self, stream: IO[bytes]) -> Iterator[Predictions]:
        """The predictions for standard input, each window as soon as its lines have arrived."""
        if self._form == "task":
            raise UserError(
                "--form is task, but standard input is read line by line; use text or jsonl, or give a file"
            )
        form = self._form
        blank: list[input_lines.Line] = []  # before the first line that shows the form
        for window in input_lines.stream_windows(stream, self._window):
            if form == "auto":
                first = next((text for _, text in window if text.strip()), None)
                if first is None:
                    blank += window
                    continue
                form = input_lines.form_of_line(first)
            self._check_options(input_lines.STDIN, form)
            if inputs := list(input_lines.inputs_of([*blank, *window], form)):
                yield self._lines(input_lines.STDIN, inputs, form)
            blank = []
        if blank:
            yield self._lines(input_lines.STDIN, blank, "text")

    def objects(self, inputs: Sequence[Any], quiet: bool = True) -> Iterator[Predictions]:
        """The predictions for texts and objects of the caller, window by window.

        Unless quiet, the progress of several windows is shown on stderr. Raises UserError for words without a text,
        and for columns of texts alone.
        """
        texts = [isinstance(one, str) for one in inputs]
        if texts and self._words and not any(texts):
            raise UserError("words is for plain texts, but none of the inputs is one; omit it")
        if texts and self._model.names_columns and all(texts):
            raise UserError("columns names the fields of objects, but all inputs are plain texts; omit it")
        with Reporter("predicting", len(inputs), ["inputs"], quiet or len(inputs) <= self._window) as progress:
            for window in input_lines.windows(enumerate(inputs, 1), self._window):
                predictions = self._lines(Path("inputs"), window, input_lines.PYTHON)
                progress.update(self.inputs, self.inputs)
                yield predictions

    def split(self, split: Split[Any]) -> Predictions:
        """The predictions for a split, whose labels are ignored."""
        rows = self._model.encode(dataclasses.replace(split, labelled=False))
        self.inputs += len(split.items)
        self.truncated += rows.truncated
        self._limit = rows.cut_part, rows.cut_option
        predictions = self._model.predictions(rows)
        self.undefined += sum(map(_is_undefined, predictions))
        return [{name: value for name, value in one.items() if name not in self._hidden} for one in predictions]

    def remarks(self) -> list[str]:
        """Messages about the inputs so far that were truncated, invalid or without a score, one line each."""
        found = []
        part, option = self._limit
        if self.truncated:
            limit = f"{getattr(self._model.task, option)} tokens"
            flag = "--max_length" if option == "max_length" else f"task.{option}"
            parts = part or "inputs"
            what = f"1 {parts.removesuffix('s')} was" if self.truncated == 1 else f"{self.truncated:,} {parts} were"
            found.append(f"{what} longer than {limit} and truncated ({flag})")
        if self.invalid:
            found.append(f"{self.invalid:,} of {self.inputs:,} inputs were invalid (see the errors)")
        if self.undefined:
            found.append(
                f"the predictions of {self.undefined:,} of {self.inputs:,} inputs mean nothing, as their scores are "
                "not finite; use an earlier checkpoint or, if its parameters are finite, --compute_dtype float32"
            )
        return found

    def _form_of(self, path: Path) -> str:
        return input_lines.form_of_file(path) if self._form == "auto" else self._form

    def _check_options(self, source: Path, form: str) -> None:
        if form == "task" and self._skip:
            raise UserError(f"--on_error skip is for lines of text and of JSON, but {source} is a task file; omit it")
        if form == "text" and self._model.names_columns:
            raise UserError(
                f"--text and --text_pair name columns, but {source} is read as lines of text, which have none; omit "
                "them, or name the form of the file with --form"
            )
        if form != "text" and self._words:
            raise UserError(f"--words is for lines of text, but {source} is read as {form} (--form); omit it")

    def _lines(self, source: Path, lines: Iterable[tuple[int, Any]], form: str) -> Predictions:
        records: list[InputRecord | UserError] = []
        valid: list[InputRecord] = []
        for number, content in lines:
            records.append(record := self._record(source, number, content, form, valid[:1]))
            if isinstance(record, InputRecord):
                valid.append(record)
        predictions = iter(self.split(self._model.task.parse(source, valid)) if valid else ())
        invalid = len(records) - len(valid)
        self.inputs += invalid
        self.invalid += invalid
        return [
            _with_id(record, next(predictions)) if isinstance(record, InputRecord) else {"error": str(record)}
            for record in records
        ]

    def _record(
        self, source: Path, number: int, content: Any, form: str, first: Sequence[InputRecord]
    ) -> InputRecord | UserError:
        try:
            if not isinstance(content, str | Mapping):  # of a caller
                raise UserError(
                    f"input {number} is {content!r:.60}; expected a text, or an object such as {{'text': ..., "
                    "'text_pair': ...}"
                )
            record = input_lines.record_of(source, number, content, form, self._words)
            if self._skip:  # parsed with the first alone, so that an invalid record does not affect the others
                self._model.task.parse(source, [*first, record])
        except UserError as error:
            if not self._skip:
                raise
            return error
        return record


def _is_pipe(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def _is_undefined(value: Any) -> bool:
    """Whether a prediction holds a number that is NaN or infinite, at any depth."""
    if isinstance(value, Mapping):
        return any(map(_is_undefined, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_undefined, value))
    return isinstance(value, float) and not math.isfinite(value)


def _with_id(record: InputRecord, prediction: dict[str, Any]) -> dict[str, Any]:
    """The prediction, with the id of the input if it has one."""
    if isinstance(record.content, Mapping) and "id" in record.content:
        # Questions have an id of their own, which is a text.
        return {"id": record.content["id"]} | {name: value for name, value in prediction.items() if name != "id"}
    return prediction


Prediction = dict[str, Any]  # by field, which the kind of task decides


def predict(
    checkpoint: str | Path | LoadedModel,
    inputs: Iterable[Any] | Path,
    *,
    columns: Columns | Mapping[str, str] | None = None,
    average: str = "",
    **options: Any,
) -> list[Prediction]:
    """Returns the predictions of a fine-tuned checkpoint, one object per input in order (fields: see `--help`).

    inputs are plain texts, whose tabs are white space, and objects, or the path of a file. columns names those of a
    task file or of objects, such as {"text": "review", "text_pair": "title"}, for a checkpoint that does not record
    them. options are those of PredictOptions. average applies to a checkpoint given by its path, as in open_checkpoint.
    Raises UserError, naming the line, for an input that is empty, incomplete or malformed (with on_error="skip" its
    result is {"error": ...} instead), for a checkpoint that was not fine-tuned, options that the form of a file does
    not use, and a null_threshold of a task without questions.
    """
    given = from_keywords(PredictOptions, options)
    if isinstance(inputs, str):
        raise UserError(f"inputs is the text {inputs!r:.40}; give a list of texts, or a pathlib.Path for a file")
    if not isinstance(inputs, Path):
        refuse_other_inputs(inputs)
    loaded = checkpoint if isinstance(checkpoint, LoadedModel) else open_checkpoint(checkpoint, average)
    predictor = InputPredictor(open_model(loaded, given, columns), given)
    quiet = not is_watched()
    windows = predictor.file(inputs, quiet) if isinstance(inputs, Path) else predictor.objects(list(inputs), quiet)
    found = [prediction for window in windows for prediction in window]
    for remark in predictor.remarks():
        print_note(remark)
    return found


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
