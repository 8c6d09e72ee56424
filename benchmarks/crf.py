r"""A CRF against independent tags on CoNLL-2003: entity F1 over several seeds, and tags that break their scheme.

    BERT_JAX_DATA=DATA python -m benchmarks.crf --checkpoint CHECKPOINT --workdir runs/crf
    BERT_JAX_DATA=DATA python -m benchmarks.crf --checkpoint CHECKPOINT --workdir runs/crf_rates --sentences 800 \
        --seeds 1 --epochs 2 --crf_rates 1,10,100,300

Each system is fine-tuned by bert-jax finetune with configs/tagging.py and the same seeds, so with the same batches. A
CRF is trained once for each of --crf_rates (task.crf_rate); --tags independent and --tags crf measure one kind only.
Prints one JSON line for each system: the mean, the sample standard deviation and the values of F1 on dev and on test,
the number of predicted tags of dev that cannot follow the one before them in IOB2, and the largest absolute score of a
transition, in nats. An interrupted run is resumed from --workdir.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from bert_jax import command, finetuning
from bert_jax import config as config_lib
from bert_jax.config import FinetuneConfig, TaskConfig
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model.heads.tag_scheme import breaks_iob2
from bert_jax.tasks import registry
from bert_jax.tasks.example import Sentence
from bert_jax.tasks.inference import FineTuned
from bert_jax.train.host_memory import keep_freed_memory

RECIPE = common.REPOSITORY / "configs" / "tagging.py"
TAGS = ("independent", "crf")


def write_sentences(sentences: Sequence[Sentence], path: Path) -> Path:
    """Writes sentences as CoNLL columns: the word and its tag."""
    blocks = (
        "".join(f"{word} {tag}\n" for word, tag in zip(one.words, one.tags or (), strict=True)) for one in sentences
    )
    path.write_text("\n".join(blocks), encoding="utf-8")
    return path


def task_of(sentences: int, folder: Path) -> TaskConfig:
    """CoNLL-2003, or as many of the first sentences of its training file, and half as many of the others."""
    whole = TaskConfig(name="conll2003")
    if not sentences:
        return whole
    task, files = registry.resolve(whole)
    folder.mkdir(parents=True, exist_ok=True)
    paths: dict[str, Any] = {
        split: str(write_sentences(registry.read(task, path).items[:count], folder / f"{split}.conll"))
        for (split, path), count in zip(files.items(), (sentences, sentences // 2, sentences // 2), strict=True)
    }
    return dataclasses.replace(TaskConfig(kind="tagging", text="0", label="1"), **paths)


def systems(tags: Sequence[str], rates: Sequence[float]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name of each system and its options of the task."""
    if "independent" in tags:
        yield "independent", {}
    for rate in rates if "crf" in tags else ():
        yield f"crf_rate_{rate:g}", {"crf": True, "crf_rate": rate}


def invalid_tags(folder: Path, dev: Path, batch_size: int) -> int:
    """How many predicted tags of a file cannot follow the one before them in IOB2."""
    model = FineTuned(open_checkpoint(folder), batch_size=batch_size)
    split = registry.read(model.task, dev)
    predicted = model.predictions(model.encode(dataclasses.replace(split, labelled=False)))
    return sum(breaks_iob2(*pair) for one in predicted for pair in pairwise(("O", *one["tags"])))


def largest_transition(folder: Path) -> float | None:
    """The largest absolute score of a transition of a CRF; None without one."""
    transitions = open_checkpoint(folder).params.get("crf/transitions")
    return None if transitions is None else float(np.abs(transitions).max())


def measure(config: FinetuneConfig, workdir: Path) -> dict[str, Any]:
    """Fine-tunes all seeds of a system, and returns its figures."""
    result = finetuning.finetune(config, workdir)
    _, files = registry.resolve(config.task)
    folders = [workdir / f"seed-{seed}" for seed in result["seeds"]] if len(result["seeds"]) > 1 else [workdir]
    return {
        "f1": result["metrics"]["f1"],
        "test_f1": result["metrics"].get("test_f1"),
        "invalid_tags": [invalid_tags(folder, files["dev"], config.batch_size) for folder in folders],
        "largest_transition": [largest_transition(folder) for folder in folders],
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, help="the checkpoint to fine-tune, as in config.init_from")
    parser.add_argument("--workdir", required=True, type=Path, help="the folder for the runs")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default: 5)")
    parser.add_argument("--sentences", type=int, default=0, help="train on the first N sentences (default: 0, all)")
    parser.add_argument("--epochs", type=float, default=3.0, help="epochs of each run (default: 3)")
    parser.add_argument("--learning_rate", type=float, default=3e-4, help="of the encoder (default: 3e-4)")
    parser.add_argument(
        "--crf_rates", default="100", help=f"task.crf_rate of each CRF (default: {TaskConfig.crf_rate:g})"
    )
    parser.add_argument("--tags", nargs="+", choices=TAGS, default=[*TAGS], help="kinds of systems (default: both)")
    known = parser.parse_args(list(arguments))
    if common.shared_data() is None:
        raise command.UserError("BERT_JAX_DATA is not set. Set it to the folder with conll2003/")
    keep_freed_memory()
    recipe = config_lib.load(FinetuneConfig, config_lib.read_flags(f"{RECIPE}:task=conll2003"))
    config = dataclasses.replace(
        recipe,
        task=task_of(known.sentences, known.workdir / "data"),
        init_from=known.checkpoint,
        seeds=(known.seeds,),
        epochs=known.epochs,
        optimizer=dataclasses.replace(recipe.optimizer, learning_rate=known.learning_rate),
    )
    settings = {
        "checkpoint": Path(known.checkpoint).name,
        "sentences": known.sentences or "all",
        "epochs": known.epochs,
        "learning_rate": known.learning_rate,
        "seeds": known.seeds,
    }
    for name, options in systems(known.tags, [float(rate) for rate in known.crf_rates.split(",")]):
        task = dataclasses.replace(config.task, **options)
        found = measure(dataclasses.replace(config, task=task), known.workdir / name)
        common.emit_results(f"crf/{name}", found, settings)


if __name__ == "__main__":
    command.run(main)
