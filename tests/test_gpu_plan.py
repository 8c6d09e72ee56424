"""Tests of plans for GPUs: names, the cost of each kernel by hand, links, refusals; the slow one runs the compiler."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from bert_jax.command import UserError
from bert_jax.config import MeshConfig, ModelOptions, PretrainConfig
from bert_jax.model.attention import kernels
from bert_jax.planning import gpu_topology, hlo
from bert_jax.planning.abstract_step import AbstractStep, RowSpec
from bert_jax.planning.advice import advise
from bert_jax.planning.collectives import Collective, collectives, group_of
from bert_jax.planning.compiled import Compiled
from bert_jax.planning.contents import document
from bert_jax.planning.estimate import Estimate, notes_for
from bert_jax.planning.flops import Flops
from bert_jax.planning.gpu_chips import GPUS
from bert_jax.planning.gpu_step_time import compiler_cost, kernel_of, matmul_flops, step_time
from bert_jax.planning.gpu_topology import GpuTopology, parse_topology
from bert_jax.planning.memory import GIB, Memory
from bert_jax.planning.step_time import grouped
from bert_jax.planning.topology import open_topology
from bert_jax.reporting import page as pages

ROOT = Path(__file__).parents[1]
H100 = GPUS["h100"]

# In the form that XLA writes for an H100: two matmuls by cuBLAS, of which one has float32 operands at highest
# precision, attention by cuDNN forward and backward, a reduction, Triton fusions of which one is a matmul, an
# all-reduce, a copy and a loop.
PROGRAM = (Path(__file__).parent / "testdata" / "gpu_program.hlo").read_text(encoding="utf-8")
HEADS = 8 * 512 * 12 * 64 * 2  # bytes of queries, keys, values, the result, or a gradient of these
MATMUL_SPEED = 0.8 * 989e12
BANDWIDTH = 3.35232e12

# kind, bytes, FLOPs, seconds, what takes them
COSTS = {
    "narrow": (
        "matmuls",
        2 * (4096 * 1024 + 1024 * 3072 + 4096 * 3072),
        2 * 4096 * 1024 * 3072,
        2 * 4096 * 1024 * 3072 / MATMUL_SPEED,
        "arithmetic",
    ),
    "precise": (
        "matmuls",
        4 * (4096 * 2 + 2 * 1024 + 4096 * 1024),
        2 * 4096 * 2 * 1024,
        4 * (4096 * 2 + 2 * 1024 + 4096 * 1024) / BANDWIDTH,
        "memory",
    ),
    "forward": (
        "attention",
        4 * HEADS + 8 * 12 * 512 * 4,
        4 * 8 * 12 * 512 * 512 * 64,
        4 * 8 * 12 * 512 * 512 * 64 / 335e12,
        "arithmetic",
    ),
    "backward": (
        "attention",
        8 * HEADS + 8 * 12 * 512 * 4,
        10 * 8 * 12 * 512 * 512 * 64,
        10 * 8 * 12 * 512 * 512 * 64 / 266e12,
        "arithmetic",
    ),
    "bias": ("elementwise", 2 * 4096 * 3072 + 4 * 3072, 0, 16e-6, "arithmetic"),
    "softmax": ("elementwise", 2 * 4 * 1024, 0, 4e-6, "arithmetic"),
    "small": (
        "matmuls",
        2 * (64 * 256 + 256 * 32 + 64 * 32),
        2 * 64 * 256 * 32,
        2 * (64 * 256 + 256 * 32 + 64 * 32) / BANDWIDTH,
        "memory",
    ),
    "copied": ("copies", 2 * 4 * 1024, 0, 2 * 4 * 1024 / BANDWIDTH, "memory"),
}
RUNS = {"softmax": 12}  # in the loop


@pytest.fixture(scope="module")
def program():
    return hlo.parse(PROGRAM)


def test_each_kernel_costs_what_its_bytes_and_flops_take(program):
    found = {one.name: kernel_of(program, one, H100, times) for one, times in program.runs()}
    found = {name: kernel for name, kernel in found.items() if kernel is not None}
    assert found.keys() == COSTS.keys()
    for name, (kind, moved, flops, seconds, bound) in COSTS.items():
        kernel = found[name]
        assert (kernel.kind, kernel.bytes, kernel.flops, kernel.bound) == (kind, moved, flops, bound), name
        assert kernel.seconds == pytest.approx(seconds), name
        assert kernel.times == RUNS.get(name, 1)


def test_a_matmul_fused_with_a_slice_of_its_operand_costs_what_it_costs_alone(program):
    """As in the scans of jax 0.12. XLA estimates such a fusion as if the call were arithmetic on single elements."""
    (narrow,) = (one for one, _ in program.runs() if one.name == "narrow")
    call = next(line for line in PROGRAM.splitlines() if "%narrow = " in line).replace("(%x, %w)", "(%rows, %own)")
    fused = hlo.parse(f"""HloModule fused
