"""The items of the group commands: options, exit codes and recipes, for freeze.py."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from freeze_sandbox import Sandbox

COMMANDS = (
    *("train-tokenizer", "build-examples", "inspect-shards", "copy-examples", "pretrain", "finetune", "evaluate"),
    *("convert", "export", "embed", "features", "fill-mask", "predict", "plan", "report", "quickstart"),
)

# Command lines with one mistake each; RECIPES is the folder configs/ of the checkout.
TINY = "pretrain --config RECIPES/bert_tiny.py --workdir commands/run"
MISTAKES = (
    "train-tokenizer --input no_such_file.txt --output commands/tokenizer --vocab_size 500",
    "train-tokenizer --input commands/empty.txt --output commands/tokenizer --vocab_size 500",
    "build-examples --input commands/empty.txt --tokenizer no_such_folder --output commands/o --seq_len 32",
    "build-examples --input commands/empty.txt --tokenizer commands --output commands/o --objective xyz",
    "inspect-shards no_such_folder",
    "pretrain --workdir commands/run",
    f"{TINY}",
    f"{TINY} --config.data.train=no_such_folder",
    f"{TINY} --config.stepz=5",
    f"{TINY} --config.steps=many",
    f"{TINY} --config.optimizer=sgd --config.data.train=no_such_folder",
    f"{TINY} --unknown_flag",
    "pretrain --config no_such_recipe.py --workdir commands/run",
    "finetune --config RECIPES/glue.py:task=xyz --workdir commands/run",
    "finetune --config RECIPES/own.py --workdir commands/run --config.task.train=no_such_file.tsv",
    "evaluate --checkpoint no_such_folder --data no_such_folder",
    "export --checkpoint no_such_folder --format hf --output commands/out",
    "export --checkpoint no_such_folder --format xyz --output commands/out",
    "embed --checkpoint no_such_folder --input commands/empty.txt --output commands/out.npz",
    "predict --checkpoint no_such_folder --input commands/empty.txt",
    "plan --config RECIPES/bert_tiny.py --topology v5e:nonsense",
    "report no_such_folder",
)

# Arguments of recipes in addition to the default one.
ARGUMENTS = {
    "bert_large": ("lamb",),
    "gpt": ("gpt",),
    "modernbert": ("large",),
    "relative": ("buckets",),
    "spanbert": ("base",),
    "spans": ("kind=span_pairs",),
    "squad": ("task=squad2",),
    "choice": ("task=copa", "task=own"),
    "tagging": ("task=conll2003", "task=own"),
    "glue": ("task=mnli", "task=stsb"),
    "superglue": ("task=wic",),
}

# "default 0.1", "default: 0.1" and "0.1, the default".
NUMBER = r"(-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?)"
NUMERIC_DEFAULT = re.compile(rf"default:? {NUMBER}|{NUMBER}, the default")

# Runs in the checkout: get_config() of every recipe is a part of the contract.
READ_RECIPES = """
import importlib, json, sys
print(json.dumps({f"{name}:{argument}": getattr(importlib.import_module(f"configs.{name}"), "get_config")(
    *([argument] if argument else [])).to_dict() for name, argument in json.loads(sys.argv[1])}))
"""


def items(sandbox: Sandbox) -> Iterator[tuple[str, Callable[[], Any]]]:
    for command in COMMANDS:
        yield f"help {command}", lambda command=command: read_help(sandbox.run(command, "--help"))
    (sandbox.work / "commands" / "empty.txt").write_text("")
    for line in MISTAKES:
        yield f"mistake {line}", lambda line=line: _mistake(sandbox, line)
    yield "recipes", lambda: _recipes(sandbox)


def read_help(text: str) -> dict[str, Any]:
    """The options of a --help: whether each is required, its choices in braces, and its default if that is a number.

    Placeholders and prose may change, and are left out. Options that take a value and flags are told apart.
    """
    usage, _, details = text.partition("\n\n")
    usage = " ".join(usage.split())
    found: dict[str, Any] = {}
    # Each option's description begins at the margin and ends where the next one begins.
    for block in re.split(r"\n  (?=-)", details)[1:]:
        heads = re.match(r"(-\w, )?(--[\w.]+)(?: (\S+))?", block)
        if not heads or heads[2] == "--help":
            continue
        name = heads[2]
        stands = re.search(rf"(\[?){re.escape(name)}(?![\w.])", usage)
        default = NUMERIC_DEFAULT.search(" ".join(block.split()))
        choices = re.search(r"\{.*?\}", block)
        found[name] = {
            "required": bool(stands and not stands[1]),
            "takes a value": bool(re.search(rf"{re.escape(name)} [A-Z{{]", usage)) or bool(heads[3]),
            "choices": choices[0] if choices else "",
            "default": float((default[1] or default[2]).replace(",", "")) if default else None,
        }
    return found


def _mistake(sandbox: Sandbox, line: str) -> dict[str, Any]:
    done = sandbox.attempt(*line.replace("RECIPES", f"{sandbox.checkout}/configs").split())
    left = sorted(path.name for path in (sandbox.work / "commands").iterdir())
    return {"exit code": done.returncode, "traceback": "Traceback" in done.stderr, "files left": left}


def _recipes(sandbox: Sandbox) -> Any:
    names = sorted(path.stem for path in (sandbox.checkout / "configs").glob("*.py") if path.stem != "__init__")
    wanted = [(name, argument) for name in names for argument in ("", *ARGUMENTS.get(name, ()))]
    command = [sys.executable, "-c", READ_RECIPES, json.dumps(wanted)]
    done = subprocess.run(command, cwd=sandbox.work, env=sandbox.environment(), stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)
