"""Reads labelled texts and pairs of texts from any kind of table."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert_jax.command import UserError
from bert_jax.tasks.example import Example, Split
from bert_jax.tasks.reading.columns import Column, Columns
from bert_jax.tasks.reading.marks import mark_words
from bert_jax.tasks.reading.tables import read_records


def read_table(
    path: Path, columns: Columns, label_required: bool, labels: Sequence[str] = (), ragged_lines: bool = False
) -> Split[Example]:
    """Reads texts, or pairs of texts, from a table (tables.py), with their labels as strings.

    In JSON, Parquet and prepared data, a label may be the number of a class. It becomes the name of the class
    where the file gives it, or the label with this index in `labels` unless these are numbers. true and false
    become `true` and `false`; a null text becomes an empty one. A file whose labels are all empty, null or -1 is
    unlabelled. Without label_required, so is a file without the label column, and single labels may be missing.
    Raises UserError for a column that is not set or missing, for a missing label that is required, and for
    whatever read_records rejects.
    """
    if not columns.text:
        raise UserError(
            f"task.text is not set; name the column of {path} that holds the text (a header name or a number)"
        )
    if label_required and not columns.label:
        raise UserError(f"task.label is not set; name the column of {path} that holds the label")
    requested = [Column(columns.text, "text")]
    if columns.text_pair:
        requested.append(Column(columns.text_pair, "text_pair"))
    texts = len(requested)
    requested += [Column(name, "marks") for name in columns.marks]
    if columns.label:
        requested.append(Column(columns.label, "label", required=label_required))
    found = read_records(path, requested, ragged_lines)
    labelled = bool(columns.label) and found.present[-1]
    if labelled:
        labelled = not all(is_held_back(record.values[-1]) for record in found.records)
        if label_required and not labelled:
            raise UserError(f"{path} has no labels: column {columns.label!r} is empty, null or -1 throughout")
    items = []
    for line, values in found.records:
        first, *second = (_text(path, line, requested[place].name, values[place]) for place in range(texts))
        if columns.marks:
            first, *second = mark_words(path, line, (first, *second), values[texts : texts + len(columns.marks)])
        unknown = not labelled or (not label_required and is_missing(values[-1]))
        label = None if unknown else _label(path, line, values[-1], labels, found.class_names[-1])
        items.append(Example(first, second[0] if second else None, label, line))
    return Split(path, tuple(items), labelled, found.left_out, found.class_names[-1] if labelled else ())


def is_held_back(label: Any) -> bool:
    """Whether a label is empty, null, NaN or -1, which data sets write in place of a label that they withhold."""
    return is_missing(label) or label == -1


def is_missing(label: Any) -> bool:
    """Whether a label is empty, null or NaN."""
    if isinstance(label, str):
        return not label.strip()
    return label is None or (isinstance(label, float) and math.isnan(label))


def _text(path: Path, line: int, column: str, value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{path} line {line}: column {column!r} holds {value!r:.40}; expected a text")
    return value


def _label(path: Path, line: int, value: Any, labels: Sequence[str], names: Sequence[str]) -> str:
    """A label as text files write it."""
    if is_missing(value):
        raise UserError(f"{path} line {line} has no label, but other lines have one. Remove the line or add its label")
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bool):
        written, number = str(value).lower(), int(value)
    elif isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        number = int(value)
        written = names[number] if 0 <= number < len(names) else str(number)
    elif isinstance(value, float):
        return repr(value)
    else:
        raise UserError(f"{path} line {line}: {value!r:.40} is not a label; expected a text, a number, true or false")
    if written in labels:
        return written
    if str(number) in labels:
        return str(number)
    numbered = any(label.removeprefix("-").isdecimal() for label in labels)
    return labels[number] if not numbered and 0 <= number < len(labels) else written
