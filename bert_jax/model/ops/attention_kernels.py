"""Attention kernels, and the choice of one. The choice is always logged.

    einsum   plain XLA, every platform, with dropout, relative positions and attention maps
    banded   plain XLA, every platform, with dropout, for layers with a window; other layers use einsum
             (attention_banded.py)
    cudnn    cuDNN's fused kernel on NVIDIA GPUs, bfloat16, without attention dropout
    splash   the splash kernel on TPUs, bfloat16, without attention dropout (attention_splash.py)

`auto` takes the fused kernel of the platform where that can run, banded where it saves work, and einsum elsewhere.
"""

import functools
import logging
import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt32

from bert_jax.command import UserError
from bert_jax.model.dropout import dropout
from bert_jax.model.ops import attention_splash

CHOICES = ("auto", "einsum", "banded", "cudnn", "splash")

# Far below any score, and finite, so that a row without visible keys has no NaN.
MASKED_SCORE = -1e30

CUDNN_HEAD_MULTIPLE = 8
CUDNN_LARGEST_HEAD = 128


@dataclass(frozen=True)
class Situation:
    """What the choice of a kernel depends on."""

    platform: str
    compute_dtype: str
    head_width: int
    dropout_rate: float  # of attention probabilities; 0 in evaluation
    needs_scores: bool = False  # a bias is added to the scores, or the probabilities are returned
    windows: bool = False  # some layers of the architecture have a window
    local: bool = False  # this layer is one of them
    narrow: bool = False  # the window is so much shorter than the rows that bands save work
    some_queries: bool = False  # only some positions have queries, for which banded and splash give way to einsum
    shardable: bool = True  # splash can be sharded over the devices: there is only one, or a mesh is set


def choose(requested: str, situation: Situation) -> str:
    """Returns the kernel that runs: "einsum", "banded", "cudnn" or "splash".

    Raises UserError for an unknown choice, or for one that cannot run, with the reason.
    """
    if requested not in CHOICES:
        raise UserError(f"unknown config.model.attention {requested!r}; choose from {', '.join(CHOICES)}")
    fused = "splash" if situation.platform == "tpu" else "cudnn"
    some_queries, why_not = situation.some_queries, _obstacles(situation)
    if requested != "auto":
        if requested in why_not:
            raise UserError(
                f"config.model.attention={requested} cannot run: {why_not[requested]}; or use "
                "config.model.attention=auto"
            )
        chosen, why = requested, "as requested"
        if some_queries and requested in ("banded", "splash"):
            chosen, why = "einsum", f"{requested} cannot compute some queries only"
        elif requested == "banded" and not situation.local:
            chosen, why = "einsum", "this layer has no window"
    elif fused not in why_not and not (some_queries and fused == "splash"):
        chosen, why = fused, "fastest on this platform"
    elif situation.local and situation.narrow and not some_queries and "banded" not in why_not:
        chosen, why = "banded", why_not.get(fused, "")
    else:
        chosen, why = "einsum", why_not.get(fused, "some queries only")
    log_choice(f"attention kernel: {chosen} ({why})")
    return chosen


def _obstacles(situation: Situation) -> dict[str, str]:
    """Returns the kernels that cannot run, each with the first reason."""
    s = situation
    maps = ("returns no attention maps and takes no bias of relative positions", s.needs_scores)
    fused = [
        (f"needs config.compute_dtype=bfloat16, got {s.compute_dtype}", s.compute_dtype != "bfloat16"),
        (f"needs config.model.attention_dropout=0, got {s.dropout_rate}", s.dropout_rate > 0),
        maps,
    ]
    multiple = attention_splash.HEAD_MULTIPLE
    odd = s.head_width % CUDNN_HEAD_MULTIPLE or s.head_width > CUDNN_LARGEST_HEAD
    reasons: dict[str, list[tuple[str, object]]] = {
        "banded": [("needs an architecture with windowed layers (model.window)", not s.windows), maps],
        "cudnn": [
            (f"needs an NVIDIA GPU, and this runs on {s.platform}", s.platform not in ("gpu", "cuda")),
            *fused,
            (f"needs a head width that is a multiple of 8 up to 128, got {s.head_width}", odd),
        ],
        "splash": [
            (f"needs a TPU, and this runs on {s.platform}", s.platform != "tpu"),
            *fused,
            (f"needs a head width that is a multiple of {multiple}, got {s.head_width}", s.head_width % multiple),
            ("on several devices needs a mesh (jax.set_mesh)", not s.shardable),
        ],
    }
    found = {kernel: [reason for reason, holds in listed if holds] for kernel, listed in reasons.items()}
    return {kernel: f"{kernel} {holding[0]}" for kernel, holding in found.items() if holding}


