"""Estimates memory, time and FLOPs of a train step on TPUs from the compiled program."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from bert_jax.config import PretrainConfig
from bert_jax.model.attention import kernels
from bert_jax.planning.abstract_step import AbstractStep, RowSpec
from bert_jax.planning.advice import advise
from bert_jax.planning.collectives import Collective, collectives, exposed_seconds
from bert_jax.planning.compiled import DISABLED_OPTIONS, Compiled, Memory, compile_step
from bert_jax.planning.flops import Flops
from bert_jax.planning.roofline import Roofline, roofline
from bert_jax.planning.step_time import StepTime, kernel_efficiency, step_time
from bert_jax.planning.topology import Topology
from bert_jax.train import metrics
from bert_jax.train.objectives.pretraining import is_schedule


@dataclass(frozen=True)
class Estimate:
    """The figures to know before paying for chips. time and roofline are None if the step exceeds the memory."""

    step: AbstractStep
    memory: Memory
    flops: Flops
    model_flops: float
    time: StepTime | None
    roofline: Roofline | None
    collectives: list[Collective]
    kernels: list[str]
    notes: list[str]
    advice: list[str]

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: the model's FLOPs over what the devices could compute in the time of a step."""
        return None if self.time is None else self._mfu(self.time.total)

    @property
    def mfu_at_most(self) -> float | None:
        """The MFU of a step that takes only the time that its arithmetic or its memory traffic needs (the roofline)."""
        return None if self.roofline is None else self._mfu(self.roofline.lower_bound)

    def _mfu(self, seconds: float) -> float:
        topology = self.step.topology
        return self.model_flops / (seconds * topology.chip.peak_flops * len(topology.devices))

    @property
    def tokens_per_second(self) -> float | None:
        if self.time is None:
            return None
        return self.step.config.batch_size * self.step.rows.seq_len / self.time.total

    def as_json(self) -> dict[str, Any]:
        """Returns what --json writes."""
        topology, chip, time = self.step.topology, self.step.topology.chip, self.time
        memory = dataclasses.asdict(self.memory) | {"total": self.memory.total}
        return {
            "topology": topology.name,
            "slices": topology.slices,
            "devices": len(topology.devices),
            "fits": self.memory.fits,
            "memory_bytes": memory,
            "flops": {"program": self.flops.total, "pallas": self.flops.pallas, "model": self.model_flops},
            "collectives": [
                dataclasses.asdict(one) | {"seconds": one.seconds(topology, one.bytes)} for one in self.collectives
            ],
            "step_seconds": time and time.total,
            "step_seconds_without_pallas": time and time.without_pallas,
            "step_seconds_by_kind": time and self.seconds_by_kind(),
            "mfu": self.mfu,
            "mfu_without_pallas": time and self._mfu(time.without_pallas),
            "mfu_at_most": self.mfu_at_most,
            "roofline": self.roofline and dataclasses.asdict(self.roofline),
            "tokens_per_second": self.tokens_per_second,
            "kernel_efficiency": kernel_efficiency(chip, self.step.head_width),
            "attention": self.kernels,
            "model": dataclasses.asdict(self.step.model),
            "rows": dataclasses.asdict(self.step.rows),
            "batch_size": self.step.config.batch_size,
            "mesh": dict(self.step.mesh.shape),
            "notes": self.notes,
            "advice": self.advice,
        }

    def seconds_by_kind(self) -> dict[str, float]:
        """Returns the parts of the step's time, the largest first; they sum to the total."""
        assert self.time is not None
        parts = dict(self.time.by_kind)
        parts |= {"Pallas kernels": self.time.pallas, "exposed collectives": self.time.exposed_collectives}
        return dict(sorted(((name, part) for name, part in parts.items() if part), key=lambda item: -item[1]))


def estimate(config: PretrainConfig, topology: Topology, rows: RowSpec) -> Estimate:
    """Compiles a recipe's train step for a slice and reads the program.

    Raises UserError as AbstractStep.of and compile_step do.
    """
    step = AbstractStep.of(config, topology, rows)
    compiled = compile_step(step)
    chip, devices, model = topology.chip, len(topology.devices), step.model
    time, least, found = None, None, []
    if compiled.program is not None:
        found = collectives(compiled.program, devices)
        time = step_time(
            compiled.program,
            chip,
            pallas_flops=compiled.flops.pallas / devices,
            head_width=step.head_width,
            exposed_collectives=exposed_seconds(found, topology),
        )
        # Causal and windowed masks skip blocks of a kernel's grid, and the program does not say which, so
        # their kernels do not count towards the lower bound.
        whole = not (model.causal or model.window)
        least_work = dataclasses.replace(compiled.flops, pallas=compiled.flops.pallas * whole)
        least = roofline(compiled.program, chip, least_work, devices, step.head_width)
    predictions = rows.seq_len if step.plan.objective.predicts_all else rows.predictions
    partial = Estimate(
        step=step,
        memory=compiled.memory,
        flops=compiled.flops,
        model_flops=metrics.training_flops(model, config.batch_size, rows.seq_len, predictions),
        time=time,
        roofline=least,
        collectives=found,
        kernels=kernels(model, step.plan.runtime, rows.seq_len),
        notes=notes_for(step, compiled, time),
        advice=[],
    )
    return dataclasses.replace(partial, advice=advise(partial))


def notes_for(step: AbstractStep, compiled: Compiled, time: StepTime | None) -> list[str]:
    """Returns notes on how this plan's figures were obtained where that differs between plans."""
    chip = step.topology.chip
    notes = []
    if off := DISABLED_OPTIONS.get(chip.name):
        notes.append(f"compiled with {len(off)} options off, because libtpu fails with them: {', '.join(off)}")
    if chip.cores > 1:
        notes.append(f"{chip.name}: a device is one of the {chip.cores} cores of a chip, as libtpu compiles for it")
    config = step.config
    if config.batch_schedule or config.data.phases:
        notes.append(
            f"planned for batches of {config.batch_size:,} rows of {step.rows.seq_len} positions; plan the others, of "
            "batch_schedule and data.phases, with --config.batch_size and --seq_len"
        )
    if is_schedule(config.objective):
        notes.append(
            "planned for masked phases; causal phases compute the logits of all positions and need more memory: plan "
            "them with --config.objective=causal --config.model.causal=true"
        )
    if step.topology.slices > 1:
        notes.append(
            "collectives between slices are counted as if they ran within one, but the network between slices is slower"
        )
    if compiled.program is not None and (unknown := compiled.program.loops_without_trip_count()):
        notes.append(f"{unknown} loops have no known trip count and are counted as one iteration each")
    if compiled.flops.pallas and time:
        share = kernel_efficiency(chip, step.head_width)
        notes.append(
            f"Pallas kernels are counted at {share:.0%} of the peak, since the compiler estimates no cycles for them"
        )
    if time and time.unpriced:
        notes.append(
            f"{time.unpriced} instructions (gathers, scatters) have no estimated cycles and are counted by their bytes"
        )
    return notes
