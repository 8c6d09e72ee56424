"""Evaluates a checkpoint on held-out shards, or a fine-tuned checkpoint on labelled files."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import jax

from bert_jax import command, shard_metrics
from bert_jax.command import UserError
from bert_jax.config import MeshConfig, TrainConfig
from bert_jax.data.shards import open_dataset
from bert_jax.interop import checkpoint_average
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.interop.sentence_transformers import COSINE, DOT, unused_document_prompt
from bert_jax.progress import print_note
from bert_jax.tasks import beir, measurement
from bert_jax.tasks.embedder import Embedder, VectorSettings, settings_of
from bert_jax.tasks.reading import Columns
from bert_jax.train import distributed, partitioning
from bert_jax.train.compilation_cache import enable_compilation_cache, write_on_every_host
from bert_jax.train.run import runtime_of

DESCRIPTION = """Evaluates a checkpoint and prints the metrics as one JSON line.

  bert-jax evaluate --checkpoint runs/base --data shards      the pretraining metrics on held-out shards
  bert-jax evaluate --checkpoint runs/ewt --data test.conllu  the metrics of the task it was fine-tuned for

--checkpoint is a workdir, a step in it, an export, a Hugging Face folder, or hf:NAME. --data is the output of
bert-jax build-examples (its eval/ is evaluated; pass DIR/train to evaluate the training shards), or a file or folder
of the task that the checkpoint was fine-tuned for.

  bert-jax evaluate --checkpoint runs/vectors --data scifact   retrieval, of vectors of texts

A folder in BEIR's layout (corpus.jsonl, queries.jsonl, qrels/test.tsv) measures retrieval by cosines, or by dot
products where a sentence-transformers folder says so: ndcg@10, mrr@10 and recall@k. --data scifact/qrels/dev.tsv
measures another split. Vectors are made as by bert-jax embed without --pool, with the checkpoint's prompts
`query` and `document`. Queries that are in the corpus under their own _id find themselves, as in sentence-transformers;
--skip_self leaves them out of their hits, as BEIR does. Pairs with scores (STS) are a task file of a checkpoint that
was trained for vectors, or of a sentence-transformers folder:
--data dev.tsv --text sentence1 --text_pair sentence2 --label score prints spearman and pearson.

Each row counts once. The masks of held-out rows are the same in every evaluation, so metrics of different checkpoints
are comparable. Rows are sharded over all devices. If the model does not fit on one device, shard its parameters too,
with --mesh.fsdp or --mesh.tensor.

