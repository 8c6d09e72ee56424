"""Law 3: one gradient, however the batch is cut over microbatches and devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_steps import CONFIG, ROWS, assert_close, make_plan, random_batch

from bert_jax.config import MeshConfig, ModelConfig
from bert_jax.model import bert, layers
from bert_jax.model.outputs import masked_logits, next_sentence_logits, pool_vectors
from bert_jax.model.runtime import Runtime
from bert_jax.model.transformer import gather_positions
from bert_jax.planning import program as programs
from bert_jax.train import optim, sharding
from bert_jax.train import step as step_lib
from bert_jax.train.objectives import MaskedLMObjective

train_step = jax.jit(step_lib.train_step, static_argnums=0)


@pytest.fixture(scope="module")
def model(tiny_config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(tiny_config, dropout=0.0, attention_dropout=0.0)


@pytest.fixture(scope="module")
def params(model):
    return bert.init_params(model, MaskedLMObjective().heads, jax.random.key(1))


def step_once(plan, params, batch):
    state = step_lib.initial_state(plan, params)
    return train_step(plan, state, jax.tree.map(jnp.asarray, batch), jnp.float32(0.0), jax.random.key(0))


def test_microbatches_give_the_gradient_of_the_whole_batch(model, params):
    batch = jax.tree.map(jnp.asarray, random_batch(model.vocab_size))
    counts = MaskedLMObjective().counts(batch)
    key = jax.random.key(0)
    accumulate = jax.jit(step_lib.accumulate, static_argnums=0)
    whole, whole_terms = accumulate(make_plan(model), params, batch, counts, key)
    for parts in (2, 8):
        cut, terms = accumulate(make_plan(model, microbatches=parts), params, batch, counts, key)
        assert_close(cut, whole, 2e-7)
        jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, rtol=1e-6), terms, whole_terms)


def test_a_mesh_of_eight_gives_the_step_of_one(model, params):
    batch = random_batch(model.vocab_size)
    plan = make_plan(model)
    alone, alone_metrics = step_once(plan, params, batch)
    mesh = sharding.make_mesh(MeshConfig())
    assert mesh.size == 8
    with jax.set_mesh(mesh):
        spread = jax.device_put(params, sharding.shardings(mesh, params))
        together, metrics = step_once(plan, spread, sharding.place(batch, ROWS, mesh))
    np.testing.assert_allclose(metrics["loss"], alone_metrics["loss"], rtol=1e-6)
    # Adam divides by the gradient's size: where that is rounding noise only the sign survives, so the moments compare.
    assert_close(together.optimizer_state[1].mu, alone.optimizer_state[1].mu, 1e-7)


@pytest.mark.slow
def test_over_data_alone_the_gradients_of_microbatches_are_summed_once(tiny_config, params):
    """And dropout's masks are those of one device."""
    batch = random_batch(tiny_config.vocab_size)
    counts, key = MaskedLMObjective().counts(jax.tree.map(jnp.asarray, batch)), jax.random.key(0)
    plan = dataclasses.replace(
        make_plan(tiny_config, microbatches=2), runtime=Runtime(layer_loop="scan", placement=sharding.OnMesh())
    )
    accumulate = jax.jit(step_lib.accumulate, static_argnums=0)
    alone, alone_terms = accumulate(plan, params, batch, counts, key)
    mesh = sharding.make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
        spread = jax.device_put(params, sharding.shardings(mesh, params))
        arguments = (spread, sharding.place(batch, ROWS, mesh), counts, key)
        program = accumulate.lower(plan, *arguments).compile()
        together, terms = program(*arguments)
    np.testing.assert_allclose(terms["mlm"].loss, alone_terms["mlm"].loss, rtol=1e-6)
    assert_close(together, alone, 2e-7)
    runs = programs.parse(program.as_text()).runs()
    summed = sum(times * one.bytes for one, times in runs if one.opcode == "all-reduce")
    parameters = 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    assert parameters <= summed < 1.01 * parameters


