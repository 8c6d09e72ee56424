"""Which columns of a file hold what."""

from dataclasses import astuple, dataclass
from pathlib import Path

from bert_jax.command import UserError


@dataclass(frozen=True)
class Columns:
    """Which columns of a file hold what: header names, or numbers from 0 (a negative number counts from the end).

    marks are for a task that asks about a word of each text (marks.py): the column of its first character and that of
    the one behind its last, of the text and then of text_pair.
    """

    text: str = ""
    text_pair: str = ""
    label: str = ""
    marks: tuple[str, ...] = ()

    def filled(self, default: "Columns") -> "Columns":
        """These, and those of default where none is named."""
        return Columns(*(mine or other for mine, other in zip(astuple(self), astuple(default), strict=True)))


@dataclass(frozen=True)
class Column:
    """A column that is asked of a file: its name there (or number), and the key under `task` by which it is named."""

    name: str
    role: str
    required: bool = True


def advice(role: str) -> str:
    """What to do about a column that is not there."""
    return (
        f"Name another by --config.task.{role} (of predict and evaluate: --{role}); a named task takes the columns "
        "of its published files alone"
    )


def is_number(name: str) -> bool:
    """Whether a column is named by its place."""
    return name.removeprefix("-").isdecimal()


def has_column(names: list[str], width: int, column: str) -> bool:
    """Whether a table of so many columns, called so where it has a header, has this one."""
    return column in names or (is_number(column) and -width <= int(column) < width)


def place_of(path: Path, names: list[str], width: int, column: str, role: str) -> int:
    """The place of a column from 0. Raises UserError where it is not there, or there twice."""
    if not has_column(names, width, column):
        known = f"its columns are: {', '.join(names)}" if names else f"it has columns 0 to {width - 1} and no header"
        raise UserError(f"{path} has no column {column!r}; {known}. {advice(role)}")
    if names.count(column) > 1:
        raise UserError(f"{path} has {names.count(column)} columns called {column!r}. Rename all of them but one")
    return names.index(column) if column in names else int(column) % width
