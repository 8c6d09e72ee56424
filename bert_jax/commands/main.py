"""The command `bert-jax`, also `python -m bert_jax`: every command of bert_jax and data_prep by one name.

    bert-jax pretrain --config bert_base --workdir runs/base ...

imports the module of the command and calls its main. Importing this module imports neither jax nor numpy."""

import difflib
import importlib
import os
from collections.abc import Sequence
from typing import NoReturn

import bert_jax
from bert_jax import command_line
from bert_jax.errors import UserError
from bert_jax.train.host import keep_freed_memory

# The commands by job: the module whose main runs each, and what the command does.
JOBS: dict[str, dict[str, tuple[str, str]]] = {
    "Start": {
        "quickstart": ("bert_jax.commands.quickstart", "run all steps from text to an exported BERT, in 10 minutes"),
        "recipes": ("bert_jax.commands.recipes", "list, show or copy the recipes for --config"),
    },
    "Prepare text": {
        "train-tokenizer": ("data_prep.vocabulary", "train a vocabulary: WordPiece, byte BPE or SentencePiece"),
        "clean": ("data_prep.cleaning.job", "keep documents of good quality, once each"),
        "build-examples": ("data_prep.build", "make sharded training examples from text"),
        "inspect-shards": ("bert_jax.commands.inspect_shards", "show, check and verify shards"),
        "merge-shards": ("data_prep.merge", "join shards that several machines have built"),
        "copy-examples": ("data_prep.copy", "copy shards to or from gs:// or s3://, and verify them"),
    },
    "Train": {
        "plan": ("bert_jax.commands.plan", "estimate memory and time of a training step on TPUs or GPUs, without any"),
        "pretrain": ("bert_jax.pretraining", "pretrain an encoder on shards"),
        "resize-vocabulary": ("bert_jax.interop.resizing", "add words to a vocabulary, or drop unused tokens"),
        "finetune": ("bert_jax.tasks.finetuning", "fine-tune a checkpoint on a task or your own file"),
    },
    "Measure": {
        "evaluate": ("bert_jax.tasks.evaluation", "measure a checkpoint on held-out shards or a labelled file"),
        "features": ("bert_jax.tasks.features", "train heads on the frozen layers of a checkpoint"),
        "report": ("bert_jax.reporting.report", "make an HTML page of a run"),
    },
    "Use": {
        "predict": ("bert_jax.tasks.prediction", "label the texts of a file"),
        "embed": ("bert_jax.tasks.vectors", "compute vectors of texts or tokens"),
        "fill-mask": ("bert_jax.tasks.fill_mask", "guess masked words, or generate text by masked diffusion"),
    },
    "Exchange": {
        "convert": ("bert_jax.interop.export", "read a Hugging Face folder or Google's TensorFlow checkpoint"),
        "export": ("bert_jax.interop.export", "write a checkpoint for Hugging Face, ONNX, StableHLO or Orbax"),
    },
}
MODULES = {name: module for listed in JOBS.values() for name, (module, _) in listed.items()}


def listing() -> str:
    """The help text of bert-jax: its commands by job."""
    width = max(map(len, MODULES))
    lines = ["bert-jax takes raw text to a pretrained, fine-tuned and exported encoder (BERT and its family).", ""]
    lines += ["usage: bert-jax COMMAND [OPTIONS]", ""]
    for job, listed in JOBS.items():
        lines += [f"{job}:"]
        lines += [f"  {name:{width}}  {description}" for name, (_, description) in listed.items()]
        lines += [""]
    lines += ["bert-jax COMMAND --help explains a command; bert-jax --version prints the version."]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Runs a command by its name, in which _ may stand for -. Raises UserError for an unknown name."""
    name, *rest = arguments or ["--help"]
    name = name.replace("_", "-")
    if name in ("--help", "-h", "help"):
        print(listing())
    elif name == "--version":
        print(f"bert-jax {bert_jax.__version__}")
    elif name in MODULES:
        _prepare_process(name)
        importlib.import_module(MODULES[name]).main(rest)
    else:
        near = difflib.get_close_matches(name, MODULES, n=1, cutoff=0.5)
        advice = f"Did you mean {near[0]}?" if near else "bert-jax --help lists them"
        raise UserError(f"bert-jax has no command {arguments[0]}. {advice}")


def _prepare_process(name: str) -> None:
    """Makes the settings that come too late once the module of the command has imported numpy or jax."""
    if name in ("pretrain", "finetune"):
        keep_freed_memory()
    elif MODULES[name].startswith("data_prep."):
        # No command of data_prep multiplies matrices, but numpy would start a thread per core in each process, and
        # these spin for a while.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def start() -> NoReturn:
    """The entry point of the command `bert-jax`."""
    command_line.run(main)
