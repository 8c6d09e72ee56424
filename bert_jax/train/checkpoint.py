"""Checkpoints: Orbax behind one file, and the config.json that says what a workdir holds.

A workdir is

    config.json             what was trained: WorkdirConfig
    tokenizer/              bert_jax.tokenizer
    checkpoints/STEP/       params, optimizer (absent in what convert and export write), average (where the run
                            keeps one), meta

Orbax writes a step under a temporary name, in the background, and renames it at the end, so a half-written
one is never seen. Beside the caller's meta each step keeps a fingerprint of every tensor, computed where the
tensor lives when it is saved and again when it is read.
"""

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from bert_jax import config as config_lib
from bert_jax.command import UserError
from bert_jax.config import ModelConfig
from bert_jax.files import read_json, write_json
from bert_jax.model.heads import Heads
from bert_jax.model.paths import unflatten
from bert_jax.train.integrity import damaged, describe, ignore_closed_loops, read_or_explain, signature

CONFIG_FILE, CHECKPOINTS = "config.json", "checkpoints"
REMOVED = "removed"  # where steps that are no longer kept go, to be deleted
PARAMS, OPTIMIZER, AVERAGE, META = "params", "optimizer", "average", "meta"  # the items of a step


class Restored(NamedTuple):
    params: PyTree
    optimizer_state: PyTree
    average: PyTree | None
    meta: dict[str, Any]


class Checkpoints:
    """The checkpoints of one workdir, written asynchronously; the newest `keep` stay (0: all).

    Every process of a run makes one and calls each method at the same point. Use it in a `with`, or close it.
    """

    def __init__(self, directory: str | Path, keep: int) -> None:
        if keep < 0:
            raise UserError(f"checkpoint.keep is {keep}; use 1 or more, or 0 to keep all")
        ignore_closed_loops()
        self._quiet = _OneMessage()
        logging.getLogger("absl").addFilter(self._quiet)
        self.directory = Path(directory).absolute()
        self._manager = ocp.CheckpointManager(
            self.directory,
            item_names=(PARAMS, OPTIMIZER, AVERAGE, META),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep or None, cleanup_tmp_directories=True, todelete_subdir=REMOVED
            ),
        )
        self._remove_old()

    def save(
        self,
        step: int,
        params: PyTree,
        optimizer_state: PyTree | None,
        meta: Mapping[str, Any],
        average: PyTree | None = None,
    ) -> None:
        """Begins to save; returns once the tensors may change (be donated). `meta` holds JSON values.

        A step that was saved already stays as it is. An optimizer_state of None is left out: a checkpoint to
        start from, not to go on from. So is an average of None. A failure of the save before is raised here or by
        wait: OSError for a full disk, with the older checkpoints whole.
        """
        if step in self._manager.all_steps():
            return
        trees = {PARAMS: params, OPTIMIZER: optimizer_state, AVERAGE: average}
        named = {item: _named(tree) for item, tree in trees.items() if tree is not None}
        document = {
            "meta": dict(meta),
            "tensors": {item: describe(tensors) for item, tensors in named.items()},
        }
        items = {item: ocp.args.PyTreeSave(unflatten(tensors)) for item, tensors in named.items()}
        signed = document | {"sha256": signature(document)}
        composite = ocp.args.Composite(**items, **{META: ocp.args.JsonSave(signed)})
        self.wait()  # for the save before, so that a failure of it is raised from here
        self._remove_old()
        with self._disk_explained():
            self._manager.save(step, args=composite, force=True)

    def steps(self) -> list[int]:
        """The steps that are whole, ascending; not one that is still being written."""
        return sorted(ocp.utils.checkpoint_steps(self.directory))

    def latest_step(self) -> int | None:
        """The newest whole step, None when there is none."""
        return max(self.steps(), default=None)

    def meta(self, step: int) -> dict[str, Any]:
        """What was said of a step when it was saved."""
        return _read_meta(self.directory / str(step))["meta"]

    def restore(self, step: int, params: PyTree, optimizer_state: PyTree, average: PyTree | None = None) -> Restored:
        """Reads a step straight into the memory that the shardings name, and verifies it.

        `params`, `optimizer_state` and `average` are trees of jax.ShapeDtypeStruct with shardings, of the structure
        wanted back (optax's NamedTuples included). An average of None is not read; one that the step does not
        hold comes back as None. Raises UserError for a tensor that is missing, extra, or
        of another shape or dtype (named), and for damaged files (naming the checkpoint and the one before).
        """
        directory = self.directory / str(step)
        document = _read_meta(directory)
        tensors = document["tensors"]
        if OPTIMIZER not in tensors:
            raise UserError(
                f"checkpoint {directory} holds parameters only, nothing to go on from. "
                f"Start a new workdir with --config.init_from={self.directory.parent}"
            )
        if AVERAGE not in tensors:
            average = None
        return Restored(
            params=_read_into(directory, PARAMS, tensors[PARAMS], params),
            optimizer_state=_read_into(directory, OPTIMIZER, tensors[OPTIMIZER], optimizer_state),
            average=None if average is None else _read_into(directory, AVERAGE, tensors[AVERAGE], average),
            meta=document["meta"],
        )

    def wait(self) -> None:
        """Until the last save is on disk."""
        with self._disk_explained():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then frees the background threads."""
        try:
            self.wait()
            self._remove_old()
        finally:
            self._manager.close()
            logging.getLogger("absl").removeFilter(self._quiet)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _remove_old(self) -> None:
        """Deletes what is no longer kept. It was renamed first: a step that stands is whole, whenever we are killed."""
        if jax.process_index() == 0:
            shutil.rmtree(self.directory / REMOVED, ignore_errors=True)

    @contextlib.contextmanager
    def _disk_explained(self) -> Iterator[None]:
        """Turns the storage library's text of an operating-system error back into the OSError that it was."""
        try:
            yield
        except ValueError as error:
            if found := re.search(r"os_error_code='(\d+)'", str(error)):
                code = int(found.group(1))
                raise OSError(code, os.strerror(code), str(self.directory)) from error
            raise


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
        "heads": config_lib.to_dict(config.heads),
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


