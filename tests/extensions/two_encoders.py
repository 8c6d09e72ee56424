"""A model of two encoders with one embedding table, as in replaced token detection (Clark et al. 2020, section 3.1).

The generator fills masked tokens; the discriminator says of each token whether the generator replaced it.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp

from bert_jax.model import bert
from bert_jax.model.heads.config import Heads
from bert_jax.model.outputs import tag_logits, vocabulary_logits
from bert_jax.model.transformer import gather_positions
from bert_jax.train.losses import binary_sums, classification_sums
from bert_jax.train.objectives import Objective, Term

GENERATOR, DISCRIMINATOR = Heads(mlm=True), Heads(tags=1)


@dataclass(frozen=True)
class ReplacedTokenObjective(Objective):
    layers: int = 1  # of the generator
    heads = Heads()
    term_metrics: ClassVar = {"mlm": ("accuracy",), "rtd": ("accuracy",)}

    def init(self, config, key):
        generator = bert.init_params(replace(config, layers=self.layers), GENERATOR, jax.random.fold_in(key, 0))
        discriminator = bert.init_params(config, DISCRIMINATOR, jax.random.fold_in(key, 1))
        del generator["embeddings"]
        return {
            "embeddings": discriminator.pop("embeddings"),
            "generator": generator,
            "discriminator": discriminator,
        }

    def bind(self, config, params, runtime):
        shared = {"embeddings": params["embeddings"]}
        small = replace(config, layers=self.layers)
        return (
            bert.bind(small, GENERATOR, params["generator"] | shared, runtime),
            bert.bind(config, DISCRIMINATOR, params["discriminator"] | shared, runtime),
        )

    def counts(self, batch):
        return {"mlm": batch.masked_weights.sum(), "rtd": (batch.sequence_ids > 0).sum().astype(jnp.float32)}

    def apply(self, model, batch, dropout_key):
        generator, discriminator = model
        hidden = generator.encode(batch, dropout_key).last
        logits = vocabulary_logits(generator, gather_positions(hidden, batch.masked_positions))
        mlm, correct = classification_sums(logits, batch.masked_ids, batch.masked_weights)
        filled = jnp.where(batch.masked_weights > 0, jax.lax.stop_gradient(logits).argmax(-1), 0)
        chosen = jax.nn.one_hot(batch.masked_positions, batch.input_ids.shape[1], dtype=jnp.int32)
        chosen *= (batch.masked_weights > 0)[..., None]
        masked = chosen.sum(axis=1) > 0
        ids = jnp.where(masked, (chosen * filled[..., None]).sum(axis=1), batch.input_ids)
        replaced = masked & (ids != (chosen * batch.masked_ids[..., None]).sum(axis=1))
        hidden = discriminator.encode(batch._replace(input_ids=ids), dropout_key).last
        real = (batch.sequence_ids > 0).astype(jnp.float32)
        rtd, right = binary_sums(tag_logits(discriminator, hidden)[..., 0], replaced.astype(jnp.int32), real)
        return {"mlm": Term(mlm, {"accuracy": correct}), "rtd": Term(rtd, {"accuracy": right})}
