"""Estimates a run's step time, hours and input rate from its compiled step, and shows them as a document or JSON.

`estimate` compiles and reads the step. `step_time` adds up the compiler's cycles on TPUs, and is a roofline elsewhere.
`run_length` turns the step time into hours. The command prints `document`.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from bert_jax.config import Phases, PretrainConfig, to_dict
from bert_jax.data.phases import later_phases
from bert_jax.data.schedules import batch_schedule, batch_segments
from bert_jax.model.attention.layer import kernels
from bert_jax.planning import program as programs
from bert_jax.planning.compile import AbstractStep, Memory, RowSpec, compile_step
from bert_jax.planning.program import Collective, Flops, Instruction, Program
from bert_jax.planning.topology import GIB, MEMORY_VARIABLES, Chip, Gpu, Topology
from bert_jax.reporting.document import Bar, Bullets, Document, Panel, Panels, Section, Table, Tile
from bert_jax.train import metric_accumulator, sharding
from bert_jax.train.clock import TokenLength
from bert_jax.train.run_size import few_positions

# The assumed speed of Pallas kernels, as a share of the peak. FlashAttention-2 reaches at most 63% of an A100's peak in
# the backward pass and 73% in the forward pass (Dao 2023, section 4.1), and less on short rows.
PALLAS_EFFICIENCY = 0.5
CYCLES, ROOFLINE = "cycles", "roofline"
PALLAS, EXPOSED = "Pallas kernels", "exposed collectives"


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, by part."""

    basis: str  # CYCLES: the compiler's estimates for instructions; ROOFLINE: total FLOPs and bytes
    parts: dict[str, float]
    at_least: float | None = None  # with a roofline: no execution of this program is faster

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def without_pallas(self) -> float:
        return self.total - self.parts.get(PALLAS, 0.0)


@dataclass(frozen=True)
class Run:
    """Length of a run in steps, rows and hours; all None if its end is unknown."""

    steps: int | None
    rows: int | None
    hours: float | None


@dataclass(frozen=True)
class Estimate:
    """The figures that a user wants before paying for devices."""

    step: AbstractStep
    memory: Memory
    flops: Flops
    model_flops: float
    time: StepTime | None  # None if the step exceeds the memory
    collectives: list[Collective]
    kernels: list[str]
    unknown_loops: int = 0  # loops with an unknown trip count, which count as one iteration

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: the model's FLOPs divided by the devices' peak FLOPs in the same time."""
        return None if self.time is None else self._mfu(self.time.total)

    def _mfu(self, seconds: float) -> float:
        topology = self.step.topology
        return self.model_flops / (seconds * topology.chip.peak_flops * len(topology.devices))

    @property
    def executed_flops_per_second(self) -> float | None:
        """FLOP/s of the traced program on one device. Recomputation counts here, and not in MFU."""
        return None if self.time is None else self.flops.total / self.time.total / len(self.step.topology.devices)

    @property
    def tokens_per_second(self) -> float | None:
        """Positions per second, padding included."""
        return None if self.time is None else self.step.config.batch_size * self.step.rows.seq_len / self.time.total

    @property
    def host_tokens_per_second(self) -> float | None:
        """Positions per second that a host's input pipeline has to deliver, padding included."""
        if self.tokens_per_second is None:
            return None
        # A host loads the rows of its own devices, and at least one shard of a batch. Devices that share the work on a
        # row (mesh.tensor) count as one shard.
        shards = sharding.row_shards(self.step.mesh)
        own = max(1.0, shards / self.step.topology.hosts)
        return self.tokens_per_second * own / shards

    def as_json(self) -> dict[str, Any]:
        """Returns the values that --json writes."""
        step, time = self.step, self.time
        run = run_length(step.config, step.rows, None if time is None else time.total)
        topology, filled = step.topology, step.rows.filled
        tokens = run.rows and run.rows * step.rows.seq_len
        return {
            "topology": topology.name,
            "slices": topology.slices,
            "devices": len(topology.devices),
            "hosts": topology.hosts,
            "fits": self.memory.fits,
            "memory_bytes": dataclasses.asdict(self.memory) | {"total": self.memory.total},
            "flops": {"program": self.flops.total, "pallas": self.flops.pallas, "model": self.model_flops},
            "collectives": [
                dataclasses.asdict(collective) | {"seconds": topology.seconds(collective)}
                for collective in self.collectives
            ],
            "step_seconds": time and time.total,
            "step_seconds_basis": time and time.basis,
            "step_seconds_by_part": time and time.parts,
            "step_seconds_without_pallas": time and time.without_pallas,
            "step_seconds_at_least": time and time.at_least,
            "mfu": self.mfu,
            "executed_flops_per_second": self.executed_flops_per_second,
            "mfu_without_pallas": time and self._mfu(time.without_pallas),
            "tokens_per_second": self.tokens_per_second,
            "real_tokens_per_second": _times(self.tokens_per_second, filled),
            "input_tokens_per_second_per_host": self.host_tokens_per_second,
            "steps": run.steps,
            "tokens": tokens,
            "real_tokens": _times(tokens, filled),
            "hours": run.hours,
            "device_hours": _times(run.hours, len(topology.devices)),
            "attention": self.kernels,
            "model": to_dict(step.model),
            "rows": dataclasses.asdict(step.rows),
            "batch_size": step.config.batch_size,
            "microbatches": step.config.microbatches,
            "mesh": dict(step.mesh.shape),
            "notes": notes(self),
        }


