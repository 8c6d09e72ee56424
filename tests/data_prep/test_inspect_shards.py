"""The command inspect-shards: what it prints, its errors, and its page."""

import html
import io
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from bert_jax.commands import inspect_shards
from bert_jax.data.shards import open_dataset
from bert_jax.errors import UserError
from data_prep import output_files
from data_prep.build import build
from data_prep.build_options import BuildOptions

ROOT = Path(__file__).parent.parent.parent
EVIL = "<script>alert(1)</script>"


class Page(HTMLParser):
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


@pytest.fixture
def damaged(output: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage or rename."""
    return Path(shutil.copytree(output, tmp_path / "out"))


def test_command_prints_statistics(shards_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect_shards.main([str(shards_dir)])
    told = capsys.readouterr().out
    manifest = json.loads((shards_dir / "manifest.json").read_text())
    assert f"{manifest['parts']['train']['rows']:,}" in told
    for field in (
        "nsp",
        "by word",
        "B is random",
        "positions filled",
        "Most frequent tokens",
        "documents used",
        "[UNK]",
    ):
        assert field in told


def test_brackets_in_names_are_shown_as_they_are(
    damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "[bold]a[/x]:cat:"
    Path(name).parent.mkdir()
    damaged.rename(name)
    inspect_shards.main([name, "--verify", "--html", f"{name}.html", "--show", "1"])
    told = "".join(capsys.readouterr().out.split())  # a long title of a table is wrapped
    assert told.count(name) == 3 and "[UNK]inthetext" in told and "{[MASK]:" in told and "[dim]" not in told


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_characters_that_the_terminal_lacks_are_escaped(
    damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """A euro sign in a name, and bars."""
    name = tmp_path / "a€"
    damaged.rename(name)
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))
    inspect_shards.main([str(name)])
    sys.stdout.flush()
    told = written.getvalue().decode(encoding)
    assert ("a€\n" if encoding == "utf-8" else "a\\u20ac\n") in told.replace(" ", "")
    assert ("#####" if encoding != "utf-8" else "\u2588" * 5) in told and "\\u2588" not in told


def test_command_shows_a_part_and_verifies(shards_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect_shards.main([str(shards_dir / "train"), "--show", "2", "--verify"])
    told, progress = capsys.readouterr()
    assert progress == "" and "match the manifest" in told and told.count("  A: ") == 2
    assert "0x0:0" in told


@pytest.mark.parametrize("show", [[], ["--show", "3"]])
def test_a_shard_that_is_not_an_arrow_file_is_named(damaged: Path, show: list[str]) -> None:
    path = damaged / "train" / "shard-00000.arrow"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(UserError, match=r"damaged shard .*shard-00000\.arrow"):
        inspect_shards.main([str(damaged), *show])


@pytest.mark.parametrize("flags", [[], ["--verify"], ["--show", "1"]])
def test_a_folder_without_a_manifest_is_refused_before_its_files_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    monkeypatch.setattr(output_files, "listed_files", lambda folder: pytest.fail(f"searched {folder}"))
    with pytest.raises(UserError, match=r"no manifest\.json"):
        inspect_shards.main([str(tmp_path), *flags])


def test_command_reports_damage_in_one_line_with_exit_code_2(damaged: Path) -> None:
    path = damaged / "tokenizer" / "special_tokens_map.json"
    path.write_bytes(path.read_bytes().replace(b"CLS", b"CLs", 1))
    command = [sys.executable, "-m", "bert_jax", "inspect-shards", str(damaged), "--verify"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith("error: damaged ") and ended.stderr.count("\n") == 1
    assert "special_tokens_map.json: its sha256" in ended.stderr


def drawn(directory: Path, *flags: str) -> str:
    target = inspect_shards.named_parts(directory)[0].parent / "page.html"
    inspect_shards.main([str(directory), "--html", str(target), *flags])
    return target.read_text(encoding="utf-8")


def test_page_needs_no_other_file_and_is_escaped(output: Path) -> None:
    text = drawn(output)
    page = Page(text)
    assert page.named == [] and "http://" not in re.sub(r"http://www\.w3\.org/2000/svg", "", text)
    assert "@import" not in text and "url(" not in text and "alert(1)" not in text.replace("alert ( 1 )", "")
    assert page.tags.count("svg") == 2


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
    text = drawn(output / "eval")
    assert ">eval<" in text and ">train<" not in text


@pytest.mark.parametrize("inside", ["manifest.json", "train/page.html", "page.html", "", "link/page.html"])
def test_page_in_a_finished_output_is_refused(output: Path, tmp_path: Path, inside: str) -> None:
    """Also in the output of another job, and through a link."""
    (tmp_path / "link").symlink_to(output / "train")
    target = tmp_path / inside if inside.startswith("link") else output / inside
    before = sorted(output.rglob("*")), (output / "manifest.json").read_bytes()
    (tmp_path / "other").mkdir()
    for directory in (output, output / "eval", tmp_path / "other"):
        with pytest.raises(UserError, match=r"--html .* is inside .*, which must not change"):
            inspect_shards.main([str(directory), "--html", str(target)])
    assert (sorted(output.rglob("*")), (output / "manifest.json").read_bytes()) == before
