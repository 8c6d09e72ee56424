"""The table of attention kernels, and the choice of one. The choice is always logged.

    splash   the splash kernel on TPUs, bfloat16, without attention dropout (attention_splash.py)
    banded   plain XLA, every platform, with dropout, for layers with a window; other layers use einsum
             (attention_banded.py)
    cudnn    cuDNN's fused kernel on NVIDIA GPUs, bfloat16, without attention dropout; it reads the lengths of unpacked
             rows, and otherwise a mask (attention_cudnn.py)
    flash    a kernel on TPUs, bfloat16, with the dropout masks of einsum (attention_flash_kernels.py)
    triton   the same on NVIDIA GPUs (attention_triton_kernels.py)
    einsum   plain XLA, every platform, with dropout, relative positions and attention maps (attention_einsum.py)

`auto` takes the first of these that can run. It takes banded only where that saves work, triton only where it was timed
against einsum, and never flash, which is compiled for TPUs, but which nobody has run there.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, UInt32

from bert_jax.errors import UserError
from bert_jax.model.attention import library, triton
from bert_jax.model.attention.library import (
    banded_attention,
    cudnn_attention,
    cudnn_attention_by_length,
    einsum_attention,
    saves,
    splash_attention,
)
from bert_jax.model.embeddings import TokenPositions, sequence_lengths, visible_keys
from bert_jax.model.ops import Heads
from bert_jax.model.runtime import NVIDIA, Placement

Context = tuple[Float[Array, "B Q N H"], Float[Array, "B N Q T"] | None]


@dataclass(frozen=True)
class Attention:
    """What a kernel computes: scaled dot-product attention within sequences (visible_keys).

    queries, keys   where the vectors are; the keys cover the whole row, and are the queries unless these are some only
    bias            added to the scaled scores
    window          the positions that a query sees on either side; 0: all
    dropout_rate    of the probabilities, with the seeds of the rows; seeds of None: nothing is dropped
    recomputed      einsum's backward pass computes scores and probabilities again
    narrow          einsum's gradients of scores have the dtype of the values
    """

    query: Float[Array, "B Q N H"]
    key: Float[Array, "B T N H"]
    value: Float[Array, "B T N H"]
    queries: TokenPositions
    keys: TokenPositions
    bias: Float[Array, "#B N Q T"] | None
    window: int
    causal: bool
    dropout_rate: float
    seeds: UInt32[Array, "B 2"] | None
    precision: jax.lax.Precision
    placement: Placement
    recomputed: bool
    narrow: bool = False

    @property
    def heads(self) -> Heads:
        """Queries, keys and values."""
        return self.query, self.key, self.value

    def visible(self) -> Bool[Array, "B 1 Q T"]:
        """Returns which keys a query sees, for kernels that do not find out themselves."""
        return visible_keys(self.queries, self.keys, window=self.window, causal=self.causal)


@dataclass(frozen=True)
class Situation:
    """What the choice of a kernel depends on."""

    platform: str
    compute_dtype: str
    head_width: int
    dropout_rate: float  # of attention probabilities; 0 in evaluation
    needs_scores: bool = False  # a bias is added to the scores, or the probabilities are returned
    window: int = 0  # of the local layers of the architecture; 0: it has none
    local: bool = False  # this layer is one of them
    length: int = 0  # positions of a row; 0: unknown
    causal: bool = False
    some_queries: bool = False  # only some positions have queries; kernels of whole rows give way to einsum
    capability: str = ""  # the compute capability of an NVIDIA GPU, where it is known
    shardable: bool = True  # Pallas kernels can be sharded over the devices: there is only one, or a mesh is set


Reasons = list[tuple[str, Any]]  # each with whether it holds


@dataclass(frozen=True)
class Kernel:
    """A kernel, and what it declares about itself.

    attend      returns the context, and the probabilities before dropout where the kernel has them in memory
    obstacles   why it cannot run in a model; a request is refused with the first that holds
    exceptions  why a layer uses einsum instead, though the kernel may run in other layers of the model
    automatic   whether `auto` takes it where it can run
    separate    whether it reads queries, keys and values as three arrays of the layout [B, T, N, H]
    """

    attend: Callable[[Attention], Context]
    obstacles: Callable[[Situation], Reasons]
    exceptions: Callable[[Situation], Reasons] = lambda _: []
    automatic: Callable[[Situation], bool] = lambda _: True
    separate: bool = False

    def reason_against(self, situation: Situation) -> str:
        """Returns why the kernel does not run in this layer; empty if it can."""
        return first(self.obstacles(situation) + self.exceptions(situation))


def first(reasons: Reasons) -> str:
    """Returns the first reason that holds, or an empty text."""
    return next((reason for reason, holds in reasons if holds), "")


def choose(requested: str, situation: Situation) -> str:
    """Returns the name of the kernel that runs.

    Raises UserError for an unknown choice, or for one that cannot run, with the reason.
    """
    if requested not in CHOICES:
        raise UserError(f"unknown config.model.attention {requested!r}; choose from {', '.join(CHOICES)}")
    if requested == "auto":
        chosen, why = _automatic(situation)
    elif obstacle := first(KERNELS[requested].obstacles(situation)):
        raise UserError(
            f"config.model.attention={requested} cannot run: {requested} {obstacle}; or use config.model.attention=auto"
        )
    elif exception := first(KERNELS[requested].exceptions(situation)):
        chosen, why = "einsum", f"{requested} {exception}"
    else:
        chosen, why = requested, "as requested"
    log_choice(f"attention kernel: {chosen} ({why})")
    return chosen


def _automatic(situation: Situation) -> tuple[str, str]:
    """Returns the first kernel of the table that can run, and why."""
    chosen = next(
        name for name, kernel in KERNELS.items() if not kernel.reason_against(situation) and kernel.automatic(situation)
    )
    fused = "splash" if situation.platform == "tpu" else "cudnn"
    if chosen == fused:
        return chosen, "fastest on this platform"
    against = KERNELS[fused].reason_against(situation)
    return chosen, f"{fused} {against}" if against else f"{fused} would compute scores outside the window"


@functools.cache
def log_choice(line: str, level: int = logging.INFO) -> None:
    """Logs a line once, and not at every trace."""
    logging.getLogger(__name__).log(level, line)


def _needs_scores(s: Situation) -> Reasons:
    return [("returns no attention maps and takes no bias of relative positions", s.needs_scores)]


def _half_precision(s: Situation) -> Reasons:
    return [(f"needs config.compute_dtype=bfloat16, got {s.compute_dtype}", s.compute_dtype != "bfloat16")]


def _fused_obstacles(s: Situation) -> Reasons:
    return [
        *_half_precision(s),
        (f"needs config.model.attention_dropout=0, got {s.dropout_rate}", s.dropout_rate > 0),
        *_needs_scores(s),
    ]


def _whole_rows(s: Situation) -> Reasons:
    return [("cannot compute some queries only", s.some_queries)]


def _needs_tpu(s: Situation) -> Reasons:
    return [(f"needs a TPU, and this runs on {s.platform}", s.platform != "tpu")]


def _needs_nvidia(s: Situation) -> Reasons:
    return [(f"needs an NVIDIA GPU, and this runs on {s.platform}", s.platform not in NVIDIA)]


def _needs_mesh(s: Situation) -> Reasons:
    return [("on several devices needs a mesh (jax.set_mesh)", not s.shardable)]


def _pallas(s: Situation) -> Reasons:
    multiple = library.SPLASH_HEAD_MULTIPLE
    return [
        (f"needs a head width that is a multiple of {multiple}, got {s.head_width}", s.head_width % multiple),
        *_needs_mesh(s),
    ]


def _splash_obstacles(s: Situation) -> Reasons:
    return [*_needs_tpu(s), *_fused_obstacles(s), *_pallas(s)]


def _splash(a: Attention) -> Context:
    limits: Any = {"window": a.window, "causal": a.causal, "placement": a.placement}
    return splash_attention(*a.heads, a.keys.sequence_ids, **limits), None


def _flash_obstacles(s: Situation) -> Reasons:
    return [*_needs_tpu(s), *_half_precision(s), *_needs_scores(s), *_pallas(s)]


def _flash(a: Attention) -> Context:
    # Imported here, since the import of Pallas takes a second.
    from bert_jax.model.attention.flash import flash_attention

    return flash_attention(*a.heads, a.keys.sequence_ids, placement=a.placement, **_options(a)), None


def _banded_obstacles(s: Situation) -> Reasons:
    return [("needs an architecture with windowed layers (model.window)", not s.window), *_needs_scores(s)]


def _banded_exceptions(s: Situation) -> Reasons:
    return [*_whole_rows(s), ("needs a layer with a window", not s.local)]


def _bands_save_work(s: Situation) -> bool:
    return s.local and saves(s.window, s.length)


def _banded(a: Attention) -> Context:
    return banded_attention(*a.heads, a.keys.sequence_ids, **_options(a)), None


def _options(a: Attention) -> dict[str, Any]:
    dropout = {"dropout_rate": a.dropout_rate, "seeds": a.seeds}
    return {"window": a.window, "causal": a.causal, "precision": a.precision, **dropout}


def _cudnn_obstacles(s: Situation) -> Reasons:
    multiple, most = library.CUDNN_HEAD_MULTIPLE, library.LARGEST_HEAD
    odd = s.head_width % multiple or s.head_width > most
    generation = s.capability.partition(".")[0]
    older = generation.isdecimal() and int(generation) < library.LEAST_GENERATION
    return [
        *_needs_nvidia(s),
        (f"needs an Ampere GPU (compute capability 8.0) or a later one, and this one has {s.capability}", older),
        *_fused_obstacles(s),
        (f"needs a head width that is a multiple of {multiple} up to {most}, got {s.head_width}", odd),
    ]


def _cudnn(a: Attention) -> Context:
    some_queries = a.queries is not a.keys
    if a.keys.unpacked and not a.window and not (a.causal and some_queries):
        log_choice("cudnn reads the lengths of sequences instead of a mask")
        lengths = sequence_lengths(a.keys)
        return cudnn_attention_by_length(*a.heads, lengths, causal=a.causal, placement=a.placement), None
    log_choice("cudnn reads a mask [B, 1, T, T] in layers where rows may be packed or have a window")
    if jax.__version_info__ < library.NO_MASK_GRADIENT:
        wanted = ".".join(map(str, library.NO_MASK_GRADIENT))
        log_choice(
            f"with jax {jax.__version__}, cudnn also writes a gradient of the mask in training; jax {wanted} and later "
            "(Python 3.12) do not",
            logging.WARNING,
        )
    return cudnn_attention(*a.heads, a.visible()), None


def _triton_obstacles(s: Situation) -> Reasons:
    widths = triton.HEAD_WIDTHS
    known = f"{', '.join(map(str, widths[:-1]))} or {widths[-1]}"
    return [
        *_needs_nvidia(s),
        *_half_precision(s),
        *_needs_scores(s),
        (f"needs a head width of {known}, got {s.head_width}", s.head_width not in widths),
        *_needs_mesh(s),
    ]


def _triton_is_faster(s: Situation) -> bool:
    """Whether it is, as measured, faster than einsum (docs/plan.md, Measured on an H200)."""
    device = s.capability == triton.HOPPER
    filled = s.length >= triton.WHOLE_ROW and triton.padded_length(s.length) == s.length
    timed = s.head_width == triton.TIMED_WIDTH and not (s.local or s.causal)
    return device and filled and timed and s.dropout_rate > 0


def _triton(a: Attention) -> Context:
    from bert_jax.model.attention.triton import triton_attention

    return triton_attention(*a.heads, a.keys.sequence_ids, placement=a.placement, **_options(a)), None


def _einsum(a: Attention) -> Context:
    options: dict[str, Any] = {"precision": a.precision, "narrow": a.narrow}
    attend: Any = functools.partial(einsum_attention, dropout_rate=a.dropout_rate, **options)
    if a.recomputed:
        attend = jax.checkpoint(attend)
    return attend(*a.heads, a.visible(), bias=a.bias, seeds=a.seeds)


# In the order in which `auto` considers them.
KERNELS = {
    "splash": Kernel(_splash, _splash_obstacles, _whole_rows),
    "banded": Kernel(_banded, _banded_obstacles, _banded_exceptions, automatic=_bands_save_work),
    "cudnn": Kernel(_cudnn, _cudnn_obstacles, separate=True),
    "flash": Kernel(_flash, _flash_obstacles, _whole_rows, automatic=lambda s: False),
    "triton": Kernel(_triton, _triton_obstacles, _whole_rows, automatic=_triton_is_faster, separate=True),
    "einsum": Kernel(_einsum, lambda _: []),
}
CHOICES = ("auto", *KERNELS)
