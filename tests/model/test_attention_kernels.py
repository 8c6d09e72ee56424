"""Each kernel equals einsum_attention in values and gradients, for rows of any length."""

import collections
import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import PLAIN, assert_equals_einsum, rows
from families import FAMILIES, PACKED, SEPARATE, assert_same, losses_and_gradients

from bert_jax.config import MeshConfig
from bert_jax.model.attention import choice, flash, layer
from bert_jax.model.attention.choice import bands_save_work
from bert_jax.model.attention.flash import flash_attention
from bert_jax.model.attention.kernels import (
    KernelOptions,
    banded_attention,
    cudnn_attention,
    cudnn_attention_by_length,
    einsum_attention,
    splash_attention,
)
from bert_jax.model.attention.triton import triton_attention
from bert_jax.model.bert import abstract_params, bind
from bert_jax.model.dropout import row_seeds
from bert_jax.model.embeddings import sequence_lengths, token_positions, visible_keys
from bert_jax.model.heads.config import Heads
from bert_jax.model.runtime import Runtime
from bert_jax.tasks.rows import SideBySideBatch, TaskBatch
from bert_jax.train.sharding import OnMesh, make_mesh

FEW, SEVERAL = 512, 128  # positions of flash's largest block
# The kernel, positions, window, causality, dropout rate, head width and flash's largest block.
CASES = [
    (banded_attention, 75, 20, True, 0.0, 8, FEW),
    (splash_attention, 130, 7, True, 0.0, 8, FEW),
    (flash_attention, 130, 7, True, 0.1, 16, FEW),
    (triton_attention, 100, 7, True, 0.1, 16, FEW),
]
SLOW_CASES = [
    (banded_attention, 75, 3, False, 0.0, 8, FEW),
    (banded_attention, 16, 5, False, 0.0, 8, FEW),
    (splash_attention, 33, 0, False, 0.0, 8, FEW),
    (splash_attention, 33, 0, True, 0.0, 8, FEW),
    (splash_attention, 256, 7, False, 0.0, 8, FEW),
    # Blocks of 128, of 512, and of 512 keys and 256 queries.
    (splash_attention, 600, 0, True, 0.0, 8, FEW),
    (splash_attention, 1000, 64, False, 0.0, 8, FEW),
    (splash_attention, 2500, 64, False, 0.0, 8, FEW),
    (splash_attention, 2500, 200, True, 0.0, 8, FEW),
    # Heads that fill the lanes have the other layout.
    (splash_attention, 130, 7, True, 0.0, 128, FEW),
    (splash_attention, 600, 64, False, 0.0, 128, FEW),
    (flash_attention, 33, 0, False, 0.0, 8, FEW),
    (flash_attention, 6, 0, False, 0.1, 8, FEW),
    (flash_attention, 300, 0, False, 0.1, 8, SEVERAL),  # three blocks of keys for each block of queries
    (flash_attention, 300, 0, True, 0.5, 8, SEVERAL),
    (flash_attention, 400, 20, False, 0.1, 8, FEW),  # three of four blocks
    (flash_attention, 600, 130, True, 0.1, 8, FEW),
    (triton_attention, 6, 0, False, 0.1, 16, FEW),
    (triton_attention, 33, 0, False, 0.0, 32, FEW),
    (triton_attention, 128, 0, False, 0.5, 64, FEW),
    (triton_attention, 150, 0, False, 0.1, 16, FEW),  # three blocks, the last of which is not full
    (triton_attention, 200, 20, True, 0.3, 16, FEW),
    (triton_attention, 256, 0, False, 0.1, 64, FEW),
]


@pytest.mark.parametrize(
    ("kernel", "slots", "window", "causal", "rate", "width", "largest_block"),
    CASES + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES],
)
def test_a_kernel_equals_einsum_with_the_same_seeds(
    kernel, slots, window, causal, rate, width, largest_block, monkeypatch
):
    monkeypatch.setattr(flash, "LARGEST_BLOCK", largest_block)
    (heads, sequence_ids), seeds = rows(slots, width), row_seeds(jax.random.key(9), (), 2)
    options = dataclasses.replace(PLAIN, window=window, causal=causal, dropout_rate=rate)
    attend = functools.partial(kernel, sequence_ids=sequence_ids, seeds=seeds, options=options)
    assert_equals_einsum(attend, heads, sequence_ids, options, seeds)


def test_bands_have_fewer_scores_than_the_square():
    heads, sequence_ids = rows(200)

    def attend(*heads):
        return banded_attention(heads, sequence_ids, None, dataclasses.replace(PLAIN, window=16))

    sizes = [np.prod(array.aval.shape) for step in jax.make_jaxpr(attend)(*heads).eqns for array in step.outvars]
    assert max(sizes) < 2 * 3 * 200 * 200 / 2
    assert bands_save_work(16, 200) and not bands_save_work(16, 64) and not bands_save_work(64, 256)


