"""What a page or a printed summary shows, independent of how it is rendered: tables, texts, charts.

page.py renders a Document as HTML, terminal.py prints it. A Document has Sections, and they have Blocks. Blocks hold
plain text and numbers, which the renderers escape; only Markup holds HTML, and only pages show it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from bert_jax.array_types import Float, Int64

Format = Callable[[float], str]

_PAGE_BINS = 32


@dataclass(frozen=True)
class Series:
    """One curve: `values` at `steps`; `trend` is its running mean where it is noisy.

    colour   one of page.css, for a curve that has the same one in several charts; None: by its place in this chart
    """

    name: str
    steps: Float[np.ndarray, "n"]
    values: Float[np.ndarray, "n"]
    trend: Float[np.ndarray, "n"] | None = None
    colour: int | None = None


@dataclass(frozen=True)
class Reference:
    """A level to compare with, such as the accuracy of always predicting the most frequent token."""

    name: str
    value: float


@dataclass(frozen=True)
class Chart:
    """Curves over `axis`, or, with a `bar_width`, histograms: each value is that of [step, step + bar_width)."""

    title: str
    unit: str
    series: tuple[Series, ...]
    show: Format  # formats a value for ticks and read-outs
    from_zero: bool = True
    references: tuple[Reference, ...] = ()
    axis: str = "step"
    bar_width: int = 0

    def place(self, step: float) -> str:
        """Returns a place on the axis in words: step 1,200; 113-128 tokens."""
        if not self.bar_width:
            return f"{self.axis} {step:,.0f}"
        last = step + self.bar_width - 1
        if last == step:
            return f"{step:,.0f} {self.axis.removesuffix('s') if step == 1 else self.axis}"
        return f"{step:,.0f}–{last:,.0f} {self.axis}"


@dataclass(frozen=True)
class Histogram:
    """Counts of whole numbers: `counts[name][k]` is how often the value k occurs in the series `name`."""

    title: str
    unit: str  # of what the shares are, e.g. "of sequences"
    axis: str
    counts: Mapping[str, Int64[np.ndarray, "n"]]

    @property
    def highest(self) -> int:
        """The highest value of any series; 0 if no value above 0 occurs."""
        return max((int(np.flatnonzero(counts).max(initial=0)) for counts in self.counts.values()), default=0)

    def bins(self, most: int) -> dict[str, list[tuple[int, int, int]]]:
        """Returns at most `most` bins (first, last, count) of equal width over 1..highest.

        All series have the same bins.
        """
        return {name: bin_counts(counts[: self.highest + 1], most) for name, counts in self.counts.items()}

    def chart(self) -> Chart:
        """Returns the histogram as shares of each series; series without a value above 0 are left out."""
        series = tuple(
            Series(
                name,
                np.array([first for first, _, _ in bins], np.float64),
                np.array([count for _, _, count in bins], np.float64) / self.counts[name][1:].sum(),
            )
            for name, bins in self.bins(_PAGE_BINS).items()
            if self.counts[name][1:].any()
        )
        width = max(1, -(-self.highest // _PAGE_BINS))
        return Chart(self.title, self.unit, series, percent, axis=self.axis, bar_width=width)


def bin_counts(counts: Int64[np.ndarray, "n"], most: int) -> list[tuple[int, int, int]]:
    """Returns the counts of the values 1..n-1 in at most `most` bins of equal width: (first, last, count).

    The value 0 is left out.
    """
    size = len(counts) - 1
    width = max(1, -(-size // most))
    return [
        (first, min(first + width - 1, size), int(counts[first : first + width].sum()))
        for first in range(1, size + 1, width)
    ]


def percent(value: int | float) -> str:
    """Writes 0.2561 as 25.6%, 0.0707 as 7.07%."""
    return f"{100 * value:.1f}%" if abs(value) >= 0.1 or value == 0 else f"{100 * value:.3g}%"


def number(value: int | float) -> str:
    """Writes four significant digits; millions and more as M and G, values below 0.0001 as a power of ten."""
    size = abs(value)
    if size >= 1e9:
        return f"{value / 1e9:.4g}G"
    if size >= 1e6:
        return f"{value / 1e6:.4g}M"
    if size >= 1e3:
        return f"{value:,.0f}"
    if 0 < size < 1e-4 * 0.999:
        digits, power = f"{value:.2e}".split("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{value:.4g}"


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


def flat_settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Returns nested settings as text by their joined names; an empty value is a dash."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flat_settings(value, f"{prefix}{key}.")
        else:
            shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            flat[f"{prefix}{key}"] = "-" if value is None or shown == "" else shown
    return flat


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
