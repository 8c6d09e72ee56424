"""Reads the items of multiple choice from tables and from the inputs of predictions."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bert_jax.command import UserError
from bert_jax.tasks.example import Split
from bert_jax.tasks.input_records import InputRecord, checked_text, value_of
from bert_jax.tasks.reading import Column, Columns, is_stored
from bert_jax.tasks.reading.labelled_texts import is_missing, read_labelled, text_of

CHOICES = "choices"  # the column of a list, where task.choices names none
TEXTS, PLACES = "texts", "places"  # what labels are, of a file that does not give them as numbers


class MultipleChoice(NamedTuple):
    """A context, the common beginning of all choices, and two or more choices; an empty text is an absent choice."""

    context: str
    start: str
    choices: tuple[str, ...]
    label: str | None  # as the file writes it: an index from 0, a letter from A, or the text of the correct choice
    line: int  # in the file, from 1
    numbered: bool = False  # whether the file's label is a number, which always is an index


def read_choices(path: Path, columns: Columns, choices: str, label_required: bool) -> Split[MultipleChoice]:
    """Reads items of a table (reading.read_records): context, start and label from the columns text, text_pair, label.

    choices names the columns of the choices, separated by commas, or one column that holds a list of texts (JSON
    lines and Parquet; `choices` by default). An empty value in one of several columns is an absent choice. A file
    without the label column, or whose labels are all empty, null or -1, is read as unlabelled unless label_required.
    Raises UserError, with file and line, for missing columns and for an item with fewer than two choices.
    """
    names = choice_columns(choices)
    if len(names) == 1 and not is_stored(path):
        raise UserError(
            f"{path} is TSV or CSV, but task.choices names one column, {names[0]!r}. Name one column for each choice: "
            "--config.task.choices=A,B,C"
        )
    found, labelled = read_labelled(path, columns, [Column(name, "choices") for name in names], label_required)
    items = []
    for line, (context, start, label, *texts) in found.records:
        unknown = not labelled or (not label_required and is_missing(label))
        items.append(
            MultipleChoice(
                context=_text(path, line, context),
                start=_text(path, line, start),
                choices=checked_choices(path, line, texts),
                label=None if unknown else _label(path, line, label),
                line=line,
                numbered=not unknown and not isinstance(label, str),
            )
        )
    return Split(path, tuple(items), labelled)


def item_of(columns: Columns, names: Sequence[str], source: Path, record: InputRecord) -> MultipleChoice:
    """The item of an input of a prediction: the tab-separated parts of a line, context first, or an object's fields.

    Fields have the names of the task's columns (names are those of the choices), or text (or context), start and
    choices.
    """
    line = record.line
    if isinstance(record.content, str):
        context, *texts = (checked_text(source, line, text) for text in record.plain_texts())
        return MultipleChoice(context, "", checked_choices(source, line, texts), None, line)
    list_names = (names[0], CHOICES) if len(names) == 1 else (CHOICES,)
    listed = value_of(source, record, list_names, required=False)
    texts = [listed] if listed is not None else [value_of(source, record, (name,)) for name in names]
    context = checked_text(source, line, value_of(source, record, (columns.text, "text", "context")))
    start = value_of(source, record, (columns.text_pair, "start"), required=False)
    choices = checked_choices(source, line, texts)
    return MultipleChoice(context, _text(source, line, start), choices, None, line)


def choice_columns(choices: str) -> list[str]:
    """The columns that the option choices names."""
    return [name.strip() for name in choices.split(",")] if choices else [CHOICES]


def checked_choices(source: Path, line: int, values: Sequence[Any]) -> tuple[str, ...]:
    """The choices of an item, from the values of their columns or the list in the only one."""
    if len(values) == 1:
        values = values[0] if isinstance(values[0], list) else []
        if not all(isinstance(value, str) and value.strip() for value in values):
            raise UserError(
                f"{source} line {line}: choices is {values!r:.60}; expected a list of texts, none of them empty"
            )
    choices = tuple(_text(source, line, value) for value in values)
    if sum(bool(text) for text in choices) < 2:
        raise UserError(f"{source} line {line} has fewer than two choices (task.choices). Give it two or more")
    return choices


def labels_are(items: Sequence[MultipleChoice]) -> str:
    """What the labels of a file are that it does not give as numbers: TEXTS if each is the text of one of its item's
    choices, else PLACES if each is an index or a letter; empty if it has none, or both."""
    written = [item for item in items if not item.numbered]
    for kind, place_of in _READINGS.items():
        if written and all(place_of(item) is not None for item in written):
            return kind
    return ""


def correct_choices(source: Path, items: Sequence[MultipleChoice], are: str = "") -> list[int]:
    """The index of the correct choice of each item of a file.

    Numbers are indices. Other labels are what `are` says (labels_are of the training file; empty: of this file), if all
    can be that; else each item decides. Raises UserError, with file and line, for a label that is not a choice, and,
    where items decide, for one that is the index of one choice and the text of another.
    """
    kind = are or labels_are(items)
    if kind:
        found = [_READINGS[kind](item) for item in items]
        if None not in found:
            return [place for place in found if place is not None]
    by_text, by_place = [_by_text(item) for item in items], [_by_place(item) for item in items]
    for item, *read in zip(items, by_text, by_place, strict=True):
        if read == [None, None]:
            raise UserError(
                f"{source} line {item.line}: label {item.label!r} is not one of its {sum(map(bool, item.choices))} "
                "choices; expected an index from 0, a letter from A, or a choice's text (numbers are indices, unless "
                "in quotes). Correct the line or the column (task.label)"
            )
    return [_correct(source, *found) for found in zip(items, by_text, by_place, strict=True)]


def _correct(source: Path, item: MultipleChoice, by_text: int | None, by_place: int | None) -> int:
    if by_text is not None and by_place is not None and by_text != by_place:
        raise UserError(
            f"{source} line {item.line}: label {item.label!r} is the text of choice {by_text} (from 0), and as an "
            f"index or letter it names choice {by_place}; other labels of the task are of either kind. Give all labels "
            "as texts, or all as indices"
        )
    place = by_text if by_place is None else by_place
    assert place is not None
    return place


def _by_text(item: MultipleChoice) -> int | None:
    """The choice whose text is the label; None for none or several, and for a number."""
    known = item.label and not item.numbered and item.choices.count(item.label) == 1
    return item.choices.index(item.label) if known else None


def _by_place(item: MultipleChoice) -> int | None:
    """The choice whose index, from 0, or whose letter, from A, is the label."""
    label, place = item.label or "", -1
    if re.fullmatch("[0-9]+", label):
        place = int(label)
    elif re.fullmatch("[A-Z]", label):
        place = ord(label) - ord("A")
    return place if 0 <= place < len(item.choices) and item.choices[place] else None


_READINGS: dict[str, Callable[[MultipleChoice], int | None]] = {
    TEXTS: lambda item: _by_place(item) if item.numbered else _by_text(item),
    PLACES: _by_place,
}


def _text(source: Path, line: int, value: Any) -> str:
    return text_of(f"{source} line {line}", value).strip()


def _label(path: Path, line: int, value: Any) -> str:
    if value is None or isinstance(value, bool) or not isinstance(value, str | int | float) or value != value:
        raise UserError(
            f"{path} line {line}: {value!r:.40} is not a label; expected the index of the correct choice, from 0"
        )
    return str(int(value)) if isinstance(value, float) and value == int(value) else str(value).strip()
