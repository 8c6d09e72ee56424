"""Compares pretraining loss terms with computations by hand, and packed rows with separate rows."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_checkpoints import odd_config, random_tree
from scipy.special import erf, log_softmax, logsumexp
from tiny_batches import lay, random_sequence

from bert_jax.config import (
    CausalLM,
    MaskedLM,
    ModelConfig,
    ObjectiveConfig,
    Phases,
    PretrainConfig,
    PretrainDataConfig,
    ReplacedTokens,
)
from bert_jax.data.example import Batch
from bert_jax.data.masking.selection import span_targets
from bert_jax.errors import UserError
from bert_jax.model import bert, layers
from bert_jax.model.bert import bind
from bert_jax.model.outputs import masked_logits, vocabulary_logits
from bert_jax.model.runtime import Runtime
from bert_jax.train.objectives import (
    CausalLMObjective,
    MaskedLMObjective,
    Objective,
    means,
    pretraining_objective,
    total_loss,
)
from bert_jax.train.objectives.language_modeling import unmasked
from bert_jax.train.objectives.pretraining import MaskedTokenBatch, NextTokenBatch, ShardTraits

ENCODER = ModelConfig(
    vocab_size=61,
    layers=1,
    width=12,
    heads=3,
    feed_forward=20,
    max_positions=64,
    dropout=0.0,
    attention_dropout=0.0,
)
SPANS = MaskedLMObjective(next_sentence=False, span_boundary=True)
CASES: dict[str, tuple[ModelConfig, Objective]] = {
    "span_boundary": (ENCODER, SPANS),
    "causal": (dataclasses.replace(ENCODER, causal=True), CausalLMObjective()),
    "causal_untied": (dataclasses.replace(ENCODER, causal=True, tied_output=False), CausalLMObjective()),
}
LENGTHS = (9, 6, 8, 28)


def batch(packed: bool) -> Batch:
    """Returns four sequences in two rows (packed) or in four; both have the same shapes and share one compiled program.

    The last sequence has a span longer than the span boundary head supports.
    """
    sequences = [random_sequence(length, 61, seed) for seed, length in enumerate(LENGTHS)]
    long = np.arange(3, 26)
    sequences[3] = sequences[3]._replace(masked=long, truth=np.random.default_rng(0).integers(0, 61, len(long)))
    rows = [sequences[:3], sequences[3:], [], []] if packed else [[sequence] for sequence in sequences]
    made = lay(rows, slots=31, predictions=24)
    targets = span_targets(
        made.masked_positions, (made.masked_weights > 0).sum(axis=1, dtype=np.int32), made.sequence_ids
    )
    by_sequence = {
        name: np.pad(getattr(made, name), ((0, 0), (0, 3 - made.cls_positions.shape[1])))
        for name in ("cls_positions", "next_sentence_label", "next_sentence_weight")
    }
    return jax.tree.map(jnp.asarray, made._replace(**targets._asdict(), **by_sequence))


@functools.cache
def params_of(case: str) -> dict:
    config, objective = CASES[case]
    return random_tree(bert.abstract_params(config, objective.heads))


@functools.cache
def program(case: str, runtime: Runtime = Runtime()) -> Callable:  # noqa: B008
    """Returns the jitted function for terms, counts, gradients and the hidden states of the objective's input."""
    config, objective = CASES[case]

    @jax.jit
    def run(params: dict, batch: Batch) -> tuple:
        def loss(params: dict) -> tuple:
            model = bind(config, objective.heads, params, runtime)
            terms, counts = objective.apply(model, batch, None), objective.counts(batch)
            text = batch if case == "span_boundary" else batch._replace(input_ids=unmasked(batch))
            return total_loss(terms, counts), (terms, counts, model.encode(text).last)

        gradients, (terms, counts, hidden) = jax.grad(loss, has_aux=True)(params)
        return terms, counts, layers.flatten(gradients), hidden

    return run


@functools.cache
def compute(case: str, packed: bool) -> tuple[dict, dict, dict, jax.Array]:
    return program(case)(params_of(case), batch(packed))