def test_loss_is_the_sum_of_two_means_over_the_whole_batch(model, params):
    batch = random_batch(model.vocab_size)
    batch = jax.tree.map(jnp.asarray, batch)
    _, metrics = step_once(make_plan(model), params, batch)

    @jax.jit
    def log_probabilities(batch):
        bound = bert.bind(model, MaskedLMObjective().heads, params, Runtime())
        hidden = bound.encode(batch).last
        mlm = jax.nn.log_softmax(masked_logits(bound, hidden, batch.masked_positions))
        return mlm, jax.nn.log_softmax(
            next_sentence_logits(bound, pool_vectors(bound, gather_positions(hidden, batch.cls_positions)))
        )

    mlm, nsp = (np.asarray(part) for part in log_probabilities(batch))
    batch = jax.tree.map(np.asarray, batch)
    mlm_terms = [
        -mlm[row, slot, batch.masked_ids[row, slot]]
        for row, slot in zip(*np.nonzero(batch.masked_weights), strict=True)
    ]
    nsp_terms = [-nsp[row, 0, batch.next_sentence_label[row, 0]] for row in np.nonzero(batch.next_sentence_weight)[0]]
    np.testing.assert_allclose(metrics["mlm_loss"], np.mean(mlm_terms), rtol=1e-5)
    np.testing.assert_allclose(metrics["nsp_loss"], np.mean(nsp_terms), rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], np.mean(mlm_terms) + np.mean(nsp_terms), rtol=1e-5)
    assert metrics["tokens"] == (batch.sequence_ids > 0).sum()


def test_a_step_repeats_bit_for_bit_and_dropout_changes_with_the_step(tiny_config, params):
    batch = random_batch(tiny_config.vocab_size)
    plan = make_plan(tiny_config)
    first, metrics = step_once(plan, params, batch)
    again, _ = step_once(plan, params, batch)
    for path, leaf in layers.flatten(first.params).items():
        np.testing.assert_array_equal(leaf, layers.flatten(again.params)[path], err_msg=path)
    later = step_lib.initial_state(plan, params)._replace(step=jnp.int32(5))
    batch = jax.tree.map(jnp.asarray, batch)
    _, other = train_step(plan, later, batch, jnp.float32(0.0), jax.random.key(0))
    assert other["loss"] != metrics["loss"]


def test_the_padding_of_the_vocabulary_stays_zero(tiny_config, params):
    state, _ = step_once(make_plan(tiny_config), params, random_batch(tiny_config.vocab_size))
    table = state.params["embeddings"]["token"]["table"]
    assert table.shape[0] == 1024
    np.testing.assert_array_equal(table[tiny_config.vocab_size :], 0)
    np.testing.assert_array_equal(state.params["mlm_head"]["bias"][tiny_config.vocab_size :], 0)


def test_training_lowers_the_loss_of_a_batch(model, params):
    plan = make_plan(model)
    state, losses = step_lib.initial_state(plan, params), []
    batch = jax.tree.map(jnp.asarray, random_batch(model.vocab_size))
    for _ in range(20):
        state, metrics = train_step(plan, state, batch, jnp.float32(0.0), jax.random.key(0))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 1


@pytest.mark.slow
def test_a_step_that_is_not_finite_counts_and_changes_nothing_else(model, params):
    """NaN in one weight of one row: parameters, moments and average keep every bit, and the next step updates them."""
    config = dataclasses.replace(CONFIG, ema_decay=0.9)
    objective = MaskedLMObjective()
    plan = step_lib.Plan(model, Runtime(), objective, config, optim.build(config, params))
    step = jax.jit(functools.partial(step_lib.train_step, plan))
    batch = jax.tree.map(jnp.asarray, random_batch(model.vocab_size))
    spoilt = batch._replace(masked_weights=batch.masked_weights.at[0, 0].set(jnp.nan))
    key, fraction = jax.random.key(0), jnp.float32(0)
    first, metrics = step(step_lib.initial_state(plan, params), batch, fraction, key)
    assert metrics["finite"] and metrics["skipped"] == 0
    second, metrics = step(first, spoilt, fraction, key)
    assert not metrics["finite"] and metrics["skipped"] == second.skipped == 1 and second.step == 2
    jax.tree.map(np.testing.assert_array_equal, second._replace(step=first.step, skipped=first.skipped), first)
    third, metrics = step(second, batch, fraction, key)
    assert metrics["finite"] and third.skipped == 1 and third.step == 3
    assert not np.array_equal(
        third.params["embeddings"]["token"]["table"], second.params["embeddings"]["token"]["table"]
    )
