"""Pretrains an encoder on shards, and prints the result as JSON."""

import argparse
import json
from collections.abc import Sequence
from typing import TypeVar

from bert_jax import command_line
from bert_jax import config as config_lib
from bert_jax.config import PretrainConfig, loading
from bert_jax.pretraining import pretrain
from bert_jax.train import distributed
from bert_jax.train.compilation import enable_compilation_cache, write_on_every_host
from bert_jax.train.describe import VERBOSE

Config = TypeVar("Config")

DESCRIPTION = f"""Pretrains a bidirectional encoder by masked language modeling, together with next-sentence or
sentence-order prediction where the shards have such labels. A causal model (see the recipe gpt) is
trained to predict the next token.

  bert-jax pretrain --config bert_tiny --workdir runs/tiny --config.data.train=shards

--config.KEY=VALUE sets a key of the recipe. Frequently used keys:

  steps=1000, budget_minutes=30   the length of the run
  tokens=5e8 steps=0              a length in tokens; then also optimizer.schedule.warmup_tokens, decay_tokens
  batch_size=64                   rows per batch
  batch_schedule='{{0: 256, 10000: 512}}'
                                  a batch size that changes at the given steps
  compute_dtype=float32           the precision of the computation
  init_from=CHECKPOINT            initial parameters: a bert_jax checkpoint, a Hugging Face folder, or
                                  hf:NAME, a model of the Hugging Face Hub
  init_layers=0,2,4,7,9,11        ... of these of its layers only
  distill.teacher=CHECKPOINT      also learn from this model (docs/adapting.md, the recipe distilbert)
  branch_from=RUN/checkpoints/STEP
                                  a run that begins there, with its optimizer state: a decay phase
  model.preset=checkpoint         the architecture of that checkpoint
  model.norm=pre                  one part of the architecture; every part has such a key
  data.mask_rate=0.2              the rate of dynamic masking; none: that of the shards, not the recipe's
  data.mask_schedule='{{0: 0.30, 50000: 0.15}}'
                                  a mask rate that changes at the given steps
  data.mask_shape=linear          ... and linearly between them
  data.mixture="{{wiki: ('DIR', 0.7), books: ('DIR', 0.3)}}"
                                  several shards instead of data.train, with their shares of the rows
  data.mixture="{{de: 'DIR', th: 'DIR'}}" data.mixture_alpha=0.3
                                  ... with shares by their numbers of tokens to the power 0.3
  data.cache_bytes=8e9            read rows in shuffled windows of so much memory, straight from where the shards
                                  are, if they do not fit a local disk (docs/scaling.md)
  data.phases="{{900000: 'DIR'}}"   other shards, or a mixture, from the given step on, e.g. of length
                                  512 after 128
  objective=NAME                  mlm, causal, replaced_tokens, diffusion, phases; objective.KEY sets its options
  optimizer.learning_rate=1e-3    the peak learning rate
  optimizer=NAME                  adamw, lamb, muon or stable_adamw
  optimizer.schedule=NAME         linear, cosine, wsd, constant or inverse_sqrt
  optimizer.ema_decay=0.999       a moving average of the parameters

{loading.help_text(PretrainConfig)}

docs/pretraining.md describes objectives, optimizers and phases. After an interruption, run the same
command again: training resumes from the newest checkpoint of the workdir. One run at a time may train in a
workdir; a second one is refused. To view the result, run: bert-jax report WORKDIR
"""


def main(arguments: Sequence[str]) -> None:
    """Runs the command and prints the result as JSON on the primary process."""
    config, known = read_arguments("pretrain", DESCRIPTION, PretrainConfig, arguments)
    with distributed.processes(known):
        write_on_every_host()
        result = pretrain(config, known.workdir, verbose=known.verbose)
        if distributed.is_primary():
            print(json.dumps(result))


def read_arguments(
    command: str, description: str, config_class: type[Config], arguments: Sequence[str]
) -> tuple[Config, argparse.Namespace]:
    """Returns the configuration that the arguments of a training command give, and its flags."""
    parser = command_line.Parser(f"bert-jax {command}", description)
    parser.add_argument(
        "--config", required=True, help="a recipe by its name, e.g. bert_base, or a file; --config.KEY=VALUE sets a key"
    )
    parser.add_argument(
        "--workdir",
        required=True,
        help="the folder for checkpoints, metrics and the result; on disk, gs://BUCKET/NAME or s3://BUCKET/NAME",
    )
    parser.add_argument("--verbose", action="store_true", help=VERBOSE)
    distributed.add_flags(parser)
    known, overrides = parser.parse_known_args(list(arguments))
    enable_compilation_cache()
    return config_lib.from_flags(config_class, known.config, overrides), known
