"""Records what a checkout of bert_jax produces for fixed inputs, and compares two such records.

    python tests/tools/freeze.py make --checkout OLD --output old_record
    python tests/tools/freeze.py make --checkout NEW --output new_record
    python tests/tools/freeze.py compare old_record new_record

Use it to show that a refactoring changes no behaviour. `make` drives the stable contract only: the commands of
`python -m bert_jax`, their flags, the configuration keys and the files that they write. It imports nothing from the
checkout, so one copy of this script records any version. `compare` prints one line per item and exits with 1 if any
item differs.

A record is a folder with one JSON file per group, and `work/` with the outputs themselves:

  shards      tokenizers, shards and copied shards: the hash of every file; manifests field by field
  training    short pretraining runs: every tensor of every checkpoint bit for bit, every logged number, config.json,
              result.json and the files of the workdir. Equal losses and tensors imply equal batches
  finetuning  short fine-tuning runs of each kind of task, with the outputs of evaluate and predict
  inference   embed, features, fill_mask, export to each format and convert
  commands    option names of every --help, exit codes of typical mistakes, all keys and values of each recipe
  hlo         optimized HLO of the tiny and the base train step on CPU (not in the default; a few minutes)
  tpu         the plans of the same two recipes for v5e:4x4 (not in the default; minutes; needs libtpu, which may lie
              in a folder of its own: pip install --no-deps --target DIR libtpu, then --libtpu DIR)

`--only hlo,tpu` chooses groups; the groups that they build on are made first unless the record has them already.
Times, throughput, memory, versions and absolute paths are removed before anything is compared. Messages for people
are not compared. The default groups take about six CPU-minutes; compiled programs are reused from
JAX_COMPILATION_CACHE_DIR if it is set. Records are comparable only if the same machine and the same Python
environment (that of this interpreter) made them.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import freeze_commands
import freeze_runs
from freeze_sandbox import Sandbox

Items = Callable[[Sandbox], Iterator[freeze_runs.Item]]

# Each group: the items that it yields and the groups whose outputs it reads.
GROUPS: dict[str, tuple[Items, tuple[str, ...]]] = {
    "shards": (freeze_runs.shards, ()),
    "training": (freeze_runs.training, ("shards",)),
    "finetuning": (freeze_runs.finetuning, ("shards", "training")),
    "inference": (freeze_runs.inference, ("shards", "training", "finetuning")),
    "commands": (freeze_commands.items, ()),
    "hlo": (freeze_runs.compiled_steps, ("shards",)),
    "tpu": (freeze_runs.plans, ()),
}
DEFAULT = ("shards", "training", "finetuning", "inference", "commands")


def make(checkout: Path, output: Path, only: tuple[str, ...], libtpu: str) -> None:
    sandbox = Sandbox(checkout.resolve(), (output / "work").resolve(), libtpu)
    sandbox.check()
    needed = {name for group in only for name in GROUPS[group][1] if not (output / f"{name}.json").exists()}
    for group, (items, _) in GROUPS.items():
        if group in only or group in needed:
            sandbox.clear(group)
            record = {name: _attempt(group, name, item) for name, item in items(sandbox)}
            text = sandbox.without_paths(json.dumps(record, indent=1))
            (output / f"{group}.json").write_text(text + "\n", encoding="utf-8")


def _attempt(group: str, name: str, item: Callable[[], Any]) -> Any:
    """The value of an item. A failure is recorded as the value, so that it does not hide the items after it."""
    start = time.monotonic()
    try:
        value = item()
    except Exception as error:
        value = {"failed": f"{type(error).__name__}: {error}"}
        print(f"{group}/{name}: {error}", file=sys.stderr)
    print(f"{group}/{name} {time.monotonic() - start:.1f} s", file=sys.stderr)
    return value


def compare(first: Path, second: Path) -> int:
    """Prints a line per item that either record has; returns how many differ."""
    differing = 0
    for group in GROUPS:
        records = [_read(folder / f"{group}.json") for folder in (first, second)]
        for name in dict.fromkeys([*records[0], *records[1]]):
            old, new = (record.get(name, "not in this record") for record in records)
            tolerance = freeze_runs.TOLERANCE if group == "tpu" else 0.0
            found = list(differences(old, new, tolerance))
            if found and group == "hlo":
                found = freeze_runs.explain(old, new)
            differing += bool(found)
            print(f"{'DIFFERS' if found else 'same   '} {group}/{name}{_summary(found)}")
    return differing


def differences(old: Any, new: Any, tolerance: float = 0.0, where: str = "") -> Iterator[str]:
    """One text for each leaf of two JSON values that differs, order of keys included; numbers by relative tolerance."""
    if isinstance(old, dict) and isinstance(new, dict):
        if list(old) != list(new) and sorted(old) == sorted(new):
            yield f"{where or '.'}: the keys are the same in another order"
        for key in dict.fromkeys([*old, *new]):
            absent = "absent"
            yield from differences(old.get(key, absent), new.get(key, absent), tolerance, f"{where}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, tolerance, f"{where}[{index}]")
    elif isinstance(old, float | int) and isinstance(new, float | int) and abs(old - new) <= tolerance * abs(old):
        return
    elif old != new:
        yield f"{where}: {_short(old)} -> {_short(new)}"


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _summary(found: list[str]) -> str:
    shown = "".join(f"\n          {text}" for text in found[:8])
    return shown + (f"\n          and {len(found) - 8} more" if len(found) > 8 else "")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    making = actions.add_parser("make", help="record what a checkout produces")
    making.add_argument("--checkout", type=Path, required=True, metavar="DIR", help="the root of the repository")
    making.add_argument("--output", type=Path, required=True, metavar="RECORD", help="the folder of the record")
    making.add_argument("--only", default=",".join(DEFAULT), metavar="GROUP,...", help="default: %(default)s")
    making.add_argument("--libtpu", default="", metavar="DIR", help="the folder that holds libtpu, for the group tpu")
    comparing = actions.add_parser("compare", help="compare two records")
    comparing.add_argument("records", type=Path, nargs=2, metavar="RECORD")
    options = parser.parse_args(arguments)
    if options.action == "compare":
        differing = compare(*options.records)
        print(f"{differing} items differ" if differing else "all items are the same")
        return int(differing > 0)
    only = tuple(options.only.split(","))
    if unknown := set(only) - set(GROUPS):
        parser.error(f"unknown group {', '.join(sorted(unknown))}; choose from {', '.join(GROUPS)}")
    make(options.checkout, options.output, only, options.libtpu)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
