"""Runs of the commands in processes of their own, with a model so small that they are soon compiled and done."""

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECIPE = str(ROOT / "configs" / "bert_tiny.py")
TINY = tuple(f"--config.model.{change}" for change in ("layers=1", "width=32", "heads=4", "feed_forward=48"))


def environment(devices: int) -> dict[str, str]:
    """Of a process with so many CPU devices, which keeps and finds compiled programs where the other tests do."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"  # of two the last counts
    return os.environ | {"XLA_FLAGS": flags}
