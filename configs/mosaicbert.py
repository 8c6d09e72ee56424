"""A model like MosaicBERT, base or large (Portes et al. 2023): gated feed-forward, 30% masked, T=128.

    bert-jax pretrain --config mosaicbert:base --workdir runs/mosaic --config.data.train=SHARDS

or mosaicbert:large. SHARDS are of the uncased vocabulary and `build-examples --objective single
--seq_len 128`; evaluation uses the mask rate of the shards, 15%, as in the paper. Differences from the paper: rotary
positions instead of attention biases by distance (ALiBi), and biases in the gated feed-forward.

Hardware  published, base: 8 A100 of 80 GB; not run here
Hours     published, base: 1.13 to a GLUE dev average of 79.6
Expected  published: GLUE dev average 79.6 after those hours (abstract); not measured here
Source    Portes et al. 2023; base: mosaicml/examples, mosaic-bert-base-uncased.yaml: 286,720,000 samples in batches of
          4,096. large uses the settings of base, because its own are not in that repository
"""

import ml_collections

from bert_jax.config import AdamW, LinearSchedule, ModelOptions, PretrainConfig, PretrainDataConfig, recipe
from bert_jax.errors import UserError

SIZES = ("base", "large")
RATE = 5e-4


def get_config(size: str = "base") -> ml_collections.ConfigDict:
    if size not in SIZES:
        raise UserError(f"mosaicbert: unknown size {size}; choose from {', '.join(SIZES)}")
    return recipe(
        PretrainConfig(
            model=ModelOptions(preset=f"mosaicbert_{size}"),
            data=PretrainDataConfig(mask_rate=0.3),
            optimizer=AdamW(
                learning_rate=RATE,
                schedule=LinearSchedule(warmup_steps=0, warmup_share=0.06, final_share=0.02),
                beta2=0.98,
                # Composer's decay: 1e-5 per step at the peak rate, on all parameters; here it is multiplied by the
                # rate.
                decays={".*": 1e-5 / RATE},
                clip_norm=0.0,
            ),
            batch_size=4096,
            steps=70_000,
        )
    )
