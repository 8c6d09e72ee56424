"""Any kind of CHECKPOINT opens as the same thing, and a run starts from it only where it fits."""

import dataclasses
import json

import numpy as np
import pytest
from random_checkpoints import PRETRAINING, assert_same_tensors, odd_config, random_checkpoint

from bert_jax.command import UserError
from bert_jax.config import MODEL_CHOICES
from bert_jax.interop import huggingface, source
from bert_jax.model import paths
from bert_jax.model.bert import abstract_params
from bert_jax.model.heads import Heads
from bert_jax.train.workdir import read_config, write_config, write_params


@pytest.fixture
def loaded(tmp_path):
    return random_checkpoint(tmp_path / "vocabulary", odd_config())


def test_every_kind_of_checkpoint_opens_as_the_same_model(tmp_path, loaded):
    source.write_workdir(loaded, tmp_path / "workdir")
    write_params(tmp_path / "workdir", 7, {path: value + 1 for path, value in loaded.params.items()})
    (tmp_path / "workdir" / "result.json").write_text(json.dumps({"step": 7, "eval_loss": 1.25}))
    huggingface.write(loaded, tmp_path / "exported")
    for path in (tmp_path / "workdir" / "checkpoints" / "0", tmp_path / "exported"):
        opened = source.open_checkpoint(path)
        assert (opened.model, opened.heads, opened.step) == (loaded.model, PRETRAINING, 0)
        assert_same_tensors(opened.params, loaded.params)
        assert opened.tokenizer.content_hash == loaded.tokenizer.content_hash
    newest = source.open_checkpoint(tmp_path / "workdir")
    assert newest.step == 7 and newest.metrics["eval_loss"] == 1.25
    np.testing.assert_array_equal(newest.params["pooler/dense/bias"], loaded.params["pooler/dense/bias"] + 1)


def test_what_is_no_checkpoint_is_said(tmp_path, loaded):
    source.write_workdir(loaded, tmp_path / "workdir")
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "half.incomplete").mkdir()
    for path, message in (
        (tmp_path / "none", "no checkpoint at"),
        (tmp_path / "file", "is a file; a checkpoint is a folder"),
        (tmp_path / "empty", r"no config\.json"),
        (tmp_path / "half.incomplete", "half-written"),
        (tmp_path / "workdir" / "checkpoints" / "5", "no checkpoint at"),
    ):
        with pytest.raises(UserError, match=message):
            source.open_checkpoint(path)


def test_a_config_that_is_not_of_the_weights_names_the_parameter(tmp_path, loaded):
    source.write_workdir(loaded, tmp_path / "workdir")
    config = read_config(tmp_path / "workdir")
    for model, heads, message in (
        (odd_config(feed_forward=32), PRETRAINING, "parameter encoder/layers/feed_forward/input/bias"),
        (
            odd_config(),
            Heads(mlm=True, next_sentence=True, pooler=True, tags=3),
            "parameter tagger/dense/bias is missing",
        ),
        (odd_config(), Heads(mlm=True), "parameter next_sentence_head/dense/bias .* wants none"),
    ):
        write_config(tmp_path / "workdir", dataclasses.replace(config, model=model, heads=heads))
        with pytest.raises(UserError, match=message):
            source.open_checkpoint(tmp_path / "workdir")


def test_a_new_head_is_drawn_afresh_and_said(loaded, capsys):
    heads = Heads(pooler=True, classes=3)
    initial = source.initial_params(loaded, loaded.model, heads, loaded.tokenizer)
    assert set(initial.fresh) == {"classifier/dense/kernel", "classifier/dense/bias"}
    assert set(initial.params) | set(initial.fresh) == set(paths.flatten(abstract_params(loaded.model, heads)))
    assert initial.params["pooler/dense/kernel"] is loaded.params["pooler/dense/kernel"]
    assert "drawn afresh: classifier/dense/bias, classifier/dense/kernel" in capsys.readouterr().err
    same = source.initial_params(loaded, loaded.model, PRETRAINING, loaded.tokenizer)
    assert not same.fresh and set(same.params) == set(loaded.params)
    assert not capsys.readouterr().err


