"""The product of vectors and the output matrix of a vocabulary: its logits, or what a loss needs to do without them."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from bert_jax.model.ops import operations
from bert_jax.model.runtime import Runtime


@dataclass(frozen=True)
class VocabularyProduct:
    """Vectors, the output matrix and its bias, before they are multiplied.

    The logits of a batch are often its largest array. train/losses.py computes a loss from the parts, a few tokens of
    the vocabulary at a time, where the runtime asks for it.
    """

    vectors: Float[Array, "B M E"]
    table: Float[Array, "V E"]
    bias: Float[Array, "V"] | None
    vocab_size: int  # rows of the table from here on are padding
    runtime: Runtime

    def logits(self) -> Float[Array, "B M V"]:
        """float32 logits; -inf for the padding of the vocabulary."""
        table, runtime = self.table, self.runtime
        # Matrices, for the reason that Operations.dense gives: the gradient of the table is the largest matmul of all.
        rows = self.vectors.reshape(-1, table.shape[1])
        logits = jnp.einsum(
            "rd,vd->rv",
            rows,
            table.astype(rows.dtype),
            precision=runtime.precision,
            preferred_element_type=jnp.float32,
        )
        if self.bias is not None:
            logits = operations(runtime).add_vocabulary_bias(logits, self.bias)
        in_vocabulary = jnp.arange(table.shape[0]) < self.vocab_size
        logits = jnp.where(in_vocabulary[None], logits, -jnp.inf)
        return runtime.placement.constrain("logits", logits.reshape(*self.vectors.shape[:2], -1))
