"""Square plots as inline SVG: a reliability diagram, and labels against predictions, with tooltips of the values."""

from collections.abc import Sequence
from html import escape

import numpy as np

from bert_jax.array_types import Float
from bert_jax.reporting.chart import number, percent
from bert_jax.reporting.class_metrics import Calibration
from bert_jax.reporting.plot import Scale, axes, ticks

SIDE = 360  # pixels
LEFT, RIGHT, TOP, BASE = 48, 348, 12, 320
STRIP = 54  # pixels below a reliability diagram that show the number of predictions in each bin
MOST_POINTS = 1500


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
    kept = np.unique(np.linspace(0, len(labels) - 1, min(len(labels), MOST_POINTS)).astype(int)).tolist()
    low, high = float(min(labels.min(), predictions.min())), float(max(labels.max(), predictions.max()))
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    x, y = _scales(ticks(low, high))
    points = "".join(
        f'<circle cx="{x(float(labels[item])):.1f}" cy="{y(float(predictions[item])):.1f}" r="3"><title>'
        f"{escape(names[item][:120])}: {number(float(labels[item]))}, predicted "
        f"{number(float(predictions[item]))}</title></circle>"
        for item in kept
    )
    grid = axes(x, y, "label", number, number)
    content = f'{grid}<g class="series-0 points">{points}</g>{_diagonal(x, y)}'
    summary = f"Labels and predictions: {len(kept):,} points"
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
