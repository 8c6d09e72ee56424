"""The parameters of a checkpoint alone, by path and in host memory: what is measured, exported or begun with."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

from bert_jax.command import UserError
from bert_jax.model.paths import unflatten
from bert_jax.train.checkpoint import Checkpoints
from bert_jax.train.restore import PARAMS, read_item, read_meta
from bert_jax.train.workdir import CHECKPOINTS, latest_step


def read_params(workdir: str | Path, step: int | None = None, item: str = PARAMS) -> dict[str, np.ndarray]:
    """The parameters of a step (None: the newest) by path, in host memory, verified, without the optimizer.

    item is PARAMS, or AVERAGE for their moving average. Raises UserError when there is no such checkpoint, it has no
    such item, or its files are damaged.
    """
    directory = Path(workdir).absolute() / CHECKPOINTS
    if step is None and (step := latest_step(workdir)) is None:
        raise UserError(f"no checkpoint in {directory}: none was saved yet. Train, or name another folder")
    if not (directory / str(step)).is_dir():
        raise UserError(f"no checkpoint of step {step} in {directory}. Name a step that is there, or the workdir")
    saved = read_meta(directory / str(step))["tensors"].get(item)
    if saved is None:
        raise UserError(
            f"checkpoint {directory / str(step)} has no moving average of its parameters: it is an export, or of a run "
            "without --config.optimizer.ema_decay. Leave --average out, or average checkpoints: --average last:K"
        )
    nested = unflatten(dict.fromkeys(saved, ocp.RestoreArgs(restore_type=np.ndarray)))
    return read_item(directory / str(step), item, saved, ocp.args.PyTreeRestore(restore_args=nested))


def write_params(
    workdir: str | Path, step: int, params: Mapping[str, np.ndarray], average: Mapping[str, np.ndarray] | None = None
) -> None:
    """Writes parameters by path, and their moving average if there is one, as a checkpoint without an optimizer.

    Returns when it is on disk.
    """
    nested = None if average is None else unflatten(dict(average))
    with Checkpoints(Path(workdir) / CHECKPOINTS, keep=0) as checkpoints:
        checkpoints.save(step, unflatten(dict(params)), None, {}, nested)
