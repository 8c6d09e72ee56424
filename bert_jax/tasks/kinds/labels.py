"""Converts labels to ids, and computes the weights of their classes in the loss."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from bert_jax.command import UserError
from bert_jax.config import TaskConfig
from bert_jax.tasks.example import Split
from bert_jax.tasks.task import Item, Rows, Task
from bert_jax.train.losses import ClassCosts


@dataclass(frozen=True)
class LabelTask(Task[Item, Rows]):
    """A task with a cross-entropy over its labels, and the options of that loss.

    | option | |
    |---|---|
    | class_weights | balanced, or LABEL=WEIGHT,...; empty: each class weighs 1 |
    | class_weight_values | the resulting weights on the training file, by label id |
    | label_smoothing | the share of the uniform distribution in the target (Szegedy et al. 2016, section 7) |
    """

    class_weights: str = TaskConfig.class_weights
    class_weight_values: tuple[float, ...] = ()
    label_smoothing: float = TaskConfig.label_smoothing

    def __post_init__(self) -> None:
        super().__post_init__()
        check_smoothing(self.label_smoothing)

    @property
    def costs(self) -> ClassCosts:
        """The class weights and the label smoothing of the training loss."""
        return ClassCosts(self.class_weight_values, self.label_smoothing)

    @property
    def measured(self) -> "LabelTask":
        return replace(self, class_weights="", class_weight_values=(), label_smoothing=0.0)

    def weights_of(self, train: Split, labels: Iterable[str]) -> tuple[float, ...]:
        """The class_weight_values that class_weights selects, given the labels of the training file.

        balanced: n / (K * count), for n labels of K different classes (scikit-learn's compute_class_weight; King and
        Zeng 2001); a class that is not in the file weighs 1. Raises UserError for an unknown label, a malformed
        weight, or weights that are all 0.
        """
        if not self.class_weights:
            return self.class_weight_values
        if self.class_weights == "balanced":
            counts = Counter(labels)
            weights = {label: counts.total() / (len(counts) * count) for label, count in counts.items()}
        else:
            weights = dict(self._given_weight(train, part) for part in self.class_weights.split(","))
        values = tuple(weights.get(label, 1.0) for label in self.labels)
        if not any(values):
            raise UserError(
                f"task.class_weights is {self.class_weights!r}, so all classes weigh 0; give one a weight above 0"
            )
        return values

    def _given_weight(self, train: Split, given: str) -> tuple[str, float]:
        label, _, number = given.rpartition("=")
        label = label.strip()
        if label not in self.labels:
            shown = ", ".join(self.labels[:20]) + (" ..." if len(self.labels) > 20 else "")
            raise UserError(
                f"task.class_weights names {label!r} in {given!r}, which is not a label of {train.path}: {shown}. "
                "Use balanced, or LABEL=WEIGHT,..."
            )
        weight = parse_number(number)
        if not 0 <= weight < math.inf:
            raise UserError(
                f"task.class_weights has {given!r}, but {number!r} is not a weight; use a number of 0 or more"
            )
        return label, weight


def parse_number(text: str) -> float:
    """The number that a text holds; infinity where it holds none."""
    try:
        return float(text)
    except ValueError:
        return math.inf


def check_smoothing(label_smoothing: float) -> None:
    """Raises UserError for a label smoothing outside [0, 1)."""
    if not 0 <= label_smoothing < 1:
        raise UserError(f"task.label_smoothing is {label_smoothing}; use 0 (none) or a share below 1, such as 0.1")


def check_label(split: Split, line: int, label: str, known: tuple[str, ...]) -> int:
    """The id of a label among those known. Raises UserError, with file and line, for an unknown label."""
    if label in known:
        return known.index(label)
    shown = ", ".join(map(repr, known[:20])) + (" ..." if len(known) > 20 else "")
    raise UserError(
        f"{split.path} line {line}: unknown label {label!r}; the task's labels are: {shown}. "
        "Correct the line or the column (task.label), or add the label to the training file"
    )
