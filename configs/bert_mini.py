"""BERT-Mini (4 layers x 256).

    bert-jax pretrain --config bert_mini --workdir runs/mini --config.data.train=SHARDS

Hardware  one GPU or TPU chip; a CPU for small corpora
Hours     not measured here
Expected  not measured here; Turc et al. 2019 give GLUE after distillation, which this recipe does not do
Source    size: Turc et al. 2019, table 1; batch and rate chosen here for small corpora
"""

import ml_collections

from bert_jax.config import AdamW, LinearSchedule, ModelOptions, PretrainConfig, recipe


def get_config() -> ml_collections.ConfigDict:
    return recipe(
        PretrainConfig(
            model=ModelOptions(preset="mini"),
            optimizer=AdamW(learning_rate=5e-4, schedule=LinearSchedule(warmup_steps=1_000, from_start=True)),
            batch_size=128,
            steps=100_000,
        )
    )
