"""The command `bert-jax`, also `python -m bert_jax`.

    bert-jax pretrain --config bert_base --workdir runs/base ...

imports bert_jax.commands.pretrain and calls its main. This module imports neither jax nor numpy.
"""

import difflib
import importlib
import os
from collections.abc import Sequence
from typing import NoReturn

import bert_jax
from bert_jax import command_line
from bert_jax.errors import UserError
from bert_jax.host import keep_freed_memory

# The commands by job, with their descriptions. The main of bert_jax/commands/NAME.py runs one, with _ for -.
JOBS: dict[str, dict[str, str]] = {
    "Start": {
        "quickstart": "run all steps from text to an exported BERT, in 10 minutes",
        "recipes": "list, show or copy the recipes for --config",
        "keys": "list the keys for --config.KEY=VALUE",
    },
    "Prepare text": {
        "train-tokenizer": "train a vocabulary: WordPiece, byte BPE or SentencePiece",
        "clean": "keep documents of good quality, once each",
        "build-examples": "make sharded training examples from text",
        "inspect-shards": "show, check and verify shards",
        "merge-shards": "join shards that several machines have built",
        "copy-examples": "copy shards to or from gs:// or s3://, and verify them",
    },
    "Train": {
        "plan": "estimate memory and time of a training step on TPUs or GPUs, without any",
        "pretrain": "pretrain an encoder on shards",
        "resize-vocabulary": "add words to a vocabulary, or drop unused tokens",
        "finetune": "fine-tune a checkpoint on a task or your own file",
    },
    "Measure": {
        "evaluate": "measure a checkpoint on held-out shards or a labelled file",
        "score": "score sentences by a masked model, and prefer one of pairs (BLiMP)",
        "features": "train heads on the frozen layers of a checkpoint",
        "report": "make an HTML page of a run",
    },
    "Use": {
        "predict": "label the texts of a file",
        "embed": "compute vectors of texts or tokens",
        "fill-mask": "guess masked words, or generate text by masked diffusion",
    },
    "Exchange": {
        "convert": "read a Hugging Face folder or Google's TensorFlow checkpoint",
        "export": "write a checkpoint for Hugging Face, ONNX, StableHLO or Orbax",
    },
}

MODULES = {name: f"bert_jax.commands.{name.replace('-', '_')}" for listed in JOBS.values() for name in listed}


def listing() -> str:
    """Returns the help text of bert-jax: its commands by job."""
    width = max(map(len, MODULES))
    lines = ["bert-jax takes raw text to a pretrained, fine-tuned and exported encoder (BERT and its family).", ""]
    lines += ["usage: bert-jax COMMAND [OPTIONS]", ""]
    for job, listed in JOBS.items():
        lines += [f"{job}:"]
        lines += [f"  {name:{width}}  {description}" for name, description in listed.items()]
        lines += [""]
    lines += ["--import FILE, in every command, first runs a Python file that adds a task, an objective, a masking"]
    lines += ["rule or an optimizer (docs/extending.md)."]
    lines += ["bert-jax COMMAND --help explains a command; bert-jax --version prints the version."]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Runs a command by its name, in which _ may stand for -.

    Raises:
        UserError: The name is unknown, or the command raises it.
    """
    name, *rest = arguments or ["--help"]
    name = name.replace("_", "-")
    if name in ("--help", "-h", "help"):
        print(listing())
    elif name == "--version":
        print(f"bert-jax {bert_jax.__version__}")
    elif name in MODULES:
        # Settings that come too late once the command's module has imported numpy or jax.
        if name in ("pretrain", "finetune"):
            keep_freed_memory()
        elif name in JOBS["Prepare text"]:
            # None of these commands multiplies matrices, but numpy would start a thread per core in each process, and
            # these spin for a while.
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        importlib.import_module(MODULES[name]).main(rest)
    else:
        near = difflib.get_close_matches(name, MODULES, n=1, cutoff=0.5)
        advice = f"Did you mean {near[0]}?" if near else "bert-jax --help lists them"
        raise UserError(f"bert-jax has no command {arguments[0]}. {advice}")


def start() -> NoReturn:
    """The entry point of the command `bert-jax`."""
    command_line.run(main)
