"""Multi-head self-attention: it chooses and calls each layer's kernel, and holds the parameters."""

import functools
import logging
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.model.attention import choice
from bert_jax.model.attention.kernels import (
    KernelOptions,
    banded_attention,
    cudnn_attention,
    cudnn_attention_by_length,
    einsum_attention,
    splash_attention,
)
from bert_jax.model.dropout import Seeds
from bert_jax.model.embeddings import RelativeTable, TokenPositions, rotate, sequence_lengths, visible_keys
from bert_jax.model.layers import Dense, Shape, child_key
from bert_jax.model.lora import adapted, add_adapters
from bert_jax.model.ops import Heads, operations
from bert_jax.model.runtime import Runtime

# The first release whose backward pass writes no gradient of a mask (jax's changelog; jax-ml/jax pull request 39512).
NO_MASK_GRADIENT = (0, 11, 1)


def kernels(config: ModelConfig, runtime: Runtime, length: int) -> list[str]:
    """Lists a model's attention kernels for training on rows of that length; `none` if it has no attention.

    Raises:
        UserError: a requested kernel cannot run (choice.choose).
    """
    if config.encoder.kind != "transformer":
        if runtime.attention != "auto":
            raise UserError(
                f"model.encoder={config.encoder.kind} has no attention, but model.attention is {runtime.attention}. "
                "Use --config.model.attention=auto"
            )
        return ["none"]
    # As in a training step: evaluation, without dropout, may run faster kernels.
    training = {"dropout_rate": config.attention_dropout, "needs_scores": config.relative != "none"}
    chosen = [
        _kernel(config, runtime, length, local=not config.is_global(layer), **training)
        for layer in range(config.layers)
    ]
    # Layers with and without a window may differ.
    return list(dict.fromkeys(chosen))


def _kernel(config: ModelConfig, runtime: Runtime, length: int, **layer: Any) -> str:
    """Chooses a layer's kernel; `layer` has the remaining fields of Situation."""
    situation = choice.Situation(
        platform=runtime.device_platform,
        capability=runtime.compute_capability,
        compute_dtype=runtime.compute_dtype,
        head_width=config.width // config.heads,
        window=config.window,
        # The symbolic length of an exported program cannot be compared; such programs request einsum.
        length=length if runtime.attention == "auto" else 0,
        causal=config.causal,
        shardable=jax.device_count() == 1 or runtime.placement.shards_kernels,
        **layer,
    )
    return choice.choose(runtime.attention, situation)


