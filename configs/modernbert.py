"""ModernBERT, base or large (Warner et al. 2024), at T=1,024: the first 1.7 T of its 2 T tokens.

    python -m bert_jax.pretrain --config modernbert:base --workdir runs/modern --config.data.train=SHARDS

or modernbert:large. SHARDS are made by `build_examples --objective doc_sentences --pack 32 --seq_len 1024`;
this recipe masks 30%. All layers use rotary base 10,000 here. For 8,192 positions, continue on shards of that length
with an eighth of the batch: --config.init_from=WORKDIR --config.model.preset=checkpoint
--config.model.rotary_base=160000.

The rate is constant after warmup, as in the paper until the last 50 B tokens, where it decays as 1 - sqrt: for this
decay, resume with --config.steps=MORE --config.optimizer.schedule=wsd --config.optimizer.decay_share=SHARE
--config.allow_changes=optimizer.schedule,optimizer.decay_share. Differences from the paper: the batch does not grow
(--config.batch_schedule can do it); large trains from scratch at one rate, while the paper starts from base and once
returns to a tenth of the rate; updates are scaled for queries, keys and values separately, not as one tensor.

Hardware  published: 8 H100; not run here
Hours     published: 194.2 (base), 425.3 (large)
Expected  published: GLUE dev average 88.4 (base), 90.4 (large), after all 2 T tokens; not measured here
Source    Warner et al. 2024, sections 2.2 and 3, table 3. Steps are 1.7 T tokens, warmup 3 B (base) and 2 B (large).
          AnswerDotAI/ModernBERT, modernbert-base-pretrain.yaml, for weight decay independent of the rate, and no
          clipping
"""

import ml_collections

from bert_jax.command import UserError
from bert_jax.config import ModelOptions, OptimizerConfig, PretrainConfig, PretrainDataConfig, recipe

# Batch, peak rate and warmup tokens by size.
SIZES = {"base": (4608, 8e-4, 3e9), "large": (4928, 5e-4, 2e9)}
LENGTH = 1024
TOKENS = 1.7e12


def get_config(size: str = "base") -> ml_collections.ConfigDict:
    if size not in SIZES:
        raise UserError(f"modernbert: unknown size {size}; choose from {', '.join(SIZES)}")
    batch, rate, warmup = SIZES[size]
    return recipe(
        PretrainConfig(
            model=ModelOptions(preset=f"modernbert_{size}", rotary_base=10_000.0),
            data=PretrainDataConfig(mask_rate=0.3),
            optimizer=OptimizerConfig(
                name="stable_adamw",
                learning_rate=rate,
                warmup_steps=0,
                warmup_share=warmup / TOKENS,
                schedule="constant",
                beta2=0.98,
                weight_decay=1e-5 / rate,  # published as 1e-5 per step at the peak rate, not multiplied by the rate
                clip_norm=0.0,
            ),
            batch_size=batch,
            steps=round(TOKENS / (batch * LENGTH)),
        )
    )
