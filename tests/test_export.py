"""Tests that export writes the same tensors in another format, or nothing."""

import pytest
from random_checkpoints import assert_same_tensors, odd_config, random_checkpoint

from bert_jax import export
from bert_jax.command import UserError
from bert_jax.interop import bert_jax_export
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model.heads import Heads

TASK = {"name": "sst2", "kind": "classification", "labels": ["bad", "good"]}


@pytest.fixture
def workdir(tmp_path):
    heads = Heads(pooler=True, classes=2)
    training = {"optimizer": {"learning_rate": 3e-5}, "data": {"train": ""}, "steps": 0, "tokens": 5e8}
    loaded = random_checkpoint(tmp_path / "vocabulary", odd_config(), heads, task=TASK, training=training)
    bert_jax_export.write(loaded, tmp_path / "workdir")
    (tmp_path / "workdir" / "result.json").write_text('{"metrics": {"accuracy": {"mean": 0.8125, "values": [1]}}}')
    return tmp_path / "workdir"


@pytest.mark.parametrize("layout", ["hf", "orbax"])
def test_an_export_opens_as_the_same_model(tmp_path, workdir, layout):
    export.main(["--checkpoint", str(workdir), "--format", layout, "--output", str(tmp_path / "out")])
    before, after = open_checkpoint(workdir), open_checkpoint(tmp_path / "out")
    assert (after.model, after.heads) == (before.model, before.heads)
    assert_same_tensors(after.params, before.params)
    assert isinstance(after, LoadedModel) and after.task is not None and after.task["labels"] == TASK["labels"]
    assert after.vocabulary.content_hash == before.vocabulary.content_hash


def test_the_model_card_contains_what_is_known(tmp_path, workdir):
    export.export(workdir, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "`bad`, `good`" in card and "| metrics.accuracy.mean | 0.8125 |" in card
    assert "| optimizer.learning_rate | 3e-05 |" in card and "data.train" not in card
    assert "| tokens | 500000000.0 |" in card and "| steps |" not in card
    assert "text-classification" in card and 'BertForSequenceClassification.from_pretrained("PATH")' in card


def test_unknown_formats_existing_outputs_and_missing_checkpoints_write_nothing(tmp_path, workdir):
    before = sorted(path.name for path in tmp_path.iterdir())
    for arguments, message in (
        (["--format", "onnx"], "unknown --format onnx; choose from hf, orbax, stablehlo"),
        (["--output", str(workdir)], r"workdir exists\. Choose another"),
        (["--checkpoint", str(tmp_path / "none")], "no checkpoint at"),
    ):
        with pytest.raises(UserError, match=message):
            export.main(["--checkpoint", str(workdir), "--output", str(tmp_path / "out"), *arguments])
    assert sorted(path.name for path in tmp_path.iterdir()) == before
