"""ModernBERT, base or large (Warner et al. 2024), at T=1,024: the first 1.7 T of its 2 T tokens.

    python -m bert_jax.pretrain --config configs/modernbert.py:base --workdir runs/modern --config.data.train=SHARDS

or configs/modernbert.py:large. SHARDS are of `build_examples --objective doc_sentences --pack 32 --seq_len 1024`, with
30% masked by this recipe. Positions turn at base 10,000 in all layers here. For 8,192 slots go on, on shards of that
length and with an eighth of the batch: --config.init_from=WORKDIR --config.model.preset=checkpoint
--config.model.rotary_base=160000.

The rate is constant after the warmup, as theirs until the last 50 B tokens, in which it falls as 1 - sqrt: for such
an end go on with --config.steps=MORE --config.optimizer.schedule=wsd --config.optimizer.decay_share=SHARE
--config.allow_changes=optimizer.schedule,optimizer.decay_share. Other than published: no growing batch
(--config.batch_schedule has one); large from scratch and at one rate, where theirs starts from base and goes back once
to a tenth of the rate; updates are measured by queries, keys and values apart, where theirs are one tensor.

Hardware  published: 8 H100; not run by us
Hours     published: 194.2 (base), 425.3 (large)
Expected  published: GLUE dev average 88.4 (base), 90.4 (large), after all 2 T tokens; not measured by us
Source    Warner et al. 2024, sections 2.2 and 3, table 3. Steps are 1.7 T tokens, warmup 3 B (base) and 2 B (large).
          AnswerDotAI/ModernBERT, modernbert-base-pretrain.yaml, for the decay that knows no rate and no clipping
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
        raise UserError(f"configs/modernbert.py:{size}: no such size; use one of: {', '.join(SIZES)}")
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
                weight_decay=1e-5 / rate,  # theirs is 1e-5 a step at the peak rate, not times the rate
                clip_norm=0.0,
            ),
            batch_size=batch,
            steps=round(TOKENS / (batch * LENGTH)),
        )
    )
