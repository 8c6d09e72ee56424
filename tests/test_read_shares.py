"""What several processes hold in common is read once: the shares of replicas, and the bytes that processes read."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiny_runs import ROOT, environment

from bert_jax.train.orbax_io import divided, to_read

CASES = {
    "replicated": ((), (16, 6)),
    "second_axis": ((), (3, 24)),
    "sharded": (("fsdp",), (16, 6)),
    "sharded_twice": (("tensor", "fsdp"), (8, 6)),
    "indivisible": ((), (3, 5)),
    "everywhere": ((("data", "fsdp"), "tensor"), (8, 6)),
}


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("data", "fsdp", "tensor"))


@pytest.mark.parametrize("name", CASES)
def test_a_share_is_what_orbax_lets_a_replica_write(name, mesh, tmp_path):
    spec, shape = CASES[name]
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    array = jax.device_put(np.arange(np.prod(shape), dtype=np.float32).reshape(shape), sharding)
    with ocp.PyTreeCheckpointer() as writer:
        writer.save(tmp_path / "saved", {"tensor": array})
    (file,) = (tmp_path / "saved" / "array_metadatas").iterdir()
    (metadata,) = json.loads(file.read_text())["array_metadatas"]
    share = divided(sharding, shape)
    assert share.shard_shape(shape) == tuple(metadata["array_metadata"]["write_shape"])
    parts = {str(index) for index in share.devices_indices_map(shape).values()}
    assert len(parts) * np.prod(share.shard_shape(shape)) == array.size  # they cover it once
    assert to_read(sharding, shape, 4) is sharding  # one process reads from its disk


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "fsdp"), [(1, 1), (2, 2)])
def test_two_processes_read_each_byte_once(devices, fsdp, tmp_path):
    with socket.create_server(("", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    script = str(Path(__file__).with_name("restoring_process.py"))
    variables = environment(devices) | {"PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            [sys.executable, script, address, "2", str(process), str(tmp_path / "run"), str(fsdp)],
            env=variables, stdout=subprocess.PIPE, text=True,
        )
        for process in range(2)
    ]  # fmt: skip
    printed = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    found = [json.loads(text[text.index("{") :]) for text in printed]
    assert sum(each["read"] for each in found) <= 1.01 * found[0]["held"]
