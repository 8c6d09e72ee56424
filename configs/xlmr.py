r"""XLM-R, base or large (Conneau et al. 2020): RoBERTa over 100 languages with a Unigram vocabulary of 250,002 tokens.

    bert-jax pretrain --config xlmr:base --workdir runs/xlmr \
        --config.data.mixture="{de: 'DE', en: 'EN', th: 'TH'}" --config.data.mixture_alpha=0.3

or xlmr:large, with all languages. SHARDS are made by `train-tokenizer --kind unigram --alpha 0.3` and
`build-examples --objective full_sentences --seq_len 512` for each language; docs/data.md has the commands.

Hardware  published: 500 V100 of 32 GB; not run here
Hours     not published
Expected  published: XNLI zero-shot, average accuracy over 15 languages, base 76.2, large 80.9 (table 1); not measured
          here
Source    Conneau et al. 2020, section 3: 1.5 M updates of 8,192 sequences. The rates are not in the paper; those here
          are RoBERTa's (Liu et al. 2019, table 9)
"""

import ml_collections

from bert_jax.config import recipe_module

STEPS = 1_500_000


def get_config(size: str = "base") -> ml_collections.ConfigDict:
    return recipe_module("roberta").published("xlmr", size, STEPS)
