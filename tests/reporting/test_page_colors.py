"""The colors of report pages have the contrasts of WCAG 2.1, light and dark: 4.5 for text, 3 for lines of charts.

tests/tools/check_pages.py checks whole pages in a browser; this needs none.
"""

import re
from pathlib import Path

import pytest

STYLE = (Path(__file__).parent.parent.parent / "bert_jax" / "reporting" / "page.css").read_text(encoding="utf-8")
LIGHT, DARK = (
    dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", colors))
    for colors in re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)[:2]
)
TEXT = [(front, ground) for front in ("ink", "soft", "faint", "warn") for ground in ("background", "card")]
TEXT += [("correct", "card"), ("correct", "correct-ground")]
LINES = [(f"color-{number}", ground) for number in range(8) for ground in ("background", "card")]


def luminance(color: str) -> float:
    """WCAG 2.1, relative luminance."""
    channels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(first: str, second: str) -> float:
    darker, lighter = sorted([luminance(first), luminance(second)])
    return (lighter + 0.05) / (darker + 0.05)


def test_contrasts_are_those_of_the_standard():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


@pytest.mark.parametrize("colors", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_lines_stand_out_from_their_grounds(colors):
    assert set(colors) == set(LIGHT)
    for least, pairs in ((4.5, TEXT), (3.0, LINES)):
        for front, ground in pairs:
            assert contrast(colors[front], colors[ground]) >= least, f"{front} on {ground}"
