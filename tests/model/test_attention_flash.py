"""The flash kernels for TPUs, interpreted: values, gradients and dropped probabilities are those of einsum."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from test_attention_kernels import HIGHEST, assert_equals_einsum, rows

from bert_jax.config import MeshConfig
from bert_jax.errors import UserError
from bert_jax.model.attention import flash
from bert_jax.model.attention.flash import Grid, flash_attention
from bert_jax.model.dropout import keep_mask, row_seeds
from bert_jax.model.runtime import Placement
from bert_jax.planning import program as programs
from bert_jax.train.gradient_sums import InShard
from bert_jax.train.sharding import ROWS, OnMesh, make_mesh

ON_MESH = OnMesh()
OPTIONS = {"precision": HIGHEST, "placement": Placement(), "interpret": True}


@pytest.mark.parametrize(
    ("slots", "window", "causal", "rate", "width", "largest_block"),
    [
        (130, 7, True, 0.1, 16, 512),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (33, 0, False, 0.0, 8, 512),
                (6, 0, False, 0.1, 8, 512),
                (300, 0, False, 0.1, 8, 128),  # three blocks of keys for each block of queries
                (300, 0, True, 0.5, 8, 128),
                (400, 20, False, 0.1, 8, 512),  # three of four blocks
                (600, 130, True, 0.1, 8, 512),
            )
        ),
    ],
)
def test_values_and_gradients_are_those_of_einsum_with_the_same_seeds(
    slots, window, causal, rate, width, largest_block, monkeypatch
):
    monkeypatch.setattr(flash, "LARGEST_BLOCK", largest_block)
    seeds = row_seeds(jax.random.key(9), (), 2)

    def kernel(query, key, value, sequence_ids, visible):
        options = {"window": window, "causal": causal, "dropout_rate": rate, "seeds": seeds, **OPTIONS}
        return flash_attention(query, key, value, sequence_ids, **options)

    assert_equals_einsum(kernel, *rows(slots, width), window, causal, rate, seeds)


def test_the_kernel_drops_what_the_mask_of_the_whole_array_drops():
    """With values that are unit vectors the context is the probabilities; equal scores make all of them equal."""
    shape, rate = (2, 24, 3, 24), 0.3
    seeds = row_seeds(jax.random.key(4), (), 2)
    units = jnp.broadcast_to(jnp.eye(24)[None, :, None], shape)
    options = {"window": 0, "causal": False, "dropout_rate": rate, "seeds": seeds, **OPTIONS}
    whole = jnp.ones((2, 24), jnp.int32)
    found = flash_attention(jnp.zeros(shape), jnp.zeros(shape), units, whole, **options)
    kept = keep_mask(seeds, (2, 3, 24, 24), rate, position_axes=2)
    np.testing.assert_allclose(found.transpose(0, 2, 1, 3), kept / (24 * (1 - rate)), atol=1e-6)


@pytest.mark.slow
def test_the_shards_of_a_mesh_drop_what_one_device_drops():
    heads, sequence_ids = rows(20)
    heads = [jnp.tile(jnp.concatenate([part, part[:, :, :1]], axis=2), (4, 1, 1, 1)) for part in heads]
    sequence_ids = jnp.tile(sequence_ids, (4, 1))
    seeds = row_seeds(jax.random.key(5), (), 8)
    options = {"window": 0, "causal": False, "dropout_rate": 0.1} | OPTIONS

    def loss(heads, sequence_ids, seeds, placement=ON_MESH):
        found = flash_attention(*heads, sequence_ids, seeds=seeds, **options | {"placement": placement})
        return jnp.sin(found).sum()

    alone = jax.jit(jax.value_and_grad(loss))(heads, sequence_ids, seeds)
    cube = {"data": 2, "fsdp": 2, "tensor": 2}

    def sum_of_shards(*arguments):
        own = functools.partial(loss, placement=InShard())
        summed = jax.shard_map(
            lambda *own_rows: jax.lax.psum(own(*own_rows), ROWS),
            in_specs=PartitionSpec(ROWS),
            out_specs=PartitionSpec(),
            axis_names=set(ROWS),
            check_vma=False,
        )
        return summed(*arguments)

    for function, sizes in ((loss, {}), (loss, cube), (sum_of_shards, cube)):
        with jax.set_mesh(make_mesh(MeshConfig(**sizes))):
            sharded = jax.jit(jax.value_and_grad(function))(heads, sequence_ids, seeds)
        np.testing.assert_allclose(sharded[0], alone[0], atol=1e-4)  # a sum of 5,120 numbers
        for ours, theirs in zip(sharded[1], alone[1], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6)
            assert len(ours.sharding.device_set) == 8


@pytest.mark.parametrize("of_queries", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("length", "window"), [(128, 0), (1536, 0), (640, 0), (1024, 1), (1024, 130), (2048, 600)])
def test_the_cells_cover_every_visible_pair_once_and_few_others(length, window, causal, of_queries):
    grid = Grid(heads=12, width=64, length=length, window=window, causal=causal)
    assert grid.length == grid.block * grid.blocks and grid.heads % grid.heads_per_cell == 0
    cells = []
    for shared in range(grid.blocks):
        for step in range(grid.steps):
            other = grid.other(shared, step, of_queries)
            queries, keys = (shared, other) if of_queries else (other, shared)
            if grid.visible(queries, keys):
                assert int(grid.fetched(shared, step, of_queries)) == other
                cells.append((queries, keys))
            else:
                assert 0 <= int(grid.fetched(shared, step, of_queries)) < grid.blocks
    ahead = np.arange(length)[None, :] - np.arange(length)[:, None]
    seen = (np.abs(ahead) <= (window or length)) & ((ahead <= 0) | (not causal))
    tiles = seen.reshape(grid.blocks, grid.block, grid.blocks, grid.block).any(axis=(1, 3))
    assert sorted(cells) == [tuple(map(int, tile)) for tile in np.argwhere(tiles)]


def test_the_scores_stay_in_the_kernels_which_compute_each_matmul_once():
    heads = jax.ShapeDtypeStruct((2, 512, 3, 64), jnp.bfloat16)

    def loss(query, key, value, sequence_ids, seeds):
        options = {"window": 0, "causal": False, "dropout_rate": 0.1, "seeds": seeds} | OPTIONS
        return flash_attention(query, key, value, sequence_ids, **options).astype(jnp.float32).sum()

    arguments = (jax.ShapeDtypeStruct((2, 512), jnp.int32), jax.ShapeDtypeStruct((2, 2), jnp.uint32))
    traced = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(heads, heads, heads, *arguments)
    assert programs.count_flops(traced).pallas == (2 + 5) * 2 * 2 * 3 * 512**2 * 64
    assert max(np.prod(found.aval.shape) for step in traced.eqns for found in step.outvars) == np.prod(heads.shape)


def test_rows_whose_query_gradient_exceeds_memory_are_refused():
    heads, sequence_ids = jnp.zeros((1, 16385, 1, 64), jnp.bfloat16), jnp.ones((1, 16385), jnp.int32)
    options = {"window": 0, "causal": False, "dropout_rate": 0.0, "seeds": None} | OPTIONS
    with pytest.raises(UserError, match=r"up to 16,384 positions with heads of 64, got 16,385\. .*attention=auto"):
        flash_attention(heads, heads, heads, sequence_ids, **options)
