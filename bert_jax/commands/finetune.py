"""Fine-tunes a checkpoint on a named task or on files, and prints the metrics as JSON."""

import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from bert_jax.commands.pretrain import TrainOptions, read_arguments
from bert_jax.config import FinetuneConfig, loading
from bert_jax.config.options import option
from bert_jax.tasks import named, trials
from bert_jax.tasks.finetuning import finetune
from bert_jax.train import distributed
from bert_jax.train.compilation import write_on_every_host

WIDTH = 160  # columns of the tables where no terminal limits them

DESCRIPTION = f"""Fine-tunes a checkpoint on a named task or on your own files, and prints the metrics as JSON.

  bert-jax finetune --config glue:task=sst2 --model CHECKPOINT --output runs/sst2
  bert-jax finetune reviews.csv --text review --label stars --model CHECKPOINT --output runs/stars

CHECKPOINT is a workdir, a step in it, an export, a Hugging Face folder, or a name on the Hub (ORG/NAME).
{textwrap.fill(f"Named tasks: {', '.join(named.TASKS)}.", 120)}
Their files are in --config.task.data_dir, by default $BERT_JAX_DATA; of ewt, bert_jax includes a part.

--config.KEY=VALUE sets a key of the recipe; `bert-jax keys` lists all. Frequently used ones:
  epochs=3, batch_size=32, optimizer.learning_rate=3e-5, task.max_length=128
  seeds=5                       train seeds 0 to 4, each in WORKDIR/seed-K, and keep the best on dev; or (0,7,9)
  task.metrics=f1,accuracy      the first one selects the seed and, with early_stop, the step of a run
  task.labels=no,yes, task.label_map='{{0: no, 1: yes}}', task.positive=yes   order and meaning of the labels
  sweep='{{optimizer.learning_rate: (1e-5, 3e-5), batch_size: (16, 32)}}'   all settings, each with each seed
  early_stop=2                  stop after 2 evaluations without improvement, and keep the best step
  train_layers=NAME             all, head, last:K, no_embeddings, gradual or gradual:EPOCHS; reinit_layers=2
  lora.rank=8                   train low-rank adapters and the head alone (docs/adapting.md)
  distill.teacher=CHECKPOINT, init_layers=1,3,5   learn from a larger model, beginning with some of its layers
  task.pooling=NAME             cls, mean, max, last, attention_dot or attention_additive; task.layer_mix=True
  task.submission=DIR           also write the files that the GLUE and SuperGLUE leaderboards accept

{loading.help_text(FinetuneConfig)}

If the run is interrupted, run the same command again to resume. docs/finetuning.md says more.
"""


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(TrainOptions):
    config: str = option("own", "a recipe by its name, e.g. glue:task=sst2, or a file", metavar="RECIPE")


def main(arguments: Sequence[str]) -> None:
    if arguments and not arguments[0].startswith("-"):  # the file to train on
        arguments = ["--train", *arguments]
    options, config = read_arguments("finetune", DESCRIPTION, FinetuneOptions, FinetuneConfig, arguments)
    with distributed.processes(options, stall_timeout=options.stall_timeout):
        write_on_every_host()
        result = finetune(config, options.workdir, verbose=options.verbose, recipe=options.config)
        if distributed.is_primary():
            console = Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH)
            if "sweep" in result:
                console.print(trials.comparison(result))
            console.print(trials.table(result))
            print(json.dumps(result))
