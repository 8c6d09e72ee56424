"""A pretraining objective of its own: BERT's masked tokens, and the first token of the row from [CLS].

It shows the parts of an extension: a batch field, a head, an objective and its options, and the tables that they join.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from flax import nnx

from bert_jax.config import ObjectiveConfig
from bert_jax.data.example import Batch
from bert_jax.model.heads import HEADS, Head
from bert_jax.model.heads.basic import Classifier
from bert_jax.model.heads.config import Heads
from bert_jax.model.outputs import masked_logits
from bert_jax.train.losses import classification_sums
from bert_jax.train.objectives import OBJECTIVES, Objective, Term

BUCKETS = 16  # the head predicts the first token's id modulo 16

FirstTokenBatch = NamedTuple("FirstTokenBatch", [*Batch.__annotations__.items(), ("first_bucket", object)])


def first_token_head(config, *, runtime, key) -> nnx.Module:
    return Classifier(config, BUCKETS, runtime=runtime, key=key)


@dataclass(frozen=True)
class FirstTokenObjective(Objective):
    heads = Heads(mlm=True, named=("first_token_head",))
    term_metrics: ClassVar = {"mlm": ("accuracy",), "first": ("accuracy",)}
    batch_fields = ("masked_positions", "first_bucket")

    def extend_batch(self, batch):
        return FirstTokenBatch(*batch, batch.input_ids[:, 1] % BUCKETS)

    def counts(self, batch):
        return {"mlm": batch.masked_weights.sum(), "first": (batch.sequence_ids[:, 0] > 0).sum().astype(jnp.float32)}

    def apply(self, model, batch, dropout_key):
        hidden = model.encode(batch, dropout_key).last
        logits = masked_logits(model, hidden, batch.masked_positions)
        mlm, mlm_correct = classification_sums(logits, batch.masked_ids, batch.masked_weights)
        logits = model.head("first_token_head")(hidden[:, :1])[:, 0]
        real = (batch.sequence_ids[:, 0] > 0).astype(jnp.float32)
        first, first_correct = classification_sums(logits, batch.first_bucket, real)
        return {"mlm": Term(mlm, {"accuracy": mlm_correct}), "first": Term(first, {"accuracy": first_correct})}


@dataclass(frozen=True)
class FirstToken(ObjectiveConfig, kind="first_token"):
    """Predicts masked tokens and the first token."""


HEADS["first_token_head"] = Head(first_token_head)
OBJECTIVES["first_token"] = lambda options, model, shards, config: FirstTokenObjective()
