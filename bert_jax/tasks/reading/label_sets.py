"""Reads texts and pairs of texts that have any number of labels."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert_jax.command import UserError
from bert_jax.tasks.example import LabelSet, Split
from bert_jax.tasks.reading.columns import Column, Columns
from bert_jax.tasks.reading.labelled_texts import is_held_back, text_of, yes_or_no
from bert_jax.tasks.reading.tables import read_records
from bert_jax.tasks.reading.written_values import opened

# What only a list has: quotes, or several parts in one pair of brackets. A label may itself be in brackets.
_OF_LISTS = re.compile(r"""['"]|\[[^][]*,[^][]*\]""")


def read_label_sets(path: Path, columns: Columns, label_required: bool, labels: Sequence[str] = ()) -> Split[LabelSet]:
    """Reads texts, or pairs of texts, and the set of labels of each.

    columns.label names one column: a list of labels in JSON lines, Parquet and prepared data, where a number is that
    of a class of the file, or else an index in `labels` unless these are numbers; labels separated by commas in TSV and
    CSV, or a list or set in brackets (['a', 'b']), as pandas writes it. Or it names several columns, separated by
    commas: each is a label, and holds 1 or 0 (or true or false). A text may have no label. A file without the columns,
    or whose columns are all empty, null or -1, is unlabelled. Raises UserError, with file and line, for other values,
    and for a missing label column that is required.
    """
    if not columns.text or (label_required and not columns.label):
        role = "label" if columns.text else "text"
        raise UserError(f"task.{role} is not set; name the column of {path} that holds the {role}")
    names = [name.strip() for name in columns.label.split(",")]
    requested = [
        Column(columns.text, "text"),
        Column(columns.text_pair, "text_pair", required=bool(columns.text_pair)),
        *(Column(name, "label", required=label_required) for name in names),
    ]
    found = read_records(path, requested)
    known = all(found.present[2:]) and bool(columns.label)
    known = known and not all(_is_withheld(one, len(names)) for record in found.records for one in record.values[2:])
    if label_required and not known:
        raise UserError(f"{path} has no labels: column {columns.label!r} is empty, null or -1 throughout")
    numbered = any(label.removeprefix("-").isdecimal() for label in labels)
    by_number = found.class_names[2] or (() if numbered else tuple(labels))
    if known and len(names) == 1:
        _check_pairs(f"{path}: column {columns.label!r}", [opened(record.values[2]) for record in found.records])
    items = []
    for line, (text, text_pair, *values) in found.records:
        where = f"{path} line {line}: column"
        second = text_of(f"{where} {columns.text_pair!r}", text_pair) if columns.text_pair else None
        of_line: tuple[str, ...] | None = None
        if known and len(names) > 1:
            pairs = zip(names, values, strict=True)
            of_line = tuple(name for name, value in pairs if _is_set(f"{where} {name!r}", value))
        elif known:
            of_line = _listed(f"{where} {columns.label!r}", values[0], by_number)
        items.append(LabelSet(text_of(f"{where} {columns.text!r}", text), second, of_line, line))
    return Split(path, tuple(items), known, found.left_out, found.class_names[2] if len(names) == 1 else ())


def _listed(where: str, value: Any, by_number: Sequence[str]) -> tuple[str, ...]:
    """The labels in a list, or in a text that separates them by commas."""
    if value is None:
        return ()
    found = opened(value)
    value = found if isinstance(found, list) else value  # a label may be in braces
    if isinstance(value, str) and not (_in_brackets(value) and _OF_LISTS.search(value)):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list) or not all(isinstance(one, str | int) for one in value):
        raise UserError(
            f"{where} holds {value!r:.60}; expected a list of labels, such as ['a', 'b'], or a text that separates "
            "them by commas"
        )
    repeated = len({*value}) < len(value) and {*value} <= {0, 1}
    if repeated or any(isinstance(one, bool) for one in value):
        raise _value_for_each_class(where, value)
    named = (
        by_number[one] if isinstance(one, int) and 0 <= one < len(by_number) else str(one).strip() for one in value
    )
    return tuple(dict.fromkeys(named))


def _in_brackets(text: str) -> bool:
    return text.strip().startswith("[") and text.strip().endswith("]")


def _is_withheld(value: Any, columns: int) -> bool:
    """Whether a value says nothing of labels. A text of -1 may be a label where one column holds the labels' names."""
    return is_held_back(value) or (columns > 1 and isinstance(value, str) and value.strip() == "-1")


def _check_pairs(where: str, values: Sequence[Any]) -> None:
    """Raises UserError if the lists of a column are 0 or 1 for each of two classes: [0, 1] and [1, 0] alone."""
    if [0, 1] in values and [1, 0] in values and all(value in ([0, 1], [1, 0]) for value in values):
        raise _value_for_each_class(where, values[0])


def _value_for_each_class(where: str, value: Any) -> UserError:
    return UserError(
        f"{where} holds {value!r:.60}, one value for each class. Give the numbers or names of the classes that apply, "
        "or one column for each class (task.label=a,b,...)"
    )


def _is_set(where: str, value: Any) -> bool:
    found = yes_or_no(value)
    if found is None:
        raise UserError(f"{where} holds {value!r:.40}; expected 1 or 0, because task.label names several columns")
    return found
