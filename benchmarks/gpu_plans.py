"""Plans of BERT and ModernBERT on H100 and H200, and the tables of docs/gpu_plan.md that show them.

    python -m benchmarks.gpu_plans --plans benchmarks/results/gpu_plans [--only h100_base] [--page docs/gpu_plan.md]

Each plan is stored as JSON in the folder of --plans; existing plans are not recomputed. Without --page, the tables are
printed with the command of each plan. Needs jax's CUDA plugin (pip install '.[gpu12]') but no GPU; a plan takes
minutes. Steps that were measured on an H200 stand beside their plans. Plans of packed rows need --shards, made by

    bert-jax build-examples --input 'data_prep/sample/books/*.txt.xz' --tokenizer bert-base-uncased.txt \\
        --output SHARDS --objective single --pack 8 --seq_len 512
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import common, plan_tables
from benchmarks.plan_tables import SHARDS, Found, PagePlan, PlanTable
from benchmarks.step import PEERS
from bert_jax import command

MEASURED = common.REPOSITORY / "benchmarks" / "results" / "2026-11-27_h200.jsonl"  # of benchmarks.step
TOKENS = 32_768  # of a GPU in a step, in one microbatch
MATMUL_FLOPS = 790e12  # a second, which a large matmul reaches on an H100 (docs/gpu_plan.md)
EINSUM, TRITON = (f"--config.model.attention={kernel}" for kernel in ("einsum", "triton"))
NO_DROPOUT = "--config.model.attention_dropout=0.0"  # of attention, without which cuDNN computes it
SCAN = "--config.model.layer_loop=scan"
PACKED = (f"--config.data.train={SHARDS}", "--config.next_sentence=False")
KERNELS = {"cudnn": "cuDNN"}  # the names of the page, where they differ


def base_plans() -> tuple[PagePlan, ...]:
    """The plans of BERT-Base."""

    def plan(name: str, length: int, gpus: int, *more: str) -> PagePlan:
        return _plan(name, "BERT-Base", "bert_base", length, gpus, *more)

    return (
        plan("h100_base_128", 128, 1, EINSUM),
        plan("h100_base_128_triton", 128, 1, TRITON),
        plan("h100_base_512_triton", 512, 1, TRITON),
        plan("h100_base_512", 512, 1, NO_DROPOUT),
        plan("h100_8_base_128", 128, 8, EINSUM),
        plan("h100_8_base_512", 512, 8, NO_DROPOUT),
    )


def other_plans() -> tuple[PagePlan, ...]:
    """The plans of larger models and longer rows."""

    def large(name: str, title: str, gpus: int, *more: str) -> PagePlan:
        return _plan(name, title, "bert_large", 512, gpus, NO_DROPOUT, *more)

    def modern(name: str, length: int, gpus: int, *more: str) -> PagePlan:
        return _plan(name, "ModernBERT-Base, scan", "modernbert", length, gpus, SCAN, *more)

    longer = "--config.model.max_positions=8192"
    return (
        large("h100_large_512_packed", "BERT-Large, packed", 1, *PACKED),
        large("h100_large_512_packed_scan", "the same, scan", 1, *PACKED, SCAN),
        large("h100_large_512_scan", "BERT-Large, scan", 1, SCAN),
        large("h100_8_large_512_scan", "BERT-Large, scan", 8, SCAN),
        modern("h100_modernbert_1024", 1024, 1),
        modern("h100_8_modernbert_1024", 1024, 8),
        modern("h100_modernbert_8192", 8192, 1, longer),
        modern("h100_8_modernbert_8192", 8192, 8, longer),
    )


def measured_plans() -> tuple[PagePlan, ...]:
    """The plans of the steps that were measured."""

    def plan(name: str, title: str, recipe: str, length: int, *more: str) -> PagePlan:
        return _plan(name, title, recipe, length, 1, *more, kind="h200")

    return (
        plan("h200_base_128_triton", "BERT-Base", "bert_base", 128, TRITON),
        plan("h200_base_128_einsum", "BERT-Base", "bert_base", 128, EINSUM),
        plan("h200_base_128", "BERT-Base", "bert_base", 128, NO_DROPOUT),
        plan("h200_base_512_triton", "BERT-Base", "bert_base", 512, TRITON),
        plan("h200_base_512_einsum", "BERT-Base", "bert_base", 512, EINSUM),
        plan("h200_base_512", "BERT-Base", "bert_base", 512, NO_DROPOUT),
        plan("h200_large_512", "BERT-Large", "bert_large", 512, NO_DROPOUT),
    )


def _plan(name: str, title: str, recipe: str, length: int, gpus: int, *more: str, kind: str = "h100") -> PagePlan:
    arguments = [f"--config=configs/{recipe}.py", f"--topology={kind}:{gpus}", f"--seq_len={length}"]
    arguments += [f"--config.batch_size={TOKENS // length * gpus}", "--config.microbatches=1"]
    return PagePlan(name, title, (*arguments, *more))


def _base_cells(plan: PagePlan, found: Found) -> list[str]:
    dropped = "" if found["model"]["attention_dropout"] else ", no dropout there"
    share = found["flops"]["model"] / found["devices"] / found["step_seconds"] / MATMUL_FLOPS
    bounds = [f"{share:.1%}", f"{found['mfu_at_most']:.0%}"]
    return [_length(found), _attention(found) + dropped, *_step(found), *bounds, _traffic(found), _speed(found)]


def _other_cells(plan: PagePlan, found: Found) -> list[str]:
    return [plan.title, _length(found), *_step(found), _traffic(found), _attention(found), _speed(found)]


def _measured_cells(plan: PagePlan, found: Found) -> list[str]:
    lines = _measured(found)
    last = lines[-1]
    ratios = {line["peer"].partition(", torch, ")[0]: f"{line['ratio']:.2f}" for line in lines if line["peer"]}
    return [
        plan.title,
        _length(found),
        f"{found['batch_size']}",
        _attention(found),
        f"{found['model']['attention_dropout']:g}",
        f"{statistics.median(last['settings']['seconds'][0]) * 1e3:.1f} ms",
        f"{found['step_seconds'] * 1e3:.1f} ms",
        f"{last['settings']['peak_memory_gb']:.1f} GB",
        f"{found['memory_bytes']['total'] / 1e9:.1f} GB",
        f"{last['value'] / 1e3:.0f} k",
        ratios.get(PEERS["equal_compiled"], ""),
        ratios.get(PEERS["equal"], ""),
    ]


def _measured(found: Found) -> list[dict[str, Any]]:
    """The lines of a plan's step with equal work and without XLA flags; those beside torch.compile come last."""
    size = {12: "base", 24: "large"}[found["model"]["layers"]]
    wanted = (
        found["rows"]["seq_len"],
        found["batch_size"],
        found["attention"],
        found["model"]["attention_dropout"],
        "",
    )
    keys = ("seq_len", "batch_size", "attention", "attention_dropout", "xla_flags")
    lines = [json.loads(line) for line in MEASURED.read_text(encoding="utf-8").splitlines()]
    return sorted(
        (
            line
            for line in lines
            if line["name"].startswith(f"training step, {size},")
            and tuple(line["settings"][key] for key in keys) == wanted
            and not str(line["peer"]).startswith(PEERS["full"])
        ),
        key=lambda line: "torch.compile" in str(line["peer"]),
    )


