"""One of several processes that save and restore a checkpoint together; test_read_shares.py starts them.

    python restoring_process.py ADDRESS COUNT NUMBER FOLDER FSDP

Each prints what it read of the tensors' files and what the tensors hold, in bytes, as a JSON line.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import tensorstore
from jax.sharding import NamedSharding, PartitionSpec

from bert_jax.config import MeshConfig
from bert_jax.train.checkpoint import Checkpoints, restore
from bert_jax.train.sharding import make_mesh

READ = "/tensorstore/kvstore/file/bytes_read"


def bytes_read() -> int:
    metrics = tensorstore.experimental_collect_matching_metrics(READ)
    return sum(value["value"] for metric in metrics for value in metric["values"])


def main(address: str, count: str, number: str, folder: str, fsdp: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, int(count), int(number))
    mesh = make_mesh(MeshConfig(fsdp=int(fsdp)))
    specs = {"kernel": PartitionSpec("fsdp"), "odd": PartitionSpec()}
    values = {"kernel": np.arange(1 << 18, dtype=np.float32).reshape(-1, 64), "odd": np.arange(9, dtype=np.float32)}
    tensors = {
        name: jax.make_array_from_callback(
            value.shape, NamedSharding(mesh, specs[name]), lambda index, value=value: value[index]
        )
        for name, value in values.items()
    }
    with Checkpoints(Path(folder), keep=1) as checkpoints:
        checkpoints.save(1, tensors, tensors, {})
        checkpoints.wait()
        wanted = {
            name: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype, sharding=tensor.sharding)
            for name, tensor in tensors.items()
        }
        before = bytes_read()
        restored = restore(checkpoints.directory / "1", wanted, wanted)
        read = bytes_read() - before
    for tree in (restored.params, restored.optimizer_state):
        for name, value in values.items():
            assert tree[name].sharding == tensors[name].sharding
            for shard in tree[name].addressable_shards:
                np.testing.assert_array_equal(shard.data, value[shard.index])
    print(json.dumps({"read": read, "held": 2 * sum(value.nbytes for value in values.values())}))


if __name__ == "__main__":
    main(*sys.argv[1:])
