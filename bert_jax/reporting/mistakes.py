"""What a fine-tuned model gets wrong, from its predictions: typed spans, calibration, confusions, and cards.

The counts come first (compare_spans, calibrate, most_confused), then the plots as inline SVG (reliability, scatter),
then the HTML (confusion_table, error_section). No model is needed: finetuning.py makes the predictions.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Bool, Float, Int64
from bert_jax.reporting.document import Bar, Markup, Section, number, percent
from bert_jax.reporting.page import Scale, axes, bar_list, text, ticks
from bert_jax.tasks.rows import Span

CORRECT, TYPE, BORDER, BOTH = "correct", "wrong type", "wrong border", "wrong type and border"
MISSED, SPURIOUS = "missed", "spurious"
SPAN_RESULTS = (CORRECT, TYPE, BORDER, BOTH, MISSED, SPURIOUS)
BINS = 15  # Guo et al. 2017, section 4

# Square plots.
SIDE = 360  # pixels
LEFT, RIGHT, TOP, BASE = 48, 348, 12, 320
STRIP = 54  # pixels below a reliability diagram that show the number of predictions in each bin
MOST_POINTS = 1500

LONGEST = 600  # characters of a text that are shown
# Cells of larger shares have black text on dark screens too; at this share, white and black are as easy to read.
STRONG = 0.68


def compare_spans(true: Sequence[Span], predicted: Sequence[Span]) -> list[tuple[str, Span]]:
    """Returns the result of each true span, then the predicted spans that are spurious.

    A true span is correct if it was predicted; of wrong type if another type was predicted for its words; of wrong
    border if a predicted span of its type overlaps it; both if one of another type does; else missed. A predicted span
    that overlaps no true span is spurious. The wrong ones are those that Chinchor and Sundheim (1993, MUC-5) call
    incorrect or partial.
    """
    results: list[tuple[str, Span]] = []
    exact = set(predicted)
    for span in true:
        near = [other for other in predicted if _overlap(span, other)]
        if span in exact:
            result = CORRECT
        elif any(other[1:] == span[1:] for other in near):
            result = TYPE
        elif any(other.label == span.label for other in near):
            result = BORDER
        else:
            result = BOTH if near else MISSED
        results.append((result, span))
    return results + [(SPURIOUS, span) for span in predicted if not any(_overlap(span, other) for other in true)]


def count_by_type(results: Iterable[tuple[str, Span]]) -> dict[str, Counter[str]]:
    """Returns how often each of SPAN_RESULTS occurs, by type."""
    counts: dict[str, Counter[str]] = {}
    for result, span in results:
        counts.setdefault(span.label, Counter())[result] += 1
    return dict(sorted(counts.items()))


def _overlap(left: Span, right: Span) -> bool:
    return left.first < right.end and right.first < left.end


@dataclass(frozen=True)
class Calibration:
    """Predictions by their probability, in bins of equal width: bin m holds those in ((m - 1) / M, m / M]."""

    counts: Int64[np.ndarray, "M"]
    confidence: Float[np.ndarray, "M"]  # mean probability; NaN in an empty bin
    accuracy: Float[np.ndarray, "M"]  # share of correct predictions; NaN in an empty bin

    @property
    def error(self) -> float:
        """The expected calibration error (Guo et al. 2017, section 2, equation 3)."""
        gaps = np.nan_to_num(np.abs(self.accuracy - self.confidence))
        return float((self.counts * gaps).sum() / self.counts.sum())


def calibrate(confidence: Float[np.ndarray, "R"], correct: Bool[np.ndarray, "R"], bins: int = BINS) -> Calibration:
    """Returns the calibration of predictions with these probabilities."""
    places = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    counts = np.bincount(places, minlength=bins)
    with np.errstate(invalid="ignore"):
        means = [np.bincount(places, values, bins) / counts for values in (confidence, correct.astype(float))]
    return Calibration(counts, *means)


def most_confused(
    counts: Int64[np.ndarray, "C C"], names: Sequence[str], most: int
) -> list[tuple[str, str, int, float]]:
    """Returns label, prediction, count, and share of the label's cases, the most frequent confusions first."""
    wrong = counts * (1 - np.eye(len(counts), dtype=np.int64))
    order = [divmod(int(place), len(counts)) for place in np.argsort(-wrong, axis=None, kind="stable")[:most]]
    return [
        (names[label], names[other], int(wrong[label, other]), float(wrong[label, other] / counts[label].sum()))
        for label, other in order
        if wrong[label, other]
    ]


