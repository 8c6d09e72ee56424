"""What a plan shows: one document for the terminal and for the HTML page."""

from collections.abc import Sequence

from bert_jax.planning.estimate import Estimate
from bert_jax.planning.memory import gib
from bert_jax.reporting.document import Bar, Bullets, Document, Panel, Panels, Section, Table, Tile


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
        f"{model.layers} layers of width {model.width}, {step.config.batch_size:,} rows of {step.rows.seq_len} tokens, "
        f"attention by {' and '.join(found.kernels)}, layers {loop}, remat {step.config.model.remat}",
    ]


def _tiles(found: Estimate) -> list[Tile]:
    step, memory = found.step, found.memory
    tiles = [
        Tile("yes" if memory.fits else "no", "fits", f"{gib(memory.total)} of {gib(memory.available)}"),
        Tile(f"{len(step.topology.devices):,}", "devices", step.topology.title),
        Tile(f"{step.config.batch_size:,}", "rows per step", f"of {step.rows.seq_len} tokens"),
    ]
    if found.time is not None and found.mfu is not None:
        tiles += [
            Tile(f"{found.mfu:.1%}", "MFU", "estimated"),
            Tile(_milliseconds(found.time.total), "per step", f"{found.tokens_per_second:,.0f} tokens per second"),
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
        "Times are the compiler's cycle counts, with loop bodies counted as often as they run. The lower bound, an MFU "
        f"of at most {found.mfu_at_most:.0%}: arithmetic at the peak takes {_milliseconds(least.arithmetic)}, "
        f"{least.traffic / 1e9:,.1f} GB to and from memory {_milliseconds(least.memory)}. A step has "
        f"{found.flops.total:.4g} FLOPs on all devices, {found.model_flops:.4g} of them the model's, and the speed is "
        f"{found.tokens_per_second:,.0f} tokens per second."
    )
    return [Section("Time of a step", [Panels([Panel("", "", bars)])], note)]


def _collectives(found: Estimate) -> list[Section]:
    topology = found.step.topology
    rows = [
        [
            f"{one.kind} of {one.group}",
            f"{one.count:,.0f}",
            f"{one.bytes / 1e6:,.1f}",
            f"{topology.seconds(one, one.bytes) * 1e3:,.2f}",
            f"{one.overlapped_bytes / one.bytes:.0%}" if one.bytes else "",
        ]
        for one in found.collectives
    ]
    table = Table(["", "count", "MB per device", "ms", "bytes overlapped"], [rows])
    return [Section("Collectives of a step", [table])] if rows else []


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"
