"""Starts a run at a checkpoint of another run, with its optimizer state and step (config.branch_from).

Warmup-stable-decay trains a trunk at a constant rate, and a decay from any of its checkpoints (Hu et al. 2024, section
4). A branch is such a decay in a workdir of its own: step, optimizer state, average, token count and the order of the
data continue, so that a branch with unchanged settings equals the run that went on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bert_jax.command import UserError
from bert_jax.storage.location import Location, absolute, check_access, location
from bert_jax.train.integrity import read_meta, saved_steps, signature
from bert_jax.train.workdir import CHECKPOINTS

RECORD = "branch"  # the key of a provenance that names the checkpoint from which a run was branched
# Keys that a branch may change without config.allow_changes: what a phase sets. With rotary positions the shape of no
# parameter depends on the length and the bases, which change for longer rows (Warner et al. 2024, section 3.2).
MAY_CHANGE = (
    *("data", "batch_size", "batch_schedule", "objective"),
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
        return {"step": self.step, "sha256": self.sha256, "changes": changes}


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