def reliability(calibration: Calibration) -> str:
    """Plots accuracy over confidence by bin, next to the diagonal of a calibrated model.

    The counts of the bins are below.
    """
    x, y = _scales(ticks(0.0, 1.0))
    bins = len(calibration.counts)
    width = (x.end - x.begin) / bins - 1
    base = SIDE + STRIP
    bars, strip = [], []
    for place, count in enumerate(calibration.counts):
        left = x(place / bins) + 0.5
        title = f"<title>{percent(place / bins)} to {percent((place + 1) / bins)}: {count:,} predictions"
        if count:
            confidence, accuracy = float(calibration.confidence[place]), float(calibration.accuracy[place])
            title += f", accuracy {percent(accuracy)}, mean confidence {percent(confidence)}"
            top, bottom = sorted((y(accuracy), y(confidence)))
            bar = _bar(left, y(accuracy), width, y.begin - y(accuracy), title)
            bars.append(
                f'<g class="series-0">{bar}</g><g class="gap">{_bar(left, top, width, bottom - top, title)}</g>'
            )
            height = (STRIP - 10) * count / calibration.counts.max()
            strip.append(_bar(left, base - height, width, max(height, 0.7), title))
    content = (
        f"{axes(x, y, 'confidence', percent, percent)}{''.join(bars)}{_diagonal(x, y)}"
        f'<g class="strip">{"".join(strip)}</g>'
        f'<text class="tick" x="{LEFT - 7}" y="{base - STRIP / 2 + 14:.0f}" text-anchor="end">count</text>'
        f'<line class="axis" x1="{LEFT}" x2="{RIGHT}" y1="{base}" y2="{base}"/>'
    )
    summary = f"Calibration, expected calibration error {percent(calibration.error)}"
    return _figure("Calibration", "accuracy", summary, content, base + 4)


def scatter(labels: Float[np.ndarray, "R"], predictions: Float[np.ndarray, "R"], names: Sequence[str]) -> str:
    """Plots a point for each item, at most MOST_POINTS of them; the diagonal is where predictions equal labels."""
    shown = np.unique(np.linspace(0, len(labels) - 1, min(len(labels), MOST_POINTS)).astype(int)).tolist()
    low, high = float(min(labels.min(), predictions.min())), float(max(labels.max(), predictions.max()))
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    x, y = _scales(ticks(low, high))
    points = "".join(
        f'<circle cx="{x(float(labels[item])):.1f}" cy="{y(float(predictions[item])):.1f}" r="3"><title>'
        f"{escape(names[item][:120])}: {number(float(labels[item]))}, predicted "
        f"{number(float(predictions[item]))}</title></circle>"
        for item in shown
    )
    grid = axes(x, y, "label", number, number)
    content = f'{grid}<g class="series-0 points">{points}</g>{_diagonal(x, y)}'
    summary = f"Labels and predictions: {len(shown):,} points"
    return _figure("Labels and predictions", "prediction", summary, content, SIDE)


def _scales(marks: Float[np.ndarray, "k"]) -> tuple[Scale, Scale]:
    """Returns scales with the same values on both axes."""
    low, high = float(marks[0]), float(marks[-1])
    return Scale(low, high, LEFT, RIGHT, marks), Scale(low, high, BASE, TOP, marks)


def _bar(x: float, y: float, width: float, height: float, title: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}">{title}</title></rect>'


def _diagonal(x: Scale, y: Scale) -> str:
    return f'<line class="reference" x1="{x.begin}" x2="{x.end}" y1="{y.begin}" y2="{y.end}"/>'


def _figure(title: str, unit: str, summary: str, content: str, height: int) -> str:
    return (
        f'<figure class="panel"><figcaption><h3>{escape(title)} <span>{escape(unit)}</span></h3></figcaption>'
        f'<svg viewBox="0 0 {SIDE} {height}" role="img" aria-label="{escape(summary)}">{content}</svg>'
        "</figure>"
    )


class ErrorCard(NamedTuple):
    """One example: its heading, its place in the file, its text as HTML, and the model's predictions as bars."""

    heading: str
    place: str
    content: str
    bars: tuple[Bar, ...] = ()


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
