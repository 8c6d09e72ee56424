"""A plan as one HTML file that needs no other."""

from bert_jax.planning.advice import gib
from bert_jax.planning.estimate import Estimate
from bert_jax.planning.text import at_best, headline, milliseconds
from bert_jax.reporting.page import Bar, Tile, bar_list, page, section, table, text, tiles


def page_of(found: Estimate) -> str:
    """The page: headline figures, memory, time, collectives, advice."""
    step = found.step
    title = f"Plan: {step.topology.title}"
    header = f"<p>{text(headline(found))}</p>"
    sections = [tiles(_tiles(found)), section("Memory of a device", _memory(found))]
    if found.time is not None:
        assert found.roofline is not None
        note = (
            "The compiler's cycles over the clock, loop bodies as often as they run. However well this program is run, "
            f"a step takes {milliseconds(found.roofline.lower_bound)} or more, so at best {at_best(found)}."
        )
        sections.append(section("Time of a step", _time(found), note))
    if found.collectives:
        sections.append(section("Collectives of a step", _talk(found)))
    for name, lines in (("Advice", found.advice), ("Notes", found.notes)):
        if lines:
            sections.append(section(name, "<ul>" + "".join(f"<li>{text(line)}</li>" for line in lines) + "</ul>"))
    return page(title, header, sections)


def _tiles(found: Estimate) -> list[Tile]:
    step = found.step
    made = [
        Tile(
            "yes" if found.memory.fits else "no", "fits", f"{gib(found.memory.total)} of {gib(found.memory.available)}"
        ),
        Tile(f"{len(step.topology.devices):,}", "devices", step.topology.title),
        Tile(f"{step.config.batch_size:,}", "rows a step", f"of {step.rows.seq_len} slots"),
    ]
    if found.time is not None and found.mfu is not None:
        made += [
            Tile(f"{found.mfu:.1%}", "MFU", "estimated"),
            Tile(milliseconds(found.time.total), "a step", f"{found.tokens_per_second:,.0f} tokens a second"),
        ]
    return made


def _memory(found: Estimate) -> str:
    memory = found.memory
    parts = (("parameters", memory.parameters), ("optimizer", memory.optimizer), ("activations", memory.activations))
    whole = max(memory.available, memory.total)
    return bar_list([Bar(name, size / whole, gib(size)) for name, size in parts])


def _time(found: Estimate) -> str:
    assert found.time is not None
    whole = found.time.total
    return bar_list(
        [
            Bar(name, seconds / whole, f"{milliseconds(seconds)}, {seconds / whole:.0%}")
            for name, seconds in found.seconds_by_kind().items()
        ]
    )


def _talk(found: Estimate) -> str:
    topology = found.step.topology
    rows = [
        (
            f"{one.kind} of {one.group}",
            f"{one.count:,.0f}",
            f"{one.bytes / 1e6:,.1f}",
            f"{one.seconds(topology, one.bytes) * 1e3:,.2f}",
            f"{one.overlapped_bytes / one.bytes:.0%}" if one.bytes else "",
        )
        for one in found.collectives
    ]
    return table(("", "count", "MB a device", "ms", "overlapped"), rows)
