"""What a fine-tuned checkpoint says of texts: labels, scores, tags, entities, answers, one JSON line an input."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from bert_jax import command
from bert_jax.command import UserError
from bert_jax.interop import checkpoint_average
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.storage.local import atomic_file
from bert_jax.tasks import input_lines, submission
from bert_jax.tasks.inference import FineTuned
from bert_jax.tasks.named import TASKS
from bert_jax.tasks.predictor import Answering, Counts
from bert_jax.tasks.reading import Columns
from bert_jax.tasks.task import Task

BENCHMARKS = {"glue": ".tsv", "superglue": ".jsonl"}  # and how the files are called that they take
FORMATS = ("lines", *BENCHMARKS)
DIGITS = 7  # of a float32

DESCRIPTION = """Says what a fine-tuned checkpoint makes of texts, one JSON line an input, in their order.

  python -m bert_jax.predict --checkpoint runs/sst2 --input reviews.txt --output moods.jsonl
  echo "Ann Lee moved to Rome." | python -m bert_jax.predict --checkpoint runs/conll2003 --input -
  python -m bert_jax.predict --checkpoint runs/mrpc --input pairs.jsonl --all_scores

CHECKPOINT is a workdir of bert_jax.finetune, a step in it, an export, or a Hugging Face folder with a task's head.
--input, UTF-8, plain, .gz, .xz or .zst, or - for standard input:
  .txt    one input a line; a tab parts the texts of one (a pair; question and context)
  .jsonl  one object a line: text, text_pair; tokens; question, context; choices; or the names of the task's columns
  else    a file as those the model was trained on (.tsv with its columns, .conll, .conllu, .json ...)
--form text, jsonl or task says it where the name does not. Standard input is JSON where its first line is.

