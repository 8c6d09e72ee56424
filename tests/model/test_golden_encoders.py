"""Tests of law 6 for architectures without a Hugging Face format: hidden states, logits and gradients.

The reference arrays in tests/testdata come from tests/tools/make_golden_encoders.py, which says what each file is of.
To refresh them, run it as its docstring says and copy its output there.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import (
    SCAN,
    UNROLLED,
    Golden,
    assert_close,
    assert_hidden_states_close,
    assert_no_gradient_in_padding,
    jit_once,
    open_encoder,
    pretraining_batch,
    read_arrays,
)

from bert_jax.model import layers
from bert_jax.model.bert import bind
from bert_jax.model.embeddings import rotation_speeds
from bert_jax.model.heads.config import Heads
from bert_jax.model.layers import activation
from bert_jax.model.outputs import masked_logits, vocabulary_logits
from bert_jax.train.objectives import CausalLMObjective, MaskedLMObjective, means, total_loss

RUNTIMES = {"original": UNROLLED, "pre_norm": SCAN, "buckets": UNROLLED, "shaw": SCAN, "gpt": UNROLLED}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("pre_norm", "shaw"))) for name in RUNTIMES]
)
def test_an_architecture_equals_the_reference(tmp_path, name):
    """The first GPT is causal with post-norm layers, like BERT's; the others predict masked tokens."""
    causal = name == "gpt"
    heads, metric = (Heads(lm=True), "lm_loss") if causal else (Heads(mlm=True), "mlm_loss")
    golden = open_encoder(name, heads, tmp_path)
    model_config, batch, real = golden.loaded.model, pretraining_batch(golden.arrays), golden.real()
    objective = CausalLMObjective() if causal else MaskedLMObjective(next_sentence=False)

    @jit_once
    def run(params, batch):
        def loss(params):
            model = bind(model_config, heads, params, RUNTIMES[name])
            terms, counts = objective.apply(model, batch, None), objective.counts(batch)
            encoded = model.encode(batch, all_layers=True)
            logits = vocabulary_logits(model, encoded.last)
            if not causal:
                logits = masked_logits(model, encoded.last, batch.masked_positions)
            return total_loss(terms, counts), (encoded, logits, means(terms, counts)[metric])

        return jax.value_and_grad(loss, has_aux=True)(params)

    params = jax.tree.map(jnp.asarray, layers.unflatten(golden.loaded.params))
    (total, (encoded, logits, mean)), gradients = run(params, jax.tree.map(jnp.asarray, batch))
    assert_hidden_states_close(golden, encoded)
    vocab_size = model_config.vocab_size
    assert_close(logits[..., :vocab_size][real], golden.output("mlm_logits")[real], "logits")
    assert not np.isfinite(logits[..., vocab_size:]).any()
    assert_close(total, golden.output("loss"), "loss")
    assert_close(mean, golden.output("loss"), metric)
    assert_gradients_equal(golden, gradients)


def assert_gradients_equal(golden: Golden, gradients: dict) -> None:
    vocab_size = golden.loaded.model.vocab_size
    flat = {path: np.asarray(value) for path, value in layers.flatten(gradients).items()}
    assert_no_gradient_in_padding(flat, vocab_size)
    wanted = golden.tensors("gradients")
    assert set(flat) == set(wanted)
    for path, value in wanted.items():
        got = flat[path][:vocab_size] if len(flat[path]) > len(value) else flat[path]
        assert_close(got, value, f"gradient of {path}")


@pytest.mark.parametrize("base", [160_000.0, 10_000.0])
def test_rotations_equal_those_of_the_reference_exactly(base):
    wanted = read_arrays("rotations")[f"{base:.0f}"]
    np.testing.assert_array_equal(rotation_speeds(2 * len(wanted), base), wanted)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "gelu_sigmoid", "relu"])
def test_an_activation_and_its_slope_equal_the_reference(name):
    arrays = read_arrays("activations")
    function = activation(name)
    value, slope = jax.vmap(jax.value_and_grad(lambda x: function(x)))(arrays["x"])
    assert_close(value, arrays[f"{name}/value"], name)
    assert_close(slope, arrays[f"{name}/slope"], f"slope of {name}")
