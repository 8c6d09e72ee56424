"""The comparison of LoRA with full fine-tuning: its command lines, its figures, and a short run of it."""

import json
from pathlib import Path

import pytest
from random_checkpoints import random_checkpoint

from benchmarks import lora
from bert_jax import config as config_lib
from bert_jax.config import FinetuneConfig, ModelConfig
from bert_jax.interop import bert_jax_export
from bert_jax.interop.open_checkpoint import open_checkpoint

TINY = ModelConfig(vocab_size=131, layers=1, width=16, heads=2, feed_forward=16, max_positions=128)


@pytest.mark.parametrize("method", lora.METHODS)
def test_the_methods_are_configurations_that_differ_in_adapters_and_rate_alone(method, tmp_path):
    _, _, recipe, _, *overrides = lora.arguments_of("stsb", method, "base", tmp_path, seeds=5, steps=0, epochs=5)
    config = config_lib.load(FinetuneConfig, config_lib.read_flags(recipe.removeprefix("--config="), overrides))
    assert (config.seeds, config.epochs, config.steps) == ((5,), 5.0, 0)
    assert config.lora.rank == (0 if method == "full" else 8)
    assert len(config.lora.matrices) == {"full": 6, "lora": 2, "lora_all": 6}[method]


def test_a_difference_is_in_points_and_compared_with_the_target():
    def result(values: list[float]) -> dict:
        spread = {"mean": sum(values) / len(values), "std": 0.01, "values": values}
        return {"seeds": list(range(len(values))), "metrics": {"f1": spread}}

    found = lora.compare({"full": result([0.90, 0.92]), "lora": result([0.90, 0.905])}, "f1")
    assert found["full"] == {"mean": 91.0, "std": 1.0, "seeds": 2}
    assert found["lora"]["lost"] == 0.75 and found["lora"]["within_target"]
    assert not lora.compare({"full": result([0.92]), "lora": result([0.90])}, "f1")["lora"]["within_target"]
    assert "lost" not in lora.compare({"lora": result([0.90])}, "f1")["lora"]


@pytest.mark.slow
@pytest.mark.usefixtures("bert_jax_data", "one_device_processes")
def test_a_short_run_trains_two_methods_and_prints_their_difference(tmp_path: Path, capsys):
    bert_jax_export.write(random_checkpoint(tmp_path / "words", TINY), tmp_path / "start")
    options = {"model": tmp_path / "start", "runs": tmp_path / "runs", "tasks": "mrpc", "seeds": 1, "steps": 2}
    lora.main([*(f"--{key}={value}" for key, value in options.items()), "--methods", "full", "lora"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["mrpc"]
    assert found["full"]["seeds"] == found["lora"]["seeds"] == 1
    assert open_checkpoint(tmp_path / "runs" / "mrpc-lora", merged=False).model.lora.rank == 8
