"""The z-loss, compared with scipy's logarithm of a sum, and where it applies."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_checkpoints import odd_config
from scipy.special import logsumexp
from tiny_batches import lay, random_sequence

from bert_jax.config import ModelConfig, PretrainConfig
from bert_jax.data.example import Batch
from bert_jax.errors import UserError
from bert_jax.model import bert
from bert_jax.model.outputs import masked_logits, vocabulary_logits
from bert_jax.model.runtime import Runtime
from bert_jax.train.objectives import Objective, means, pretraining_objective
from bert_jax.train.objectives.language_modeling import unmasked
from bert_jax.train.objectives.phased import MaskedTokenBatch, NextTokenBatch

WORDS, WEIGHT = 40, 0.125
MASKED = odd_config(vocab_size=WORDS, layers=1)
CAUSAL = dataclasses.replace(MASKED, causal=True)


def packed_batch() -> Batch:
    rows = [[random_sequence(length, WORDS, length) for length in lengths] for lengths in ((9, 13), (17,))]
    return jax.tree.map(jnp.asarray, lay(rows, 24, 5))


def random_params(config: ModelConfig, objective: Objective) -> dict:
    draw = np.random.default_rng(1)
    abstract = bert.abstract_params(config, objective.heads)
    return jax.tree.map(lambda leaf: jnp.asarray(draw.normal(0, 0.3, leaf.shape), jnp.float32), abstract)


def measure(objective: Objective, config: ModelConfig, params: dict, batch: Batch, runtime: Runtime) -> dict:
    terms = objective.apply(objective.bind(config, params, runtime), batch, None)
    return means(terms, objective.counts(batch), objective.term_weights)


@pytest.mark.parametrize(
    ("term", "at_once"), [("lm", 16), *(pytest.param("mlm", number, marks=pytest.mark.slow) for number in (0, 16))]
)
def test_the_term_is_the_mean_squared_normalizer_of_the_predictions(term: str, at_once: int) -> None:
    config, batch = (CAUSAL if term == "lm" else MASKED), packed_batch()
    objective = pretraining_objective(PretrainConfig(z_loss=WEIGHT, next_sentence=False), config, [])
    params = random_params(config, objective)
    found = measure(objective, config, params, batch, Runtime(logits_at_once=at_once))

    model = objective.bind(config, params, Runtime())
    if term == "lm":
        hidden = model.encode(batch._replace(input_ids=unmasked(batch)), None).last
        logits = vocabulary_logits(model, hidden)[:, :-1]
        ids = np.asarray(batch.sequence_ids)
        predicted = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] > 0)
    else:
        logits = masked_logits(model, model.encode(batch, None).last, batch.masked_positions)
        predicted = np.asarray(batch.masked_weights) > 0
    normalizers = logsumexp(np.asarray(logits, np.float64)[..., :WORDS], axis=-1)
    np.testing.assert_allclose(found["z_loss"], (normalizers[predicted] ** 2).mean(), rtol=1e-5)
    np.testing.assert_allclose(found["loss"], found[f"{term}_loss"] + WEIGHT * found["z_loss"], rtol=1e-6)
    assert {"loss", "z_loss"} < set(objective.metric_names) <= set(found)


@pytest.mark.slow
def test_every_phase_has_the_term() -> None:
    config = PretrainConfig(objective="0:causal,3:mlm", z_loss=WEIGHT, next_sentence=False)
    objective, batch = pretraining_objective(config, MASKED, []), packed_batch()
    params = random_params(MASKED, objective)
    found = [
        measure(objective, MASKED, params, phase(*batch), Runtime()) for phase in (NextTokenBatch, MaskedTokenBatch)
    ]
    for each, term in zip(found, ("lm", "mlm"), strict=True):
        np.testing.assert_allclose(each["loss"], each[f"{term}_loss"] + WEIGHT * each["z_loss"], rtol=1e-6)


def test_without_a_weight_there_is_no_term() -> None:
    objective = pretraining_objective(PretrainConfig(next_sentence=False), MASKED, [])
    assert "z_loss" not in objective.metric_names and "z" not in objective.counts(packed_batch())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"z_loss": -1.0}, r"config\.z_loss is -1\.0; use a weight such as 1e-4"),
        ({"z_loss": float("nan")}, r"config\.z_loss is nan"),
        ({"z_loss": 1e-4, "objective": "diffusion"}, r"config\.z_loss is 0\.0001, but config\.objective is diffusion"),
        ({"z_loss": 1e-4, "objective": "replaced_tokens"}, "it is of mlm, causal"),
    ],
)
def test_other_weights_and_objectives_are_refused(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        pretraining_objective(PretrainConfig(**options), MASKED, [])
