"""Where things lie on a mesh, and which meshes are refused. That a step is the same on any: test_gradient_sums.py."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bert_jax.config import AdamW, MeshConfig, TrainConfig
from bert_jax.errors import UserError
from bert_jax.model import bert, layers
from bert_jax.model.heads.config import Heads
from bert_jax.model.runtime import Runtime
from bert_jax.tasks.inference import Predictor
from bert_jax.tasks.kinds.classification import ClassificationTask
from bert_jax.tasks.rows import Split, TaskRows
from bert_jax.train import describe, sharding
from bert_jax.train import step as step_lib
from bert_jax.train.evaluation import evaluate_batches
from bert_jax.train.objectives import MaskedLMObjective
from bert_jax.train.run import make_runtime
from bert_jax.train.step import TrainState


@pytest.fixture
def mesh():
    return sharding.make_mesh(MeshConfig())


@pytest.fixture
def cube():
    return sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=-1))


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (MeshConfig(), (8, 1, 1)),
        (MeshConfig(fsdp=4), (2, 4, 1)),
        (MeshConfig(data=1, fsdp=-1), (1, 8, 1)),
        (MeshConfig(data=2, fsdp=1, tensor=-1), (2, 1, 4)),
        (MeshConfig(data=2, fsdp=2, tensor=2), (2, 2, 2)),
    ],
)
def test_one_axis_takes_what_the_others_leave(config, shape):
    assert tuple(sharding.make_mesh(config).shape.values()) == shape


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (MeshConfig(data=3), r"mesh\.data=3 x .* 8 devices.*use --config\.mesh\.data=-1$"),
        (MeshConfig(data=16), r"8 devices.*mesh\.data=-1$"),
        (MeshConfig(fsdp=3), r"8 devices.*fsdp and tensor whose product divides 8$"),
        (MeshConfig(data=1, fsdp=2, tensor=2), r"8 devices.*mesh\.data=-1$"),
        (MeshConfig(fsdp=0), r"mesh\.fsdp is 0; use 1 or more"),
        (MeshConfig(tensor=-2), r"mesh\.tensor is -2"),
        (MeshConfig(fsdp=-1), r"several axes.*mesh\.data=-1$"),
        (MeshConfig(reduce_dtype="float16"), r"unknown mesh\.reduce_dtype 'float16'; choose from auto, float32,"),
    ],
)
def test_a_mesh_that_does_not_come_to_the_devices_is_refused(config, told):
    with pytest.raises(UserError, match=told):
        sharding.make_mesh(config)


@dataclass(frozen=True)
class Chip:
    """What make_mesh reads of a device that is not of this machine."""

    id: int
    slice_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"


def test_data_is_outermost_and_spans_the_slices():
    # As a pod numbers them: not slice by slice.
    chips = [Chip(number, slice_index=number % 2) for number in range(8)]
    slices = [chip.slice_index for chip in chips]
    assert slices != sorted(slices)
    with pytest.raises(UserError, match=r"mesh\.data=1 does not divide over 2 slices.*divides the 4 devices"):
        sharding.make_mesh(MeshConfig(fsdp=4, tensor=2), chips)
    for config in (MeshConfig(), MeshConfig(fsdp=2), MeshConfig(fsdp=2, tensor=2), MeshConfig(fsdp=4)):
        laid = sharding.make_mesh(config, chips).devices
        spanned = np.vectorize(lambda chip: chip.slice_index, otypes=[int])(laid)
        half = len(laid) // 2
        assert (spanned[:half] == 0).all() and (spanned[half:] == 1).all()


@pytest.mark.parametrize(("batch_size", "microbatches", "better"), [(100, 1, 104), (8, 2, 16), (0, 1, 8)])
def test_a_batch_that_does_not_divide_is_refused_with_one_that_does(mesh, batch_size, microbatches, better):
    with pytest.raises(UserError, match=rf"batch_size={better}$"):
        sharding.check_batch(batch_size, microbatches, mesh)


def test_rows_are_cut_by_data_and_fsdp_alone(cube):
    sharding.check_batch(4, 1, cube)
    with pytest.raises(UserError, match=r"4 shards of rows \(mesh\.data=2, mesh\.fsdp=2\).*batch_size=8$"):
        sharding.check_batch(6, 1, cube)
    assert sharding.whole_rows(6, cube) == 8
    rows = np.arange(32).reshape(16, 2)
    batch = sharding.place({"x": rows}, 16, cube)
    assert batch["x"].addressable_shards[3].data.shape == (4, 2)
    np.testing.assert_array_equal(batch["x"], rows)
    assert sharding.local_rows(16, cube) == slice(0, 16)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"heads": 1}, r"1 attention heads.*mesh\.tensor=2; use --config\.mesh\.tensor=1$"),
        ({"feed_forward": 50}, r"50 inner units.*mesh\.tensor=4; use --config\.mesh\.tensor=2$"),
        ({"width": 36}, r"36 units of width.*mesh\.fsdp=8; use --config\.mesh\.fsdp=4$"),
    ],
)
def test_a_model_that_does_not_divide_is_refused(tiny_config, mesh, changes, told):
    model = dataclasses.replace(tiny_config, **changes)
    sizes = {"heads": {"tensor": 2}, "feed_forward": {"tensor": 4}, "width": {"fsdp": 8}}[next(iter(changes))]
    cut = sharding.make_mesh(MeshConfig(**sizes))
    sharding.check_model(tiny_config, cut)
    sharding.check_model(model, mesh)
    with pytest.raises(UserError, match=told):
        sharding.check_model(model, cut)


def test_a_width_that_data_and_fsdp_do_not_divide_together_is_refused_for_a_sharded_optimizer(tiny_config):
    model, mesh = dataclasses.replace(tiny_config, width=36), sharding.make_mesh(MeshConfig(fsdp=4))
    sharding.check_model(model, mesh)
    sharding.check_model(tiny_config, mesh, shard_optimizer=True)
    with pytest.raises(UserError, match=r"data=2 x mesh\.fsdp=4.*36 units of width.*over 8;.*shard_optimizer=False$"):
        sharding.check_model(model, mesh, shard_optimizer=True)


def test_parameters_lie_by_the_rules(tiny_config, mesh, cube):
    heads = Heads(mlm=True, next_sentence=True, pooler=True)
    params = bert.abstract_params(tiny_config, heads)
    assert all(sharding.is_fully_replicated for sharding in jax.tree.leaves(sharding.shardings(mesh, params)))
    found = layers.flatten(sharding.shardings(cube, params))
    specs = {path: sharding.spec for path, sharding in found.items()}
    layer = "encoder/layers"
    fsdp, tensor = ("fsdp",), ("tensor",)
    assert specs["embeddings/token/table"] == PartitionSpec(tensor, fsdp)
    assert specs["embeddings/position/table"] == PartitionSpec(None, fsdp)
    assert specs[f"{layer}/attention/qkv/kernel"] == PartitionSpec(None, fsdp, None, tensor, None)
    assert specs[f"{layer}/attention/qkv/bias"] == PartitionSpec(None, None, tensor, None)
    assert specs[f"{layer}/attention/output/kernel"] == PartitionSpec(None, tensor, None, fsdp)
    assert specs[f"{layer}/feed_forward/input/kernel"] == PartitionSpec(None, fsdp, tensor)
    assert specs[f"{layer}/feed_forward/input/bias"] == PartitionSpec(None, tensor)
    assert specs[f"{layer}/feed_forward/output/kernel"] == PartitionSpec(None, tensor, fsdp)
    assert specs["mlm_head/bias"] == PartitionSpec(tensor)
    assert specs["pooler/dense/kernel"] == PartitionSpec(fsdp, None)
    assert specs[f"{layer}/attention_norm/scale"] == specs["next_sentence_head/dense/bias"] == PartitionSpec()
    gated = bert.abstract_params(dataclasses.replace(tiny_config, gated=True), heads)
    inner = layers.flatten(sharding.shardings(cube, gated))[f"{layer}/feed_forward/input/kernel"]
    assert inner.spec == PartitionSpec(None, fsdp, None, tensor)


def test_an_optimizer_lies_where_its_parameters_lie_and_odd_shapes_are_whole(cube):
    kernel = "encoder/layers/feed_forward/output/kernel"
    state = {
        "mu": layers.unflatten({kernel: jax.ShapeDtypeStruct((2, 48, 32), np.float32)}),
        "norms": layers.unflatten({kernel: jax.ShapeDtypeStruct((2,), np.float32)}),
        "count": jax.ShapeDtypeStruct((), np.int32),
        "odd": layers.unflatten({"pooler/dense/kernel": jax.ShapeDtypeStruct((3, 32), np.float32)}),
    }
    found = layers.flatten(sharding.shardings(cube, state))
    assert found[f"mu/{kernel}"].spec == PartitionSpec(None, ("tensor",), ("fsdp",))
    others = [sharding for path, sharding in found.items() if not path.startswith("mu")]
    assert len(others) == 3 and all(sharding.is_fully_replicated for sharding in others)


def test_shard_optimizer_shards_moments_and_the_average_over_data_too(mesh, cube):
    kernel, bias = "encoder/layers/feed_forward/output/kernel", "encoder/layers/feed_forward/output/bias"
    odd = "pooler/dense/kernel"  # fsdp divides it, fsdp and data do not
    params = layers.unflatten(
        {
            path: jax.ShapeDtypeStruct(shape, np.float32)
            for path, shape in {kernel: (2, 48, 32), bias: (2, 32), odd: (34, 32)}.items()
        }
    )
    state = TrainState(None, params, {"mu": params}, params, None)
    for each, whole, update in ((mesh, None, ("data",)), (cube, ("fsdp",), ("fsdp", "data"))):
        tensor = None if each is mesh else ("tensor",)
        found = sharding.shardings(each, state, shard_optimizer=True)
        assert found.optimizer_state["mu"] == found.average
        moments = {path: sharding.spec for path, sharding in layers.flatten(found.average).items()}
        assert moments[kernel] == PartitionSpec(None, tensor, update)
        assert moments[bias] == PartitionSpec()
        assert moments[odd] == PartitionSpec(whole, None)
        assert found.params == sharding.shardings(each, state).params == sharding.shardings(each, state).average
        assert layers.flatten(found.params)[kernel].spec == PartitionSpec(None, tensor, whole)


def test_rows_reach_their_devices_in_any_order_of_devices():
    """As on a TPU pod, where a process's chips are a square of a torus that the mesh runs along."""
    devices = np.array(jax.devices()).reshape(8, 1, 1)
    crossed = Mesh(devices[[0, 2, 4, 6, 1, 3, 5, 7]], sharding.AXES, axis_types=(AxisType.Auto,) * 3)
    placed = sharding.place(np.arange(16), 16, crossed)
    np.testing.assert_array_equal(placed, np.arange(16))
    by_device = {shard.device.id: shard.data.tolist() for shard in placed.addressable_shards}
    assert by_device[2] == [2, 3] and by_device[1] == [8, 9]


