"""Tests of what planning reads from a compiled program: trip counts, times, collectives and FLOPs."""

from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from bert_jax.command import UserError
from bert_jax.config import ModelOptions
from bert_jax.model import sizes
from bert_jax.model.ops.attention_splash import splash_attention
from bert_jax.model.placement import Placement
from bert_jax.planning import flops, hlo
from bert_jax.planning.collectives import collectives, exposed_seconds
from bert_jax.planning.memory import GIB
from bert_jax.planning.topology import open_topology
from bert_jax.planning.tpu_chips import CHIPS
from bert_jax.planning.tpu_step_time import kernel_efficiency, step_time
from bert_jax.planning.tpu_topology import TpuTopology, parse_topology

PROGRAM = (Path(__file__).parent / "testdata" / "program.hlo").read_text(encoding="utf-8")
V5E = CHIPS["v5e"]
SLICE = TpuTopology("v5e:2x2", V5E, (), (2, 2))


@pytest.fixture(scope="module")
def program():
    return hlo.parse(PROGRAM)


def test_instructions_in_a_loop_run_once_per_iteration(program):
    times = {instruction.name: count for instruction, count in program.runs()}
    assert times["fusion.1"] == times["all-reduce-start.1"] == 12
    assert times["copy.1"] == 1
    assert "convolution.1" not in times  # part of a fusion
    assert program.loops_without_trip_count() == 0


def test_the_trip_count_of_a_scan_is_read_from_its_condition_and_other_loops_are_counted_as_unknown():
    unannotated = PROGRAM.replace(', backend_config={"known_trip_count":{"n":"12"}}', "")
    for text, unknown, runs in ((unannotated, 0, 12), (unannotated.replace("direction=LT", "direction=NE"), 1, 1)):
        program = hlo.parse(text)
        assert program.loops_without_trip_count() == unknown
        assert {instruction.name: count for instruction, count in program.runs()}["fusion.1"] == runs


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
    assert sum(times * (one.cycles or 0) for one, times in hlo.parse(text).runs()) == 20


def test_bytes_of_shapes():
    assert hlo.shape_bytes("bf16[64,128,768]{2,1,0:T(8,128)(2,1)S(1)}") == 64 * 128 * 768 * 2
    assert hlo.shape_bytes("(f32[]{:T(128)}, s8[3,5]{1,0}, pred[7]{0})") == 4 + 15 + 7
    assert hlo.shape_bytes("f8e4m3fn[16]{0}") == 16


def test_text_without_an_entry_computation_raises():
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.parse("HloModule empty\n")


def test_time_sums_cycles_by_kind_and_uses_bytes_without_cycles(program):
    time = step_time(program, V5E, pallas_flops=0.0, head_width=64, exposed_collectives=0.25)
    cycles = {name: seconds * V5E.clock for name, seconds in time.by_kind.items() if name != "unpriced"}
    assert cycles == pytest.approx({"products": 12 * 236_000, "elementwise": 12 * 64_000, "copies": 415_000})
    assert time.by_kind["unpriced"] > 0 and time.unpriced > 0  # the scatter
    assert time.total == pytest.approx(sum(time.by_kind.values()) + 0.25)


def test_a_pallas_kernel_is_counted_at_the_stated_share(program):
    time = step_time(program, V5E, pallas_flops=197e12, head_width=64, exposed_collectives=0.0)
    assert time.pallas == pytest.approx(1 / kernel_efficiency(V5E, 64)) == pytest.approx(4.0)
    assert time.total - time.without_pallas == pytest.approx(4.0)


def test_collectives_are_grouped_by_kind_and_size_with_their_overlap(program):
    found = {(one.kind, one.group): one for one in collectives(program, 4, SLICE.overlapped)}
    reduced = found["all-reduce", 4]
    assert reduced.count == 13 and reduced.bytes == 13 * 2304 * 4
    assert reduced.overlapped_bytes == 12 * 2304 * 4  # a matmul runs between start and done
    assert found["all-gather", 2].overlapped_bytes == 0
    exposed = exposed_seconds(found.values(), SLICE.seconds)
    # The group of four spans both axes, which are two chips long and have one link each; the pairs span one axis.
    assert exposed == pytest.approx((2 * 3 / 4 / 2 + 1 / 2) * 2304 * 4 / 4.5e10)


