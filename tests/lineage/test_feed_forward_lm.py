"""The feed-forward language model: equal to its formula, packed rows; test_recurrent.py has refusals and runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES, random_params
from golden import SCAN, UNROLLED
from tiny_batches import lay, random_sequence

from bert_jax.lineage import FeedForward
from bert_jax.model import layers
from bert_jax.model.bert import bind
from bert_jax.model.heads.config import Heads
from bert_jax.model.outputs import vocabulary_logits
from bert_jax.train.metric_accumulator import training_flops
from bert_jax.train.objectives import CausalLMObjective

LM = Heads(lm=True)
CONFIG = dataclasses.replace(FAMILIES["rnn"], encoder=FeedForward(window=3), layers=1, tied_output=False)
SEQUENCES = [random_sequence(length, 61, seed) for seed, length in enumerate((9, 6, 8, 2))]
PACKED = jax.tree.map(jnp.asarray, lay([SEQUENCES[:3], SEQUENCES[3:]], slots=25, predictions=6))
SEPARATE = jax.tree.map(jnp.asarray, lay([[sequence] for sequence in SEQUENCES], slots=11, predictions=2))


@pytest.mark.parametrize("runtime", [SCAN, dataclasses.replace(UNROLLED, remat="layer")], ids=["plain", "remat"])
def test_the_model_is_the_formula_of_the_paper(runtime):
    """y = U tanh(d + H x), x = (C(w[t-n+1]), ..., C(w[t])): Bengio et al. 2003, section 2, without W and b."""
    params = random_params(CONFIG, LM)

    @jax.jit
    def run(params):
        model = bind(CONFIG, LM, params, runtime)
        encoded = model.encode(SEPARATE, all_layers=True)
        return encoded, vocabulary_logits(model, encoded.last)

    encoded, logits = run(params)
    flat = {path: np.asarray(value, np.float64) for path, value in layers.flatten(params).items()}
    kernel, bias = flat["encoder/layers/window/kernel"][0], flat["encoder/layers/window/bias"][0]
    for row, sequence in enumerate(SEQUENCES):
        vectors = flat["embeddings/token/table"][sequence.ids]
        for position in range(len(sequence.ids)):
            concatenated = [
                vectors[position - back] if position >= back else np.zeros(CONFIG.width)
                for back in reversed(range(CONFIG.encoder.window))
            ]
            hidden = np.tanh(bias + np.concatenate(concatenated) @ kernel.reshape(-1, CONFIG.width))
            np.testing.assert_allclose(encoded.last[row, position], hidden, atol=1e-5)
            wanted = flat["lm_head/output/table"][: CONFIG.vocab_size] @ hidden
            np.testing.assert_allclose(logits[row, position, : CONFIG.vocab_size], wanted, atol=1e-5)
    assert encoded.layers.shape == (1, *encoded.last.shape)


def test_packed_rows_equal_padded_ones():
    objective, params = CausalLMObjective(), random_params(CONFIG, LM)

    @jax.jit
    def run(batch):
        def loss(params):
            return objective.apply(bind(CONFIG, LM, params, SCAN), batch, None)["lm"].loss

        return jax.value_and_grad(loss)(params)

    packed, padded = run(PACKED), run(SEPARATE)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5), packed, padded)
    assert all(np.any(gradient) for gradient in jax.tree.leaves(packed[1]))


def test_flops_are_three_times_those_of_the_formula():
    wanted = 2 * CONFIG.encoder.window * CONFIG.width**2 + 2 * CONFIG.width * 128  # 61 tokens are padded to 128
    assert training_flops(CONFIG, rows=3, length=20, predictions=4) == 3 * 60 * wanted
