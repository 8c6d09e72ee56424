"""RoBERTa, base or large (Liu et al. 2019): masked tokens of full sentences only, 500,000 steps of 8,192 sequences.

    bert-jax pretrain --config roberta:base --workdir runs/roberta --config.data.train=SHARDS

or roberta:large. SHARDS are made by `build-examples --objective full_sentences --seq_len 512` with a
byte-level BPE vocabulary; docs/data.md has the commands.

Hardware  published, large: 1,024 V100; not run here
Hours     published, large: about a day for the first 100,000 steps
Expected  published, after fine-tuning, dev: base MNLI 87.6, SST-2 94.8, CoLA 63.6 (fairseq, examples/roberta);
          large MNLI 90.2, SST-2 96.4, CoLA 68.0 (table 5); not measured here
Source    Liu et al. 2019, section 5 and table 9, the batch of "8k" read as 8,192; decay of the rate from
          the end of warmup, and weight decay of all parameters: fairseq, polynomial_decay_schedule.py and adam.py
"""

import ml_collections

from bert_jax.config import AdamW, LinearSchedule, ModelOptions, PretrainConfig, recipe
from bert_jax.errors import UserError

SIZES = {"base": (6e-4, 24_000), "large": (4e-4, 30_000)}  # peak rate, warmup steps: table 9
STEPS = 500_000


def get_config(size: str = "base") -> ml_collections.ConfigDict:
    return published("roberta", size, STEPS)


def published(family: str, size: str, steps: int) -> ml_collections.ConfigDict:
    """The recipe of a RoBERTa size, or of a model that differs from it only in architecture and steps."""
    if size not in SIZES:
        raise UserError(f"{family}: unknown size {size}; choose from {', '.join(SIZES)}")
    rate, warmup = SIZES[size]
    return recipe(
        PretrainConfig(
            model=ModelOptions(preset=f"{family}_{size}"),
            optimizer=AdamW(
                learning_rate=rate,
                schedule=LinearSchedule(warmup_steps=0, warmup_share=warmup / steps),
                beta2=0.98,
                decays={".*": 0.01},  # fairseq's Adam decays all parameters, including biases and norms
                clip_norm=0.0,
            ),
            batch_size=8192,
            steps=steps,
        )
    )
