"""The page of inspect_shards --html: self-contained, escaped, and consistent with the shards."""

import html.parser
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from bert_jax.command import UserError
from bert_jax.data.shards import open_dataset
from bert_jax.reporting import plot
from bert_jax.reporting.chart import Chart, Series, percent
from data_prep import inspect_shards
from data_prep.build_examples import build
from data_prep.build_options import BuildOptions

EVIL = "<script>alert(1)</script>"


class Page(html.parser.HTMLParser):
    """The tags of a page, what its links and sources name, and the words of its marks."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.named: list[str] = []
        self.marks: list[str] = []
        self._in_mark = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.named += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag == "mark":
            self.marks.append("")
        self._in_mark = tag == "mark" or (self._in_mark and tag == "small")

    def handle_endtag(self, tag: str) -> None:
        self._in_mark = self._in_mark and tag != "mark"

    def handle_data(self, data: str) -> None:
        if self._in_mark:
            self.marks[-1] += data


@pytest.fixture(scope="module")
def output(sample_text: Path, vocab_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Static masks of a text with markup in it."""
    folder = tmp_path_factory.mktemp("page")
    text = folder / "text.txt"
    text.write_text(sample_text.read_text(encoding="utf-8").replace(" the ", f" the {EVIL} "), encoding="utf-8")
    build(
        BuildOptions(
            str(text), vocab_dir, folder / "out", 64, masking="static", mask_unit="word", eval_fraction=0.25, workers=1
        )
    )
    return folder / "out"


def drawn(directory: Path, *flags: str) -> str:
    target = inspect_shards.parts_of(directory)[0].parent / "page.html"
    inspect_shards.main([str(directory), "--html", str(target), *flags])
    return target.read_text(encoding="utf-8")


def test_page_needs_no_other_file_and_is_escaped(output: Path) -> None:
    text = drawn(output)
    page = Page(text)
    assert page.named == [] and "http://" not in re.sub(r"http://www\.w3\.org/2000/svg", "", text)
    assert "@import" not in text and "url(" not in text and "alert(1)" not in text.replace("alert ( 1 )", "")
    assert page.tags.count("svg") == 4


def test_page_lists_what_was_checked(output: Path) -> None:
    assert "Not checked" in drawn(output)
    assert "Every byte was checked" in drawn(output, "--verify")


def test_counts_are_those_of_the_manifest(output: Path) -> None:
    text = drawn(output)
    manifest = json.loads((output / "manifest.json").read_text())
    for part in ("train", "eval"):
        for name in ("rows", "documents", "used"):
            assert f">{manifest['parts'][part][name]:,}<" in text


def test_marks_of_the_rows_are_what_the_shards_predict(output: Path) -> None:
    """The marked text of the rows is the text of their labels."""
    text = drawn(output)
    numbers = [int(number.replace(",", "")) for number in re.findall(r"row ([0-9,]+) <span>", text)]
    dataset = open_dataset(output, "train")
    rows = dataset.gather(np.array(numbers))
    tokens = dataset.vocabulary().tokens
    shown = "".join(re.sub(r"\s", "", re.sub(" <small>.*?</small>", "", mark)) for mark in marked(text))
    hidden = "".join(
        token.removeprefix("##")
        for ids, count in zip(rows.masked_ids, rows.masked_counts, strict=True)
        for token in tokens(ids[:count])
    )
    assert len(numbers) == 6
    assert shown == hidden


def marked(text: str) -> list[str]:
    """The text of each mark, unescaped."""
    return [html.unescape(mark) for mark in re.findall(r"<mark[^>]*>(.*?)</mark>", text)]


def test_one_part_has_a_page_of_its_own(output: Path) -> None:
    assert "Rows for training" not in drawn(output / "eval") and "Rows for evaluation" in drawn(output / "eval")


def test_a_folder_without_a_manifest_gets_no_page(output: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no manifest"):
        inspect_shards.main([str(tmp_path), "--html", str(tmp_path / "page.html")])
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("inside", ["manifest.json", "train/page.html", "page.html", "", "link/page.html"])
def test_page_in_a_finished_output_is_refused(output: Path, tmp_path: Path, inside: str) -> None:
    """Also in the output of another job, and through a link."""
    (tmp_path / "link").symlink_to(output / "train")
    target = tmp_path / inside if inside.startswith("link") else output / inside
    before = sorted(output.rglob("*")), (output / "manifest.json").read_bytes()
    (tmp_path / "other").mkdir()
    for directory in (output, output / "eval", tmp_path / "other"):
        with pytest.raises(UserError, match=r"--html .* is inside of .*, which must not change"):
            inspect_shards.main([str(directory), "--html", str(target)])
    assert (sorted(output.rglob("*")), (output / "manifest.json").read_bytes()) == before


def test_a_page_replaces_only_another_page(output: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    inspect_shards.main([str(output / "eval"), "--html", str(target)])
    drawn_before = target.read_bytes()
    inspect_shards.main([str(output), "--html", str(target)])
    assert target.read_bytes() != drawn_before
    (tmp_path / "link").symlink_to(target)
    for name, content in {"corpus.txt": "text", "empty": "", "other.html": "<!DOCTYPE html>\n<p>mine</p>"}.items():
        (tmp_path / name).write_text(content)
    for name in ("corpus.txt", "empty", "other.html", "link"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(UserError, match=rf"--html .*{name} already exists and is not a page of inspect_shards"):
            inspect_shards.main([str(output), "--html", str(tmp_path / name)])
        assert (tmp_path / name).read_bytes() == before


def test_bars_are_at_the_positions_of_their_values() -> None:
    """Two histograms with bars of width 2: the bars of a bin do not overlap, and heights are proportional to values."""
    series = tuple(
        Series(name, np.array([1.0, 3.0, 5.0]), np.array(values))
        for name, values in {"train": [0.5, 0.25, 0.25], "eval": [1.0, 0.0, 0.0]}.items()
    )
    svg = plot.figure(Chart("Length", "", series, percent, axis="slots", bar_width=2))
    bars = [
        tuple(map(float, found))
        for found in re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"/>', svg)
    ]
    assert len(bars) == 4  # no bar is plotted for a count of 0
    heights = [height for _, _, _, height in bars]
    np.testing.assert_allclose(np.array(heights) / heights[0], [1, 0.5, 0.5, 2], atol=0.01)
    ordered = sorted(bars)
    assert all(left + width <= right + 0.2 for (left, _, width, _), (right, *_) in itertools.pairwise(ordered))
    assert "most: train 50.0% at 1–2 slots" in svg
