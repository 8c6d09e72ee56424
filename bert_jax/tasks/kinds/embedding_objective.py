"""The rows and the objective of training vectors of texts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int64

from bert_jax.model.bert import Bert
from bert_jax.model.heads import Heads
from bert_jax.model.heads.pooling import pool_rows, unit_vectors
from bert_jax.model.task_outputs import encode_for_task
from bert_jax.tasks.contrastive_losses import TextVectors, contrastive_sums, cosent_sum, truncations
from bert_jax.tasks.example import TaskBatch
from bert_jax.tasks.kinds.embedding_items import TextGroup
from bert_jax.tasks.objective import TaskObjective
from bert_jax.tasks.side_by_side import SideBySideRows, separated
from bert_jax.train.objectives import Term, Terms


class GroupLabels(NamedTuple):
    """The value of TaskBatch.labels."""

    scores: Any  # f32[B]; 0 where there are none
    present: Any  # bool[B,S]; a row's positions are S equal parts
    numbers: Any  # i32[B], of the rows in their file


@dataclass(frozen=True, eq=False, kw_only=True)
class EmbeddingRows(SideBySideRows[TextGroup]):
    """Rows of S texts: an anchor, its positive, and hard negatives, some of which may be absent."""

    text_lengths: Int64[np.ndarray, "R S"]
    scores: Float32[np.ndarray, "R"]
    label_weights: Float32[np.ndarray, "R"]

    @property
    def part_lengths(self) -> Int64[np.ndarray, "R S"]:
        return self.text_lengths

    def targets_of(
        self, rows: Int64[np.ndarray, "B"], present: Bool[np.ndarray, "B S"]
    ) -> tuple[GroupLabels, Float32[np.ndarray, "B"]]:
        return GroupLabels(self.scores[rows], present, rows.astype(np.int32)), self.label_weights[rows]


@dataclass(frozen=True)
class EmbeddingObjective(TaskObjective):
    """A contrastive loss with in-batch negatives, or CoSENT for pairs with a score (contrastive_losses.py).

    accuracy is the share of anchors whose positive alone has the highest score of all candidates of the batch. With
    several dimensions the loss is the sum of those of each, and accuracy that of the largest.
    """

    pooling: str = "mean"
    scored: bool = False
    scale: float = 20.0
    symmetric: bool = False
    dimensions: tuple[int, ...] = ()  # descending; empty: the whole vectors
    truncate_dim: int = 0  # of answers; 0: the whole vectors

    @property
    def heads(self) -> Heads:
        return Heads()

    @property
    def compares_rows(self) -> bool:
        return True

    @property
    def term_metrics(self) -> Mapping[str, tuple[str, ...]]:
        return {"task": () if self.scored else ("accuracy",)}

    def outputs(self, model: Bert, batch: TaskBatch, dropout_key: Array | None) -> Float[Array, "B S D"]:
        """The vector of each text; of an absent one, 0."""
        texts = separated(batch, batch.labels.present)
        vectors = pool_rows(self.pooling, encode_for_task(model, texts, dropout_key), texts.sequence_ids)
        return vectors.reshape(*batch.labels.present.shape, -1)

    def terms_of(self, model: Bert, outputs: Float[Array, "B S D"], batch: TaskBatch) -> Terms:
        own = TextVectors(outputs, batch.labels.present, batch.label_weights, batch.labels.numbers)
        parts, placement = truncations(own, self.dimensions), model.runtime.placement
        if self.scored:
            losses = [cosent_sum(part, batch.labels.scores, placement, self.scale) for part in parts]
            return {"task": Term(sum(losses[1:], losses[0]), {})}
        found = [contrastive_sums(part, placement, self.scale, self.symmetric) for part in parts]
        return {"task": Term(sum((loss for loss, _ in found[1:]), found[0][0]), {"accuracy": found[0][1]})}

    def answers(self, model: Bert, outputs: Float[Array, "B S D"], batch: TaskBatch) -> Float[Array, "B S _"]:
        """Vectors of length 1, of the first truncate_dim dimensions."""
        return unit_vectors(outputs[..., : self.truncate_dim or None])
