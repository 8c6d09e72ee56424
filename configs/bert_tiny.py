"""BERT-Tiny (2 layers x 128): small enough to pretrain on a laptop's CPU on the text in this repository.

    bert-jax pretrain --config bert_tiny --workdir runs/tiny --config.data.train=SHARDS

Hardware  any CPU
Hours     minutes; `make quickstart` runs this recipe with a budget
Expected  the held-out masked-token accuracy that `make quickstart` prints (docs/install.md shows one run's)
Source    size: Turc et al. 2019, table 1; batch, rate and warmup chosen here for a few million tokens
"""

import ml_collections

from bert_jax.config import AdamW, LinearSchedule, ModelOptions, PretrainConfig, recipe


def get_config() -> ml_collections.ConfigDict:
    return recipe(
        PretrainConfig(
            model=ModelOptions(preset="tiny"),
            optimizer=AdamW(learning_rate=1e-3, schedule=LinearSchedule(warmup_steps=200, from_start=True)),
            batch_size=64,
            steps=10_000,
            log_every=50,
        )
    )
