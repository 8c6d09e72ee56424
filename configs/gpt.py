"""GPT and GPT-2, the smallest: the same block with the causal mask, trained left to right.

    bert-jax pretrain --config gpt:gpt2 --workdir runs/gpt2 --config.data.train=SHARDS

or gpt:gpt (Radford et al. 2018, 512 positions). SHARDS are made by `build-examples --objective
full_sentences` with byte-level BPE (GPT-2: 50,257 tokens, 1,024 positions). Masks are ignored, and every token except
the first of a sequence is predicted. This GPT-2 has biases, which nanoGPT omits.

Hardware  published: GPT-2 reproduced by nanoGPT, 8 A100 of 40 GB; not run here
Hours     published: about 4 days (nanoGPT)
Expected  published: GPT, perplexity 18.4 on BooksCorpus (Radford et al. 2018, section 4.1); GPT-2 by nanoGPT, a loss of
          about 2.85 nats on OpenWebText, whose tokens are GPT-2's; not measured here
Source    gpt: Radford et al. 2018, section 4.1, 100 epochs of 64 sequences: set --config.steps to rows x 100 / 64 (the
          default of 1,000,000 is not from the paper). gpt2: train.py and config/train_gpt2.py of karpathy/nanoGPT,
          because Radford et al. 2019 publish no settings
"""

import ml_collections

from bert_jax.config import AdamW, CosineSchedule, ModelOptions, PretrainConfig, recipe
from bert_jax.errors import UserError

MODELS = {
    "gpt": PretrainConfig(
        model=ModelOptions(preset="gpt"),
        optimizer=AdamW(
            learning_rate=2.5e-4,
            schedule=CosineSchedule(warmup_steps=2_000, from_start=True),
            epsilon=1e-8,
            clip_norm=1.0,
        ),
        batch_size=64,
        steps=1_000_000,
    ),
    "gpt2": PretrainConfig(
        model=ModelOptions(preset="gpt2", dropout=0.0),
        optimizer=AdamW(
            learning_rate=6e-4,
            schedule=CosineSchedule(warmup_steps=0, warmup_share=2_000 / 600_000, final_share=0.1),
            beta2=0.95,
            epsilon=1e-8,
            weight_decay=0.1,
            clip_norm=1.0,
        ),
        batch_size=480,
        steps=600_000,
    ),
}


def get_config(model: str = "gpt2") -> ml_collections.ConfigDict:
    if model not in MODELS:
        raise UserError(f"gpt: unknown model {model}; choose from {', '.join(MODELS)}")
    return recipe(MODELS[model])