def test_a_head_for_another_number_of_classes_is_drawn_afresh(tmp_path):
    loaded = random_checkpoint(tmp_path, odd_config(), Heads(pooler=True, classes=2))
    kept = source.initial_params(loaded, loaded.model, Heads(pooler=True, classes=2), loaded.tokenizer)
    other = source.initial_params(loaded, loaded.model, Heads(pooler=True, classes=5), loaded.tokenizer)
    assert not kept.fresh and set(other.fresh) == {"classifier/dense/kernel", "classifier/dense/bias"}


def test_a_head_for_other_labels_is_drawn_afresh_though_it_has_as_many(tmp_path, capsys):
    loaded = random_checkpoint(tmp_path, odd_config(), Heads(pooler=True, classes=2))
    task = {"name": "sst2", "kind": "classification", "labels": ["0", "1"]}
    loaded = dataclasses.replace(loaded, task=task)
    heads = Heads(pooler=True, classes=2)
    same = source.initial_params(loaded, loaded.model, heads, loaded.tokenizer, task | {"labels": ("0", "1")})
    assert not same.fresh
    for change in ({"labels": ("1", "0")}, {"labels": ("no", "yes")}, {"kind": "choice"}):
        other = source.initial_params(loaded, loaded.model, heads, loaded.tokenizer, task | change)
        assert set(other.fresh) == {"classifier/dense/kernel", "classifier/dense/bias"}
        assert "for its own task (sst2: 0, 1), so drawn afresh: classifier" in capsys.readouterr().err


@pytest.mark.parametrize("field", source.ARCHITECTURE_FIELDS)
def test_another_architecture_names_the_field(loaded, field):
    now = getattr(loaded.model, field)
    known = MODEL_CHOICES.get(field, ())
    odd = {"width": 24, "heads": 5, "layer_norm_epsilon": 1e-5}
    others = [value for value in known if value != now]
    change = others[0] if others else odd.get(field, not now if isinstance(now, bool) else now + 1)
    wanted = dataclasses.replace(loaded.model, **{field: change})
    with pytest.raises(UserError, match=f"another architecture: {field} is .*, the configuration wants"):
        source.initial_params(loaded, wanted, PRETRAINING, loaded.tokenizer)


def test_a_classifier_after_modernbert_goes_on_from_what_stood_before_its_vocabulary(tmp_path):
    loaded = random_checkpoint(tmp_path, odd_config(), Heads(mlm=True))
    modern = dataclasses.replace(loaded.model, pooler="transform")
    loaded = dataclasses.replace(loaded, model=modern)
    initial = source.initial_params(loaded, modern, Heads(pooler=True, classes=2), loaded.tokenizer)
    assert set(initial.fresh) == {"classifier/dense/kernel", "classifier/dense/bias"}
    for ours, theirs in (("dense/kernel", "transform/kernel"), ("norm/scale", "norm/scale")):
        assert initial.params[f"pooler/{ours}"] is loaded.params[f"mlm_head/{theirs}"]


def test_dropout_is_no_part_of_the_architecture(loaded):
    wanted = dataclasses.replace(loaded.model, dropout=0.0, attention_dropout=0.0)
    assert not source.initial_params(loaded, wanted, PRETRAINING, loaded.tokenizer).fresh


def test_another_tokenizer_is_refused(tmp_path, loaded):
    folder = tmp_path / "other"
    other = random_checkpoint(folder, odd_config()).tokenizer
    assert other.content_hash == loaded.tokenizer.content_hash
    (folder / "vocab.txt").write_text((folder / "vocab.txt").read_text().replace("river", "brook"))
    from bert_jax import tokenizer

    with pytest.raises(UserError, match=r"another tokenizer .* --tokenizer="):
        source.initial_params(loaded, loaded.model, PRETRAINING, tokenizer.load(folder, lowercase=True))
