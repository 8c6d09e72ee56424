"""The command `bert-jax`, also `python -m bert_jax`: every command of bert_jax and data_prep by one name.

    bert-jax pretrain --config bert_base --workdir runs/base ...

runs what `python -m bert_jax.pretrain` runs. Importing this module does not import jax.
"""

import difflib
import runpy
import sys
from collections.abc import Sequence
from typing import NoReturn

import bert_jax
from bert_jax import command
from bert_jax.command import UserError

# By job: the module of each command, and what it does. Its name is that of the module, with - for _.
JOBS: dict[str, dict[str, str]] = {
    "Start": {
        "bert_jax.quickstart": "run all steps from text to an exported BERT, in 10 minutes on two cores",
        "bert_jax.recipes": "list, show or copy the recipes for --config",
    },
    "Prepare text": {
        "data_prep.train_tokenizer": "train a vocabulary: WordPiece, byte-level BPE or SentencePiece",
        "data_prep.clean": "keep documents of good quality, once each",
        "data_prep.build_examples": "make sharded training examples from text",
        "data_prep.inspect_shards": "show, check and verify shards",
        "data_prep.merge_shards": "join shards that several machines have built",
        "data_prep.copy_examples": "copy shards to or from gs:// or s3://, and verify them",
    },
    "Train": {
        "bert_jax.plan": "estimate memory and time of a training step on TPUs or GPUs, without any",
        "bert_jax.pretrain": "pretrain an encoder on shards",
        "bert_jax.resize_vocabulary": "add words to the vocabulary of a checkpoint, or drop unused tokens",
        "bert_jax.finetune": "fine-tune a checkpoint on a task or your own file",
    },
    "Measure": {
        "bert_jax.evaluate": "measure a checkpoint on held-out shards or a labelled file",
        "bert_jax.features": "train heads on the frozen layers of a checkpoint",
        "bert_jax.report": "make an HTML page of a run",
    },
    "Use": {
        "bert_jax.predict": "label the texts of a file",
        "bert_jax.embed": "compute vectors of texts or tokens",
        "bert_jax.fill_mask": "guess masked words, or generate text by masked diffusion",
    },
    "Exchange": {
        "bert_jax.convert": "read a Hugging Face folder or Google's TensorFlow checkpoint",
        "bert_jax.export": "write a checkpoint for Hugging Face, ONNX, StableHLO or Orbax",
    },
}
MODULES = {command.short_name(module): module for listed in JOBS.values() for module in listed}


def listing() -> str:
    """The help text of bert-jax: its commands by job."""
    width = max(map(len, MODULES))
    lines = ["bert-jax takes raw text to a pretrained, fine-tuned and exported encoder (BERT and its family).", ""]
    lines += ["usage: bert-jax COMMAND [OPTIONS]", ""]
    for job, listed in JOBS.items():
        lines += [f"{job}:"]
        lines += [f"  {command.short_name(module):{width}}  {description}" for module, description in listed.items()]
        lines += [""]
    lines += ["bert-jax COMMAND --help explains a command; bert-jax --version prints the version."]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Runs a command by its name. Raises UserError for an unknown one."""
    name, *rest = arguments or ["--help"]
    if name in ("--help", "-h", "help"):
        print(listing())
    elif name == "--version":
        print(f"bert-jax {bert_jax.__version__}")
    elif module := MODULES.get(name.replace("_", "-")):
        command.use_short_names()
        sys.argv = ["-m", *rest]  # as `python -m` has them
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        near = difflib.get_close_matches(name, MODULES, n=1, cutoff=0.5)
        advice = f"Did you mean {near[0]}?" if near else "bert-jax --help lists them"
        raise UserError(f"bert-jax has no command {name}. {advice}")


def start() -> NoReturn:
    """The entry point of the command `bert-jax`."""
    command.run(main)
