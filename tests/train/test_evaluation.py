"""The evaluator of the training loop: exact sums, and batches that are made while the devices compute."""

from types import MappingProxyType
from typing import NamedTuple
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from bert_jax.config import MeshConfig, ModelConfig, TrainConfig
from bert_jax.model.heads.config import Heads
from bert_jax.model.runtime import Runtime
from bert_jax.train import sharding
from bert_jax.train.checkpoint import Checkpoints
from bert_jax.train.evaluation import evaluate_batches, lower_is_better
from bert_jax.train.hooks import Evaluate
from bert_jax.train.objectives import Objective
from bert_jax.train.objectives.objective import Term
from bert_jax.train.run import Run
from bert_jax.train.step import Plan

CONFIG = ModelConfig(vocab_size=10, layers=1, width=8, heads=2, feed_forward=16, max_positions=16)


class Weighted(NamedTuple):
    values: np.ndarray
    weights: np.ndarray


class Mean(Objective):
    """The mean of the values of a batch, times a parameter."""

    heads = Heads()
    term_metrics = MappingProxyType({"mean": ()})

    def counts(self, batch):
        return {"mean": batch.weights.sum()}

    def apply(self, model, batch, dropout_key):
        return {"mean": Term(model["scale"] * (batch.values * batch.weights).sum(), {})}

    def bind(self, config, params, runtime):
        return params


PLAN, PARAMS = Plan(CONFIG, Runtime(), Mean()), {"scale": jnp.float32(3)}


def random_batches(count):
    rng = np.random.default_rng(1)
    return [Weighted(*rng.random((2, 8)).astype(np.float32)) for _ in range(count)]


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_metrics_are_those_of_all_rows_and_batches_are_made_while_the_last_one_is_computed(count, monkeypatch):
    events, jit, place, device_get = [], jax.jit, sharding.place, jax.device_get

    def noted(name, function):
        def call(*arguments):
            events.append(name)
            return function(*arguments)

        return call

    made = random_batches(count)

    def batches():
        for batch in made:
            events.append("make")
            yield batch

    monkeypatch.setattr(jax, "jit", lambda function, **options: noted("compute", jit(function, **options)))
    monkeypatch.setattr(jax, "device_get", noted("fetch", device_get))
    monkeypatch.setattr(sharding, "place", noted("place", place))
    mesh = sharding.make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
        metrics = evaluate_batches(PLAN, mesh, PARAMS, {"": batches()}, 8)
    first, middle, last = ["make", "place", "compute"], ["make", "place", "fetch", "compute"], ["fetch"]
    assert events == ([*first, *middle * (count - 1), *last] if count else [])
    if count:
        values, weights = (np.concatenate(fields).astype(np.float64) for fields in zip(*made, strict=True))
        assert (
            metrics["loss"] == metrics["mean_loss"] == pytest.approx(3 * (values @ weights) / weights.sum(), rel=1e-6)
        )
    else:
        assert metrics == {}


def test_each_source_has_metrics_of_its_own_and_all_rows_together_count_once():
    parts = {"wiki": random_batches(3), "books": random_batches(4)[3:], "none": []}
    mesh = sharding.make_mesh(MeshConfig())

    with jax.set_mesh(mesh):
        metrics = evaluate_batches(PLAN, mesh, PARAMS, parts, 8)
    rows = {name: parts[name] for name in ("wiki", "books")} | {"": [*parts["wiki"], *parts["books"]]}
    wanted = {}
    for name, part in rows.items():
        values, weights = (np.concatenate(fields).astype(np.float64) for fields in zip(*part, strict=True))
        mean = 3 * (values @ weights) / weights.sum()
        wanted |= {f"{name}/{metric}".removeprefix("/"): mean for metric in ("loss", "mean_loss")}
    assert metrics == pytest.approx(wanted, rel=1e-6)


def test_the_name_of_a_source_does_not_decide_whether_a_metric_falls():
    assert lower_is_better("wiki/mlm_loss") and lower_is_better("mlm_loss")
    assert not lower_is_better("glosses/mlm_accuracy") and not lower_is_better("mlm_accuracy")


def test_a_metric_that_is_not_finite_is_no_improvement_and_no_mistake_of_the_configuration(tmp_path, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as in a user's program; the recorder is a mock
    evaluators = [lambda plan, mesh, params, step: {"mean_loss": 1.0}]
    run = Mock(spec=Run, config=TrainConfig(), measured=("loss", "mean_loss"), early_stop=0, evaluators=evaluators)
    run.objective = Mean()
    with Checkpoints(tmp_path, keep=1, best="eval_loss") as checkpoints:
        recorder = Mock(run=run, opened=Mock(checkpoints=checkpoints))
        found = Evaluate(recorder, PLAN, sharding.make_mesh(MeshConfig())).measure(3, {}, None)
        assert found == {"mean_loss": 1.0} and not checkpoints.best.beaten_by(found)
