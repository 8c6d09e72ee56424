"""Compiler options of the train step on TPUs, where they differ from the defaults."""

from jax.sharding import Mesh

# By default the compiler combines the gradient all-reduces into a few large ones for which everything waits. With these
# options (AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py, CF_FOR_ALL_REDUCE) it keeps them separate and runs
# the all-reduce of one layer's gradients concurrently with the backward pass of the layers before it.
_OVERLAPPED_ALL_REDUCE = {
    "xla_jf_crs_combiner_threshold_in_bytes": str(2 * 2**20),  # below a matrix's gradient in BERT-Base, 4.7 MB
    "xla_enable_async_all_reduce": "true",
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
}

# The device kinds (jax's device_kind) that plans have shown to gain (docs/tpu_plan.md). v4 is left out: libtpu 0.0.42.1
# fails on BERT-Base with T=512, where a matmul that overlaps an all-reduce needs 16.4 of the 16 MiB of vector memory.
_BY_DEVICE = {"TPU v5 lite": _OVERLAPPED_ALL_REDUCE}


def options(mesh: Mesh) -> dict[str, str] | None:
    """Returns the XLA options of a train step on the mesh; None (the defaults) on one device and on other kinds."""
    return _BY_DEVICE.get(mesh.devices.flat[0].device_kind) if mesh.size > 1 else None
