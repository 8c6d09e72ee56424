"""Chooses a layer's attention kernel. `choose` reads top to bottom; the choice is always logged.

    splash   the splash kernel on TPUs, bfloat16, without attention dropout (kernels.py)
    banded   plain XLA, every platform, with dropout, for layers with a window; other layers use einsum (kernels.py)
    cudnn    cuDNN's fused kernel on NVIDIA GPUs, bfloat16, without attention dropout; it reads the lengths of unpacked
             rows, and otherwise a mask (kernels.py)
    flash    a kernel on TPUs, bfloat16, with the dropout masks of einsum (flash.py)
    triton   the same on NVIDIA GPUs (triton.py)
    einsum   plain XLA, every platform, with dropout, relative positions and attention maps (kernels.py)

The kernels' limits are here, so that choosing imports none of them: importing Pallas takes a second.
"""

import functools
import logging
from dataclasses import dataclass
from typing import Any

from bert_jax.errors import UserError
from bert_jax.model.runtime import NVIDIA

KERNELS = ("splash", "banded", "cudnn", "flash", "triton", "einsum")
# Kernels that read queries, keys and values as three arrays [B, T, N, H].
SEPARATE = ("cudnn", "triton")

SMALLEST_BAND = 16  # positions; smaller blocks of banded make matmuls too small to pay on any device

HEAD_MULTIPLE = 8  # for cuDNN; for splash and flash, head widths from 8 to 192 were compiled for TPU v4 to v6e
CUDNN_LARGEST_HEAD = 128
CUDNN_LEAST_GENERATION = 8  # of the compute capability: Ampere

TRITON_HEAD_WIDTHS = (16, 32, 64, 128)
TRITON_LEAST_BLOCK = 16  # the smallest tile of a matmul in Triton
TRITON_WHOLE_ROW = 128  # rows of up to this many positions are one block
TRITON_BLOCK = 64  # positions of a block of longer rows
HOPPER, TIMED_WIDTH = "9.0", 64  # the compute capability and the head width for which triton was timed


@dataclass(frozen=True)
class Situation:
    """A layer, its rows and the device, as `choose` sees them."""

    platform: str
    compute_dtype: str
    head_width: int
    dropout_rate: float  # of attention probabilities; 0 in evaluation
    needs_scores: bool = False  # a bias is added to the scores, or the probabilities are returned
    window: int = 0  # of the model's local layers; 0: it has none
    local: bool = False  # this layer is one of them
    length: int = 0  # positions of a row; 0: unknown
    causal: bool = False
    some_queries: bool = False  # only some positions have queries
    capability: str = ""  # the compute capability of an NVIDIA GPU, where it is known
    shardable: bool = True  # Pallas kernels can be sharded over the devices: there is only one, or a mesh is set


def choose(requested: str, situation: Situation) -> str:
    """Returns the name of a layer's kernel.

    Raises:
        UserError: the requested kernel is unknown or cannot run.
    """
    if requested not in ("auto", *KERNELS):
        raise UserError(f"unknown config.model.attention {requested!r}; choose from auto, {', '.join(KERNELS)}")
    # An obstacle holds for all layers of a model, so a request that meets one is refused. An exception holds for some
    # layers, which use einsum although the request is granted.
    obstacles = {kernel: _obstacle(kernel, situation) for kernel in KERNELS}
    against = {kernel: obstacles[kernel] or _exception(kernel, situation) for kernel in KERNELS}
    fused = "splash" if situation.platform == "tpu" else "cudnn"

    if requested != "auto":
        if obstacles[requested]:
            raise UserError(
                f"config.model.attention={requested} cannot run: {requested} {obstacles[requested]}; or use "
                "config.model.attention=auto"
            )
        kernel, reason = requested, "as requested"
        if against[requested]:
            kernel, reason = "einsum", f"{requested} {against[requested]}"
    elif not against["splash"]:
        # Splash skips blocks outside a window itself (docs/decisions/model_and_attention.md).
        kernel, reason = "splash", "fastest on this platform"
    elif not against["banded"] and bands_save_work(situation.window, situation.length):
        # Long rows with a narrow window: cuDNN would compute all of the scores (docs/decisions/model_and_attention.md).
        kernel, reason = "banded", f"{fused} {against[fused] or 'would compute scores outside the window'}"
    elif not against["cudnn"]:
        kernel, reason = "cudnn", "fastest on this platform"
    elif not against["triton"] and _triton_is_faster(situation):
        kernel, reason = "triton", f"{fused} {against[fused]}"
    else:
        # Never flash, which nobody has run on a TPU (docs/decisions/model_and_attention.md).
        kernel, reason = "einsum", f"{fused} {against[fused]}"
    log_once(f"attention kernel: {kernel} ({reason})")
    return kernel