def test_the_largest_replicated_tensor_is_reported_and_what_the_mesh_does_not_divide(tiny_config):
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=4))
    heads = Heads(mlm=True, span_boundary=True)
    state = sharding.with_shardings(mesh, {"params": bert.abstract_params(tiny_config, heads)})
    # 2 x 32 + 200 inputs are divided by 4, the 31 of a made-up head are not.
    odd = layers.unflatten({"extra/dense/kernel": jax.ShapeDtypeStruct((31, 7), np.float32)})
    state["params"] |= sharding.with_shardings(mesh, odd)
    line = describe.device_memory_summary(state, mesh)
    assert "replicated tensor is params/mlm_head/bias, 0.0041 MB" in line  # 1,024 entries
    assert line.endswith("; the mesh does not divide params/extra/dense/kernel")
    held = float(line.split()[3])
    assert held == pytest.approx(sum(4 * leaf.size for leaf in jax.tree.leaves(state)) / 4 / 1e6, rel=0.5)


def test_the_average_is_gathered_by_one_program_in_all_evaluations(mesh, caplog):
    """mesh.shard_optimizer shards the moving average further than the parameters, by whose program it is measured."""
    whole, sharded = sharding.replicated(mesh), NamedSharding(mesh, PartitionSpec("data"))
    params = {"kernel": jax.device_put(np.zeros(24, np.float32), whole)}

    def gathered(step: int) -> dict[str, jax.Array]:
        average = {"kernel": jax.device_put(np.full(24, step, np.float32), sharded)}
        caplog.clear()
        with jax.log_compiles():
            return sharding.put_like(average, params)

    assert gathered(1)["kernel"].sharding == whole and "Compiling" in caplog.text
    np.testing.assert_array_equal(gathered(2)["kernel"], np.full(24, 2.0))
    assert caplog.text == ""


