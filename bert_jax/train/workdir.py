"""A workdir as a folder: its config.json, which says what it holds, and which checkpoints are in it.

    config.json             what was trained: WorkdirConfig
    tokenizer/              bert_jax.tokenizer
    checkpoints/STEP/       params, optimizer (absent in what convert and export write), average (where the run
                            keeps one), meta

A run adds metrics.jsonl, result.json and tensorboard/ (train/trainer.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from bert_jax import config as config_lib
from bert_jax.command import UserError
from bert_jax.config import ModelConfig
from bert_jax.model.heads import Heads
from bert_jax.storage.local import read_json, write_json

CONFIG_FILE, CHECKPOINTS = "config.json", "checkpoints"


@dataclass(frozen=True)
class WorkdirConfig:
    """What config.json of a workdir holds."""

    model: ModelConfig
    heads: Heads
    kind: str = "pretraining"  # or finetuning
    training: Mapping[str, Any] = field(default_factory=dict)  # the configuration of the run; empty after convert
    task: Mapping[str, Any] | None = None  # fine-tuning: name, kind, labels
    dtype: str = "float32"  # of the file that convert read


def write_config(workdir: str | Path, config: WorkdirConfig) -> None:
    """Writes WORKDIR/config.json, whole or not at all."""
    values = {
        "model": config_lib.to_dict(config.model),
        "heads": config.heads.to_json(),
        "kind": config.kind,
        "training": dict(config.training),
        "task": None if config.task is None else dict(config.task),
        "dtype": config.dtype,
    }
    target = Path(workdir) / CONFIG_FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    write_json(target, values)


def read_config(workdir: str | Path) -> WorkdirConfig:
    """Reads WORKDIR/config.json. Raises UserError when it is missing, damaged or not one of ours."""
    where = Path(workdir) / CONFIG_FILE
    if not where.exists():
        raise UserError(f"no {CONFIG_FILE} in {workdir}: not a workdir. Check the path")
    values = read_json(where)
    keys = set(WorkdirConfig.__dataclass_fields__)
    if set(values) != keys:
        raise UserError(f"{where} does not hold the keys {', '.join(sorted(keys))}: not a workdir of bert_jax")
    return WorkdirConfig(
        model=config_lib.load(ModelConfig, values["model"], f"{where}: model"),
        heads=config_lib.load(Heads, values["heads"], f"{where}: heads"),
        kind=values["kind"],
        training=values["training"],
        task=values["task"],
        dtype=values["dtype"],
    )


def saved_steps(workdir: str | Path) -> list[int]:
    """The whole checkpoints of a workdir, ascending."""
    directory = Path(workdir).absolute() / CHECKPOINTS
    return sorted(ocp.utils.checkpoint_steps(directory)) if directory.is_dir() else []


def latest_step(workdir: str | Path) -> int | None:
    """The newest whole checkpoint of a workdir, None when there is none."""
    return max(saved_steps(workdir), default=None)
