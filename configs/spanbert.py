"""SpanBERT, base or large (Joshi et al. 2020): masked spans, predicted as tokens and from their boundaries.

    python -m bert_jax.pretrain --config spanbert:large --workdir runs/spanbert --config.data.train=SHARDS

or spanbert:base. SHARDS are made by `build_examples --objective single --mask_unit span --seq_len 512` with
a cased WordPiece vocabulary; docs/data.md has the commands.

Hardware  published, large: 32 V100; not run here
Hours     published, large: 15 days
Expected  published, after fine-tuning: SQuAD 1.1 F1, large 94.6 (test), base 92.4 (dev); SQuAD 2.0 F1, large 88.7
          (test), base 83.6 (dev) (README of facebookresearch/SpanBERT); not measured here
Source    Joshi et al. 2020, sections 3 and 4.2; base uses the settings of large, because the paper describes only large
"""

import ml_collections

from bert_jax.command import UserError
from bert_jax.config import ModelOptions, OptimizerConfig, PretrainConfig, recipe

SIZES = ("base", "large")
STEPS = 2_400_000


def get_config(size: str = "large") -> ml_collections.ConfigDict:
    if size not in SIZES:
        raise UserError(f"spanbert: unknown size {size}; choose from {', '.join(SIZES)}")
    return recipe(
        PretrainConfig(
            model=ModelOptions(preset=f"spanbert_{size}"),
            optimizer=OptimizerConfig(
                learning_rate=1e-4, warmup_steps=0, warmup_share=10_000 / STEPS, epsilon=1e-8, weight_decay=0.1
            ),
            span_boundary=True,
            batch_size=256,
            steps=STEPS,
        )
    )
