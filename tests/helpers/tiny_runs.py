"""Runs of the commands in separate processes, with a model that compiles and trains fast."""

import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
RECIPE = str(ROOT / "configs" / "bert_tiny.py")
TINY = tuple(f"--config.model.{change}" for change in ("layers=1", "width=32", "heads=4", "feed_forward=48"))


def environment(devices: int) -> dict[str, str]:
    """The environment of a process with this number of CPU devices that shares the tests' compilation cache."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"  # of two the last counts
    return os.environ | {"XLA_FLAGS": flags}


def untimed_log(workdir: Path) -> list[dict[str, Any]]:
    """The lines of a run's log without the values that no two runs share."""
    from bert_jax.train import metrics  # not for every test: conftest.py imports this module

    return [{k: v for k, v in line.items() if k not in metrics.TIMED} for line in metrics.read_metrics(workdir)]


def arguments(shards: Path, workdir: Path, *overrides: str) -> list[str]:
    """The command line of a pretraining run of four steps."""
    return [
        f"--config={RECIPE}",
        f"--workdir={workdir}",
        f"--config.data.train={shards}",
        "--config.batch_size=16",
        "--config.steps=4",
        "--config.log_every=2",
        *overrides,
    ]
