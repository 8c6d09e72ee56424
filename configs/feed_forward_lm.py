"""The feed-forward language model of Bengio et al. 2003: each token from the four before it.

    bert-jax pretrain --config feed_forward_lm --workdir runs/ngram --config.data.train=SHARDS

SHARDS are made by `build-examples --objective full_sentences --seq_len 128`. model.window is the number of tokens that
are concatenated: n - 1 of an n-gram, since it does not count the token that is predicted.

Hardware  published: 40 CPUs for the larger corpus (AP News); not run here
Hours     published: about three weeks for five epochs of that corpus
Expected  published: word perplexity on the Brown corpus 276, and 252 mixed with a trigram model; not measured here
Source    Bengio et al. 2003, sections 2 and 4, and table 1, MLP9 and MLP10: n = 5, 100 hidden units, no direct
          connections from embeddings to output. Not from the paper: embeddings as wide as the hidden layer instead of
          30, no output bias, AdamW instead of SGD, and all of the optimizer's and the batch's values
"""

import ml_collections

import bert_jax.lineage  # noqa: F401 (adds the encoders and their presets)
from bert_jax.config import AdamW, LinearSchedule, ModelOptions, PretrainConfig, recipe


def get_config() -> ml_collections.ConfigDict:
    return recipe(
        PretrainConfig(
            model=ModelOptions(preset="feed_forward_lm", dropout=0.0, initializer_range=0.1),
            optimizer=AdamW(
                learning_rate=1e-3, schedule=LinearSchedule(warmup_steps=100, from_start=True), epsilon=1e-8
            ),
            batch_size=32,
            steps=100_000,
        )
    )
