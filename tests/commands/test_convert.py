"""Tests that convert writes a checkpoint with the same tensors, or nothing."""

import pytest
from random_checkpoints import assert_same_tensors, odd_config, random_checkpoint

from bert_jax.commands import convert
from bert_jax.errors import UserError
from bert_jax.interop import export, huggingface, huggingface_export
from bert_jax.interop.open_checkpoint import open_checkpoint


@pytest.fixture
def folder(tmp_path):
    huggingface_export.write(random_checkpoint(tmp_path / "vocabulary", odd_config()), tmp_path / "hf")
    return tmp_path / "hf"


def test_the_output_opens_as_the_same_model(tmp_path, folder, capsys):
    convert.main(["--checkpoint", str(folder), "--output", str(tmp_path / "ours")])
    ours, theirs = open_checkpoint(tmp_path / "ours"), huggingface.read(folder)
    assert (ours.model, ours.heads, ours.task, ours.step) == (theirs.model, theirs.heads, theirs.task, 0)
    assert_same_tensors(ours.params, theirs.params)
    assert {path.name for path in (tmp_path / "ours").iterdir()} == {"config.json", "tokenizer", "checkpoints"}
    assert "3 layers x 20" in capsys.readouterr().out


def test_a_model_of_the_hub_is_converted_by_its_name(tmp_path, folder, monkeypatch):
    downloaded = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: downloaded.append(name) or str(folder))
    monkeypatch.setattr("bert_jax.interop.export.write", lambda loaded, _: None)  # as of a folder
    assert_same_tensors(export.convert("hf:org/tiny", tmp_path / "ours").params, huggingface.read(folder).params)
    assert downloaded == ["org/tiny"]


def test_an_existing_output_and_a_missing_input_write_nothing(tmp_path, folder):
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserError, match="taken exists"):
        convert.main(["--input", str(folder), "--output", str(tmp_path / "taken")])
    with pytest.raises(UserError, match=r"no config\.json in"):
        convert.main(["--input", str(tmp_path / "none"), "--output", str(tmp_path / "new")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "taken", "vocabulary"]
    with pytest.raises(UserError, match="--output"):
        convert.main(["--input", str(folder)])
