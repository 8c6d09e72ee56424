"""The repeating groups of a stack of layers, by brute force, and what a scan over them compiles and keeps."""

import dataclasses
import itertools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES
from tiny_batches import lay, random_sequence

from bert_jax.config import ModelConfig
from bert_jax.model.bert import abstract_params, bind
from bert_jax.model.heads.config import Heads
from bert_jax.model.runtime import Runtime
from bert_jax.model.transformer import LayerGroups, repeating_groups

MODERN = dataclasses.replace(FAMILIES["modernbert"], layers=8, global_every=3)


def test_the_groups_of_published_stacks():
    base = ["first", *(("local", "global")[layer % 3 == 0] for layer in range(1, 22))]
    assert repeating_groups(base) == LayerGroups(1, 3, 7, 0)
    assert repeating_groups(["same"] * 24) == LayerGroups(0, 1, 24, 0)
    assert repeating_groups([]) == LayerGroups(0, 0, 0, 0)
    assert repeating_groups(["a", "b"]) == LayerGroups(2, 0, 0, 0)


def test_groups_give_the_stack_back_and_no_division_traces_fewer_layers():
    draw = random.Random(0)
    for _ in range(300):
        types = [draw.choice("ab") for _ in range(draw.randint(0, 11))]
        found = repeating_groups(types)
        group = types[found.before :][: found.period]
        assert types[: found.before] + group * found.repeats + types[len(types) - found.after :] == types
        possible = [len(types)]
        for before, period, repeats in itertools.product(range(12), range(1, 12), range(2, 12)):
            group = types[before : before + period]
            if types[before : before + period * repeats] == group * repeats and len(group) == period:
                possible.append(len(types) - period * (repeats - 1))
        assert found.traced == min(possible), types


def packed_batch() -> Any:
    rows = [[random_sequence(length, 61, length) for length in lengths] for lengths in ((9, 13), (17,))]
    return jax.tree.map(jnp.asarray, lay(rows, 24, 5))


def random_params(config: ModelConfig) -> dict[str, Any]:
    draw = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: jnp.asarray(draw.normal(0, 0.3, leaf.shape), jnp.float32), abstract_params(config, Heads())
    )


def loss(params: Any, runtime: Runtime, key: Any = None, config: ModelConfig = MODERN) -> tuple[jax.Array, Any]:
    encoded = bind(config, Heads(), params, runtime).encode(packed_batch(), key, all_layers=True)
    return (encoded.last.astype(jnp.float32) ** 2).sum(), encoded.layers


@pytest.mark.slow
def test_a_scan_over_groups_equals_unrolled_layers_with_the_same_dropout():
    config = dataclasses.replace(MODERN, dropout=0.1, attention_dropout=0.1)
    params, key = random_params(config), jax.random.key(3)
    found = [
        jax.jit(jax.value_and_grad(lambda p, r=runtime: loss(p, r, key, config), has_aux=True))(params)
        for runtime in (Runtime(layer_loop="unrolled"), Runtime(layer_loop="scan"))
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *found)


@pytest.mark.slow
def test_layers_that_differ_are_scanned_without_branches_and_keep_no_more_than_unrolled_ones():
    params = random_params(MODERN)
    kept = {}
    for loop in ("unrolled", "scan"):
        runtime = Runtime(layer_loop=loop)
        program = str(jax.make_jaxpr(jax.grad(lambda p, r=runtime: loss(p, r)[0]))(params))
        assert "cond[" not in program and ("scan[" in program) == (loop == "scan")
        residuals = jax.eval_shape(lambda p, r=runtime: jax.vjp(lambda p: loss(p, r)[0], p)[1], params)
        kept[loop] = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(residuals))
    assert kept["scan"] <= 1.05 * kept["unrolled"]