On shards, a causal model also has a perplexity (per token) and a word_perplexity, a bidirectional language model (ELMo)
both for each direction (forward_lm_perplexity, backward_lm_perplexity, ...), and a model trained by masked diffusion
the bounds mdm_perplexity and mdm_word_perplexity. A word is a token with the tokens that continue it, as in whole-word
masking. A causal model and each direction of ELMo predict special tokens, such as the [SEP] that ends a text, except at
the end of the sequence that they begin at; each counts as a word, as the end of a sentence does in published figures.
In all other measures, special tokens are given and not counted. --pseudo_perplexity adds pseudo_loss, pseudo_perplexity
and pseudo_word_perplexity of a masked language model (Salazar et al. 2020), for which the model runs once for each
token of a sequence: limit the rows with --max_rows, which takes the first ones.
"""

MESH_FLAG = "--mesh"


class EvaluateOptions(TypedDict, total=False):
    """The options of `evaluate` that an opened model takes."""

    batch_size: int
    compute_dtype: str
    max_rows: int
    label_map: str
    max_length: int
    truncate_dim: int
    skip_self: bool
    metrics: str
    positive: str
    null_threshold: float | None
    mesh: MeshConfig | None
    pseudo_perplexity: bool


def evaluate(
    checkpoint: str | Path | LoadedModel,
    data: str | Path,
    *,
    batch_size: int = 64,
    compute_dtype: str = "auto",
    max_rows: int = 0,
    columns: Columns | None = None,
    label_map: str = "",
    max_length: int = 0,
    truncate_dim: int = 0,
    skip_self: bool = False,
    metrics: str = "",
    positive: str = "",
    null_threshold: float | None = None,
    average: str = "",
    mesh: MeshConfig | None = None,
    pseudo_perplexity: bool = False,
) -> dict[str, Any]:
    """Returns metrics by name: `loss`, `mlm_loss`, `mlm_accuracy`, ..., or those of the checkpoint's task.

    On shards, the perplexities of a model that predicts next tokens or was trained by masked diffusion
    come after them (shard_metrics.perplexities), and with pseudo_perplexity those of a masked language
    model (shard_metrics.pseudo_perplexity). max_rows limits the rows of shards that are measured; 0 means all.

    An undefined metric, such as a correlation with a constant, is None. columns names the columns of a task file, for a
    checkpoint that does not record them; label_map, max_length, truncate_dim, metrics, positive and null_threshold are
    as in measurement.evaluate. max_length and truncate_dim are also those of texts in retrieval, and skip_self is that
    of beir.measure. average applies to a checkpoint given by its path, as in open_checkpoint. Without mesh, rows are
    sharded over all devices. Raises UserError if the checkpoint lacks the head that the data or pseudo_perplexity
    requires, if its tokenizer is not that of the data, for a max_length of shards, or if the mesh does not fit the
    model or the devices.
    """
    loaded = checkpoint if isinstance(checkpoint, LoadedModel) else open_checkpoint(checkpoint, average)
    if beir.is_beir(Path(data)):
        _refuse_for_retrieval(
            data,
            metrics=metrics,
            label_map=label_map,
            positive=positive,
            max_rows=max_rows,
            pseudo_perplexity=pseudo_perplexity,
            columns=columns,
            mesh=mesh != MeshConfig() and mesh,
            null_threshold=null_threshold is not None,
        )
        settings = settings_of(loaded, max_length=max_length, truncate_dim=truncate_dim)
        return _retrieval(loaded, Path(data), settings, batch_size, compute_dtype, skip_self)
    if skip_self:
        raise UserError(f"--skip_self is for retrieval, but {data} is no folder in BEIR's layout; leave it out")
    config = TrainConfig(batch_size=batch_size, compute_dtype=compute_dtype, mesh=mesh or MeshConfig())
    partitioning.check_model(loaded.model, partitioning.make_mesh(config.mesh, flag=MESH_FLAG), MESH_FLAG)
    if loaded.task:
        _refuse_for_task(max_rows, pseudo_perplexity)
        found = measurement.evaluate(
            loaded, data, config, columns, label_map, max_length, metrics, positive, null_threshold, truncate_dim
        )
        return _task_metrics(found)
    others = {"label_map": label_map, "metrics": metrics, "positive": positive}
    _refuse_for_shards(columns or Columns(), others, null_threshold, max_length, truncate_dim)
    dataset = open_dataset(data, "eval")  # of DIR/train, its own part
    pseudo = shard_metrics.pseudo_perplexity(loaded, dataset, config, max_rows) if pseudo_perplexity else {}
    return shard_metrics.objective_metrics(loaded, dataset, config, max_rows) | pseudo


def _refuse_for_retrieval(data: str | Path, **options: object) -> None:
    """Raises UserError if an option is given that the evaluation of a data set of retrieval does not use."""
    if unused := ", ".join(name for name, value in options.items() if value):
        raise UserError(f"{data} is a data set of retrieval, whose evaluation does not use {unused}; leave it out")


def _refuse_for_task(max_rows: int, pseudo_perplexity: bool) -> None:
    """Raises UserError if an option is given that is for shards, but the checkpoint was fine-tuned for a task."""
    if pseudo_perplexity:
        raise UserError("--pseudo_perplexity measures pretrained models on shards; leave it out for a task")
    if max_rows:
        raise UserError("--max_rows limits rows of shards; task metrics are computed over whole files. Leave it out")


def _refuse_for_shards(
    columns: Columns, others: Mapping[str, str], null_threshold: float | None, max_length: int, truncate_dim: int
) -> None:
    """Raises UserError if an option of tasks is given, but the checkpoint was pretrained.

    others    further options by name, empty where they are not given
    """
    given = {"text": columns.text, "text_pair": columns.text_pair, "label": columns.label, **others}
    given["null_threshold"] = "" if null_threshold is None else str(null_threshold)
    for flag, value in given.items():
        if value:
            raise UserError(f"--{flag} is {value!r}, but the checkpoint has no task; omit it")
    if max_length:
        raise UserError(f"--max_length is {max_length}, but shards have a length of their own; omit it")
    if truncate_dim:
        raise UserError(f"--truncate_dim is {truncate_dim}, but shards are not measured by vectors of texts; omit it")


def _task_metrics(found: measurement.Evaluation) -> dict[str, Any]:
    """The metrics of a task and its counts; prints the remarks. Metrics that are undefined are None."""
    for line in found.remarks:
        distributed.note(line)
    defined = {name: None if math.isnan(value) else value for name, value in found.metrics.items()}
    return {**defined, "counts": found.counts}


def _retrieval(
    loaded: LoadedModel, data: Path, settings: VectorSettings, batch_size: int, compute_dtype: str, skip_self: bool
) -> dict[str, Any]:
    """The metrics of retrieval by cosines, or by dot products if these are the checkpoint's similarity."""
    if jax.process_count() > 1:
        raise UserError("retrieval is measured by one process, on all of its devices. Start only one")
    config = TrainConfig(compute_dtype=compute_dtype)
    similarity = (loaded.task or {}).get("similarity", COSINE)
    if similarity != DOT:
        settings = dataclasses.replace(settings, normalize=True, cut_first=True)
        if similarity != COSINE:
            print_note(f"retrieval is measured by cosines, but the checkpoint's similarity is {similarity!r}")
    if name := unused_document_prompt(loaded.task or {}):
        print_note(
            f"documents have no prompt, as in sentence-transformers: the checkpoint's prompt {name!r} would have to be "
            "called 'document'"
        )
    model = Embedder(loaded, settings, batch_size=batch_size, compute_dtype=runtime_of(config).compute_dtype)
    metrics, counts = beir.measure(
        data, lambda texts, role: model.vectors([(t,) for t in texts], model.prompts[role]), skip_self
    )
    return {**metrics, "counts": counts | {"truncated": model.truncated}}


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("bert-jax evaluate", DESCRIPTION)
    parser.add_argument("--checkpoint", required=True, help="the checkpoint (see above)")
    parser.add_argument("--data", required=True, help="shards, or a file or folder of the task")
    parser.add_argument("--batch_size", type=int, default=64, help="rows per batch (default: 64)")
    parser.add_argument("--compute_dtype", default="auto", help="float32, bfloat16 or auto (default: auto)")
    parser.add_argument(
        "--max_rows", type=int, default=0, help="at most this many rows of the shards (default: 0, all)"
    )
    parser.add_argument(
        "--pseudo_perplexity",
        action="store_true",
        help="also mask each token of the shards in turn, for masked language models",
    )
    checkpoint_average.add_argument(parser)
    for column in ("text", "text_pair", "label"):
        what = f"the {column} column of a task file, by name or number (default: as in fine-tuning)"
        parser.add_argument(f"--{column}", default="", help=what)
    what = (
        "what the labels of a task file mean, such as 0:NEGATIVE,1:POSITIVE (default: what they say, without regard to "
        "case; the number I means LABEL_I)"
    )
    parser.add_argument("--label_map", default="", metavar="LABEL:NAME,...", help=what)
    what = "of a task file: those to print, such as accuracy,macro_f1 (default: as fine-tuned)"
    parser.add_argument("--metrics", default="", metavar="NAME,...", help=what)
    what = "the class that f1, precision and recall are of (default: as fine-tuned)"
    parser.add_argument("--positive", default="", metavar="LABEL", help=what)
    what = "of questions: the probability of no answer above which none is given (default: as fine-tuned, else 0.5)"
    parser.add_argument("--null_threshold", type=float, metavar="P", help=what)
    what = "truncate texts to N tokens (default: as fine-tuned); not for shards"
    parser.add_argument("--max_length", type=int, default=0, metavar="N", help=what)
    what = "vectors of texts: measure only their first N dimensions (default: as the checkpoint says)"
    parser.add_argument("--truncate_dim", type=int, default=0, metavar="N", help=what)
    what = "retrieval: a query does not find the document of its own _id"
    parser.add_argument("--skip_self", action="store_true", help=what)
    on = parser.add_argument_group("number of devices on each mesh axis (docs/scaling.md)")
    for axis in partitioning.AXES:
        default = getattr(MeshConfig(), axis)
        what = f"default: {default}" if default > 0 else "default: -1, the devices that remain"
        on.add_argument(f"{MESH_FLAG}.{axis}", type=int, default=default, metavar="N", help=what)
    distributed.add_flags(parser)
    known = parser.parse_args(list(arguments))
    enable_compilation_cache()
    columns = Columns(known.text, known.text_pair, known.label)
    with distributed.processes(known, saves=False):
        write_on_every_host()
        result = evaluate(
            known.checkpoint,
            known.data,
            batch_size=known.batch_size,
            compute_dtype=known.compute_dtype,
            max_rows=known.max_rows,
            pseudo_perplexity=known.pseudo_perplexity,
            columns=columns if columns != Columns() else None,
            label_map=known.label_map,
            max_length=known.max_length,
            truncate_dim=known.truncate_dim,
            skip_self=known.skip_self,
            metrics=known.metrics,
            positive=known.positive,
            null_threshold=known.null_threshold,
            average=known.average,
            mesh=MeshConfig(**{axis: getattr(known, f"mesh.{axis}") for axis in partitioning.AXES}),
        )
        if distributed.is_primary():
            print(json.dumps(result))
