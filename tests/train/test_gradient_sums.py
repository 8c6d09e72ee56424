"""Gradients are summed over the devices once a step, and equal those of one device (law 3)."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_steps import (
    DEFAULT,
    MESHES,
    ONE,
    ZERO_1,
    assert_close,
    first_state,
    make_plan,
    plan_of,
    random_batch,
    step_on,
)

from bert_jax.config import Lamb, MeshConfig, Muon
from bert_jax.model import bert, layers
from bert_jax.model.runtime import Runtime
from bert_jax.planning.program import collectives, parse
from bert_jax.train import sharding
from bert_jax.train import step as step_lib
from bert_jax.train.objectives import MaskedLMObjective

ROWS = 32
OBJECTIVE = MaskedLMObjective()
accumulate = jax.jit(step_lib.accumulate, static_argnums=0)


@pytest.fixture(scope="module")
def params(tiny_config):
    return bert.init_params(tiny_config, OBJECTIVE.heads, jax.random.key(1))


@functools.cache
def batch_of(vocab_size: int) -> Any:
    return jax.tree.map(lambda *parts: np.concatenate(parts), *(random_batch(vocab_size, seed) for seed in (0, 1)))


def plan_on_mesh(model: Any, microbatches: int, mesh_config: MeshConfig = DEFAULT, **runtime: Any) -> step_lib.Plan:
    runtime = Runtime(**{"layer_loop": "scan"} | runtime, placement=sharding.OnMesh())
    return make_plan(model, microbatches=microbatches, runtime=runtime, mesh_config=mesh_config)


def arguments_on(mesh: Any, params: Any, vocab_size: int) -> tuple[Any, ...]:
    batch = batch_of(vocab_size)
    counts = OBJECTIVE.counts(jax.tree.map(jnp.asarray, batch))
    spread = jax.device_put(params, sharding.shardings(mesh, params))
    return spread, sharding.place(batch, ROWS, mesh), counts, jax.random.key(0)


def bytes_by_kind(program: Any) -> dict[tuple[str, int], float]:
    """The bytes of a program's collectives, whole arrays, by kind and number of devices."""
    found = collectives(parse(program.as_text()), 8, 1, lambda _: 0.0, lambda _: 0.0)
    return {(one.kind, one.group): one.bytes for one in found}


def sharded_bytes(params: Any, mesh: Any, axis: str, **options: Any) -> int:
    """The bytes of the parameters that the rules shard over an axis of the mesh."""
    leaves = zip(jax.tree.leaves(params), jax.tree.leaves(sharding.shardings(mesh, params, **options)), strict=True)
    return sum(4 * leaf.size for leaf, sharding in leaves if any(axis in (names or ()) for names in sharding.spec))


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, and of those that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            yield from equations(inner) if hasattr(inner, "eqns") else ()


@pytest.mark.slow
def test_gradients_of_four_microbatches_are_reduced_once(tiny_config, params):
    model = dataclasses.replace(tiny_config, dropout=0.0, attention_dropout=0.0)
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=4))
    with jax.set_mesh(mesh):
        arguments = arguments_on(mesh, params, model.vocab_size)
        program = accumulate.lower(plan_on_mesh(model, 4), *arguments).compile()
        found, terms = program(*arguments)
    moved = bytes_by_kind(program)
    whole, everything = sharded_bytes(params, mesh, "fsdp"), 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    assert moved.pop(("all-gather", 4)) == moved.pop(("reduce-scatter", 4)) == whole > 0.9 * everything
    assert moved.pop(("all-reduce", 2)) == whole / 4
    sums = 4 * len(jax.tree.leaves(terms))  # of the loss and of the metrics
    assert moved == {("all-reduce", 8): everything - whole + sums}
    wanted, terms_wanted = accumulate(
        make_plan(model), params, jax.tree.map(jnp.asarray, batch_of(model.vocab_size)), *arguments[2:]
    )
    assert_close(found, wanted, 2e-7)
    jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, rtol=1e-6), terms, terms_wanted)


@pytest.mark.slow
def test_layers_are_gathered_in_the_compute_dtype_and_gradients_are_reduced_in_that_of_the_key(tiny_config, params):
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=4))
    kernels = {
        leaf.shape
        for path, leaf in layers.flatten(params).items()
        if path.startswith("encoder/layers/") and path.endswith("kernel")
    }
    with jax.set_mesh(mesh):
        arguments = arguments_on(mesh, params, tiny_config.vocab_size)
        for microbatches, dtype in ((1, "auto"), (2, "bfloat16")):
            plan = plan_on_mesh(tiny_config, microbatches, MeshConfig(reduce_dtype=dtype), compute_dtype="bfloat16")
            traced = list(equations(accumulate.trace(plan, *arguments).jaxpr.jaxpr))
            gathered = [each.outvars[0].aval for each in traced if each.primitive.name == "all_gather"]
            # With one microbatch a layer gathers its own, without the axis of layers.
            wanted = {shape[1:] for shape in kernels} if microbatches == 1 else kernels
            of_layers = {each.shape: each.dtype.name for each in gathered if each.shape in wanted}
            assert of_layers == dict.fromkeys(wanted, "bfloat16")
            reduced = [each.invars for each in traced if each.primitive.name in ("reduce_scatter", "psum")]
            dtypes = {each.aval.dtype.name for operands in reduced for each in operands if each.aval.ndim}
            assert dtypes == {"float32" if dtype == "auto" else dtype}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 4, 1), (2, 2, 2)])
