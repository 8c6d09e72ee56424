"""A fine-tuned model's mistakes, from its predictions: typed spans, calibration, confusions, and examples.

The counts come first (compare_spans, calibrate, most_confused), then the plots as inline SVG (reliability, scatter),
then the HTML (confusion_table, error_card). No model is needed: finetuning.py makes the predictions.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Bool, Float, Int64
from bert_jax.reporting.document import Bar, number, percent
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
    """Judges the true spans, then lists the spurious ones: predicted spans without overlap with a true span.

    A true span is correct if it was predicted. It has a wrong type if its words were predicted with another type, and
    a wrong border if a predicted span with its type overlaps it; both if one with another type does; else it is missed.
    Chinchor and Sundheim (1993, MUC-5) call the wrong ones incorrect or partial.
    """

    def overlap(span: Span, others: Sequence[Span]) -> list[Span]:
        return [other for other in others if span.first < other.end and other.first < span.end]

    results: list[tuple[str, Span]] = []
    for span in true:
        # span[1:] is the place of a span without its type.
        near = overlap(span, predicted)
        if span in near:
            result = CORRECT
        elif any(other[1:] == span[1:] for other in near):
            result = TYPE
        elif any(other.label == span.label for other in near):
            result = BORDER
        else:
            result = BOTH if near else MISSED
        results.append((result, span))
    return results + [(SPURIOUS, span) for span in predicted if not overlap(span, true)]


class Calibration(NamedTuple):
    """Predictions by their probability, in equally wide bins: bin m holds ((m - 1) / M, m / M]."""

    counts: Int64[np.ndarray, "M"]
    confidence: Float[np.ndarray, "M"]  # mean probability; NaN in an empty bin
    accuracy: Float[np.ndarray, "M"]  # share of correct predictions; NaN in an empty bin

    @property
    def error(self) -> float:
        """The expected calibration error (Guo et al. 2017, section 2, equation 3)."""
        # An empty bin has no gap.
        gaps = np.nan_to_num(np.abs(self.accuracy - self.confidence))
        return float((self.counts * gaps).sum() / self.counts.sum())


def calibrate(confidence: Float[np.ndarray, "R"], correct: Bool[np.ndarray, "R"]) -> Calibration:
    """Bins predictions by their probability (`confidence`) and measures how many are correct."""
    # Bins are closed above, so only a probability of 0, or one above 1 by rounding, needs the clip.
    bins = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    counts = np.bincount(bins, minlength=BINS)
    with np.errstate(invalid="ignore"):  # 0 / 0 in an empty bin
        means = [np.bincount(bins, values, BINS) / counts for values in (confidence, correct.astype(float))]
    return Calibration(counts, *means)


def most_confused(
    counts: Int64[np.ndarray, "C C"], names: Sequence[str], most: int
) -> list[tuple[str, str, int, float]]:
    """Lists the most frequent confusions: label, prediction, count, and share of the label's cases."""
    wrong = counts * (1 - np.eye(len(counts), dtype=np.int64))
    # A cell's flat index is label * C + prediction. A stable sort keeps equal counts in the order of the classes.
    order = [divmod(int(cell), len(counts)) for cell in np.argsort(-wrong, axis=None, kind="stable")[:most]]
    return [
        (names[label], names[other], int(wrong[label, other]), float(wrong[label, other] / counts[label].sum()))
        for label, other in order
        if wrong[label, other]
    ]


def reliability(calibration: Calibration) -> str:
    """Plots accuracy over confidence next to a calibrated model's diagonal, with the bins' counts below."""
    x, y = _scales(0.0, 1.0)
    bins = len(calibration.counts)
    width = (x.end - x.begin) / bins - 1
    base = SIDE + STRIP
    columns = strip = ""

    def bar(index: int, top: float, height: float, title: str) -> str:
        left = x(index / bins) + 0.5
        return f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}">{title}</rect>'

    for index, count in enumerate(calibration.counts):
        if not count:
            continue
        confidence, accuracy = float(calibration.confidence[index]), float(calibration.accuracy[index])
        title = (
            f"<title>{percent(index / bins)} to {percent((index + 1) / bins)}: {count:,} predictions, "
            f"accuracy {percent(accuracy)}, mean confidence {percent(confidence)}</title>"
        )
        # A bar up to the accuracy, and on it or above it the gap to the confidence.
        top, bottom = sorted((y(accuracy), y(confidence)))
        columns += f'<g class="series-0">{bar(index, y(accuracy), y.begin - y(accuracy), title)}</g>'
        columns += f'<g class="gap">{bar(index, top, bottom - top, title)}</g>'
        # A bin with few predictions stays visible.
        height = (STRIP - 10) * count / calibration.counts.max()
        strip += bar(index, base - height, max(height, 0.7), title)
    below = (
        f'<g class="strip">{strip}</g>'
        f'<text class="tick" x="{LEFT - 7}" y="{base - STRIP / 2 + 14:.0f}" text-anchor="end">count</text>'
        f'<line class="axis" x1="{LEFT}" x2="{RIGHT}" y1="{base}" y2="{base}"/>'
    )
    summary = f"Calibration, expected calibration error {percent(calibration.error)}"
    content = axes(x, y, "confidence", percent, percent) + columns + _DIAGONAL + below
    return _figure("Calibration", "accuracy", summary, content, base + 4)


