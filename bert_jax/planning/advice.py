"""What to change when a step does not fit, or wastes its chips: computed from the plan's own figures."""

import dataclasses
import math
from typing import TYPE_CHECKING

from bert_jax.config import MeshConfig
from bert_jax.model.runtime import REMATS
from bert_jax.planning.chips import GIB
from bert_jax.planning.compiled import bytes_of_device
from bert_jax.planning.step import Step
from bert_jax.train import partitioning

if TYPE_CHECKING:
    from bert_jax.planning.estimate import Estimate

# Below it a change is not worth a line.
WORTH = 0.05
ROOMY = 0.5  # a step that fills less of the memory could take more rows


def advise(found: "Estimate") -> list[str]:
    """Lines, the most useful first; each says what it would come to, by this plan's figures."""
    return _to_fit(found) if not found.memory.fits else _to_be_faster(found)


def _to_fit(found: "Estimate") -> list[str]:
    memory, step = found.memory, found.step
    state = memory.parameters + memory.optimizer
    lines = [f"{gib(memory.total - memory.available)} a device too much; each of these alone, by this plan's figures:"]
    parts = math.gcd(len(step.topology.devices), step.model.width)
    if (sharded := state_over(step, parts)) < state:
        lines.append(_outcome(found, f"--config.mesh.fsdp={parts}", sharded + memory.activations))
    for remat in REMATS[REMATS.index(step.config.model.remat) + 1 :]:
        if remat == "attention" and "einsum" not in found.kernels:
            continue  # kernels that keep no scores
        total = state + remat_share(step, remat) * memory.activations
        lines.append(_outcome(found, f"--config.model.remat={remat}", total))
        if total <= memory.available:
            break
    rows = step.config.batch_size // partitioning.row_shards(step.mesh) // step.config.microbatches
    room = memory.available - state - memory.parameters  # the gradients stay whatever the batch
    varying = memory.activations - memory.parameters
    if room > 0 and varying > 0:
        most = int(rows * room / varying)
        if times := next((k for k in range(2, rows + 1) if rows % k == 0 and rows // k <= most), None):
            lines.append(
                f"--config.microbatches={times * step.config.microbatches}: {rows // times} rows a device at a time"
            )
        if most:
            smaller = most * partitioning.row_shards(step.mesh) * step.config.microbatches
            lines.append(f"--config.batch_size={smaller}: {most} rows a device instead of {rows}")
    if room <= 0:
        lines.append(f"parameters, gradients and optimizer alone are {gib(state + memory.parameters)} a device")
    return lines


def _to_be_faster(found: "Estimate") -> list[str]:
    memory, step, time = found.memory, found.step, found.time
    assert time is not None
    lines = []
    model = step.model
    rows = step.config.batch_size // partitioning.row_shards(step.mesh) // step.config.microbatches
    fixed = 2 * memory.parameters + memory.optimizer
    per_row = max(memory.total - fixed, 1) / rows
    most = int((memory.available - fixed) / per_row)
    if memory.total < ROOMY * memory.available and most >= 2 * rows:
        larger = 2 ** int(math.log2(most / rows)) * step.config.batch_size
        lines.append(
            f"{gib(memory.available - memory.total)} a device are left: up to --config.batch_size={larger} fits, and "
            "more rows share the optimizer's and the collectives' time"
        )
    if time.exposed_collectives > WORTH * time.total:
        lines.append(
            f"{time.exposed_collectives / time.total:.0%} of the time is communication that nothing overlaps: more "
            f"rows a device, {'more microbatches, ' if partitioning.sums_once(step.mesh) else ''}or fewer devices"
        )
    if "einsum" in found.kernels and model.attention_dropout > 0 and model.relative == "none":
        scores = found.step.config.batch_size * model.heads * step.rows.seq_len**2 * model.layers
        lines.append(
            f"--config.model.attention_dropout=0 lets the splash kernel run, which never writes the "
            f"{scores / 1e9:,.1f} G scores of a step"
        )
    if step.config.model.remat != "none" and memory.total < ROOMY * memory.available:
        extra = found.flops.total / found.model_flops - 1
        lines.append(f"--config.model.remat=none: recomputing layers is {extra:.0%} more work, and memory is left")
    return lines


def state_over(step: Step, parts: int) -> int:
    """Bytes of parameters and optimizer state a device, were they cut in so many parts."""
    mesh = MeshConfig(data=-1, fsdp=parts, tensor=1)
    other = Step.of(dataclasses.replace(step.config, mesh=mesh), step.topology, step.rows)
    return bytes_of_device(other.state())


def remat_share(step: Step, remat: str) -> float:
    """What another remat keeps for the backward pass, as a share of what this step keeps; by the traced functions."""
    runtime = dataclasses.replace(step.plan.runtime, remat=remat)
    other = dataclasses.replace(step, plan=dataclasses.replace(step.plan, runtime=runtime))
    return other.kept_bytes() / max(step.kept_bytes(), 1)


def gib(size: float | int) -> str:
    return f"{size / GIB:,.2f} GiB"


def _outcome(found: "Estimate", change: str, total: float | int) -> str:
    room = found.memory.available - total
    verdict = f"fits, {gib(room)} to spare" if room >= 0 else f"still {gib(-room)} too much"
    return f"{change}: about {gib(total)} a device, {verdict}"
