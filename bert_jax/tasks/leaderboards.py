"""Writes the files for the leaderboards of GLUE, SuperGLUE and SQuAD from the predictions on a split.

GLUE: https://gluebenchmark.com/faq (a table with index and prediction); SuperGLUE: https://super.gluebenchmark.com/faq
(one JSON object per line). The index is an example's position in the benchmark's own file, from 0. SQuAD: an object
with answers by question id, and one with the odds of no answer, as run_squad.py of google-research/bert writes them.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_jax.errors import UserError
from bert_jax.storage.files import write_atomic
from bert_jax.tasks.inference import FineTuned
from bert_jax.tasks.rows import Split
from bert_jax.tasks.task import Task
from bert_jax.train import distributed

STSB_RANGE = (0.0, 5.0)

# The name of the file by task and split.
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


def check(task: Task, splits: Iterable[str]) -> None:
    """Raises UserError if no leaderboard accepts a task's predictions on any of these splits."""
    if not any((task.name, split) in FILES for split in splits):
        accepted = ", ".join(f"{name} ({split})" for name, split in FILES)
        raise UserError(
            f"no leaderboard accepts predictions of {' or '.join(splits)} of task {task.name}; "
            f"omit task.submission, or use one of: {accepted}"
        )
    if label_map := getattr(task, "label_map", None):
        raise UserError(
            f"the task answers with the labels of task.label_map={label_map}, but the leaderboard expects those of its "
            "own files. Fine-tune without a map, or omit task.submission"
        )


def write_submission(task: Task, split: str, predictions: Sequence[Mapping[str, Any]], directory: str | Path) -> Path:
    """Writes the leaderboard's file for a split into a folder, which is created if necessary, and returns its path.

    Args:
        predictions: Task.predictions for all examples in the split, in the order of its file.

    Raises:
        UserError: No leaderboard accepts the task or the split, or there are no predictions.
    """
    check(task, [split])
    path = Path(directory) / FILES[task.name, split]
    if not predictions:
        raise UserError(f"there are no predictions for {path.name}; use the unlabelled file of the benchmark")
    if task.kind == "regression":
        # The leaderboard refuses scores outside the range of STS-B.
        low, high = STSB_RANGE
        labels = [f"{min(max(prediction['score'], low), high):.3f}" for prediction in predictions]
    else:
        labels = [str(prediction["label"]) for prediction in predictions]
    if path.suffix == ".jsonl":
        lines = [
            # Numbers of classes are JSON numbers, names are strings.
            json.dumps({"idx": index, "label": int(label) if label.isdecimal() else label})
            for index, label in enumerate(labels)
        ]
    else:
        lines = ["index\tprediction", *(f"{index}\t{label}" for index, label in enumerate(labels))]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, ("\n".join(lines) + "\n").encode())
    return path


def write_squad(predictions: Sequence[Mapping[str, Any]], directory: str | Path) -> list[Path]:
    """Writes predictions.json and, if questions may have no answer, null_odds.json, and returns their paths.

    predictions.json has the answers by question id; an answer is empty if the probability of no answer is above the
    task's threshold. null_odds.json has the score for no answer minus the best answer's; evaluate-v2.0.py reads it as
    --na-prob-file.

    Raises:
        UserError: Two questions have the same id.
    """
    answers = {str(prediction["id"]): prediction["answer"] for prediction in predictions}
    if len(answers) < len(predictions):
        raise UserError(
            f"{len(predictions)} questions have only {len(answers)} different ids, by which SQuAD's files name "
            "answers. Give each question an id of its own"
        )
    files: dict[str, dict[str, Any]] = {"predictions.json": answers}
    if predictions and "null_odds" in predictions[0]:
        files["null_odds.json"] = {str(prediction["id"]): prediction["null_odds"] for prediction in predictions}
    Path(directory).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomic(Path(directory) / name, (json.dumps(content, ensure_ascii=False, indent=4) + "\n").encode())
    return [Path(directory) / name for name in files]


def submit(model: FineTuned, splits: Mapping[str, Split[Any]], directory: str | Path) -> list[Path]:
    """Predicts the splits that a leaderboard accepts, writes their files and returns the paths."""
    written = []
    for split, content in splits.items():
        if (model.task.name, split) in FILES:
            # All processes of a run predict together; the first one writes.
            predictions = model.predictions(model.encode(dataclasses.replace(content, labelled=False)))
            if distributed.is_primary():
                written.append(write_submission(model.task, split, predictions, directory))
    return written
