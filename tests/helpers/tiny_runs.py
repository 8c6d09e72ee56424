"""Runs of the commands in separate processes, with a model that compiles and trains fast."""

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
RECIPE = str(ROOT / "configs" / "bert_tiny.py")
TINY = tuple(f"--config.model.{change}" for change in ("layers=1", "width=32", "heads=4", "feed_forward=48"))


def environment(devices: int) -> dict[str, str]:
    """The environment of a process with this number of CPU devices that shares the tests' compilation cache."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"  # of two the last counts
    return os.environ | {"XLA_FLAGS": flags}


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
