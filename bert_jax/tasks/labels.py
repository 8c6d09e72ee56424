"""Labels: their meaning in a file, their ids, and class weights in the loss.

First the functions that match label names, then the base classes of kinds with named labels.
"""

import abc
import itertools
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bert_jax.config.finetuning import ClassLoss, LabelMap
from bert_jax.errors import UserError
from bert_jax.tasks.reading.tables import is_number, is_stored
from bert_jax.tasks.rows import Split
from bert_jax.tasks.task import Description, Item, Rows, Task
from bert_jax.train.losses import ClassCosts

# Two names mean the same if they differ only in case, white space, dashes and `_` (entailment, ENTAILMENT), or in what
# is not seen: composed and decomposed or wide characters (Unicode's NFKC), and invisible ones. So do a whole number and
# its decimal fraction (1 and 1.0), and the number i and LABEL_i, the name that transformers gives to class i of a model
# without names.
_UNNAMED = "label_"
_WHOLE = re.compile(r"(_?[0-9]+)[.]0*")
_INVISIBLE = {0x34F, 0x115F, 0x1160, *range(0xFE00, 0xFE10)}  # joiner, fillers, selectors of the form of an emoji


def check_names(key: str, names: Sequence[str]) -> None:
    """Raises UserError for an empty or repeated name."""
    if not all(names) or len(set(names)) < len(names):
        raise UserError(f"{key} is {','.join(names)!r}; give different names, such as a,b")


def same_names(labels: Iterable[str], known: Sequence[str]) -> dict[str, str]:
    """Maps unknown labels to the known labels of which they are variants; empty if known labels are variants too."""
    forms = {_form(label): label for label in known}
    if len(forms) < len(known):
        return {}
    return {label: forms[_form(label)] for label in set(labels) - set(known) if _form(label) in forms}


def permutation(labels: Sequence[str], other: Sequence[str]) -> tuple[int, ...] | None:
    """Returns the labels' indices in `other`; None unless all labels pair."""
    names = same_names(labels, other)
    paired = [names.get(label, label) for label in labels]
    # Each label pairs with one other, and none is left over.
    if sorted(paired) != sorted(other):
        return None
    return tuple(other.index(label) for label in paired)


def _form(label: str) -> str:
    # Folding the case may undo the normal form, so it is restored.
    composed = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", label).casefold())
    seen = "".join("-" if unicodedata.category(letter) == "Pd" else letter for letter in composed if _is_seen(letter))
    form = re.sub(r"[\s_-]+", "_", seen.strip())
    if whole := _WHOLE.fullmatch(form):
        return whole[1]
    number = form.removeprefix(_UNNAMED)
    return number if number.isdecimal() else form


def _is_seen(letter: str) -> bool:
    invisible = ord(letter) in _INVISIBLE or unicodedata.category(letter) in ("Cf", "Cc")
    return letter.isspace() or not invisible