%slice_and_call (stack: bf16[9,1024,3072], rows: bf16[4096,1024], number: s32[]) -> {narrow.shape} {{
  %stack = bf16[9,1024,3072]{{2,1,0}} parameter(0)
  %rows = bf16[4096,1024]{{1,0}} parameter(1)
  %number = s32[] parameter(2)
  %zero = s32[] constant(0)
  %one = bf16[1,1024,3072]{{2,1,0}} dynamic-slice(%stack, %number, %zero, %zero), dynamic_slice_sizes={{1,1024,3072}}
  %own = bf16[1024,3072]{{1,0}} bitcast(%one)
  ROOT {call.strip()}
}}

ENTRY %main (a: bf16[9,1024,3072], b: bf16[4096,1024], c: s32[]) -> {narrow.shape} {{
  %a = bf16[9,1024,3072]{{2,1,0}} parameter(0)
  %b = bf16[4096,1024]{{1,0}} parameter(1)
  %c = s32[] parameter(2)
  ROOT %sliced = {narrow.shape} fusion(%a, %b, %c), kind=kCustom, calls=%slice_and_call
}}
""")
    (kernel,) = filter(None, (kernel_of(fused, one, H100) for one, _ in fused.runs()))
    kind, moved, flops, seconds, bound = COSTS["narrow"]
    assert (kernel.kind, kernel.flops, kernel.bound) == (kind, flops, bound)
    assert kernel.bytes - moved in (0, 4)  # the number of the slice
    assert kernel.seconds == pytest.approx(seconds)


def test_the_step_sums_its_kernels_and_launches(program):
    time, least = step_time(program, H100, pallas_flops=0.0, least_pallas_flops=0.0, exposed_collectives=5e-6)
    wanted = {name: RUNS.get(name, 1) * seconds for name, (_, _, _, seconds, _) in COSTS.items()}
    assert time.by_kind["kernel launches"] == pytest.approx(19e-6)
    assert time.by_kind["attention"] == pytest.approx(wanted["forward"] + wanted["backward"])
    assert (
        time.total == pytest.approx(sum(wanted.values()) + 19e-6 + 5e-6) == pytest.approx(sum(time.by_bound.values()))
    )
    traffic = sum(RUNS.get(name, 1) * moved for name, (_, moved, _, _, _) in COSTS.items())
    flops = sum(cost[2] for cost in COSTS.values())
    assert least.traffic == traffic and least.memory == pytest.approx(traffic / BANDWIDTH)
    assert least.arithmetic == pytest.approx(flops / 989e12) and matmul_flops(program) == flops
    assert time.kernels[0].name == "backward"


def test_pallas_kernels_count_at_half_of_the_peak(program):
    time, least = step_time(program, H100, pallas_flops=989e9, least_pallas_flops=0.0, exposed_collectives=0.0)
    plain, plain_least = step_time(program, H100, pallas_flops=0.0, least_pallas_flops=0.0, exposed_collectives=0.0)
    assert time.pallas == pytest.approx(2e-3) and time.without_pallas == pytest.approx(plain.total)
    assert least == plain_least and sum(time.by_bound.values()) == pytest.approx(time.total)


def test_a_library_call_of_an_unknown_kind_counts_by_its_bytes_and_is_reported(step):
    text = """ENTRY %main (x: f32[1000]) -> f32[1000] {
  %x = f32[1000]{0} parameter(0)
  ROOT %sorted = (f32[1000]{0}, u8[4096]{0}) custom-call(%x), custom_call_target="__cub$DeviceRadixSort"
}
"""
    time, _ = step_time(hlo.parse(text), H100, pallas_flops=0.0, least_pallas_flops=0.0, exposed_collectives=0.0)
    assert time.by_kind["others"] == pytest.approx(8000 / BANDWIDTH) and time.unpriced == 1
    assert any("1 library calls" in note for note in step.topology.notes(step.model, Flops(), time))


@pytest.mark.parametrize(
    ("change", "flops"),
    [
        (('"mask_type": "NO_MASK"', '"mask_type": "CAUSAL"'), 4 * 8 * 12 * 512 * 256.5 * 64),
        (('"mask_type": "NO_MASK"', '"mask_type": "PADDING_CAUSAL"'), 4 * 8 * 12 * 512 * 256.5 * 64),
        (('"sliding_window_length": 0', '"sliding_window_length": 128'), 4 * 8 * 12 * 512 * 128 * 64),
        (('"intermediate_tensor_shape"', '"another_shape"'), 4 * 8 * 12 * 512 * 512 * 64),
        (("12,64]", "12,128]"), 4 * 8 * 12 * 512 * 512 * 128),
    ],
)
def test_attention_counts_the_keys_that_a_query_sees(change, flops):
    program = hlo.parse(PROGRAM.replace(*change))
    forward = next(one for one, _ in program.runs() if one.name == "forward")
    kernel = kernel_of(program, forward, H100)
    assert kernel is not None and kernel.flops == flops
    speed, moved = (497e12, 8 * HEADS) if "12,128]" in change else (335e12, 4 * HEADS)
    assert kernel.seconds == pytest.approx(max(flops / speed, moved / BANDWIDTH), rel=0.01)  # and the statistics


def test_the_estimate_of_the_compiler_is_that_of_the_model_that_fits_the_kernel(program):
    found = {one.name: compiler_cost(one) for one, _ in program.runs()}
    seconds = {name: cost.total for name, cost in found.items() if cost is not None}
    assert seconds == pytest.approx({"narrow": 35.25e-6, "bias": 16.5e-6, "softmax": 4.5e-6})


def test_layers_that_compute_the_same_are_one_group(program):
    time, _ = step_time(program, H100, pallas_flops=0.0, least_pallas_flops=0.0, exposed_collectives=0.0)
    first = time.kernels[0]
    (group,) = grouped([first, dataclasses.replace(first, times=3.0)])
    assert group.times == first.times + 3.0


def topology(count=8, hosts=1, **changes) -> GpuTopology:
    return dataclasses.replace(GpuTopology(f"h100:{count}x{hosts}", H100, tuple(jax.devices()), hosts), **changes)


def test_an_all_reduce_overlaps_as_far_as_kernels_between_its_start_and_end_take(program):
    (found,) = collectives(program, 8, topology().overlapped)
    size = 4096.0 * 1024 * 4
    whole = 2 * 7 / 8 * size / (0.92 * 450e9) + 5e-6
    assert (found.kind, found.group, found.bytes) == ("all-reduce", 8, size)
    assert topology().seconds(found, size) == pytest.approx(whole)
    assert found.overlapped_bytes == pytest.approx(size * (16e-6 + 1e-6) / whole)


@pytest.mark.parametrize(
    ("group", "hosts", "bandwidth"),
    [(8, 1, 450e9), (32, 4, 400e9), (4, 4, 50e9), (8, 4, 100e9), (2, 1, 450e9)],
)
def test_a_ring_over_several_hosts_uses_the_network_of_its_gpus(group, hosts, bandwidth):
    gathered = Collective("all-gather", group, 1.0, 1e9, 0.0, hosts)
    wanted = 1e9 * (group - 1) / group / (0.92 * bandwidth) + 5e-6
    assert topology(hosts=4).seconds(gathered, 1e9) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("groups", "first"),
    [
        ("{{0,2},{1,3}}", (0, 2)),
        ("[2,4]<=[8]", (0, 1, 2, 3)),
        ("[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", (0, 4)),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", (0, 1, 2, 3)),
        ("mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_0','axis_2'}", (0, 1, 4, 5)),
        ("mesh['axis_0'=8] {'axis_0':(1)2}", (0, 4)),
        ("mesh['axis_0'=8] {'axis_0':(2)2}", (0, 2)),
        ("mesh['axis_0'=1,'axis_1'=2,'axis_2'=4], device_ids=([4,2]T(1,0)) {'axis_1'}", (0, 1)),
        ("mesh['axis_0'=1,'axis_1'=2,'axis_2'=4], device_ids=([4,2]T(1,0)) {'axis_2'}", (0, 2, 4, 6)),
        ("{}", tuple(range(8))),
    ],
)
def test_the_devices_of_a_group_are_read_from_every_notation(groups, first):
    assert group_of(f"all-reduce(%x), replica_groups={groups}, use_global_device_ids=true", 8) == first


def test_a_group_spans_the_hosts_of_its_devices():
    line = "  %all-reduce.1 = f32[64]{0} all-reduce(%x), replica_groups="
    for groups, hosts in (("{{0,1,2,3},{4,5,6,7}}", 1), ("{{0,4},{1,5},{2,6},{3,7}}", 2)):
        text = "ENTRY %main (x: f32[64]) -> f32[64] {\n" + line + groups + "\n}\n"
        assert [one.slices for one in collectives(hlo.parse(text), 8, slices=2)] == [hosts]


def test_names_are_parsed_as_gpus_and_hosts():
    assert parse_topology("h100:1") == (H100, 1, 1)
    assert parse_topology("b200:8x4") == (GPUS["b200"], 8, 4)


@pytest.mark.parametrize("name", ["h101:8", "h100", "h100:0", "h100:8x0", "h100:8x2x2", "h100:x", "h100:8;"])
def test_an_unknown_name_is_refused_with_examples(name):
    with pytest.raises(UserError, match=r"unknown topology .*h100:8x4"):
        open_topology(name)


def test_more_gpus_than_a_host_has_are_refused_with_the_hosts_that_hold_them():
    with pytest.raises(UserError, match=r"at most 8 GPUs; .*: h100:8x3"):
        open_topology("h100:20")
    with pytest.raises(UserError, match=r"--slices is for TPUs; .* h100:8x4"):
        open_topology("h100:8", slices=4)


def test_without_the_plugin_the_error_gives_both_extras(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"run pip install --editable '.*\[gpu12\]', with gpu in place"):
        open_topology("h100:1")


def test_the_extras_that_the_error_names_exist():
    text = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    assert "gpu = jax[cuda13]" in text and "gpu12 = jax[cuda12]" in text


def test_the_share_of_memory_is_that_of_the_environment(monkeypatch):
    for variable in gpu_topology.MEMORY_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert gpu_topology.memory_fraction() == 0.75
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", ".9")
    assert gpu_topology.memory_fraction() == 0.9
    for wrong in ("nine", "0", "1.5"):
        monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", wrong)
        with pytest.raises(UserError, match="share of the memory"):
            gpu_topology.memory_fraction()


CONFIG = PretrainConfig(
    model=ModelOptions(preset="tiny", layer_loop="scan", attention_dropout=0.0), batch_size=64, mesh=MeshConfig(fsdp=4)
)


@pytest.fixture(scope="module")
def step():
    """A step over the 8 CPU devices of the tests, treated as two hosts of four GPUs."""
    return AbstractStep.of(CONFIG, topology(4, 2), RowSpec.of(CONFIG, 64, None))


def test_a_step_for_gpus_takes_their_kernels(step):
    assert step.plan.runtime.platform == "gpu" and step.plan.runtime.compute_dtype == "bfloat16"
    assert kernels(step.model, step.plan.runtime, 64) == ["cudnn"]


def test_only_data_spans_hosts(step):
    config = dataclasses.replace(CONFIG, mesh=MeshConfig(fsdp=8))
    with pytest.raises(UserError, match=r"mesh.data=1 does not divide over 2 slices"):
        AbstractStep.of(config, step.topology, step.rows)


def make_estimate(step, program, memory):
    time, least = step.topology.estimate(program, Flops(2e12), step.model, 5e-6)
    reduced = Collective("all-reduce", 8, 7.0, 4e6, 1e6, 2)
    made = Estimate(step, memory, Flops(2e12), 2e12, time, least, [reduced], ["cudnn"], [], [])
    compiled = Compiled(program, memory, Flops(2e12))
    return dataclasses.replace(made, notes=notes_for(step, compiled, time), advice=advise(made))


def test_page_and_json_show_bounds_and_kernels(step, program):
    made = make_estimate(step, program, Memory(GIB, 2 * GIB, 20 * GIB, 60 * GIB))
    page, values = pages.render(document(made)), json.loads(json.dumps(made.as_json()))
    for text in ("What bounds the step", "jvp()/dot_general", "all-reduce of 8 over 2 hosts", "H100"):
        assert text in page
    bounds = values["step_seconds_by_bound"]
    assert set(bounds) == {"memory", "arithmetic", "launches", "communication"}
    assert sum(bounds.values()) == pytest.approx(values["step_seconds"]) == pytest.approx(made.time.total)
    assert values["largest_kernels"][0]["name"] == "backward"
    # 14 of the 19 runs: 12 in the loop, one matmul and one reduction.
    wanted = "has 14 of the 19 kernels of a step: elementwise 0.07 ms (0.06 ms here), matmuls 0.04 ms (0.03 ms here)"
    assert any(wanted in note for note in values["notes"])
    assert any("9% of the time launches kernels" in line for line in values["advice"])  # 19 us of 205


@pytest.mark.parametrize(("width", "runs"), [(128, True), (48, False)])
def test_advice_names_the_kernel_with_dropout_where_it_runs(step, program, width, runs):
    """It has heads of 64, but not of 24."""
    options = dataclasses.replace(CONFIG.model, attention_dropout=0.1, heads=2, width=width)
    dropping = AbstractStep.of(dataclasses.replace(CONFIG, model=options), step.topology, step.rows)
    made = dataclasses.replace(
        make_estimate(dropping, program, Memory(GIB, 2 * GIB, 20 * GIB, 60 * GIB)), kernels=["einsum"]
    )
    lines = [line for line in advise(made) if "--config.model.attention=triton" in line]
    assert len(lines) == runs and all("opt-in here: timed on an H200 only" in line for line in lines)
    assert not any("triton" in line for line in make_estimate(step, program, made.memory).advice)


def test_advice_names_auto_where_it_takes_the_kernel_with_dropout(step, program):
    options = dataclasses.replace(CONFIG.model, attention="einsum", attention_dropout=0.1, heads=2, width=128)
    rows = dataclasses.replace(step.rows, seq_len=128)
    dropping = AbstractStep.of(dataclasses.replace(CONFIG, model=options), step.topology, rows)
    made = make_estimate(dropping, program, Memory(GIB, 2 * GIB, 20 * GIB, 60 * GIB))
    made = dataclasses.replace(made, kernels=["einsum"])
    lines = [line for line in advise(made) if "triton" in line]
    assert len(lines) == 1 and lines[0].startswith("--config.model.attention=auto takes triton, which has this dropout")


def test_advice_names_the_share_of_memory_with_which_a_step_fits(step, program):
    available = int(step.topology.memory_bytes)
    full = Memory(GIB, 2 * GIB, available, available)
    assert "XLA_CLIENT_MEM_FRACTION=0.95" in step.topology.advice(full, None)[0]
    assert not step.topology.advice(dataclasses.replace(full, activations=80 * GIB), None)


def test_the_cost_model_is_asked_only_for_gpus_that_it_has(program, step):
    for gpu in GPUS.values():
        devices = GpuTopology(f"{gpu.name}:1", gpu, (), 1)
        asked = "xla_gpu_collect_cost_model_stats" in devices.compile_only_options
        assert asked == (gpu.name != "a100") and devices.compile_only_options["xla_gpu_autotune_level"] == 0
        time, _ = step_time(program, gpu, pallas_flops=0.0, least_pallas_flops=0.0, exposed_collectives=0.0)
        said = " ".join(devices.notes(step.model, Flops(), time))
        assert ("XLA's cost model has no a100" in said) != asked


@pytest.mark.slow
@pytest.mark.skipif(
    not any(importlib.util.find_spec(plugin) for plugin in gpu_topology.PLUGINS),
    reason="jax's CUDA plugin is not installed (extra gpu12 or gpu)",
)
def test_a_real_plan(tmp_path):
    file = tmp_path / "plan.json"
    line = [sys.executable, "-m", "bert_jax.plan", "--config", "configs/bert_tiny.py", "--topology", "h100:1"]
    line += ["--seq_len", "128", "--config.model.attention_dropout=0.0", "--json", str(file)]
    subprocess.run(line, cwd=ROOT, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    values = json.loads(file.read_text(encoding="utf-8"))
    assert values["fits"] and values["devices"] == 1 and values["attention"] == ["cudnn"]
    assert 0 < values["mfu"] < values["mfu_at_most"] < 1
    assert values["step_seconds_by_kind"]["attention"] > 0
    # Every matmul of the traced function and both directions of attention are in the program.
    assert 0.8 < values["flops"]["program"] / values["flops"]["model"] < 1.3
