"""The items of the groups hlo and tpu: the compiled train step on CPU and its plan for a TPU slice, for freeze.py."""

import collections
import gzip
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from freeze_sandbox import Sandbox, options, sha256

TOLERANCE = 0.005  # of a plan's cycles, seconds and bytes; its FLOPs are equal
RECIPES = ("bert_tiny", "bert_base")
DOT = r"= \w+\[([\d,]*)\]\S* dot\((?:\w+\[[\d,]*\]\S* )?(%[\w.\-]+),.*lhs_contracting_dims=\{([\d,]*)\}"
STEP = {"steps": 1, "batch_size": 4, "compute_dtype": "float32"}


def compiled_steps(sandbox: Sandbox) -> Iterator[tuple[str, Callable[[], Any]]]:
    for recipe in RECIPES:
        yield recipe, lambda recipe=recipe: _compiled_step(sandbox, recipe)


def _compiled_step(sandbox: Sandbox, recipe: str) -> Any:
    """The train step of a run of one step: of the programs that the run compiles it has the most matmuls."""
    dump, run = sandbox.work / "hlo" / f"{recipe}_dump", sandbox.work / "hlo" / recipe
    flags = f"--xla_dump_to={dump} --xla_dump_hlo_as_text"
    files = (sandbox.recipe(f"{recipe}.py"), f"--workdir={run}", "--config.data.train=shards/nsp")
    # A program that comes from the cache is not compiled, and so not written.
    fresh = {"JAX_ENABLE_COMPILATION_CACHE": "0", "JAX_COMPILATION_CACHE_DIR": str(dump / "cache")}
    sandbox.run("pretrain", *files, *options(STEP), XLA_FLAGS=flags, **fresh)
    shutil.rmtree(run)  # a checkpoint of BERT-Base is a gigabyte
    programs = [file.read_text(encoding="utf-8") for file in dump.glob("*.cpu_after_optimizations.txt")]
    text = max(programs, key=lambda program: program.count(" dot("))
    shutil.rmtree(dump)
    normalized = normalize(text)
    kept = sandbox.work / "hlo" / f"{recipe}.txt.gz"
    kept.write_bytes(gzip.compress(normalized.encode("utf-8"), mtime=0))
    return {"text": sha256(normalized.encode("utf-8")), "opcodes": opcodes(text), "matmul FLOPs": matmul_flops(text)}


def normalize(text: str) -> str:
    """HLO without names, source locations and the tables of files and functions: what is left is the program itself."""
    text = re.sub(r", metadata=\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}", "", text)
    text = re.sub(r"\n(?:FileNames|FunctionNames|FileLocations|StackFrames)\n.*?(?=\n\n)", "", text, flags=re.DOTALL)
    text = re.sub(r"^HloModule \S+", "HloModule", text)
    numbers: dict[str, str] = {}
    text = re.sub(r"%[\w.\-]+", lambda match: numbers.setdefault(match[0], f"%{len(numbers)}"), text)
    # Parameters of a computation's signature are named without a percent sign.
    return re.sub(r"([(,] ?)[\w.\-]+: ", r"\1", text)


def opcodes(text: str) -> dict[str, int]:
    """How many instructions there are by opcode."""
    found = re.findall(r"^\s+(?:ROOT )?%[\w.\-]+ = .*? ([a-z][\w\-]*)\(", text, flags=re.MULTILINE)
    return dict(sorted(collections.Counter(found).items()))


def matmul_flops(text: str) -> int:
    """Twice the multiply-adds of every dot, those of loop bodies once."""
    shapes = dict(re.findall(r"(%[\w.\-]+) = \w+\[([\d,]*)\]", text))
    dots = re.findall(DOT, text)
    total = 0
    for result, left, contracted in dots:
        sizes = _sizes(shapes[left])
        total += 2 * math.prod(_sizes(result)) * math.prod(sizes[axis] for axis in _sizes(contracted))
    return total


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size]


def explain(old: Any, new: Any) -> list[str]:
    """Describes how two compiled steps differ, by opcode, or reports that the counts of opcodes are equal."""
    if "opcodes" not in old or "opcodes" not in new:
        return [f"{old} -> {new}"[:400]]
    names = sorted({*old["opcodes"], *new["opcodes"]})
    counts = [(name, old["opcodes"].get(name, 0), new["opcodes"].get(name, 0)) for name in names]
    found = [f"{name}: {before} -> {after}" for name, before, after in counts if before != after]
    flops = f"matmul FLOPs: {old['matmul FLOPs']} -> {new['matmul FLOPs']}"
    return ["the text differs", flops, *(found or ["the opcodes are the same"])]


def plans(sandbox: Sandbox) -> Iterator[tuple[str, Callable[[], Any]]]:
    for recipe in RECIPES:
        yield recipe, lambda recipe=recipe: _plan(sandbox, recipe)


def _plan(sandbox: Sandbox, recipe: str) -> Any:
    """A plan without its prose. Integers of FLOPs are written as text, to which no tolerance applies."""
    file = Path("tpu") / f"{recipe}.json"
    arguments = (sandbox.recipe(f"{recipe}.py"), "--topology=v5e:4x4", "--seq_len=128", f"--json={file}")
    tpu = {"path": sandbox.libtpu, "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    sandbox.run("plan", *arguments, **tpu)
    plan = json.loads((sandbox.work / file).read_text(encoding="utf-8"))
    plan["flops"] = {name: str(value) for name, value in plan["flops"].items()}
    return {name: value for name, value in plan.items() if name != "notes"}
