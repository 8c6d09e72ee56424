"""Tests that export writes the same tensors in another format, or nothing."""

import dataclasses
import importlib.util

import numpy as np
import pytest
import safetensors
from exporting import assert_transformers_agrees, our_outputs
from random_checkpoints import assert_same_tensors, odd_config, random_checkpoint

from bert_jax.commands import export as commands_export
from bert_jax.errors import UserError
from bert_jax.interop import export
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model.heads.config import Heads
from bert_jax.storage.files import read_json
from bert_jax.tokenization.tokenizer import Tokenizer

TASK = {"name": "sst2", "kind": "classification", "labels": ["bad", "good"]}


@pytest.fixture
def workdir(tmp_path):
    heads = Heads(pooler=True, classes=2)
    training = {"optimizer": {"learning_rate": 3e-5}, "data": {"train": ""}, "steps": 0, "tokens": 5e8}
    loaded = random_checkpoint(tmp_path / "vocabulary", odd_config(), heads, task=TASK, training=training)
    export.write(loaded, tmp_path / "workdir")
    (tmp_path / "workdir" / "result.json").write_text('{"metrics": {"accuracy": {"mean": 0.8125, "values": [1]}}}')
    return tmp_path / "workdir"


@pytest.mark.parametrize("layout", ["hf", "orbax"])
def test_an_export_opens_as_the_same_model(tmp_path, workdir, layout):
    commands_export.main(["--checkpoint", str(workdir), "--format", layout, "--output", str(tmp_path / "out")])
    before, after = open_checkpoint(workdir), open_checkpoint(tmp_path / "out")
    assert (after.model, after.heads) == (before.model, before.heads)
    assert_same_tensors(after.params, before.params)
    assert isinstance(after, LoadedModel) and after.task is not None and after.task["labels"] == TASK["labels"]
    assert after.vocabulary.content_hash == before.vocabulary.content_hash


def test_the_model_card_contains_what_is_known(tmp_path, workdir):
    export.export(workdir, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "`bad`, `good`" in card and "| accuracy | 0.8125 |" in card
    assert "| optimizer.learning_rate | 3e-05 |" in card and "data.train" not in card
    assert "| tokens | 500000000.0 |" in card and "| steps |" not in card
    assert "text-classification" in card and 'BertForSequenceClassification.from_pretrained("PATH")' in card


@pytest.mark.parametrize("layout", ["hf", "sentence_transformers"])
def test_bfloat16_rounds_each_parameter_to_the_nearest_and_config_json_names_it(tmp_path, workdir, layout):
    out = tmp_path / "out"
    commands_export.main(
        ["--checkpoint", str(workdir), "--format", layout, "--dtype", "bfloat16", "--output", str(out)]
    )
    with safetensors.safe_open(out / "model.safetensors", "numpy") as file:
        assert {file.get_slice(name).get_dtype() for name in list(file.keys())} == {"BF16"}
    assert read_json(out / "config.json")["dtype"] == "bfloat16"
    before, after = open_checkpoint(workdir), open_checkpoint(out)
    for path, value in after.params.items():
        # Half of the last of 8 significant bits.
        assert (np.abs(value - before.params[path]) <= 2.0**-8 * np.abs(before.params[path])).all(), path
    assert any((value != before.params[path]).any() for path, value in after.params.items())


@pytest.mark.slow
def test_transformers_opens_bfloat16_exports_and_gives_the_same_outputs(tmp_path, workdir, peer_python):
    out = tmp_path / "out"
    export.export(workdir, out, dtype="bfloat16")
    loaded = open_checkpoint(out)
    loaded = dataclasses.replace(loaded, vocabulary=Tokenizer(loaded.vocabulary.spec))
    assert_transformers_agrees(peer_python, [(out, loaded)], tolerance=1e-5)
    wide, narrow = (our_outputs(open_checkpoint(path))["class_logits"] for path in (workdir, out))
    assert 1e-5 < np.abs(narrow - wide).max() < 0.02 * np.abs(wide).max()


def test_a_file_of_half_precision_can_be_exported_in_float32(tmp_path, workdir):
    export.export(workdir, tmp_path / "narrow", dtype="bfloat16")
    export.export(tmp_path / "narrow", tmp_path / "same")
    export.export(tmp_path / "narrow", tmp_path / "wide", dtype="float32")
    narrow, same, wide = (open_checkpoint(tmp_path / name) for name in ("narrow", "same", "wide"))
    assert (narrow.dtype, same.dtype, wide.dtype) == ("bfloat16", "bfloat16", "float32")
    assert_same_tensors(wide.params, narrow.params)


def test_onnx_without_its_packages_names_the_extra(tmp_path, workdir, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jax2onnx" else find_spec(name))
    with pytest.raises(UserError, match=r"packages that are not installed \(jax2onnx.*pip install .*\[onnx\]'"):
        commands_export.main(["--checkpoint", str(workdir), "--format", "onnx", "--output", str(tmp_path / "out")])


def test_unknown_formats_existing_outputs_and_missing_checkpoints_write_nothing(tmp_path, workdir):
    before = sorted(path.name for path in tmp_path.iterdir())
    for arguments, message in (
        (["--format", "tflite"], "unknown --format tflite; choose from hf, orbax, stablehlo, onnx"),
        (
            ["--format", "orbax", "--dtype", "bfloat16"],
            "--dtype is bfloat16, which --format orbax does not write; it has",
        ),
        (["--dtype", "float8"], "--dtype is float8, which --format hf does not write; choose from float32, bfloat16"),
        (["--output", str(workdir)], r"workdir exists\. Choose another"),
        (["--checkpoint", str(tmp_path / "none")], "no checkpoint at"),
    ):
        with pytest.raises(UserError, match=message):
            commands_export.main(["--checkpoint", str(workdir), "--output", str(tmp_path / "out"), *arguments])
    assert sorted(path.name for path in tmp_path.iterdir()) == before
