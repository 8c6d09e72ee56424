"""How a model is run: choices that change speed and rounding, never the parameters."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from bert_jax.command import UserError
from bert_jax.model.placement import Placement, all_but_gathered

Result = TypeVar("Result")

COMPUTE_DTYPES = ("float32", "bfloat16")
LAYER_LOOPS = ("scan", "unrolled", "auto")
REMATS = ("none", "attention", "matmuls", "layer")

# An unrolled loop runs faster (XLA sees across layers); a scan compiles faster, by the number of layers.
UNROLLED_AT_MOST = 12


@dataclass(frozen=True)
class Runtime:
    """compute_dtype: float32 (matmul precision highest) or bfloat16; norms, softmax and logits stay float32.

    layer_loop: scan, unrolled, or auto (unrolled up to 12 layers). attention: see attention_impl.py.

    remat: what the backward pass computes again instead of keeping it (Chen et al. 2016), from the least memory saved
    to the most: none; attention, the scores and probabilities of einsum's attention; matmuls, all of a layer but its
    products with weights; layer, all but its input. The last two compute a causal model's logits again, too.

    platform: what programs are compiled for, as jax.default_backend() names it; empty: that. Another one is named where
    programs are compiled for devices that this machine has not (bert_jax.plan).

    placement: where arrays lie on a mesh; by itself it asks for nothing.

    Raises UserError for an unknown choice.
    """

    compute_dtype: str = "float32"
    layer_loop: str = "auto"
    attention: str = "auto"
    remat: str = "none"
    platform: str = ""
    placement: Placement = field(default_factory=Placement)

    def __post_init__(self) -> None:
        if self.compute_dtype not in COMPUTE_DTYPES:
            known = ", ".join(COMPUTE_DTYPES)
            raise UserError(f"config.compute_dtype is {self.compute_dtype!r} here; use one of: {known}")
        if self.layer_loop not in LAYER_LOOPS:
            known = ", ".join(LAYER_LOOPS)
            raise UserError(f"config.model.layer_loop is {self.layer_loop!r}; use one of: {known}")
        if self.remat not in REMATS:
            raise UserError(f"config.model.remat is {self.remat!r}; use one of: {', '.join(REMATS)}")

    @property
    def dtype(self) -> DTypeLike:
        return jnp.dtype(self.compute_dtype)

    @property
    def precision(self) -> jax.lax.Precision:
        """TPUs multiply float32 in bfloat16 passes and GPUs in TF32 unless told otherwise."""
        return jax.lax.Precision.HIGHEST if self.compute_dtype == "float32" else jax.lax.Precision.DEFAULT

    @property
    def keeps_logits(self) -> bool:
        return self.remat in ("none", "attention")

    def kept(self, layer: Callable[..., Result]) -> Callable[..., Result]:
        """The function of a layer, keeping for the backward pass what `remat` says."""
        if self.remat == "layer":
            return jax.checkpoint(layer)
        if self.remat == "matmuls":
            return jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        if self.placement.gathers:
            return jax.checkpoint(layer, policy=all_but_gathered)
        return layer

    @property
    def on_tpu(self) -> bool:
        """Whether programs are compiled for TPUs, whose compiler wants some things written otherwise."""
        return (self.platform or jax.default_backend()) == "tpu"

    def unrolled(self, layers: int) -> bool:
        return self.layer_loop == "unrolled" or (self.layer_loop == "auto" and layers <= UNROLLED_AT_MOST)
