"""Attention kernels, and the choice of one, which is logged and never silent.

    einsum   plain XLA, every platform, with dropout
    cudnn    cuDNN's fused kernel on NVIDIA GPUs, bfloat16, without attention dropout

auto takes cudnn where it can and einsum elsewhere.
"""

import functools
import logging
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt32

from bert_jax.command import UserError
from bert_jax.model.dropout import dropout

CHOICES = ("auto", "einsum", "cudnn")

# Far below any score, and finite: a row with nothing to attend to stays free of NaN.
MASKED_SCORE = -1e30

CUDNN_HEAD_MULTIPLE = 8
CUDNN_LARGEST_HEAD = 128


@functools.cache  # so that a choice is logged once, not once a trace
def choose(
    requested: str,
    *,
    platform: str,
    compute_dtype: str,
    head_width: int,
    dropout_rate: float,
    needs_scores: bool = False,
) -> str:
    """The kernel that runs: "einsum" or "cudnn". dropout_rate is that of the pass: 0 in evaluation.

    needs_scores   whether something is added to the scores, or the probabilities are asked for

    Raises UserError for an unknown choice, or one that cannot run here, with the reason.
    """
    if requested not in CHOICES:
        raise UserError(f"config.model.attention is {requested!r}; use one of: {', '.join(CHOICES)}")
    obstacle = _cudnn_obstacle(platform, compute_dtype, head_width, dropout_rate, needs_scores)
    if requested == "cudnn" and obstacle:
        raise UserError(f"config.model.attention=cudnn cannot run: {obstacle}; or use config.model.attention=auto")
    chosen = "einsum" if requested == "einsum" or obstacle else "cudnn"
    why = "as asked" if requested != "auto" else obstacle or "fastest here"
    logging.getLogger(__name__).info("attention kernel: %s (%s)", chosen, why)
    return chosen


def _cudnn_obstacle(platform: str, compute_dtype: str, head_width: int, dropout_rate: float, needs_scores: bool) -> str:
    if platform not in ("gpu", "cuda"):
        return f"cudnn needs an NVIDIA GPU, and this runs on {platform}"
    if compute_dtype != "bfloat16":
        return f"cudnn needs config.compute_dtype=bfloat16, got {compute_dtype}"
    if dropout_rate > 0:
        return f"cudnn needs config.model.attention_dropout=0, got {dropout_rate}"
    if needs_scores:
        return "cudnn gives no attention maps, and is not used with relative positions"
    if head_width % CUDNN_HEAD_MULTIPLE or head_width > CUDNN_LARGEST_HEAD:
        return f"cudnn needs heads of a width that is a multiple of 8 up to 128, got {head_width}"
    return ""


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
    """Scaled dot-product attention with dropout on the probabilities (Vaswani et al. 2017, section 3.2).

    Also gives the probabilities before dropout. A bias is added to the scaled scores. Scores and softmax are float32
    whatever the dtype of the arguments.
    """
    query = query * (1.0 / math.sqrt(query.shape[-1]))
    scores = jnp.einsum("bqnh,bknh->bnqk", query, key, precision=precision, preferred_element_type=jnp.float32)
    if bias is not None:
        scores += bias
    probabilities = jax.nn.softmax(jnp.where(visible, scores, MASKED_SCORE), axis=-1)
    dropped = dropout(probabilities, dropout_rate, seeds).astype(value.dtype)
    return jnp.einsum("bnqk,bknh->bqnh", dropped, value, precision=precision), probabilities


def cudnn_attention(
    query: Float[Array, "B Q N H"],
    key: Float[Array, "B T N H"],
    value: Float[Array, "B T N H"],
    visible: Bool[Array, "B 1 Q T"],
) -> Float[Array, "B Q N H"]:
    """The same without dropout, by cuDNN's fused kernel."""
    return jax.nn.dot_product_attention(query, key, value, mask=visible, implementation="cudnn")
