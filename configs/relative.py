"""BERT-Base with relative positions: those of Shaw et al. 2018, or T5's buckets as in MPNet (Song et al. 2020).

    python -m bert_jax.pretrain --config configs/relative.py:shaw --workdir runs/shaw --config.data.train=SHARDS

or configs/relative.py:buckets. SHARDS as of configs/bert_base.py; buckets knows no segments, so of `build_examples
--objective single`. --config.model.relative_distance=N is the distance beyond which all are one.

Hardware  not run by us
Hours     not measured by us
Expected  not measured by us. Published figures are of other objectives: Shaw et al. translate, MPNet permutes what it
          masks
Source    architectures: Shaw et al. 2018, section 3.2; Song et al. 2020 and Raffel et al. 2020, section 2.1.
          Training: BERT-Base's (Devlin et al. 2019, appendix A.2)
"""

import ml_collections

from bert_jax.command import UserError
from bert_jax.config import ModelOptions, OptimizerConfig, PretrainConfig, recipe

KINDS = ("shaw", "buckets")


def get_config(kind: str = "shaw") -> ml_collections.ConfigDict:
    if kind not in KINDS:
        raise UserError(f"configs/relative.py:{kind}: no such kind; use one of: {', '.join(KINDS)}")
    return recipe(
        PretrainConfig(
            model=ModelOptions(preset=f"{kind}_base"),
            optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=10_000),
            batch_size=256,
            steps=1_000_000,
        )
    )
