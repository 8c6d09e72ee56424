"""Law 3: losses and gradients equal those of one device for any mesh of eight, family and layer loop."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES
from tiny_batches import lay, random_sequence

from bert_jax.config import MeshConfig, OptimizerConfig
from bert_jax.data.schedules import StepSchedule
from bert_jax.lineage import BidirectionalLMObjective
from bert_jax.model import bert, layers
from bert_jax.model.runtime import Runtime
from bert_jax.train import optim, sharding
from bert_jax.train import step as step_lib
from bert_jax.train.objectives import (
    CausalLMObjective,
    DiffusionObjective,
    MaskedLMObjective,
    PhasedObjective,
    ReplacedTokensObjective,
)

ONE = (1, 1, 1)
ROWS, SLOTS = 16, 24
# Sizes that every mesh divides; dropout on, whose masks have to be those of one device.
CHANGES: dict[str, Any] = {
    "layers": 2,
    "width": 32,
    "heads": 4,
    "feed_forward": 48,
    "dropout": 0.1,
    "attention_dropout": 0.1,
}
MESHES = {"8x1x1": (8, 1, 1), "2x4x1": (2, 4, 1), "1x8x1": (1, 8, 1), "2x2x2": (2, 2, 2), "2x1x4": (2, 1, 4)}
DEFAULT, ZERO_1 = MeshConfig(), MeshConfig(shard_optimizer=True)
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
    ("bert", "2x2x2", {"name": "lamb"}),
    ("bert", "2x2x2", {"name": "muon"}),
    ("bert", "8x1x1", {"mesh_config": ZERO_1, "microbatches": 2}),
    ("bert", "8x1x1", {"mesh_config": ZERO_1, "name": "muon"}),
    ("bert", "2x4x1", {"mesh_config": ZERO_1, "name": "lamb"}),
    ("bert", "2x2x2", {"mesh_config": ZERO_1, "microbatches": 2, "loop": "unrolled"}),
]


@functools.cache
def packed_rows():
    """Rows of two packed sequences and of one with padding."""
    rows = []
    for number in range(ROWS):
        lengths = (9, 13) if number % 2 else (17,)
        rows.append([random_sequence(length, 61, seed=10 * number + length) for length in lengths])
    return lay(rows, SLOTS, 5)


def plan_of(
    family: str, *, loop: str = "scan", microbatches: int = 1, mesh_config: MeshConfig = DEFAULT, **optimizer: Any
) -> step_lib.Plan:
    base = {"electra": "bert", "diffusion": "bert", "causal phase": "bert", "feed_forward": "rnn"}.get(family, family)
    model = dataclasses.replace(FAMILIES[base], **CHANGES)
    if family == "feed_forward":
        model = dataclasses.replace(model, encoder=family, layers=1, window=3)
    if family == "bilstm":
        model = dataclasses.replace(model, cell_width=24)
    if family in ("albert", "bilstm", "electra", "lstm"):
        model = dataclasses.replace(model, embedding_width=8)
    objective = CausalLMObjective() if model.causal else MaskedLMObjective()
    if family == "bilstm":
        objective = BidirectionalLMObjective()
    if family == "electra":
        objective = ReplacedTokensObjective(generator=16)
    if family == "diffusion":
        objective = DiffusionObjective(special_ids=(0, 1, 2, 3, 4), mask_id=4)
    if family == "causal phase":
        objective = PhasedObjective(StepSchedule((0, 9), ("causal", "mlm")))
    config = OptimizerConfig(learning_rate=0.01, warmup_steps=1, **optimizer)
    runtime = Runtime(layer_loop=loop, placement=sharding.OnMesh())
    chain = optim.build(config, bert.abstract_params(model, objective.heads))
    return step_lib.Plan(model, runtime, objective, config, chain, microbatches, mesh_config=mesh_config)


def step_on(shape: tuple[int, ...], plan: step_lib.Plan) -> tuple[Any, dict[str, Any], Any]:
    """The state and the metrics after a step on a number of devices, and the program."""
    mesh = sharding.make_mesh(MeshConfig(*shape), jax.devices()[: int(np.prod(shape))])
    sharding.check_model(plan.model, mesh)
    first = first_state(plan)
    with jax.set_mesh(mesh):
        shardings = sharding.shardings(mesh, first, shard_optimizer=plan.mesh_config.shard_optimizer)
        state = jax.tree.map(jax.device_put, first, shardings)
        batch = sharding.place(plan.objective.batch_at(0, packed_rows()), ROWS, mesh)
        arguments = (batch, jnp.float32(0), jax.device_put(jax.random.key(0), sharding.replicated(mesh)))
        program = step_lib.jitted(plan, mesh, state).lower(state, *arguments).compile()
        state, metrics = program(state, *arguments)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == shardings
    return state, jax.device_get(metrics), program


def first_state(plan: step_lib.Plan) -> Any:
    """The initial state, sampled by numpy because programs that sample take long to compile."""
    generator = np.random.default_rng(1)
    params = {}
    for path, leaf in layers.flatten(bert.abstract_params(plan.model, plan.objective.heads)).items():
        drawn = generator.normal(float(path.endswith("scale")), 0.02, leaf.shape)
        params[path] = drawn.astype(leaf.dtype)
    return jax.device_get(step_lib.initial_state(plan, layers.unflatten(params)))


@functools.cache
def alone(family: str, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """On one device. An unrolled loop and a sharded optimizer are held to the scan and to a whole one there, too."""
    return step_on(ONE, plan_of(family, **changes))[:2]


def assert_close(got: Any, wanted: Any) -> None:
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
    assert_close(momentum(state.optimizer_state), momentum(there.optimizer_state))
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
