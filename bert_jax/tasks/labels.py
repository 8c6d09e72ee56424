"""Labels: what the labels of a file mean, their ids, and the weights of classes in the loss.

First the functions that match names of labels, then the base classes of the kinds that have labels with names.
"""

import abc
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bert_jax.config import TaskConfig
from bert_jax.errors import UserError
from bert_jax.tasks.reading.tables import is_number, is_stored
from bert_jax.tasks.rows import Split
from bert_jax.tasks.task import Item, Rows, Task
from bert_jax.train.losses import ClassCosts

# Maps the labels that a file writes to those of a task: by task.label_map, and by names that mean the same.
#
# Two names mean the same if they differ only in case and in white space, `_` and `-` (entailment, ENTAILMENT); and so
# do the number i and LABEL_i, the name that transformers gives to class i of a model without names.


_UNNAMED = "label_"


def check_names(key: str, names: Sequence[str]) -> None:
    """Raises UserError for an empty or repeated name."""
    if not all(names) or len(set(names)) < len(names):
        raise UserError(f"{key} is {','.join(names)!r}; give different names, such as a,b")


def same_names(found: Iterable[str], known: Sequence[str]) -> dict[str, str]:
    """The known label that each found label means, for found labels that are not known and mean one.

    Empty where two of the known labels would mean the same.
    """
    forms = {_form(label): label for label in known}
    if len(forms) < len(known):
        return {}
    missing = set(found) - set(known)
    return {label: forms[_form(label)] for label in missing if _form(label) in forms}


def permutation(labels: Sequence[str], other: Sequence[str]) -> tuple[int, ...] | None:
    """For each label, the index in `other` of the label that means the same; None unless this pairs all of both."""
    names = same_names(labels, other)
    paired = [names.get(label, label) for label in labels]
    if sorted(paired) != sorted(other):
        return None
    return tuple(other.index(label) for label in paired)


def _form(label: str) -> str:
    """The form in which labels are compared."""
    form = re.sub(r"[\s_-]+", "_", label.casefold())
    number = form.removeprefix(_UNNAMED)
    return number if number.isdecimal() else form


# Tasks with labels: their names and ids, and the weights of their classes in the loss.


@dataclass(frozen=True)
class NamedLabelsTask(Task[Item, Rows]):
    """A task whose items have labels with names.

    label_map: what labels of files mean, {FILE_LABEL: LABEL} (same_names); empty: what they say.
    """

    label_map: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        mapped = self.label_map.values() if self.labels else ()
        unknown = [label for label in mapped if label not in self.labels]
        if unknown:
            raise UserError(
                f"the label map {self.label_map} names {unknown[0]!r}, which is not a label of the task: "
                f"{shown_labels(self.labels)}. Write {{LABEL_OF_THE_FILE: LABEL_OF_THE_TASK}}"
            )

    @property
    def numbered_labels(self) -> tuple[str, ...]:
        """The labels that numbers in JSON lines, Parquet and prepared data stand for, unless label_map maps them."""
        return () if self.label_map else self.labels

    @abc.abstractmethod
    def labels_in(self, split: Split[Item]) -> set[str]:
        """The labels of a split."""

    @abc.abstractmethod
    def replace_labels(self, split: Split[Item], names: Mapping[str, str]) -> Split[Item]:
        """The split with other labels in place of those in names."""

    def with_names(self, split: Split[Item]) -> Split[Item]:
        """The split with labels replaced by label_map, and by the task's label that means the same (same_names)."""
        found = self.labels_in(split)
        names = self.label_map | same_names(found - set(self.label_map), self.labels)
        if not found & set(names):
            return split
        classes = tuple(dict.fromkeys(names.get(label, label) for label in split.class_names))
        return replace(self.replace_labels(split, names), class_names=classes)


@dataclass(frozen=True)
class LabelTask(NamedLabelsTask[Item, Rows]):
    """A task with a cross-entropy over its labels, and the options of that loss.

    | option | |
    |---|---|
    | class_weights | balanced, or {LABEL: WEIGHT}; empty: each class weighs 1 |
    | class_weight_values | the resulting weights on the training file, by label id |
    | label_smoothing | the share of the uniform distribution in the target (Szegedy et al. 2016, section 7) |
    """

    class_weights: str | dict[str, float] = TaskConfig.class_weights
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
            weights = self._checked_weights(train)
        values = tuple(weights.get(label, 1.0) for label in self.labels)
        if not any(values):
            raise UserError(
                f"task.class_weights is {self.class_weights!r}, so all classes weigh 0; give one a weight above 0"
            )
        return values

    def _checked_weights(self, train: Split) -> dict[str, float]:
        weights = self.class_weights
        if not isinstance(weights, dict):
            raise UserError(f"task.class_weights is {weights!r}; use balanced, or {{LABEL: WEIGHT}}")
        for label, weight in weights.items():
            if label not in self.labels:
                raise UserError(
                    f"task.class_weights names {label!r}, which is not a label of {train.path}: "
                    f"{shown_labels(self.labels)}"
                )
            if not 0 <= weight < math.inf:
                raise UserError(f"task.class_weights has {label!r}: {weight}. Use a number of 0 or more")
        return weights


def header_remarks(task: NamedLabelsTask[Any, Any], split: Split[Any]) -> list[str]:
    """A warning about a first line that looks like a header, in a table whose columns are numbered, so that none is
    read."""
    columns = task.columns
    names = columns.text, columns.text_pair, columns.label, *columns.marks
    if not split.items or not all(is_number(name) for name in names if name) or is_stored(split.path):
        return []
    first, *others = [task.labels_in(replace(split, items=(item,))) for item in split.items]
    times = Counter(itertools.chain.from_iterable(others))
    repeated = all(count > 1 or math.isfinite(parse_number(label)) for label, count in times.items())
    if not first or not first.isdisjoint(times) or not repeated:
        return []
    return [
        f"{split.path}: only line {split.items[0].line} has the label {min(first)!r}; if it is a header, name columns "
        "by it"
    ]


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
    raise UserError(
        f"{split.path} line {line}: unknown label {label!r}; the task's labels are: {shown_labels(map(repr, known))}. "
        "Correct the line or the column (task.label), map the label (task.label_map; in evaluate: --label_map), or add "
        "it to the training file"
    )


def shown_labels(labels: Iterable[str]) -> str:
    """The first 20 labels, for a message."""
    every = list(labels)
    return ", ".join(every[:20]) + (" ..." if len(every) > 20 else "")
