"""Low-rank adapters for the matrices of encoder layers (LoRA; Hu et al. 2021, section 4.1).

A module with a matrix `query` holds its adapter as `query_lora`, so that adapters are stacked, scanned, saved and
sharded like the other parameters of their layer:

    encoder/layers/attention/query_lora/a     [L, *in, r]
    encoder/layers/attention/query_lora/b     [L, r, *out]
"""

import dataclasses
import math
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from bert_jax.config import ModelConfig
from bert_jax.config.model import LoraConfig
from bert_jax.model.dropout import Seeds
from bert_jax.model.layers import Shape, child_key
from bert_jax.model.ops import operations
from bert_jax.model.runtime import Runtime

SUFFIX = "_lora"
_HEADS = ("query", "key", "value")  # in the order of the fused kernel [L, D, 3, N, H]


class LowRank(nnx.Module):
    """Computes an adapter's output, s dropout(x) A B.

    A is uniform within 1 / sqrt(inputs) and B is zero, as in reset_lora_parameters of peft, so training begins at the
    model itself.
    """

    def __init__(
        self, config: LoraConfig, inputs: Shape, outputs: Shape, *, runtime: Runtime, key: PRNGKeyArray, stack: Shape
    ) -> None:
        # B alone begins at zero: if both did, neither would get a gradient.
        bound = 1 / math.sqrt(math.prod(inputs))
        shape = (*stack, *inputs, config.rank)
        self.a = nnx.Param(jax.random.uniform(child_key(key, "a"), shape, jnp.float32, -bound, bound))
        self.b = nnx.Param(jnp.zeros((*stack, config.rank, *outputs)))
        self.config = config
        self.input_axes = len(inputs)
        self.runtime = runtime

    def __call__(self, x: Float[Array, "..."], seeds: Seeds) -> Float[Array, "..."]:
        """Maps [B, T, *in] to [B, T, *out]; without seeds nothing is dropped."""
        forms = operations(self.runtime)
        # Dropout comes before A only, so that the model's own matmul still reads the whole input.
        narrow = forms.dense(forms.dropout(x, self.config.dropout, seeds), self.a[...], None, self.input_axes)
        return forms.dense(narrow, self.b[...], None, 1) * self.config.scale


def add_adapters(
    module: Any, folder: str, config: ModelConfig, shapes: Mapping[str, tuple[Shape, Shape]], **arguments: Any
) -> None:
    """Gives an encoder layer's module the adapters that config.lora names.

    Args:
        folder: the module's path, such as encoder/layers/attention.
        shapes: the input and output axes of each matrix, by its name.
        arguments: runtime, key and stack of LowRank.
    """
    if config.lora is None:
        return
    # A key derived by name: an adapter added elsewhere leaves this one's initial values as they were.
    key = arguments.pop("key")
    for name, (inputs, outputs) in shapes.items():
        if f"{folder}/{name}" in config.lora.matrices:
            own = child_key(key, name + SUFFIX)
            setattr(module, name + SUFFIX, LowRank(config.lora, inputs, outputs, key=own, **arguments))


def adapted(
    module: Any, name: str, output: Float[Array, "..."], x: Float[Array, "..."], seeds: Seeds
) -> Float[Array, "..."]:
    """Adds the output of a matrix's adapter for x, if it has one, to the matrix's output.

    The seeds are those of another dropout in the layer, from which each adapter derives its own.
    """
    adapter = getattr(module, name + SUFFIX, None)
    if adapter is None:
        return output
    # Without a stream of its own, every adapter of a layer would drop the same inputs.
    own = None if seeds is None else seeds ^ jnp.uint32(zlib.crc32((name + SUFFIX).encode()))
    return output + adapter(x, own)


def is_adapter(path: str) -> bool:
    """Tells whether a parameter belongs to an adapter."""
    return any(folder.endswith(SUFFIX) for folder in path.split("/")[:-1])


def merge(config: ModelConfig, params: Mapping[str, np.ndarray]) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """Adds the adapters to their matrices: returns an equal model without adapters, and its parameters by path."""
    merged = {path: value for path, value in params.items() if not is_adapter(path)}
    if config.lora is None:
        return config, merged
    for matrix in config.lora.matrices:
        a, b = params[f"{matrix}{SUFFIX}/a"], params[f"{matrix}{SUFFIX}/b"]
        # Heads and the fused axes are flattened, so that A B is one matmul per layer: [L, in, r] and [L, r, out].
        narrow, wide = a.reshape(len(a), -1, a.shape[-1]), b.reshape(len(b), b.shape[1], -1)
        change = np.float32(config.lora.scale) * (narrow @ wide)  # [L, in, out]
        path, part = kernel_path(matrix)
        # A copy, since the parameters belong to the caller. Queries, keys and values share a kernel, so the next
        # matrix may change the same one.
        kernel = np.array(merged[path])
        # A view, so that the addition changes the copied kernel.
        view = kernel if part is None else kernel[:, :, part]
        view += change.reshape(view.shape)
        merged[path] = kernel
    return dataclasses.replace(config, lora=None), merged


def kernel_path(matrix: str) -> tuple[str, int | None]:
    """Returns the path of a matrix's kernel (config.lora.MATRICES), and its index if the kernel is fused."""
    folder, _, name = matrix.rpartition("/")
    return (f"{folder}/qkv/kernel", _HEADS.index(name)) if name in _HEADS else (f"{matrix}/kernel", None)
