"""XLM-R, base or large (Conneau et al. 2020): RoBERTa over 100 languages with a Unigram vocabulary of 250,002 tokens.

    python -m bert_jax.pretrain --config configs/xlmr.py:base --workdir runs/xlmr --config.data.train=SHARDS

or configs/xlmr.py:large. SHARDS are of `train_tokenizer --kind unigram --alpha 0.3` and `build_examples --objective
full_sentences --seq_len 512 --weights W,W,...`; docs/recipes.md has the commands.

Hardware  published: 500 V100 of 32 GB; not run by us
Hours     not published
Expected  published: XNLI zero-shot, average accuracy over 15 languages, base 76.2, large 80.9 (table 1); not measured
          by us
Source    Conneau et al. 2020, section 3: 1.5 M updates of 8,192 sequences. The rates are not in the paper; those here
          are RoBERTa's (Liu et al. 2019, table 9)
"""

import ml_collections

from bert_jax.command import UserError
from bert_jax.config import ModelOptions, OptimizerConfig, PretrainConfig, recipe

SIZES = {"base": (6e-4, 24_000), "large": (4e-4, 30_000)}  # peak rate, warmup steps
STEPS = 1_500_000


def get_config(size: str = "base") -> ml_collections.ConfigDict:
    if size not in SIZES:
        raise UserError(f"configs/xlmr.py:{size}: no such size; use one of: {', '.join(SIZES)}")
    rate, warmup = SIZES[size]
    return recipe(
        PretrainConfig(
            model=ModelOptions(preset=f"xlmr_{size}"),
            optimizer=OptimizerConfig(
                learning_rate=rate,
                warmup_steps=0,
                warmup_share=warmup / STEPS,
                beta2=0.98,
                decays=".*=0.01",  # fairseq's Adam knows no exception: biases and norms decay too
                clip_norm=0.0,
            ),
            batch_size=8192,
            steps=STEPS,
        )
    )