@pytest.mark.parametrize("case", ["span_boundary", "causal"])
def test_packed_sequences_give_the_losses_and_gradients_of_separate_rows(case: str) -> None:
    packed, separate = compute(case, True), compute(case, False)
    jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, rtol=1e-5), packed[0], separate[0])
    assert packed[1] == separate[1]
    for path, gradient in separate[2].items():
        np.testing.assert_allclose(packed[2][path], gradient, atol=2e-5, err_msg=path)


def test_span_boundary_sums_by_hand() -> None:
    terms, counts, _, hidden = compute("span_boundary", True)
    hidden = np.asarray(hidden)
    flat, made = layers.flatten(params_of("span_boundary")), jax.tree.map(np.asarray, batch(True))
    loss = correct = 0.0
    predictions = list(zip(*np.nonzero(made.masked_weights), strict=True))
    reached = [prediction for prediction in predictions if made.span_offsets[prediction] <= 20]
    assert len(reached) == len(predictions) - 3  # the long span has 23 predictions
    for row, number in reached:
        boundaries = (made.span_left, made.span_right, made.span_offsets)
        left, right, offset = (field[row, number] for field in boundaries)
        joined = [hidden[row, left], hidden[row, right], flat["span_boundary_head/position/table"][offset - 1]]
        vector = np.concatenate(joined).astype(np.float64)
        for layer in ("first", "second"):
            vector = vector @ flat[f"span_boundary_head/{layer}/kernel"] + flat[f"span_boundary_head/{layer}/bias"]
            vector = vector * 0.5 * (1 + erf(vector / np.sqrt(2)))
            vector = (vector - vector.mean()) / np.sqrt(vector.var() + 1e-12)
            norm = f"span_boundary_head/{layer}_norm"
            vector = vector * flat[f"{norm}/scale"] + flat[f"{norm}/bias"]
        logits = (flat["embeddings/token/table"] @ vector + flat["span_boundary_head/bias"])[:61]
        loss -= log_softmax(logits)[made.masked_ids[row, number]]
        correct += logits.argmax() == made.masked_ids[row, number]
    np.testing.assert_allclose(terms["sbo"].loss, loss, rtol=1e-4)
    assert terms["sbo"].metrics["accuracy"] == correct
    assert counts["sbo"] == len(reached)
    assert counts["mlm"] == len(predictions)
    np.testing.assert_allclose(
        total_loss(terms, counts), terms["mlm"].loss / counts["mlm"] + terms["sbo"].loss / counts["sbo"], rtol=1e-5
    )


@pytest.mark.parametrize("case", ["causal", "causal_untied"])
def test_causal_sums_by_hand(case: str) -> None:
    terms, counts, _, hidden = compute(case, True)
    hidden = np.asarray(hidden)
    flat, made = layers.flatten(params_of(case)), jax.tree.map(np.asarray, batch(True))
    table = flat["embeddings/token/table" if case == "causal" else "lm_head/output/table"]
    ids = made.input_ids.copy()
    for row, number in zip(*np.nonzero(made.masked_weights), strict=True):
        ids[row, made.masked_positions[row, number]] = made.masked_ids[row, number]
    loss = correct = 0.0
    for row, position in np.ndindex(2, 30):
        sequence, following = made.sequence_ids[row, position : position + 2]
        if sequence and sequence == following:
            logits = (table[:61] @ hidden[row, position]).astype(np.float64)
            loss -= log_softmax(logits)[ids[row, position + 1]]
            correct += logits.argmax() == ids[row, position + 1]
    np.testing.assert_allclose(terms["lm"].loss, loss, rtol=1e-4)
    assert terms["lm"].metrics["accuracy"] == correct
    assert counts["lm"] == sum(LENGTHS) - len(LENGTHS)


@pytest.mark.parametrize("case", ["causal", "span_boundary"])
def test_logits_of_some_tokens_at_a_time_give_equal_results(case: str) -> None:
    runtime = Runtime(logits_at_once=48)  # of 128, with padding
    terms, _, gradients, _ = program(case, runtime)(params_of(case), batch(True))
    wanted = compute(case, True)
    jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, rtol=1e-5), terms, wanted[0])
    for path, gradient in wanted[2].items():
        np.testing.assert_allclose(gradients[path], gradient, atol=1e-5, err_msg=path)


