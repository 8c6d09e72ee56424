"""Plans of BERT on slices of TPUs and on GPUs, and the tables of benchmarks/results/plans.md.

    python -m benchmarks.plans [--only h200] [--page benchmarks/results/plans.md]

Each plan is a line of benchmarks/results/plans_tpu.jsonl or plans_gpu.jsonl; recorded plans are not computed again.
Needs libtpu (pip install '.[tpu]') or jax's CUDA plugin (pip install '.[gpu12]'), but no device; a plan takes minutes.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from bert_jax import command_line

RESULTS = common.REPOSITORY / "benchmarks" / "results"
FILES = {"tpu": RESULTS / "plans_tpu.jsonl", "gpu": RESULTS / "plans_gpu.jsonl"}
KEPT = (
    *("topology", "slices", "devices", "fits", "memory_bytes", "flops", "step_seconds", "step_seconds_basis", "mfu"),
    *("step_seconds_without_pallas", "mfu_without_pallas", "tokens_per_second", "attention", "batch_size"),
)
NO_DROPOUT = "--config.model.attention_dropout=0.0"  # of attention, which splash and cuDNN do not have
EINSUM, TRITON = (f"--config.model.attention={kernel}" for kernel in ("einsum", "triton"))
SCAN, FSDP, SLICES = "--config.model.layer_loop=scan", "--config.mesh.fsdp=16", "--slices=4"
ZERO = "--config.mesh.shard_optimizer=True"
MARKS = {
    **{NO_DROPOUT: "no attention dropout", EINSUM: "einsum", TRITON: "triton", SCAN: "scan"},
    **{SLICES: "4 slices", ZERO: "optimizer sharded"},
}


def plans() -> dict[str, tuple[str, ...]]:
    """The arguments of each plan by its name: model, length and topology, then what differs."""
    found: dict[str, tuple[str, ...]] = {}

    def add(size: str, length: int, topology: str, rows: int, *more: str) -> None:
        name = ", ".join([f"BERT-{size.capitalize()}", f"T={length}", topology, *(MARKS.get(one, "") for one in more)])
        recipe = (f"--config=configs/bert_{size}.py", f"--topology={topology}", f"--seq_len={length}")
        found[name.removesuffix(", ")] = (*recipe, f"--config.batch_size={rows}", "--config.microbatches=1", *more)

    for topology, rows in {"v5e:4x4": 2048, "v4:2x2x4": 2048, "v5p:2x2x4": 4096, "v6e:4x4": 4096}.items():
        add("base", 128, topology, rows)
        add("base", 512, topology, rows // 4, NO_DROPOUT)
    add("base", 128, "tpu7x:2x2x2", 4096)
    add("base", 512, "tpu7x:2x2x2", 1024, NO_DROPOUT)
    add("large", 512, "v5e:4x4", 128, NO_DROPOUT)
    add("large", 512, "v5e:4x4", 128, NO_DROPOUT, SCAN)
    add("large", 512, "v5e:4x4", 128, NO_DROPOUT, ZERO)
    add("large", 512, "v5e:16x16", 4096, NO_DROPOUT, SCAN, FSDP)
    add("large", 512, "v5e:16x16", 16384, NO_DROPOUT, SCAN, SLICES, FSDP)
    add("base", 128, "h100:8", 2048, TRITON)
    add("base", 512, "h100:8", 512, NO_DROPOUT)
    for kernel in (TRITON, EINSUM, NO_DROPOUT):
        add("base", 128, "h200:1", 256, kernel)
        add("base", 512, "h200:1", 64, kernel)
    add("large", 512, "h200:1", 64, NO_DROPOUT)
    return found


def computed(arguments: Sequence[str]) -> dict[str, Any]:
    """Runs the command and returns the figures that the tables need."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        line = [sys.executable, "-m", "bert_jax", "plan", *arguments, "--json", str(file)]
        subprocess.run(line, cwd=common.REPOSITORY, check=True, stdout=subprocess.DEVNULL)
        values = json.loads(file.read_text(encoding="utf-8"))
    return {key: values[key] for key in KEPT}


def table(platform: str) -> str:
    """The recorded plans of a platform as Markdown."""
    head = "| plan | rows a step | a device | a step | MFU | TFLOP/s executed | tokens a second |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for one in recorded(platform).values():
        memory = one["memory_bytes"]
        used = f"{memory['total'] / 2**30:.1f} of {memory['available'] / 2**30:.1f} GiB"
        cells = [one["name"], f"{one['batch_size']:,}", used, f"{one['step_seconds'] * 1e3:,.1f} ms"]
        executed = one["flops"]["program"] / one["step_seconds"] / one["devices"] / 1e12  # on a device
        cells += [f"{one['mfu']:.1%}", f"{executed:,.1f}", f"{one['tokens_per_second']:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def recorded(platform: str) -> dict[str, dict[str, Any]]:
    """The recorded plans by name."""
    lines = FILES[platform].read_text(encoding="utf-8").splitlines() if FILES[platform].exists() else []
    return {one["name"]: one for one in map(json.loads, lines)}


def main(arguments: Sequence[str]) -> None:
    parser = command_line.Parser("benchmarks.plans", __doc__ or "")
    parser.add_argument("--only", default="", help="plan only the rows whose name contains this")
    parser.add_argument("--page", type=Path, help="write the tables into this page instead of printing them")
    flags = parser.parse_args(arguments)
    for name, given in plans().items():
        platform = "gpu" if any(kind in name for kind in ("h100", "h200")) else "tpu"
        if flags.only in name and name not in recorded(platform):
            line = {"name": name, "arguments": given, **computed(given)}
            line |= {"versions": common.versions(), "commit": common.commit()}
            with FILES[platform].open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    for platform in FILES:
        if flags.page:
            begin, end = f"<!-- plans: {platform} -->\n", "<!-- end of plans -->"
            common.replace_block(flags.page, begin, table(platform), end)
        else:
            print(table(platform))


if __name__ == "__main__":
    command_line.run(main)
