"""BERT-Large, as published (Devlin et al. 2019, appendix A.2): 1 M steps of 256 sequences.

    python -m bert_jax.pretrain --config configs/bert_large.py --workdir runs/large --config.data.train=SHARDS

SHARDS are of `build_examples --objective nsp`; docs/recipes.md has the commands. Cased or uncased is the vocabulary's
choice, whole words that of the shards: --mask_unit word.

Hardware  published: 64 TPU chips (16 Cloud TPUs); not run by us
Hours     published: 4 days
Expected  published: GLUE test average 82.1 after fine-tuning (uncased). After fine-tuning on SQuAD 1.1, F1/EM on dev,
          and on MultiNLI, accuracy: uncased 91.0/84.3 and 86.05, whole words 92.8/86.7 and 87.07; cased 91.5/84.8 and
          86.09, whole words 92.9/86.7 and 86.46. Not measured by us
Source    Devlin et al. 2019, sections 3 and A.2; the two lengths as in configs/bert_base.py. Whole words: the README of
          google-research/bert, of 2019-05-31
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
