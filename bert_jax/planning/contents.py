"""What a plan shows: one document for the terminal and for the HTML page."""

from collections.abc import Sequence

from bert_jax.planning.estimate import Estimate
from bert_jax.planning.memory import gib
from bert_jax.planning.step_time import grouped
from bert_jax.reporting.document import Bar, Bullets, Document, Panel, Panels, Section, Table, Tile

SHOWN_KERNELS = 12
OPERATION_WIDTH = 48  # characters of an operation's name, from its end
STEP = "jit(train_step)/"


def document(found: Estimate) -> Document:
    """Headline figures, memory, time, collectives, advice, and notes on how the figures were computed."""
    return Document(
        title=f"Plan: {found.step.topology.title}",
        lines=[_headline(found), *_configuration(found)],
        tiles=_tiles(found),
        sections=[
            Section(
                "Memory of a device", [_memory(found)], "Activations: saved values, gradients, temporaries, batch."
            ),
            *_time(found),
            *_kernels(found),
            *_collectives(found),
            Section("Advice", [Bullets(found.advice)] if found.advice else []),
            Section("Notes", [Bullets(found.notes)] if found.notes else []),
        ],
    )


def _headline(found: Estimate) -> str:
    """Whether the step fits, and how fast it is."""
    memory = f"{gib(found.memory.total)} of {gib(found.memory.available)} per device"
    if not found.memory.fits:
        return f"does not fit: {memory}"
    assert found.time is not None and found.mfu is not None
    return f"fits: {memory}; {_milliseconds(found.time.total)} per step, MFU {found.mfu:.1%}"


def _configuration(found: Estimate) -> Sequence[str]:
    step, model = found.step, found.step.model
    mesh = " x ".join(f"{axis} {size}" for axis, size in step.mesh.shape.items())
    loop = "unrolled" if step.plan.runtime.unrolled(model.layers) else "by scan"
    return [
        f"{len(step.topology.devices)} devices ({mesh})",
        f"{model.layers} layers of width {model.width}, {step.config.batch_size:,} rows of {step.rows.seq_len} "
        f"positions, attention by {' and '.join(found.kernels)}, layers {loop}, remat {step.config.model.remat}",
    ]


def _tiles(found: Estimate) -> list[Tile]:
    step, memory = found.step, found.memory
    tiles = [
        Tile("yes" if memory.fits else "no", "fits", f"{gib(memory.total)} of {gib(memory.available)}"),
        Tile(f"{len(step.topology.devices):,}", "devices", step.topology.title),
        Tile(f"{step.config.batch_size:,}", "rows per step", f"of {step.rows.seq_len} positions"),
    ]
    if found.time is not None and found.mfu is not None:
        tiles += [
            Tile(f"{found.mfu:.1%}", "MFU", "estimated"),
            Tile(_milliseconds(found.time.total), "per step", _speed(found)),
        ]
    return tiles


def _memory(found: Estimate) -> Panels:
    memory = found.memory
    longest = max(memory.available, memory.total)
    sizes = {
        "parameters": memory.parameters,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "total": memory.total,
        "available": memory.available,
    }
    return Panels([Panel("", "", [Bar(name, size / longest, gib(size)) for name, size in sizes.items()])])


def _time(found: Estimate) -> list[Section]:
    if found.time is None:
        return []
    assert found.roofline is not None
    total, least = found.time.total, found.roofline
    bars = [
        Bar(name, seconds / total, f"{_milliseconds(seconds)}, {seconds / total:.0%}")
        for name, seconds in found.seconds_by_kind().items()
    ]
    bars.append(Bar("total", 1.0, _milliseconds(total)))
    if found.time.pallas:
        bars.append(Bar("without Pallas", found.time.without_pallas / total, _milliseconds(found.time.without_pallas)))
    bars.append(Bar("lower bound", min(least.lower_bound / total, 1.0), _milliseconds(least.lower_bound)))
    note = (
        f"{found.step.topology.time_basis} The lower bound, an MFU of at most {found.mfu_at_most:.0%}: arithmetic at "
        f"the peak takes {_milliseconds(least.arithmetic)}, {least.traffic / 1e9:,.1f} GB to and from memory "
        f"{_milliseconds(least.memory)}. On all devices, a step has {found.flops.total:.4g} "
        f"FLOPs as compiled; an MFU counts {found.model_flops:.4g}, those of the model's formula. "
        f"The speed is {_speed(found)}."
    )
    return [Section("Time of a step", [Panels([Panel("", "", bars)])], note)]


def _kernels(found: Estimate) -> list[Section]:
    """What bounds the step, and the kernels that take longest, where the time is estimated kernel by kernel."""
    time = found.time
    if time is None or not time.kernels:
        return []
    bars = [
        Bar(bound, seconds / time.total, f"{_milliseconds(seconds)}, {seconds / time.total:.0%}")
        for bound, seconds in sorted(time.by_bound.items(), key=lambda item: -item[1])
        if seconds
    ]
    groups = grouped(time.kernels)
    rows = [
        [
            f"{one.kind}: {(one.operation or one.name).removeprefix(STEP)[-OPERATION_WIDTH:]}",
            f"{one.times:,.0f}",
            f"{one.times * one.seconds * 1e3:,.2f}",
            f"{one.times * one.bytes / 1e9:,.2f}",
            f"{one.times * one.flops / 1e12:,.2f}" if one.flops else "",
            one.bound,
            "" if one.compiler_seconds is None else f"{one.times * one.compiler_seconds * 1e3:,.2f}",
        ]
        for one in groups[:SHOWN_KERNELS]
    ]
    traffic = sum(one.times * one.bytes for one in time.kernels)
    runs = sum(one.times for one in time.kernels)
    note = (
        f"{runs:,.0f} kernels move {traffic / 1e9:,.1f} GB on each device. Kernels that compute the same in each layer "
        "are one row."
    )
    columns = ["", "runs", "ms", "GB", "TFLOP", "bound", "XLA's ms"]
    return [
        Section("What bounds the step", [Panels([Panel("", "", bars)])]),
        Section("The longest kernels of a step", [Table(columns, [rows])], note),
    ]


def _collectives(found: Estimate) -> list[Section]:
    topology = found.step.topology
    rows = [
        [
            f"{one.kind} of {one.group}" + (f" over {one.slices} {topology.slice_name}s" if one.slices > 1 else ""),
            f"{one.count:,.0f}",
            f"{one.bytes / 1e6:,.1f}",
            f"{topology.seconds(one, one.bytes) * 1e3:,.2f}",
            f"{one.overlapped_bytes / one.bytes:.0%}" if one.bytes else "",
        ]
        for one in found.collectives
    ]
    table = Table(["", "count", "MB per device", "ms", "bytes overlapped"], [rows])
    return [Section("Collectives of a step", [table])] if rows else []


def _speed(found: Estimate) -> str:
    """Positions a second, and how many of them hold a token where the shards say so."""
    positions, real = f"{found.tokens_per_second:,.0f} positions per second", found.real_tokens_per_second
    return positions if real is None else f"{positions}, {real:,.0f} of them tokens without padding"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"
