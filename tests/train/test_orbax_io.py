"""Reading and writing a step through Orbax: fingerprints, errors of the machine, and the shares of replicas."""

import errno
import json
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiny_runs import ROOT, environment

from bert_jax.train.orbax_io import divided, fingerprint, reading, to_read

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


def test_a_fingerprint_is_one_number_on_the_host_on_one_device_and_sharded(mesh):
    generator = np.random.default_rng(0)
    for dtype, shape in ((np.float32, (16, 5, 3)), (np.int32, ()), (np.float16, (8,)), (bool, (16, 2))):
        array = generator.integers(0, 2, shape).astype(dtype)
        sharded = jax.device_put(array, NamedSharding(mesh, PartitionSpec(*[("data", "fsdp", "tensor")] * bool(shape))))
        expected = fingerprint(array, np)
        assert expected == jax.jit(fingerprint)(jnp.asarray(array)) == jax.jit(fingerprint)(sharded)
    array = generator.standard_normal((4, 4)).astype(np.float32)
    assert fingerprint(array, np) != fingerprint(array.T, np)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EMFILE, "too many open files"), ValueError("UNAVAILABLE: read [os_error_code='24']")],
    ids=["python", "tensorstore"],
)
def test_a_read_that_fails_for_the_machine_damns_no_checkpoint(error, tmp_path):
    with pytest.raises(OSError, match="open files") as found, reading(tmp_path / "3"):
        raise error
    assert found.value.errno == errno.EMFILE and found.value.filename == str(tmp_path / "3")


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
    script = str(Path(__file__).parent.parent / "helpers" / "restoring_process.py")
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
