"""BERT-Large, as published (Devlin et al. 2019, appendix A.2): 1 M steps of 256 sequences.

    python -m bert_jax.pretrain --config configs/bert_large.py --workdir runs/large --config.data.train=SHARDS

Hardware  published: 64 TPU chips (16 Cloud TPUs); not run by us
Hours     published: 4 days
Expected  published: GLUE test average 82.1 after fine-tuning; not measured by us
Source    Devlin et al. 2019, sections 3 and A.2; the two lengths as in configs/bert_base.py
"""

import ml_collections

from bert_jax.config import ModelOptions, OptimizerConfig, PretrainConfig, recipe


def get_config() -> ml_collections.ConfigDict:
    return recipe(
        PretrainConfig(
            model=ModelOptions(preset="large"),
            optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=10_000),
            batch_size=256,
            steps=1_000_000,
        )
    )
