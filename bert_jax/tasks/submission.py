"""The files that the leaderboards of GLUE and SuperGLUE take, one a split, from the answers to its examples.

GLUE: https://gluebenchmark.com/faq (a table of index and prediction); SuperGLUE: https://super.gluebenchmark.com/faq
(a JSON object a line). An index is the place of an example in the benchmark's own file, from 0.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_jax.command import UserError
from bert_jax.files import write_whole
from bert_jax.tasks.task import Task

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
    write_whole(path, ("\n".join(lines) + "\n").encode())
    return path


def _answer(task: Task, told: Mapping[str, Any]) -> str:
    if task.kind == "regression":
        low, high = STSB_RANGE
        return f"{min(max(told['score'], low), high):.3f}"
    return str(told["label"])


def _table_line(index: int, answer: str) -> str:
    return f"{index}\t{answer}"


def _json_line(index: int, answer: str) -> str:
    return json.dumps({"idx": index, "label": int(answer) if answer.isdecimal() else answer})
