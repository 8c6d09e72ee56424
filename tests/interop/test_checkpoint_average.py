"""Tests of --average: a workdir's moving average, or the mean of its last checkpoints."""

import numpy as np
import pytest
from random_checkpoints import assert_same_tensors, odd_config, random_checkpoint

from bert_jax.commands import export as commands_export
from bert_jax.config import TrainConfig
from bert_jax.errors import UserError
from bert_jax.interop import export, huggingface_export
from bert_jax.interop import open_checkpoint as checkpoint_average
from bert_jax.interop.initial import open_initial
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model.heads.config import Heads
from bert_jax.model.layers import unflatten
from bert_jax.train import checkpoint
from bert_jax.train.workdir import CHECKPOINTS

FACTORS = {0: 1.0, 5: 4.0, 9: 16.0}  # powers of two are exact; step 0 is what bert_jax_export.write leaves


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("vocabulary"), odd_config(), Heads(mlm=True))


def scaled(loaded, factor):
    return {path: np.float32(factor) * value for path, value in loaded.params.items()}


@pytest.fixture(scope="module")
def workdir(loaded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    export.write(loaded, folder)
    (folder / "result.json").write_text('{"eval_loss": 1.5}')
    with checkpoint.Checkpoints(folder / CHECKPOINTS, keep=0) as checkpoints:
        for step, factor in FACTORS.items():
            average = unflatten(scaled(loaded, -factor)) if step == 9 else None
            checkpoints.save(step, unflatten(scaled(loaded, factor)), None, {}, average)
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
def test_an_average_is_over_the_newest_steps_up_to_the_selected_one(loaded, workdir, named, average, factor):
    opened = open_checkpoint(workdir / named, average)
    assert_same_tensors(opened.params, scaled(loaded, factor))
    assert bool(opened.metrics) == (not average)  # result.json reports the parameters themselves


@pytest.mark.parametrize(
    "named, average, message",
    [
        ("", "last:4", r"3 checkpoints up to step 9.*checkpoint\.keep=4"),
        ("checkpoints/5", "last:3", "2 checkpoints up to step 5"),
        ("checkpoints/5", "ema", "no moving average"),
        ("", "last:0", "last:K"),
        ("", "mean", "ema, or last:K"),
    ],
)
def test_an_unavailable_average_is_refused(workdir, named, average, message):
    with pytest.raises(UserError, match=message):
        open_checkpoint(workdir / named, average)


def test_an_average_is_exported_and_named_in_the_model_card(loaded, workdir, tmp_path):
    commands_export.main(["--checkpoint", str(workdir), "--output", str(tmp_path / "out"), "--average", "last:2"])
    assert_same_tensors(open_checkpoint(tmp_path / "out").params, scaled(loaded, 10))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "The weights are the mean of the last 2 checkpoints." in card and "eval_loss" not in card
    with pytest.raises(UserError, match="a single set of weights"):
        open_checkpoint(tmp_path / "out", "ema")


def test_an_average_without_init_from_is_refused():
    with pytest.raises(UserError, match="init_from is not set"):
        TrainConfig(init_average="ema")


def test_an_average_of_a_parameter_without_axes_is_an_array(tmp_path):
    with checkpoint.Checkpoints(tmp_path / CHECKPOINTS, keep=0) as checkpoints:
        for step, value in ((1, 2.0), (2, 4.0)):
            checkpoints.save(step, {"scale": np.asarray(value, np.float32)}, None, {})
    found = checkpoint_average.read_params(tmp_path, 2, "last:2")
    assert isinstance(found["scale"], np.ndarray) and found["scale"] == 3.0


@pytest.mark.parametrize(
    "named, average, message",
    [
        ("run", "last:4", r"^init_average is last:4, but .* has 3 checkpoints"),
        ("run", "mean", "^unknown init_average 'mean'; use ema, or last:K"),
        ("run/checkpoints/5", "ema", "no moving average .* Use no average, or last:K"),
        ("out", "ema", r"a single set of weights, not a workdir\. Omit init_average$"),
    ],
)
def test_the_start_of_a_run_names_its_own_key(loaded, workdir, tmp_path, named, average, message):
    huggingface_export.write(loaded, tmp_path / "out")
    start = (tmp_path if named == "out" else workdir.parent) / named
    with pytest.raises(UserError, match=message):
        open_initial(TrainConfig(init_from=str(start), init_average=average))