def test_an_all_reduce_ends_at_its_own_end_only():
    text = """ENTRY %main (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  %all-reduce-start = f32[64]{0} all-reduce-start(%x), replica_groups={{0,1}}
  %all-reduce-done = f32[64]{0} all-reduce-done(%all-reduce-start)
  %all-reduce-start.1 = f32[32]{0} all-reduce-start(%x), replica_groups={{0,1}}
  %work = f32[64]{0} fusion(%x), kind=kLoop, calls=%negated, backend_config={"estimated_cycles":"9"}
  ROOT %all-reduce-done.1 = f32[32]{0} all-reduce-done(%all-reduce-start.1)
}
"""
    (found,) = collectives(hlo.parse(text), 2, SLICE.overlapped)
    assert (found.bytes, found.overlapped_bytes) == (96 * 4, 32 * 4)


def test_a_collective_that_an_async_start_calls_overlaps_until_the_async_done():
    text = """%scattered (p: f32[64]) -> f32[32] {
  %p = f32[64]{0} parameter(0)
  ROOT %reduce-scatter.1 = f32[32]{0} reduce-scatter(%p), replica_groups={{0,1}}, dimensions={0}, to_apply=%add
}

ENTRY %main (x: f32[64]) -> f32[32] {
  %x = f32[64]{0} parameter(0)
  %begun = ((f32[64]{0}), f32[32]{0}) async-start(%x), calls=%scattered
  %work = f32[64]{0} fusion(%x), kind=kLoop, calls=%negated, backend_config={"estimated_cycles":"9"}
  ROOT %ended = f32[32]{0} async-done(%begun), calls=%scattered
}
"""
    (found,) = collectives(hlo.parse(text), 2, SLICE.overlapped)
    assert (found.kind, found.bytes, found.overlapped_bytes) == ("reduce-scatter", 256, 256)


# In the form that libtpu writes for two slices: gradients that are reduced between them, and a small array that is
# gathered, behind work of 94,000 cycles. The last transfer is one to the host alone.
BETWEEN_SLICES = (Path(__file__).parent / "testdata" / "slices_program.hlo").read_text(encoding="utf-8")


def test_collectives_between_slices_take_the_network_one_after_another():
    """The work hides part of the first transfer; the second one is sent before the work, but waits for the first."""
    slices = TpuTopology("v5e:2x2", V5E, tuple(range(8)), (2, 2), 2)
    reduced, gathered, within = slices.collectives(hlo.parse(BETWEEN_SLICES))
    size = 128 * 8 * 128 * 4.0
    seconds = 2 * 1 / 2 * size / 3.125e9  # a ring of two
    work = 94000 / V5E.clock
    assert (reduced.kind, reduced.group, reduced.slices, reduced.count, reduced.bytes) == ("all-reduce", 2, 2, 1, size)
    assert slices.seconds(reduced, size) == pytest.approx(seconds) and 0 < work < seconds
    assert reduced.overlapped_bytes == pytest.approx(size * work / seconds)
    assert (gathered.kind, gathered.bytes, gathered.overlapped_bytes) == ("all-gather", 2 * 1024, pytest.approx(0))
    assert (within.group, within.slices, within.bytes) == (4, 1, 1024)
    last = 1 / 2 * 2 * 1024 / 3.125e9
    assert exposed_seconds([reduced, gathered], slices.seconds) == pytest.approx(seconds - work + last)


def test_a_loop_sends_as_often_as_it_runs():
    loop = """
%condition (c: f32[128,8,128]) -> pred[] {
  ROOT %again = pred[] constant(true)
}

ENTRY %all (z: f32[128,8,128]) -> f32[128,8,128] {
  %z = f32[128,8,128]{2,1,0} parameter(0)
  ROOT %loop = f32[128,8,128] while(%z), condition=%condition, body=%main, backend_config={"known_trip_count":{"n":"3"}}
}
"""
    once, thrice = (
        TpuTopology("v5e:2x2", V5E, tuple(range(8)), (2, 2), 2).collectives(hlo.parse(text))[0]
        for text in (BETWEEN_SLICES, BETWEEN_SLICES.replace("ENTRY ", "") + loop)
    )
    assert (thrice.count, thrice.bytes) == (3, 3 * once.bytes)
    assert thrice.overlapped_bytes == pytest.approx(3 * once.overlapped_bytes)


