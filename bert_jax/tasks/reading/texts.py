"""Reads texts and pairs of texts with their labels from the columns of a table."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert_jax.errors import UserError
from bert_jax.tasks.labels import same_names
from bert_jax.tasks.reading.tables import Column, Columns, Table, opened, read_records
from bert_jax.tasks.rows import Example, LabelSet, Split

# Reads labelled texts and pairs of texts from any kind of table.


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


# Reads texts and pairs of texts that have any number of labels.


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
