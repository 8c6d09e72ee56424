"""The values of a chart, and how numbers are written next to it. plot.py and terminal.py render them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from bert_jax.array_types import Float, Int64

Format = Callable[[float], str]

_PAGE_BINS = 32


@dataclass(frozen=True)
class Series:
    """One curve: `values` at `steps`; `trend` is its running mean where it is noisy.

    colour   one of page.css, for a curve that has the same one in several charts; None: by its place in this chart
    """

    name: str
    steps: Float[np.ndarray, "n"]
    values: Float[np.ndarray, "n"]
    trend: Float[np.ndarray, "n"] | None = None
    colour: int | None = None


@dataclass(frozen=True)
class Reference:
    """A level to compare with, such as the accuracy of always predicting the most frequent token."""

    name: str
    value: float


@dataclass(frozen=True)
class Chart:
    """Curves over `axis`, or, with a `bar_width`, histograms: each value is that of [step, step + bar_width)."""

    title: str
    unit: str
    series: tuple[Series, ...]
    show: Format  # formats a value for ticks and read-outs
    from_zero: bool = True
    references: tuple[Reference, ...] = ()
    axis: str = "step"
    bar_width: int = 0

    def place(self, step: float) -> str:
        """Returns a place on the axis in words: step 1,200; 113-128 tokens."""
        if not self.bar_width:
            return f"{self.axis} {step:,.0f}"
        last = step + self.bar_width - 1
        if last == step:
            return f"{step:,.0f} {self.axis.removesuffix('s') if step == 1 else self.axis}"
        return f"{step:,.0f}–{last:,.0f} {self.axis}"


@dataclass(frozen=True)
class Histogram:
    """Counts of whole numbers: `counts[name][k]` is how often the value k occurs in the series `name`."""

    title: str
    unit: str  # of what the shares are, e.g. "of sequences"
    axis: str
    counts: Mapping[str, Int64[np.ndarray, "n"]]

    @property
    def highest(self) -> int:
        """The highest value of any series; 0 if no value above 0 occurs."""
        return max((int(np.flatnonzero(counts).max(initial=0)) for counts in self.counts.values()), default=0)

    def bins(self, most: int) -> dict[str, list[tuple[int, int, int]]]:
        """Returns at most `most` bins (first, last, count) of equal width over 1..highest.

        All series have the same bins.
        """
        return {name: bin_counts(counts[: self.highest + 1], most) for name, counts in self.counts.items()}

    def chart(self) -> Chart:
        """Returns the histogram as shares of each series; series without a value above 0 are left out."""
        series = tuple(
            Series(
                name,
                np.array([first for first, _, _ in bins], np.float64),
                np.array([count for _, _, count in bins], np.float64) / self.counts[name][1:].sum(),
            )
            for name, bins in self.bins(_PAGE_BINS).items()
            if self.counts[name][1:].any()
        )
        width = max(1, -(-self.highest // _PAGE_BINS))
        return Chart(self.title, self.unit, series, percent, axis=self.axis, bar_width=width)


def bin_counts(counts: Int64[np.ndarray, "n"], most: int) -> list[tuple[int, int, int]]:
    """Returns the counts of the values 1..n-1 in at most `most` bins of equal width: (first, last, count).

    The value 0 is left out.
    """
    size = len(counts) - 1
    width = max(1, -(-size // most))
    return [
        (first, min(first + width - 1, size), int(counts[first : first + width].sum()))
        for first in range(1, size + 1, width)
    ]


def percent(value: int | float) -> str:
    """Writes 0.2561 as 25.6%, 0.0707 as 7.07%."""
    return f"{100 * value:.1f}%" if abs(value) >= 0.1 or value == 0 else f"{100 * value:.3g}%"


def number(value: int | float) -> str:
    """Writes four significant digits; millions and more as M and G, values below 0.0001 as a power of ten."""
    size = abs(value)
    if size >= 1e9:
        return f"{value / 1e9:.4g}G"
    if size >= 1e6:
        return f"{value / 1e6:.4g}M"
    if size >= 1e3:
        return f"{value:,.0f}"
    if 0 < size < 1e-4 * 0.999:
        digits, power = f"{value:.2e}".split("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{value:.4g}"
