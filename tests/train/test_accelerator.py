"""What a CPU and an accelerator compute in float32 is equal: losses and gradients of every family, and answers."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from families import FAMILIES, random_params
from model_answers import answers, write_models
from tiny_batches import lay, random_sequence

from bert_jax.config import AdamW
from bert_jax.lineage import BidirectionalLMObjective
from bert_jax.model import layers
from bert_jax.model.runtime import Runtime
from bert_jax.train import optim
from bert_jax.train import step as step_lib
from bert_jax.train.objectives import CausalLMObjective, MaskedLMObjective


def accelerator_of_this_machine() -> Any:
    accelerator = jax.devices()[0]
    if accelerator.platform == "cpu":
        pytest.skip("jax has no accelerator here; with one, run: make accelerator")
    return accelerator


def gradients(family: str, device: Any) -> dict[str, np.ndarray]:
    """The sums of the loss and the gradients of a batch, by a program in the form for a device."""
    config = FAMILIES[family]
    if config.encoder.kind == "bilstm":
        objective: Any = BidirectionalLMObjective()
    else:
        objective = CausalLMObjective() if config.causal else MaskedLMObjective()
    settings = AdamW()
    rows = [[random_sequence(length, 61, length) for length in lengths] for lengths in ([7], [15], [6, 8])]
    batch = lay(rows, 15, predictions=4)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        params, key, counts = random_params(config, objective.heads), jax.random.key(1), objective.counts(batch)
    runtime = Runtime(platform="cpu" if device.platform == "cpu" else "")
    plan = step_lib.Plan(config, runtime, objective, settings, optim.build(settings, params))
    given = jax.device_put((params, batch, counts, key), device)
    found, terms = jax.jit(functools.partial(step_lib.accumulate, plan))(*given)
    losses = {f"loss of {name}": term.loss for name, term in terms.items()}
    return {name: np.asarray(value) for name, value in (layers.flatten(found) | losses).items()}


@pytest.mark.accelerator
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradients_of_a_family_are_those_of_a_cpu(family: str) -> None:
    accelerator = accelerator_of_this_machine()
    ours, theirs = (gradients(family, device) for device in (accelerator, jax.local_devices(backend="cpu")[0]))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        scale = max(1.0, float(np.abs(value).max()))
        np.testing.assert_allclose(ours[name] / scale, value / scale, atol=1e-5, err_msg=name)


def assert_near(ours: Any, theirs: Any, where: str) -> None:
    """Asserts that two JSON values are equal, floats to within 1e-4."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for name, value in theirs.items():
            assert_near(ours[name], value, f"{where}.{name}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), where
        for index, value in enumerate(theirs):
            assert_near(ours[index], value, f"{where}[{index}]")
    else:
        assert ours == (pytest.approx(theirs, abs=1e-4) if isinstance(theirs, float) else theirs), where


@pytest.mark.accelerator
def test_models_answer_as_on_a_cpu(tmp_path: Path) -> None:
    accelerator_of_this_machine()
    write_models(tmp_path)
    script = Path(__file__).parent.parent / "helpers" / "model_answers.py"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, script, tmp_path], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    assert_near(json.loads(json.dumps(answers(tmp_path))), json.loads(done.stdout), "answers")
