"""Labels as files write them: to ids, and to what their classes weigh in the loss."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from bert_jax.command import UserError
from bert_jax.tasks.example import Split
from bert_jax.tasks.task import Task


def check_label(task: Task, split: Split, line: int, label: str, known: tuple[str, ...] = ()) -> int:
    """The id of a label among those known: the task's, unless others are given.

    Raises UserError, with file and line, for one that is not among them.
    """
    known = known or task.labels
    if label in known:
        return known.index(label)
    shown = ", ".join(map(repr, known[:20])) + (" ..." if len(known) > 20 else "")
    raise UserError(
        f"{split.path} line {line}: label {label!r} is not one of the task's: {shown}. "
        "Correct the line or the column (task.label), or add the label to the training file"
    )


def weigh_classes(task: Task, train: Split, labels: Iterable[str]) -> Task:
    """The task with the class_weight_values that task.class_weights means, by the labels of its training file.

    balanced: n / (K * count), for n labels of which K are different (scikit-learn's compute_class_weight; King and
    Zeng 2001); a class that the file does not have weighs 1. Raises UserError for an unknown label, no weight, or
    weights of 0 alone.
    """
    if not task.class_weights:
        return task
    if task.class_weights == "balanced":
        counts = Counter(labels)
        weights = {label: counts.total() / (len(counts) * count) for label, count in counts.items()}
    else:
        weights = dict(_given_weight(task, train, part) for part in task.class_weights.split(","))
    values = tuple(weights.get(label, 1.0) for label in task.labels)
    if not any(values):
        raise UserError(f"task.class_weights {task.class_weights!r} leaves no class to learn; give one more than 0")
    return replace(task, class_weight_values=values)


def _given_weight(task: Task, train: Split, given: str) -> tuple[str, float]:
    label, _, number = given.rpartition("=")
    label = label.strip()
    if label not in task.labels:
        shown = ", ".join(task.labels[:20]) + (" ..." if len(task.labels) > 20 else "")
        raise UserError(
            f"task.class_weights names {label!r} in {given!r}, which is no label of {train.path}: {shown}. "
            "Use balanced, or LABEL=WEIGHT,..."
        )
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise UserError(f"task.class_weights has {given!r}, and {number!r} is no weight; use a number, 0 or more")
    return label, weight