def test_a_permute_within_each_of_several_slices_spans_one():
    """libtpu counts the devices of a slice where there are several of them."""
    permute = "collective-permute(%y), channel_id=2, source_target_pairs={{0,1},{1,3},{2,0},{3,2}}"
    text = BETWEEN_SLICES.replace("all-reduce(%y), replica_groups={{0,1,2,3}}, to_apply=%add", permute)
    slices = TpuTopology("v5e:2x2", V5E, tuple(range(8)), (2, 2), 2)
    (permuted,) = (one for one in slices.collectives(hlo.parse(text)) if one.kind == "collective-permute")
    assert (permuted.group, permuted.slices) == (4, 1)


@pytest.mark.parametrize(("name", "assumed"), [("v6e:4x4", False), ("tpu7x:2x2x2", True)])
def test_a_plan_of_several_slices_says_what_the_network_between_them_carries(name, assumed):
    chip, sides = parse_topology(name)
    one, two = (
        TpuTopology(name, chip, (SimpleNamespace(device_kind=""),) * slices, sides, slices) for slices in (1, 2)
    )
    model = sizes.model_config(ModelOptions(preset="tiny"), 100)
    assert not any("network" in note for note in one.notes(model, flops.Flops(), None))
    (note,) = (note for note in two.notes(model, flops.Flops(), None) if "network" in note)
    assert f"{chip.network_bandwidth / 1e9:g} GB/s" in note and ("(assumed)" in note) == assumed


FUSED = """HloModule m

%send (p.1: bf16[64,64]) -> (bf16[64,64], bf16[1024,64]) {
  %all-gather.1 = bf16[1024,64]{1,0} all-gather(%p.1), channel_id=3, replica_groups=[16,16]<=[256], dimensions={0}
  ROOT %s = (bf16[64,64]{1,0}, bf16[1024,64]{1,0}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%meanwhile (p.2: bf16[64,64]) -> bf16[64,64] {
  %all-gather.2 = bf16[1024,64]{1,0} all-gather(%p.2), channel_id=3, replica_groups=[16,16]<=[256], dimensions={0}
  ROOT %m = bf16[64,64]{1,0} negate(%p.2)
}

%receive (p.3: bf16[64,64]) -> bf16[1024,64] {
  %all-gather.3 = bf16[1024,64]{1,0} all-gather(%p.3), channel_id=3, replica_groups=[16,16]<=[256], dimensions={0}
  ROOT %r = bf16[1024,64]{1,0} custom-call(%p.3, %all-gather.3), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: bf16[64,64]) -> bf16[1024,64] {
  %x = bf16[64,64]{1,0} parameter(0)
  %begun = (bf16[64,64]{1,0}, bf16[1024,64]{1,0}) fusion(%x), kind=kCustom, calls=%send
  %work = bf16[64,64]{1,0} fusion(%x), kind=kLoop, calls=%meanwhile, backend_config={"estimated_cycles":"1500"}
  ROOT %ended = bf16[1024,64]{1,0} fusion(%begun, %work), kind=kCustom, calls=%receive
}
"""


@pytest.mark.parametrize(("cycles", "overlapped"), [('"estimated_cycles":"1500"', 1024 * 64 * 2), ("", 0)])
def test_a_collective_that_the_compiler_spreads_over_fusions_is_counted_once(cycles, overlapped):
    program = hlo.parse(FUSED.replace('"estimated_cycles":"1500"', cycles))
    (one,) = collectives(program, 256, SLICE.overlapped)
    assert (one.kind, one.group, one.count, one.bytes) == ("all-gather", 16, 1.0, 1024 * 64 * 2)
    assert one.overlapped_bytes == overlapped
    unpriced = step_time(program, V5E, pallas_flops=0.0, head_width=64, exposed_collectives=0.0).unpriced
    assert unpriced == (0 if cycles else 1)  # the fusions that start and end it do no computation


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
    chip, sides = parse_topology(name)
    assert TpuTopology(name, chip, (), sides).links(group) == links


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1},{2,3}}", 2),
        ("[2,4]<=[8]", 4),
        ("{}", 8),
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_0'}", 4),
        ("mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_0','axis_2'}", 4),
        ("mesh['axis_0'=8] {'axis_0':(2)2}", 2),
    ],
)
def test_the_group_size_is_read_from_every_notation(groups, size):
    line = f"  %all-reduce.1 = f32[64]{{0}} all-reduce(%x), replica_groups={groups}, use_global_device_ids=true"
    found = collectives(hlo.parse("ENTRY %main (x: f32[64]) -> f32[64] {\n" + line + "\n}\n"), devices=8)
    assert [(one.group, one.bytes) for one in found] == [(size, 256.0)]


