"""ELECTRA, small, base or large (Clark et al. 2020): a generator replaces tokens, and the model finds them.

    bert-jax pretrain --config electra:small --workdir runs/electra --config.data.train=SHARDS

or electra:base, electra:large. SHARDS are made by `build-examples --objective single --mask_split
0.85,0,0.15` with an uncased WordPiece vocabulary, at --seq_len 128 for small and 512 otherwise; large masks 25% of the
tokens.
`bert-jax export --format hf` writes the discriminator, and with --part generator the generator.

Hardware  published: small 1 V100, base 16 TPU v3, large (400,000 steps) 128 TPU v3; not run here
Hours     published: small 96, base 96
Expected  published: GLUE dev average, small 79.9, base 85.1, large 89.0; not measured here
Source    Clark et al. 2020, sections 3.1 to 3.4, tables 1, 2 and 6; dropout of 0.1 everywhere. The code of
          google-research/electra: 15% of the chosen tokens keep their text, and none is random. Nine of ten of its
          examples have two segments that follow each other, with their segment ids; there is one segment here
"""

from typing import NamedTuple

import ml_collections

from bert_jax.config import (
    AdamW,
    LinearSchedule,
    ModelOptions,
    PretrainConfig,
    PretrainDataConfig,
    ReplacedTokens,
    recipe,
)
from bert_jax.errors import UserError


class Size(NamedTuple):
    batch: int
    steps: int
    rate: float
    generator: float  # width relative to the model's
    mask_rate: float


SIZES = {
    "small": Size(128, 1_000_000, 5e-4, 1 / 4, 0.15),
    "base": Size(256, 766_000, 2e-4, 1 / 3, 0.15),
    "large": Size(2048, 400_000, 2e-4, 1 / 4, 0.25),
}


def get_config(size: str = "small") -> ml_collections.ConfigDict:
    if size not in SIZES:
        raise UserError(f"electra: unknown size {size}; choose from {', '.join(SIZES)}")
    chosen = SIZES[size]
    return recipe(
        PretrainConfig(
            model=ModelOptions(preset=f"electra_{size}"),
            data=PretrainDataConfig(mask_rate=chosen.mask_rate),
            # As in google-research/electra, model/optimization.py: Adam without bias correction.
            optimizer=AdamW(
                learning_rate=chosen.rate,
                schedule=LinearSchedule(warmup_steps=10_000, from_start=True),
                bias_correction=False,
            ),
            objective=ReplacedTokens(generator_size=chosen.generator),
            batch_size=chosen.batch,
            steps=chosen.steps,
        )
    )