def latest_step(workdir: str | Path) -> int | None:
    """The newest whole checkpoint of a workdir, None when there is none."""
    directory = Path(workdir).absolute() / CHECKPOINTS
    return max(ocp.utils.checkpoint_steps(directory), default=None) if directory.is_dir() else None


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
    saved = _read_meta(directory / str(step))["tensors"].get(item)
    if saved is None:
        raise UserError(
            f"checkpoint {directory / str(step)} has no moving average of its parameters: the run had no "
            "--config.optimizer.ema_decay. Leave --average out, or average checkpoints: --average last:K"
        )
    nested = unflatten(dict.fromkeys(saved, ocp.RestoreArgs(restore_type=np.ndarray)))
    return _read_item(directory / str(step), item, saved, ocp.args.PyTreeRestore(restore_args=nested))


def write_params(workdir: str | Path, step: int, params: Mapping[str, np.ndarray]) -> None:
    """Writes parameters by path as a checkpoint without an optimizer; returns when it is on disk."""
    with Checkpoints(Path(workdir) / CHECKPOINTS, keep=0) as checkpoints:
        checkpoints.save(step, unflatten(dict(params)), None, {})


def _named(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by path: embeddings/token/table, for optax 0/mu/embeddings/token/table."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _read_into(directory: Path, item: str, saved: Mapping[str, Any], wanted: PyTree) -> PyTree:
    """Reads one item into the shardings and the structure of an abstract tree."""
    named = _named(wanted)
    _check_same(directory, item, saved, named)
    nested = unflatten(
        {
            name: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
            for name, leaf in named.items()
        }
    )
    restored = _read_item(directory, item, saved, ocp.args.PyTreeRestore(restore_args=nested))
    return jax.tree.unflatten(jax.tree.structure(wanted), [restored[name] for name in named])


def _check_same(directory: Path, item: str, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    advice = "Go on with the configuration it was made with, or name a new workdir"
    if missing := [name for name in wanted if name not in saved]:
        raise UserError(f"checkpoint {directory} has no tensor {item}/{missing[0]} ({len(missing)} missing). {advice}")
    if extra := [name for name in saved if name not in wanted]:
        raise UserError(
            f"checkpoint {directory} has a tensor {item}/{extra[0]} too many ({len(extra)} extra). {advice}"
        )
    for name, tensor in wanted.items():
        got = f"{saved[name]['dtype']}{saved[name]['shape']}"
        if got != (want := f"{tensor.dtype}{list(tensor.shape)}"):
            raise UserError(f"checkpoint {directory}: tensor {item}/{name} is {got}, wanted {want}. {advice}")


def _read_item(directory: Path, item: str, saved: Mapping[str, Any], args: ocp.args.PyTreeRestore) -> dict[str, Any]:
    """Reads one item of a step by path, and compares the fingerprints."""

    def read() -> dict[str, Any]:
        with ocp.PyTreeCheckpointer() as reader:
            return _named(reader.restore(directory / item, args=args))

    restored = read_or_explain(directory, read)
    for name, found in describe(restored).items():
        if found != saved[name]:
            raise damaged(directory, f"{item}/{name} does not have the content that was saved")
    return restored


def _read_meta(directory: Path) -> dict[str, Any]:
    def read() -> dict[str, Any]:
        with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
            document = reader.restore(directory / META)
        if document.pop("sha256") != signature(document):
            raise ValueError("meta does not have the content that was saved")
        return document

    return read_or_explain(directory, read)


class _OneMessage(logging.Filter):
    """Drops the stack traces that Orbax's threads log of a failure which they also raise to the caller."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and "orbax" in record.pathname)
