"""Suggests what to change when a step does not fit or leaves a device idle, from the plan's own figures."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax

from bert_jax.command import UserError
from bert_jax.config import MeshConfig
from bert_jax.model.attention import kernels
from bert_jax.model.runtime import REMATS
from bert_jax.planning.abstract_step import AbstractStep
from bert_jax.planning.flops import count_flops
from bert_jax.planning.memory import bytes_per_device, gib
from bert_jax.reporting.chart import number
from bert_jax.train import gradient_sums, partitioning

if TYPE_CHECKING:
    from bert_jax.planning.estimate import Estimate

# A part of the step's time below this share is not worth a line of advice.
WORTH = 0.05
ROOMY = 0.5  # a step that uses less than this share of the memory has room for more rows


def advise(found: "Estimate") -> list[str]:
    """Returns lines of advice, the most useful first; each gives the figure that its change leads to."""
    lines = _to_fit(found) if not found.memory.fits else _to_be_faster(found)
    return lines + found.step.topology.advice(found.memory, found.time)


def _to_fit(found: "Estimate") -> list[str]:
    """Returns changes that reduce the memory: sharding the state, recomputing activations, fewer rows at a time."""
    memory, step = found.memory, found.step
    state = memory.parameters + memory.optimizer
    lines = [f"{gib(memory.total - memory.available)} a device too much; each change below applies alone:"]
    mesh, topology = step.config.mesh, step.topology
    shards = math.gcd(len(topology.devices) // topology.slices, step.model.width)  # only data spans several slices
    for changes in ({"shard_optimizer": True}, {"data": -1, "fsdp": shards, "tensor": 1}):
        changed = [f"--config.mesh.{key}={value}" for key, value in changes.items() if getattr(mesh, key) != value]
        sharded = state_bytes(step, dataclasses.replace(mesh, **changes))
        if changed and sharded is not None and sharded < state:
            lines.append(_outcome(found, " ".join(changed), sharded + memory.activations))
    for remat in REMATS[REMATS.index(step.config.model.remat) + 1 :]:
        if remat == "attention" and "einsum" not in found.kernels:
            continue  # the other kernels store no scores, so there is nothing to recompute
        total = state + remat_ratio(step, remat) * memory.activations
        lines.append(_outcome(found, f"--config.model.remat={remat}", total))
        if total <= memory.available:
            break
    return lines + _fewer_rows(found)


def _fewer_rows(found: "Estimate") -> list[str]:
    """Returns the number of microbatches, and the batch size, whose activations fit next to the state."""
    memory, step = found.memory, found.step
    # The gradients are as large as the parameters and do not shrink with the batch; the other activations do.
    fixed = 2 * memory.parameters + memory.optimizer
    room, varying = memory.available - fixed, memory.activations - memory.parameters
    if room <= 0:
        return [f"parameters, gradients and optimizer state alone take {gib(fixed)} a device"]
    if varying <= 0:
        return []
    rows, microbatches = step.rows_per_device, step.config.microbatches
    most = int(rows * room / varying)
    lines = []
    if times := next((k for k in range(2, rows + 1) if rows % k == 0 and rows // k <= most), None):
        lines.append(f"--config.microbatches={times * microbatches}: {rows // times} rows a device at a time")
    if most:
        smaller = most * partitioning.row_shards(step.mesh) * microbatches
        lines.append(f"--config.batch_size={smaller}: {most} rows a device instead of {rows}")
    return lines


def _to_be_faster(found: "Estimate") -> list[str]:
    """Returns changes that use free memory or shorten the step."""
    memory, step, time, model = found.memory, found.step, found.time, found.step.model
    assert time is not None
    lines = []
    rows, roomy = step.rows_per_device, memory.total < ROOMY * memory.available
    fixed = 2 * memory.parameters + memory.optimizer  # parameters, gradients and optimizer state
    bytes_per_row = max(memory.total - fixed, 1) / rows
    most = int((memory.available - fixed) / bytes_per_row)
    if roomy and most >= 2 * rows:
        larger = 2 ** int(math.log2(most / rows)) * step.config.batch_size
        lines.append(
            f"{gib(memory.available - memory.total)} a device are free: up to --config.batch_size={larger} fits, and "
            "more rows share the cost of the optimizer and of the collectives"
        )
    if time.exposed_collectives > WORTH * time.total:
        microbatches = "more microbatches, " if gradient_sums.sums_once(step.mesh) else ""
        lines.append(
            f"{time.exposed_collectives / time.total:.0%} of the time is communication that no computation overlaps: "
            f"use more rows a device, {microbatches}or fewer devices"
        )
    if "einsum" in found.kernels and model.attention_dropout > 0 and model.relative == "none":
        scores = step.config.batch_size * model.heads * step.rows.seq_len**2 * model.layers
        stored = f"the {number(float(scores))} attention scores of a step"
        if "einsum" not in _kernels(step, attention_dropout=0.0):
            lines.append(
                f"--config.model.attention_dropout=0 enables {step.topology.fused_attention}, which never stores "
                f"{stored}"
            )
        kernel = step.topology.dropout_attention
        if kernel in _kernels(step, "auto"):
            lines.append(
                f"--config.model.attention=auto takes {kernel}, which has this dropout and never stores {stored}"
            )
        elif kernel in _kernels(step, kernel):
            lines.append(
                f"--config.model.attention={kernel} keeps this dropout and never stores {stored}; it is "
                f"{step.topology.dropout_attention_status}"
            )
    if step.config.model.remat != "none" and roomy and (extra := recomputed_share(step)) > 0:
        lines.append(f"--config.model.remat=none: recomputing layers adds {extra:.1%} to the FLOPs, and memory is free")
    return lines


def _kernels(step: AbstractStep, attention: str = "", **changes: Any) -> list[str]:
    """Returns the attention kernels of the step with another setting or changes of the model; einsum if refused."""
    runtime = dataclasses.replace(step.plan.runtime, attention=attention or step.plan.runtime.attention)
    try:
        with jax.set_mesh(step.mesh):
            return kernels(dataclasses.replace(step.model, **changes), runtime, step.rows.seq_len)
    except UserError:
        return ["einsum"]


def recomputed_share(step: AbstractStep) -> float:
    """Returns the FLOPs that the backward pass of the step recomputes, relative to those of a step without remat."""
    return count_flops(step.traced().jaxpr).total / count_flops(with_remat(step, "none").traced().jaxpr).total - 1


def state_bytes(step: AbstractStep, mesh: MeshConfig) -> int | None:
    """Returns the bytes of parameters and optimizer state on a device with another mesh; None where it is refused."""
    try:
        other = AbstractStep.of(dataclasses.replace(step.config, mesh=mesh), step.topology, step.rows)
    except UserError:
        return None
    return bytes_per_device(other.state())


def remat_ratio(step: AbstractStep, remat: str) -> float:
    """Returns the ratio of what another remat setting stores for the backward pass to what this step stores.

    Both are counted from the traced functions, before the compiler optimizes them.
    """
    return with_remat(step, remat).residual_bytes() / max(step.residual_bytes(), 1)


def with_remat(step: AbstractStep, remat: str) -> AbstractStep:
    """Returns the step with another remat setting."""
    runtime = dataclasses.replace(step.plan.runtime, remat=remat)
    return dataclasses.replace(step, plan=dataclasses.replace(step.plan, runtime=runtime))


def _outcome(found: "Estimate", change: str, total: float | int) -> str:
    room = found.memory.available - total
    verdict = f"fits, {gib(room)} to spare" if room >= 0 else f"still {gib(-room)} too much"
    return f"{change}: about {gib(total)} a device, {verdict}"
