"""Square panels as inline SVG: a reliability diagram, and truth against guess; bars and points say their numbers."""

import html
from collections.abc import Sequence

import numpy as np

from bert_jax.array_types import Float
from bert_jax.reporting.class_metrics import Calibration
from bert_jax.reporting.curves import number, percent
from bert_jax.reporting.plot import Scale, ticks

SIDE = 360
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 12, 40
STRIP = 54  # under a reliability diagram: how many guesses lie where
MOST_POINTS = 1500


def reliability(calibration: Calibration) -> str:
    """Accuracy over confidence, bar by bar, beside the diagonal that they would lie on; below, how many there are."""
    x, y = _unit_scales()
    bins = len(calibration.counts)
    width = (x.end - x.begin) / bins
    bars, strip = [], []
    base = SIDE + STRIP
    most = calibration.counts.max()
    for place, count in enumerate(calibration.counts):
        left = x.at(place / bins) + 0.5
        tall = (STRIP - 10) * count / most
        said = f"<title>{percent(place / bins)} to {percent((place + 1) / bins)}: {count:,} guesses"
        if count:
            confidence, accuracy = float(calibration.confidence[place]), float(calibration.accuracy[place])
            said += f", {percent(accuracy)} right, {percent(confidence)} sure on average"
            low, high = sorted((y.at(accuracy), y.at(confidence)))
            bars.append(
                f'<g class="series-0"><rect x="{left:.1f}" y="{y.at(accuracy):.1f}" width="{width - 1:.1f}" '
                f'height="{y.at(0.0) - y.at(accuracy):.1f}">{said}</title></rect></g>'
                f'<rect class="gap" x="{left:.1f}" y="{low:.1f}" width="{width - 1:.1f}" '
                f'height="{high - low:.1f}">{said}</title></rect>'
            )
            strip.append(
                f'<rect x="{left:.1f}" y="{base - tall:.1f}" width="{width - 1:.1f}" height="{max(tall, 0.7):.1f}">'
                f"{said}</title></rect>"
            )
    diagonal = f'<line class="reference" x1="{x.begin}" x2="{x.end}" y1="{y.begin}" y2="{y.end}"/>'
    words = (
        f'<text class="tick" x="{LEFT - 7}" y="{base - STRIP / 2 + 14:.0f}" text-anchor="end">count</text>'
        f'<line class="axis" x1="{LEFT}" x2="{SIDE - RIGHT}" y1="{base}" y2="{base}"/>'
    )
    content = _axes(x, y, "probability of the guess", percent) + "".join(bars) + diagonal
    content += f'<g class="strip">{"".join(strip)}</g>{words}'
    title = f"Sure and right, expected calibration error {percent(calibration.error)}"
    return _panel("Sure, and right", "share right", title, content, base + 4)


def scatter(
    truth: Float[np.ndarray, "R"], guess: Float[np.ndarray, "R"], names: Sequence[str], title: str = "Truth and guess"
) -> str:
    """A point an item, evenly spread where there are many; the diagonal is where they would lie."""
    kept = np.unique(np.linspace(0, len(truth) - 1, min(len(truth), MOST_POINTS)).astype(int))
    low, high = float(min(truth.min(), guess.min())), float(max(truth.max(), guess.max()))
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    marks = ticks(low, high)
    x = Scale(float(marks[0]), float(marks[-1]), LEFT, SIDE - RIGHT, marks)
    y = Scale(float(marks[0]), float(marks[-1]), SIDE - BOTTOM, TOP, marks)
    points = "".join(
        f'<circle cx="{x.at(float(truth[item])):.1f}" cy="{y.at(float(guess[item])):.1f}" r="3"><title>'
        f"{html.escape(names[item][:120])}: {number(float(truth[item]))}, guessed {number(float(guess[item]))}"
        "</title></circle>"
        for item in kept
    )
    diagonal = f'<line class="reference" x1="{x.begin}" x2="{x.end}" y1="{y.begin}" y2="{y.end}"/>'
    content = _axes(x, y, "truth", number) + f'<g class="series-0 points">{points}</g>' + diagonal
    return _panel(title, "guess", f"{title}: {len(kept):,} points", content, SIDE)


def _unit_scales() -> tuple[Scale, Scale]:
    marks = ticks(0.0, 1.0)
    return Scale(0.0, 1.0, LEFT, SIDE - RIGHT, marks), Scale(0.0, 1.0, SIDE - BOTTOM, TOP, marks)


def _axes(x: Scale, y: Scale, name: str, show) -> str:
    parts = []
    for value in y.marks:
        at, label = y.at(float(value)), html.escape(show(float(value)).replace(".0%", "%"))
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{SIDE - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    base = SIDE - BOTTOM
    for value in x.marks:
        at, label = x.at(float(value)), html.escape(show(float(value)).replace(".0%", "%"))
        anchor = "end" if at > SIDE - RIGHT - 20 else "middle"
        parts.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{base}" y2="{base + 4}"/>')
        parts.append(f'<text class="tick" x="{at:.1f}" y="{base + 17}" text-anchor="{anchor}">{label}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{SIDE - RIGHT}" y1="{base}" y2="{base}"/>')
    middle = (LEFT + SIDE - RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle:.0f}" y="{base + 35}" text-anchor="middle">{html.escape(name)}</text>')
    return "".join(parts)


def _panel(title: str, unit: str, summary: str, content: str, height: int) -> str:
    return (
        f'<figure class="panel"><figcaption><h3>{html.escape(title)} <span>{html.escape(unit)}</span></h3></figcaption>'
        f'<svg viewBox="0 0 {SIDE} {height}" role="img" aria-label="{html.escape(summary)}">{content}</svg></figure>'
    )
