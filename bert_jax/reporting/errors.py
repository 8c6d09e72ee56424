"""HTML of what a fine-tuned model gets wrong: a confusion matrix, and cards of the examples with the highest loss."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Int64
from bert_jax.reporting.chart import percent
from bert_jax.reporting.document import Bar, Markup, Section
from bert_jax.reporting.page import bar_list, text

LONGEST = 600  # characters of a text that are shown


class ErrorCard(NamedTuple):
    """One example: its heading, its place in the file, its text as HTML, and the model's predictions as bars."""

    heading: str
    place: str
    content: str
    bars: tuple[Bar, ...] = ()


# Cells of larger shares have black text on dark screens too; at this share, white and black are as easy to read.
STRONG = 0.68


def confusion_table(counts: Int64[np.ndarray, "C C"], names: Sequence[str]) -> str:
    """Returns a table with a row for each label and a column for each prediction. Strong colours are large shares."""
    sums = counts.sum(axis=1)
    head = "".join(f'<th class="turned"><span>{text(name)}</span></th>' for name in names)
    rows = []
    for label, row in enumerate(counts):
        cells = []
        for prediction, count in enumerate(row):
            share = count / sums[label] if sums[label] else 0.0
            kind = "hit" if label == prediction else "miss"
            title = (
                f"{names[label]} predicted as {names[prediction]}: {count:,}, {percent(float(share))} of "
                f"{sums[label]:,}"
            )
            strong = " strong" if share > STRONG else ""
            shown = f"{count:,}" if count else ""
            cells.append(f'<td class="{kind}{strong}" style="--share:{share:.3f}" title="{text(title)}">{shown}</td>')
        rows.append(f"<tr><th>{text(names[label])}</th>{''.join(cells)}</tr>")
    return (
        '<div class="scroll" tabindex="0"><table class="matrix"><thead><tr><th class="corner">label \\ prediction</th>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def error_section(cards: Iterable[ErrorCard]) -> Section:
    """Returns a section of cards below each other."""
    note = "In descending order of the loss. High losses often show errors in the file."
    return Section("Examples with the highest loss", [Markup("".join(map(_card, cards)))], note)


def truncate(content: str, most: int = LONGEST) -> str:
    """Returns the beginning of a text, with an ellipsis where it was cut."""
    return content if len(content) <= most else content[: most - 1].rstrip() + "…"


def highlight(words: str, note: str) -> str:
    """Returns words that are set apart, with a small note behind them."""
    return f"<mark>{text(words)} <small>{text(note)}</small></mark>"


def _card(card: ErrorCard) -> str:
    bars = bar_list(card.bars) if card.bars else ""
    return (
        f'<article class="example worst"><h3>{text(card.heading)} <span>{text(card.place)}</span></h3>'
        f'<div class="columns"><p>{card.content}</p>{bars}</div></article>'
    )
