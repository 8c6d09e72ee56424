"""Labels: their meaning in a file, their ids, and class weights in the loss.

First the functions that match names of labels, then the base classes of the kinds that have labels with names.
"""

import abc
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bert_jax.config.finetuning import ClassLoss, LabelMap
from bert_jax.errors import UserError
from bert_jax.tasks.reading.tables import is_number, is_stored
from bert_jax.tasks.rows import Split
from bert_jax.tasks.task import Description, Item, Rows, Task
from bert_jax.train.losses import ClassCosts

# Maps the labels that a file writes to the task's: by task.label_map, and by names that mean the same.
#
# Two names mean the same if they differ only in case, white space, `_` and `-` (entailment, ENTAILMENT). So do the
# number i and LABEL_i, the name that transformers gives to class i of a model without names.


_UNNAMED = "label_"


def check_names(key: str, names: Sequence[str]) -> None:
    """Raises UserError for an empty or repeated name."""
    if not all(names) or len(set(names)) < len(names):
        raise UserError(f"{key} is {','.join(names)!r}; give different names, such as a,b")


def same_names(labels: Iterable[str], known: Sequence[str]) -> dict[str, str]:
    """Maps unknown labels to the known label that they are a variant of.

    Empty if two of the known labels are variants of each other.
    """
    forms = {_form(label): label for label in known}
    if len(forms) < len(known):
        return {}
    return {label: forms[_form(label)] for label in set(labels) - set(known) if _form(label) in forms}


def permutation(labels: Sequence[str], other: Sequence[str]) -> tuple[int, ...] | None:
    """The index of every label in `other`; None unless this pairs all labels."""
    names = same_names(labels, other)
    paired = [names.get(label, label) for label in labels]
    if sorted(paired) != sorted(other):
        return None
    return tuple(other.index(label) for label in paired)


def _form(label: str) -> str:
    form = re.sub(r"[\s_-]+", "_", label.casefold())
    number = form.removeprefix(_UNNAMED)
    return number if number.isdecimal() else form


# Tasks with labels: their names and ids, and the weights of their classes in the loss.


@dataclass(frozen=True)
class NamedLabelsTask(LabelMap, Task[Item, Rows]):
    """A task whose items have labels with names; without a label_map, they mean what they say (same_names)."""

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
        """The labels in a split."""

    @abc.abstractmethod
    def replace_labels(self, split: Split[Item], names: Mapping[str, str]) -> Split[Item]:
        """The split with labels renamed."""

    def with_names(self, split: Split[Item]) -> Split[Item]:
        """The split with labels replaced by label_map, and by the task's label that means the same (same_names)."""
        labels = self.labels_in(split)
        # label_map comes first: it may say that two similar names differ.
        names = self.label_map | same_names(labels - set(self.label_map), self.labels)
        if not labels & set(names):
            return split
        classes = tuple(dict.fromkeys(names.get(label, label) for label in split.class_names))
        return replace(self.replace_labels(split, names), class_names=classes)

    def label_value(self, split: Split, line: int, label: str) -> int:
        """A label's id. Raises UserError, with file and line, for an unknown one."""
        return check_label(split, line, label, self.labels)

    def describe(self, rows: Rows, training: bool = False) -> Description:
        """Also warns about a first line of the training file that looks like a header, if columns are numbered."""
        description, split, columns = super().describe(rows, training), rows.split, self.columns
        names = columns.text, columns.text_pair, columns.label, *columns.marks
        if training and all(is_number(name) for name in names if name) and not is_stored(split.path):
            # A header's label occurs once, and each label of the other lines is a number or occurs again.
            first, *others = [self.labels_in(replace(split, items=(item,))) for item in split.items]
            times = Counter(itertools.chain.from_iterable(others))
            repeated = all(count > 1 or math.isfinite(parse_number(label)) for label, count in times.items())
            if first and first.isdisjoint(times) and repeated:
                description.remarks.append(
                    f"{split.path}: only line {split.items[0].line} has the label {min(first)!r}; if it is a header, "
                    "name columns by it"
                )
        return description


@dataclass(frozen=True)
class LabelTask(ClassLoss, NamedLabelsTask[Item, Rows]):
    """A task with a cross-entropy over its labels, and the options of that loss."""

    training_options = ("class_weights", "class_weight_values", "label_smoothing")

    class_weight_values: tuple[float, ...] = ()  # what class_weights gives on the training file, by label id

    @property
    def costs(self) -> ClassCosts:
        """Class weights and label smoothing for the training loss."""
        return ClassCosts(self.class_weight_values, self.label_smoothing)

    def weights_of(self, train: Split, labels: Iterable[str]) -> tuple[float, ...]:
        """The class_weight_values that class_weights selects, from the labels of the training file.

        balanced: n / (K * count), for n labels of K different classes (scikit-learn's compute_class_weight; King and
        Zeng 2001); a class that is not in the file weighs 1. Raises UserError for an unknown label, a malformed
        weight, or weights that are all 0.
        """
        if not self.class_weights:
            return self.class_weight_values
        if self.class_weights == "balanced":
            counts = Counter(labels)
            weights = {label: counts.total() / (len(counts) * count) for label, count in counts.items()}
        elif isinstance(self.class_weights, dict):
            weights = self.class_weights
        else:
            raise UserError(f"task.class_weights is {self.class_weights!r}; use balanced, or {{LABEL: WEIGHT}}")
        for label, weight in weights.items():
            if label not in self.labels:
                raise UserError(
                    f"task.class_weights names {label!r}, which is not a label of {train.path}: "
                    f"{shown_labels(self.labels)}"
                )
            if not 0 <= weight < math.inf:
                raise UserError(f"task.class_weights has {label!r}: {weight}. Use a number of 0 or more")
        values = tuple(weights.get(label, 1.0) for label in self.labels)
        if not any(values):
            raise UserError(
                f"task.class_weights is {self.class_weights!r}, so all classes weigh 0; give one a weight above 0"
            )
        return values


def parse_number(text: str) -> float:
    """The number that a text holds; infinity if it holds none."""
    try:
        return float(text)
    except ValueError:
        return math.inf


def check_label(split: Split, line: int, label: str, known: tuple[str, ...]) -> int:
    """A label's id. Raises UserError, with file and line, for an unknown one."""
    if label in known:
        return known.index(label)
    raise UserError(
        f"{split.path} line {line}: unknown label {label!r}; the task's labels are: {shown_labels(map(repr, known))}. "
        "Correct the line or the column (task.label), map the label (task.label_map; in evaluate: --label_map), or add "
        "it to the training file"
    )


def shown_labels(labels: Iterable[str]) -> str:
    """The first 20 labels, for a message."""
    labels = list(labels)
    return ", ".join(labels[:20]) + (" ..." if len(labels) > 20 else "")