def test_more_microbatches_move_no_more_bytes(tiny_config, params, sizes):
    """With tensor, sums of activations are among the bytes; they are as large for any number of microbatches, too."""
    mesh = sharding.make_mesh(MeshConfig(*sizes))
    with jax.set_mesh(mesh):
        arguments = arguments_on(mesh, params, tiny_config.vocab_size)
        programs = [accumulate.lower(plan_on_mesh(tiny_config, parts), *arguments).compile() for parts in (1, 2, 4)]
    one, two, four = map(bytes_by_kind, programs)
    assert two == four
    assert {kind: size for kind, size in one.items() if "gather" not in kind[0]} == {
        kind: size for kind, size in four.items() if "gather" not in kind[0]
    }
    # Each device gathers and reduces its part over tensor alone.
    laid = [(4 * leaf.size, leaf.sharding.spec) for leaf in jax.tree.leaves(arguments[0])]
    own = [size // (2 if "tensor" in str(spec) else 1) for size, spec in laid if "fsdp" in str(spec)]
    assert four["all-gather", sizes[1]] == four["reduce-scatter", sizes[1]] == sum(own)


@pytest.mark.slow
def test_a_layer_is_gathered_again_in_its_backward_pass(tiny_config):
    """So that no device keeps all layers whole; the last layer's backward pass follows its forward pass at once."""
    model = dataclasses.replace(tiny_config, layers=5)
    params = bert.init_params(model, OBJECTIVE.heads, jax.random.key(1))
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=4))
    with jax.set_mesh(mesh):
        arguments = arguments_on(mesh, params, model.vocab_size)
        program = accumulate.lower(plan_on_mesh(model, 1), *arguments).compile()
        # XLA on CPUs merges the gathers of an unrolled loop again, so those are counted as traced.
        traced = accumulate.trace(plan_on_mesh(model, 1, layer_loop="unrolled"), *arguments)
    whole = sharded_bytes(params, mesh, "fsdp")
    layers = sharded_bytes({"encoder": {"layers": params["encoder"]["layers"]}}, mesh, "fsdp")
    moved = bytes_by_kind(program)
    assert moved["all-gather", 4] == whole + layers * 4 / 5
    assert moved["reduce-scatter", 4] == whole
    gathers = [each for each in equations(traced.jaxpr.jaxpr) if each.primitive.name == "all_gather"]
    assert sum(each.outvars[0].aval.size * 4 for each in gathers) == whole + layers * 4 / 5


@pytest.mark.slow
def test_a_sharded_optimizer_holds_its_share_and_moves_what_an_all_reduce_moves():
    state, _, program = step_on(MESHES["8x1x1"], plan_of("bert", microbatches=2, mesh_config=ZERO_1, ema_decay=0.9))
    mesh = sharding.make_mesh(MeshConfig())
    everything = 4 * sum(leaf.size for leaf in jax.tree.leaves(state.params))
    shardings = sharding.shardings(mesh, state, shard_optimizer=True).optimizer_state
    moments, laid = (
        next(part for part in tree if hasattr(part, "mu")).mu for tree in (state.optimizer_state, shardings)
    )
    whole = sum(
        4 * leaf.size
        for leaf, sharding in zip(jax.tree.leaves(moments), jax.tree.leaves(laid), strict=True)
        if not sharding.is_fully_replicated
    )
    assert whole > 0.9 * everything
    for tree in (moments, state.average):
        held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
        assert held == everything - whole + whole / 8
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state.params))
    moved = bytes_by_kind(program)
    assert moved["reduce-scatter", 8] == moved["all-gather", 8] == whole
    assert moved["all-reduce", 8] < everything - whole + 200  # and a few numbers


@pytest.mark.slow
def test_a_reduction_in_bfloat16_rounds_gradients(tiny_config, params):
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=4))
    found = []
    with jax.set_mesh(mesh):
        arguments = arguments_on(mesh, params, tiny_config.vocab_size)
        for dtype in ("float32", "bfloat16"):
            gradients, _ = accumulate(plan_on_mesh(tiny_config, 4, MeshConfig(reduce_dtype=dtype)), *arguments)
            found.append(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(jax.device_get(gradients))]))
    error = np.linalg.norm(found[1] - found[0]) / np.linalg.norm(found[0])
    assert 2**-10 < error < 2**-7  # bfloat16 has 8 bits: up to 2^-9 for each of a few roundings