@pytest.mark.slow
def test_dropout_in_bands_falls_on_the_probabilities():
    (query, key, _), _ = rows(64)
    ones, whole = jnp.ones((2, 64, 3, 8)), jnp.ones((2, 64), jnp.int32)
    seeds = row_seeds(jax.random.key(3), (), 2)
    options = dataclasses.replace(PLAIN, window=20, dropout_rate=0.1)
    sums = banded_attention((query, key, ones), whole, seeds, options)
    assert float(jnp.std(sums)) > 0.01
    # As for einsum_attention: the standard error of the mean is under 0.02. Five of them.
    assert abs(float(sums.mean()) - 1) < 0.1


@pytest.mark.parametrize(("width", "last"), [(64, "positions"), (128, "width"), (192, "positions"), (256, "width")])
def test_splash_reads_heads_that_would_be_padded_with_positions_last(width, last):
    heads = (jax.ShapeDtypeStruct((2, 640, 3, width), jnp.bfloat16),) * 3
    attend = functools.partial(splash_attention, seeds=None, options=KernelOptions())
    traced = str(jax.make_jaxpr(attend)(heads, jax.ShapeDtypeStruct((2, 640), jnp.int32)))
    assert (f"bf16[2,3,{width},640] = transpose" in traced) == (last == "positions")


@pytest.mark.slow
def test_splash_is_cut_over_the_devices_of_a_mesh():
    heads, sequence_ids = rows(20)
    heads, sequence_ids = jax.tree.map(
        lambda leaf: jnp.tile(leaf, (4,) + (1,) * (leaf.ndim - 1)), (heads, sequence_ids)
    )
    heads = tuple(jnp.concatenate([part, part[:, :, :1]], axis=2) for part in heads)  # four, for two devices each
    options = dataclasses.replace(PLAIN, placement=OnMesh())
    attend = functools.partial(splash_attention, seeds=None, options=options)
    alone = jax.jit(attend)(heads, sequence_ids)
    for sizes in ({}, {"data": 2, "fsdp": 2, "tensor": 2}):
        with jax.set_mesh(make_mesh(MeshConfig(**sizes))):
            cut = jax.jit(attend)(heads, sequence_ids)
        np.testing.assert_allclose(cut, alone, atol=1e-6)
        assert len(cut.sharding.device_set) == 8
        assert cut.addressable_shards[0].data.shape[2] == heads[0].shape[2] // sizes.get("tensor", 1)


@pytest.mark.parametrize("slots", [9, pytest.param(10, marks=pytest.mark.slow)])
def test_cudnn_is_given_even_lengths_and_equals_einsum(slots):
    """By the same function with XLA's implementation; cuDNN's own needs a GPU (test_attention.py)."""

    (heads, sequence_ids), options = rows(slots), dataclasses.replace(PLAIN, window=2)
    places = token_positions(sequence_ids, sequence_ids)
    visible = visible_keys(places, places, window=2)
    assert_equals_einsum(lambda heads: cudnn_attention(heads, visible, options), heads, sequence_ids, options)
    some = places.at(jnp.asarray([[0, 4, 5], [8, 1, 1]]))
    visible = visible_keys(some, places)
    query = jnp.take_along_axis(heads[0], some.in_row[:, :, None, None], axis=1)
    heads = (query, *heads[1:])
    wanted, _ = einsum_attention(heads, visible, None, PLAIN)
    np.testing.assert_allclose(cudnn_attention(heads, visible, PLAIN), wanted, atol=1e-5)


UNPACKED = jnp.asarray(np.arange(9) < np.array([[9], [5], [0]]), jnp.int32)  # the last row is padding alone


def unpacked_heads() -> tuple[jax.Array, ...]:
    return tuple(jax.random.normal(jax.random.key(part), (3, 9, 4, 8)) for part in range(3))


@pytest.mark.parametrize("causal", [False, True])
def test_cudnn_with_lengths_equals_einsum_and_padding_moves_nothing(causal):
    """By the same function with XLA's implementation. The gradients of padding are compared, too: they are zero."""
    lengths = sequence_lengths(token_positions(UNPACKED, UNPACKED, unpacked=True))
    np.testing.assert_array_equal(lengths, [9, 5, 1])
    options = dataclasses.replace(PLAIN, causal=causal)
    attend = functools.partial(cudnn_attention_by_length, lengths=lengths, options=options)
    assert_equals_einsum(attend, unpacked_heads(), UNPACKED, options)
    assert np.isfinite(attend(unpacked_heads())).all()