@dataclass(frozen=True)
class NamedLabelsTask(LabelMap, Task[Item, Rows]):
    """A task whose items have named labels; a label_map may rename them."""

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
        """The labels by number, unless label_map maps numbers."""
        return () if self.label_map else self.labels

    @abc.abstractmethod
    def labels_in(self, split: Split[Item]) -> set[str]:
        """Returns the labels in a split."""

    @abc.abstractmethod
    def replace_labels(self, split: Split[Item], names: Mapping[str, str]) -> Split[Item]:
        """Renames labels of a split."""

    def with_names(self, split: Split[Item]) -> Split[Item]:
        """Replaces a split's labels by label_map, and by the task's labels that mean the same (same_names)."""
        labels = self.labels_in(split)
        # label_map comes first, because it may say that two similar names differ.
        names = self.label_map | same_names(labels - set(self.label_map), self.labels)
        if not labels & set(names):
            return split
        # The map may join several classes, which then are one.
        classes = tuple(dict.fromkeys(names.get(label, label) for label in split.class_names))
        return replace(self.replace_labels(split, names), class_names=classes)

    def label_value(self, split: Split, line: int, label: str) -> int:
        """Returns a label's id. Raises UserError, with file and line, if it is unknown."""
        return check_label(split, line, label, self.labels)

    def describe(self, rows: Rows, training: bool = False) -> Description:
        """Also warns about training labels that look alike, and about a first line that looks like a header."""
        description, split, columns = super().describe(rows, training), rows.split, self.columns
        if training:
            description.remarks.extend(self._alike(split))
        names = columns.text, columns.text_pair, columns.label, *columns.marks
        if training and all(is_number(name) for name in names if name) and not is_stored(split.path):
            # A header's label occurs once, and all labels of the other lines are numbers or occur again.
            first, *others = [self.labels_in(replace(split, items=(item,))) for item in split.items]
            times = Counter(itertools.chain.from_iterable(others))
            repeated = all(count > 1 or math.isfinite(parse_number(label)) for label, count in times.items())
            if first and first.isdisjoint(times) and repeated:
                description.remarks.append(
                    f"{split.path}: only line {split.items[0].line} has the label {min(first)!r}; if it is a header, "
                    "name columns by it"
                )
        return description

    def _alike(self, split: Split[Item]) -> list[str]:
        """Warns about labels that same_names would take for one, with each one's number of items."""
        alike = defaultdict(list)
        for label in sorted(self.labels_in(split)):
            alike[_form(label)].append(label)
        groups = [labels for labels in alike.values() if len(labels) > 1]
        if not groups:
            return []
        counts = Counter(label for item in split.items for label in self.labels_in(replace(split, items=(item,))))
        # Escapes show what differs where the letters do not.
        shown = ["/".join(f"{label!a} ({counts[label]})" for label in labels) for labels in groups]
        least, *_, most = sorted(groups[0], key=lambda label: counts[label])
        return [
            f"{split.path}: labels that look alike are different classes, here with their examples: "
            f"{shown_labels(shown)}. Write each in one way, or join them: "
            f'--config.task.label_map="{{{least!a}: {most!a}}}"'
        ]


@dataclass(frozen=True)
class LabelTask(ClassLoss, NamedLabelsTask[Item, Rows]):
    """A task with a cross-entropy over its labels, and that loss's options."""

    training_options = ("class_weights", "class_weight_values", "label_smoothing")

    class_weight_values: tuple[float, ...] = ()  # by label id, from class_weights and the training file

    @property
    def costs(self) -> ClassCosts:
        """Class weights and label smoothing for the training loss."""
        return ClassCosts(self.class_weight_values, self.label_smoothing)

    def compute_class_weights(self, train: Split, labels: Iterable[str]) -> tuple[float, ...]:
        """Returns class_weight_values, by class_weights, from the labels of the training file.

        Raises:
            UserError: A label is unknown, a weight is malformed, or all weights are 0.
        """
        if not self.class_weights:
            return self.class_weight_values
        weights: Mapping[str, float] = {}
        known = self.class_weights == "balanced" or isinstance(self.class_weights, dict)
        if self.class_weights == "balanced":
            # n / (K * count), for n labels of K different classes, as scikit-learn's compute_class_weight (King and
            # Zeng 2001). A class that is not in the file weighs 1.
            counts = Counter(labels)
            weights = {label: counts.total() / (len(counts) * count) for label, count in counts.items()}
        elif isinstance(self.class_weights, dict):
            weights = self.class_weights
        if unknown := [label for label in weights if label not in self.labels]:
            raise UserError(
                f"task.class_weights names {unknown[0]!r}, which is not a label of {train.path}: "
                f"{shown_labels(self.labels)}"
            )
        values = tuple(weights.get(label, 1.0) for label in self.labels)
        if not known or not any(values) or not all(0 <= weight < math.inf for weight in values):
            raise UserError(
                f"task.class_weights is {self.class_weights!r}; use balanced, or {{LABEL: WEIGHT}} with numbers "
                "of 0 or more, one of them above 0"
            )
        return values


def parse_number(text: str) -> float:
    """Parses a number; returns infinity if the text holds none."""
    try:
        return float(text)
    except ValueError:
        return math.inf


def check_label(split: Split, line: int, label: str, known: tuple[str, ...]) -> int:
    """Returns a label's id. Raises UserError, with file and line, if it is unknown."""
    if label in known:
        return known.index(label)
    raise UserError(
        f"{split.path} line {line}: unknown label {label!r}; the task's labels are: {shown_labels(map(repr, known))}. "
        "Correct the line or the column (task.label), map the label (task.label_map; in evaluate: --label_map), or add "
        "it to the training file"
    )


def shown_labels(labels: Iterable[str]) -> str:
    """Joins the first 20 labels, for a message."""
    labels = list(labels)
    return ", ".join(labels[:20]) + (" ..." if len(labels) > 20 else "")
