"""Predicts labels, scores, tags, entities or answers for a file, and writes them as JSON lines or for a leaderboard."""

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from bert_jax import command_line
from bert_jax.errors import UserError
from bert_jax.interop.open_checkpoint import add_average_flag, open_checkpoint
from bert_jax.storage.files import atomic_file
from bert_jax.tasks import leaderboards
from bert_jax.tasks.inference import FineTuned
from bert_jax.tasks.kinds.question import QuestionTask
from bert_jax.tasks.named import TASKS
from bert_jax.tasks.prediction import InputPredictor, Predictions
from bert_jax.tasks.reading import inputs
from bert_jax.tasks.reading.tables import Columns
from bert_jax.train.compilation import enable_compilation_cache

BENCHMARKS = {"glue": ".tsv", "superglue": ".jsonl"}  # the ending of the files that each leaderboard accepts
SQUAD = "squad"
FORMATS = ("lines", *BENCHMARKS, SQUAD)
CHECKPOINT_HELP = "a fine-tuning workdir, a step in it, an export, or a Hugging Face folder (hf:NAME) with a task head"
COMPUTE_DTYPE_HELP = "float32, bfloat16 or auto (default: auto, which is float32 on CPU and bfloat16 elsewhere)"
DIGITS = 7  # significant digits of a float32

DESCRIPTION = """Runs a fine-tuned checkpoint on texts and writes one JSON object per line, in the order of the inputs.

  bert-jax predict --checkpoint runs/sst2 --input reviews.txt --output moods.jsonl
  echo "Ann Lee moved to Rome." | bert-jax predict --checkpoint runs/conll2003 --input -
  bert-jax predict --checkpoint runs/mrpc --input pairs.jsonl --all_scores

Input: a UTF-8 file, plain or compressed (.gz, .xz, .zst), or standard input. The file name decides the form:
  .txt, .text, none  text: one input per line; a tab separates its two texts (a pair, or question and context)
  .jsonl, .ndjson    jsonl: one JSON object per line, with the fields text (and text_pair), tokens, question and
                     context, or choices, or with the names of the task's columns
  any other          task: a file in the format of the training files (.tsv, .conll, .conllu, .json, ...)
Set --form if the name does not match. Standard input is read as jsonl if its first line is a JSON object, otherwise
as text.

Output: the fields of each object depend on the kind of task:
  classification     label, score (the probability of the label)
  regression         score
  multilabel         labels, label_scores (their probabilities)
  choice             label (the index of the choice, from 0), choice, score
  tagging            words, tags, tag_scores; for entity tags also entities (type, text, score, the mean over its words,
                     words, start, end)
  token_regression   words, numbers (one for each word)
  question           answer, score, start, end; no_answer_probability and null_odds, where there may be no answer
  spans, span_pairs  words, spans (type, text, score, words, start, end); for span_pairs also relations (type, head and
                     tail, which are indices of spans, and score)
start and end are character positions in the input text, which an input of tokens does not have; end is exclusive. The
words of a span are the index of its first word and the index after its last. If an input object has an id, its output
object has the same id. A score that is not finite is null.

For tasks on words, the text is split at white space, and each punctuation mark or symbol is a word of its own. If the
text is already split into words separated by spaces, pass --words.

Lines are written as soon as they are predicted. Text and JSON lines are read in bounded memory, a file in the format of
the training files as a whole. A file named by --output appears only when it is complete.

To submit to the GLUE or SuperGLUE leaderboard, pass the benchmark's own test file as --input, glue or superglue as
--format, and a folder as --output. With --format squad, the answers to questions are written as predictions.json and,
where there may be none, the odds of no answer as null_odds.json. There may be none if the checkpoint learned so, if
--null_threshold is given, or if a question of the input has none.
"""