@functools.cache
def log_choice(line: str) -> None:
    """Logs a line once, and not at every trace."""
    logging.getLogger(__name__).info(line)


def einsum_attention(
    query: Float[Array, "B Q N H"],
    key: Float[Array, "B T N H"],
    value: Float[Array, "B T N H"],
    visible: Bool[Array, "B 1 Q T"],
    *,
    bias: Float[Array, "#B N Q T"] | None = None,
    dropout_rate: float,
    seeds: UInt32[Array, "B 2"] | None,
    precision: jax.lax.Precision,
) -> tuple[Float[Array, "B Q N H"], Float[Array, "B N Q T"]]:
    """Computes scaled dot-product attention with dropout on the probabilities (Vaswani et al. 2017, section 3.2).

    Also returns the probabilities before dropout. A bias is added to the scaled scores. Scores and softmax are float32
    whatever the dtype of the arguments.
    """
    query = query * (1.0 / math.sqrt(query.shape[-1]))
    scores = jnp.einsum("bqnh,bknh->bnqk", query, key, precision=precision, preferred_element_type=jnp.float32)
    if bias is not None:
        scores += bias
    scores = jnp.where(visible, scores, MASKED_SCORE)
    probabilities = softmax_narrow(scores) if value.dtype == jnp.bfloat16 else jax.nn.softmax(scores, axis=-1)
    dropped = dropout(probabilities, dropout_rate, seeds, position_axes=2).astype(value.dtype)
    return jnp.einsum("bnqk,bknh->bqnh", dropped, value, precision=precision), probabilities


@jax.custom_vjp
def softmax_narrow(scores: Float[Array, "*shape K"]) -> Float[Array, "*shape K"]:
    """Computes softmax over the last axis in float32, for whose backward pass only bfloat16 values are kept."""
    return jax.nn.softmax(scores, axis=-1)


def _softmax_forward(scores: Array) -> tuple[Array, Array]:
    probabilities = softmax_narrow(scores)
    return probabilities, probabilities.astype(jnp.bfloat16)


def _softmax_backward(kept: Array, gradient: Array) -> tuple[Array]:
    probabilities = kept.astype(jnp.float32)
    return (probabilities * (gradient - (gradient * probabilities).sum(axis=-1, keepdims=True)),)


softmax_narrow.defvjp(_softmax_forward, _softmax_backward)


def cudnn_attention(
    query: Float[Array, "B Q N H"],
    key: Float[Array, "B T N H"],
    value: Float[Array, "B T N H"],
    visible: Bool[Array, "B 1 Q T"],
    *,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B Q N H"]:
    """Computes einsum_attention without dropout, by cuDNN's fused kernel, for any Q and T.

    In training with a mask, cuDNN takes even Q and T only. Odd ones are padded by one position, which no query sees as
    a key, and which sees everything as a query.
    """
    queries, length = query.shape[1], key.shape[1]
    query = jnp.pad(query, ((0, 0), (0, queries % 2), (0, 0), (0, 0)))
    key, value = (jnp.pad(part, ((0, 0), (0, length % 2), (0, 0), (0, 0))) for part in (key, value))
    visible = jnp.pad(visible, ((0, 0), (0, 0), (0, 0), (0, length % 2)))
    visible = jnp.pad(visible, ((0, 0), (0, 0), (0, queries % 2), (0, 0)), constant_values=True)
    return jax.nn.dot_product_attention(query, key, value, mask=visible, implementation=implementation)[:, :queries]
