r"""ModernBERT, base or large (Warner et al. 2024), at T=1,024: the first 1.7 T of its 2 T tokens.

    bert-jax pretrain --config modernbert:base --workdir runs/modern --config.data.train=SHARDS

or modernbert:large. SHARDS are made by `build-examples --objective doc_sentences --pack 32 --seq_len 1024`;
this recipe masks 30%. All layers use rotary base 10,000 here, and the rate is constant after warmup.

The other 300 B tokens have rows of 8,192 positions: 250 B at a constant lower rate, and a decay as 1 - sqrt over the
last 50 B. Base, on LONG, shards of that length:

    bert-jax pretrain --config modernbert:base --workdir runs/long --config.data.train=LONG \
        --config.branch_from=runs/modern/checkpoints/360277 --config.batch_size=576 --config.steps=413259 \
        --config.model.rotary_base=160000 --config.optimizer.learning_rate=3e-4 \
        --config.optimizer.weight_decay=0.0333 --config.allow_changes=optimizer.weight_decay

and then the same with --config.steps=423855 --config.optimizer.schedule=wsd
--config.optimizer.schedule.decay_share=0.025 --config.optimizer.schedule.final_share=0.001
--config.allow_changes=optimizer. Large had 5e-5 in both, and 616 and 624 rows.

Differences from the paper and its configurations: theirs drop 0.1 of the outputs of attention, and nothing is dropped
here; their batch grows over the first 50 B (base) or 10 B tokens (large), which --config.batch_schedule can do; large
trains from scratch at one rate, while the paper starts from base and later returns to a tenth of the rate; updates are
scaled for queries, keys and values separately, not as one tensor.

Hardware  published: 8 H100; not run here
Hours     published: 194.2 (base), 425.3 (large)
Expected  published: GLUE dev average 88.4 (base), 90.4 (large), after all 2 T tokens; not measured here
Source    Warner et al. 2024, sections 2.2 and 3, table 3. Steps are 1.7 T tokens, warmup 3 B (base) and 2 B (large).
          AnswerDotAI/ModernBERT, branch pretraining_documentation, the six modernbert-*.yaml: weight decay independent
          of the rate, no clipping, dropout, growth of the batch, rows, rates and lengths of the long phases
"""

import ml_collections

from bert_jax.config import ConstantSchedule, ModelOptions, PretrainConfig, PretrainDataConfig, StableAdamW, recipe
from bert_jax.errors import UserError

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
            optimizer=StableAdamW(
                learning_rate=rate,
                schedule=ConstantSchedule(warmup_steps=0, warmup_share=warmup / TOKENS),
                beta2=0.98,
                weight_decay=1e-5 / rate,  # published as 1e-5 per step at the peak rate, not multiplied by the rate
                clip_norm=0.0,
            ),
            batch_size=batch,
            steps=round(TOKENS / (batch * LENGTH)),
        )
    )
