"""A plan as lines of text."""

from collections.abc import Sequence

from bert_jax.planning.advice import gib
from bert_jax.planning.estimate import Estimate


def lines_of(found: Estimate) -> list[str]:
    """What the command prints."""
    return [*_head(found), "", *_memory(found), *_time(found), *_talk(found), *_closing(found)]


def headline(found: Estimate) -> str:
    """Fits or not, and how fast, in one line."""
    memory = found.memory
    if not memory.fits:
        return f"does not fit: {gib(memory.total)} a device of {gib(memory.available)}"
    assert found.time is not None and found.mfu is not None
    speed = f"{milliseconds(found.time.total)} a step, MFU {found.mfu:.1%}"
    return f"fits: {gib(memory.total)} a device of {gib(memory.available)}; {speed}"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"


def _head(found: Estimate) -> list[str]:
    step = found.step
    mesh = " x ".join(f"{axis} {size}" for axis, size in step.mesh.shape.items())
    model = step.model
    return [
        f"{step.topology.title}, {len(step.topology.devices)} devices ({mesh}): {headline(found)}",
        f"{model.layers} layers of width {model.width}, {step.config.batch_size:,} rows of {step.rows.seq_len} slots, "
        f"attention by {' and '.join(found.kernels)}, layers {_loop(found)}, remat {step.config.model.remat}",
    ]


def _loop(found: Estimate) -> str:
    return "unrolled" if found.step.plan.runtime.unrolled(found.step.model.layers) else "by scan"


def _memory(found: Estimate) -> list[str]:
    memory = found.memory
    rows = [
        ("parameters", gib(memory.parameters)),
        ("optimizer", gib(memory.optimizer)),
        ("activations", f"{gib(memory.activations)}  kept values, gradients, temporaries, the batch"),
        ("total", gib(memory.total)),
        ("available", gib(memory.available)),
    ]
    return ["memory of a device", *_columns(rows)]


def _time(found: Estimate) -> list[str]:
    if found.time is None:
        return []
    rows = [
        (name, f"{milliseconds(seconds):>12}  {seconds / found.time.total:4.0%}")
        for name, seconds in found.seconds_by_kind().items()
    ]
    rows.append(("total", f"{milliseconds(found.time.total):>12}"))
    if found.time.pallas:
        rows.append(("without Pallas", f"{milliseconds(found.time.without_pallas):>12}"))
    assert found.roofline is not None and found.mfu_at_most is not None
    rows.append(("at best", f"{milliseconds(found.roofline.lower_bound):>12}  {at_best(found)}"))
    work = f"{found.flops.total:.4g} FLOPs a step on all devices, {found.model_flops:.4g} of them the model's"
    return ["", "time of a step", *_columns(rows), f"  {work}; {found.tokens_per_second:,.0f} tokens a second"]


def at_best(found: Estimate) -> str:
    """What keeps the program from being faster, however well it is run."""
    assert found.roofline is not None
    least = found.roofline
    return (
        f"MFU {found.mfu_at_most:.0%}: arithmetic at the peak takes {milliseconds(least.arithmetic)}, "
        f"{least.traffic / 1e9:,.1f} GB to and from memory {milliseconds(least.memory)}"
    )


def _talk(found: Estimate) -> list[str]:
    if not found.collectives:
        return []
    topology = found.step.topology
    lines = ["", "collectives of a step"]
    for one in found.collectives:
        share = one.overlapped_bytes / one.bytes if one.bytes else 0.0
        lines.append(
            f"  {one.kind} of {one.group}: {one.count:,.0f}, {one.bytes / 1e6:,.1f} MB a device, "
            f"{milliseconds(one.seconds(topology, one.bytes))}, {share:.0%} of the bytes overlapped"
        )
    return lines


def _closing(found: Estimate) -> list[str]:
    lines = [f"  {note}" for note in found.notes]
    lines = ["", "notes", *lines] if lines else []
    if found.advice:
        lines += ["", "advice", *(f"  {line}" for line in found.advice)]
    return lines


def _columns(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"  {name.ljust(width)}  {value}" for name, value in rows]
