"""The files that the leaderboards of GLUE and SuperGLUE take, one a split, from the answers to its examples.

GLUE: https://gluebenchmark.com/faq (a table of index and prediction); SuperGLUE: https://super.gluebenchmark.com/faq
(a JSON object a line). An index is the place of an example in the benchmark's own file, from 0.
"""

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_jax.command import UserError
from bert_jax.storage.local import write_atomic
from bert_jax.tasks.example import Split
from bert_jax.tasks.inference import FineTuned
from bert_jax.tasks.task import Task
from bert_jax.train import distributed

STSB_RANGE = (0.0, 5.0)

# By task and split.
FILES: dict[tuple[str, str], str] = {
    ("cola", "test"): "CoLA.tsv",
    ("sst2", "test"): "SST-2.tsv",
    ("mrpc", "test"): "MRPC.tsv",
    ("stsb", "test"): "STS-B.tsv",
    ("qqp", "test"): "QQP.tsv",
    ("mnli", "test"): "MNLI-m.tsv",
    ("mnli", "test_mismatched"): "MNLI-mm.tsv",
    ("mnli", "ax"): "AX.tsv",
    ("qnli", "test"): "QNLI.tsv",
    ("rte", "test"): "RTE.tsv",
    ("wnli", "test"): "WNLI.tsv",
    ("boolq", "test"): "BoolQ.jsonl",
    ("cb", "test"): "CB.jsonl",
    ("copa", "test"): "COPA.jsonl",
    ("superglue_rte", "test"): "RTE.jsonl",
    ("wic", "test"): "WiC.jsonl",
}


def file_name(task_name: str, split: str) -> str:
    """The name that a benchmark wants for a split of a task; empty where it wants none."""
    return FILES.get((task_name, split), "")


def write_submission(
    task: Task, split: str, predictions: Sequence[Mapping[str, Any]], directory: str | Path, name: str = ""
) -> Path:
    """Writes the benchmark's file of a split into a folder (made where it is not there) and returns its path.

    predictions are Kind.predictions of all examples of the split, in the order of its file; name is for a file called
    otherwise. Scores of STS-B are clipped to 0 ... 5. Raises UserError for a task or split that no benchmark takes,
    and for no predictions at all.
    """
    wanted = file_name(task.name, split)
    if not wanted:
        there = ", ".join(f"{task_name} ({split_name})" for task_name, split_name in FILES)
        raise UserError(f"no leaderboard takes {split} of task {task.name}; they take: {there}")
    if not predictions:
        raise UserError(f"no predictions for {wanted}; give the unlabelled file of the benchmark")
    form = _json_line if wanted.endswith(".jsonl") else _table_line
    lines = [form(index, _answer(task, told)) for index, told in enumerate(predictions)]
    if form is _table_line:
        lines.insert(0, "index\tprediction")
    path = Path(directory) / (name or wanted)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, ("\n".join(lines) + "\n").encode())
    return path


def check(task_name: str, splits: Collection[str]) -> None:
    """Raises UserError where none of these splits of a task is one that a leaderboard takes."""
    if not any(file_name(task_name, split) for split in splits):
        wanted = [split for name, split in FILES if name == task_name]
        there = (
            f"the files of: {', '.join(wanted)}" if wanted else f"a task of: {', '.join(sorted({t for t, _ in FILES}))}"
        )
        raise UserError(f"task.submission: task {task_name} has nothing that a leaderboard takes; it takes {there}")


def submit(model: FineTuned, splits: Mapping[str, Split[Any]], directory: str | Path) -> list[Path]:
    """Answers the splits that a leaderboard takes of a model's task and writes their files, whose paths it returns.

    All processes answer, the first writes.
    """
    written = []
    for split, content in splits.items():
        if file_name(model.task.name, split):
            predictions = model.predictions(model.encode(dataclasses.replace(content, labelled=False)))
            if distributed.is_primary():
                written.append(write_submission(model.task, split, predictions, directory))
    return written


def _answer(task: Task, told: Mapping[str, Any]) -> str:
    if task.kind == "regression":
        low, high = STSB_RANGE
        return f"{min(max(told['score'], low), high):.3f}"
    return str(told["label"])


def _table_line(index: int, answer: str) -> str:
    return f"{index}\t{answer}"


def _json_line(index: int, answer: str) -> str:
    return json.dumps({"idx": index, "label": int(answer) if answer.isdecimal() else answer})
