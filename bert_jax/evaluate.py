"""Evaluates a checkpoint on held-out shards, or a fine-tuned checkpoint on labelled files."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

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
from bert_jax.progress import print_note
from bert_jax.tasks import measurement
from bert_jax.tasks.reading import Columns
from bert_jax.train import distributed, partitioning, trainer
from bert_jax.train.evaluate import make_evaluator
from bert_jax.train.objectives import OBJECTIVES, Objective, pretraining_objective
from bert_jax.train.objectives.pretraining import ShardTraits
from bert_jax.train.steps import Forward

DESCRIPTION = """Evaluates a checkpoint and prints the metrics as one JSON line.

  python -m bert_jax.evaluate --checkpoint runs/base --data shards      the pretraining metrics on held-out shards
  python -m bert_jax.evaluate --checkpoint runs/ewt --data test.conllu  the metrics of the task it was fine-tuned for

--checkpoint is a workdir, a step in it, an export, or a Hugging Face folder. --data is the output of
data_prep.build_examples (its eval/ is evaluated; pass DIR/train to evaluate the training shards), or a file or folder
of the task that the checkpoint was fine-tuned for.

Each row counts once. The masks of held-out rows are the same in every evaluation, so metrics of different checkpoints
are comparable. Rows are sharded over all devices. If the model does not fit on one device, shard its parameters too,
with --mesh.fsdp or --mesh.tensor.
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
    """Returns metrics by name: `loss`, `mlm_loss`, `mlm_accuracy`, ..., or those of the checkpoint's task.

    An undefined metric, such as a correlation with a constant, is None. columns names the columns of
    a task file, for a checkpoint that does not record them. average is as in open_checkpoint. Without
    mesh, rows are sharded over all devices. Raises UserError if the checkpoint lacks the head that
    the data requires, if its tokenizer is not that of the data, or if the mesh does not fit the
    model or the devices.
    """
    loaded = open_checkpoint(checkpoint, average)
    config = TrainConfig(batch_size=batch_size, compute_dtype=compute_dtype, mesh=mesh or MeshConfig())
    partitioning.check_model(loaded.model, partitioning.make_mesh(config.mesh, flag=MESH_FLAG), MESH_FLAG)
    if loaded.task:
        found = measurement.evaluate(loaded, data, config, columns)
        for line in found.remarks:
            print_note(line, quiet=not distributed.is_primary())
        defined = {name: None if math.isnan(value) else value for name, value in found.metrics.items()}
        return {**defined, "counts": found.counts}
    return _evaluate_shards(loaded, Path(data), config, max_rows)


def _evaluate_shards(loaded: LoadedModel, data: Path, config: TrainConfig, max_rows: int) -> dict[str, Any]:
    dataset = open_dataset(data, "train" if data.name == "train" else "eval")
    mesh = partitioning.make_mesh(config.mesh)
    size = partitioning.whole_rows(config.batch_size, mesh)
    loader = PretrainingLoader(dataset, loaded.vocabulary, batch_size=size, seed=0)
    objective = _objective(loaded, dataset)
    plan = Forward(loaded.model, trainer.runtime_of(config), objective)
    with jax.set_mesh(mesh):
        evaluator = make_evaluator(plan, mesh, lambda _, rows: loader.evaluation_batches(size, max_rows, rows), size)
        wanted = paths.flatten(abstract_params(loaded.model, objective.heads))
        params = paths.unflatten({path: loaded.params[path] for path in wanted})
        metrics = evaluator(partitioning.put(params, mesh), 0)
    if "mdm_loss" in metrics:
        metrics["mdm_perplexity"] = math.exp(metrics["mdm_loss"])  # an upper bound of the perplexity, as the loss is
    return metrics


def _objective(loaded: LoadedModel, dataset: Dataset) -> Objective:
    """Returns the objective for which the checkpoint has heads and the shards have labels."""
    heads, traits = loaded.heads, ShardTraits.of(dataset, loaded.vocabulary)
    name = "replaced_tokens" if heads.generator else loaded.training.get("objective", "auto")
    if not (heads.lm or heads.mlm or heads.generator or heads.named):
        raise UserError(f"{loaded.origin} has no language-model head to evaluate; use a pretrained checkpoint")
    config = PretrainConfig(
        objective=name if name in OBJECTIVES else "auto",
        span_boundary=traits.mask_unit == "span" and heads.span_boundary,
        generator_size=heads.generator / loaded.model.width or PretrainConfig.generator_size,
        replaced_weight=loaded.training.get("replaced_weight", PretrainConfig.replaced_weight),
    )
    traits = dataclasses.replace(traits, labelled=traits.labelled and heads.next_sentence)
    return pretraining_objective(config, loaded.model, [traits])


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("bert_jax.evaluate", DESCRIPTION)
    parser.add_argument("--checkpoint", required=True, help="the checkpoint (see above)")
    parser.add_argument("--data", required=True, help="shards, or a file or folder of the task")
    parser.add_argument("--batch_size", type=int, default=64, help="rows per batch (default: 64)")
    parser.add_argument("--compute_dtype", default="auto", help="float32, bfloat16 or auto (default: auto)")
    parser.add_argument(
        "--max_rows", type=int, default=0, help="at most this many rows of the shards (default: 0, all)"
    )
    checkpoint_average.add_argument(parser)
    for column in ("text", "text_pair", "label"):
        what = f"the {column} column of a task file, by name or number (default: as in fine-tuning)"
        parser.add_argument(f"--{column}", default="", help=what)
    on = parser.add_argument_group("number of devices on each mesh axis (docs/scaling.md)")
    for axis in partitioning.AXES:
        default = getattr(MeshConfig(), axis)
        what = f"default: {default}" if default > 0 else "default: -1, the devices that remain"
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
