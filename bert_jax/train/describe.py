"""The lines that a run prints when it starts: from where it starts, what it trains, and on what.

`describe` is the entry point. With --verbose it adds a table of the parameters.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.model import layers
from bert_jax.model.attention import layer
from bert_jax.train import optim, sharding, workdir
from bert_jax.train.prepare import batch_length
from bert_jax.train.run import Run
from bert_jax.train.step import Plan, TrainState

VERBOSE = "print a line for each parameter when a run begins: shape, sharding, weight decay, whether it learns"


def describe(
    run: Run,
    plan: Plan,
    mesh: Mesh,
    state: TrainState,
    meta: Mapping[str, Any],
    differences: Sequence[str],
    ended: bool,
) -> list[str]:
    """Returns the lines with which a run starts.

    meta          the metadata of the checkpoint from which it resumes or is branched; empty: it begins
    differences   what has changed since that checkpoint, a line each
    ended         whether it stopped early there
    """
    lines = list(differences)
    if workdir.BRANCHED in meta:
        lines.insert(0, f"branching from {meta[workdir.BRANCHED]} into {run.workdir}")
    elif meta:
        begins = "nothing is left to train after" if ended else "resuming from"
        lines.insert(0, f"{begins} step {meta['step']} of {run.workdir}")
    lines += [] if ended else optimizer_warnings(run, meta)
    if run.length is not None:
        lines.append(f"a run of {run.length.tokens:,.0f} tokens: {run.length.steps:,} steps")
    lines += [*(run.describe_data(run.end, run.counted_from) if run.describe_data else ()), *run.notes]
    if not meta:
        lines += [*(parameter_table(state.params, plan) if run.verbose else []), parameter_count(state.params)]
    # Devices, mesh, dtype, layer loop and attention kernels. Memory is worth a line where it is divided.
    loop = "unrolled" if plan.runtime.unrolled(plan.model.layers) else "scanned"
    kernels = " and ".join(layer.kernels(plan.model, plan.runtime, batch_length(run.source, int(state.step))))
    lines.append(
        f"{mesh.size} x {jax.devices()[0].device_kind}, mesh {dict(mesh.shape)}, "
        f"compute {plan.runtime.compute_dtype}, layers {loop}, attention {kernels}"
    )
    return lines + ([device_memory_summary(state, mesh)] if mesh.size > 1 else [])


def optimizer_warnings(run: Run, meta: Mapping[str, Any]) -> list[str]:
    """Returns warnings about what is set in vain; none where a checkpoint is already at the end."""
    if 0 < run.end <= meta.get("step", 0):
        return []
    config = run.config.optimizer
    warnings = optim.warmup_warning(config, run.end), optim.weight_decay_warning(config, run.abstract_params())
    return [warning for warning in warnings if warning]


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
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


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


def describe_batch(batch: Any) -> str:
    """Returns the shape of a batch in words, and what a phase predicts."""
    predicts = f", predicting {batch.predicts}" if hasattr(batch, "predicts") else ""
    return f"batches of {batch.input_ids.shape[0]} rows of {batch.input_ids.shape[-1]} positions{predicts}"
