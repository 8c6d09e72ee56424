"""The Pallas kernels for TPUs (flash) and GPUs (triton), interpreted: their dropout, grids, shards and matmuls."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import PLAIN, rows
from jax.sharding import PartitionSpec

from bert_jax.config import MeshConfig
from bert_jax.errors import UserError
from bert_jax.model.attention.choice import triton_length
from bert_jax.model.attention.flash import FlashGrid, flash_attention
from bert_jax.model.attention.kernels import KernelOptions, einsum_attention
from bert_jax.model.attention.triton import triton_attention
from bert_jax.model.dropout import keep_mask, row_seeds
from bert_jax.model.embeddings import token_positions, visible_keys
from bert_jax.planning import program as programs
from bert_jax.train.gradient_sums import InShard
from bert_jax.train.sharding import ROWS, OnMesh, make_mesh

ON_MESH = OnMesh()


@pytest.mark.parametrize(
    ("kernel", "slots", "width"),
    [
        (flash_attention, 24, 24),
        *(pytest.param(triton_attention, slots, 16, marks=pytest.mark.slow) for slots in (24, 160)),
    ],
)
def test_a_kernel_drops_what_the_mask_of_the_whole_array_drops(kernel, slots, width):
    """With values that are unit vectors the context is the probabilities; equal scores make all of them equal."""
    shape, rate = (2, slots, 3, width), 0.3
    seeds, zeros = row_seeds(jax.random.key(4), (), 2), jnp.zeros(shape)
    units = jnp.broadcast_to(jnp.eye(slots, width)[None, :, None], shape)
    options = dataclasses.replace(PLAIN, dropout_rate=rate)
    context = kernel((zeros, zeros, units), jnp.ones((2, slots), jnp.int32), seeds, options)
    kept = keep_mask(seeds, (2, 3, slots, slots), rate, position_axes=2)[..., :width]
    np.testing.assert_allclose(context.transpose(0, 2, 1, 3), kept / (slots * (1 - rate)), atol=1e-6)


@pytest.mark.slow
def test_the_shards_of_a_mesh_drop_what_one_device_drops():
    heads, sequence_ids = rows(20)
    heads = tuple(jnp.tile(jnp.concatenate([part, part[:, :, :1]], axis=2), (4, 1, 1, 1)) for part in heads)
    sequence_ids = jnp.tile(sequence_ids, (4, 1))
    seeds = row_seeds(jax.random.key(5), (), 8)

    def loss(heads, sequence_ids, seeds, placement=ON_MESH):
        options = dataclasses.replace(PLAIN, dropout_rate=0.1, placement=placement)
        return jnp.sin(flash_attention(heads, sequence_ids, seeds, options)).sum()

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
        np.testing.assert_allclose(sharded[0], alone[0], atol=3e-4)  # a sum of 5,120 numbers, in any order
        for ours, theirs in zip(sharded[1], alone[1], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6)
            assert len(ours.sharding.device_set) == 8


@pytest.mark.parametrize("of_queries", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("length", "window"), [(128, 0), (1536, 0), (640, 0), (1024, 1), (1024, 130), (2048, 600)])
def test_the_cells_cover_every_visible_pair_once_and_few_others(length, window, causal, of_queries):
    grid = FlashGrid(heads=12, width=64, length=length, window=window, causal=causal)
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
        options = dataclasses.replace(PLAIN, dropout_rate=0.1)
        return flash_attention((query, key, value), sequence_ids, seeds, options).astype(jnp.float32).sum()

    arguments = (jax.ShapeDtypeStruct((2, 512), jnp.int32), jax.ShapeDtypeStruct((2, 2), jnp.uint32))
    traced = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(heads, heads, heads, *arguments)
    assert programs.count_flops(traced).pallas == (2 + 5) * 2 * 2 * 3 * 512**2 * 64
    assert max(np.prod(array.aval.shape) for step in traced.eqns for array in step.outvars) == np.prod(heads.shape)


def test_rows_whose_query_gradient_exceeds_memory_are_refused():
    heads, sequence_ids = jnp.zeros((1, 16385, 1, 64), jnp.bfloat16), jnp.ones((1, 16385), jnp.int32)
    with pytest.raises(UserError, match=r"up to 16,384 positions with heads of 64, got 16,385\. .*attention=auto"):
        flash_attention((heads,) * 3, sequence_ids, None, PLAIN)


@pytest.mark.accelerator
@pytest.mark.usefixtures("nvidia_gpu")
@pytest.mark.parametrize("slots", [100, 128, 512])
def test_the_kernels_on_a_gpu_equal_einsum(slots):
    heads = tuple(jax.random.normal(jax.random.key(part), (4, slots, 3, 64), jnp.bfloat16) for part in range(3))
    sequence_ids = jnp.repeat(jnp.asarray([[1, 1, 2, 0], [1, 1, 1, 1]] * 2, jnp.int32), slots // 4, axis=1)
    places, seeds = token_positions(sequence_ids, sequence_ids), row_seeds(jax.random.key(2), (), 4)
    visible, real = visible_keys(places, places), (sequence_ids > 0)[..., None, None]
    options = KernelOptions(dropout_rate=0.1)

    def plain(heads):
        return einsum_attention(heads, visible, seeds, options)[0]

    def kernel(heads):
        return triton_attention(heads, sequence_ids, seeds, options)

    def run(attend):
        def loss(*heads):
            context = jnp.where(real, attend(heads), 0)
            return jnp.sin(context.astype(jnp.float32)).sum(), context

        return jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*heads))

    for ours, theirs in zip(run(kernel), run(plain), strict=True):
        np.testing.assert_allclose(np.asarray(ours, np.float32), np.asarray(theirs, np.float32), atol=3e-2)


@pytest.mark.parametrize(("slots", "backward"), [(128, 5), (256, 7)])
def test_a_row_of_one_block_computes_no_matmul_twice_and_the_scores_stay_in_the_kernels(slots, backward):
    """Two matmuls forward. With blocks, scores and their gradient are computed for queries and again for keys."""
    heads, sequence_ids = rows(slots, 16)
    seeds, options = row_seeds(jax.random.key(1), (), 2), dataclasses.replace(PLAIN, dropout_rate=0.1)

    def loss(heads):
        return triton_attention(heads, sequence_ids, seeds, options).sum()

    traced = jax.make_jaxpr(jax.grad(loss))(heads)
    assert programs.count_flops(traced).pallas == (2 + backward) * 2 * 2 * 3 * slots * slots * 16
    outside = [array.aval.shape for equation in traced.eqns for array in equation.outvars]
    assert not any(shape.count(slots) > 1 for shape in outside)


@pytest.mark.parametrize(("length", "padded"), [(1, 16), (16, 16), (65, 128), (128, 128), (129, 192), (512, 512)])
def test_rows_are_padded_to_the_sizes_that_triton_takes(length, padded):
    assert triton_length(length) == padded
