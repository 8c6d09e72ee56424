"""Pages and their charts: nothing from data is markup, everything is inside the axes, and colors have contrast.

The contrasts are those of WCAG 2.1, light and dark: 4.5 for text, 3 for lines of charts. tests/tools/check_pages.py
checks whole pages in a browser; this needs none.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from report_pages import Page, make_workdir

from bert_jax.reporting import document, report, runs
from bert_jax.reporting import page as pages
from bert_jax.reporting.document import Document, Section, Settings, Tile
from bert_jax.reporting.pretraining import MaskedToken, masked_token_table

STYLE = (Path(__file__).parent.parent.parent / "bert_jax" / "reporting" / "page.css").read_text(encoding="utf-8")
LIGHT, DARK = (
    dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", colors))
    for colors in re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)[:2]
)
TEXT = [(front, ground) for front in ("ink", "soft", "faint", "warn") for ground in ("background", "card")]
TEXT += [("correct", "card"), ("correct", "correct-ground")]
LINES = [(f"color-{number}", ground) for number in range(8) for ground in ("background", "card")]
EVIL = "</script><script>alert(1)</script><b title='x\" onload=y'>&"


def test_nothing_from_data_becomes_markup(tmp_path: Path) -> None:
    task = {"name": EVIL, "labels": [EVIL]}
    metrics = {EVIL: {"mean": 0.5, "std": None, "values": [0.5]}}
    result = {"task": EVIL, "seeds": [0], "metrics": metrics, "counts": {EVIL: {EVIL: 1}}}
    workdir = make_workdir(tmp_path / "run", {EVIL: EVIL}, kind="finetuning", task=task, result=result)
    with (workdir / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 300, "time": 2000.0, f"{EVIL}_loss": 1.0, f"eval_{EVIL}": 0.5}) + "\n")
    page = Page(report.report(workdir).read_text(encoding="utf-8"))
    blocks = [masked_token_table([MaskedToken(EVIL, EVIL, EVIL, 0.1, ((EVIL, 0.9),))])]
    blocks.append(Settings({EVIL: {EVIL: EVIL}}))
    document = Document(EVIL, [Section(EVIL, blocks, EVIL)], [EVIL], EVIL, [Tile(EVIL, EVIL, EVIL)], EVIL, EVIL)
    parts = Page(pages.render(document))
    for found in (page, parts):
        assert not any("alert" in str(attributes) and "aria-label" not in attributes for _, attributes in found.tags)
        assert not any("onload" in attributes for _, attributes in found.tags)
    charts = sum(attributes.get("class") == "chart" for _, attributes in page.tags)
    assert page.count("script") == charts + 1  # the numbers of each chart, and the page's own
    assert parts.count("script") == 1 and parts.count("b") == 1  # the page's own script, and the b of the tile


def test_curves_keep_the_mean_and_the_last_step_when_thinned() -> None:
    values = np.random.default_rng(0).normal(size=100_000)
    lines = [{"step": step, "loss": float(value)} for step, value in enumerate(values, start=1)]
    (drawn,) = runs.charts(lines, {})
    (series,) = drawn.series
    assert len(series.steps) == runs.MOST_POINTS and series.steps[-1] == 100_000
    assert series.values.mean() == pytest.approx(values.mean(), abs=1e-3)
    assert series.trend is not None and series.trend.std() < series.values.std()


def test_curves_without_noise_are_not_smoothed() -> None:
    lines = [{"step": step, "learning_rate": step / 100, "loss": 1.0} for step in range(100)]
    assert runs.curve(lines, "learning_rate", "x").trend is None
    assert runs.curve(lines, "loss", "x").trend is not None


@pytest.mark.parametrize(("last", "below"), [(0.75, True), (0.65, False)])
def test_the_words_of_a_reference_are_on_the_side_without_the_curve(last: float, below: bool) -> None:
    steps = np.arange(10.0)
    level = document.Reference("one label", 0.7)
    line = document.Series("a", steps, np.full(10, last))
    other = document.Series("b", steps[:2], np.array([0.1, 0.9]))
    both = document.Chart("x", "", (line, other), document.percent, references=(level,))
    drawn = pages.figure(both)
    [at] = re.findall(r'<line class="reference" x1="\d+" x2="\d+" y1="([\d.]+)"', drawn)
    [words] = re.findall(r'<text class="reference" x="\d+" y="([\d.]+)"', drawn)
    assert (float(words) > float(at)) == below


def test_names_of_metrics_are_written_as_usual() -> None:
    assert runs.metric_title("macro_f1") == "Macro F1" and runs.metric_title("f1") == "F1"


def test_the_sum_of_the_terms_is_plotted_only_for_several_terms() -> None:
    one = [{"step": 1, "loss": 2.0, "mlm_loss": 2.0, "eval_loss": 2.5, "eval_mlm_loss": 2.5}]
    two = [one[0] | {"nsp_loss": 0.7}]
    titles = [[chart.title for chart in runs.charts(lines, {})] for lines in (one, two)]
    assert titles == [["Masked tokens: loss"], ["Masked tokens: loss", "Next sentence: loss", "Loss, all terms"]]


def test_missing_values_and_one_point_draw() -> None:
    lines = [{"step": 1, "loss": None}, {"step": 2, "loss": 3.0, "learning_rate": 0.0}]
    figures = [pages.figure(chart) for chart in runs.charts(lines, {})]
    assert len(figures) == 2
    assert all("nan" not in figure and "inf" not in figure.replace("info", "") for figure in figures)


@pytest.mark.parametrize("highest", [0.643, 0.684, 0.69, 0.71, 1.3, 7.0])
def test_everything_is_plotted_inside_the_axes(highest: float) -> None:
    lines = [{"step": step, "nsp_loss": 0.638 + (highest - 0.638) * step / 7} for step in range(1, 8)]
    (drawn,) = runs.charts(lines, {"nsp_loss": document.Reference("level", 0.66)})
    tags = Page(pages.figure(drawn)).tags
    heights = [float(attributes[name]) for _, attributes in tags for name in ("y1", "y2", "cy") if attributes.get(name)]
    assert len(heights) > 12
    assert min(heights) >= pages.TOP and sorted(set(heights))[-2] <= pages.BASE
    assert max(heights) == pages.BASE + 4  # tick marks


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (5.5, 8.2), (0.0, 3e-4), (-3.0, 17.0), (0.0, 1e6)])
def test_ticks_are_round_few_and_cover_the_range(low: float, high: float) -> None:
    marks = pages.ticks(low, high)
    assert marks[0] <= low + 1e-12 and marks[-1] >= high - 1e-12 * max(1, high)
    assert 3 <= len(marks) <= 9
    np.testing.assert_allclose(np.diff(marks), marks[1] - marks[0])


def test_formats_of_numbers() -> None:
    assert [document.number(value) for value in (0.0, 1234.0, 2_502_000.0, 0.0005, 2.5e-5, 5.6854)] == [
        *("0", "1,234", "2.502M", "0.0005", "2.5e-5", "5.685")
    ]
    assert [document.percent(value) for value in (0.153, 0.0707, 1.0, 0.0)] == ["15.3%", "7.07%", "100.0%", "0.0%"]


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
