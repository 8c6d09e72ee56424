"""ALBERT, of any published size (Lan et al. 2020): one set of parameters for all layers, and sentence order.

    bert-jax pretrain --config albert:base --workdir runs/albert --config.data.train=SHARDS

or albert:large, :xlarge, :xxlarge, and :base_v2, :large_v2, :xlarge_v2, which have no dropout and train for 10 M
(base) or 3 M steps, published with additional data. SHARDS are made by `build-examples --objective sop --mask_unit
ngram --seq_len 512` with a SentencePiece vocabulary of 30,000 pieces; docs/data.md has the commands. Other ways of
sharing: --config.model.shared_layers=attention, feed_forward or none.

Hardware  published: 64 to 512 TPU v3; not run here
Hours     published: 32 for 125,000 steps of xxlarge
Expected  published, after 125,000 steps, dev averages of SQuAD 1.1, SQuAD 2.0, MNLI, SST-2 and RACE: base 80.1, large
          82.4, xlarge 85.5, xxlarge 88.7; version 2: base 82.3, large 85.7, xlarge 87.9; not measured here
Source    Lan et al. 2020, sections 3.1, 4.1 and 4.2, tables 2 and 6; google-research/albert: README.md for version 2,
          run_pretraining.py, optimization.py and lamb_optimizer.py for warmup, schedule, weight decay, epsilon and
          moments without bias correction
"""

import ml_collections

from bert_jax.config import Lamb, LinearSchedule, ModelOptions, PretrainConfig, recipe
from bert_jax.errors import UserError

SIZES = ("base", "large", "xlarge", "xxlarge", "base_v2", "large_v2", "xlarge_v2")
STEPS = 125_000
LONGER = {"base_v2": 10_000_000, "large_v2": 3_000_000, "xlarge_v2": 3_000_000}


def get_config(size: str = "base") -> ml_collections.ConfigDict:
    if size not in SIZES:
        raise UserError(f"albert: unknown size {size}; choose from {', '.join(SIZES)}")
    return recipe(
        PretrainConfig(
            model=ModelOptions(preset=f"albert_{size}"),
            optimizer=Lamb(
                learning_rate=0.00176,
                schedule=LinearSchedule(warmup_steps=3_125, from_start=True),
                weight_decay=0.01,
                bias_correction=False,
            ),
            batch_size=4096,
            steps=LONGER.get(size, STEPS),
        )
    )