def scatter(labels: Float[np.ndarray, "R"], predictions: Float[np.ndarray, "R"], names: Sequence[str]) -> str:
    """Plots a point for each item, at most MOST_POINTS; predictions on the diagonal equal their labels."""
    # Evenly spaced, because a file may be sorted by label.
    items = np.unique(np.linspace(0, len(labels) - 1, min(len(labels), MOST_POINTS)).astype(int)).tolist()
    low, high = float(min(labels.min(), predictions.min())), float(max(labels.max(), predictions.max()))
    if high - low < 1e-12:  # all values are equal
        low, high = low - 0.5, high + 0.5
    x, y = _scales(low, high)
    points = ""
    for item in items:
        label, prediction = float(labels[item]), float(predictions[item])
        title = f"<title>{text(names[item][:120])}: {number(label)}, predicted {number(prediction)}</title>"
        points += f'<circle cx="{x(label):.1f}" cy="{y(prediction):.1f}" r="3">{title}</circle>'
    content = axes(x, y, "label", number, number) + f'<g class="series-0 points">{points}</g>' + _DIAGONAL
    summary = f"Labels and predictions: {len(items):,} points"
    return _figure("Labels and predictions", "prediction", summary, content, SIDE)


_DIAGONAL = f'<line class="reference" x1="{LEFT}" x2="{RIGHT}" y1="{BASE}" y2="{TOP}"/>'


def _scales(low: float, high: float) -> tuple[Scale, Scale]:
    """Returns a square plot's scales: both axes have the same values."""
    marks = ticks(low, high)
    first, last = float(marks[0]), float(marks[-1])
    return Scale(first, last, LEFT, RIGHT, marks), Scale(first, last, BASE, TOP, marks)


def _figure(title: str, unit: str, summary: str, content: str, height: int) -> str:
    return (
        f'<div class="charts"><figure class="panel"><figcaption><h3>{title} <span>{unit}</span></h3></figcaption>'
        f'<svg viewBox="0 0 {SIDE} {height}" role="img" aria-label="{summary}">{content}</svg></figure></div>'
    )


def confusion_table(counts: Int64[np.ndarray, "C C"], names: Sequence[str]) -> str:
    """Returns a table with labels as rows and predictions as columns. Stronger colours are larger shares."""
    head = "".join(f'<th class="turned"><span>{text(name)}</span></th>' for name in names)
    rows = ""
    for label, row in enumerate(counts):
        cells, total = "", row.sum()
        for prediction, count in enumerate(row):
            share = float(count / total) if total else 0.0
            kind = ("hit" if label == prediction else "miss") + (" strong" if share > STRONG else "")
            title = f"{names[label]} predicted as {names[prediction]}: {count:,}, {percent(share)} of {total:,}"
            shown = f"{count:,}" if count else ""
            cells += f'<td class="{kind}" style="--share:{share:.3f}" title="{text(title)}">{shown}</td>'
        rows += f"<tr><th>{text(names[label])}</th>{cells}</tr>"
    return (
        '<div class="scroll" tabindex="0"><table class="matrix"><thead><tr><th class="corner">label \\ prediction</th>'
        f"{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def error_card(heading: str, place: str, content: str, bars: Sequence[Bar] = ()) -> str:
    """Returns an example: its text as HTML (`content`), its place in the file, and the predictions as bars."""
    listed = bar_list(bars) if bars else ""
    return (
        f'<article class="example worst"><h3>{text(heading)} <span>{text(place)}</span></h3>'
        f'<div class="columns"><p>{content}</p>{listed}</div></article>'
    )


def truncate(content: str, most: int = LONGEST) -> str:
    """Shortens a text, with an ellipsis at the cut."""
    return content if len(content) <= most else content[: most - 1].rstrip() + "…"


def highlight(words: str, note: str) -> str:
    """Marks words, with a small note behind them."""
    return f"<mark>{text(words)} <small>{text(note)}</small></mark>"
