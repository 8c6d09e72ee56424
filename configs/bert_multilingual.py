r"""Multilingual BERT: BERT-Base over the Wikipedias of 104 languages, with one cased vocabulary of 119,547 tokens.

    bert-jax pretrain --config bert_multilingual --workdir runs/mbert \
        --config.data.mixture="{de: 'DE', en: 'EN', th: 'TH'}" --config.data.mixture_alpha=0.7

with all languages. The vocabulary is trained by `train-tokenizer --kind wordpiece --vocab_size 119547 --alpha 0.7` and
the shards of each language are built by `build-examples --objective nsp`. Both powers smooth the share of a language in
the text, as published.

Hardware  not published; not run here
Hours     not published
Expected  published: XNLI accuracy, fine-tuned on machine translations of the training text, English 81.9, Chinese 76.6,
          Spanish 77.8, German 75.9, Arabic 70.7, Urdu 61.6 (multilingual.md); not measured here
Source    google-research/bert, multilingual.md (the cased model). Steps, batch and rate are not published; those here
          are BERT-Base's (Devlin et al. 2019, appendix A.2)
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
