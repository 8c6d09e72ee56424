"""Measures a checkpoint on held-out shards, or a fine-tuned one on labelled files."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from bert_jax import command
from bert_jax.command import UserError
from bert_jax.config import MeshConfig, PretrainConfig, TrainConfig
from bert_jax.data.loader import PretrainingLoader
from bert_jax.data.shards import Dataset, open_dataset
from bert_jax.interop import checkpoint_average
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import paths
from bert_jax.model.bert import abstract_params
from bert_jax.tasks import measurement
from bert_jax.tasks.reading import Columns
from bert_jax.train import distributed, partitioning, trainer
from bert_jax.train.evaluate import make_evaluator
from bert_jax.train.objectives import OBJECTIVES, Objective, pretraining_objective
from bert_jax.train.objectives.pretraining import ShardTraits
from bert_jax.train.steps import Forward

DESCRIPTION = """Measures a checkpoint.

  python -m bert_jax.evaluate --checkpoint runs/base --data shards      masked tokens and next sentences, held out
  python -m bert_jax.evaluate --checkpoint runs/ewt --data test.conllu  the metrics of the task it was fine-tuned for

--checkpoint is a workdir, a step in it, an export, or a Hugging Face folder. --data is the output of
data_prep.build_examples (its eval/ is measured; name DIR/train to measure that), or a file (or folder) of the task
that the checkpoint was fine-tuned for. Prints the metrics as one JSON line. Each row counts once; masks of held-out
rows are the same at every measurement, so figures compare between checkpoints. Rows are spread over all devices;
--mesh.fsdp and --mesh.tensor cut the parameters, too, for a model that one device does not hold.
"""

MESH_FLAG = "--mesh"


def evaluate(
    checkpoint: str | Path,
    data: str | Path,
    *,
    batch_size: int = 64,
    compute_dtype: str = "auto",
    max_rows: int = 0,
    columns: Columns | None = None,
    average: str = "",
    mesh: MeshConfig | None = None,
) -> dict[str, Any]:
    """Metrics by name: `loss`, `mlm_loss`, `mlm_accuracy`, `nsp_accuracy` ..., or those of the checkpoint's task.

    A metric that is undefined (a correlation with a constant) is None. columns are those of a task's file, where the
    checkpoint does not know them; average is as in open_checkpoint; rows lie over all devices unless mesh says
    otherwise. Raises UserError for a checkpoint without the head that the data asks for, or of another tokenizer than
    theirs, and for a mesh that it or the devices do not divide over.
    """
    loaded = open_checkpoint(checkpoint, average)
    config = TrainConfig(batch_size=batch_size, compute_dtype=compute_dtype, mesh=mesh or MeshConfig())
    partitioning.check_model(loaded.model, partitioning.make_mesh(config.mesh, flag=MESH_FLAG), MESH_FLAG)
    if loaded.task:
        found = measurement.evaluate(loaded, data, config, columns)
        console = Console(stderr=True, soft_wrap=True, quiet=not distributed.is_primary())
        for line in found.remarks:
            console.print(line, markup=False, highlight=False)
        defined = {name: None if math.isnan(value) else value for name, value in found.metrics.items()}
        return {**defined, "counts": found.counts}
    return _evaluate_shards(loaded, Path(data), config, max_rows)


def _evaluate_shards(loaded: LoadedModel, data: Path, config: TrainConfig, max_rows: int) -> dict[str, Any]:
    dataset = open_dataset(data, "train" if data.name == "train" else "eval")
    mesh = partitioning.make_mesh(config.mesh)
    size = partitioning.whole_rows(config.batch_size, mesh)
    loader = PretrainingLoader(dataset, loaded.tokenizer, batch_size=size, seed=0)
    objective = _objective(loaded, dataset)
    plan = Forward(loaded.model, trainer.runtime_of(config), objective)
    with jax.set_mesh(mesh):
        evaluator = make_evaluator(plan, mesh, lambda _, rows: loader.evaluation_batches(size, max_rows, rows), size)
        wanted = paths.flatten(abstract_params(loaded.model, objective.heads))
        params = paths.unflatten({path: loaded.params[path] for path in wanted})
        return dict(evaluator(partitioning.put(params, mesh), 0))


def _objective(loaded: LoadedModel, dataset: Dataset) -> Objective:
    """All that the checkpoint has heads for and the shards have labels for."""
    heads, traits = loaded.heads, ShardTraits.of(dataset)
    name = loaded.training.get("objective", "auto")
    if not (heads.lm or heads.mlm or heads.named):
        raise UserError(f"{loaded.origin} has no language-model head to measure; name a pretrained checkpoint")
    config = PretrainConfig(
        objective=name if name in OBJECTIVES else "auto",
        span_boundary=traits.mask_unit == "span" and heads.span_boundary,
    )
    traits = dataclasses.replace(traits, labelled=traits.labelled and heads.next_sentence)
    return pretraining_objective(config, loaded.model, [traits])


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("bert_jax.evaluate", DESCRIPTION)
    parser.add_argument("--checkpoint", required=True, help="what to measure")
    parser.add_argument("--data", required=True, help="shards, or a file or folder of the checkpoint's task")
    parser.add_argument("--batch_size", type=int, default=64, help="rows a batch (default: 64)")
    parser.add_argument("--compute_dtype", default="auto", help="float32, bfloat16, auto (default: float32 on a CPU)")
    parser.add_argument("--max_rows", type=int, default=0, help="measure no more rows of the shards (default: all)")
    checkpoint_average.add_argument(parser)
    for column in ("text", "text_pair", "label"):
        what = f"the {column} column of a task's file, by name or number (default: as the checkpoint was trained)"
        parser.add_argument(f"--{column}", default="", help=what)
    on = parser.add_argument_group("devices on each axis of the mesh (docs/scaling.md)")
    for axis in partitioning.AXES:
        default = getattr(MeshConfig(), axis)
        what = f"default: {default}" if default > 0 else "default: -1, what the others leave"
        on.add_argument(f"{MESH_FLAG}.{axis}", type=int, default=default, metavar="N", help=what)
    distributed.add_flags(parser)
    known = parser.parse_args(list(arguments))
    columns = Columns(known.text, known.text_pair, known.label)
    with distributed.processes(known, saves=False):
        result = evaluate(
            known.checkpoint,
            known.data,
            batch_size=known.batch_size,
            compute_dtype=known.compute_dtype,
            max_rows=known.max_rows,
            columns=columns if columns != Columns() else None,
            average=known.average,
            mesh=MeshConfig(**{axis: getattr(known, f"mesh.{axis}") for axis in partitioning.AXES}),
        )
        if distributed.is_primary():
            print(json.dumps(result))


if __name__ == "__main__":
    command.run(main)
