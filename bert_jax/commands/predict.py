"""Predicts labels, scores, tags, entities or answers for a file; writes JSON lines, CSV or a leaderboard's files."""

import contextlib
import csv
import io
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from bert_jax.config.options import check, option, parse
from bert_jax.errors import UserError
from bert_jax.interop.open_checkpoint import CheckpointOptions, open_checkpoint
from bert_jax.storage.files import atomic_file, format_of_ending, naming_temporary
from bert_jax.tasks import leaderboards
from bert_jax.tasks.inference import FineTuned
from bert_jax.tasks.kinds.question import QuestionTask
from bert_jax.tasks.named import TASKS
from bert_jax.tasks.prediction import InputPredictor, Predictions, PredictOptions, open_model
from bert_jax.tasks.reading.tables import Columns
from bert_jax.train.compilation import enable_compilation_cache

BENCHMARKS = {"glue": ".tsv", "superglue": ".jsonl"}  # the ending of the files that each leaderboard accepts
SQUAD = "squad"
FORMATS = ("lines", *BENCHMARKS, SQUAD)
ENDINGS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", "": "jsonl"}  # of --output
DIGITS = 7  # significant digits of a float32

DESCRIPTION = """Runs a fine-tuned checkpoint on texts and writes one JSON object per line, in the order of the inputs.

  bert-jax predict --checkpoint runs/sst2 --input reviews.txt --output moods.jsonl
  echo "Ann Lee moved to Rome." | bert-jax predict --checkpoint runs/conll2003 --input -

Input: a UTF-8 file, plain or compressed (.gz, .xz, .zst), or standard input. The file name decides the form, or --form:
  .txt, .text, none  text: one input per line; a tab separates its two texts (a pair, or question and context)
  .jsonl, .ndjson    jsonl: one object per line, with text (and text_pair), tokens, question and context, choices, or
                     the names of the task's columns
  any other          task: a file in the format of the training files (.tsv, .conll, .conllu, .json, ...)
Standard input is read as jsonl if its first line is an object, otherwise as text. Tasks on words split text at white
space and around punctuation, or with --words at white space alone.

Output: the fields of an object depend on the kind of task:
  classification     label, score (the probability of the label)
  regression         score
  multilabel         labels, label_scores (their probabilities)
  choice             label (the index of the choice, from 0), choice, score
  tagging            words, tags, tag_scores; for entity tags also entities (type, text, score: the mean over its words,
                     words, start, end)
  token_regression   words, numbers (one for each word)
  question           answer, score, start, end; no_answer_probability and null_odds, if there may be no answer
  spans, span_pairs  words, spans (type, text, score, words, start, end); for span_pairs also relations (type, head and
                     tail, which are indices of spans, and score)
start and end are character positions, and words of a span its indices; the end is exclusive. An output has the id of
its input. A score that is not finite is null. The file of --output appears only when it is complete.
--output FILE.csv writes a table instead: the columns of the input (text and text_pair for lines of text), then the
fields above, whose names begin with predicted_ if the input has such a column. Lists and objects are JSON in a cell.

For the GLUE and SuperGLUE leaderboards, give the benchmark's own test file, --format glue or superglue, and a folder as
--output. --format squad writes predictions.json and, if there may be no answer (the checkpoint learned so, a question
has none, or --null_threshold is given), null_odds.json.
"""


@dataclass(frozen=True, kw_only=True)
class Options(PredictOptions, CheckpointOptions):
    input: str = option(help="the texts (see above); - for standard input", metavar="FILE")
    output: str = option("", "the file to write; default: standard output", metavar="FILE")
    format: str = option("lines", "lines, or a leaderboard's, for which --output is a folder", choices=FORMATS)
    text: str = option("", "column of the text in a task file, name or number; default: as fine-tuned")
    text_pair: str = option("", "the same for the second text", metavar="TEXT")

    def __post_init__(self) -> None:
        check(self)
        if self.format in BENCHMARKS and self.form not in ("auto", "task"):
            raise UserError(
                f"--format {self.format} is for the benchmark's own files, but --form is {self.form}; omit it"
            )
        if self.format != "lines" and not self.output:
            raise UserError(f"--format {self.format} needs a folder to write to; name the folder with --output")

    @property
    def as_csv(self) -> bool:
        return self.format == "lines" and format_of_ending(self.output, ENDINGS) == "csv"


