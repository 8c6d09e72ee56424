"""Plans of BERT-Base and BERT-Large on slices of TPUs, and the page that shows them, docs/tpu_plan.md.

    python -m benchmarks.tpu_plans --plans benchmarks/results/tpu_plans [--only v5e] [--page docs/tpu_plan.md]

Each plan is stored as JSON in the folder of --plans; existing plans are not recomputed. Without --page, the table is
printed with the command of each plan. Needs libtpu (pip install '.[tpu]') but no TPU; a plan takes minutes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from bert_jax import command

DEVICES = 16
SLICES = {
    "v5e": "v5e:4x4",
    "v4": "v4:2x2x4",
    "v5p": "v5p:2x2x4",
    "v6e": "v6e:4x4",
    "tpu7x": "tpu7x:2x2x2",
}  # of 16 devices
# Rows per device and microbatch, by kind, model size and length; some kinds have more memory.
SMALL, LARGE = {128: 128, 512: 32}, {128: 256, 512: 64}
LARGE_ROWS = 8
ROWS = {"v5e": {"base": SMALL, "large": {512: LARGE_ROWS}}, "v4": {"base": SMALL}}
ROWS |= {kind: {"base": LARGE} for kind in ("v5p", "v6e", "tpu7x")}
PARTS = 4  # microbatches, which share one gradient all-reduce and one optimizer update
FLASH = "--config.model.attention=flash"
MANY = "--config.mesh.fsdp=16"  # for 256 chips
SCAN = "--config.model.layer_loop=scan"
ZERO = "--config.mesh.shard_optimizer=True"


@dataclass(frozen=True)
class PagePlan:
    """One plan of the page: the name of its file, its title, and its arguments."""

    name: str
    title: str
    arguments: tuple[str, ...]

    @property
    def line(self) -> str:
        return "python -m bert_jax.plan " + " ".join(self.arguments)


def page_plans() -> list[PagePlan]:
    """All plans of the page."""
    plans = []
    for kind, sizes in ROWS.items():
        for size, lengths in sizes.items():
            for length, rows in lengths.items():
                plans.append(_plan(f"{kind}_{size}_{length}", SLICES[kind], size, length, rows * DEVICES))
    for length, rows in ROWS["v5e"]["base"].items():
        batch = rows * DEVICES * PARTS
        plans.append(_plan(f"v5e_base_{length}_parts", SLICES["v5e"], "base", length, batch, PARTS))
        plans.append(_plan(f"v5e_base_{length}_flash", SLICES["v5e"], "base", length, batch, PARTS, FLASH))
    plans.append(_plan("v6e_base_128_flash", SLICES["v6e"], "base", 128, ROWS["v6e"]["base"][128] * DEVICES, 1, FLASH))
    for length, rows in ROWS["v4"]["base"].items():
        batch = rows * DEVICES * PARTS
        plans.append(_plan(f"v4_base_{length}_flash", SLICES["v4"], "base", length, batch, PARTS, FLASH))
    plans.append(_plan("v5e_large_512_flash", SLICES["v5e"], "large", 512, LARGE_ROWS * DEVICES, 1, FLASH))
    plans.append(_plan("v5e_large_512_zero", SLICES["v5e"], "large", 512, LARGE_ROWS * DEVICES, 1, ZERO))
    plans.append(_plan("v5e_large_512_flash_zero", SLICES["v5e"], "large", 512, LARGE_ROWS * DEVICES, 1, FLASH, ZERO))
    plans.append(_plan("v5e_large_512_scan", SLICES["v5e"], "large", 512, LARGE_ROWS * DEVICES, 1, SCAN))
    plans.append(_plan("v5e_256_large_512", "v5e:16x16", "large", 512, 4096, 1, MANY, SCAN))
    plans.append(_plan("v5e_1024_large_512", "v5e:16x16", "large", 512, 4 * 4096, 1, MANY, SCAN, "--slices 4"))
    return plans


def _plan(name: str, topology: str, size: str, seq_len: int, batch: int, parts: int = 1, *more: str) -> PagePlan:
    arguments = [f"--config configs/bert_{size}.py --topology {topology} --seq_len {seq_len}"]
    arguments += [f"--config.batch_size={batch}", f"--config.microbatches={parts}"]
    # The splash kernel, which does not store attention scores, has no dropout of them; short rows are fast without it.
    arguments += ["--config.model.attention_dropout=0.0"] if seq_len > 128 and FLASH not in more else []
    title = f"BERT-{size.capitalize()}, T={seq_len}"
    title += f", {parts} microbatches" if parts > 1 else ""
    title += ", flash" if FLASH in more else ""
    title += ", scan" if SCAN in more else ""
    title += ", optimizer sharded" if ZERO in more else ""
    return PagePlan(name, title, tuple(" ".join([*arguments, *more]).split()))


def make(plan: PagePlan, folder: Path) -> None:
    """Runs the command of the plan, which writes its JSON file to the folder."""
    file = folder / f"{plan.name}.json"
    line = [sys.executable, "-m", "bert_jax.plan", *plan.arguments, "--json", str(file.absolute())]
    subprocess.run(line, cwd=common.REPOSITORY, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})


def page_of(plans: Sequence[tuple[PagePlan, dict[str, Any]]]) -> str:
    """The table of docs/tpu_plan.md."""
    columns = ["model", "slice", "rows a step", "fits", "a device", "a step", "MFU"]
    columns += ["without Pallas", "at best", "tokens a second"]
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    rows += [f"| {' | '.join(_row(plan, found))} |" for plan, found in plans]
    return "\n".join([*rows, ""])


def _row(plan: PagePlan, found: dict[str, Any]) -> list[str]:
    memory = found["memory_bytes"]
    cells = [
        plan.title,
        f"{found['slices']} x {found['topology']}" if found["slices"] > 1 else found["topology"],
        f"{found['batch_size']:,}",
        "yes" if found["fits"] else "no",
    ]
    cells.append(f"{memory['total'] / 2**30:.1f} of {memory['available'] / 2**30:.1f} GiB")
    if not found["fits"]:
        return [*cells, "-", "-", "-", "-", "-"]
    bare = f"{found['mfu_without_pallas']:.1%}" if found["flops"]["pallas"] else "-"
    speed = [
        f"{found['step_seconds'] * 1e3:,.0f} ms",
        f"{found['mfu']:.1%}",
        bare,
        f"{found['mfu_at_most']:.0%}" if "mfu_at_most" in found else "-",
        f"{found['tokens_per_second']:,.0f}",
    ]
    return [*cells, *speed]


BEGIN, END = "<!-- plans: benchmarks/tpu_plans.py -->\n", "<!-- end of plans -->\n"


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("benchmarks.tpu_plans", __doc__ or "")
    parser.add_argument("--plans", type=Path, required=True, help="the folder of the plans' JSON files")
    parser.add_argument("--only", default="", help="make only plans whose name begins with this")
    parser.add_argument("--page", type=Path, help="write the table into this page, between its two markers")
    flags = parser.parse_args(arguments)
    flags.plans.mkdir(parents=True, exist_ok=True)
    plans = page_plans()
    for plan in plans:
        if plan.name.startswith(flags.only) and not (flags.plans / f"{plan.name}.json").exists():
            make(plan, flags.plans)
    files = [(plan, flags.plans / f"{plan.name}.json") for plan in plans]
    found = [(plan, json.loads(file.read_text(encoding="utf-8"))) for plan, file in files if file.exists()]
    if flags.page:
        before, rest = flags.page.read_text(encoding="utf-8").split(BEGIN)
        flags.page.write_text(before + BEGIN + page_of(found) + END + rest.split(END)[1], encoding="utf-8")
    else:
        print(page_of(found))
        print("\n".join(plan.line for plan in plans))


if __name__ == "__main__":
    command.run(main)
