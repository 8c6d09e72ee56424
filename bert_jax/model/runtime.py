"""How a model runs: choices that change speed, memory and rounding, never the parameters.

Placement has a model's requests about the sharding of its arrays; Runtime has the other choices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from bert_jax.errors import UserError


@dataclass(frozen=True)
class Placement:
    """No request: the compiler decides where arrays lie. train/sharding.py has the one that knows the mesh.

    A model calls arrays by name, and knows no axis of a mesh:

    hidden         [B, T, D]
    heads          [B, T, ..., N, H]    queries, keys, values, contexts
    inner          [B, T, ..., F]       of the feed-forward
    logits         [B, M, V]
    sequence_ids   [B, T]
    lengths        [B]
    """

    def constrain(self, name: str, array: Array) -> Array:
        """Shards an array by its name."""
        return array

    def gather(self, params: Any, prefix: str = "", dtype: DTypeLike | None = None) -> Any:
        """Gathers parameters (nested, by path) that are sharded between steps.

        With a prefix they belong to one layer of the stack, with kernels in the compute dtype. Without one, all
        parameters outside the stacks of layers are gathered.
        """
        return params

    @property
    def gathers(self) -> bool:
        """Whether gather does anything."""
        return False

    def shard_kernel(self, kernel: Callable[..., Array], names: Sequence[str]) -> Callable[..., Array]:
        """Has each device run a kernel, which the compiler cannot partition, on its shard of the arguments.

        `names` has a name for each argument; the result is sharded like the first one.
        """
        return kernel

    def whole_shape(self, path: str, array: Array) -> tuple[int, ...]:
        """Returns a parameter's gathered shape, also if a model's function has shards of it."""
        return array.shape

    def row_numbers(self, rows: int) -> tuple[int | Array, int]:
        """Returns the first row's number in the batch, and how many rows the batch has."""
        return 0, rows

    def gather_rows(self, array: Array) -> Array:
        """Gathers an array [B, ...] over the whole batch, by row_numbers, if a model's function has some rows."""
        return array

    @property
    def shards_kernels(self) -> bool:
        """Whether shard_kernel does anything."""
        return False

    @property
    def shards_layers(self) -> bool:
        """Whether heads and the feed-forward's inner units are sharded over several devices."""
        return False


ALONE = Placement()
CompilerOptions = tuple[tuple[str, str | bool | int | float], ...]
Result = TypeVar("Result")

COMPUTE_DTYPES = ("float32", "bfloat16")
LAYER_LOOPS = ("scan", "unrolled", "auto")
REMATS = ("none", "attention", "matmuls", "layer")

# Values of Runtime.device_platform for NVIDIA GPUs; a plan names its GPUs `gpu`.
NVIDIA = ("cuda", "gpu")

# An unrolled loop runs faster, since XLA optimizes across layers; a scan compiles once for all layers. On
# accelerators a scan also copies what the backward pass reads into stacks: by its plans, a step of BERT-Large takes
# 178 ms scanned and 132 unrolled on an H100, and 121 and 105 on v5e (docs/plan.md).
UNROLLED_AT_MOST, UNROLLED_AT_MOST_ON_ACCELERATORS = 12, 24  # TPUs and NVIDIA GPUs

RECOMPUTED_LOGITS = 4096  # tokens of the vocabulary at a time, if logits are recomputed


def detailed_platform(backend: Any) -> str:
    """Returns the platform of a jax backend: cpu, tpu, cuda, rocm, or `unknown gpu`."""
    if backend.platform != "gpu":
        return backend.platform
    # jax calls all GPUs `gpu`, but kernels differ by maker. The version of a backend's platform has the maker's name,
    # for example "cuda 12090".
    version = backend.platform_version.lower()
    return next((maker for maker in ("cuda", "rocm") if maker in version), "unknown gpu")


