"""Renders a Document as one HTML file with inline SVG, which needs no other file and no network.

`render` and `block` come first, then `figure`, which draws a chart. All data passes `text`.
page.css and page.js are copied into the page. Curves have CSS classes for colours (series-0, series-1, ...), so that
the style sheet sets them for light, dark and print.
"""

import html
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from bert_jax.array_types import Float
from bert_jax.reporting.document import (
    Bar,
    Block,
    Bullets,
    Chart,
    Charts,
    Document,
    Excerpts,
    Format,
    Fragment,
    Histogram,
    Markup,
    Panels,
    Reference,
    Series,
    Settings,
    Table,
    flat_settings,
    number,
)

TICKS = 5  # the approximate number on an axis
SPARSE = 15  # curves of at most this many points show them
_BAR_SHARE = 0.86  # the bars' share of a bin's width
# The chart's size and the borders of its curves, in pixels.
WIDTH, HEIGHT = 520, 250
LABEL_WIDTH, LABEL_HEIGHT = 200, 20  # of a reference's words
LEFT, RIGHT, TOP, BASE = 66, 506, 12, 210

Values = TypeVar("Values", float, np.ndarray)
_FOLDER = Path(__file__).parent


def render(document: Document) -> str:
    """Returns the whole page."""
    style, script = ((_FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    header = "".join(f"<p>{text(line)}</p>" for line in document.lines)
    header += f'<p class="state">{text(document.warning)}</p>' if document.warning else ""
    tiles = "".join(
        f'<div class="tile"><span>{text(tile.name)}</span><b>{text(tile.value)}</b>'
        f"<small>{text(tile.note)}</small></div>"
        for tile in document.tiles
    )
    sections = []
    for section in document.sections:
        if section.blocks or section.note:
            note = f'<p class="note">{text(section.note)}</p>' if section.note else ""
            content = "".join(map(block, section.blocks))
            sections.append(f"<section><h2>{text(section.title)}</h2>{note}{content}</section>")
    footer = f"<footer>Drawn by {text(document.program)} from {text(document.source)}.</footer>"
    main = ["<main>", tiles and f'<div class="tiles">{tiles}</div>', *sections, "</main>"]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(document.title)}</title><style>\n{style}</style></head>\n"
        f"<body><header><h1>{text(document.title)}</h1>{header}</header>\n"
        + "\n".join([*main, footer if document.program else ""])
        + f"\n<script>\nconst TOP = {TOP}, BASE = {BASE};\n{script}</script></body></html>\n"
    )


def text(value: object) -> str:
    """Escapes a value for use between tags or in a quoted attribute, and a path's bytes that are not UTF-8."""
    return html.escape(str(value)).encode(errors="backslashreplace").decode()


def block(content: Block) -> str:
    """Returns a block's HTML."""
    match content:
        case Table():
            return table(content.header, *content.groups, words=content.words)
        case Panels(panels):
            columns = (
                f"<div><h3>{text(panel.title)} <span>{text(panel.subtitle)}</span></h3>{bar_list(panel.bars)}</div>"
                for panel in panels
            )
            return f'<div class="panels">{"".join(columns)}</div>'
        case Charts(charts):
            lines = (chart.chart() if isinstance(chart, Histogram) else chart for chart in charts)
            return f'<div class="charts">{"".join(figure(chart) for chart in lines if chart.series)}</div>'
        case Bullets(sentences):
            return "<ul>" + "".join(f"<li>{text(sentence)}</li>" for sentence in sentences) + "</ul>"
        case Excerpts(excerpts):
            examples = []
            for excerpt in excerpts:
                heading = f"<div>{text(excerpt.heading)} <span>{text(excerpt.detail)}</span></div>"
                paragraphs = "".join(
                    f"<p><b>{text(name)}</b>{''.join(map(_fragment, fragments))}</p>"
                    for name, fragments in excerpt.paragraphs.items()
                )
                heading += f"<span>{text(excerpt.label)}</span>"
                examples.append(f'<div class="example"><h3>{heading}</h3>{paragraphs}</div>')
            return "".join(examples)
        case Settings(groups):
            tables = []
            for name, values in groups.items():
                flat = flat_settings(values).items()
                rows = "".join(f"<tr><td>{text(key)}</td><td>{text(value)}</td></tr>" for key, value in flat)
                caption = f"<caption>{text(name)}</caption>" if name else ""
                tables += [f"<table>{caption}<tbody>{rows}</tbody></table>"] if rows else []
            return f'<div class="settings">{"".join(tables)}</div>'
        case Markup(markup):
            return markup