def main(arguments: Sequence[str]) -> None:
    options = parse("bert-jax predict", DESCRIPTION, Options, arguments)
    enable_compilation_cache()
    columns = Columns(options.text, options.text_pair)
    # The benchmark's own files have the layout of training files, whatever their names say.
    if options.format in BENCHMARKS:
        options = replace(options, form="task")
    into_folder, as_csv = options.format != "lines", options.as_csv
    with _output("" if into_folder else options.output) as output, _waiting_table(as_csv) as table:
        loaded = open_checkpoint(options.checkpoint, options.average)
        model = open_model(loaded, options, columns if columns != Columns() else None)
        predictor = InputPredictor(model, options, with_rows=as_csv)
        if into_folder:
            for path in _submit(predictor, model, Path(options.input), options.output, options.format):
                print(path)
            windows: Iterable[Predictions] = ()
        elif options.input == "-":
            windows = predictor.stream(sys.stdin.buffer)
        else:
            windows = predictor.file(Path(options.input), quiet=not options.output)
        for window in windows:
            if table is not None:
                table.add(zip(predictor.rows or [{}] * len(window), map(_rounded, window), strict=True))
                continue
            lines = [json.dumps(_rounded(prediction), ensure_ascii=False) + "\n" for prediction in window]
            output.write("".join(lines).encode())
            output.flush()  # a reader of a pipe gets each window as soon as it is predicted
        if table is not None:
            table.write(output)
    for remark in predictor.remarks():
        print(remark, file=sys.stderr)


def _submit(predictor: InputPredictor, model: FineTuned, path: Path, output: str, benchmark: str) -> list[Path]:
    """Predicts a benchmark's own file and writes the leaderboard's submission files."""
    task = model.task
    if benchmark == SQUAD:
        if not isinstance(task, QuestionTask):
            raise UserError(
                f"--format squad is for tasks of kind question, but the checkpoint's is {task.kind}. Omit it"
            )
        # Whether questions may have no answer is known from the file, before the first of them is predicted.
        if (questions := predictor.task_split(path)) is not None:
            model.task = task.for_split(questions)
        windows = predictor.file(path, quiet=False, split=questions)
        answers = [prediction for window in windows for prediction in window if "answer" in prediction]
        return leaderboards.write_squad(answers, output)
    split = TASKS[task.name].match_split(path) if task.name in TASKS else ""
    if not leaderboards.FILES.get((task.name, split), "").endswith(BENCHMARKS[benchmark]):
        raise UserError(
            f"the {benchmark} leaderboard does not accept predictions of {path.name} for task {task.name}. Use the "
            "unlabelled test file of one of its tasks, under the name that the benchmark gives it, or omit --format"
        )
    predictions = [prediction for window in predictor.file(path, quiet=False) for prediction in window]
    return [leaderboards.write_submission(task, split, predictions, output)]


class _Table:
    """A CSV table: the inputs' columns, then the predictions'.

    JSON lines may have different fields, so rows wait in a temporary file until the columns of all are known.
    """

    def __init__(self, waiting: IO[str]) -> None:
        self._waiting = waiting
        self._columns: dict[str, None] = {}  # names in order, as the keys
        self._fields: dict[str, None] = {}
        self._different: set[str] = set()  # names whose values of input and prediction differ in a row

    def add(self, rows: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> None:
        for row, prediction in rows:
            self._columns |= dict.fromkeys(row)
            self._fields |= dict.fromkeys(prediction)
            self._different |= {name for name in (*row, *prediction) if row.get(name) != prediction.get(name)}
            cells = [{name: _cell(value) for name, value in part.items()} for part in (row, prediction)]
            with naming_temporary():
                self._waiting.write(json.dumps(cells) + "\n")

    def write(self, output: IO[bytes]) -> None:
        columns = list(self._columns)
        # An output repeats the id of its input, and words that were given; both are columns already.
        fields = [name for name in self._fields if name not in self._columns or name in self._different]
        with naming_temporary():  # which writes the last rows
            self._waiting.seek(0)
        content = io.TextIOWrapper(output, encoding="utf-8", newline="")
        writer = csv.writer(content, lineterminator="\n")
        writer.writerow([*columns, *(f"predicted_{name}" if name in columns else name for name in fields)])
        for row, prediction in map(json.loads, self._waiting):
            writer.writerow([row.get(name, "") for name in columns] + [prediction.get(name, "") for name in fields])
        content.detach()


@contextlib.contextmanager
def _waiting_table(as_csv: bool) -> Iterator[_Table | None]:
    if not as_csv:
        yield None
        return
    with contextlib.ExitStack() as stack:
        with naming_temporary():
            waiting = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8"))
        yield _Table(waiting)


def _cell(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False, default=str)


def _rounded(value: Any) -> Any:
    """Rounds floats in a JSON value to a float32's digits; NaN and infinities become null, as JSON has neither."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _rounded(field) for name, field in value.items()}
    return [_rounded(element) for element in value] if isinstance(value, list | tuple) else value


@contextlib.contextmanager
def _output(path: str) -> Iterator[IO[bytes]]:
    """Opens the output file, which appears only when it is complete, or standard output if the path is empty."""
    if path:
        with atomic_file(Path(path)) as file:
            yield file
        return
    try:
        yield sys.stdout.buffer
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        # Python flushes standard output again at its end, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
