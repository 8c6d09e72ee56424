"""A masked diffusion language model of BERT-Base's size (MDLM; Sahoo et al. 2024), one million steps of 512 rows.

    bert-jax pretrain --config diffusion --workdir runs/diffusion --config.data.train=SHARDS

SHARDS are made by `build-examples --objective single --seq_len 128` with an uncased WordPiece vocabulary, as theirs for
One Billion Words. `evaluate` prints the bound (mdm_loss, nats per token) and its perplexity, and
`bert-jax fill-mask --checkpoint runs/diffusion --generate 64 --average ema` writes text.

Hardware  not run here
Hours     not measured
Expected  published: perplexity of at most 23.00 on One Billion Words after 327 billion tokens, five times this run. It
          also counts [CLS] and [SEP], which this bound leaves out. Not measured here
Source    Sahoo et al. 2024, sections 3 and 5, and configs/config.yaml of kuleshov-group/mdlm for the optimizer, the
          warmup of a constant rate, the average of the parameters and the batch. The model is BERT-Base instead of
          their diffusion transformer of the same layers, width and heads. The low-discrepancy mask rates and the
          least rate of 0.001 are theirs
"""

import ml_collections

from bert_jax.config import AdamW, ConstantSchedule, Diffusion, ModelOptions, PretrainConfig, recipe


def get_config() -> ml_collections.ConfigDict:
    return recipe(
        PretrainConfig(
            model=ModelOptions(preset="base"),
            optimizer=AdamW(
                learning_rate=3e-4,
                schedule=ConstantSchedule(warmup_steps=2500),
                epsilon=1e-8,
                weight_decay=0.0,
                ema_decay=0.9999,
            ),
            objective=Diffusion(),
            batch_size=512,
            steps=1_000_000,
        )
    )
