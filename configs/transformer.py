"""The original Transformer's encoder (Vaswani et al. 2017, base) on its own, trained by masked tokens.

    bert-jax pretrain --config transformer --workdir runs/encoder --config.data.train=SHARDS

SHARDS are made by `build-examples --objective single --seq_len 128`; the model has no segments. Optimizer, warmup,
peak rate, inverse-square-root schedule and tokens per step are those of the paper's translation model.

Hardware  published, for translation: 8 P100; not run here
Hours     published, for translation: 12
Expected  none: the paper has no masked language model, and none is measured here
Source    Vaswani et al. 2017, section 5 and table 3; the peak rate is section 5.3's at step 4,000; 192 rows of 128 are
          about its 25,000 tokens
"""

import ml_collections

from bert_jax.config import AdamW, InverseSqrtSchedule, ModelOptions, PretrainConfig, recipe


def get_config() -> ml_collections.ConfigDict:
    return recipe(
        PretrainConfig(
            model=ModelOptions(preset="transformer_base"),
            optimizer=AdamW(
                learning_rate=(512 * 4_000) ** -0.5,
                schedule=InverseSqrtSchedule(warmup_steps=4_000),
                beta2=0.98,
                epsilon=1e-9,
                weight_decay=0.0,
                clip_norm=0.0,
            ),
            batch_size=192,
            steps=100_000,
        )
    )
