"""Law 3: losses and gradients equal those of one device for any mesh of eight, family and layer loop."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from tiny_steps import MESHES, ONE, ZERO_1, first_state, plan_of, step_on

from bert_jax.config import Lamb, Muon
from bert_jax.model import layers

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
