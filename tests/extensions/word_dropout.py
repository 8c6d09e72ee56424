"""An objective of its own that samples at each step: next tokens, with a tenth of the inputs replaced by [UNK].

It shows Objective.corrupt, and an option of its own: --config.objective.drop_rate=0.2. The targets are the original
tokens (word dropout; Bowman et al. 2016).
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bert_jax.config import ObjectiveConfig
from bert_jax.config.options import RATE, option
from bert_jax.model.outputs import vocabulary_logits
from bert_jax.train.losses import classification_sums
from bert_jax.train.objectives import OBJECTIVES, CausalLMObjective, Term
from bert_jax.train.objectives.language_modeling import continues, unmasked


class DroppedBatch(NamedTuple):
    input_ids: jax.Array
    segment_ids: jax.Array
    sequence_ids: jax.Array
    positions: jax.Array
    targets: jax.Array  # i32[B,T], the text


@dataclass(frozen=True)
class WordDropoutObjective(CausalLMObjective):
    unknown_id: int
    special_ids: tuple[int, ...]
    rate: float = 0.1

    def corrupt(self, batch, key):
        text = unmasked(batch)
        special = jnp.isin(text, jnp.array(self.special_ids))
        dropped = jax.random.bernoulli(jax.random.fold_in(key, 0), self.rate, text.shape) & ~special
        ids = jnp.where(dropped, self.unknown_id, text)
        return DroppedBatch(ids, batch.segment_ids, batch.sequence_ids, batch.positions, text)

    def apply(self, model, batch, dropout_key):
        if not isinstance(batch, DroppedBatch):  # evaluation, which does not call corrupt
            return super().apply(model, batch, dropout_key)
        logits = vocabulary_logits(model, model.encode(batch, dropout_key).last[:, :-1])
        loss, correct = classification_sums(logits, batch.targets[:, 1:], continues(batch.sequence_ids))
        return {"lm": Term(loss, {"accuracy": correct})}


@dataclass(frozen=True)
class WordDropout(ObjectiveConfig, kind="word_dropout"):
    """Predicts next tokens from a text with gaps."""

    drop_rate: float = option(0.1, "share of the inputs that are replaced by [UNK]", valid=RATE)


def build(options, model, shards, config):
    words = shards[0].vocabulary
    return WordDropoutObjective(int(words.unk_id), tuple(map(int, words.special_ids)), options.drop_rate)


OBJECTIVES["word_dropout"] = build
