"""Tests of planning against independent values: published figures, names of clouds, FLOPs and rings by hand."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from benchmarks import plans
from bert_jax.errors import UserError
from bert_jax.model.attention.kernels import KernelOptions, splash_attention
from bert_jax.planning import program as programs
from bert_jax.planning.compile import parse_out_of_memory
from bert_jax.planning.estimate import CYCLES, EXPOSED, PALLAS, ROOFLINE, collectives, pallas_efficiency, step_time
from bert_jax.planning.program import Collective, Flops, Instruction, group_devices
from bert_jax.planning.topology import CHIPS, GIB, GPUS, PLUGINS, Topology, open_topology, parse

ROOT = Path(__file__).parent.parent.parent
TESTDATA = Path(__file__).parent.parent / "testdata"
# A loop of 12 runs with a matmul of 236,000 cycles and a sum of 64,000, a copy of 415,000, and collectives.
PROGRAM = (TESTDATA / "program.hlo").read_text(encoding="utf-8")
# In the form that libtpu writes for two slices: gradients that are reduced between them, and a small array that is
# gathered, behind work of 94,000 cycles. The last transfer is one to the host alone.
BETWEEN_SLICES = (TESTDATA / "slices_program.hlo").read_text(encoding="utf-8")
V5E, H100 = CHIPS["v5e"], GPUS["h100"]
SLICE = Topology("v5e:2x2", V5E, (None,) * 4, (2, 2))


@pytest.fixture(scope="module")
def program():
    return programs.parse(PROGRAM)


# Names


@pytest.mark.parametrize(
    ("name", "shape", "chips", "hosts"),
    [
        # docs.cloud.google.com/tpu/docs: v5e and v6e, whose names count chips; machines of 4 chips, or one of 8.
        ("v5litepod-1", "v5e:1x1", 1, 1),
        ("v5litepod-8", "v5e:2x4", 8, 1),
        ("v5litepod-16", "v5e:4x4", 16, 4),
        ("v5litepod-64", "v5e:8x8", 64, 16),
        ("v5e-64", "v5e:8x8", 64, 16),
        ("v5e:8x8", "v5e:8x8", 64, 16),
        ("v6e-8", "v6e:2x4", 8, 1),
        ("v6e-256", "v6e:16x16", 256, 64),
        # v4, v5p and tpu7x, whose names count TensorCores, two in each chip.
        ("v4-8", "v4:2x2x1", 4, 1),
        ("v4-64", "v4:2x4x4", 32, 8),
        ("v4-4096", "v4:8x16x16", 2048, 512),
        ("v5p-8", "v5p:2x2x1", 4, 1),
        ("v5p-128", "v5p:4x4x4", 64, 16),
        ("v5p-12288", "v5p:16x16x24", 6144, 1536),
        ("tpu7x-16", "tpu7x:2x2x2", 8, 2),
    ],
)
def test_names_of_clouds_are_parsed(name, shape, chips, hosts):
    found = parse(name)
    assert (found.name, found.hosts) == (shape, hosts)
    assert jnp.prod(jnp.array(found.sides)) == chips
    assert parse(name, 4).hosts == 4 * hosts


@pytest.mark.parametrize(
    ("name", "shape", "devices", "hosts"),
    [("h100", "h100:1", 1, 1), ("h200:8", "h200:8", 8, 1), ("b200:8x4", "b200:8x4", 32, 4), ("a100:4", "a100:4", 4, 1)],
)
def test_gpus_are_parsed_as_their_number_and_hosts(name, shape, devices, hosts):
    found = parse(name)
    assert (found.name, len(found.devices), found.hosts) == (shape, devices, hosts)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((name, "Examples: v5l") for name in ("v9:2x2", "v9-8", "v3-8", "v5e", "v5e:axb", "v5e:2x2;", "h101:8")),
        ("v5e:2x2x1", "v5e has 2 axes"),
        ("v4:4x4", "v4 has 3 axes"),
        ("v5e:0x2", "v5e has 2 axes"),
        ("v5e-48", "sizes of v5e count chips: 1, 4, 8, 16"),
        ("v4-32x", "Examples"),
        ("v4-7", "sizes of v4 count TensorCores, 2 per chip: 2, 8, 16, 32"),
        ("v5e:32x32", "at most 256 chips; use --slices"),
        ("h100:16", "at most 8 GPUs; for more, use several hosts: h100:8x2"),
        ("h100:0", "use KIND:N"),
    ],
)
def test_an_unknown_name_is_refused(name, said):
    with pytest.raises(UserError, match=f"unknown topology '{name}'; .*{said}"):
        parse(name)
    with pytest.raises(UserError, match=r"--slices is for TPUs; write several hosts of GPUs as h100:8x2"):
        parse("h100:8", 2)


@pytest.mark.parametrize(
    ("name", "said"),
    [("v5e:2x2", r"\[tpu\]' \(no TPU needed\)$"), ("h100:1", r"\[gpu12\]', with gpu in place of gpu12 for CUDA 13")],
)
def test_without_a_compiler_the_error_gives_the_install_command(name, said, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"run pip install --editable '.*{said}"):
        open_topology(name)


@pytest.mark.parametrize("value", ["0", "1.5", "much"])
def test_an_invalid_share_of_a_gpus_memory_is_refused(value, monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", value)
    with pytest.raises(UserError, match=r"XLA_CLIENT_MEM_FRACTION is .*; use a share"):
        open_topology("h100:1")


# Figures of devices


def test_clocks_equal_the_published_ones():
    """Austin et al. 2025, part 2: 1.5 GHz on v5e; Jouppi et al. 2023, table 4: 1,050 MHz on v4."""
    clocks = {name: round(CHIPS[name].clock / 1e9, 2) for name in ("v4", "v5e", "v5p", "v6e")}
    assert clocks == {"v4": 1.05, "v5e": 1.5, "v5p": 1.75, "v6e": 1.75}


@pytest.mark.parametrize(
    ("kind", "teraflops", "gigabytes"),
    # The data sheets, dense bfloat16 and memory: A100 80 GB, H100 SXM, H200 SXM, HGX B200 (180 to 192 GB).
    [("a100", 312, 80), ("h100", 989, 80), ("h200", 989, 141), ("b200", 2250, 180)],
)
def test_gpus_have_the_peak_and_memory_of_their_data_sheets(kind, teraflops, gigabytes):
    gpu = GPUS[kind]
    assert gpu.peak_flops == teraflops * 1e12
    assert gigabytes <= gpu.memory_bytes / 1e9 < 1.08 * gigabytes


@pytest.mark.parametrize(
    ("name", "group", "links"),
    [
        ("v5e:16x16", 256, 4),
        ("v5e:16x16", 16, 2),
        ("v5e:4x4", 16, 2),
        ("v5e:8x16", 128, 3),
        ("v4:4x4x4", 64, 6),
        ("v4:2x2x4", 16, 3),
        ("v4:2x2x4", 4, 1),
        ("tpu7x:4x4x4", 128, 3),
    ],
)
def test_a_group_uses_the_links_of_the_axes_that_it_spans(name, group, links):
    assert parse(name).links(group) == links


@pytest.mark.parametrize(
    ("kind", "passes"), [("all-reduce", 2), ("all-gather", 1), ("reduce-scatter", 1), ("collective-permute", 1)]
)
def test_a_ring_passes_all_but_one_shard_over_each_link_and_twice_in_an_all_reduce(kind, passes):
    """Patarasuk and Yuan 2009: 2 (n - 1) / n of the data of an all-reduce."""
    one = Collective(kind, 16, 1.0, 1e9)
    assert parse("v5e:4x4").seconds(one) == pytest.approx(passes * 15 / 16 * 1e9 / (2 * 4.5e10))
    assert parse("h200:8").seconds(one) == pytest.approx(passes * 15 / 16 * 1e9 / (0.92 * 450e9))


@pytest.mark.parametrize(
    ("group", "hosts", "bandwidth"),
    [(8, 1, 450e9), (32, 4, 400e9), (4, 4, 50e9), (8, 4, 100e9), (2, 1, 450e9)],
)
def test_a_ring_over_several_hosts_uses_the_network_of_its_gpus(group, hosts, bandwidth):
    gathered = Collective("all-gather", group, 1.0, 1e9, slices=hosts)
    assert parse("h100:8x4").seconds(gathered) == pytest.approx(1e9 * (group - 1) / group / (0.92 * bandwidth))


# Programs


def test_instructions_in_a_loop_run_once_per_iteration(program):
    times = {instruction.name: count for instruction, count in program.runs()}
    assert times["fusion.1"] == times["all-reduce-start.1"] == 12
    assert times["copy.1"] == 1
    assert "convolution.1" not in times  # part of a fusion
    assert program.loops_without_trip_count() == 0


def test_the_trip_count_of_a_scan_is_read_from_its_condition_and_other_loops_are_counted_as_unknown():
    unannotated = PROGRAM.replace(', backend_config={"known_trip_count":{"n":"12"}}', "")
    for text, unknown, runs in ((unannotated, 0, 12), (unannotated.replace("direction=LT", "direction=NE"), 1, 1)):
        program = programs.parse(text)
        assert program.loops_without_trip_count() == unknown
        assert {instruction.name: count for instruction, count in program.runs()}["fusion.1"] == runs


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("kind", "operand", "result"), [("all-gather", 8, 32), ("reduce-scatter", 32, 8)])
def test_a_collective_counts_a_devices_whole_array_started_or_at_once(kind, operand, result, asynchronous):
    shapes = f"(f32[{operand}], f32[{result}])" if asynchronous else f"f32[{result}]"
    text = f"""HloModule m