@dataclass(frozen=True)
class Runtime:
    """A run's choices of speed, memory and rounding.

    Attributes:
        compute_dtype: float32 (matmul precision highest) or bfloat16; norms, softmax and logits stay float32.
        layer_loop: scan, unrolled, or auto (unrolled up to 12 layers, on TPUs and NVIDIA GPUs 24).
        attention: a kernel or auto (attention/choice.py).
        remat: what the backward pass recomputes instead of storing it (Chen et al. 2016), from the least memory saved
            to the most: none; attention (scores and probabilities of einsum attention); matmuls (everything in a layer
            but its products with weights); layer (everything but its input). The last two also recompute the
            vocabulary's logits.
        logits_at_once: tokens of the vocabulary whose logits exist at the same time in training; 0: all, or 4,096 if
            remat recomputes them.
        platform: the platform that programs are compiled for, as jax.default_backend() names it, which is the default.
            bert-jax plan compiles for devices that this machine lacks; its `gpu` is an NVIDIA GPU.
        capability: the NVIDIA GPUs' compute capability, such as 9.0 for Hopper, if `platform` is set; empty: unknown.
        frozen_layers: the lowest layers in and below which nothing trains; their backward pass is left out.
        placement: the sharding of arrays over a mesh.
        compiler_options: XLA's, by name, that override those of train/sharding.py.

    Raises:
        UserError: a choice is unknown.
    """

    compute_dtype: str = "float32"
    layer_loop: str = "auto"
    attention: str = "auto"
    remat: str = "none"
    logits_at_once: int = 0
    platform: str = ""
    capability: str = ""
    frozen_layers: int = 0
    placement: Placement = ALONE
    compiler_options: CompilerOptions = ()

    def __post_init__(self) -> None:
        for key, value, known in (
            ("compute_dtype", self.compute_dtype, COMPUTE_DTYPES),
            ("model.layer_loop", self.layer_loop, LAYER_LOOPS),
            ("model.remat", self.remat, REMATS),
        ):
            if value not in known:
                raise UserError(f"unknown config.{key} {value!r}; choose from {', '.join(known)}")
        if self.logits_at_once < 0:
            raise UserError(
                f"config.model.logits_at_once is {self.logits_at_once}; use a number of tokens, or 0 for all"
            )

    @property
    def dtype(self) -> DTypeLike:
        return jnp.dtype(self.compute_dtype)

    @property
    def precision(self) -> jax.lax.Precision:
        """Highest for float32: by default TPUs multiply float32 in bfloat16 passes, and GPUs in TF32."""
        return jax.lax.Precision.HIGHEST if self.compute_dtype == "float32" else jax.lax.Precision.DEFAULT

    @property
    def vocabulary_chunk(self) -> int:
        """The effective logits_at_once."""
        return self.logits_at_once or (RECOMPUTED_LOGITS if self.remat in ("matmuls", "layer") else 0)

    def rematerialized(self, layer: Callable[..., Result]) -> Callable[..., Result]:
        """Makes the backward pass of a layer's function recompute what `remat` names."""
        # `attention` is left to attention/layer.py, which knows the scores.
        if self.remat == "layer":
            return jax.checkpoint(layer)
        # A product with weights has no batch axis, the products of attention have some: the policy keeps the first.
        if self.remat == "matmuls":
            return jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        if self.placement.gathers:
            return jax.checkpoint(layer, policy=all_but_gathered)
        return layer

    @property
    def on_tpu(self) -> bool:
        """Whether programs are compiled for TPUs. Only this class and bert_jax.model.ops ask."""
        return (self.platform or jax.default_backend()) == "tpu"

    @property
    def on_nvidia(self) -> bool:
        """Whether programs are compiled for NVIDIA GPUs. Only this class and bert_jax.model.ops ask."""
        return self.device_platform in NVIDIA

    @property
    def device_platform(self) -> str:
        """The platform that programs are compiled for, with this machine's GPUs by their maker: `cuda`, `rocm`."""
        return self.platform or detailed_platform(jax.devices()[0].client)

    @property
    def compute_capability(self) -> str:
        """The compute capability of the NVIDIA GPUs that programs are compiled for; empty if it is unknown."""
        # With `platform` set, this machine's own GPU says nothing about the devices that programs are compiled for.
        if self.platform or not self.on_nvidia:
            return self.capability
        return getattr(jax.devices()[0], "compute_capability", "")

    def unrolled(self, layers: int) -> bool:
        """Whether a stack of that many layers is unrolled rather than scanned."""
        most = UNROLLED_AT_MOST_ON_ACCELERATORS if self.on_tpu or self.on_nvidia else UNROLLED_AT_MOST
        return self.layer_loop == "unrolled" or (self.layer_loop == "auto" and layers <= most)


def all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    # The backward pass gathers a layer's parameters again, instead of keeping those of all layers whole. A
    # checkpoint_name would not do: what it names would be saved under that name, and so would a reshape of it.
    return primitive.name not in ("sharding_constraint", "linear_call", "reshape")