# XLA's options are those of the devices that a program is compiled for, in training and evaluation.


def test_gradient_all_reduces_overlap_with_matmuls_on_several_devices_of_one_kind_if_asked_for():
    options = sharding.default_options("TPU v5 lite", 4, overlap=True)
    assert options["xla_enable_async_all_reduce"] == "true"
    assert not sharding.default_options("TPU v5 lite", 4, overlap=False)
    for kind, devices in (("TPU v5 lite", 1), ("TPU v4", 4), ("NVIDIA H100 80GB HBM3", 8)):
        assert not sharding.default_options(kind, devices, overlap=True)
    assert sharding.options(Mesh(np.array(jax.devices()), ("data",)), overlap=True) is None


@pytest.mark.parametrize(("kind", "off"), [("TPU v5p", 3), ("TPU v6 lite", 3), ("TPU7x", 5)])
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_what_libtpu_cannot_build_is_off_in_every_program(kind, off, devices, overlap):
    options = sharding.default_options(kind, devices, overlap=overlap)
    assert set(options.values()) == {"false"} and len(options) == off
    assert all("sparse" in name for name in options)


# An option of XLA that its compiler for CPUs has, too, and a default of this module.
OURS = {"xla_backend_optimization_level": "1", "xla_of_another_version": "true"}


