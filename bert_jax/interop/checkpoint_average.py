"""Reads the parameters of a workdir: those of a step, their moving average, or the mean of several checkpoints."""

import argparse
import re

import numpy as np

from bert_jax.command import UserError
from bert_jax.storage.location import Location
from bert_jax.train import workdir as workdir_lib
from bert_jax.train.orbax_io import AVERAGE

FLAG = "--average"
MOVING_AVERAGE = "ema"
HELP = (
    "ema (the moving average that the run kept) or last:K (the mean of the workdir's last K checkpoints); "
    "default: the parameters themselves"
)


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Adds --average, which every command that takes a CHECKPOINT has."""
    parser.add_argument(FLAG, default="", metavar="ema|last:K", help=HELP)


def read_params(workdir: Location, step: int, average: str, key: str = FLAG) -> dict[str, np.ndarray]:
    """Returns the parameters of a workdir at a step, or an average of them, by path in host memory.

    average is empty, `ema`, or `last:K` for the mean of the K newest checkpoints up to the step
    (Junczys-Dowmunt et al. 2016, section 3; Vaswani et al. 2017, section 6.1, use 5). Errors name it by
    key. Raises UserError for any other value, for a run that kept no moving average, if there are fewer
    than K checkpoints, and for damaged ones.
    """
    if not average:
        return workdir_lib.read_params(workdir, step)
    if average == MOVING_AVERAGE:
        return workdir_lib.read_params(workdir, step, AVERAGE)
    match = re.fullmatch(r"last:([1-9]\d*)", average)
    if not match:
        raise UserError(f"unknown {key} {average!r}; use {MOVING_AVERAGE}, or last:K such as last:5")
    steps = [saved for saved in workdir_lib.saved_steps(workdir) if saved <= step]
    if len(steps) < (wanted := int(match[1])):
        raise UserError(
            f"{key} is {average}, but {workdir} has {len(steps)} checkpoints up to step {step}: {steps}. "
            f"Use last:{len(steps)}, or keep more checkpoints in the run: --config.checkpoint.keep={wanted}"
        )
    return _mean(workdir, steps[-wanted:])


def _mean(workdir: Location, steps: list[int]) -> dict[str, np.ndarray]:
    """Averages checkpoints in float64, with one of them in memory at a time next to the sum."""
    sums: dict[str, np.ndarray] = {}
    for step in steps:
        for path, value in workdir_lib.read_params(workdir, step).items():
            sums[path] = np.add(sums.get(path, 0.0), value, dtype=np.float64)
    # np.asarray, because numpy makes scalars of sums without axes.
    return {path: np.asarray(total / len(steps), np.float32) for path, total in sums.items()}
