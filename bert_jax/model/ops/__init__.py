"""Operations whose best form depends on the platform, and the one place where the form is chosen.

  default            the form for CPUs, and for GPUs of unknown makers
  gpu                the form for NVIDIA GPUs
  tpu                the form for TPUs
  bias               the addition of a bias, with two forms of its gradient
  attention_kernels  einsum and cuDNN attention, and the choice of a kernel
  attention_banded   attention within a window in plain XLA
  attention_splash   the splash kernel for TPUs
  attention_flash    how attention_flash_kernels, attention with dropout for TPUs, divides its work

Layers call `operations(runtime)` and read the same on every platform.
"""

from bert_jax.model.ops.default import Operations
from bert_jax.model.ops.gpu import GpuOperations
from bert_jax.model.ops.tpu import TpuOperations
from bert_jax.model.runtime import Runtime

__all__ = ["GpuOperations", "Operations", "TpuOperations", "operations"]


def operations(runtime: Runtime) -> Operations:
    """Returns the operations for the platform that programs are compiled for."""
    if runtime.on_tpu:
        return TpuOperations(runtime)
    return GpuOperations(runtime) if runtime.on_nvidia else Operations(runtime)