def _obstacle(kernel: str, s: Situation) -> str:
    """Returns the first reason why a kernel cannot run in a model, to refuse a request with; empty if it can."""
    tpu = (f"needs a TPU, and this runs on {s.platform}", s.platform != "tpu")
    nvidia = (f"needs an NVIDIA GPU, and this runs on {s.platform}", s.platform not in NVIDIA)
    half = (f"needs config.compute_dtype=bfloat16, got {s.compute_dtype}", s.compute_dtype != "bfloat16")
    no_dropout = (f"needs config.model.attention_dropout=0, got {s.dropout_rate}", s.dropout_rate > 0)
    no_scores = ("returns no attention maps and takes no bias of relative positions", s.needs_scores)
    mesh = ("on several devices needs a mesh (jax.set_mesh)", not s.shardable)
    multiple = f"needs a head width that is a multiple of {HEAD_MULTIPLE}"
    cudnn_width = (
        f"{multiple} up to {CUDNN_LARGEST_HEAD}, got {s.head_width}",
        s.head_width % HEAD_MULTIPLE or s.head_width > CUDNN_LARGEST_HEAD,
    )
    pallas_width = (f"{multiple}, got {s.head_width}", s.head_width % HEAD_MULTIPLE)
    triton_width = (
        f"needs a head width of 16, 32, 64 or 128, got {s.head_width}",
        s.head_width not in TRITON_HEAD_WIDTHS,
    )
    generation = s.capability.partition(".")[0]
    ampere = (
        f"needs an Ampere GPU (compute capability 8.0) or a later one, and this one has {s.capability}",
        generation.isdecimal() and int(generation) < CUDNN_LEAST_GENERATION,
    )
    # The first that holds is reported, so those that no option can change, such as the platform, come first.
    reasons: dict[str, list[tuple[str, Any]]] = {
        "splash": [tpu, half, no_dropout, no_scores, pallas_width, mesh],
        "banded": [("needs an architecture with windowed layers (model.window)", not s.window), no_scores],
        "cudnn": [nvidia, ampere, half, no_dropout, no_scores, cudnn_width],
        "flash": [tpu, half, no_scores, pallas_width, mesh],
        "triton": [nvidia, half, no_scores, triton_width, mesh],
        "einsum": [],
    }
    return next((reason for reason, holds in reasons[kernel] if holds), "")


def _exception(kernel: str, s: Situation) -> str:
    """Returns why this layer uses einsum instead, though other layers of the model may run the kernel; or nothing."""
    # Other kernels take as many queries as keys, at the same positions.
    if s.some_queries and kernel not in ("cudnn", "einsum"):
        return "cannot compute some queries only"
    return "needs a layer with a window" if kernel == "banded" and not s.local else ""


def band_block(window: int) -> int:
    """Returns the block length of banded, by which a query's keys lie in its own block and the two next to it."""
    return max(window, SMALLEST_BAND)


def bands_save_work(window: int, length: int) -> bool:
    """Whether bands save work on rows of that length: with four blocks they compute 3/4 of the scores."""
    return length > 4 * band_block(window)


def triton_length(length: int) -> int:
    """Returns the row length to which triton pads: powers of two, or a multiple of its block."""
    # Triton's blocks have powers of two positions.
    if length <= TRITON_WHOLE_ROW:
        return max(TRITON_LEAST_BLOCK, 2 ** (length - 1).bit_length())
    return -(-length // TRITON_BLOCK) * TRITON_BLOCK


def _triton_is_faster(s: Situation) -> bool:
    """Whether triton was measured to be faster than einsum (docs/plan.md, Measured on an H200)."""
    # Only what was timed counts as faster: no padded or short rows, no windows, no other GPUs and head widths.
    filled = s.length >= TRITON_WHOLE_ROW and triton_length(s.length) == s.length
    timed = s.capability == HOPPER and s.head_width == TIMED_WIDTH and not (s.local or s.causal)
    return timed and filled and s.dropout_rate > 0


@functools.cache
def log_once(line: str, level: int = logging.INFO) -> None:
    """Logs a line once, and not at every trace."""
    logging.getLogger(__name__).log(level, line)
