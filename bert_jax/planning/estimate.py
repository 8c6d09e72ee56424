"""Estimates memory, time and FLOPs of a train step from the compiled program."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from bert_jax.config import PretrainConfig
from bert_jax.model.attention import kernels
from bert_jax.planning.abstract_step import AbstractStep, RowSpec
from bert_jax.planning.advice import advise
from bert_jax.planning.collectives import Collective, exposed_seconds
from bert_jax.planning.compiled import Compiled, compile_step
from bert_jax.planning.flops import Flops
from bert_jax.planning.memory import Memory
from bert_jax.planning.roofline import Roofline
from bert_jax.planning.step_time import PALLAS, StepTime, grouped
from bert_jax.planning.topology import Topology
from bert_jax.train import metrics
from bert_jax.train.objectives.pretraining import is_schedule

LARGEST_KERNELS = 40  # that --json lists


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
        return self.model_flops / (seconds * topology.peak_flops * len(topology.devices))

    @property
    def tokens_per_second(self) -> float | None:
        """Positions a second, with padding."""
        if self.time is None:
            return None
        return self.step.config.batch_size * self.step.rows.seq_len / self.time.total

    @property
    def real_tokens_per_second(self) -> float | None:
        """Tokens a second, without padding; None without shards, whose manifest says how much of a row is padding."""
        positions, filled = self.tokens_per_second, self.step.rows.filled
        return None if positions is None or filled is None else positions * filled

    def as_json(self) -> dict[str, Any]:
        """Returns what --json writes."""
        topology, time = self.step.topology, self.time
        memory = dataclasses.asdict(self.memory) | {"total": self.memory.total}
        return {
            "topology": topology.name,
            "slices": topology.slices,
            "devices": len(topology.devices),
            "fits": self.memory.fits,
            "memory_bytes": memory,
            "flops": {"program": self.flops.total, "pallas": self.flops.pallas, "model": self.model_flops},
            "collectives": [
                dataclasses.asdict(one) | {"seconds": topology.seconds(one, one.bytes)} for one in self.collectives
            ],
            "step_seconds": time and time.total,
            "step_seconds_without_pallas": time and time.without_pallas,
            "step_seconds_by_kind": time and self.seconds_by_kind(),
            "mfu": self.mfu,
            "mfu_without_pallas": time and self._mfu(time.without_pallas),
            "mfu_at_most": self.mfu_at_most,
            "roofline": self.roofline and dataclasses.asdict(self.roofline),
            "tokens_per_second": self.tokens_per_second,
            "real_tokens_per_second": self.real_tokens_per_second,
            **topology.assumptions(self.step.model),
            **self._kernels_as_json(),
            "attention": self.kernels,
            "model": dataclasses.asdict(self.step.model),
            "rows": dataclasses.asdict(self.step.rows),
            "batch_size": self.step.config.batch_size,
            "mesh": dict(self.step.mesh.shape),
            "notes": self.notes,
            "advice": self.advice,
        }

    def _kernels_as_json(self) -> dict[str, Any]:
        """Returns what bounds the step, and its kernels, where the time is estimated kernel by kernel."""
        if self.time is None or not self.time.kernels:
            return {}
        return {
            "step_seconds_by_bound": self.time.by_bound,
            "largest_kernels": [dataclasses.asdict(one) for one in grouped(self.time.kernels)[:LARGEST_KERNELS]],
        }

    def seconds_by_kind(self) -> dict[str, float]:
        """Returns the parts of the step's time, the largest first; they sum to the total."""
        assert self.time is not None
        parts = dict(self.time.by_kind)
        parts |= {PALLAS: self.time.pallas, "exposed collectives": self.time.exposed_collectives}
        return dict(sorted(((name, part) for name, part in parts.items() if part), key=lambda item: -item[1]))


def estimate(config: PretrainConfig, topology: Topology, rows: RowSpec) -> Estimate:
    """Compiles a recipe's train step for a slice and reads the program.

    Raises UserError as AbstractStep.of and compile_step do.
    """
    step = AbstractStep.of(config, topology, rows)
    compiled = compile_step(step)
    model = step.model
    time, least, found, flops = None, None, [], compiled.flops
    if compiled.program is not None:
        found = topology.collectives(compiled.program)
        exposed = exposed_seconds(found, topology.seconds)
        flops = topology.flops(compiled.program, compiled.flops)
        time, least = topology.estimate(compiled.program, flops, model, exposed)
    predictions = rows.seq_len if step.plan.objective.predicts_all else rows.predictions
    partial = Estimate(
        step=step,
        memory=compiled.memory,
        flops=flops,
        model_flops=metrics.training_flops(
            model, config.batch_size, rows.seq_len, predictions, step.plan.objective.heads
        ),
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
    notes = step.topology.notes(step.model, compiled.flops, time)
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
    if compiled.program is not None and (unknown := compiled.program.loops_without_trip_count()):
        notes.append(f"{unknown} loops have no known trip count and are counted as one iteration each")
    return notes