def table(header: Sequence[str], *groups: Iterable[Sequence[str]], words: bool = False) -> str:
    """Returns a table with words in the first column and numbers, or `words`, in the others.

    A border separates the groups. Numbers are not broken between lines.
    """
    kind = "words" if words else "number"

    def line(cells: Sequence[str], tag: str) -> str:
        first, *others = cells
        cells_html = "".join(f'<{tag} class="{kind}">{text(cell)}</{tag}>' for cell in others)
        return f"<tr><{tag}>{text(first)}</{tag}>{cells_html}</tr>"

    bodies = "".join(f"<tbody>{''.join(line(row, 'td') for row in rows)}</tbody>" for rows in groups)
    return f'<div class="scroll" tabindex="0"><table><thead>{line(header, "th")}</thead>{bodies}</table></div>'


def bar_list(bars: Iterable[Bar]) -> str:
    """Returns names with bars; a share of 1 fills the width."""
    lines = []
    for bar in bars:
        count = "" if bar.number is None else f' title="{bar.number:,}"'
        lines.append(
            f"<li{' class=highlighted' if bar.highlighted else ''}><span>{text(bar.name)}</span>"
            f'<div><i style="width:{100 * bar.share:.1f}%"></i></div><em{count}>{text(bar.text)}</em></li>'
        )
    return f'<ol class="bars">{"".join(lines)}</ol>'


def _fragment(fragment: Fragment) -> str:
    """Marks a token to predict. If the input has a random token in its place, that follows in small type."""
    space = "" if fragment.joined else " "
    if fragment.kind == "plain":
        return space + text(fragment.text)
    if fragment.kind == "special":
        return f'{space}<span class="mask">{text(fragment.text)}</span>'
    random = f" <small>{text(fragment.text)}</small>" if fragment.kind == "random" else ""
    return f'{space}<mark class="{fragment.kind}">{text(fragment.label)}{random}</mark>'


class Scale(NamedTuple):
    """A linear map from values [low, high] to pixels [begin, end], with the values that get a tick."""

    low: float
    high: float
    begin: float
    end: float
    marks: Float[np.ndarray, "k"]

    def __call__(self, values: Values) -> Values:
        share = (values - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)


def figure(chart: Chart) -> str:
    """Returns an HTML figure: title, legend, SVG, and a read-out that the page's script updates."""
    x_scale, y_scale = _scales(chart)
    marks = [axes(x_scale, y_scale, chart.axis, number, chart.show)]
    legend, curves = "", []  # curves: what the page's script needs to show values and to mark points
    for index, series in enumerate(chart.series):
        # A series may have a fixed colour, so that a run looks the same in all charts of a page.
        css = f"series-{index if series.colour is None else series.colour}"
        x, y = x_scale(series.steps), y_scale(series.values)
        if chart.bar_width:
            # The bars of all series stand side by side around the middle of their bin.
            share = _BAR_SHARE / len(chart.series)
            offset = (index - (len(chart.series) - 1) / 2) * share * chart.bar_width
            x = x_scale(series.steps + (chart.bar_width - 1) / 2 + offset)
            width, base = (x_scale(float(chart.bar_width)) - x_scale(0.0)) * share, y_scale(0.0)
            # Bars of less than a twentieth of a pixel would only make the page larger.
            bars = "".join(
                f'<rect x="{middle - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" height="{base - top:.1f}"/>'
                for middle, top in zip(x, y, strict=True)
                if base - top >= 0.05
            )
            marks.append(f'<g class="{css}">{bars}</g>')
        else:
            marks.append(_curve(series, css, x, y, y_scale))
        legend += f'<li class="{css}"><i></i>{text(series.name)}</li>'
        curves.append(
            {
                "name": series.name,
                "class": css,
                "places": [chart.place(float(step)) for step in series.steps],
                "shown": [chart.show(float(value)) for value in series.values],
                "x": [round(value, 1) for value in x.tolist()],
                "y": [round(value, 1) for value in y.tolist()],
            }
        )
    marks += [_level(chart, reference, x_scale, y_scale) for reference in chart.references]
    latest, summary = _captions(chart)
    data = json.dumps(curves).replace("<", "\\u003c")  # a name may hold </script>
    unit = f" <span>{text(chart.unit)}</span>" if chart.unit else ""
    return (
        f'<figure class="chart"><figcaption><h3>{text(chart.title)}{unit}</h3><ul class="legend">{legend}</ul>'
        "</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" aria-label="{text(summary)}">'
        f"{''.join(marks)}<g class=cursor></g></svg>"
        f'<p class="readout">{text(latest)}</p><script type="application/json">{data}</script></figure>'
    )


def ticks(low: float, high: float) -> Float[np.ndarray, "k"]:
    """Returns round numbers (1, 2, 2.5 or 5 times a power of ten apart) from at or below low to at or above high."""
    # 0.999 and 1e-9 allow for rounding, so that a bound that is a tick needs no further one.
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return np.arange(first, last + 1) * step


