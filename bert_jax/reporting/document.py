"""The content of a page or a printed summary: tables, texts and charts, independent of how they are rendered.

A Document has Sections, and a Section has Blocks. Blocks hold plain text and numbers, which the renderers escape
(page.py writes HTML, print_document prints); only Markup holds HTML, and only pages show it.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.bar import Bar as RichBar
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from bert_jax.array_types import Float, Int64

Format = Callable[[float], str]

_PAGE_BINS = 32


class Series(NamedTuple):
    """One curve, with a running mean if it is noisy."""

    name: str
    steps: Float[np.ndarray, "n"]
    values: Float[np.ndarray, "n"]
    trend: Float[np.ndarray, "n"] | None = None
    colour: int | None = None  # its number in page.css; None: the position in the chart


class Reference(NamedTuple):
    """A level to compare with, e.g. the accuracy if the most frequent token is always predicted."""

    name: str
    value: float


class Chart(NamedTuple):
    """Curves over `axis`. With a `bar_width`, histograms: a value belongs to [step, step + bar_width)."""

    title: str
    unit: str
    series: tuple[Series, ...]
    show: Format  # formats a value for ticks and read-outs
    from_zero: bool = True
    references: tuple[Reference, ...] = ()
    axis: str = "step"
    bar_width: int = 0

    def place(self, step: float) -> str:
        """Names a place on the axis: step 1,200; 1 token; 113–128 tokens."""
        # Bars count whole numbers, so the last value of a bar is one less than the next bar's first.
        last = step + self.bar_width - 1
        if not self.bar_width:
            return f"{self.axis} {step:,.0f}"
        if last == step:
            return f"{step:,.0f} {self.axis.removesuffix('s') if step == 1 else self.axis}"
        return f"{step:,.0f}–{last:,.0f} {self.axis}"


class Histogram(NamedTuple):
    """Counts of whole numbers: `counts[name][k]` is how often series `name` has the value k."""

    title: str
    unit: str  # for the shares, e.g. "of sequences"
    axis: str
    counts: Mapping[str, Int64[np.ndarray, "n"]]

    @property
    def highest(self) -> int:
        """The highest value in any series, or 0."""
        return max((int(np.flatnonzero(counts).max(initial=0)) for counts in self.counts.values()), default=0)

    def bins(self, most: int) -> dict[str, list[tuple[int, int, int]]]:
        """Counts the values from 1 in at most `most` equally wide bins, as (first, last, count) by series.

        All series have the same bins.
        """
        size = self.highest
        width = max(1, -(-size // most))  # rounded up
        bounds = [(first, min(first + width - 1, size)) for first in range(1, size + 1, width)]
        return {
            name: [(first, last, int(counts[first : last + 1].sum())) for first, last in bounds]
            for name, counts in self.counts.items()
        }

    def chart(self) -> Chart:
        """Converts the counts to shares; leaves out series without a value above 0."""
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


def percent(value: int | float) -> str:
    """Writes 0.2561 as 25.6% and 0.0707 as 7.07%."""
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
    # 0.999 keeps a value that only rounding puts below 0.0001 in the usual form.
    if 0 < size < 1e-4 * 0.999:
        digits, power = f"{value:.2e}".split("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{value:.4g}"


class Tile(NamedTuple):
    """A headline figure, with a note on what to compare it with."""

    value: str
    name: str
    note: str = ""


class Bar(NamedTuple):
    """A line of a Panel: a name, a bar, and its value as text."""

    name: str
    share: float  # length, 0 to 1
    text: str
    highlighted: bool = False
    number: int | None = None  # a count


class Panel(NamedTuple):
    """Bars below a heading."""

    title: str
    subtitle: str
    bars: Sequence[Bar]


class Fragment(NamedTuple):
    """Text in an Excerpt: plain or special, or a token to predict."""

    text: str  # the model's input
    kind: Literal["plain", "special", "masked", "random", "kept"]  # the last three: how a token to predict is shown
    label: str  # what the model has to predict
    joined: bool  # follows the previous fragment without a space


class Excerpt(NamedTuple):
    """A token sequence as text, in named paragraphs."""

    heading: str
    detail: str
    label: str
    paragraphs: Mapping[str, Sequence[Fragment]]


class Table(NamedTuple):
    """Groups of rows below a header. The first column holds words, the others numbers or `words`."""

    header: Sequence[str]
    groups: Sequence[Sequence[Sequence[str]]]
    words: bool = False


class Panels(NamedTuple):
    """Bar panels, side by side."""

    panels: Sequence[Panel]


class Charts(NamedTuple):
    """Line charts (pages only) and histograms, in a grid."""

    charts: Sequence[Chart | Histogram]


class Bullets(NamedTuple):
    """Sentences as a list."""

    lines: Sequence[str]


class Excerpts(NamedTuple):
    """Token sequences as text."""

    excerpts: Sequence[Excerpt]


class Settings(NamedTuple):
    """Names and values in groups; nested names are joined by dots. A group without a name has no heading."""

    groups: Mapping[str, Mapping[str, Any]]


def flat_settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flattens nested settings to text, keyed by their joined names; an empty value is a dash."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flat_settings(value, f"{prefix}{key}.")
        else:
            shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            flat[f"{prefix}{key}"] = "-" if value is None or shown == "" else shown
    return flat


class Markup(NamedTuple):
    """Escaped HTML."""

    html: str


Block = Table | Panels | Charts | Bullets | Excerpts | Settings | Markup


class Section(NamedTuple):
    """A title with blocks and a note; hidden if it has neither."""

    title: str
    blocks: Sequence[Block] = ()
    note: str = ""
    page_only: bool = False


class Document(NamedTuple):
    """A page, or a command's printed output."""

    title: str
    sections: Sequence[Section]
    lines: Sequence[str] = ()  # introduce it, below the title
    warning: str = ""  # is set apart below them
    tiles: Sequence[Tile] = ()  # headline figures, on pages only
    program: str = ""  # the command that made it
    source: str = ""  # the folder it describes; both form a page's footer


