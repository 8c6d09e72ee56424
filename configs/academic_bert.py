"""The academic budget's BERT, "24hBERT" (Izsak et al. 2021): BERT-Large with pre-norm, T=128, for a day.

    bert-jax pretrain --config academic_bert --workdir runs/academic --config.data.train=SHARDS

SHARDS are made by `build-examples --objective single --seq_len 128` with the uncased vocabulary. The budget is
wall-clock time: the learning rate rises over its first 6% and then falls to 0. If a batch does not fit into memory, set
--config.microbatches=N.

Hardware  published: 8 Titan-V of 12 GB; not run here
Hours     24, by the budget
Expected  published: GLUE test MNLI 84.4, QNLI 90.6, QQP 70.7, RTE 57.7, SST-2 93.0, MRPC 87.5, CoLA 57.1, STS-B 82.0;
          not measured here
Source    Izsak et al. 2021, and the best configuration's command in the README of IntelLabs/academic-budget-bert. Not
          from its code: here embeddings are normalized, and the outputs of sublayers start at 0.02 / sqrt(48), as its
          DeepSpeed kernel had them, instead of 0.02
"""

import ml_collections

from bert_jax.config import AdamW, LinearSchedule, ModelOptions, PretrainConfig, recipe


def get_config() -> ml_collections.ConfigDict:
    return recipe(
        PretrainConfig(
            model=ModelOptions(preset="academic_large"),
            optimizer=AdamW(
                learning_rate=1e-3,
                schedule=LinearSchedule(warmup_steps=0, warmup_share=0.06),
                beta2=0.98,
                clip_norm=0.0,
            ),
            batch_size=4096,
            steps=0,
            budget_minutes=24 * 60.0,
        )
    )