What is told: of a class label and score (its probability); of a regression score; of a tagger words, tags, tag_scores
and entities with type, text, score, start and end; of numbers by word words and numbers; of a question answer, score,
start and end; of spans words, spans and relations; of choices label (its place), choice and score.
start and end are characters [start, end) of the raw text. Raw text is split into words by white space, and every
punctuation mark or symbol is a word; --words takes lines whose blanks part the words already. An `id` in an object is
told with its answer.
Lines come out as soon as they are known; --output appears whole or not at all. --format glue (superglue) writes what
the leaderboard takes of --input, the benchmark's own file of a split, into the folder --output.
"""


def predict(
    checkpoint: str | Path | LoadedModel,
    inputs: Sequence[str | Mapping[str, Any]] | Path,
    *,
    form: str = "auto",
    words: bool = False,
    all_scores: bool = False,
    on_error: str = "fail",
    batch_size: int = 32,
    max_length: int = 0,
    compute_dtype: str = "auto",
    columns: Columns | None = None,
    average: str = "",
) -> list[dict[str, Any]]:
    """What a fine-tuned checkpoint says of each input, in order, as `--help` tells it.

    inputs are plain texts and objects, or the path of a file. columns are those of a task's file, where the checkpoint
    does not know them; average is of a checkpoint given by its path, as in open_checkpoint.
    Raises UserError, naming the line, for an input that is empty, incomplete or broken (with on_error=skip it is told
    as {"error": ...} in its place), for a checkpoint that was not fine-tuned, and an unknown form.
    """
    if isinstance(inputs, str):
        raise UserError(f"inputs is the text {inputs!r:.40}; give a list of texts, or a pathlib.Path for a file")
    loaded = checkpoint if isinstance(checkpoint, LoadedModel) else open_checkpoint(checkpoint, average)
    model = FineTuned(
        loaded, batch_size=batch_size, max_length=max_length, compute_dtype=compute_dtype, columns=columns
    )
    answering = Answering(model, words, all_scores, on_error)
    if isinstance(inputs, Path):
        return [told for window in answering.of_file(inputs, form) for told in window]
    answers: list[dict[str, Any]] = []
    for first in range(0, len(inputs), answering.window):
        answers += answering.of_given(inputs[first : first + answering.window], first + 1)
    return answers


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("bert_jax.predict", DESCRIPTION)
    parser.add_argument("--checkpoint", required=True, help="what was fine-tuned")
    parser.add_argument("--input", required=True, metavar="FILE", help="the texts; - for standard input")
    parser.add_argument("--output", default="", metavar="FILE", help="the file to make (default: standard output)")
    what = f"lines (default), or the file that a leaderboard takes: {', '.join(BENCHMARKS)}; --output is then a folder"
    parser.add_argument("--format", default="lines", help=what)
    parser.add_argument("--form", default="auto", help=f"of the input: {', '.join(input_lines.FORMS)} (default: auto)")
    parser.add_argument("--words", action="store_true", help="lines of text are words, parted by blanks")
    all_scores = "tell those of all classes or choices, or a question's n_best answers; other kinds have none"
    parser.add_argument("--all_scores", action="store_true", help=all_scores)
    parser.add_argument("--on_error", default="fail", help="at a bad input: fail, or skip (default: fail)")
    parser.add_argument("--batch_size", type=int, default=32, metavar="N", help="rows a batch (default: 32)")
    parser.add_argument("--max_length", type=int, default=0, metavar="N", help="tokens (default: as in fine-tuning)")
    parser.add_argument("--compute_dtype", default="auto", help="float32, bfloat16, auto (default: float32 on a CPU)")
    checkpoint_average.add_argument(parser)
    for column in ("text", "text_pair"):
        what = f"the {column} column of a task's file, by name or number (default: as the checkpoint was trained)"
        parser.add_argument(f"--{column}", default="", help=what)
    options = parser.parse_args(list(arguments))
    columns = Columns(options.text, options.text_pair)
    if options.format not in FORMATS:
        raise UserError(f"--format is {options.format!r}; use one of: {', '.join(FORMATS)}")
    with _output("" if options.format in BENCHMARKS else options.output) as output:
        loaded = open_checkpoint(options.checkpoint, options.average)
        model = FineTuned(
            loaded,
            batch_size=options.batch_size,
            max_length=options.max_length,
            compute_dtype=options.compute_dtype,
            columns=columns if columns != Columns() else None,
        )
        answering = Answering(model, options.words, options.all_scores, options.on_error)
        if options.format in BENCHMARKS:
            print(_submit(answering, model, Path(options.input), options.output, options.format))
            return
        if options.input == "-":
            found = answering.of_stream(sys.stdin.buffer, options.form)
        else:
            found = answering.of_file(Path(options.input), options.form, quiet=not options.output)
        for window in found:
            output.write("".join(map(_line, window)).encode())
            output.flush()
    _tell(answering.counts, model.task)


def _submit(answering: Answering, model: FineTuned, path: Path, output: str, benchmark: str) -> Path:
    """Answers the benchmark's own file of a split and writes what its leaderboard takes."""
    if not output:
        raise UserError(f"--format is {benchmark}: name the folder of its files by --output")
    task = model.task
    split = TASKS[task.name].split_of(path) if task.name in TASKS else ""
    if not submission.file_name(task.name, split).endswith(BENCHMARKS[benchmark]):
        raise UserError(
            f"{benchmark} takes nothing of {path.name} and task {task.name}. Name the unlabelled file of one of its "
            "tasks, called as the benchmark calls it, or leave out --format"
        )
    told = [one for window in answering.of_file(path, "task", quiet=False) for one in window]
    return submission.write_submission(task, split, told, output)


def _line(told: dict[str, Any]) -> str:
    return json.dumps(_rounded(told), ensure_ascii=False) + "\n"


def _rounded(value: Any) -> Any:
    """JSON values, their floats to as many digits as were computed."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value


@contextlib.contextmanager
def _output(path: str) -> Iterator[IO[bytes]]:
    """The file, which appears whole at the end, or standard output."""
    if path:
        with atomic_file(Path(path)) as file:
            yield file
        return
    try:
        yield sys.stdout.buffer
    except BrokenPipeError:  # whoever reads has enough, as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell(counts: Counts, task: Task) -> None:
    if counts.cut:
        option = "--max_length" if counts.cut_option == "max_length" else f"task.{counts.cut_option}"
        limit = getattr(task, counts.cut_option)
        print(
            f"{counts.cut:,} {counts.what_is_cut} were longer than {limit} tokens and were cut ({option})",
            file=sys.stderr,
        )
    if counts.refused:
        print(f"{counts.refused:,} of {counts.inputs:,} inputs were bad and are told as errors", file=sys.stderr)


if __name__ == "__main__":
    command.run(main)
