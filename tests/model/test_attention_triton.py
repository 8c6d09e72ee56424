"""The Triton kernels for GPUs, interpreted: values, gradients and dropped probabilities are those of einsum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_attention_kernels import HIGHEST, assert_equals_einsum, rows

from bert_jax.model.attention.choice import triton_length
from bert_jax.model.attention.kernels import einsum_attention
from bert_jax.model.attention.triton import triton_attention
from bert_jax.model.dropout import keep_mask, row_seeds
from bert_jax.model.embeddings import token_positions, visible_keys
from bert_jax.model.runtime import Placement
from bert_jax.planning import program as programs

OPTIONS = {"precision": HIGHEST, "placement": Placement(), "interpret": True}


@pytest.mark.parametrize(
    ("slots", "window", "causal", "rate", "width"),
    [
        (100, 7, True, 0.1, 16),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (6, 0, False, 0.1, 16),
                (33, 0, False, 0.0, 32),
                (128, 0, False, 0.5, 64),
                (150, 0, False, 0.1, 16),  # three blocks, the last of which is not full
                (200, 20, True, 0.3, 16),
                (256, 0, False, 0.1, 64),
            )
        ),
    ],
)
def test_values_and_gradients_are_those_of_einsum_with_the_same_seeds(slots, window, causal, rate, width):
    seeds = row_seeds(jax.random.key(9), (), 2)

    def kernel(query, key, value, sequence_ids, visible):
        options = {"window": window, "causal": causal, "dropout_rate": rate, "seeds": seeds, **OPTIONS}
        return triton_attention(query, key, value, sequence_ids, **options)

    assert_equals_einsum(kernel, *rows(slots, width), window, causal, rate, seeds)


@pytest.mark.accelerator
@pytest.mark.usefixtures("nvidia_gpu")
@pytest.mark.parametrize("slots", [100, 128, 512])
def test_the_kernels_on_a_gpu_equal_einsum(slots):
    heads = [jax.random.normal(jax.random.key(part), (4, slots, 3, 64), jnp.bfloat16) for part in range(3)]
    sequence_ids = jnp.repeat(jnp.asarray([[1, 1, 2, 0], [1, 1, 1, 1]] * 2, jnp.int32), slots // 4, axis=1)
    places, seeds = token_positions(sequence_ids, sequence_ids), row_seeds(jax.random.key(2), (), 4)
    visible, real = visible_keys(places, places), (sequence_ids > 0)[..., None, None]
    options = {"dropout_rate": 0.1, "seeds": seeds, "precision": jax.lax.Precision.DEFAULT}

    def plain(*heads):
        return einsum_attention(*heads, visible, **options)[0]

    def kernel(*heads):
        return triton_attention(*heads, sequence_ids, window=0, causal=False, placement=Placement(), **options)

    def run(attend):
        def loss(*heads):
            context = jnp.where(real, attend(*heads), 0)
            return jnp.sin(context.astype(jnp.float32)).sum(), context

        return jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*heads))

    for ours, theirs in zip(run(kernel), run(plain), strict=True):
        np.testing.assert_allclose(np.asarray(ours, np.float32), np.asarray(theirs, np.float32), atol=3e-2)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [24, 160])
def test_the_kernel_drops_what_the_mask_of_the_whole_array_drops(slots):
    """With values that are unit vectors the context is the probabilities; equal scores make all of them equal."""
    shape, rate = (2, slots, 3, 16), 0.3
    seeds = row_seeds(jax.random.key(4), (), 2)
    units = jnp.broadcast_to(jnp.eye(slots, 16)[None, :, None], shape)
    options = {"window": 0, "causal": False, "dropout_rate": rate, "seeds": seeds, **OPTIONS}
    whole = jnp.ones((2, slots), jnp.int32)
    found = triton_attention(jnp.zeros(shape), jnp.zeros(shape), units, whole, **options)
    kept = keep_mask(seeds, (2, 3, slots, slots), rate, position_axes=2)[..., :16]
    np.testing.assert_allclose(found.transpose(0, 2, 1, 3), kept / (slots * (1 - rate)), atol=1e-6)


@pytest.mark.parametrize(("slots", "backward"), [(128, 5), (256, 7)])
def test_a_row_of_one_block_computes_no_matmul_twice_and_the_scores_stay_in_the_kernels(slots, backward):
    """Two matmuls forward. With blocks, scores and their gradient are computed for queries and again for keys."""
    heads, sequence_ids = rows(slots, 16)
    options = {"window": 0, "causal": False, "dropout_rate": 0.1, "seeds": row_seeds(jax.random.key(1), (), 2)}

    def loss(heads):
        return triton_attention(*heads, sequence_ids, **options, **OPTIONS).sum()

    traced = jax.make_jaxpr(jax.grad(loss))(heads)
    assert programs.count_flops(traced).pallas == (2 + backward) * 2 * 2 * 3 * slots * slots * 16
    outside = [found.aval.shape for equation in traced.eqns for found in equation.outvars]
    assert not any(shape.count(slots) > 1 for shape in outside)


@pytest.mark.parametrize(("length", "padded"), [(1, 16), (16, 16), (65, 128), (128, 128), (129, 192), (512, 512)])
def test_rows_are_padded_to_the_sizes_that_triton_takes(length, padded):
    assert triton_length(length) == padded
