"""Reads labelled texts and pairs of texts from any kind of table."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert_jax.command import UserError
from bert_jax.tasks.example import Example, Split
from bert_jax.tasks.label_names import same_names
from bert_jax.tasks.reading.columns import Column, Columns, Table
from bert_jax.tasks.reading.tables import read_records

# Marks the word of a text that a task asks about: rare in running text, in every vocabulary, and a single token
# between spaces.
MARK = "*"
YES, NO = ("1", "true", "yes", "1.0"), ("0", "false", "no", "0.0", "")
LABEL = 2  # the index of the label among the values that read_labelled reads


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
    marks = [Column(name, "marks") for name in columns.marks]
    found, labelled = read_labelled(path, columns, marks, label_required, ragged_lines)
    items, names = [], found.class_names[LABEL]
    for line, (text, text_pair, value, *borders) in found.records:
        texts = [text_of(f"{path} line {line}: column {columns.text!r}", text)]
        if columns.text_pair:
            texts.append(text_of(f"{path} line {line}: column {columns.text_pair!r}", text_pair))
        if borders:
            texts = mark_words(path, line, texts, borders)
        value = None if names and value == -1 else value  # no class
        unknown = not labelled or (not label_required and is_missing(value))
        label = None if unknown else _label(path, line, value, labels, names)
        items.append(Example(texts[0], texts[1] if columns.text_pair else None, label, line))
    return Split(path, tuple(items), labelled, found.left_out, names if labelled else ())


def read_labelled(
    path: Path, columns: Columns, others: Sequence[Column], label_required: bool, ragged_lines: bool = False
) -> tuple[Table, bool]:
    """Reads the columns text, text_pair (unless it has no name), label and `others` of a table, and whether it is
    labelled.

    Raises UserError for columns that are not set, and for a file without labels where they are required.
    """
    if not columns.text:
        raise UserError(
            f"task.text is not set; name the column of {path} that holds the text (a header name or a number)"
        )
    if label_required and not columns.label:
        raise UserError(f"task.label is not set; name the column of {path} that holds the label")
    requested = [
        Column(columns.text, "text"),
        Column(columns.text_pair, "text_pair", required=bool(columns.text_pair)),
        Column(columns.label, "label", required=label_required),
        *others,
    ]
    found = read_records(path, requested, ragged_lines)
    labelled = bool(columns.label) and found.present[LABEL]
    labelled = labelled and not all(is_held_back(record.values[LABEL]) for record in found.records)
    if label_required and not labelled:
        raise UserError(f"{path} has no labels: column {columns.label!r} is empty, null or -1 throughout")
    return found, labelled


def mark_words(path: Path, line: int, texts: Sequence[str], borders: Sequence[Any]) -> list[str]:
    """Puts the word of each text between marks: "to * place * it". borders has its characters [start, end) by text.

    The tokens of the word do not change, and any encoder with a classification head can be used. The baseline of
    Wang et al. 2019b instead classifies the words' vectors concatenated with that of [CLS], which needs a special
    head. Raises UserError, with file and line, for borders that are not inside the text.
    """
    marked = []
    places = [int(value) if isinstance(value, str) and value.isdecimal() else value for value in borders]
    for text, start, end in zip(texts, places[::2], places[1::2], strict=True):
        if not (isinstance(start, int) and isinstance(end, int) and 0 <= start < end <= len(text)):
            raise UserError(
                f"{path} line {line}: characters {start!r} to {end!r} are not in {text!r:.60}, which has "
                f"{len(text)} characters. Correct the line"
            )
        marked.append(f"{text[:start]}{MARK} {text[start:end]} {MARK}{text[end:]}")
    return marked


def is_held_back(label: Any) -> bool:
    """Whether a label is empty, null, NaN or -1, which data sets write in place of a label that they withhold."""
    return is_missing(label) or label == -1


def is_missing(label: Any) -> bool:
    """Whether a label is empty, null or NaN."""
    if isinstance(label, str):
        return not label.strip()
    return label is None or (isinstance(label, float) and math.isnan(label))


def yes_or_no(value: Any) -> bool | None:
    """Whether a value of any table is 1 (or true or yes), or 0 (or false, no, or missing); None for others."""
    written = "" if is_missing(value) else str(value).strip().lower()
    return written in YES if written in (*YES, *NO) else None


def text_of(where: str, value: Any) -> str:
    """The text that a column holds; a null is an empty one. Raises UserError, which begins with `where`, for others."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where} holds {value!r:.40}; expected a text. Write it in quotes")
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
    if written != str(number) and (same := same_names([written], labels)):
        return same[written]
    if str(number) in labels:
        return str(number)
    numbered = any(label.removeprefix("-").isdecimal() for label in labels)
    return labels[number] if not numbered and 0 <= number < len(labels) else written