ENTRY %main (p: f32[{operand}]) -> f32[{result}] {{
  %p = f32[{operand}]{{0}} parameter(0)
  %c = {shapes} {kind}{"-start" * asynchronous}(%p), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}
}}
"""
    program = programs.parse(text)
    [collective] = programs.collectives(program, 4, 1, lambda _: 1.0, lambda _: 0.0)
    assert (collective.kind, collective.group, collective.bytes) == (kind, 4, 4 * 32)


def test_each_branch_of_a_conditional_counts_an_equal_share():
    text = """HloModule m

%one (p: f32[2]) -> f32[2] {
  ROOT %a = f32[2]{0} negate(%p), backend_config={"estimated_cycles":"10"}
}

%other (p: f32[2]) -> f32[2] {
  ROOT %b = f32[2]{0} negate(%p), backend_config={"estimated_cycles":"30"}
}

ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  ROOT %c = f32[2]{0} conditional(%x, %x, %x), branch_computations={%one, %other}
}
"""
    assert sum(times * (one.cycles or 0) for one, times in programs.parse(text).runs()) == 20


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("bf16[64,128,768]{2,1,0:T(8,128)(2,1)S(1)}", 64 * 128 * 768 * 2),
        ("(f32[]{:T(128)}, s8[3,5]{1,0}, pred[7]{0})", 4 + 15 + 7),
        ("f8e4m3fn[16]{0}", 16),
    ],
)
def test_bytes_of_shapes(shape, size):
    assert Instruction("x", "copy", shape, "", ()).bytes == size


def test_text_without_an_entry_computation_raises():
    with pytest.raises(ValueError, match="ENTRY"):
        programs.parse("HloModule empty\n")


def test_time_sums_cycles_and_uses_bytes_without_cycles(program):
    time = step_time(program, SLICE, Flops(), 64, [])
    assert time.basis == CYCLES and time.at_least is None
    assert time.parts["compiler's cycles"] * V5E.clock == pytest.approx(12 * (236_000 + 64_000) + 415_000)
    scatter = 2 * 1000 * 256 * 4 / 819e9  # and little for the conditions of the loop
    assert time.parts["gathers and scatters"] == pytest.approx(scatter, rel=1e-4)


def test_a_pallas_kernel_counts_at_the_stated_share(program):
    """Half of the peak, and heads of 64 leave half of a matrix unit of 128 idle: 197 TFLOP take 4 s on one chip."""
    time = step_time(program, SLICE, Flops(pallas=4 * 197e12), 64, [])
    assert pallas_efficiency(V5E, 64) == 0.25 and pallas_efficiency(CHIPS["v6e"], 64) == 0.125
    assert time.parts[PALLAS] == pytest.approx(4.0) == pytest.approx(time.total - time.without_pallas)
    assert pallas_efficiency(H100, 64) == 0.5


MATMUL = """ENTRY %main (a: bf16[4096,1024], b: bf16[1024,3072]) -> f32[3072] {
  %a = bf16[4096,1024]{1,0} parameter(0)
  %b = bf16[1024,3072]{1,0} parameter(1)
  %product = (bf16[4096,3072]{1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul"
  %first = bf16[4096,3072]{1,0} get-tuple-element(%product), index=0
  ROOT %bias = f32[3072]{0} fusion(%first), kind=kInput, calls=%summed
}
"""


def test_the_time_on_gpus_is_a_roofline_of_flops_and_bytes():
    """Operands read once and results written once, without the workspace of cuBLAS."""
    flops = 2 * 4096 * 1024 * 3072
    moved = 2 * (4096 * 1024 + 1024 * 3072 + 2 * 4096 * 3072) + 4 * 3072
    reduced = Collective("all-reduce", 8, 1.0, 8e6)
    exposed = 2 * 7 / 8 * 8e6 / (0.92 * 450e9)
    time = step_time(programs.parse(MATMUL), parse("h100:8"), Flops(xla=8.0 * flops), 64, [reduced])
    assert time.basis == ROOFLINE
    assert time.parts == pytest.approx(
        {"arithmetic": flops / (0.8 * 989e12), "memory traffic": moved / 3.35232e12, EXPOSED: exposed}
    )
    assert time.at_least == pytest.approx(max(flops / 989e12, moved / 3.35232e12))


def test_of_an_array_that_is_sliced_or_updated_the_part_counts():
    """As a scan reads one layer of its stacked weights, and stacks what the backward pass needs."""
    text = """%sliced (s: f32[12,1024], n: s32[]) -> f32[1024] {
  %s = f32[12,1024]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %one = f32[1,1024]{1,0} dynamic-slice(%s, %n, %n), dynamic_slice_sizes={1,1024}
  ROOT %flat = f32[1024]{0} bitcast(%one)
}

%stacked (t: f32[12,1024], v: f32[1,1024], m: s32[]) -> f32[12,1024] {
  %t = f32[12,1024]{1,0} parameter(0)
  %v = f32[1,1024]{1,0} parameter(1)
  %m = s32[] parameter(2)
  ROOT %put = f32[12,1024]{1,0} dynamic-update-slice(%t, %v, %m, %m)
}

ENTRY %main (x: f32[12,1024], y: f32[1,1024], i: s32[]) -> f32[12,1024] {
  %x = f32[12,1024]{1,0} parameter(0)
  %y = f32[1,1024]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %read = f32[1024]{0} fusion(%x, %i), kind=kLoop, calls=%sliced
  ROOT %write = f32[12,1024]{1,0} fusion(%x, %y, %i), kind=kLoop, calls=%stacked
}
"""
    time = step_time(programs.parse(text), parse("h100:1"), Flops(), 64, [])
    moved = 4 * 1024 * 4 + 2 * 4  # and the index, twice
    assert time.parts["memory traffic"] * H100.memory_bandwidth == pytest.approx(moved, rel=1e-12)


# Collectives


def test_collectives_are_grouped_by_kind_and_size_with_their_overlap(program):
    communication = collectives(program, SLICE)
    found = {(one.kind, one.group): one for one in communication}
    reduced = found["all-reduce", 4]
    assert reduced.count == 13 and reduced.bytes == 13 * 2304 * 4
    assert reduced.overlapped_bytes == 12 * 2304 * 4  # a matmul, which takes longer, runs between start and done
    assert found["all-gather", 2].overlapped_bytes == 0
    # The group of four spans both axes, which are two chips long and have one link each; the pairs span one axis.
    time = step_time(program, SLICE, Flops(), 64, communication)
    assert time.parts[EXPOSED] == pytest.approx((2 * 3 / 4 / 2 + 1 / 2) * 2304 * 4 / 4.5e10)


STARTS = {
    "a start and its done": """ENTRY %main (x: f32[640000]) -> f32[640000] {
  %x = f32[640000]{0} parameter(0)
  %begun = f32[640000]{0} all-reduce-start(%x), replica_groups={{0,1}}
  %work = f32[64]{0} fusion(%x), kind=kLoop, calls=%negated, backend_config={"estimated_cycles":"CYCLES"}
  ROOT %ended = f32[640000]{0} all-reduce-done(%begun)
}
""",
    "a call by an async-start": """%called (p: f32[640000]) -> f32[640000] {
  %p = f32[640000]{0} parameter(0)
  ROOT %reduced = f32[640000]{0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
}

ENTRY %main (x: f32[640000]) -> f32[640000] {
  %x = f32[640000]{0} parameter(0)
  %begun = ((f32[640000]{0}), f32[640000]{0}) async-start(%x), calls=%called
  %work = f32[64]{0} fusion(%x), kind=kLoop, calls=%negated, backend_config={"estimated_cycles":"CYCLES"}
  ROOT %ended = f32[640000]{0} async-done(%begun), calls=%called
}
""",
    "fusions that share a channel": """%send (p.1: f32[640000]) -> f32[640000] {
  %p.1 = f32[640000]{0} parameter(0)
  %all-reduce.1 = f32[640000]{0} all-reduce(%p.1), channel_id=3, replica_groups={{0,1}}, to_apply=%add
  ROOT %s = f32[640000]{0} custom-call(%all-reduce.1), custom_call_target="AsyncCollectiveStart"
}

%meanwhile (p.2: f32[640000]) -> f32[64] {
  %all-reduce.2 = f32[640000]{0} all-reduce(%p.2), channel_id=3, replica_groups={{0,1}}, to_apply=%add
  ROOT %m = f32[64]{0} negate(%p.2)
}

%receive (p.3: f32[640000]) -> f32[640000] {
  %all-reduce.3 = f32[640000]{0} all-reduce(%p.3), channel_id=3, replica_groups={{0,1}}, to_apply=%add
  ROOT %r = f32[640000]{0} custom-call(%p.3, %all-reduce.3), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: f32[640000]) -> f32[640000] {
  %x = f32[640000]{0} parameter(0)
  %begun = f32[640000]{0} fusion(%x), kind=kCustom, calls=%send
  %work = f32[64]{0} fusion(%x), kind=kLoop, calls=%meanwhile, backend_config={"estimated_cycles":"CYCLES"}
  ROOT %ended = f32[640000]{0} fusion(%begun, %work), kind=kCustom, calls=%receive
}
""",
}


@pytest.mark.parametrize("form", STARTS)
@pytest.mark.parametrize("cycles", [15_000, 150_000])
def test_a_collective_overlaps_as_long_as_the_work_between_its_ends_takes(form, cycles):
    """10 or 100 microseconds of work at 1.5 GHz, beside an all-reduce of 57 over one link."""
    pair = Topology("v5e:1x2", V5E, (None,) * 2, (1, 2))
    (found,) = collectives(programs.parse(STARTS[form].replace("CYCLES", str(cycles))), pair)
    size = 640_000 * 4
    seconds = 2 * 1 / 2 * size / 4.5e10
    assert (found.kind, found.group, found.count, found.bytes) == ("all-reduce", 2, 1.0, size)
    assert found.overlapped_bytes == pytest.approx(size * min(1.0, cycles / V5E.clock / seconds), rel=1e-3)


def test_on_gpus_work_lasts_as_long_as_its_memory_traffic_takes():
    """An instruction that only names a part of a result hides nothing."""
    text = """ENTRY %main (x: f32[6400000]) -> f32[6400000] {
  %x = f32[6400000]{0} parameter(0)
  %begun = f32[6400000]{0} all-reduce-start(%x), replica_groups={{0,1}}
  %work = (f32[640000]{0}) fusion(%x), kind=kLoop, calls=%summed
  %part = f32[640000]{0} get-tuple-element(%work), index=0
  ROOT %ended = f32[6400000]{0} all-reduce-done(%begun)
}
"""
    (found,) = collectives(programs.parse(text), parse("h100:2"))
    hidden = (6_400_000 + 640_000) * 4 / 3.35232e12 / (6_400_000 * 4 / (0.92 * 450e9))
    assert found.overlapped_bytes / found.bytes == pytest.approx(hidden)


def test_collectives_between_slices_take_the_network_and_share_the_work_that_hides_them():
    slices = Topology("v5e:2x2", V5E, (None,) * 8, (2, 2), 2)
    reduced, gathered, within = collectives(programs.parse(BETWEEN_SLICES), slices)
    size = 128 * 8 * 128 * 4.0
    seconds = 2 * 1 / 2 * size / 3.125e9  # a ring of two, at a v5e chip's share of the network
    work = 94_000 / V5E.clock / 2  # both are sent before the work
    assert (reduced.kind, reduced.group, reduced.slices, reduced.count, reduced.bytes) == ("all-reduce", 2, 2, 1, size)
    assert slices.seconds(reduced) == pytest.approx(seconds) and 0 < work < seconds
    assert reduced.overlapped_bytes == pytest.approx(size * work / seconds)
    assert (gathered.kind, gathered.bytes, gathered.overlapped_bytes) == ("all-gather", 2 * 1024, 2 * 1024)
    assert (within.group, within.slices, within.bytes) == (4, 1, 1024)


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
    assert group_devices(f"all-reduce(%x), replica_groups={groups}, use_global_device_ids=true", 8) == first


def test_a_group_spans_the_hosts_of_its_devices():
    line = "  %all-reduce.1 = f32[64]{0} all-reduce(%x), replica_groups="
    for groups, hosts in (("{{0,1,2,3},{4,5,6,7}}", 1), ("{{0,4},{1,5},{2,6},{3,7}}", 2)):
        text = "ENTRY %main (x: f32[64]) -> f32[64] {\n" + line + groups + "\n}\n"
        [found] = programs.collectives(programs.parse(text), 8, 2, lambda _: 0.0, lambda _: 0.0)
        assert found.slices == hosts


# FLOPs


def test_flops_count_every_iteration_of_a_loop():
    def step(x, kernels):
        return jax.lax.scan(lambda x, kernel: (jax.checkpoint(jnp.tanh)(x @ kernel), None), x, kernels)[0].sum()

    x, kernels = jnp.zeros((8, 16)), jnp.zeros((5, 16, 16))
    once = 5 * 2 * 8 * 16 * 16
    assert programs.count_flops(jax.make_jaxpr(step)(x, kernels)).xla == once
    assert programs.count_flops(jax.make_jaxpr(jax.grad(step, (0, 1)))(x, kernels)).xla == 3 * once


@pytest.mark.parametrize(
    ("length", "window", "blocks", "matmuls"),
    # Blocks of 512 by 512. Through a window, 512 queries see up to three of keys; if it is narrow, 256 see two.
    [(512, 0, 1, 2 + 2 + 3), (1024, 0, 4, 2 + 3 + 4), (2560, 300, 5 * 3, 2 + 3 + 4), (2560, 64, 10 * 2 / 2, 2 + 3 + 4)],
)
def test_each_matmul_of_the_splash_kernel_is_counted_once(length, window, blocks, matmuls):
    heads = jax.ShapeDtypeStruct((2, length, 3, 64), jnp.bfloat16)

    def loss(query, key, value, sequence_ids):
        attended = splash_attention((query, key, value), sequence_ids, None, KernelOptions(window))
        return attended.astype(jnp.float32).sum()

    sequence_ids = jax.ShapeDtypeStruct((2, length), jnp.int32)
    traced = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(heads, heads, heads, sequence_ids)
    assert programs.count_flops(traced).pallas == matmuls * 2 * 2 * 3 * blocks * 512**2 * 64


def test_attention_by_cudnn_counts_two_matmuls_forward_and_five_backward(monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91_000)
    heads = jax.ShapeDtypeStruct((8, 512, 12, 64), jnp.bfloat16)

    def loss(query, key, value):
        attended = jax.nn.dot_product_attention(query, key, value, implementation="cudnn")
        return attended.astype(jnp.float32).sum()

    forward, both = (jax.make_jaxpr(one)(heads, heads, heads) for one in (loss, jax.grad(loss, (0, 1, 2))))
    matmul = 2 * 8 * 12 * 512 * 512 * 64
    assert programs.count_flops(forward).xla == 2 * matmul
    assert programs.count_flops(both).xla == 7 * matmul


def test_out_of_memory_messages_are_parsed():
    used = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Used 35.49G of 15.75G hbm. Exceeded hbm capacity"
    assert parse_out_of_memory(used, 7) == (round(35.49 * GIB), round(15.75 * GIB))
    temporaries = "the total memory required for HLO temporaries (1.50T) exceeds available HBM (95.74G)."
    assert parse_out_of_memory(temporaries, 7) == (round(1.5 * 2**40) + 7, round(95.74 * GIB))
    assert parse_out_of_memory("INTERNAL: something else", 7) is None


# The page


@pytest.mark.parametrize("platform", plans.FILES)
def test_the_page_shows_the_recorded_plans(platform):
    """Refresh it by `python -m benchmarks.plans --only none --page benchmarks/results/plans.md`."""
    assert plans.table(platform) in (ROOT / "benchmarks" / "results" / "plans.md").read_text(encoding="utf-8")
    assert plans.recorded(platform).keys() <= plans.plans().keys()


# Compilers

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra tpu")
needs_cuda = pytest.mark.skipif(
    not any(importlib.util.find_spec(plugin) for plugin in PLUGINS), reason="needs the extra gpu12 or gpu"
)


def real_plan(tmp_path: Path, name: str, *options: str) -> dict:
    file = tmp_path / "plan.json"
    line = [sys.executable, "-m", "bert_jax", "plan", "--config", "configs/bert_tiny.py", "--topology", name, *options]
    subprocess.run([*line, "--json", str(file)], cwd=ROOT, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices", "basis"),
    [
        pytest.param("v5litepod-4", 4, "cycles", marks=needs_libtpu),
        pytest.param("v4-8", 4, "cycles", marks=needs_libtpu),
        pytest.param("h100:4", 4, "roofline", marks=needs_cuda),
    ],
)
def test_a_real_plan(name, devices, basis, tmp_path):
    options = ("--seq_len=128", "--config.model.attention_dropout=0.0", "--config.model.layer_loop=scan")
    values = real_plan(tmp_path, name, *options)
    assert values["fits"] and values["devices"] == devices and values["step_seconds_basis"] == basis
    assert 0 < values["mfu"] < 1
    assert 0.6 < values["flops"]["program"] / values["flops"]["model"] < 1.3
    # The gradients of 4.4 M parameters, some of them in bfloat16, are reduced once.
    reduced = [one for one in values["collectives"] if one["kind"] in ("all-reduce", "reduce-scatter")]
    parameters = values["memory_bytes"]["parameters"]
    assert 0.5 * parameters < sum(one["bytes"] for one in reduced) < 2.2 * parameters


@pytest.mark.slow
@needs_libtpu
def test_a_step_that_exceeds_the_memory_is_reported_by_the_compiler(tmp_path):
    options = ("--seq_len=512", "--config.batch_size=4096", "--config.model.attention=einsum")
    values = real_plan(tmp_path, "v5litepod-1", *options)
    assert not values["fits"] and values["step_seconds"] is None
    assert values["memory_bytes"]["available"] == round(15.75 * GIB) < values["memory_bytes"]["total"]
    assert any("microbatches" in line for line in values["notes"])
