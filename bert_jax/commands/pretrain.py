"""Pretrains an encoder on shards, and prints the result as JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from bert_jax import config as config_lib
from bert_jax.config import PretrainConfig, loading
from bert_jax.config.options import POSITIVE, option, parse_known
from bert_jax.pretraining import pretrain
from bert_jax.train import distributed
from bert_jax.train.compilation import enable_compilation_cache, write_on_every_host
from bert_jax.train.describe import VERBOSE
from bert_jax.train.watchdog import STALL_TIMEOUT

Config = TypeVar("Config")
Options = TypeVar("Options", bound="TrainOptions")

DESCRIPTION = f"""Pretrains an encoder on shards by masked language modeling, and by next-sentence or sentence-order
prediction if the shards have such labels. A causal model (the recipe gpt) learns to predict the next token.

  bert-jax pretrain --config bert_tiny --workdir runs/tiny --config.data.train=shards

--config.KEY=VALUE sets a key of the recipe; `bert-jax keys` lists all. Frequently used ones:
  steps=1000, budget_minutes=30, tokens=5e8   the length of the run
  batch_size=64, batch_schedule='{{0: 256, 10000: 512}}'    rows per batch, also changing at the given steps
  init_from=CHECKPOINT, init_layers=0,2,4     initial parameters, also of some layers only
  model.preset=checkpoint, model.norm=pre     the architecture of that checkpoint, or parts of one
  distill.teacher=CHECKPOINT                  also learn from this model (docs/adapting.md)
  branch_from=RUN/checkpoints/STEP            begin there, with its optimizer state: a decay phase
  data.mask_rate=0.2, data.mask_schedule='{{0: 0.30, 50000: 0.15}}', data.mask_shape=linear
                                              the rate of dynamic masking, also changing
  data.mixture="{{wiki: ('DIR', 0.7), books: ('DIR', 0.3)}}"   several shards and their shares of the rows
  data.mixture="{{de: 'DIR', th: 'DIR'}}" data.mixture_alpha=0.3   shares by tokens to the power 0.3
  data.phases="{{900000: 'DIR'}}"               other shards from the given step on, e.g. longer rows
  data.cache_bytes=8e9                        read rows in shuffled windows from shards on no local disk
  objective=NAME                              mlm, causal, replaced_tokens, diffusion or phases
  optimizer=NAME, optimizer.learning_rate=1e-3, optimizer.ema_decay=0.999   adamw, lamb, muon or stable_adamw
  optimizer.schedule=NAME                     linear, cosine, wsd, constant or inverse_sqrt

{loading.help_text(PretrainConfig)}

After an interruption, run the same command again: training resumes from the newest checkpoint. One run at a time may
train in a workdir. To view the result: bert-jax report WORKDIR. docs/pretraining.md says more.
"""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(distributed.ProcessOptions):
    """The flags of a training command; --config.KEY=VALUE sets the rest."""

    config: str = option(help="a recipe by its name, e.g. bert_base, or a file", metavar="RECIPE")
    workdir: str = option(
        help="folder of checkpoints and result: local, gs:// or s3://", metavar="DIR", aliases=["output"]
    )
    verbose: bool = option(False, VERBOSE)
    stall_timeout: float = option(
        STALL_TIMEOUT, "seconds without a step after which a run ends with code 75", metavar="S", valid=POSITIVE
    )


def main(arguments: Sequence[str]) -> None:
    options, config = read_arguments("pretrain", DESCRIPTION, TrainOptions, PretrainConfig, arguments)
    # The processes of a run connect before it touches a device.
    with distributed.processes(options, stall_timeout=options.stall_timeout):
        write_on_every_host()
        result = pretrain(config, options.workdir, verbose=options.verbose, recipe=options.config)
        if distributed.is_primary():
            print(json.dumps(result))


def read_arguments(
    command: str, description: str, options_class: type[Options], config_class: type[Config], arguments: Sequence[str]
) -> tuple[Options, Config]:
    """Parses a training command's arguments into its flags and its configuration."""
    options, overrides = parse_known(f"bert-jax {command}", description, options_class, arguments)
    enable_compilation_cache(options.workdir)
    # Arguments that are no flags are keys of the configuration, such as --config.steps=10.
    return options, config_lib.from_flags(config_class, options.config, overrides)
