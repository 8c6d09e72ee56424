"""ELMo's bidirectional language model, small, medium or original (Peters et al. 2018), over tokens.

    bert-jax pretrain --config elmo:small --workdir runs/elmo --config.data.train=SHARDS

or elmo:medium, elmo:original. SHARDS are made by `build-examples --objective full_sentences
--seq_len 120`. Two LSTM language models, left to right and right to left, share their token embeddings and output
matrix; layers have 1024, 2048 or 4096 cells in each direction, projected to 128, 256 or 512. Without embeddings and
output they have 4.7, 18.9 and 75.6 million parameters. The published 13.6, 28.0 and 93.6 million include convolutions
over the characters of a word, whose place embeddings of tokens take here.

Hardware  published: three GPUs (original); not run here
Hours     published: about two weeks on three GTX 1080 (original); not measured here
Expected  forward_lm_loss and backward_lm_loss in nats per token, whose exp are perplexities; not measured here
Source    Peters et al. 2018, section 3.4: layers, cells, projections, the residual connection, 10 epochs of the 1
          Billion Word Benchmark. https://allennlp.org/elmo: the other sizes, some 800 million tokens an epoch.
          bin/train_elmo.py of allenai/bilm-tf: dropout, clipping, truncation after 20 positions, tokens per step;
          bilm/training.py there: initial deviations, which are those of its softmax. Not from these: AdamW at 1e-3
          instead of Adagrad, 64 rows of 120 instead of 384 of 20, the whole softmax instead of 8192 samples, no limits
          on cells and projections, no dropout of the last layer's output, no bias of the output, biases of forget
          gates that begin at 0, a state that is zero at the start of each row, and as the loss the sum of both
          directions (section 3.1), not their mean
"""

import dataclasses

import ml_collections

import bert_jax.lineage  # noqa: F401 (adds the encoders and their presets)
from bert_jax.config import AdamW, LinearSchedule, ModelOptions, PretrainConfig, recipe
from bert_jax.errors import UserError
from bert_jax.model import sizes

ROWS, POSITIONS = 64, 120
EPOCHS, TOKENS = 10, 800_000_000
PROJECTED = {"small": 128, "medium": 256, "original": 512}
PRESETS = {"small": "elmo_small", "medium": "elmo_medium", "original": "elmo"}


def get_config(model: str = "original") -> ml_collections.ConfigDict:
    if model not in PRESETS:
        raise UserError(f"elmo: unknown model {model}; choose from {', '.join(PRESETS)}")
    return recipe(
        PretrainConfig(
            model=ModelOptions(
                preset=PRESETS[model],
                encoder=dataclasses.replace(sizes.PRESETS[PRESETS[model]]["encoder"], bptt=20),
                dropout=0.1,
                initializer_range=PROJECTED[model] ** -0.5,
            ),
            optimizer=AdamW(
                learning_rate=1e-3,
                schedule=LinearSchedule(warmup_steps=1000, from_start=True),
                weight_decay=0.0,
                epsilon=1e-8,
                clip_norm=10.0,
            ),
            batch_size=ROWS,
            steps=EPOCHS * TOKENS // (ROWS * POSITIONS),
        )
    )
