"""What TPUs' compiler is told of a train step, beside its defaults."""

from jax.sharding import Mesh

# By default the compiler joins the sums of gradients into a few large ones for which everything waits. Parted, and told
# that products and sums may go on together (the options of AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py,
# CF_FOR_ALL_REDUCE), it sums each layer's gradients over the devices beside the backward pass of the layers before.
_SUMS_BESIDE_PRODUCTS = {
    "xla_jf_crs_combiner_threshold_in_bytes": str(2 * 2**20),  # below a matrix's gradient in BERT-Base, 4.7 MB
    "xla_enable_async_all_reduce": "true",
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
}

# Where plans have shown it to help (docs/tpu_plan.md), by jax's device_kind. Not v4: libtpu 0.0.42.1 fails on BERT-Base
# with T=512, for a product with a sum beside it wants 16.4 of the 16 MiB beside v4's matrix units.
_BY_DEVICE = {"TPU v5 lite": _SUMS_BESIDE_PRODUCTS}


def options(mesh: Mesh) -> dict[str, str] | None:
    """XLA's options for a train step on the mesh, or None for the defaults: on one device, and on kinds without any."""
    return _BY_DEVICE.get(mesh.devices.flat[0].device_kind) if mesh.size > 1 else None
