"""The three vectors of a span (task.span_vectors) on the entities of CoNLL-2003, over several seeds.

    BERT_JAX_DATA=DATA python -m benchmarks.spans --checkpoint CHECKPOINT --workdir runs/spans

Each is fine-tuned by bert-jax finetune with configs/spans.py on the first sentences of the training file, with the same
seeds and so the same batches, and measured on half as many of dev and of test. Prints one JSON line for each: mean,
sample standard deviation and values of F1. An interrupted run is resumed from --workdir.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from benchmarks import common
from benchmarks.crf import task_of
from bert_jax import command, finetuning
from bert_jax import config as config_lib
from bert_jax.config import FinetuneConfig
from bert_jax.train.host_memory import keep_freed_memory

RECIPE = common.REPOSITORY / "configs" / "spans.py"
VECTORS = ("endpoints", "boundary", "content")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, help="the checkpoint to fine-tune, as in config.init_from")
    parser.add_argument("--workdir", required=True, type=Path, help="the folder for the runs")
    parser.add_argument("--vectors", default=",".join(VECTORS), help="values of task.span_vectors (default: all)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument("--sentences", type=int, default=1000, help="train on the first N sentences (default: 1000)")
    parser.add_argument("--epochs", type=float, default=5.0, help="epochs of each run (default: 5)")
    parser.add_argument("--learning_rate", type=float, default=3e-4, help="peak learning rate (default: 3e-4)")
    parser.add_argument("--max_length", type=int, default=128, help="positions of a sentence (default: 128)")
    known = parser.parse_args(list(arguments))
    if common.shared_data() is None:
        raise command.UserError("BERT_JAX_DATA is not set. Set it to the folder with conll2003/")
    keep_freed_memory()
    recipe = config_lib.load(FinetuneConfig, config_lib.read_flags(f"{RECIPE}:kind=spans"))
    files = task_of(known.sentences, known.workdir / "data")
    task = dataclasses.replace(
        recipe.task, max_length=known.max_length, train=files.train, dev=files.dev, test=files.test
    )
    settings = {
        "checkpoint": Path(known.checkpoint).name,
        "sentences": known.sentences,
        "epochs": known.epochs,
        "learning_rate": known.learning_rate,
        "seeds": known.seeds,
    }
    for vectors in known.vectors.split(","):
        config = dataclasses.replace(
            recipe,
            task=dataclasses.replace(task, span_vectors=vectors),
            init_from=known.checkpoint,
            seeds=(known.seeds,),
            epochs=known.epochs,
            optimizer=dataclasses.replace(recipe.optimizer, learning_rate=known.learning_rate),
        )
        metrics = finetuning.finetune(config, known.workdir / vectors)["metrics"]
        found = {name: metrics[name] for name in ("f1", "test_f1") if name in metrics}
        common.emit_results(f"spans/{vectors}", found, settings)


if __name__ == "__main__":
    command.run(main)
