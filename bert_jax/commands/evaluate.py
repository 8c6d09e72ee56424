"""Evaluates a checkpoint on held-out shards, on labelled files or by retrieval, and prints the metrics as JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from bert_jax.config import MeshConfig
from bert_jax.config.options import option, parse, values
from bert_jax.interop.open_checkpoint import CheckpointOptions
from bert_jax.tasks.evaluation import EvaluateOptions, evaluate
from bert_jax.train import distributed
from bert_jax.train.compilation import enable_compilation_cache, write_on_every_host

DESCRIPTION = """Evaluates a checkpoint and prints the metrics as one JSON line.

  bert-jax evaluate --checkpoint runs/base --data shards      the pretraining metrics on held-out shards
  bert-jax evaluate --checkpoint runs/ewt --data test.conllu  the metrics of the task it was fine-tuned for
  bert-jax evaluate --checkpoint runs/vectors --data scifact  retrieval, by vectors of texts

Shards are the output of bert-jax build-examples: its eval/ is evaluated, or DIR/train with --any_part. Masks of
held-out rows never change, so checkpoints are comparable.
A causal model also has a perplexity and a word_perplexity, a bidirectional language model both for each direction
(forward_lm_perplexity, ...), and masked diffusion their bounds (mdm_perplexity, ...). A word is a token with the tokens
that continue it. The first two also predict special tokens, which count as words; elsewhere these are given.
--pseudo_perplexity adds pseudo_loss, pseudo_perplexity and pseudo_word_perplexity of a masked language model (Salazar
et al. 2020), which runs once for each token: limit the rows with --max_rows.
Retrieval reads a folder in BEIR's layout (corpus.jsonl, queries.jsonl, qrels/test.tsv, or --data DIR/qrels/dev.tsv)
and prints ndcg@10, mrr@10 and recall@k by cosines, or by dot products if a sentence-transformers folder says so.
Vectors are those of bert-jax embed without --pool, with the checkpoint's prompts `query` and `document`. Pairs with
scores (STS) are a task file: --data dev.tsv --text sentence1 --text_pair sentence2 --label score.
"""
MESH = "devices on each mesh axis (docs/scaling.md)"


@dataclass(frozen=True, kw_only=True)
class Options(EvaluateOptions, distributed.ProcessOptions, CheckpointOptions):
    data: str = option(help="shards, or a file or folder of a task", metavar="DATA")
    data_axis: int = option(-1, "default -1: those that remain", name="mesh.data", metavar="N", section=MESH)
    fsdp_axis: int = option(1, "rows and parameters", name="mesh.fsdp", metavar="N", section=MESH)
    tensor_axis: int = option(1, "heads and widths", name="mesh.tensor", metavar="N", section=MESH)


def main(arguments: Sequence[str]) -> None:
    options = parse("bert-jax evaluate", DESCRIPTION, Options, arguments)
    enable_compilation_cache()
    mesh = MeshConfig(options.data_axis, options.fsdp_axis, options.tensor_axis)
    # Nothing is saved, so SIGTERM ends the processes as usual.
    with distributed.processes(options, saves=False):
        write_on_every_host()
        measuring = values(options, EvaluateOptions)
        result = evaluate(options.checkpoint, options.data, average=options.average, mesh=mesh, **measuring)
        if distributed.is_primary():
            print(json.dumps(result))
