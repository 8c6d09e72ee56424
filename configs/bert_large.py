r"""BERT-Large, as published (Devlin et al. 2019, appendix A.2): 1 M steps of 256 sequences; or LAMB with 65,536.

    bert-jax pretrain --config bert_large --workdir runs/large --config.data.train=SHARDS_128 \
        --config.data.phases="{900000: 'SHARDS_512'}"

or bert_large:lamb, on shards of --seq_len 128, followed by shards of --seq_len 512 in another workdir:
--config.init_from=WORKDIR --config.batch_size=32768 --config.steps=1563 --config.optimizer.learning_rate=4e-3
--config.optimizer.schedule.warmup_share=0.128. Such a large batch needs --config.microbatches=N to fit into memory.

SHARDS are made by `build-examples --objective nsp`; docs/data.md has the commands. The vocabulary decides
whether the model is cased. For whole-word masking, build the shards with --mask_unit word.

Hardware  published: 64 TPU chips (16 Cloud TPUs); not run here
Hours     published: 4 days
Expected  published: GLUE test average 82.1 after fine-tuning (uncased). After fine-tuning on SQuAD 1.1, F1/EM on dev,
          and on MultiNLI, accuracy: uncased 91.0/84.3 and 86.05, whole words 92.8/86.7 and 87.07; cased 91.5/84.8 and
          86.09, whole words 92.9/86.7 and 86.46. Not measured here
Source    Devlin et al. 2019, sections 3 and A.2; 90% of the steps at T=128, then 10% at T=512. Whole words: the README
          of google-research/bert, of 2019-05-31. lamb: You et al. 2020, section 4.1 (SQuAD 1.1 F1 on dev 90.6, 76
          minutes on 1,024 TPUv3 chips); steps, rates and warmup are those of NVIDIA/DeepLearningExamples,
          run_pretraining.sh, whose rate falls with the square root of the rest of the run; here it falls linearly
"""

import ml_collections

from bert_jax.config import AdamW, Lamb, LinearSchedule, ModelOptions, PretrainConfig, recipe
from bert_jax.errors import UserError

RECIPES = {
    "adamw": PretrainConfig(
        model=ModelOptions(preset="large"),
        # As in google-research/bert, optimization.py: Adam without bias correction.
        optimizer=AdamW(
            learning_rate=1e-4, schedule=LinearSchedule(warmup_steps=10_000, from_start=True), bias_correction=False
        ),
        batch_size=256,
        steps=1_000_000,
    ),
    "lamb": PretrainConfig(
        model=ModelOptions(preset="large"),
        optimizer=Lamb(learning_rate=6e-3, schedule=LinearSchedule(warmup_steps=0, warmup_share=0.2843)),
        batch_size=65_536,
        steps=7_038,
    ),
}


def get_config(optimizer: str = "adamw") -> ml_collections.ConfigDict:
    if optimizer not in RECIPES:
        raise UserError(f"bert_large: unknown optimizer {optimizer}; choose from {', '.join(RECIPES)}")
    return recipe(RECIPES[optimizer])
