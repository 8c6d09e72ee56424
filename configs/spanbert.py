"""SpanBERT, base or large (Joshi et al. 2020): masked spans, predicted as tokens and from their boundaries.

    bert-jax pretrain --config spanbert:large --workdir runs/spanbert --config.data.train=SHARDS

or spanbert:base. SHARDS are made by `build-examples --objective single --mask_unit span --random_tokens unigram
--seq_len 512` with a cased WordPiece vocabulary; docs/data.md has the commands.

Hardware  published, large: 32 V100; not run here
Hours     published, large: 15 days
Expected  published, after fine-tuning: SQuAD 1.1 F1, large 94.6 (test), base 92.4 (dev); SQuAD 2.0 F1, large 88.7
          (test), base 83.6 (dev) (README of facebookresearch/SpanBERT); not measured here
Source    Joshi et al. 2020, sections 3 and 4.2, for large. Base: batch, steps and rate by one of its authors in issue 6
          of facebookresearch/SpanBERT; its warmup and weight decay are not published. The code of that
          repository (a fork of fairseq): weight decay of all parameters, a rate that falls from the first step, random
          tokens by their frequency. Its example command has a weight decay of 0.01, and spans of up to 15 targets,
          where up to 20 are learned here
"""

import ml_collections

from bert_jax.config import AdamW, LinearSchedule, MaskedLM, ModelOptions, PretrainConfig, recipe
from bert_jax.errors import UserError

# Batch, steps and peak rate by size.
SIZES = {"base": (2048, 300_000, 5e-4), "large": (256, 2_400_000, 1e-4)}


def get_config(size: str = "large") -> ml_collections.ConfigDict:
    if size not in SIZES:
        raise UserError(f"spanbert: unknown size {size}; choose from {', '.join(SIZES)}")
    batch, steps, rate = SIZES[size]
    return recipe(
        PretrainConfig(
            model=ModelOptions(preset=f"spanbert_{size}"),
            optimizer=AdamW(
                learning_rate=rate,
                schedule=LinearSchedule(warmup_steps=10_000, from_start=True),
                epsilon=1e-8,
                decays={".*": 0.1},
            ),
            objective=MaskedLM(span_boundary=True),
            batch_size=batch,
            steps=steps,
        )
    )