def _scales(chart: Chart) -> tuple[Scale, Scale]:
    steps = np.concatenate([series.steps for series in chart.series])
    levels = [reference.value for reference in chart.references]
    values = np.concatenate([*(series.values for series in chart.series), levels])
    low, high = float(values.min()), float(values.max())
    if chart.from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low < 1e-12:  # all values are equal, but the axis needs a height
        low, high = (0.0, high) if high > 0 else (low, low + 1.0)
    marks = ticks(low, high)
    # The axis begins at step 0, and has a length even if all points are there.
    first_step, last_step = 0.0, max(float(steps.max()), 1.0)
    if chart.bar_width:  # a bar extends half-way to its neighbours
        first_step, last_step = float(steps.min()) - 0.5, float(steps.max()) + chart.bar_width - 0.5
    step_marks = ticks(first_step, last_step)
    if chart.bar_width:  # a histogram's values are whole numbers
        step_marks = np.unique(np.rint(step_marks))
    step_marks = step_marks[(step_marks >= first_step) & (step_marks <= last_step)]
    x_scale = Scale(first_step, last_step, LEFT, RIGHT, step_marks)
    return x_scale, Scale(float(marks[0]), float(marks[-1]), BASE, TOP, marks)


def axes(x: Scale, y: Scale, name: str, show_x: Format, show_y: Format) -> str:
    """Returns grid lines and labels at the ticks, and the x axis's name."""
    left, right, base = x.begin, x.end, y.begin
    parts = []
    # Ticks are round numbers, so 50% is as exact as 50.0%.
    for value in y.marks.tolist():
        at, label = y(value), text(show_y(value).replace(".0%", "%"))
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{left - 7}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    for value in x.marks.tolist():
        at, label = x(value), text(show_x(value).replace(".0%", "%"))
        anchor = "end" if at > right - 20 else "middle"  # a wide label would be cut at the edge
        parts.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{base}" y2="{base + 4}"/>')
        parts.append(f'<text class="tick" x="{at:.1f}" y="{base + 17}" text-anchor="{anchor}">{label}</text>')
    parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{base}" y2="{base}"/>')
    middle = (left + right) / 2
    parts.append(f'<text class="tick" x="{middle:.0f}" y="{base + 35}" text-anchor="middle">{text(name)}</text>')
    return "".join(parts)


def _level(chart: Chart, reference: Reference, x_scale: Scale, y_scale: Scale) -> str:
    """Draws a reference line. Its words go to the side with fewer points."""
    y = y_scale(reference.value)
    near = []  # heights of the points that the words may cover
    for series in chart.series:
        values = y_scale(series.values)
        near.append(values[(x_scale(series.steps) > RIGHT - LABEL_WIDTH) & (abs(values - y) < LABEL_HEIGHT)])
    heights = np.concatenate(near)
    # Pixels count from the top, so points above the line have smaller heights.
    above, below = (heights <= y).sum(), (heights > y).sum()
    text_y = y + LABEL_HEIGHT - 5 if below < above and y + LABEL_HEIGHT < BASE else y - 5
    words = text(f"{reference.name} {chart.show(reference.value)}")
    return (
        f'<line class="reference" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="reference" x="{RIGHT}" y="{text_y:.1f}" text-anchor="end">{words}</text>'
    )


def _curve(series: Series, css: str, x: Float[np.ndarray, "n"], y: Float[np.ndarray, "n"], y_scale: Scale) -> str:
    def line(kind: str, heights: Float[np.ndarray, "n"]) -> str:
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, heights, strict=True))
        return f'<polyline class="{kind}" points="{points}"/>'

    if len(x) == 1:
        return f'<circle class="{css}" cx="{x[0]:.1f}" cy="{y[0]:.1f}" r="4"/>'
    if series.trend is not None:
        return f'<g class="{css}">{line("noise", y)}{line("line", y_scale(series.trend))}</g>'
    dots = "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5"/>' for a, b in zip(x, y, strict=True))
    return f'<g class="{css}">{line("line", y)}{dots if len(x) <= SPARSE else ""}</g>'


def _captions(chart: Chart) -> tuple[str, str]:
    """Returns the read-out without a pointer (last or highest values), and the chart in words for screen readers."""

    def shown(series: Series, index: int) -> str:
        return f"{chart.show(float(series.values[index]))} at {chart.place(float(series.steps[index]))}"

    if chart.bar_width:
        highest = (f"{series.name} {shown(series, int(series.values.argmax()))}" for series in chart.series)
        latest = "most: " + "  ·  ".join(highest)
        return latest, f"{chart.title}, {latest}"
    last = "  ·  ".join(f"{series.name} {chart.show(float(series.values[-1]))}" for series in chart.series)
    changes = "; ".join(f"{series.name} from {shown(series, 0)} to {shown(series, -1)}" for series in chart.series)
    return f"last: {last}", f"{chart.title}: {changes}"
