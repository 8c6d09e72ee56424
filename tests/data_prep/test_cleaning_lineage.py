"""The counts of bert-jax clean reach the manifest of the shards, however these are built, and the inspection page."""

import hashlib
import json
from pathlib import Path

import pytest
from building import contents

from bert_jax.commands import clean as commands_clean
from bert_jax.commands import inspect_shards
from bert_jax.commands.clean import CleanOptions, clean
from bert_jax.data.manifest import read_manifest
from bert_jax.errors import UserError
from data_prep.build import build
from data_prep.build_options import BuildOptions
from data_prep.merge import merge
from data_prep.readers import corpus as readers


@pytest.fixture(scope="module")
def cleaned(sample_text, tmp_path_factory) -> Path:
    """Two outputs of bert-jax clean, of four files and of one."""
    folder = tmp_path_factory.mktemp("cleaned")
    documents = list(readers.documents(sample_text))
    (folder / "many.txt").write_text("\n\n".join([*documents, "Too short.", "Also short.", documents[0]]))
    (folder / "few.txt").write_text("\n\n".join([*(text[::-1] for text in documents[:4]), documents[0]]))
    size = sum(map(len, documents))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands_clean, "UNIT_MB", size / 4e6)
        clean(CleanOptions(folder / "many.txt", folder / "many", rules="gopher", duplicate_lines=True, workers=1))
    clean(CleanOptions(folder / "few.txt", folder / "few", workers=1))
    assert len(list((folder / "many").glob("part-*"))) > 2
    return folder


def stated(folder: Path) -> dict:
    """What the manifest should hold of a report, from the report."""
    content = (folder / "report.json").read_bytes()
    report = json.loads(content)
    counts = {name: report[name] for name in ("documents", "bytes", "dropped", "removed_lines", "refused")}
    return {"report": f"{folder}/report.json", "sha256": hashlib.sha256(content).hexdigest(), **counts}


def options(text: str, vocab: Path, output: Path, part: str = "") -> BuildOptions:
    return BuildOptions(text, vocab, output, 64, objective="single", part=part, workers=1)


def test_the_manifest_and_the_page_state_what_cleaning_dropped(cleaned, vocab_dir, tmp_path, capsys):
    manifest = build(options(f"{cleaned}/*/*.zst", vocab_dir, tmp_path / "out"))
    assert manifest["cleaning"] == [stated(cleaned / "few"), stated(cleaned / "many")]
    many = manifest["cleaning"][1]
    assert many["dropped"]["duplicate"] == 1 and many["dropped"]["gopher_length"] >= 2
    kept = sum(report["documents"]["kept"] for report in manifest["cleaning"])
    assert kept == manifest["counts"]["documents"]
    inspect_shards.main([str(tmp_path / "out"), "--verify", "--html", str(tmp_path / "page.html")])
    for told in (capsys.readouterr().out, (tmp_path / "page.html").read_text()):
        assert "dropped: gopher_length" in told and "By bert-jax clean, as in" in told
    damaged = json.loads((tmp_path / "out" / "manifest.json").read_text())
    damaged["cleaning"][0]["documents"] = {"read": 3}
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(damaged))
    with pytest.raises(UserError, match=r"cleaning\[0\]\.documents\.kept is missing"):
        read_manifest(tmp_path / "out")


def test_a_report_that_several_parts_have_is_merged_once(cleaned, vocab_dir, tmp_path):
    text = f"{cleaned}/many/*.zst"
    whole = build(options(text, vocab_dir, tmp_path / "whole", "all/2"))
    for number in range(2):
        assert build(options(text, vocab_dir, tmp_path / f"{number}", f"{number}/2"))["cleaning"] == whole["cleaning"]
    merged = merge([tmp_path / "1", tmp_path / "0"], tmp_path / "merged")
    assert merged["cleaning"] == whole["cleaning"] == [stated(cleaned / "many")]
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")
    build(options(f"{cleaned}/few/*.zst", vocab_dir, tmp_path / "more", "+2"))
    both = merge([tmp_path / "more", tmp_path / "whole"], tmp_path / "both")
    assert both["cleaning"] == [stated(cleaned / "many"), stated(cleaned / "few")]


@pytest.mark.parametrize("report", [None, "no JSON", "[]", '{"documents": {"read": 1}}'])
def test_text_without_a_report_of_cleaning_has_no_lineage(cleaned, vocab_dir, tmp_path, report):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "part-00000.jsonl.zst").write_bytes((cleaned / "few" / "part-00000.jsonl.zst").read_bytes())
    if report is not None:
        (tmp_path / "text" / "report.json").write_text(report)
    assert "cleaning" not in build(options(f"{tmp_path}/text/*.zst", vocab_dir, tmp_path / "out"))
    # A file that cleaning did not write is none of its text, though the report is next to it.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "report.json").write_bytes((cleaned / "few" / "report.json").read_bytes())
    (tmp_path / "other" / "notes.txt").write_text("One text. It is short.\n\nAnother one.")
    assert "cleaning" not in build(options(f"{tmp_path}/other/*.txt", vocab_dir, tmp_path / "notes"))