def test_padding_predictions_leave_input_ids_unchanged() -> None:
    made = batch(True)
    np.testing.assert_array_equal(unmasked(made._replace(masked_weights=jnp.zeros((4, 24)))), made.input_ids)


def test_span_boundary_objective_without_span_masks_is_rejected() -> None:
    with pytest.raises(UserError, match="--mask_unit=span"):
        SPANS.counts(batch(True)._replace(span_offsets=None))


# The z-loss, compared with scipy's logarithm of a sum, and where it applies.


WORDS, WEIGHT = 40, 0.125
MASKED = odd_config(vocab_size=WORDS, layers=1)
CAUSAL = dataclasses.replace(MASKED, causal=True)


def packed_batch() -> Batch:
    rows = [[random_sequence(length, WORDS, length) for length in lengths] for lengths in ((9, 13), (17,))]
    return jax.tree.map(jnp.asarray, lay(rows, 24, 5))


def random_params(config: ModelConfig, objective: Objective) -> dict:
    return jax.tree.map(jnp.asarray, random_tree(bert.abstract_params(config, objective.heads)))


def measure(objective: Objective, config: ModelConfig, params: dict, batch: Batch, runtime: Runtime) -> dict:
    terms = objective.apply(objective.bind(config, params, runtime), batch, None)
    return means(terms, objective.counts(batch), objective.term_weights)


@pytest.mark.parametrize(
    ("term", "at_once"), [("lm", 16), *(pytest.param("mlm", number, marks=pytest.mark.slow) for number in (0, 16))]
)
def test_the_term_is_the_mean_squared_normalizer_of_the_predictions(term: str, at_once: int) -> None:
    config, batch = (CAUSAL if term == "lm" else MASKED), packed_batch()
    objective = pretraining_objective(
        PretrainConfig(objective=CausalLM(WEIGHT) if term == "lm" else MaskedLM(next_sentence=False, z_loss=WEIGHT)),
        config,
        [],
    )
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
    config = PretrainConfig(objective=Phases({0: "causal", 3: "mlm"}, WEIGHT))
    objective, batch = pretraining_objective(config, MASKED, []), packed_batch()
    params = random_params(MASKED, objective)
    found = [
        measure(objective, MASKED, params, phase(*batch), Runtime()) for phase in (NextTokenBatch, MaskedTokenBatch)
    ]
    for each, term in zip(found, ("lm", "mlm"), strict=True):
        np.testing.assert_allclose(each["loss"], each[f"{term}_loss"] + WEIGHT * each["z_loss"], rtol=1e-6)


def test_without_a_weight_there_is_no_term() -> None:
    objective = pretraining_objective(PretrainConfig(objective=MaskedLM(next_sentence=False)), MASKED, [])
    assert "z_loss" not in objective.metric_names and "z" not in objective.counts(packed_batch())


@pytest.mark.parametrize(
    ("objective", "options", "model", "message"),
    [
        ("diffusion", {}, {"causal": True}, r"but the model is causal and .*--config\.model\.causal=false"),
        ("diffusion", {"data": PretrainDataConfig(mask_rate=0.3)}, {}, "samples its own mask rates and masks"),
        ("diffusion", {"data": PretrainDataConfig(mask_schedule={0: 0.3, 5: 0.1})}, {}, "samples its own mask rates"),
        ("replaced_tokens", {}, {"causal": True}, "replaced_tokens, but the model is causal"),
        ("replaced_tokens", {}, {"tied_output": False}, r"use --config\.model\.tied_output=true"),
    ],
)
def test_a_combination_that_makes_no_sense_is_refused(objective: str, options: dict, model: dict, message: str) -> None:
    config = PretrainConfig(objective=ObjectiveConfig.kinds[objective](), **options)
    shards = [ShardTraits("the shards", False, "token")]
    with pytest.raises(UserError, match=message):
        pretraining_objective(config, dataclasses.replace(MASKED, **model), shards)


def test_a_generator_of_no_width_is_refused() -> None:
    config = PretrainConfig(objective=ReplacedTokens(generator_size=0.001))
    with pytest.raises(UserError, match=r"less than one dimension of model\.width=\d+; use a"):
        pretraining_objective(config, MASKED, [ShardTraits("the shards", False, "token")])