STEP = ("GPUs", "rows a step", "a device", "a step", "MFU")


def _step(found: Found) -> list[str]:
    """The cells of the columns STEP."""
    memory = f"{found['memory_bytes']['total'] / 2**30:.1f} GiB"
    return [
        f"{found['devices']}",
        f"{found['batch_size']:,}",
        memory if found["fits"] else f"{memory}, does not fit",
        f"{found['step_seconds'] * 1e3:.1f} ms",
        f"{found['mfu']:.1%}",
    ]


def _length(found: Found) -> str:
    return f"{found['rows']['seq_len']:,}"


def _attention(found: Found) -> str:
    return ", ".join(KERNELS.get(name, name) for name in found["attention"])


def _traffic(found: Found) -> str:
    return f"{found['roofline']['traffic'] / 1e9:.1f} GB"


def _speed(found: Found) -> str:
    return f"{found['tokens_per_second']:,.0f}"


BASE = PlanTable(
    "<!-- plans: benchmarks/gpu_plans.py, BERT-Base -->\n",
    ("T", "attention", *STEP, "share", "at best", "memory traffic", "tokens a second"),
    _base_cells,
    base_plans(),
)
OTHERS = PlanTable(
    "<!-- plans: benchmarks/gpu_plans.py, other models -->\n",
    ("model", "T", *STEP, "memory traffic", "attention", "tokens a second"),
    _other_cells,
    other_plans(),
)


H200 = PlanTable(
    "<!-- plans: benchmarks/gpu_plans.py, measured -->\n",
    (
        *("model", "T", "rows", "attention", "dropout there", "a step", "plan", "memory", "plan"),
        *("tokens a second", "× torch.compile", "× eager"),
    ),
    _measured_cells,
    measured_plans(),
)
TABLES = (BASE, OTHERS, H200)


def main(arguments: Sequence[str]) -> None:
    parser = plan_tables.parser("python -m benchmarks.gpu_plans", __doc__ or "")
    parser.add_argument("--shards", type=Path, help="the folder of the shards of packed rows")
    flags = parser.parse_args(arguments)
    plan_tables.update(TABLES, flags, flags.shards)


if __name__ == "__main__":
    command.run(main)