def test_cudnn_with_lengths_computes_some_queries():
    places, heads = token_positions(UNPACKED, UNPACKED, unpacked=True), unpacked_heads()
    some = places.at(jnp.asarray([[8, 0], [4, 1], [0, 0]]))
    query = jnp.take_along_axis(heads[0], some.in_row[:, :, None, None], axis=1)
    heads = (query, *heads[1:])
    got = cudnn_attention_by_length(heads, sequence_lengths(places), PLAIN)
    wanted, _ = einsum_attention(heads, visible_keys(some, places), None, PLAIN)
    np.testing.assert_allclose(got[:2], wanted[:2], atol=1e-5)


@pytest.mark.slow
def test_each_device_has_the_lengths_of_its_own_rows():
    heads = tuple(jnp.tile(part, (8, 1, 1, 1)) for part in unpacked_heads())
    lengths = jnp.arange(24, dtype=jnp.int32) % 9 + 1
    attend = functools.partial(cudnn_attention_by_length, options=dataclasses.replace(PLAIN, placement=OnMesh()))
    alone = jax.jit(attend)(heads, lengths)
    for sizes in ({}, {"data": 2, "fsdp": 2, "tensor": 2}):
        with jax.set_mesh(make_mesh(MeshConfig(**sizes))):
            cut = jax.jit(attend)(heads, lengths)
        np.testing.assert_allclose(cut, alone, atol=1e-6)
        assert cut.addressable_shards[0].data.shape[0] == 24 // (8 // sizes.get("tensor", 1))


TASK_ROWS = TaskBatch(*SEPARATE[:4], labels=None, label_weights=None)
UNKNOWN = SimpleNamespace(**dict(zip(SEPARATE._fields[:4], SEPARATE[:4], strict=True)))


@pytest.mark.parametrize(
    ("family", "batch", "with_mask", "with_lengths"),
    [
        ("bert", PACKED, 3, 0),
        ("bert", SEPARATE, 0, 3),
        ("bert", TASK_ROWS, 0, 3),
        ("bert", SideBySideBatch(*TASK_ROWS), 3, 0),
        ("bert", UNKNOWN, 3, 0),  # it does not say
        ("gpt", SEPARATE, 1, 2),  # causal, and the last layer has some queries only
        ("modernbert", SEPARATE, 1, 2),  # one layer has a window
    ],
)
def test_cudnn_needs_no_mask_for_rows_of_one_sequence(family, batch, with_mask, with_lengths, monkeypatch, caplog):
    calls = collections.Counter()

    def kernel(name):
        def attend(heads, *_):
            calls[name] += 1
            return heads[0]

        return attend

    monkeypatch.setattr(choice, "choose", lambda *_: "cudnn")
    monkeypatch.setattr(layer, "cudnn_attention", kernel("mask"))
    monkeypatch.setattr(layer, "cudnn_attention_by_length", kernel("lengths"))
    config = FAMILIES[family]

    def encode(params):
        model = bind(config, Heads(), params, Runtime(layer_loop="unrolled"))
        return model.encode_at(batch, jnp.zeros((batch.input_ids.shape[0], 2), jnp.int32))

    choice.log_once.cache_clear()
    jax.eval_shape(encode, abstract_params(config, Heads()))
    assert calls == collections.Counter(mask=with_mask, lengths=with_lengths)
    old = jax.__version_info__ < (0, 11, 1)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == bool(with_mask and old)


# Relative positions are for einsum alone, of the others only ModernBERT has windows. cuDNN takes unpacked rows apart.
MODELS = [("banded", "modernbert", True)] + [
    (kernel, family, True) for kernel in ("flash", "triton") for family in ("bert", "modernbert")
]
MODELS += [
    (kernel, family, packed)
    for kernel, packed in (("splash", True), ("cudnn", True), ("cudnn", False))
    for family, model in FAMILIES.items()
    if model.relative == "none" and model.encoder.kind == "transformer" and (packed or family in ("bert", "modernbert"))
]


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "family", "packed"), MODELS)
def test_losses_and_gradients_of_every_family_are_those_of_einsum(kernel, family, packed, monkeypatch):
    """Law 5's batches and losses: one or several sequences a row, padding, a length that is no multiple of anything."""
    wanted = losses_and_gradients(family, "scan", packed)

    chosen = []

    def choose(requested, situation):
        chosen.append("einsum" if kernel == "banded" and not situation.local else kernel)
        return chosen[-1]

    monkeypatch.setattr(choice, "choose", choose)
    monkeypatch.setattr(layer, "KernelOptions", functools.partial(KernelOptions, interpret=True))
    # Not from the cache of what einsum gave.
    got = losses_and_gradients.__wrapped__(family, "scan", packed)
    assert_same(got, wanted)
    assert kernel in chosen
