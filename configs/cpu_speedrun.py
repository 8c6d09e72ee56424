"""The encoder speedrun: the best encoder that two CPU cores make of 300 MB of English in two hours of training.

    bert-jax pretrain --config cpu_speedrun --workdir runs/speedrun --config.data.train=SHARDS

SHARDS are made by `build-examples --objective doc_sentences --pack 16 --seq_len 128 --eval_fraction 0.005 --dedup` with
a lower-cased WordPiece vocabulary of 16,384 tokens. `python -m benchmarks.speedrun --output DIR` makes them from the
text in BERT_JAX_DATA/pretrain, runs this recipe, and scores it (docs/speedrun.md).

budget_minutes is training time, so a run that is stopped resumes with what is left of it. ModernBERT's layers at a
small size: norms before the sublayers, gated feed-forward, rotary positions, no biases, no dropout; all layers have
global attention. Muon for the matrices of the layers and AdamW for the rest, at one rate, with warmup and a linear
decay by share of the budget.

Hardware  2 CPU cores
Hours     2, by definition
Expected  56 M tokens in 13,700 steps; held-out masked-token loss 3.22 nats, accuracy 44%, of all held-out rows (3.15
          of the 1,024 rows of `eval`, and 3.3 after 91 minutes). Five seeds on dev: SST-2 80.1, MRPC 75.8, CoLA 20.5,
          STS-B 55.5, RTE 55.7, POS of EWT 93.3, CoNLL-2003 74.7
Source    layers: Warner et al. 2024, section 2.1; optimizer: Jordan 2024, Liu et al. 2025, section 2.2. The layers, the
          optimizer and the rate are compared in benchmarks/results/speedrun_recipe.md, with what is not tested
"""

import ml_collections

from bert_jax.config import EvalConfig, LinearSchedule, ModelOptions, Muon, PretrainConfig, PretrainDataConfig, recipe


def get_config() -> ml_collections.ConfigDict:
    return recipe(
        PretrainConfig(
            model=ModelOptions(
                preset="modernbert_base",
                layers=4,
                width=256,
                heads=4,
                feed_forward=688,  # gated: as many parameters as four times the width without a gate
                max_positions=512,
                window=0,  # of all layers, so the preset's period of global ones is 1
                global_every=1,
                rotary_base=10_000.0,
            ),
            data=PretrainDataConfig(mask_rate=0.15),
            optimizer=Muon(learning_rate=4e-3, schedule=LinearSchedule(warmup_steps=0, warmup_share=0.06)),
            eval=EvalConfig(every_steps=500, max_rows=1024),
            batch_size=32,
            steps=0,
            budget_minutes=120.0,
        )
    )
