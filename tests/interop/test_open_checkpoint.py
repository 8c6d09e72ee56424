"""Every kind of CHECKPOINT opens as the same model, averages are exact, and runs start only from fitting ones."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from etils import epath
from random_checkpoints import PRETRAINING, assert_same_tensors, odd_config, random_checkpoint

from bert_jax.commands import export as commands_export
from bert_jax.config import ModelConfig, TrainConfig
from bert_jax.config.model import LoraConfig
from bert_jax.errors import UserError
from bert_jax.interop import export, huggingface_export
from bert_jax.interop.family import ARCHITECTURE_FIELDS
from bert_jax.interop.initial import initial_params, open_initial
from bert_jax.interop.open_checkpoint import open_checkpoint, read_params
from bert_jax.lineage import LSTM, WITHOUT_ATTENTION
from bert_jax.model import layers
from bert_jax.model.bert import abstract_params
from bert_jax.model.heads.config import Heads, SpanHeads
from bert_jax.tokenization import tokenizer
from bert_jax.train.checkpoint import Checkpoints
from bert_jax.train.workdir import CHECKPOINTS, read_config, write_config, write_params


@pytest.fixture
def loaded(tmp_path):
    return random_checkpoint(tmp_path / "vocabulary", odd_config())


def test_every_kind_of_checkpoint_opens_as_the_same_model(tmp_path, loaded):
    export.write(loaded, tmp_path / "workdir")
    write_params(tmp_path / "workdir", 7, {path: value + 1 for path, value in loaded.params.items()})
    (tmp_path / "workdir" / "result.json").write_text(json.dumps({"step": 7, "eval_loss": 1.25}))
    huggingface_export.write(loaded, tmp_path / "exported")
    for path in (tmp_path / "workdir" / "checkpoints" / "0", tmp_path / "exported"):
        opened = open_checkpoint(path)
        assert (opened.model, opened.heads, opened.step) == (loaded.model, PRETRAINING, 0)
        assert_same_tensors(opened.params, loaded.params)
        assert opened.vocabulary.content_hash == loaded.vocabulary.content_hash
    newest = open_checkpoint(tmp_path / "workdir")
    assert newest.step == 7 and newest.metrics["eval_loss"] == 1.25
    np.testing.assert_array_equal(newest.params["pooler/dense/bias"], loaded.params["pooler/dense/bias"] + 1)


def test_a_workdir_opens_at_its_last_step_and_with_early_stop_at_its_best(tmp_path, loaded):
    """Both keep the best step, which checkpoint.best asks for; only a run with early_stop results in it."""
    workdir = tmp_path / "workdir"
    export.write(loaded, workdir)
    for step in (1, 2):
        write_params(workdir, step, {path: value + step for path, value in loaded.params.items()})
    with Checkpoints(workdir / "checkpoints", keep=0, best="eval_f1") as checkpoints:
        for step, value in ((1, 0.9), (2, 0.5)):
            checkpoints.measured(step, {"f1": value})
    for patience, step in ((0, 2), (3, 1)):
        training = {"early_stop": patience, "checkpoint": {"best": "eval_f1"}}
        write_config(workdir, dataclasses.replace(read_config(workdir), training=training))
        opened = open_checkpoint(workdir)
        assert opened.step == step
        bias = loaded.params["pooler/dense/bias"]
        np.testing.assert_array_equal(opened.params["pooler/dense/bias"], bias + step)


def test_adapters_stay_unmerged_in_a_store_as_on_disk(tmp_path, loaded, monkeypatch):
    lora = LoraConfig(rank=2)
    adapted = random_checkpoint(tmp_path / "vocabulary", dataclasses.replace(loaded.model, lora=lora))
    export.write(adapted, tmp_path / "workdir")
    monkeypatch.setattr("bert_jax.interop.open_checkpoint.location", epath.Path)  # of a store by its interface
    assert not isinstance(epath.Path(tmp_path), Path)
    for path in (tmp_path / "workdir", tmp_path / "workdir" / "checkpoints" / "0"):
        for merged in (True, False):
            opened = open_checkpoint(path, merged=merged)
            assert opened.model.lora == (None if merged else lora)
    assert_same_tensors(opened.params, adapted.params)


def test_paths_that_are_no_checkpoints_are_refused(tmp_path, loaded):
    export.write(loaded, tmp_path / "workdir")
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "half.incomplete").mkdir()
    for path, message in (
        (tmp_path / "none", "no checkpoint at"),
        (tmp_path / "file", "is a file; a checkpoint is a folder"),
        (tmp_path / "empty", r"no config\.json"),
        (tmp_path / "half.incomplete", "is incomplete"),
        (tmp_path / "workdir" / "checkpoints" / "5", "no checkpoint at"),
    ):
        with pytest.raises(UserError, match=message):
            open_checkpoint(path)


def test_a_config_that_does_not_match_the_weights_names_the_parameter(tmp_path, loaded):
    export.write(loaded, tmp_path / "workdir")
    config = read_config(tmp_path / "workdir")
    for model, heads, message in (
        (odd_config(feed_forward=32), PRETRAINING, "parameter encoder/layers/feed_forward/input/bias"),
        (
            odd_config(),
            Heads(mlm=True, next_sentence=True, pooler=True, tags=3),
            "parameter tagger/dense/bias is missing",
        ),
        (odd_config(), Heads(mlm=True), "parameter next_sentence_head/dense/bias .* expects none"),
    ):
        write_config(tmp_path / "workdir", dataclasses.replace(config, model=model, heads=heads))
        with pytest.raises(UserError, match=message):
            open_checkpoint(tmp_path / "workdir")


def missing(initial, model, heads):
    """The parameters that a run initializes itself."""
    return set(layers.flatten(abstract_params(model, heads))) - set(initial)


def test_a_new_head_is_initialized_and_reported(loaded, capsys):
    heads = Heads(pooler=True, classes=3)
    initial = initial_params(loaded, loaded.model, heads, loaded.vocabulary)
    assert missing(initial, loaded.model, heads) == {"classifier/dense/kernel", "classifier/dense/bias"}
    assert initial["pooler/dense/kernel"] is loaded.params["pooler/dense/kernel"]
    assert (
        "initialized randomly, since not in the checkpoint: classifier/dense/bias, classifier/dense/kernel"
        in capsys.readouterr().err
    )
    same = initial_params(loaded, loaded.model, PRETRAINING, loaded.vocabulary)
    assert set(same) == set(loaded.params) == set(layers.flatten(abstract_params(loaded.model, PRETRAINING)))
    assert not capsys.readouterr().err


def test_a_head_for_another_number_of_classes_is_initialized(tmp_path):
    loaded = random_checkpoint(tmp_path, odd_config(), Heads(pooler=True, classes=2))
    for classes, initialized in ((2, set()), (5, {"classifier/dense/kernel", "classifier/dense/bias"})):
        heads = Heads(pooler=True, classes=classes)
        initial = initial_params(loaded, loaded.model, heads, loaded.vocabulary)
        assert missing(initial, loaded.model, heads) == initialized


def test_a_head_for_other_labels_is_initialized_even_if_their_number_is_equal(tmp_path, capsys):
    loaded = random_checkpoint(tmp_path, odd_config(), Heads(pooler=True, classes=2))
    task = {"name": "sst2", "kind": "classification", "labels": ["0", "1"]}
    loaded = dataclasses.replace(loaded, task=task)
    heads = Heads(pooler=True, classes=2)
    same = initial_params(loaded, loaded.model, heads, loaded.vocabulary, task | {"labels": ("0", "1")})
    assert not missing(same, loaded.model, heads)
    for change in ({"labels": ("1", "0")}, {"labels": ("no", "yes")}, {"kind": "choice"}):
        other = initial_params(loaded, loaded.model, heads, loaded.vocabulary, task | change)
        assert missing(other, loaded.model, heads) == {"classifier/dense/kernel", "classifier/dense/bias"}
        assert "or specific to its task (sst2: 0, 1): classifier" in capsys.readouterr().err


def test_a_head_for_other_relations_between_the_same_spans_is_initialized(tmp_path, capsys):
    heads = Heads(spans=SpanHeads(length=2, classes=1, relations=2))
    task = {"name": "own", "kind": "span_pairs", "labels": ["PER"], "relation_labels": ["lives_in", "works_for"]}
    loaded = dataclasses.replace(random_checkpoint(tmp_path, odd_config(), heads), task=task)
    assert not missing(initial_params(loaded, loaded.model, heads, loaded.vocabulary, task), loaded.model, heads)
    other = task | {"relation_labels": ["likes", "owns"]}
    initialized = missing(initial_params(loaded, loaded.model, heads, loaded.vocabulary, other), loaded.model, heads)
    assert {path.split("/")[0] for path in initialized} == {"span_relations"}
    assert "specific to its task (own: lives_in, works_for)" in capsys.readouterr().err


@pytest.mark.parametrize("field", ARCHITECTURE_FIELDS)
def test_another_architecture_names_the_field(loaded, field):
    if field == "encoder":
        recurrent = dataclasses.replace(loaded.model, encoder=LSTM(), **WITHOUT_ATTENTION)
        loaded = dataclasses.replace(loaded, model=recurrent)
        truncated = dataclasses.replace(recurrent, encoder=LSTM(bptt=4))  # which has the same parameters
        initial_params(loaded, truncated, PRETRAINING, loaded.vocabulary)
    now = getattr(loaded.model, field)
    [known] = [item.metadata.get("choices", ()) for item in dataclasses.fields(ModelConfig) if item.name == field]
    odd = {"width": 24, "heads": 5, "layer_norm_epsilon": 1e-5, "encoder": LSTM(residual=True)}
    others = [value for value in known if value not in (now, "transformer")]
    change = others[0] if others else odd[field] if field in odd else not now if isinstance(now, bool) else now + 1
    wanted = dataclasses.replace(loaded.model, **{field: change})
    with pytest.raises(UserError, match=f"another architecture: {field} is .*, but the configuration has"):
        initial_params(loaded, wanted, PRETRAINING, loaded.vocabulary)


def test_a_modernbert_classifier_starts_from_the_layer_before_the_mlm_output(tmp_path):
    loaded = random_checkpoint(tmp_path, odd_config(), Heads(mlm=True))
    modern = dataclasses.replace(loaded.model, pooler="transform")
    loaded = dataclasses.replace(loaded, model=modern)
    heads = Heads(pooler=True, classes=2)
    initial = initial_params(loaded, modern, heads, loaded.vocabulary)
    assert missing(initial, modern, heads) == {"classifier/dense/kernel", "classifier/dense/bias"}
    for new, old in (("dense/kernel", "transform/kernel"), ("norm/scale", "norm/scale")):
        assert initial[f"pooler/{new}"] is loaded.params[f"mlm_head/{old}"]


def test_dropout_is_not_part_of_the_architecture(loaded):
    wanted = dataclasses.replace(loaded.model, dropout=0.0, attention_dropout=0.0)
    assert not missing(initial_params(loaded, wanted, PRETRAINING, loaded.vocabulary), wanted, PRETRAINING)


def test_another_tokenizer_is_refused(tmp_path, loaded):
    folder = tmp_path / "other"
    other = random_checkpoint(folder, odd_config()).vocabulary
    assert other.content_hash == loaded.vocabulary.content_hash
    (folder / "vocab.txt").write_text((folder / "vocab.txt").read_text().replace("river", "brook"))
    with pytest.raises(UserError, match=r"another tokenizer .* --tokenizer="):
        initial_params(loaded, loaded.model, PRETRAINING, tokenizer.load(folder, lowercase=True))


# Averages: a workdir's moving average, or the mean of its last checkpoints.

FACTORS = {0: 1.0, 5: 4.0, 9: 16.0}  # powers of two are exact; step 0 is what bert_jax_export.write leaves


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("vocabulary"), odd_config(), Heads(mlm=True))


def scaled(loaded, factor):
    return {path: np.float32(factor) * value for path, value in loaded.params.items()}


@pytest.fixture(scope="module")
def workdir(averaged, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    export.write(averaged, folder)
    (folder / "result.json").write_text('{"eval_loss": 1.5}')
    with Checkpoints(folder / CHECKPOINTS, keep=0) as checkpoints:
        for step, factor in FACTORS.items():
            average = layers.unflatten(scaled(averaged, -factor)) if step == 9 else None
            checkpoints.save(step, layers.unflatten(scaled(averaged, factor)), None, {}, average)
    return folder


@pytest.mark.parametrize(
    "named, average, factor",
    [
        ("", "", 16),
        ("", "ema", -16),
        ("", "last:1", 16),
        ("", "last:2", 10),
        ("", "last:3", 7),
        ("checkpoints/5", "last:2", 2.5),
    ],
)
def test_an_average_is_over_the_newest_steps_up_to_the_selected_one(averaged, workdir, named, average, factor):
    opened = open_checkpoint(workdir / named, average)
    assert_same_tensors(opened.params, scaled(averaged, factor))
    assert bool(opened.metrics) == (not average)  # result.json reports the parameters themselves


@pytest.mark.parametrize(
    "named, average, message",
    [
        ("run", "last:4", r"{key} is last:4, but .* has 3 checkpoints up to step 9.*checkpoint\.keep=4"),
        ("run/checkpoints/5", "last:3", "{key} is last:3, but .* has 2 checkpoints up to step 5"),
        ("run/checkpoints/5", "ema", "no moving average .* Use no average, or last:K"),
        ("run", "last:0", "^unknown {key} 'last:0'; use ema, or last:K"),
        ("run", "mean", "^unknown {key} 'mean'; use ema, or last:K"),
        ("out", "ema", r"a single set of weights, not a workdir\. Omit {key}$"),
    ],
)
def test_an_unavailable_average_is_refused_by_its_flag_or_key(averaged, workdir, tmp_path, named, average, message):
    huggingface_export.write(averaged, tmp_path / "out")
    path = (tmp_path if named == "out" else workdir.parent) / named
    with pytest.raises(UserError, match=message.format(key="--average")):
        open_checkpoint(path, average)
    with pytest.raises(UserError, match=message.format(key="init_average")):
        open_initial(TrainConfig(init_from=str(path), init_average=average))


def test_an_average_is_exported_and_named_in_the_model_card(averaged, workdir, tmp_path):
    commands_export.main(["--checkpoint", str(workdir), "--output", str(tmp_path / "out"), "--average", "last:2"])
    assert_same_tensors(open_checkpoint(tmp_path / "out").params, scaled(averaged, 10))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "The weights are the mean of the last 2 checkpoints." in card and "eval_loss" not in card


def test_an_average_without_init_from_is_refused():
    with pytest.raises(UserError, match="init_from is not set"):
        TrainConfig(init_average="ema")


def test_an_average_of_a_parameter_without_axes_is_an_array(tmp_path):
    with Checkpoints(tmp_path / CHECKPOINTS, keep=0) as checkpoints:
        for step, value in ((1, 2.0), (2, 4.0)):
            checkpoints.save(step, {"scale": np.asarray(value, np.float32)}, None, {})
    found = read_params(tmp_path, 2, "last:2")
    assert isinstance(found["scale"], np.ndarray) and found["scale"] == 3.0
