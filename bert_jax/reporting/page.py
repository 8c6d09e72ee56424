"""Renders a Document as one HTML file that needs no other file and no network.

Everything that comes from data passes `text`, which escapes it. page.css and page.js are copied into the page.
"""

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_jax.reporting import plot
from bert_jax.reporting.chart import Chart, Histogram
from bert_jax.reporting.document import (
    Bar,
    Block,
    Bullets,
    Charts,
    Document,
    Excerpt,
    Excerpts,
    Fragment,
    Markup,
    Panel,
    Panels,
    Section,
    Settings,
    Table,
    Tile,
)

_FOLDER = Path(__file__).parent


def render(document: Document) -> str:
    """Returns the whole page."""
    style, script = ((_FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    header = "".join(f"<p>{text(line)}</p>" for line in document.lines)
    header += f'<p class="state">{text(document.warning)}</p>' if document.warning else ""
    sections = [_section(section) for section in document.sections if section.blocks or section.note]
    footer = f"<footer>Drawn by {text(document.program)} from {text(document.source)}.</footer>"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(document.title)}</title><style>\n{style}</style></head>\n"
        f"<body><header><h1>{text(document.title)}</h1>{header}</header>\n"
        + "\n".join(["<main>", _tiles(document.tiles), *sections, "</main>", footer if document.program else ""])
        + f"\n<script>\nconst TOP = {plot.TOP}, BASE = {plot.BASE};\n{script}</script></body></html>\n"
    )


def text(value: object) -> str:
    """Escapes a value for a place between tags or inside a quoted attribute, and bytes of a path that are not UTF-8."""
    return html.escape(str(value)).encode(errors="backslashreplace").decode()


def block(content: Block) -> str:
    """Returns the HTML of one block of a section."""
    match content:
        case Table():
            return table(content.header, *content.groups, words=content.words)
        case Panels(panels):
            return f'<div class="panels">{"".join(map(_panel, panels))}</div>'
        case Charts(charts):
            return _charts(charts)
        case Bullets(lines):
            return "<ul>" + "".join(f"<li>{text(line)}</li>" for line in lines) + "</ul>"
        case Excerpts(excerpts):
            return "".join(map(_excerpt, excerpts))
        case Settings(groups):
            return _settings(groups)
        case Markup(markup):
            return markup


def table(header: Sequence[str], *groups: Iterable[Sequence[str]], words: bool = False) -> str:
    """Returns a table with words in the first column and numbers, or `words`, in the others.

    Each group has a border below it. Numbers are not broken between lines.
    """
    kind = "words" if words else "number"

    def line(cells: Sequence[str], tag: str) -> str:
        first, *rest = cells
        others = "".join(f'<{tag} class="{kind}">{text(cell)}</{tag}>' for cell in rest)
        return f"<tr><{tag}>{text(first)}</{tag}>{others}</tr>"

    bodies = "".join(f"<tbody>{''.join(line(row, 'td') for row in rows)}</tbody>" for rows in groups)
    return f'<div class="scroll" tabindex="0"><table><thead>{line(header, "th")}</thead>{bodies}</table></div>'


def bar_list(bars: Iterable[Bar]) -> str:
    """Returns a list of names with a bar each; a share of 1 fills the width."""
    lines = (
        f"<li{' class=highlighted' if bar.highlighted else ''}><span>{text(bar.name)}</span>"
        f'<div><i style="width:{100 * bar.share:.1f}%"></i></div><em{_count(bar)}>{text(bar.text)}</em></li>'
        for bar in bars
    )
    return f'<ol class="bars">{"".join(lines)}</ol>'


def _section(section: Section) -> str:
    note = f'<p class="note">{text(section.note)}</p>' if section.note else ""
    content = "".join(map(block, section.blocks))
    return f"<section><h2>{text(section.title)}</h2>{note}{content}</section>"


def _tiles(tiles: Sequence[Tile]) -> str:
    if not tiles:
        return ""
    cells = (
        f'<div class="tile"><span>{text(tile.name)}</span><b>{text(tile.value)}</b>'
        f"<small>{text(tile.note)}</small></div>"
        for tile in tiles
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _charts(charts: Sequence[Chart | Histogram]) -> str:
    lines = (chart.chart() if isinstance(chart, Histogram) else chart for chart in charts)
    return f'<div class="charts">{"".join(plot.figure(chart) for chart in lines if chart.series)}</div>'


def _count(bar: Bar) -> str:
    return "" if bar.number is None else f' title="{bar.number:,}"'


def _panel(panel: Panel) -> str:
    return f"<div><h3>{text(panel.title)} <span>{text(panel.subtitle)}</span></h3>{bar_list(panel.bars)}</div>"


def _excerpt(excerpt: Excerpt) -> str:
    heading = f"{text(excerpt.heading)} <span>{text(excerpt.detail)}</span>"
    paragraphs = "".join(
        f"<p><b>{text(name)}</b>{''.join(map(_fragment, fragments))}</p>"
        for name, fragments in excerpt.paragraphs.items()
    )
    return f'<div class="example"><h3><div>{heading}</div><span>{text(excerpt.label)}</span></h3>{paragraphs}</div>'


def _fragment(fragment: Fragment) -> str:
    """Marks a token to predict. A random one that the model sees in its place stands next to it in small type."""
    space = "" if fragment.joined else " "
    if fragment.kind == "plain":
        return space + text(fragment.text)
    if fragment.kind == "special":
        return f'{space}<span class="mask">{text(fragment.text)}</span>'
    seen = f" <small>{text(fragment.text)}</small>" if fragment.kind == "random" else ""
    return f'{space}<mark class="{fragment.kind}">{text(fragment.label)}{seen}</mark>'


def _settings(groups: Mapping[str, Mapping[str, Any]]) -> str:
    tables = []
    for name, values in groups.items():
        rows = "".join(f"<tr><td>{text(key)}</td><td>{text(_plain(value))}</td></tr>" for key, value in _flat(values))
        caption = f"<caption>{text(name)}</caption>" if name else ""
        if rows:
            tables.append(f"<table>{caption}<tbody>{rows}</tbody></table>")
    return f'<div class="settings">{"".join(tables)}</div>'


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _plain(value: Any) -> str:
    shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return "-" if value is None or shown == "" else shown