class SelfAttention(nnx.Module):
    """Queries, keys and values by one matmul, N heads, an output projection (Vaswani et al. 2017, section 3.2)."""

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray, stack: Shape) -> None:
        heads, width = (config.heads, config.width // config.heads), (config.width,)
        dense = functools.partial(Dense, runtime=runtime, stack=stack, bias=config.bias)
        self.qkv = dense(width, (3, *heads), deviation=config.initializer_range, key=child_key(key, "qkv"))
        self.output = dense(heads, width, deviation=config.residual_deviation, key=child_key(key, "output"))
        shapes = {"query": (width, heads), "key": (width, heads), "value": (width, heads), "output": (heads, width)}
        add_adapters(self, "encoder/layers/attention", config, shapes, runtime=runtime, key=key, stack=stack)
        if config.relative == "shaw":
            self.relative = RelativeTable(config, key=child_key(key, "relative"), stack=stack)
        self.config = config
        self.runtime = runtime

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        keys: TokenPositions,
        seeds: Seeds,
        *,
        local: bool = False,
        bias: Float[Array, "#B N Q T"] | None = None,
        queries: tuple[Float[Array, "B Q D"], TokenPositions] | None = None,
        with_map: bool = False,
    ) -> tuple[Float[Array, "B Q D"], Float[Array, "B N Q T"] | None]:
        """Attends from every position of `hidden`, or from some.

        Args:
            local: whether to attend within the window of the architecture.
            bias: added to the scores.
            queries: the vectors and positions to attend from; None: all of `hidden`.
            with_map: whether to return the probabilities before dropout, too.
        """
        config, runtime, rate = self.config, self.runtime, 0.0 if seeds is None else self.config.attention_dropout
        # All positions are keys and values, whichever have queries.
        readers, query_positions = (hidden, keys) if queries is None else queries
        kernel = _kernel(
            config,
            runtime,
            hidden.shape[1],
            local=local,
            dropout_rate=rate,
            needs_scores=with_map or bias is not None or config.relative == "shaw",
            some_queries=queries is not None,
        )
        query, key, value = operations(runtime).project_heads(
            hidden,
            None if queries is None else readers,
            self.qkv.kernel[...],
            None if self.qkv.bias is None else self.qkv.bias[...],
            separate=kernel in choice.SEPARATE,
        )
        # Adapters act before rotations, so that merging them into the kernels (lora.merge) changes nothing.
        query = adapted(self, "query", query, readers, seeds)
        key, value = adapted(self, "key", key, hidden, seeds), adapted(self, "value", value, hidden, seeds)
        if config.positions == "rotary":
            # By the position in the sequence, so that a packed row gives the states of separate rows.
            base = config.rotary_base_local if local else config.rotary_base
            query, key = rotate(query, query_positions.in_sequence, base), rotate(key, keys.in_sequence, base)
        if config.relative == "shaw":
            # Within a sequence, distances in the row are those in the sequence. Scores between sequences are masked
            # anyway.
            in_row = keys.in_row[:1]  # the same in each row
            queried = in_row if queries is None else query_positions.in_row
            bias = self.relative(query, queried, in_row, runtime.precision)
        options = KernelOptions(
            config.window if local else 0, config.causal, rate, runtime.precision, runtime.placement
        )
        context, probabilities = _attend(
            kernel, (query, key, value), query_positions, keys, bias, seeds, options, runtime
        )
        context = runtime.placement.constrain("heads", context)
        return adapted(self, "output", self.output(context), context, seeds), probabilities if with_map else None


def _attend(
    kernel: str,
    heads: Heads,
    queries: TokenPositions,
    keys: TokenPositions,
    bias: Float[Array, "#B N Q T"] | None,
    seeds: Seeds,
    options: KernelOptions,
    runtime: Runtime,
) -> tuple[Float[Array, "B Q N H"], Float[Array, "B N Q T"] | None]:
    """Attends within sequences (visible_keys), and returns the probabilities if they are stored.

    The keys cover the whole row, and are the queries unless these are some only.
    """
    if kernel == "splash":
        return splash_attention(heads, keys.sequence_ids, seeds, options), None
    if kernel == "banded":
        return banded_attention(heads, keys.sequence_ids, seeds, options), None
    if kernel == "flash":
        # The kernels of Pallas are imported when they run, since the import takes a second.
        from bert_jax.model.attention.flash import flash_attention

        return flash_attention(heads, keys.sequence_ids, seeds, options), None
    if kernel == "triton":
        from bert_jax.model.attention.triton import triton_attention

        return triton_attention(heads, keys.sequence_ids, seeds, options), None
    # Lengths describe what is visible only without a window, and causality only if queries and keys are the same.
    if kernel == "cudnn" and keys.unpacked and not options.window and not (options.causal and queries is not keys):
        choice.log_once("cudnn reads the lengths of sequences instead of a mask")
        return cudnn_attention_by_length(heads, sequence_lengths(keys), options), None

    visible = visible_keys(queries, keys, window=options.window, causal=options.causal)
    if kernel == "cudnn":
        choice.log_once("cudnn reads a mask [B, 1, T, T] in layers where rows may be packed or have a window")
        if jax.__version_info__ < NO_MASK_GRADIENT:
            choice.log_once(
                f"with jax {jax.__version__}, cudnn also writes a gradient of the mask in training; jax "
                f"{'.'.join(map(str, NO_MASK_GRADIENT))} and later (Python 3.12) do not",
                logging.WARNING,
            )
        return cudnn_attention(heads, visible, options), None

    narrow = operations(runtime).narrows_score_gradients
    attend: Any = functools.partial(einsum_attention, options=options, narrow=narrow)
    if runtime.remat == "attention":
        attend = jax.checkpoint(attend)  # the backward pass computes scores and probabilities again
    return attend(heads, visible, seeds=seeds, bias=bias)
