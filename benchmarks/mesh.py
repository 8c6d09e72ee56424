"""Counts the collectives of a training step on a mesh, and the state that each device holds. Nothing is timed.

  python -m benchmarks.mesh --size base --seq_len 128 --batch_size 256 --meshes 8x1x1,1x8x1,2x1x4

A mesh is DATAxFSDPxTENSOR. The step is compiled for as many CPU devices and is not run. The collectives are read from
the program; those in loops over layers or microbatches count once per iteration. They are listed by kind and by the
number of participating devices. Bytes are per device, for the whole float32 array that a collective produces (an
all-gather, an all-reduce) or takes (a reduce-scatter). With mesh.tensor, XLA implements the sum of sharded gradients on
CPUs by an all-reduce and a slice, where a reduce-scatter would need half of the traffic.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import common
from bert_jax import command
from bert_jax.command import UserError
from bert_jax.config import MeshConfig, ModelConfig, ModelOptions, OptimizerConfig
from bert_jax.data.example import Batch, max_predictions
from bert_jax.model import sizes
from bert_jax.model.bert import abstract_params, init_params
from bert_jax.model.runtime import Runtime
from bert_jax.planning.collectives import collectives
from bert_jax.planning.hlo import parse
from bert_jax.train import mesh_placement, optim, partitioning
from bert_jax.train import step as step_lib
from bert_jax.train.gradient_sums import Reduction
from bert_jax.train.objectives import MaskedLMObjective

DEFAULT = Reduction()
VOCAB_SIZE = 30522  # bert-base-uncased
MASK_RATE = 0.15


def abstract_batch(mesh: Any, batch_size: int, seq_len: int) -> Batch:
    """The shapes of a batch of next-sentence pairs."""
    sharding = partitioning.rows_sharding(mesh)

    def array(width: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size, width), dtype, sharding=sharding)

    tokens, masked = array(seq_len), max_predictions(seq_len, 1, MASK_RATE)
    weights = array(masked, jnp.float32), array(1, jnp.float32)
    return Batch(
        *(tokens, tokens, tokens, tokens, array(masked), array(masked), weights[0], array(1), array(1), weights[1])
    )


def count(
    model: ModelConfig,
    shape: tuple[int, ...],
    batch_size: int,
    seq_len: int,
    microbatches: int = 1,
    reduction: Reduction = DEFAULT,
) -> dict[str, Any]:
    """The collectives of a step on a mesh of that shape, and the bytes of state that a device holds."""
    data, fsdp, tensor = shape
    mesh = partitioning.make_mesh(MeshConfig(data, fsdp, tensor), jax.devices()[: math.prod(shape)])
    partitioning.check_model(model, mesh, shard_optimizer=reduction.shard_optimizer)
    partitioning.check_batch(batch_size, microbatches, mesh)
    objective, config = MaskedLMObjective(), OptimizerConfig()
    runtime = Runtime(layer_loop="scan", placement=mesh_placement.OnMesh())
    chain = optim.build(config, abstract_params(model, objective.heads))
    plan = step_lib.Plan(model, runtime, objective, config, chain, microbatches, reduction=reduction)
    key = jax.eval_shape(lambda: jax.random.key(0))

    def draw(key: jax.Array) -> Any:
        return step_lib.initial_state(plan, init_params(model, objective.heads, key))

    abstract = jax.eval_shape(draw, key)
    state = partitioning.with_shardings(mesh, abstract, shard_optimizer=reduction.shard_optimizer)
    arguments = (state, abstract_batch(mesh, batch_size, seq_len), jax.ShapeDtypeStruct((), jnp.float32), key)
    with jax.set_mesh(mesh):
        lowered = step_lib.jitted(plan, mesh, state).lower(*arguments)
        program = lowered.compile(compiler_options={"xla_backend_optimization_level": "0"})  # it is never run
    found = collectives(parse(program.as_text()), mesh.size)
    held = [leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(state)]
    return {
        "collectives": [
            {"kind": one.kind, "devices": one.group, "count": one.count, "bytes": one.bytes} for one in found
        ],
        "state_bytes": sum(held),
    }


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("benchmarks.mesh", __doc__ or "")
    add = parser.add_argument
    add("--size", choices=sizes.PRESETS, default="base", help="model size (default: base)")
    add("--batch_size", type=int, default=256, help="global, in rows (default: 256)")
    add("--seq_len", type=int, default=128, help="positions per row (default: 128)")
    add("--meshes", default="8x1x1,1x8x1,2x1x4", help="DATAxFSDPxTENSOR,... (default: 8x1x1,1x8x1,2x1x4)")
    add("--microbatches", type=int, default=1, help="microbatches of a step (default: 1)")
    add("--shard_optimizer", action="store_true", help="shard the optimizer state over data, as mesh.shard_optimizer")
    flags = parser.parse_args(arguments)
    shapes = [tuple(int(size) for size in name.split("x") if size.isdecimal()) for name in flags.meshes.split(",")]
    if any(len(shape) != len(partitioning.AXES) for shape in shapes):
        raise UserError(f"--meshes is {flags.meshes!r}. Use DATAxFSDPxTENSOR, such as 8x1x1,2x2x2")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(math.prod(shape) for shape in shapes))
    model = sizes.model_config(ModelOptions(preset=flags.size), VOCAB_SIZE)
    for shape in shapes:
        reduction = Reduction(shard_optimizer=flags.shard_optimizer)
        found = count(model, shape, flags.batch_size, flags.seq_len, flags.microbatches, reduction)
        common.emit(
            f"bytes of collectives a device and step, {flags.size}, mesh {'x'.join(map(str, shape))}, "
            f"{flags.microbatches} microbatches{', sharded optimizer' if flags.shard_optimizer else ''}",
            sum(one["bytes"] for one in found["collectives"]),
            "bytes",
            peer=None,
            peer_value=None,
            settings={
                "batch_size": flags.batch_size,
                "seq_len": flags.seq_len,
                "layer_loop": "scan",
                "microbatches": flags.microbatches,
                "shard_optimizer": flags.shard_optimizer,
            }
            | found,
        )


if __name__ == "__main__":
    command.run(main)