def _parser() -> command_line.Parser:
    parser = command_line.Parser("bert-jax predict", DESCRIPTION)
    parser.add_argument("--checkpoint", required=True, help=CHECKPOINT_HELP)
    parser.add_argument("--input", required=True, metavar="FILE", help="the texts (see above); - for standard input")
    parser.add_argument("--output", default="", metavar="FILE", help="the file to write (default: standard output)")
    meaning = f"lines (default), or a leaderboard's format: {', '.join(FORMATS[1:])}; --output is then a folder"
    parser.add_argument("--format", default="lines", help=meaning)
    meaning = f"see above: {', '.join(inputs.FORMS)} (default: auto)"
    parser.add_argument("--form", "--input_format", default="auto", help=meaning)
    parser.add_argument("--words", action="store_true", help="each line of text is words separated by spaces")
    all_scores = "also write scores: of all classes or choices, or of the 20 best answers (no effect for other kinds)"
    parser.add_argument("--all_scores", action="store_true", help=all_scores)
    on_error = "fail (default), or skip: write an error object; not for task files"
    parser.add_argument("--on_error", default="fail", help=on_error)
    parser.add_argument("--batch_size", type=int, default=32, metavar="N", help="inputs per batch (default: 32)")
    parser.add_argument(
        "--max_length", type=int, default=0, metavar="N", help="truncate to N tokens (default: as fine-tuned)"
    )
    parser.add_argument("--compute_dtype", default="auto", help=COMPUTE_DTYPE_HELP)
    meaning = "of questions: the probability of no answer above which none is given (default: as fine-tuned)"
    parser.add_argument("--null_threshold", type=float, metavar="P", help=meaning)
    add_average_flag(parser)
    for column in ("text", "text_pair"):
        meaning = f"the {column} column of a task file, by name or number (default: as in fine-tuning)"
        parser.add_argument(f"--{column}", default="", help=meaning)
    return parser


def main(arguments: Sequence[str]) -> None:
    options = _parser().parse_args(list(arguments))
    enable_compilation_cache()
    columns = Columns(options.text, options.text_pair)
    # Checked before the model is opened, which takes seconds.
    if options.format not in FORMATS:
        raise UserError(f"unknown --format {options.format!r}; choose from {', '.join(FORMATS)}")
    if options.format in BENCHMARKS and options.form not in ("auto", "task"):
        raise UserError(
            f"--format {options.format} is for the benchmark's own files, but --form is {options.form}; omit it"
        )
    into_folder = options.format != "lines"
    with _output("" if into_folder else options.output) as output:
        model = FineTuned(
            open_checkpoint(options.checkpoint, options.average),
            batch_size=options.batch_size,
            max_length=options.max_length,
            compute_dtype=options.compute_dtype,
            columns=columns if columns != Columns() else None,
            null_threshold=options.null_threshold,
        )
        form = "task" if options.format in BENCHMARKS else options.form
        predictor = InputPredictor(
            model, form=form, words=options.words, all_scores=options.all_scores, on_error=options.on_error
        )
        if into_folder:
            for path in _submit(predictor, model, Path(options.input), options.output, options.format):
                print(path)
            windows: Iterable[Predictions] = ()
        elif options.input == "-":
            windows = predictor.stream(sys.stdin.buffer)
        else:
            windows = predictor.file(Path(options.input), quiet=not options.output)
        for window in windows:
            output.write("".join(map(_line, window)).encode())
            output.flush()  # a reader of a pipe gets each window as soon as it is predicted
    for remark in predictor.remarks():
        print(remark, file=sys.stderr)


def _submit(predictor: InputPredictor, model: FineTuned, path: Path, output: str, benchmark: str) -> list[Path]:
    """Predicts the benchmark's own file of a split and writes the leaderboard's submission files."""
    if not output:
        raise UserError(f"--format {benchmark} needs a folder to write to; name the folder with --output")
    task = model.task
    if benchmark == SQUAD:
        if not isinstance(task, QuestionTask):
            raise UserError(
                f"--format squad is for tasks of kind question, but the checkpoint's is {task.kind}. Omit it"
            )
        if (questions := predictor.task_split(path)) is not None:
            model.task = task.for_questions_of(questions)
        windows = predictor.file(path, quiet=False, split=questions)
        found = [one for window in windows for one in window if "answer" in one]
        return leaderboards.write_squad(found, output)
    split = TASKS[task.name].split_of(path) if task.name in TASKS else ""
    if not leaderboards.FILES.get((task.name, split), "").endswith(BENCHMARKS[benchmark]):
        raise UserError(
            f"the {benchmark} leaderboard does not accept predictions of {path.name} for task {task.name}. Use the "
            "unlabelled test file of one of its tasks, under the name that the benchmark gives it, or omit --format"
        )
    predictions = [prediction for window in predictor.file(path, quiet=False) for prediction in window]
    return [leaderboards.write_submission(task, split, predictions, output)]


def _line(prediction: dict[str, Any]) -> str:
    return json.dumps(_rounded(prediction), ensure_ascii=False) + "\n"


def _rounded(value: Any) -> Any:
    """Rounds the floats in a JSON value to the digits that a float32 holds; null stands for what JSON cannot write."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value


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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