def test_flops_count_every_iteration_of_a_loop():
    def step(x, kernels):
        return jax.lax.scan(lambda x, kernel: (jax.checkpoint(jnp.tanh)(x @ kernel), None), x, kernels)[0].sum()

    x, kernels = jnp.zeros((8, 16)), jnp.zeros((5, 16, 16))
    once = 5 * 2 * 8 * 16 * 16
    assert flops.count_flops(jax.make_jaxpr(step)(x, kernels)).xla == once
    assert flops.count_flops(jax.make_jaxpr(jax.grad(step, (0, 1)))(x, kernels)).xla == 3 * once


@pytest.mark.parametrize(
    ("length", "window", "blocks", "matmuls"),
    # Blocks of 512 by 512. Through a window, 512 queries see up to three of keys; if it is narrow, 256 see two.
    [(512, 0, 1, 2 + 2 + 3), (1024, 0, 4, 2 + 3 + 4), (2560, 300, 5 * 3, 2 + 3 + 4), (2560, 64, 10 * 2 / 2, 2 + 3 + 4)],
)
def test_each_matmul_of_the_splash_kernel_is_counted_once(length, window, blocks, matmuls):
    heads = jax.ShapeDtypeStruct((2, length, 3, 64), jnp.bfloat16)

    def loss(query, key, value, sequence_ids):
        attended = splash_attention(query, key, value, sequence_ids, window=window, causal=False, placement=Placement())
        return attended.astype(jnp.float32).sum()

    sequence_ids = jax.ShapeDtypeStruct((2, length), jnp.int32)
    traced = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(heads, heads, heads, sequence_ids)
    assert flops.count_flops(traced).pallas == matmuls * 2 * 2 * 3 * blocks * 512**2 * 64


def test_out_of_memory_messages_are_parsed():
    used = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Used 35.49G of 15.75G hbm. Exceeded hbm capacity"
    assert SLICE.parse_out_of_memory(used, 7) == (round(35.49 * GIB), round(15.75 * GIB))
    temporaries = "the total memory required for HLO temporaries (1.50T) exceeds available HBM (95.74G)."
    assert SLICE.parse_out_of_memory(temporaries, 7) == (round(1.5 * 2**40) + 7, round(95.74 * GIB))
    assert SLICE.parse_out_of_memory("INTERNAL: something else", 7) is None


def test_topology_names_are_parsed():
    assert parse_topology("v5e:16x16") == (V5E, (16, 16))
    assert parse_topology("tpu7x:2x2x4")[1] == (2, 2, 4)


@pytest.mark.parametrize("name", ["v9:2x2", "v5e", "v5e:2x2x1", "v4:4x4", "v5e:0x2", "v5e:axb", "v5e:2x2;"])
def test_an_unknown_topology_is_refused_with_examples(name):
    with pytest.raises(UserError, match=r"unknown topology .*v5e:16x16"):
        parse_topology(name)


def test_a_slice_larger_than_the_largest_is_refused():
    with pytest.raises(UserError, match="at most 256 chips; use --slices"):
        parse_topology("v5e:32x32")


def test_without_libtpu_the_error_gives_the_install_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"run pip install --editable '.*\[tpu\]' \(no TPU needed\)$"):
        open_topology("v5e:2x2")


def test_clocks_equal_the_published_ones():
    # Austin et al. 2025, part 2: "1.5GHz on TPU v5e"; the others by the same arithmetic.
    assert {name: round(chip.clock / 1e9, 2) for name, chip in CHIPS.items() if name != "tpu7x"} == {
        "v4": 1.05,
        "v5e": 1.5,
        "v5p": 1.75,
        "v6e": 1.75,
    }
