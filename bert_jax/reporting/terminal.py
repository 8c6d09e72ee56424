"""Prints a Document on a terminal, or else as plain text in 100 columns."""

import textwrap

from rich.bar import Bar as RichBar
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from bert_jax.reporting.document import (
    Block,
    Bullets,
    Charts,
    Document,
    Excerpt,
    Excerpts,
    Histogram,
    Panel,
    Panels,
    Settings,
    Table,
)

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
