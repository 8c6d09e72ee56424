"""XLA's options for a step are those of the devices that it is compiled for, where there are others to talk to."""

from dataclasses import dataclass

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from bert_jax.config import OptimizerConfig
from bert_jax.model.runtime import Runtime
from bert_jax.train import compiler, steps
from bert_jax.train.objectives import MaskedLMObjective


@dataclass(frozen=True)
class Device:
    id: int
    device_kind: str
    platform: str = "tpu"
    process_index: int = 0


def mesh_of(kind: str, devices: int) -> Mesh:
    return Mesh(np.array([Device(number, kind) for number in range(devices)], dtype=object), ("data",))


def test_gradient_all_reduces_overlap_with_matmuls():
    options = compiler.options(mesh_of("TPU v5 lite", 4))
    assert options is not None and options["xla_enable_async_all_reduce"] == "true"


def test_one_device_and_other_kinds_keep_the_defaults():
    assert compiler.options(mesh_of("TPU v5 lite", 1)) is None
    assert compiler.options(mesh_of("TPU v4", 4)) is None
    assert compiler.options(mesh_of("NVIDIA H100 80GB HBM3", 8)) is None
    assert compiler.options(Mesh(np.array(jax.devices()), ("data",))) is None


@pytest.mark.parametrize(("kind", "off"), [("TPU v5p", 3), ("TPU v6 lite", 3), ("TPU7x", 5)])
@pytest.mark.parametrize("devices", [1, 4])
def test_what_libtpu_cannot_build_is_off_on_any_number_of_devices(kind, off, devices):
    options = compiler.options(mesh_of(kind, devices))
    assert options is not None and set(options.values()) == {"false"} and len(options) == off
    assert all("sparse" in name for name in options)


def test_the_options_are_left_out_without_overlap(monkeypatch, tiny_config):
    asked = []
    monkeypatch.setattr(compiler, "options", asked.append)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    for overlap in (False, True):
        plan = steps.Plan(
            tiny_config, Runtime(), MaskedLMObjective(), OptimizerConfig(), optax.identity(),
            overlap=overlap,
        )  # fmt: skip
        steps.jitted(plan, mesh, steps.initial_state(plan, {"kernel": jax.device_put(np.zeros(2))}))
        assert asked == [mesh] * overlap
