"""Starts a run at a checkpoint of another run, with its optimizer state and step (config.branch_from).

Warmup-stable-decay trains a trunk at a constant rate, and a decay from any of its checkpoints (Hu et al. 2024, section
4). A branch is such a decay in a workdir of its own: step, optimizer state, average, token count and the order of the
data continue, so that a branch with unchanged settings equals the run that went on.

The tokens before a step are a function of the step and of the data and batches from step 0 on (train/token_length.py).
A branch with other data or batches, or a run that resumes with them, therefore begins with the count that the
checkpoint records, and adds to it.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bert_jax.command import UserError
from bert_jax.data.batch_schedule import batch_schedule
from bert_jax.storage.location import Location, absolute, location
from bert_jax.storage.stores import check_access
from bert_jax.train.orbax_io import read_meta, saved_steps, signature
from bert_jax.train.run import TOKENS_BEFORE, Run
from bert_jax.train.workdir import CHECKPOINTS

RECORD = "branch"  # the key of a provenance that names the checkpoint from which a run was branched
COUNTED = "counted_from"  # the key of a provenance that records the step at which data or batches last changed
BRANCHED = "branched_from"  # the key in the metadata of a run that begins at a checkpoint of another run
# The beginnings of the keys of a provenance that say what the rows of a step are read from.
PHASES = "data.phases."
READ_FROM = ("data.train", "data.mixture", PHASES)
# Keys that a branch may change without config.allow_changes: what a phase sets. With rotary positions the shape of no
# parameter depends on the length and the bases, which change for longer rows (Warner et al. 2024, section 3.2).
MAY_CHANGE = (
    *("data", "batch_size", "batch_schedule", "objective", "eval.max_rows"),
    *("model.rotary_base", "model.rotary_base_local", "model.max_positions"),
    *(f"optimizer.{key}" for key in ("learning_rate", "schedule", "final_share", "decay_share", "decay_tokens")),
    *(f"optimizer.{key}" for key in ("warmup_steps", "warmup_share", "warmup_tokens")),
)


@dataclass(frozen=True)
class Branch:
    """The checkpoint at which a run begins."""

    directory: Location  # WORKDIR/checkpoints/STEP
    meta: Mapping[str, Any]
    sha256: str  # of the metadata, which holds a fingerprint of each tensor

    @property
    def step(self) -> int:
        return int(self.directory.name)

    def record(self, changes: list[str]) -> dict[str, Any]:
        """Returns what a checkpoint of the branch records of its origin, as JSON values."""
        return {"step": self.step, "sha256": self.sha256, "changes": changes, "tokens": self.tokens}

    @property
    def tokens(self) -> float:
        """How many tokens the steps before this one have read."""
        return float(self.meta[TOKENS_BEFORE])

    def check_left(self, run: Run) -> None:
        """Raises UserError where the length of a branch is used up before its first step."""
        steps, minutes, seconds = run.config.steps, run.config.budget_minutes, self.meta.get("seconds", 0.0)
        at, found = f"branch_from is at step {self.step}", ""
        if run.length is not None and self.tokens >= run.length.tokens:
            at += f", which has read {self.tokens:,.0f} tokens"
            found, key = f"tokens is {run.length.tokens:,.0f}", "tokens"
        elif 0 < steps <= self.step:
            found, key = f"steps is {steps}", "steps"
        elif 0 < minutes <= seconds / 60 and not run.config.budget_replay:
            at += f", after {seconds / 60:.4g} minutes of training"
            found, key = f"budget_minutes is {minutes:g}", "budget_minutes"
        if found:
            raise UserError(
                f"{at}, but {found}; lengths count from the beginning of the first run. Set --config.{key} to more, "
                "or name an earlier checkpoint"
            )


def checkpoint_folder(path: str) -> Location:
    """Returns WORKDIR/checkpoints/STEP as an absolute path, whether it exists or not.

    Raises UserError where branch_from has another form.
    """
    directory = absolute(location(path))
    check_access(directory)
    if directory.parent.name != CHECKPOINTS or not directory.name.isdecimal():
        steps = ", ".join(map(str, saved_steps(directory / CHECKPOINTS))) if directory.is_dir() else ""
        known = f"; its steps are {steps}" if steps else ""
        raise UserError(f"branch_from is {path}, which names no step. Use WORKDIR/{CHECKPOINTS}/STEP{known}")
    return directory


def open_branch(path: str) -> Branch:
    """Reads the metadata of WORKDIR/checkpoints/STEP, and changes nothing there: its run may still be training.

    Raises UserError where the path is not such a folder, and DamagedCheckpoint for damaged metadata.
    """
    directory = checkpoint_folder(path)
    if int(directory.name) not in (saved := saved_steps(directory.parent)):
        steps = ", ".join(map(str, saved)) or "none"
        raise UserError(
            f"branch_from: no checkpoint {path}; the steps there are {steps}. Keep more of them with "
            "--config.checkpoint.keep_every"
        )
    document = read_meta(directory)
    return Branch(directory, document["meta"], signature(document))


def counting_on(run: Run, provenance: dict[str, Any], meta: Mapping[str, Any]) -> Run:
    """Returns a run whose tokens and epochs count on from the step at which its data or batches last changed.

    provenance   of the run, in which that step is recorded
    meta         the metadata of the checkpoint from which the run resumes or is branched; empty: it begins
    """
    count = run.tokens_before
    if count is None:
        return run
    there = meta.get("provenance", {})
    counted = there.get(COUNTED)
    if meta:
        step: int = meta["step"]
        if _read_before(step, there["configuration"]) != _read_before(step, provenance["configuration"]):
            counted = {"step": step, "tokens": meta[TOKENS_BEFORE]}
    if counted is not None:
        provenance[COUNTED] = counted
        run = dataclasses.replace(run, counted_from=counted["step"])
    recorded = counted or provenance.get(RECORD)
    if recorded is None:
        return run
    more = recorded["tokens"] - count(recorded["step"])  # exactly 0 where data and batches are those of that step

    def before(step: int) -> float:
        return more + count(step)

    length = None if run.length is None else dataclasses.replace(run.length, before=before)
    return dataclasses.replace(run, tokens_before=before, length=length)


def check_origin(path: str, recorded: Mapping[str, Any] | None, workdir: Location) -> None:
    """Raises UserError when a workdir that has checkpoints was not branched from the checkpoint that is named.

    recorded   the RECORD of the newest checkpoint; None: it is no branch
    A checkpoint that is no longer there is not compared.
    """
    if recorded is None:
        raise UserError(
            f"branch_from is {path}, but {workdir} has checkpoints of a run that did not begin there. Name another "
            "--workdir, or leave out branch_from"
        )
    if location(path).is_dir() and (named := open_branch(path)).sha256 != recorded["sha256"]:
        raise UserError(
            f"{workdir} was branched from another checkpoint (of step {recorded['step']}) than {named.directory}. Name "
            "another --workdir, or that checkpoint"
        )


def _read_before(step: int, configuration: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """The part of a provenance's configuration that decides what the steps before one read: data and batch sizes."""
    data = {key: value for key, value in configuration.items() if key.startswith(READ_FROM) and value}
    data = {key: value for key, value in data.items() if not key.startswith(PHASES) or int(key.split(".")[2]) < step}
    schedule = batch_schedule(configuration.get("batch_schedule", ""), configuration["batch_size"])
    sizes = [(first, rows) for first, rows in zip(schedule.steps, schedule.values, strict=True) if first < step]
    return data, [next(group) for _, group in itertools.groupby(sizes, key=lambda size: size[1])]