# Law 3: losses and gradients equal those of one device for any mesh of eight, family and layer loop.


CASES = [
    ("bert", "2x4x1", {}),
    ("bert", "2x2x2", {}),
    ("bert", "2x2x2", {"loop": "unrolled"}),
    ("bert", "2x2x2", {"microbatches": 2}),
    ("bert", "8x1x1", {"microbatches": 2}),
    ("modernbert", "1x8x1", {}),
    ("modernbert", "2x2x2", {}),
    ("gpt", "2x2x2", {}),
    ("lstm", "2x2x2", {}),
    ("feed_forward", "2x2x2", {}),
    ("bilstm", "8x1x1", {"microbatches": 2}),
    ("electra", "2x2x2", {"microbatches": 2}),
    ("diffusion", "2x2x2", {}),
    ("causal phase", "2x2x2", {"microbatches": 2}),
    ("albert", "2x2x2", {"microbatches": 2}),
    ("buckets", "2x1x4", {"microbatches": 2}),
    ("bert", "2x2x2", {"optimizer": Lamb}),
    ("bert", "2x2x2", {"optimizer": Muon}),
    ("bert", "8x1x1", {"mesh_config": ZERO_1, "microbatches": 2}),
    ("bert", "8x1x1", {"mesh_config": ZERO_1, "optimizer": Muon}),
    ("bert", "2x4x1", {"mesh_config": ZERO_1, "optimizer": Lamb}),
    ("bert", "2x2x2", {"mesh_config": ZERO_1, "microbatches": 2, "loop": "unrolled"}),
]


@functools.cache
def alone(family: str, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """On one device. An unrolled loop and a sharded optimizer are held to the scan and to a whole one there, too."""
    return step_on(ONE, plan_of(family, **changes))[:2]


def assert_near(got: Any, wanted: Any) -> None:
    """Each tensor to 1e-6 of all of them (of each device's sums, float32 loses as much), and to 1e-5 of itself unless
    it is rounding noise, as the gradient of a key's bias is."""
    wanted = jax.device_get(wanted)
    whole = np.sqrt(sum(np.square(value, dtype=np.float64).sum() for value in wanted.values()))
    for path, value in jax.device_get(got).items():
        error = np.linalg.norm((value - wanted[path]).ravel())
        assert error < min(1e-6 * whole, 1e-5 * np.linalg.norm(wanted[path].ravel()) + 1e-7 * whole), path


def momentum(state: Any) -> dict[str, Any]:
    """After a first step this is the clipped gradient, scaled. What Adam makes of it would not do: where a gradient is
    rounding noise, its sign moves a parameter as far as any."""
    named = jax.tree_util.tree_leaves_with_path(state)
    by_path = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in named}
    return {path: leaf for path, leaf in by_path.items() if "mu" in path.split("/")}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh", "changes"), CASES, ids=repr)
def test_a_step_on_any_mesh_equals_that_of_one_device(family, mesh, changes):
    plan = plan_of(family, **changes)
    state, metrics, _ = step_on(MESHES[mesh], plan)
    there, wanted = alone(
        family, **{name: value for name, value in changes.items() if name not in ("loop", "mesh_config")}
    )
    for name in ("loss", "gradient_norm"):
        np.testing.assert_allclose(metrics[name], wanted[name], rtol=1e-6, err_msg=name)
    assert_near(momentum(state.optimizer_state), momentum(there.optimizer_state))
    parts = {"lstm": "recurrent", "bilstm": "backward/recurrent", "feed_forward": "window"}
    part = parts.get(family, "feed_forward/input")
    kernel = f"encoder/layers/{part}/kernel"
    before, got, wanted = (
        jax.device_get(layers.flatten(part.params)[kernel]) for part in (first_state(plan), state, there)
    )
    # Of a trust ratio or an orthogonalized update, a device's own part of the matrix would give another.
    assert np.linalg.norm((got - wanted).ravel()) < 1e-2 * np.linalg.norm((wanted - before).ravel())


@pytest.mark.slow
def test_a_device_holds_its_share_of_the_parameters_and_of_the_optimizer():
    state, _, program = step_on((1, 4, 2), plan_of("bert", ema_decay=0.9))
    kernel = "encoder/layers/feed_forward/output/kernel"
    moments = next(part for part in state.optimizer_state if hasattr(part, "mu"))
    for tree in (state.params, moments.mu, moments.nu, state.average):
        assert layers.flatten(tree)[kernel].addressable_shards[0].data.size == 2 * 48 * 32 // 8
    # Parameters are gathered and sums are reduced; there is no other communication.
    text = program.as_text()
    assert "all-gather" in text and "all-to-all" not in text and "collective-permute" not in text
