"""Fine-tunes a checkpoint on a named task or on files, and prints the metrics as JSON."""

import json
import sys
from collections.abc import Sequence

from rich.console import Console

from bert_jax.commands.pretrain import read_arguments
from bert_jax.config import FinetuneConfig, loading
from bert_jax.tasks import named, trials
from bert_jax.tasks.finetuning import finetune
from bert_jax.train import distributed
from bert_jax.train.compilation import write_on_every_host

WIDTH = 160  # columns of the tables where no terminal limits them

DESCRIPTION = f"""Fine-tunes a checkpoint on a named task or on your own files, and prints the metrics as JSON.

  bert-jax finetune --config glue:task=sst2 --workdir runs/sst2 --config.init_from=CHECKPOINT
  bert-jax finetune --config tagging:task=ewt --workdir runs/ewt --config.init_from=CHECKPOINT
  bert-jax finetune --config own --workdir runs/stars --config.init_from=CHECKPOINT \\
      --config.task.train=train.tsv --config.task.dev=dev.tsv --config.task.text=review --config.task.label=stars

CHECKPOINT is a workdir of pretraining or fine-tuning, a step in it, an export, a Hugging Face folder, or hf:NAME
(hf:bert-base-uncased, hf:ORG/NAME), a model of the Hugging Face Hub.
Named tasks: {", ".join(named.TASKS)}.
Their files are read from --config.task.data_dir, by default $BERT_JAX_DATA. For ewt, bert_jax includes a part of the
data, which is used unless data_dir is set.

Common configuration keys (see also docs/finetuning.md):
  --config.epochs=3  --config.batch_size=32  --config.optimizer.learning_rate=3e-5  --config.task.max_length=128
  --config.seeds=5            train with seeds 0 to 4, each in WORKDIR/seed-K; the best by the dev metric is also
                              written to WORKDIR itself. (0,7,9) are the seeds themselves.
  --config.task.metrics=f1,accuracy            the metrics; the first one selects the seed and the rate, and with
                              early_stop the step of a run, which otherwise is the last one
                              (or --config.checkpoint.best=eval_NAME, if given)
  --config.task.labels=no,yes --config.task.label_map='{{0: no, 1: yes}}' --config.task.positive=yes
                              the order of the labels, what those of the files mean, and the one that f1 is of
  --config.sweep='{{optimizer.learning_rate: (1e-5, 3e-5), batch_size: (16, 32)}}'
                              a sweep over any keys, each setting with each seed in WORKDIR/sweep-SETTING
  --config.early_stop=2       stop after this many evaluations without improvement, and keep the best step
  --config.train_layers=all|head|last:K|no_embeddings|gradual|gradual:EPOCHS
  --config.lora.rank=8        train low-rank adapters and the head alone (docs/adapting.md)
  --config.distill.teacher=CHECKPOINT --config.init_layers=1,3,5
                              learn from a larger model, too, beginning with some of its layers (docs/adapting.md)
  --config.reinit_layers=2    begin with random parameters in the last 2 layers and the pooler
  --config.task.pooling=cls|mean|max|last|attention_dot|attention_additive
                              the pooling of token vectors for a class or score (default: as in CHECKPOINT)
  --config.task.layer_mix=True                 classes and tags read a learned mix of all layers
  --config.task.submission=DIR                 also write the files that the GLUE and SuperGLUE leaderboards accept

{loading.help_text(FinetuneConfig)}

If the run is interrupted, run the same command again to resume. One run at a time may train in a workdir.
"""


def main(arguments: Sequence[str]) -> None:
    config, known = read_arguments("finetune", DESCRIPTION, FinetuneConfig, arguments)
    with distributed.processes(known):
        write_on_every_host()
        result = finetune(config, known.workdir, verbose=known.verbose)
        if distributed.is_primary():
            console = Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH)
            if "sweep" in result:
                console.print(trials.comparison(result))
            console.print(trials.table(result))
            print(json.dumps(result))
