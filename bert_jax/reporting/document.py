"""What a page or a printed summary shows, independent of how it is rendered.

page.py renders a Document as HTML, terminal.py prints it. Blocks hold plain text and numbers, which the renderers
escape; only Markup holds HTML, and only pages show it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from bert_jax.reporting.chart import Chart, Histogram


class Tile(NamedTuple):
    """A headline figure: its value, its name, and what to compare it with."""

    value: str
    name: str
    note: str = ""


class Bar(NamedTuple):
    """A line of a Panel: its name, its length (0 to 1), its value as text, whether it is highlighted, and a count."""

    name: str
    share: float
    text: str
    highlighted: bool = False
    number: int | None = None


class Panel(NamedTuple):
    """Bars below a heading."""

    title: str
    subtitle: str
    bars: Sequence[Bar]


class Fragment(NamedTuple):
    """A run of text in an Excerpt.

    text    what the model sees
    kind    plain or special text; or a token that is predicted, which is shown masked, replaced by a random one, or
            kept as it was
    label   what the model has to predict
    joined  whether it follows the previous fragment without a space
    """

    text: str
    kind: Literal["plain", "special", "masked", "random", "kept"]
    label: str
    joined: bool


class Excerpt(NamedTuple):
    """A sequence of tokens as text, in named paragraphs."""

    heading: str
    detail: str
    label: str
    paragraphs: Mapping[str, Sequence[Fragment]]


@dataclass(frozen=True)
class Table:
    """Groups of rows below a header. The first column holds words, and the others numbers or `words`."""

    header: Sequence[str]
    groups: Sequence[Sequence[Sequence[str]]]
    words: bool = False


@dataclass(frozen=True)
class Panels:
    """Bar panels next to each other."""

    panels: Sequence[Panel]


@dataclass(frozen=True)
class Charts:
    """Line charts (pages only) and histograms, in a grid."""

    charts: Sequence[Chart | Histogram]


@dataclass(frozen=True)
class Bullets:
    """A list of sentences."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Excerpts:
    """Sequences of tokens as text."""

    excerpts: Sequence[Excerpt]


@dataclass(frozen=True)
class Settings:
    """Names and values in groups; nested names are joined by dots. A group without a name has no heading."""

    groups: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Markup:
    """Escaped HTML."""

    html: str


Block = Table | Panels | Charts | Bullets | Excerpts | Settings | Markup


@dataclass(frozen=True)
class Section:
    """A titled part of a document; without blocks and note it is not shown."""

    title: str
    blocks: Sequence[Block] = ()
    note: str = ""
    page_only: bool = False


@dataclass(frozen=True)
class Document:
    """A page, or what a command prints.

    lines    introduce it, below the title
    warning  is printed below them, set apart
    tiles    are the headline figures (pages only)
    program  and source, the command that made it and the folder it describes, form the footer of a page
    """

    title: str
    sections: Sequence[Section]
    lines: Sequence[str] = ()
    warning: str = ""
    tiles: Sequence[Tile] = field(default=())
    program: str = ""
    source: str = ""
