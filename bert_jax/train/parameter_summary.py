"""Describes what a run is about to train: its parameters, and the memory that each device holds."""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.model import layers
from bert_jax.train import optim, sharding
from bert_jax.train.step import Plan

VERBOSE = "print a line for each parameter when a run begins: shape, sharding, weight decay, whether it learns"


def parameter_table(params: dict[str, Any], plan: Plan) -> list[str]:
    """Returns a table with one line per parameter. `params` are arrays with shardings.

    Columns: path, shape, dtype, sharding, weight decay, and whether or at which share of the rate it learns. Where the
    layers of a stack differ in decay or rate, the table gives their range.
    """
    factors = layers.flatten(plan.factors) if plan.factors is not None else {}
    decays = layers.flatten(optim.decays(plan.optimizer_config, params))
    rows = [("parameter", "shape", "dtype", "sharding", "decay", "learns")]
    for path, value in layers.flatten(params).items():
        shape = " x ".join(map(str, value.shape))
        decay = _range(decays[path])
        learns = _learning(factors.get(path, np.ones(()))) + _unfreezing(plan, path)
        rows.append((path, shape, str(value.dtype), _sharding(value), decay, learns))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return lines


def parameter_count(params: dict[str, Any]) -> str:
    """Returns a line with the number of parameters and their size."""
    total = sum(value.size for value in jax.tree.leaves(params))
    return f"{total:,} parameters, {total * 4 / 1e6:,.1f} MB in float32"


def device_memory_summary(state: Any, mesh: Mesh) -> str:
    """Returns one line: how much of a training state each device holds, and the largest replicated tensor.

    It also names the tensors that the rules would shard but the mesh does not divide.
    """
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator=layers.SEPARATOR): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    sizes = {
        name: leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for name, leaf in leaves.items()
    }
    line = f"each device holds {sum(sizes.values()) / 1e6:,.1f} MB of parameters and optimizer state"
    whole = [name for name, leaf in leaves.items() if leaf.sharding.is_fully_replicated]
    if whole:
        largest = max(whole, key=lambda name: sizes[name])
        line += f"; the largest replicated tensor is {largest}, {sizes[largest] / 1e6:,.3g} MB"
    if names := sharding.undivided(mesh, state):
        line += f"; the mesh does not divide {', '.join(names)}"
    return line


def _sharding(value: jax.Array) -> str:
    if value.sharding.is_fully_replicated:
        return "replicated"
    return str(getattr(value.sharding, "spec", value.sharding))


def _learning(factor: Any) -> str:
    """yes, no, the last K of the layers, or the share of the learning rate."""
    if not np.isin(factor, (0, 1)).all():
        return f"x {_range(factor)}"
    if np.all(factor):
        return "yes"
    learning = int(np.sum(factor))
    if not learning:
        return "no"
    return f"last {learning}" if np.all(np.ravel(factor)[-learning:]) else f"{learning} of {np.size(factor)}"


def _unfreezing(plan: Plan, path: str) -> str:
    """The step from which a parameter, or the layers of a stack, learn, where that is not the first."""
    if plan.unfreezing is None:
        return ""
    begins = layers.flatten(plan.unfreezing.begins).get(path)
    if begins is None or not np.any(begins):
        return ""
    return f" from step {' to '.join(map(str, dict.fromkeys((np.min(begins), np.max(begins)))))}"


def _range(values: Any) -> str:
    low, high = np.min(values), np.max(values)
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
