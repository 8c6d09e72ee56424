"""Evaluates a checkpoint on held-out shards, on labelled files or by retrieval, and prints the metrics as JSON."""

import argparse
import json
from collections.abc import Sequence

from bert_jax import command_line
from bert_jax.config import MeshConfig
from bert_jax.config.loading import literal
from bert_jax.interop.open_checkpoint import add_average_flag
from bert_jax.tasks.evaluation import MESH_FLAG, evaluate
from bert_jax.tasks.reading.tables import Columns
from bert_jax.train import distributed, sharding
from bert_jax.train.compilation import enable_compilation_cache, write_on_every_host

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


def _parser() -> command_line.Parser:
    parser = command_line.Parser("bert-jax evaluate", DESCRIPTION)
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
    add_average_flag(parser)
    for column in ("text", "text_pair", "label"):
        meaning = f"the {column} column of a task file, by name or number (default: as in fine-tuning)"
        parser.add_argument(f"--{column}", default="", help=meaning)
    meaning = (
        "what the labels of a task file mean, such as '{0: NEGATIVE, 1: POSITIVE}' (default: what they say, without "
        "regard to case; the number I means LABEL_I)"
    )
    parser.add_argument("--label_map", default={}, type=_label_map, metavar="{LABEL: NAME}", help=meaning)
    meaning = "of a task file: those to print, such as accuracy,macro_f1 (default: as fine-tuned)"
    parser.add_argument("--metrics", default="", metavar="NAME,...", help=meaning)
    meaning = "the class that f1, precision and recall are of (default: as fine-tuned)"
    parser.add_argument("--positive", default="", metavar="LABEL", help=meaning)
    meaning = "of questions: the probability of no answer above which none is given (default: as fine-tuned, else 0.5)"
    parser.add_argument("--null_threshold", type=float, metavar="P", help=meaning)
    meaning = "truncate texts to N tokens (default: as fine-tuned); not for shards"
    parser.add_argument("--max_length", type=int, default=0, metavar="N", help=meaning)
    meaning = "vectors of texts: measure only their first N dimensions (default: as the checkpoint says)"
    parser.add_argument("--truncate_dim", type=int, default=0, metavar="N", help=meaning)
    meaning = "retrieval: a query does not find the document of its own _id"
    parser.add_argument("--skip_self", action="store_true", help=meaning)
    on = parser.add_argument_group("number of devices on each mesh axis (docs/scaling.md)")
    for axis in sharding.AXES:
        default = getattr(MeshConfig(), axis)
        meaning = f"default: {default}" if default > 0 else "default: -1, the devices that remain"
        on.add_argument(f"{MESH_FLAG}.{axis}", type=int, default=default, metavar="N", help=meaning)
    distributed.add_flags(parser)
    return parser


def _label_map(text: str) -> dict[str, str]:
    try:
        labels = literal(text)
        return {str(label): str(name) for label, name in labels.items()}
    except (ValueError, AttributeError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a map of labels, such as {{0: NEGATIVE, 1: POSITIVE}}"
        ) from None


def main(arguments: Sequence[str]) -> None:
    known = _parser().parse_args(list(arguments))
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
            metrics=tuple(filter(None, known.metrics.split(","))),
            positive=known.positive,
            null_threshold=known.null_threshold,
            average=known.average,
            mesh=MeshConfig(**{axis: getattr(known, f"mesh.{axis}") for axis in sharding.AXES}),
        )
        if distributed.is_primary():
            print(json.dumps(result))
