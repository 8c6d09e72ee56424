"""A loss as terms: sums over a batch, and the counts that they are divided by."""

from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float

from bert_jax.model.bert import Bert
from bert_jax.model.heads import Heads

Sums = dict[str, Array]


@runtime_checkable
class Objective(Protocol):
    """A loss: terms with denominators that follow from the batch alone, and sums that follow from the model."""

    @property
    def heads(self) -> Heads:
        """The heads that the model needs for it."""

    def counts(self, batch: Any) -> Sums:
        """The denominator of each term, by the term's name; float32."""

    def sums(self, model: Bert, batch: Any, dropout_key: Array | None) -> Sums:
        """`<term>_loss`, and any other `<term>_<metric>`, summed over the batch; float32."""


def total_loss(sums: Sums, counts: Sums) -> Float[Array, ""]:
    """The loss that is descended: each term's sum over its count, added."""
    return sum((sums[f"{term}_loss"] / _divisor(count) for term, count in counts.items()), jnp.float32(0))


def means(sums: Sums, counts: Sums) -> Sums:
    """Metrics by name: `loss`, and `<term>_<metric>` with `correct` read as `accuracy`; NaN where nothing counted."""
    metrics = {"loss": total_loss(sums, counts)}
    for name, value in sums.items():
        count = counts[name.split("_", 1)[0]]
        metrics[name.replace("_correct", "_accuracy")] = jnp.where(count > 0, value / _divisor(count), jnp.nan)
    return metrics


def _divisor(count: Float[Array, ""]) -> Float[Array, ""]:
    """The count, which may be below 1 where classes are weighed; 1 where nothing counted."""
    return jnp.where(count > 0, count, 1)
