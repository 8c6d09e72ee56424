"""BERT-Base with relative positions: those of Shaw et al. 2018, or T5's buckets as in MPNet (Song et al. 2020).

    bert-jax pretrain --config relative:shaw --workdir runs/shaw --config.data.train=SHARDS

or relative:buckets. SHARDS are those of the recipe bert_base; for buckets, which has no segments, use
`build-examples --objective single`. --config.model.relative_distance=N clips longer distances.

Hardware  not run here
Hours     not measured here
Expected  not measured here. Published results are for other objectives: Shaw et al. translate, MPNet permutes
          masked tokens
Source    architectures: Shaw et al. 2018, section 3.2; Song et al. 2020 and Raffel et al. 2020, section 2.1.
          Training: BERT-Base's (Devlin et al. 2019, appendix A.2), but with bias correction in Adam
"""

import ml_collections

from bert_jax.config import AdamW, LinearSchedule, ModelOptions, PretrainConfig, recipe
from bert_jax.errors import UserError

KINDS = ("shaw", "buckets")


def get_config(kind: str = "shaw") -> ml_collections.ConfigDict:
    if kind not in KINDS:
        raise UserError(f"relative: unknown kind {kind}; choose from {', '.join(KINDS)}")
    return recipe(
        PretrainConfig(
            model=ModelOptions(preset=f"{kind}_base"),
            optimizer=AdamW(learning_rate=1e-4, schedule=LinearSchedule(warmup_steps=10_000, from_start=True)),
            batch_size=256,
            steps=1_000_000,
        )
    )
