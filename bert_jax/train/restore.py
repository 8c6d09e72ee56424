"""Reading one step of a checkpoint: its items by path, each tensor compared with what was saved."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from bert_jax.command import UserError
from bert_jax.model.paths import unflatten
from bert_jax.train.integrity import damaged, describe, read_or_explain, signature

PARAMS, OPTIMIZER, AVERAGE, META = "params", "optimizer", "average", "meta"  # the items of a step


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by path: embeddings/token/table, for optax 0/mu/embeddings/token/table."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def read_into(directory: Path, item: str, saved: Mapping[str, Any], wanted: PyTree) -> PyTree:
    """Reads one item into the shardings and the structure of an abstract tree."""
    named = named_leaves(wanted)
    _check_same(directory, item, saved, named)
    nested = unflatten(
        {
            name: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
            for name, leaf in named.items()
        }
    )
    restored = read_item(directory, item, saved, ocp.args.PyTreeRestore(restore_args=nested))
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


def read_item(directory: Path, item: str, saved: Mapping[str, Any], args: ocp.args.PyTreeRestore) -> dict[str, Any]:
    """Reads one item of a step by path, and compares the fingerprints."""

    def read() -> dict[str, Any]:
        with ocp.PyTreeCheckpointer() as reader:
            return named_leaves(reader.restore(directory / item, args=args))

    restored = read_or_explain(directory, read)
    for name, found in describe(restored).items():
        if found != saved[name]:
            raise damaged(directory, f"{item}/{name} does not have the content that was saved")
    return restored


def read_meta(directory: Path) -> dict[str, Any]:
    def read() -> dict[str, Any]:
        with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
            document = reader.restore(directory / META)
        if document.pop("sha256") != signature(document):
            raise ValueError("meta does not have the content that was saved")
        return document

    return read_or_explain(directory, read)
