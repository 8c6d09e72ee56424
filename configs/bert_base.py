r"""BERT-Base, as published (Devlin et al. 2019, appendix A.2): 1 M steps of 256 sequences.

    bert-jax pretrain --config bert_base --workdir runs/base --config.data.train=SHARDS_128 \
        --config.data.phases="{900000: 'SHARDS_512'}"

The last tenth of the steps uses rows of 512 positions; without data.phases there is one length. Both SHARDS are made by
`build-examples --objective nsp`; docs/data.md has the commands. The vocabulary decides
whether the model is cased (28,996 tokens as published) or uncased (30,522). For whole-word masking, build the shards
with --mask_unit word.

Hardware  published: 16 TPU chips (4 Cloud TPUs in Pod configuration); not run here
Hours     published: 4 days
Expected  published: GLUE test average 79.6 after fine-tuning (uncased); not measured here
Source    Devlin et al. 2019, sections 3 and A.2: 90% of the steps at T=128, then 10% at T=512
"""

import ml_collections

from bert_jax.config import AdamW, LinearSchedule, ModelOptions, PretrainConfig, recipe


def get_config() -> ml_collections.ConfigDict:
    return recipe(
        PretrainConfig(
            model=ModelOptions(preset="base"),
            # As in google-research/bert, optimization.py: Adam without bias correction.
            optimizer=AdamW(
                learning_rate=1e-4, schedule=LinearSchedule(warmup_steps=10_000, from_start=True), bias_correction=False
            ),
            batch_size=256,
            steps=1_000_000,
        )
    )
