"""Recurrent language models: the LSTM of Zaremba et al. 2014, medium or large, and Elman's network, left to right.

    bert-jax pretrain --config lstm:medium --workdir runs/lstm --config.data.train=SHARDS

or lstm:large, lstm:rnn (Mikolov et al. 2010). SHARDS are made by `build-examples --objective
full_sentences --seq_len 140`. The state is zero at the start of each sequence, and its gradient is cut every
encoder.bptt positions. The output matrix is not tied to the embeddings; --config.model.tied_output=true ties it (Press
and Wolf 2017). With 10,000 words and two biases a layer (here the two are one, and the output has none), the LSTMs have
19,780,400 and 66,034,000 parameters.

Hardware  published: one NVIDIA K20 (lstm); not run here
Hours     published: medium "about half a day", large "an entire day"; rnn not published
Expected  published: word perplexity on the test set of the Penn Treebank, medium 82.7, large 78.4 (table 1); rnn 171 on
          held-out Wall Street Journal text after 6.4 million words of news (table 2); not measured here
Source    lstm: Zaremba et al. 2014, section 4.1: layers, widths, dropout, 35 positions, clipping, 39 and 55 epochs of
          929,000 words; initial deviations are those of its uniform values. rnn: Mikolov et al. 2010, table 2 (RNN
          400/10), and section 2 for 10 to 20 epochs. Not from the papers: AdamW at 1e-3 instead of SGD, 24 rows of 140
          instead of 20 of 35 for lstm, no dropout of the last layer's output; for rnn, tanh instead of the logistic
          function, 5 positions of the gradient instead of 1, the initial deviation, clipping, and the number of steps,
          which is 15 epochs of the Penn Treebank
"""

import dataclasses
import math
from typing import NamedTuple

import ml_collections

import bert_jax.lineage  # noqa: F401 (adds the encoders and their presets)
from bert_jax.config import AdamW, LinearSchedule, ModelOptions, PretrainConfig, recipe
from bert_jax.errors import UserError
from bert_jax.model import sizes

ROWS, POSITIONS = 24, 140
WORDS = 929_000  # of the Penn Treebank's training set


class Model(NamedTuple):
    preset: str
    dropout: float
    bptt: int
    limit: float  # of initial values, uniform in the paper
    clip_norm: float
    epochs: int


MODELS = {
    "medium": Model("lstm_medium", 0.5, 35, 0.05, 5.0, 39),
    "large": Model("lstm_large", 0.65, 35, 0.04, 10.0, 55),
    "rnn": Model("rnn", 0.0, 5, 0.05, 5.0, 15),
}


def get_config(model: str = "medium") -> ml_collections.ConfigDict:
    if model not in MODELS:
        raise UserError(f"lstm: unknown model {model}; choose from {', '.join(MODELS)}")
    chosen = MODELS[model]
    options = ModelOptions(
        preset=chosen.preset,
        dropout=chosen.dropout,
        encoder=dataclasses.replace(sizes.PRESETS[chosen.preset]["encoder"], bptt=chosen.bptt),
        initializer_range=chosen.limit / math.sqrt(3),  # the standard deviation of uniform values
    )
    return recipe(
        PretrainConfig(
            model=options,
            optimizer=AdamW(
                learning_rate=1e-3,
                schedule=LinearSchedule(warmup_steps=100, from_start=True),
                weight_decay=0.0,
                epsilon=1e-8,
                clip_norm=chosen.clip_norm,
            ),
            batch_size=ROWS,
            steps=chosen.epochs * WORDS // (ROWS * POSITIONS),
        )
    )
