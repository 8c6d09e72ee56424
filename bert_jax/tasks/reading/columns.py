"""The columns of a table that hold the texts and the labels, and the values that are read from them."""

from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bert_jax.command import UserError


@dataclass(frozen=True)
class Columns:
    """The columns of texts and labels: header names, or numbers from 0 (a negative number counts from the end).

    marks is for a task that asks about a word of each text (labelled_texts.mark_words): the column of the word's first
    character and the column of its exclusive end, first for text and then for text_pair.
    """

    text: str = ""
    text_pair: str = ""
    label: str = ""
    marks: tuple[str, ...] = ()

    def filled(self, default: "Columns") -> "Columns":
        """The columns, with those of default in place of empty ones."""
        return Columns(*(mine or other for mine, other in zip(astuple(self), astuple(default), strict=True)))


@dataclass(frozen=True)
class Column:
    """A column to read: its header name or number, and the key under `task` that selects it (its role)."""

    name: str
    role: str
    required: bool = True


class TableRow(NamedTuple):
    """The values of one example, one for each requested column; None where it has none."""

    line: int  # in the file, from 1; the row, from 1, in Parquet and prepared data
    values: tuple[Any, ...]  # texts from TSV and CSV; values of any type from other formats


class Table(NamedTuple):
    """The records of a file and the properties of their columns."""

    records: list[TableRow]
    present: tuple[bool, ...]  # for each requested column, whether the file has it
    class_names: tuple[tuple[str, ...], ...]  # by column; empty unless the file names the classes
    left_out: int = 0  # skipped lines with an unexpected number of fields


def advice(role: str) -> str:
    """The part of an error message that explains how to select another column."""
    flags = f" (in predict, evaluate and embed: --{role})" if role in ("text", "text_pair", "label") else ""
    return (
        f"Name another one with --config.task.{role}{flags}; a named task reads only the columns of its published files"
    )


def is_number(name: str) -> bool:
    """Whether a column is given by its number."""
    return name.removeprefix("-").isdecimal()


def has_column(names: list[str], width: int, column: str) -> bool:
    """Whether a table of `width` columns has a column; names is its header, or empty."""
    return column != "" and (column in names or (is_number(column) and -width <= int(column) < width))


def place_of(path: Path, names: list[str], width: int, column: str, role: str) -> int:
    """The index of a column, from 0. Raises UserError for a missing column and for a repeated name."""
    if not has_column(names, width, column):
        known = f"its columns are: {', '.join(names)}" if names else f"it has columns 0 to {width - 1} and no header"
        raise UserError(f"{path} has no column {column!r}; {known}. {advice(role)}")
    if names.count(column) > 1:
        raise UserError(f"{path} has {names.count(column)} columns named {column!r}. Rename all but one")
    return names.index(column) if column in names else int(column) % width