def estimate(config: PretrainConfig, topology: Topology, rows: RowSpec) -> Estimate:
    """Compiles a recipe's train step for a topology and reads the program.

    Raises:
        UserError: As AbstractStep.of and compile_step do.
    """
    step = AbstractStep.of(config, topology, rows)
    compiled, model = compile_step(step), step.model
    program = compiled.program
    communication = [] if program is None else collectives(program, topology)
    time = None
    if program is not None:
        time = step_time(program, topology, compiled.flops, model.width // model.heads, communication)
    objective, batch = step.plan.objective, step.batch()
    read = objective.predictions(batch), objective.heads, objective.last_positions(batch)
    return Estimate(
        step=step,
        memory=compiled.memory,
        flops=compiled.flops,
        model_flops=metric_accumulator.training_flops(model, config.batch_size, rows.seq_len, *read),
        time=time,
        collectives=communication,
        kernels=kernels(model, step.plan.runtime, rows.seq_len),
        unknown_loops=0 if program is None else program.loops_without_trip_count(),
    )


def collectives(program: Program, topology: Topology) -> list[Collective]:
    """Returns a program's collectives, and how much of each is hidden by work between its start and end."""
    chip = topology.chip

    def work_seconds(instruction: Instruction) -> float:
        if isinstance(chip, Chip):
            return (instruction.cycles or 0) / chip.clock
        return programs.bytes_moved(program, instruction) / chip.memory_bandwidth

    return programs.collectives(program, len(topology.devices), topology.slices, topology.seconds, work_seconds)


def pallas_efficiency(chip: Chip | Gpu, head_width: int) -> float:
    """Returns the assumed speed of Pallas kernels relative to the peak."""
    # A head that is narrower than a TPU's matrix unit leaves part of the unit idle.
    return PALLAS_EFFICIENCY * (min(1.0, head_width / chip.unit) if isinstance(chip, Chip) else 1.0)


def step_time(
    program: Program, topology: Topology, flops: Flops, head_width: int, communication: list[Collective]
) -> StepTime:
    """Adds up the time of a step.

    Args:
        flops: FLOPs on all devices together.
    """
    chip, devices = topology.chip, len(topology.devices)
    # Communication takes time only if no work hides it.
    exposed = [dataclasses.replace(item, bytes=item.bytes - item.overlapped_bytes) for item in communication]
    ends = {
        PALLAS: flops.pallas / devices / (chip.peak_flops * pallas_efficiency(chip, head_width)),
        EXPOSED: sum(map(topology.seconds, exposed), 0.0),
    }
    cycles = sum(times * (instruction.cycles or 0) for instruction, times in program.runs())
    if isinstance(chip, Chip) and cycles:
        # The compiler estimates no cycles for gathers and scatters. They count by bytes: the result is written once and
        # read once.
        unpriced = sum(
            times * 2 * instruction.bytes
            for instruction, times in program.runs()
            if instruction.cycles is None
            and instruction.opcode not in (*programs.FREE, "custom-call")  # compiler markers, and Pallas kernels
            and not programs.is_collective(program, instruction)
        )
        parts = {"compiler's cycles": cycles / chip.clock, "gathers and scatters": unpriced / chip.memory_bandwidth}
        basis, at_least = CYCLES, None
    else:
        # GPUs, and programs without cycles: arithmetic as fast as a large matmul, plus memory traffic at full
        # bandwidth. Both are added, because kernels run one after another, and few are bound by both. The larger one is
        # a bound.
        speed = chip.peak_flops * (chip.matmul_efficiency if isinstance(chip, Gpu) else 1.0)
        moved = sum(times * programs.bytes_moved(program, instruction) for instruction, times in program.runs())
        traffic = moved / chip.memory_bandwidth
        parts = {"arithmetic": flops.xla / devices / speed, "memory traffic": traffic}
        basis, at_least = ROOFLINE, max(flops.total / devices / chip.peak_flops, traffic)
    return StepTime(basis, {name: seconds for name, seconds in (parts | ends).items() if seconds}, at_least)


def run_length(config: PretrainConfig, rows: RowSpec, step_seconds: float | None) -> Run:
    """Counts a run's steps, rows and hours. With data.phases, only the first phase counts, whose rows were planned.

    Args:
        step_seconds: Time of a step with batch_size rows. Time is proportional to rows.
    """
    schedule = batch_schedule(config.batch_schedule, config.batch_size)
    segments = batch_segments(schedule, [0])[0]

    def rows_before(step: int) -> int:
        return sum(segment.rows * segment.steps_before(step) for segment in segments)

    # The run ends at the first of these limits: steps or tokens, the first phase's end, and minutes.
    steps: int | None = config.steps or None
    if config.tokens:
        per_row = rows.seq_len * (rows.filled or 1.0)  # without shards, rows are assumed to be full
        steps = TokenLength(config.tokens, lambda step: rows_before(step) * per_row).steps
    if config.data.phases:
        end = min(later_phases(config.data))
        steps = min(steps or end, end)
    if config.budget_minutes and step_seconds:
        affordable = int(config.budget_minutes * 60 / step_seconds)
        steps = min(steps or affordable, affordable)
    if steps is None:
        return Run(None, None, None)
    total = rows_before(steps)
    hours = step_seconds and total / config.batch_size * step_seconds / 3600
    return Run(steps, total, hours)


def notes(plan: Estimate) -> list[str]:
    """Explains how the figures were obtained."""
    step, time = plan.step, plan.time
    topology, config, lines = step.topology, step.config, []
    chip = topology.chip
    if not plan.memory.fits:
        lines.append(
            "To save memory, use more --config.microbatches, --config.model.remat=layer, a smaller batch, or "
            "--config.mesh.fsdp, which shards parameters and optimizer state."
        )
    if few := few_positions(config.batch_size, step.rows.seq_len, step.mesh.size):
        lines.append(f"{few.replace('warning', 'Warning', 1)}.")
    if time is not None and time.basis == CYCLES:
        lines.append(
            "The time is the sum of the compiler's cycle estimates for all instructions, with loop bodies counted as "
            "often as they run."
        )
    elif time is not None:
        lines.append(
            "The time is a roofline, not a simulation: matmuls at the speed of a large matmul plus all memory traffic "
            "at full bandwidth. Kernel launches are not counted, so steps of a few milliseconds take longer. No "
            f"execution of this program takes less than {_milliseconds(time.at_least or 0.0)}."
        )
    if plan.flops.pallas and time is not None:
        lines.append(
            f"Pallas kernels, for which the compiler has no estimate, count at "
            f"{pallas_efficiency(chip, step.model.width // step.model.heads):.1%} of the peak; without them a step "
            f"takes {_milliseconds(time.without_pallas)}."
        )
    if off := sharding.DISABLED.get(getattr(topology.devices[0], "device_kind", "")):
        lines.append(f"Compiled with {len(off)} options off, because libtpu fails with them: {', '.join(off)}.")
    if isinstance(chip, Gpu):
        lines.append(
            "Compiled without autotuning and with cuBLAS instead of Triton for matmuls, since no GPU is there to time "
            f"them. jax gives a program {topology.memory_fraction:.0%} of a GPU's {gib(chip.memory_bytes)}; "
            f"{MEMORY_VARIABLES[0]} in the environment, here and in training, sets another share."
        )
    elif chip.cores > 1:
        lines.append(f"A device is one of the {chip.cores} cores of a {chip.name} chip.")
    if topology.slices > 1:
        lines.append(
            f"The network between {'hosts' if isinstance(chip, Gpu) else 'slices'} carries "
            f"{chip.network_bandwidth / 1e9:.4g} GB/s from each device."
        )
    if plan.unknown_loops:
        lines.append(f"{plan.unknown_loops} loops have no known trip count and count as one iteration each.")
    if step.rows.filled is None:
        lines.append(
            "Tokens count all positions, padding included; with --config.data.train they are also given without."
        )
    if config.data.phases:
        lines.append("Hours and tokens count the first phase only; plan each later one with its shards as data.train.")
    if config.batch_schedule:
        lines.append(f"Compiled for {config.batch_size:,} rows; hours scale with the rows of each step.")
    if isinstance(config.objective, Phases):
        lines.append(
            "Planned for masked phases; causal phases compute the logits of all positions and need more memory: plan "
            "them with --config.objective=causal --config.model.causal=true."
        )
    return lines


def document(plan: Estimate) -> Document:
    """Returns the report that the command prints."""
    step, memory, time, model = plan.step, plan.memory, plan.time, plan.step.model
    topology = step.topology
    verdict = f"{gib(memory.total)} of {gib(memory.available)} per device"
    headline = f"does not fit: {verdict}, {gib(memory.total - memory.available)} too much"
    if memory.fits and time is not None:
        room = gib(memory.available - memory.total)
        headline = f"fits: {verdict}, {room} free; {_milliseconds(time.total)} per step, MFU {plan.mfu:.1%}"
    mesh = " x ".join(f"{axis} {size}" for axis, size in step.mesh.shape.items())
    loop = "unrolled" if step.plan.runtime.unrolled(model.layers) else "by scan"
    figures = [] if time is None else _run_figures(plan, time.total)
    sizes = dataclasses.asdict(memory) | {"total": memory.total, "available": memory.available}
    sections = [Section("The run", [Table(["", ""], [[list(row) for row in figures]])] if figures else [])]
    about = "Activations: saved values, gradients, temporaries, batch."
    bars = _bars({name: (size, gib(size)) for name, size in sizes.items()})
    sections.append(Section("Memory of a device", [bars], about))
    if time is not None:
        without = {"without Pallas": time.without_pallas} if PALLAS in time.parts else {}
        parts = time.parts | {"total": time.total} | without
        bars = _bars({name: (part, f"{_milliseconds(part)}, {part / time.total:.0%}") for name, part in parts.items()})
        executed, peak = plan.executed_flops_per_second or 0.0, topology.chip.peak_flops
        about = (
            f"On all devices, a step executes {plan.flops.total:.4g} FLOPs, {executed / 1e12:.4g} TFLOP/s a device "
            f"({executed / peak:.1%} of the peak); MFU counts the {plan.model_flops:.4g} that the model needs."
        )
        basis = "the compiler's cycles" if time.basis == CYCLES else "a roofline"
        sections.append(Section(f"Time of a step, by {basis}", [bars], about))
    if plan.collectives:
        sections.append(Section("Collectives of a step", [_collectives_table(plan)]))
    return Document(
        title=f"Plan: {topology.title}",
        lines=[
            headline,
            f"{len(topology.devices):,} devices, {topology.hosts:,} host{'s'[: topology.hosts > 1]} ({mesh})",
            f"{model.layers} layers of width {model.width}, {step.config.batch_size:,} rows of {step.rows.seq_len} "
            f"positions, attention by {' and '.join(plan.kernels)}, layers {loop}, remat {step.config.model.remat}",
        ],
        tiles=[Tile(value, name) for name, value in figures],
        sections=[*sections, Section("Notes", [Bullets(notes(plan))])],
    )


def _run_figures(plan: Estimate, step_seconds: float) -> list[tuple[str, str]]:
    """Returns the figures by which a user decides: names and texts."""
    step = plan.step
    run = run_length(step.config, step.rows, step_seconds)

    def hours(value: int | float) -> str:
        return f"{value:,.1f}" if value >= 10 else f"{value:.2g}"

    def tokens(positions: int | float | None) -> str:
        """Formats a number of positions and, if the manifest tells it, how many hold a token."""
        positions, filled = positions or 0.0, step.rows.filled
        return f"{positions:,.0f}" + ("" if filled is None else f", {positions * filled:,.0f} without padding")

    figures = {"step": _milliseconds(step_seconds), "MFU": f"{plan.mfu:.1%}"}
    if run.steps is not None and run.rows is not None and run.hours is not None:
        figures["hours"] = hours(run.hours)
        figures["device-hours"] = hours(run.hours * len(step.topology.devices))
        figures["steps"] = f"{run.steps:,}"
        figures["tokens"] = tokens(run.rows * step.rows.seq_len)
    figures["tokens per second"] = tokens(plan.tokens_per_second)
    figures["input tokens per second and host"] = tokens(plan.host_tokens_per_second)
    return list(figures.items())


def _collectives_table(plan: Estimate) -> Table:
    topology = plan.step.topology
    group = "slices" if topology.sides else "hosts"
    rows = [
        [
            f"{item.kind} of {item.group}" + (f" over {item.slices} {group}" if item.slices > 1 else ""),
            f"{item.count:,.0f}",
            f"{item.bytes / 1e6:,.1f}",
            f"{topology.seconds(item) * 1e3:,.2f}",
            f"{item.overlapped_bytes / item.bytes:.0%}" if item.bytes else "",
        ]
        for item in plan.collectives
    ]
    return Table(["", "count", "MB per device", "ms", "overlapped"], [rows])


def _bars(values: dict[str, tuple[int | float, str]]) -> Panels:
    """Draws a bar per value. The largest one fills the width."""
    longest = max(value for value, _ in values.values())
    return Panels([Panel("", "", [Bar(name, value / longest, text) for name, (value, text) in values.items()])])


def gib(size: int | float) -> str:
    return f"{size / GIB:,.2f} GiB"


def _times(value: int | float | None, factor: int | float | None) -> int | float | None:
    return None if value is None or factor is None else value * factor


def _milliseconds(seconds: int | float) -> str:
    return f"{seconds * 1e3:,.2f} ms"
