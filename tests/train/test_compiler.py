"""XLA's options are those of the devices that a program is compiled for, in training and evaluation."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from bert_jax.config import MeshConfig, OptimizerConfig
from bert_jax.model.runtime import Runtime
from bert_jax.tasks.inference import Predictor
from bert_jax.tasks.kinds.classification import ClassificationTask
from bert_jax.tasks.rows import Split, TaskRows
from bert_jax.train import sharding
from bert_jax.train import step as step_lib
from bert_jax.train.evaluation import make_evaluator
from bert_jax.train.objectives import MaskedLMObjective


@dataclass(frozen=True)
class Device:
    id: int
    device_kind: str
    platform: str = "tpu"
    process_index: int = 0


def mesh_of(kind: str, devices: int) -> Mesh:
    return Mesh(np.array([Device(number, kind) for number in range(devices)], dtype=object), ("data",))


def test_gradient_all_reduces_overlap_with_matmuls_where_that_is_asked_for():
    options = sharding.options(mesh_of("TPU v5 lite", 4), overlap=True)
    assert options is not None and options["xla_enable_async_all_reduce"] == "true"
    assert sharding.options(mesh_of("TPU v5 lite", 4)) is None


def test_one_device_and_other_kinds_keep_the_defaults():
    assert sharding.options(mesh_of("TPU v5 lite", 1), overlap=True) is None
    assert sharding.options(mesh_of("TPU v4", 4), overlap=True) is None
    assert sharding.options(mesh_of("NVIDIA H100 80GB HBM3", 8), overlap=True) is None
    assert sharding.options(Mesh(np.array(jax.devices()), ("data",)), overlap=True) is None


@pytest.mark.parametrize(("kind", "off"), [("TPU v5p", 3), ("TPU v6 lite", 3), ("TPU7x", 5)])
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_what_libtpu_cannot_build_is_off_in_every_program(kind, off, devices, overlap):
    options = sharding.options(mesh_of(kind, devices), overlap=overlap)
    assert options is not None and set(options.values()) == {"false"} and len(options) == off
    assert all("sparse" in name for name in options)


def train(plan, mesh):
    step_lib.jitted(plan, mesh, step_lib.initial_state(plan, {"kernel": jax.device_put(np.zeros(2))}))


def evaluate(plan, mesh):
    make_evaluator(plan, mesh, lambda *_: iter(()), 8)


def predict(plan, mesh):
    empty, none = np.zeros(0, np.int32), Split(Path("dev.tsv"), (), labelled=False)
    rows = TaskRows(
        input_ids=empty, offsets=np.zeros(1, np.int64), first_lengths=empty, pad_id=0, truncated=0, split=none
    )
    Predictor(ClassificationTask("own", ("no", "yes")), plan.model, plan.runtime, mesh).answers({}, rows, 8)


@pytest.mark.parametrize(("compiled", "trains"), [(train, True), (evaluate, False), (predict, False)])
def test_all_programs_of_training_and_evaluation_have_the_options(compiled, trains, monkeypatch, tiny_config):
    asked = []
    monkeypatch.setattr(sharding, "options", lambda mesh, overlap=False: asked.append((mesh, overlap)))
    mesh = sharding.make_mesh(MeshConfig())
    config = dataclasses.replace(tiny_config, vocab_size=900)  # of no other test, whose programs are cached
    compiled(step_lib.Plan(config, Runtime(), MaskedLMObjective(), OptimizerConfig(), optax.identity()), mesh)
    assert asked == [(mesh, trains)]
