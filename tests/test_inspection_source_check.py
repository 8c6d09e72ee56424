"""Each document of the text is counted in the manifest, as used or as skipped for a reason."""

import json
from pathlib import Path

import pytest

from bert_jax.command import UserError
from data_prep import inspect_shards
from data_prep.build_examples import build
from data_prep.build_options import BuildOptions
from data_prep.inspection.source_check import check_source, source_corpora
from data_prep.inspection.verification import verify


@pytest.fixture
def corpus(tmp_path: Path, sample_text: Path) -> Path:
    """Text with a duplicate, an empty record, a line that is not JSON, and a document without tokens."""
    documents = sample_text.read_text(encoding="utf-8").split("\n\n")
    records = [json.dumps({"text": text}) for text in [*documents, documents[0], " ", "\ufeff"]] + ["{not json"]
    path = tmp_path / "text" / "some.jsonl"
    path.parent.mkdir()
    path.write_text("\n".join(records) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def output(corpus: Path, vocab_dir: Path, tmp_path: Path) -> Path:
    build(
        BuildOptions(
            str(corpus), vocab_dir, tmp_path / "out", 64, eval_fraction=0.25, workers=1, dedup=True, on_error="skip"
        )
    )
    return tmp_path / "out"


def again(output: Path) -> int:
    manifest = verify(output).manifest
    return check_source(output, manifest, source_corpora(output, manifest), lambda: None)


def test_every_document_is_accounted_for(output: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = len(corpus.read_text(encoding="utf-8").splitlines())
    assert again(output) == records
    inspect_shards.main([str(output), "--verify", "--source"])
    told = capsys.readouterr().out
    assert f"{records} documents of the text are accounted for" in told
    for reason in ("duplicate", "empty_text", "not_json"):
        assert f"skipped: {reason}" in told


def test_changed_text_is_detected(output: Path, corpus: Path) -> None:
    whole = corpus.read_text(encoding="utf-8")
    corpus.write_text(whole + "x", encoding="utf-8")
    with pytest.raises(UserError, match=r"some\.jsonl has \d+ bytes, but had \d+ when"):
        again(output)
    corpus.write_text(
        whole.replace("{not json", '{"t": 10}'), encoding="utf-8"
    )  # as long, and refused for another reason
    with pytest.raises(UserError, match="skipped, but the text gives"):
        again(output)
    corpus.unlink()
    with pytest.raises(UserError, match="does not exist any more"):
        again(output)


def test_source_needs_verify(output: Path) -> None:
    with pytest.raises(UserError, match="give both"):
        inspect_shards.main([str(output), "--source"])
