"""BERT-Small (4 layers x 512).

    bert-jax pretrain --config bert_small --workdir runs/small --config.data.train=SHARDS

Hardware  one GPU or TPU chip
Hours     not measured here
Expected  not measured here; Turc et al. 2019 give GLUE after distillation, which this recipe does not do
Source    size: Turc et al. 2019, table 1; batch, rate and warmup: Devlin et al. 2019, appendix A.2
"""

import ml_collections

from bert_jax.config import AdamW, LinearSchedule, ModelOptions, PretrainConfig, recipe


def get_config() -> ml_collections.ConfigDict:
    return recipe(
        PretrainConfig(
            model=ModelOptions(preset="small"),
            # As in google-research/bert, optimization.py: Adam without bias correction.
            optimizer=AdamW(
                learning_rate=1e-4, schedule=LinearSchedule(warmup_steps=10_000, from_start=True), bias_correction=False
            ),
            batch_size=256,
            steps=1_000_000,
        )
    )
