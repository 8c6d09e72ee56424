"""Plans of BERT-Base and BERT-Large on slices of TPUs, and the page that shows them, docs/tpu_plan.md.

    python -m benchmarks.tpu_plans --plans benchmarks/results/tpu_plans [--only v5e] [--page docs/tpu_plan.md]

Each plan is stored as JSON in the folder of --plans; existing plans are not recomputed. Without --page, the table is
printed with the command of each plan. Needs libtpu (pip install '.[tpu]') but no TPU; a plan takes minutes.
"""

from collections.abc import Sequence

from benchmarks import plan_tables
from benchmarks.plan_tables import Found, PagePlan, PlanTable
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


def _cells(plan: PagePlan, found: Found) -> list[str]:
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


TABLE = PlanTable(
    "<!-- plans: benchmarks/tpu_plans.py -->\n",
    (
        *("model", "slice", "rows a step", "fits", "a device", "a step", "MFU"),
        *("without Pallas", "at best", "tokens a second"),
    ),
    _cells,
    tuple(page_plans()),
)


def main(arguments: Sequence[str]) -> None:
    parser = plan_tables.parser("python -m benchmarks.tpu_plans", __doc__ or "")
    plan_tables.update([TABLE], parser.parse_args(arguments))


if __name__ == "__main__":
    command.run(main)
