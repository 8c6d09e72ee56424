"""The report's page: pieces of escaped HTML put together. Everything that comes from data passes `text`."""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bert_jax.reporting import plot
from bert_jax.reporting.blanks import BLANK, Blank
from bert_jax.reporting.curves import Chart, percent
from bert_jax.reporting.style import SCRIPT, STYLE


class Tile(NamedTuple):
    """A headline figure: its value, what it is, and what to compare it with."""

    value: str
    name: str
    beside: str = ""


class Bar(NamedTuple):
    """A line of a bar_list: what it is of, how long the bar is (0 to 1), the value as text, whether to set it apart."""

    name: str
    share: float
    shown: str
    right: bool = False


def page(title: str, header: str, sections: Iterable[str]) -> str:
    """A whole document that needs no other file and no network."""
    script = SCRIPT.replace("TOP", str(plot.TOP)).replace("BASE", str(plot.HEIGHT - plot.BOTTOM))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><header><h1>{text(title)}</h1>{header}</header>\n"
        + "\n".join(section for section in sections if section)
        + f"\n<script>{script}</script></body></html>\n"
    )


def text(value: object) -> str:
    """Escaped for a place between tags or inside a quoted attribute."""
    return html.escape(str(value))


def section(title: str, content: str, note: str = "") -> str:
    said = f'<p class="note">{text(note)}</p>' if note else ""
    return f"<section><h2>{text(title)}</h2>{said}{content}</section>"


def tiles(found: Sequence[Tile]) -> str:
    cells = (
        f'<div class="tile"><span>{text(tile.name)}</span><b>{text(tile.value)}</b>'
        f"<small>{text(tile.beside)}</small></div>"
        for tile in found
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def chart_grid(charts: Sequence[Chart]) -> str:
    return f'<div class="charts">{"".join(plot.figure(chart) for chart in charts)}</div>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is words and whose others are numbers."""

    def line(cells: Sequence[str], tag: str) -> str:
        first, *rest = cells
        return (
            f"<tr><{tag}>{text(first)}</{tag}>"
            + "".join(f'<{tag} class="number">{text(cell)}</{tag}>' for cell in rest)
            + "</tr>"
        )

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="scroll"><table><thead>{line(header, "th")}</thead><tbody>{body}</tbody></table></div>'


def blanks_table(blanks: Sequence[Blank]) -> str:
    """Sentences with a blank, the truth, and the model's guesses with their probabilities."""
    rows = "".join(
        f'<tr><td class="sentence">{_masks(blank.before)} <mark>{BLANK}</mark> {_masks(blank.after)}</td>'
        f'<td class="truth">{text(blank.truth)}</td><td>{_guesses(blank)}</td></tr>'
        for blank in blanks
    )
    head = "<tr><th>what the model saw</th><th>truth</th><th>its five likeliest guesses</th></tr>"
    return f'<table class="blanks"><thead>{head}</thead><tbody>{rows}</tbody></table>'


def settings(groups: Mapping[str, Mapping[str, Any]]) -> str:
    """A table for each group of a configuration; nested keys are joined by dots."""
    tables = []
    for name, values in groups.items():
        rows = "".join(f"<tr><td>{text(key)}</td><td>{text(_plain(value))}</td></tr>" for key, value in _flat(values))
        if rows:
            tables.append(f"<table><caption>{text(name)}</caption><tbody>{rows}</tbody></table>")
    return f'<div class="settings">{"".join(tables)}</div>'


def _masks(words: str) -> str:
    """Text with the other masked tokens set back, and the border between the two segments."""
    escaped = text(words)
    for token in (BLANK, "[SEP]"):
        escaped = escaped.replace(token, f'<span class="mask">{token}</span>')
    return escaped


def bar_list(items: Iterable[Bar]) -> str:
    """Names with a bar each, the widest as wide as there is room for if its share is 1."""
    lines = (
        f"<li{' class=right' if item.right else ''}><span>{text(item.name)}</span>"
        f'<div><i style="width:{100 * item.share:.1f}%"></i></div><em>{text(item.shown)}</em></li>'
        for item in items
    )
    return f'<ol class="guesses">{"".join(lines)}</ol>'


def _guesses(blank: Blank) -> str:
    right = [guess.token == blank.truth for guess in blank.guesses]
    bars = (
        Bar(guess.token + (" ✓" if fits else ""), guess.probability, percent(guess.probability), fits)
        for guess, fits in zip(blank.guesses, right, strict=True)
    )
    below = "" if any(right) else f'<div class="missed">the truth has {percent(blank.truth_probability)}</div>'
    return bar_list(bars) + below


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "-" if value is None or value == "" else str(value)
