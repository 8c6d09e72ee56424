"""The compiler options of training and evaluation, where they differ from the defaults.

Plans compile with those of the train step, too.
"""

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

# The device kinds (jax's device_kind) that plans have shown to gain (docs/decisions/planning_and_accelerators.md).
# On v4, libtpu 0.0.42.1 fails on BERT-Base with T=512: a matmul that overlaps an all-reduce needs 16.4 of the 16 MiB of
# vector memory. NVIDIA GPUs run with XLA's defaults (docs/plan.md).
_ON_SEVERAL = {"TPU v5 lite": _OVERLAPPED_ALL_REDUCE}

# libtpu 0.0.51 fails to build the step when gathers and scatters run on the SparseCore ("async-update instruction
# should have 1 operands"), and on TPU7x when all-reduces do.
_GATHERS = (
    "xla_tpu_enable_offloading_gather_to_sparsecore",
    "xla_tpu_enable_offloading_scatter_to_sparsecore",
    "xla_tpu_offload_gather_to_sparsecore",
)
_REDUCTIONS = (
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce",
    "xla_tpu_enable_sparse_core_collective_aggregator",
)
# The options that are off in every program. Two kinds have two names in jax (jax/_src/pallas/mosaic/tpu_info.py).
DISABLED = {
    "TPU v5": _GATHERS,
    "TPU v5p": _GATHERS,
    "TPU v6 lite": _GATHERS,
    "TPU v6e": _GATHERS,
    "TPU7x": _GATHERS + _REDUCTIONS,
}


def options(mesh: Mesh, *, overlap: bool = False) -> dict[str, str] | None:
    """Returns the XLA options of a program on the mesh; None (the defaults) where no option differs.

    overlap   adds those with which the all-reduces of a train step overlap with computation
    What libtpu cannot build is off in every program.
    """
    kind = mesh.devices.flat[0].device_kind
    found = dict.fromkeys(DISABLED.get(kind, ()), "false")
    if overlap and mesh.size > 1:
        found |= _ON_SEVERAL.get(kind, {})
    return found or None