# Prints a Document on a terminal, or else as plain text in 100 columns.


WIDTH = 100
_HISTOGRAM_BINS = 12
_BAR_COLUMNS = 44  # shared by the series of a histogram
_PANEL_BAR = 12


def open_console() -> Console:
    """Returns a console that prints text as it is: names and tokens may hold rich's markup, [ ] and :."""
    return Console(width=None if Console().is_terminal else WIDTH, markup=False, emoji=False)


def print_document(document: Document, console: Console | None = None) -> None:
    """Prints a document without its page-only sections. The heading is the source, a path, or else the title."""
    console = console or open_console()
    console.print(document.source or document.title, style="bold", soft_wrap=True, highlight=False)
    for line in filter(None, [*document.lines, document.warning]):
        console.print(line, soft_wrap=True, highlight=False)
    for section in document.sections:
        if section.page_only or not (section.blocks or section.note):
            continue
        console.print()
        if section.title:
            console.print(section.title, style="bold", soft_wrap=True, highlight=False)
        for block in section.blocks:
            _print_block(block, console)
        if section.note:
            console.print(section.note, style="dim", highlight=False)


def excerpt_text(excerpt: Excerpt) -> str:
    """Returns an excerpt as lines: heading, detail and label, then its paragraphs.

    A predicted token is {[MASK]: cat}.
    """
    lines = ["  ".join(filter(None, [excerpt.heading, excerpt.detail, excerpt.label]))]
    for name, fragments in excerpt.paragraphs.items():
        text = ""
        for fragment in fragments:
            is_predicted = fragment.kind not in ("plain", "special")
            text += "" if fragment.joined else " "
            text += f"{{{fragment.text}: {fragment.label}}}" if is_predicted else fragment.text
        lines.append(textwrap.fill(text.strip(), WIDTH, initial_indent=f"  {name}: ", subsequent_indent=" " * 5))
    return "\n".join(lines)


def _print_block(block: Block, console: Console) -> None:
    match block:
        case Settings(groups):
            for group, values in groups.items():
                table = RichTable(show_header=False)
                for name, value in values.items():
                    table.add_row(f"{group}.{name}" if group else name, str(value))
                console.print(table)
        case Table():
            table = RichTable()
            for index, name in enumerate(block.header):
                table.add_column(name, justify="right" if index else "left")
            for rows in block.groups:
                for row in rows:
                    table.add_row(*row)
                table.add_section()
            console.print(table)
        case Panels(panels):
            console.print(Columns([_panel(panel) for panel in panels], padding=(0, 2)))
        case Charts(charts):
            for chart in charts:
                if isinstance(chart, Histogram) and chart.highest:
                    console.print(_histogram(chart))
        case Bullets(lines):
            for line in lines:
                console.print(f"  {line}", soft_wrap=True, highlight=False)
        case Excerpts(excerpts):
            for excerpt in excerpts:
                console.print(excerpt_text(excerpt), soft_wrap=True, highlight=False)


def _panel(panel: Panel) -> RichTable:
    table = RichTable(title=f"{panel.title} {panel.subtitle}".strip(), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(width=_PANEL_BAR)
    for bar in panel.bars:
        count = "" if bar.number is None else f"{bar.number:,}  "
        table.add_row(bar.name, f"{count}{bar.text}", _Bar(bar.share, _PANEL_BAR))
    return table


def _histogram(histogram: Histogram) -> RichTable:
    """Returns a table with bins as rows, and a count and a bar for each series. A last row counts the value 0."""
    table = RichTable(title=f"{histogram.title}, {histogram.unit}", title_justify="left")
    table.add_column(histogram.axis)
    width = _BAR_COLUMNS // len(histogram.counts)
    for name in histogram.counts:
        table.add_column(name, justify="right")
        table.add_column("", width=width)
    binned = list(histogram.bins(_HISTOGRAM_BINS).values())
    # Every series has a scale of its own, since a held-out part is much smaller than the training part.
    longest = [max(1, *(count for _, _, count in bins)) for bins in binned]
    for rows in zip(*binned, strict=True):
        first, last, _ = rows[0]
        cells: list[RenderableType] = []
        for (_, _, count), most in zip(rows, longest, strict=True):
            cells += [f"{count:,}", _Bar(count / most, width)]
        table.add_row(str(first) if first == last else f"{first}-{last}", *cells)
    if any(counts[0] for counts in histogram.counts.values()):
        none = [cell for counts in histogram.counts.values() for cell in (f"{counts[0]:,}", "")]
        table.add_row(Text("none", "dim"), *none)
    return table


class _Bar:
    """A bar in block characters, or in # if the terminal's encoding has no others."""

    def __init__(self, share: float, width: int) -> None:
        self._share, self._width = share, width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.ascii_only:
            yield Segment("#" * round(self._share * self._width))
        else:
            yield RichBar(1, 0, self._share, width=self._width)