def test_an_option_that_a_compiler_does_not_know_is_left_out_with_one_warning(monkeypatch, capsys):
    mesh = sharding.make_mesh(MeshConfig())
    monkeypatch.setitem(sharding.ON_SEVERAL, jax.devices()[0].device_kind, OURS)
    with jax.set_mesh(mesh):  # as in training
        for _ in range(2):
            assert sharding.options(mesh, overlap=True) == {"xla_backend_optimization_level": "1"}
    assert capsys.readouterr().err == (
        "warning: this version of the compiler has no option xla_of_another_version, which is left out\n"
    )


def test_requested_compiler_options_override_those_of_bert_jax(monkeypatch):
    mesh = sharding.make_mesh(MeshConfig())
    monkeypatch.setitem(sharding.ON_SEVERAL, jax.devices()[0].device_kind, OURS)
    requested = (("xla_backend_optimization_level", 2), ("xla_cpu_enable_fast_math", False))
    assert sharding.options(mesh, requested, overlap=True) == dict(requested)
    assert sharding.options(mesh, requested) == dict(requested)


@pytest.mark.parametrize(
    ("requested", "refusal"),
    [
        ({"xla_no_such": True}, "config.mesh.compiler_options: No such compile option: 'xla_no_such'"),
        ({"xla_backend_optimization_level": "high"}, "xla_backend_optimization_level, 'high' is not a valid int32"),
    ],
)
def test_a_requested_compiler_option_that_the_compiler_does_not_take_is_refused(requested, refusal):
    runtime = make_runtime(TrainConfig(mesh=MeshConfig(compiler_options=requested)))
    with pytest.raises(UserError, match=refusal):
        sharding.options(sharding.make_mesh(MeshConfig()), runtime.compiler_options)


def train(plan, mesh):
    step_lib.jitted(plan, mesh, step_lib.initial_state(plan, {"kernel": jax.device_put(np.zeros(2))}))


def evaluate(plan, mesh):
    evaluate_batches(plan, mesh, {}, {}, 8)


def predict(plan, mesh):
    empty, none = np.zeros(0, np.int32), Split(Path("dev.tsv"), (), labelled=False)
    rows = TaskRows(
        input_ids=empty, offsets=np.zeros(1, np.int64), first_lengths=empty, pad_id=0, truncated=0, split=none
    )
    Predictor(ClassificationTask("own", ("no", "yes")), plan.model, plan.runtime, mesh).answers({}, rows, 8)


@pytest.mark.parametrize(("compiled", "trains"), [(train, True), (evaluate, False), (predict, False)])
def test_all_programs_of_training_and_evaluation_have_the_options(compiled, trains, monkeypatch, tiny_config):
    asked = []
    monkeypatch.setattr(sharding, "options", lambda mesh, requested, overlap=False: asked.append((requested, overlap)))
    requested = (("xla_backend_optimization_level", 1),)
    mesh = sharding.make_mesh(MeshConfig())
    config = dataclasses.replace(tiny_config, vocab_size=900)  # of no other test, whose programs are cached
    runtime = Runtime(compiler_options=requested)
    compiled(step_lib.Plan(config, runtime, MaskedLMObjective(), AdamW(), optax.identity()), mesh)
    assert asked == [(requested, trains)]
