"""Every optimizer learns, and its step is equal with scanned and unrolled layers, on one device and on a mesh."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_steps import ROWS, random_batch

from bert_jax.config import AdamW, Lamb, MeshConfig, ModelConfig, Muon, OptimizerConfig, StableAdamW
from bert_jax.model import bert, layers
from bert_jax.model.runtime import Runtime
from bert_jax.train import optim, sharding
from bert_jax.train import step as step_lib
from bert_jax.train.objectives import MaskedLMObjective
from bert_jax.train.step import TrainState

OBJECTIVE = MaskedLMObjective()
OPTIMIZERS = {
    "adamw": AdamW(learning_rate=0.01, layer_decay=0.8),
    "lamb": Lamb(learning_rate=0.05),
    "muon": Muon(learning_rate=0.02),
    "stable_adamw": StableAdamW(learning_rate=0.01, clip_norm=0.0),
}


class Made(NamedTuple):
    model: ModelConfig
    params: dict
    alone: Callable  # parameters to gradients and the loss: unrolled, one device
    spread: Callable  # scanned, for a mesh


def make_plan(model: ModelConfig, config: OptimizerConfig, layer_loop: str) -> step_lib.Plan:
    abstract = bert.abstract_params(model, OBJECTIVE.heads)
    factors = optim.rate_factors(config, abstract)
    runtime = Runtime(layer_loop=layer_loop)
    return step_lib.Plan(model, runtime, OBJECTIVE, config, optim.build(config, abstract), factors=factors)


@pytest.fixture(scope="module")
def made(tiny_config):
    """One gradient program for each layer loop, shared by the optimizers."""
    model = dataclasses.replace(tiny_config, dropout=0.0, attention_dropout=0.0)

    def gradients(layer_loop):
        plan = make_plan(model, AdamW(), layer_loop)

        @jax.jit
        def run(params, batch):
            counts = OBJECTIVE.counts(batch)
            found, terms = step_lib.accumulate(plan, params, batch, counts, jax.random.key(0))
            return found, terms["mlm"].loss / counts["mlm"]

        return run

    params = bert.init_params(model, OBJECTIVE.heads, jax.random.key(1))
    return Made(model, params, gradients("unrolled"), gradients("scan"))


def descend(plan: step_lib.Plan) -> Callable[[TrainState, dict], TrainState]:
    rate = jnp.float32(plan.optimizer_config.learning_rate)
    return jax.jit(lambda state, gradients: step_lib.descend(plan, state, gradients, rate))


def assert_near(got: dict, wanted: dict, tolerance: float) -> None:
    wanted_flat = layers.flatten(wanted)
    for path, leaf in layers.flatten(got).items():
        np.testing.assert_allclose(leaf, wanted_flat[path], atol=tolerance, rtol=0, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_learns_and_its_step_is_equal_for_any_layer_loop_and_mesh(name, made):
    # A large epsilon makes Adam's step smooth; with a small one, gradients of rounding noise would count by their sign.
    config = dataclasses.replace(OPTIMIZERS[name], epsilon=1e-3, ema_decay=0.9)
    plan, batch = make_plan(made.model, config, "unrolled"), random_batch(made.model.vocab_size)
    step, state, losses = descend(plan), step_lib.initial_state(plan, made.params), []
    for number in range(25):
        gradients, loss = made.alone(state.params, batch)
        state = step(state, gradients)
        losses.append(float(loss))
        if number == 0:
            first = state
    assert losses[-1] < losses[0] - 1, losses
    assert made.alone(state.average, batch)[1] < losses[0] - 1  # the moving average has learned, too

    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        state = step_lib.initial_state(plan, made.params)
        state = jax.device_put(state, sharding.shardings(mesh, state))
        gradients, _ = made.spread(state.params, sharding.place(batch, ROWS, mesh))
        spread = step(state, gradients)
    cut = [leaf for leaf in jax.tree.leaves(spread.optimizer_state) if not leaf.sharding.is_fully_replicated]
    assert cut, "no moment is sharded"
    assert_near(spread.params, first.params, 2e-4 * config.learning_rate)
    assert_near(spread.average, first.average, 2e-4 * config.learning_rate)
