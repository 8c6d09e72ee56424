"""The lines printed when a run starts: its origin, its parameters, and its devices."""

import math
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.config import PretrainConfig, from_flags
from bert_jax.model import layers
from bert_jax.model.attention import layer
from bert_jax.train import optim, run_size, sharding, workdir
from bert_jax.train.orbax_io import named_leaves
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

    Args:
        meta: the metadata of the checkpoint from which it resumes or is branched; empty: it begins.
        differences: the changes since that checkpoint, a line each.
        ended: whether it stopped early there.
    """
    # The checkpoint comes first, then how the run differs from it.
    lines = list(differences)
    if workdir.BRANCHED in meta:
        lines.insert(0, f"branching from {meta[workdir.BRANCHED]} into {run.workdir}")
    elif meta:
        begins = "nothing is left to train after" if ended else "resuming from"
        lines.insert(0, f"{begins} step {meta['step']} of {run.workdir}")
    # Warnings come after the changes, which may have caused them.
    lines += [] if ended else [*optimizer_warnings(run, meta), *size_warnings(run, int(state.step), mesh.size)]
    if run.length is not None:
        lines.append(f"a run of {run.length.tokens:,.0f} tokens: {run.length.steps:,} steps")
    lines += [*(run.describe_data(run.end, run.counted_from) if run.describe_data else ()), *run.notes]
    if not meta:
        total = sum(value.size for value in jax.tree.leaves(state.params))
        lines += parameter_table(state.params, plan) if run.verbose else []
        lines.append(f"{total:,} parameters, {total * 4 / 1e6:,.1f} MB in float32")
    loop = "unrolled" if plan.runtime.unrolled(plan.model.layers) else "scanned"
    kernels = " and ".join(layer.kernels(plan.model, plan.runtime, batch_length(run.source, int(state.step))))
    lines.append(
        f"{mesh.size} x {jax.devices()[0].device_kind}, mesh {dict(mesh.shape)}, "
        f"compute {plan.runtime.compute_dtype}, layers {loop}, attention {kernels}"
    )
    # Memory is worth a line if it is divided.
    return lines + ([device_memory_summary(state, mesh)] if mesh.size > 1 else [])


def optimizer_warnings(run: Run, meta: Mapping[str, Any]) -> list[str]:
    """Returns warnings about settings without effect; none if the checkpoint is already at the end."""
    if 0 < run.end <= meta.get("step", 0):
        return []
    config = run.config.optimizer
    warnings = optim.warmup_warning(config, run.end), optim.weight_decay_warning(config, run.abstract_params())
    return list(filter(None, warnings))


def size_warnings(run: Run, step: int, devices: int) -> list[str]:
    """Returns warnings about few positions for each device, and about many times the recipe's rows."""
    requested = run.requested or run.config
    warnings = [run_size.few_positions(run.source.rows_at(step), batch_length(run.source, step), devices)]
    if run.recipe and isinstance(requested, PretrainConfig):
        recipe = from_flags(PretrainConfig, run.recipe)
        warnings.append(run_size.many_rows(requested, recipe, PurePath(run.recipe).stem))
    return list(filter(None, warnings))


def parameter_table(params: dict[str, Any], plan: Plan) -> list[str]:
    """Makes a table with one line per parameter; `params` are arrays with shardings.

    If the layers of a stack differ in weight decay or rate, the table gives their range. `learns` is yes, no, the last
    K layers, or the share of the learning rate, and the step from which the parameter trains, if not the first.
    """
    factors = layers.flatten(plan.factors) if plan.factors is not None else {}
    decays = layers.flatten(optim.decays(plan.optimizer_config, params))
    begins = layers.flatten(plan.unfreezing.begins) if plan.unfreezing is not None else {}
    rows = [("parameter", "shape", "dtype", "sharding", "decay", "learns")]
    for path, value in layers.flatten(params).items():
        shape = " x ".join(map(str, value.shape))
        placed = value.sharding
        sharded = "replicated" if placed.is_fully_replicated else str(getattr(placed, "spec", placed))
        factor = factors.get(path, np.ones(()))
        count = int(np.sum(factor))
        # One factor for all layers, [], or one for each, [L, 1, ...]. Only factors of 0 and 1 select layers; others are
        # shown as a range.
        if not np.isin(factor, (0, 1)).all():
            learns = f"x {_range(factor)}"
        elif np.all(factor) or not count:
            learns = "yes" if count else "no"
        else:
            learns = f"last {count}" if np.all(np.ravel(factor)[-count:]) else f"{count} of {np.size(factor)}"
        if np.any(begins.get(path, 0)):
            learns += f" from step {' to '.join(map(str, np.unique((begins[path].min(), begins[path].max()))))}"
        rows.append((path, shape, str(value.dtype), sharded, _range(decays[path]), learns))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def device_memory_summary(state: Any, mesh: Mesh) -> str:
    """Describes a training state's memory per device, its largest replicated tensor, and tensors left undivided."""
    # A shard's shape is the array's own if it is replicated, which thus counts in full.
    leaves = named_leaves(state)
    sizes = {
        name: leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for name, leaf in leaves.items()
    }
    line = f"each device holds {sum(sizes.values()) / 1e6:,.1f} MB of parameters and optimizer state"
    if whole := [name for name, leaf in leaves.items() if leaf.sharding.is_fully_replicated]:
        largest = max(whole, key=sizes.__getitem__)
        line += f"; the largest replicated tensor is {largest}, {sizes[largest] / 1e6:,.3g} MB"
    if names := sharding.undivided(mesh, state):
        line += f"; the mesh does not divide {', '.join(names)}"
    return line


def _range(values: Any) -> str:
    low, high = np.min(values), np.max(values)
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def describe_batch(batch: Any) -> str:
    """Describes a batch's shape and its phase's predictions."""
    predicts = f", predicting {batch.predicts}" if hasattr(batch, "predicts") else ""
    return f"batches of {batch.input_ids.shape[0]} rows of {batch.input_ids.shape[-1]} positions{predicts}"
