"""Blocks of escaped HTML that show what a fine-tuned model took for what: matrices, and its worst examples."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Int64
from bert_jax.reporting.curves import percent
from bert_jax.reporting.page import Bar, bar_list, text

LONGEST = 600  # characters of a text that are shown


class Example(NamedTuple):
    """One item of a list of the worst: its heading, its text as HTML, and the guesses as bars or as HTML."""

    heading: str
    beside: str
    content: str
    bars: tuple[Bar, ...] = ()


def matrix(counts: Int64[np.ndarray, "C C"], names: Sequence[str]) -> str:
    """A row for each true class, a column for each guess; a cell is as dark as its share of the row."""
    sums = counts.sum(axis=1)
    head = "".join(f'<th class="turned"><span>{text(name)}</span></th>' for name in names)
    rows = []
    for truth, row in enumerate(counts):
        cells = []
        for guess, count in enumerate(row):
            share = count / sums[truth] if sums[truth] else 0.0
            kind = "hit" if truth == guess else "miss"
            said = f"{names[truth]} taken for {names[guess]}: {count:,}, {percent(float(share))} of {sums[truth]:,}"
            dark = " dark" if share > 0.5 else ""
            shown = f"{count:,}" if count else ""
            cells.append(f'<td class="{kind}{dark}" style="--share:{share:.3f}" title="{text(said)}">{shown}</td>')
        rows.append(f"<tr><th>{text(names[truth])}</th>{''.join(cells)}</tr>")
    return (
        '<div class="scroll"><table class="matrix"><thead><tr><th class="corner">truth \\ guess</th>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def shortened(content: str, most: int = LONGEST) -> str:
    """The beginning of a text, with dots where it was cut."""
    return content if len(content) <= most else content[: most - 1].rstrip() + "…"


def example_list(examples: Iterable[Example]) -> str:
    """Cards one below the other."""
    cards = []
    for example in examples:
        bars = bar_list(example.bars) if example.bars else ""
        cards.append(
            f'<article class="example worst"><h3>{text(example.heading)} <span>{text(example.beside)}</span></h3>'
            f'<div class="beside"><p>{example.content}</p>{bars}</div></article>'
        )
    return "".join(cards)


def marked(word: str, note: str, right: bool = False) -> str:
    """A word set apart, with a small note behind it."""
    kind = ' class="found"' if right else ""
    return f"<mark{kind}>{text(word)} <small>{text(note)}</small></mark>"
