"""Which parameters of a workdir are meant: those of a step, their moving average, or the mean of several steps."""

import re
from pathlib import Path

import numpy as np

from bert_jax.command import UserError
from bert_jax.train import workdir as workdir_lib
from bert_jax.train.integrity import AVERAGE

MOVING = "ema"
HELP = (
    "ema (the moving average that the run kept) or last:K (the mean of the workdir's last K checkpoints); "
    "default: the parameters as they are"
)


def read_params(workdir: Path, step: int, average: str) -> dict[str, np.ndarray]:
    """The parameters of a workdir at a step by path, in host memory, or an average of them.

    average: empty, `ema`, or `last:K`, the mean of the K newest checkpoints up to the step (Junczys-Dowmunt et al.
    2016, section 3; Vaswani et al. 2017, section 6.1, took 5). Raises UserError for another word, for a run that kept
    no moving average, where there are fewer than K checkpoints, and for damaged ones.
    """
    if not average:
        return workdir_lib.read_params(workdir, step)
    if average == MOVING:
        return workdir_lib.read_params(workdir, step, AVERAGE)
    match = re.fullmatch(r"last:([1-9]\d*)", average)
    if not match:
        raise UserError(f"--average is {average!r}; use {MOVING}, or last:K as last:5")
    there = [saved for saved in workdir_lib.saved_steps(workdir) if saved <= step]
    if len(there) < (wanted := int(match[1])):
        raise UserError(
            f"--average is {average}, but {workdir} has {len(there)} checkpoints up to step {step}: {there}. "
            f"Use last:{len(there)}, or let the run keep more: --config.checkpoint.keep={wanted}"
        )
    return _mean(workdir, there[-wanted:])


def _mean(workdir: Path, steps: list[int]) -> dict[str, np.ndarray]:
    """One checkpoint in memory beside the sum, which is of float64."""
    sums: dict[str, np.ndarray] = {}
    for step in steps:
        for path, value in workdir_lib.read_params(workdir, step).items():
            sums[path] = np.add(sums.get(path, 0.0), value, dtype=np.float64)
    return {path: (total / len(steps)).astype(np.float32) for path, total in sums.items()}
