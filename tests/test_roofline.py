"""Tests of the memory traffic of a program: against XLA's analysis, and by hand for TPU memory spaces."""

import jax
import jax.numpy as jnp
import pytest

from bert_jax.planning import hlo
from bert_jax.planning.flops import Flops
from bert_jax.planning.roofline import bytes_moved
from bert_jax.planning.tpu_chips import CHIPS
from bert_jax.planning.tpu_step_time import roofline

SQUARE = jax.ShapeDtypeStruct((64, 64), jnp.float32)
V6E = CHIPS["v6e"]


def matmul(a, b):
    return jnp.tanh(a @ b) + a


def take_slice(a, b):
    return jax.lax.dynamic_slice(a, (3, 0), (5, 64)) * 2 + b[:5]


def update_in_place(a, b):
    return jax.lax.dynamic_update_slice(a, b[:4] * 2, (7, 0))


def sort_and_sum(a, b):
    return jnp.sort(a, axis=0).sum(axis=1) + b[0]


@pytest.mark.parametrize("work", [matmul, take_slice, update_in_place, sort_and_sum])
def test_bytes_moved_equal_those_of_xla(work):
    compiled = jax.jit(work).lower(SQUARE, SQUARE).compile()
    program = hlo.parse(compiled.as_text())
    found = sum(times * bytes_moved(program, one) for one, times in program.runs())
    assert found == compiled.cost_analysis()["bytes accessed"] > 0


# HLO that only the TPU compiler writes: S(1) is on-chip memory. A row is 1,024 bytes.
ON_TPU = """HloModule m

%negated (p: f32[1000,256]) -> (f32[1000,256], f32[1000,256]) {
  %p = f32[1000,256]{1,0} parameter(0)
  %n = f32[1000,256]{1,0} negate(%p)
  ROOT %both = (f32[1000,256]{1,0}, f32[1000,256]{1,0}) tuple(%n, %p)
}

%rows (all: f32[1000,256], at: s32[]) -> f32[10,256] {
  %all = f32[1000,256]{1,0} parameter(0)
  %at = s32[]{:S(6)} parameter(1)
  %flat = f32[1000,256]{1,0} bitcast(%all)
  ROOT %cut = f32[10,256]{1,0} dynamic-slice(%flat, %at, %at), dynamic_slice_sizes={10,256}
}

%around (q: f32[1000,256], r: s32[]) -> f32[10,256] {
  %q = f32[1000,256]{1,0} parameter(0)
  %r = s32[]{:S(6)} parameter(1)
  %inner = f32[10,256]{1,0} fusion(%q, %r), kind=kLoop, calls=%rows
  ROOT %minus = f32[10,256]{1,0} negate(%inner)
}

%added (into: f32[1000,256], where: s32[10], what: f32[10,256]) -> f32[1000,256] {
  %into = f32[1000,256]{1,0} parameter(0)
  %where = s32[10]{0} parameter(1)
  %what = f32[10,256]{1,0} parameter(2)
  %sums = f32[1000,256]{1,0} scatter(%into, %where, %what), to_apply=%add
  ROOT %same = f32[1000,256]{1,0} bitcast(%sums)
}

ENTRY %main (x: f32[1000,256], at.1: s32[], where.1: s32[10]) -> f32[1000,256] {
  %x = f32[1000,256]{1,0:T(8,128)} parameter(0)
  %at.1 = s32[]{:S(6)} parameter(1)
  %where.1 = s32[10]{0} parameter(2)
  %near = (f32[1000,256]{1,0:T(8,128)S(1)}, f32[1000,256]{1,0:T(8,128)}) fusion(%x), kind=kLoop, calls=%negated
  %first = f32[1000,256]{1,0:T(8,128)S(1)} get-tuple-element(%near), index=0
  %sliced = f32[10,256]{1,0} fusion(%x, %at.1), kind=kLoop, calls=%around
  %fetched = (f32[1000,256]{1,0:S(1)}, f32[1000,256]{1,0}, u32[]{:S(2)}) copy-start(%x)
  %fetched.done = f32[1000,256]{1,0:S(1)} copy-done(%fetched)
  %part = ((f32[1000,256]{1,0}), f32[20,256]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%x), slice={[0:20], [0:256]}
  %part.done = f32[20,256]{1,0:S(1)} slice-done(%part)
  %marker = f32[1000,256]{1,0:S(1)} custom-call(%first), custom_call_target="ConcatBitcast"
  %kernel = f32[1000,256]{1,0} custom-call(%first, %x), custom_call_target="tpu_custom_call"
  %looked = f32[10,256]{1,0:S(1)} gather(%x, %where.1), offset_dims={1}
  ROOT %summed = f32[1000,256]{1,0} fusion(%x, %where.1, %sliced), kind=kLoop, calls=%added
}
"""
ROW = 1024
MOVED = {
    "near": 2000 * ROW,  # reads one array and writes one of two results
    "sliced": 20 * ROW,  # a nested fusion reads only a slice
    "fetched": 1000 * ROW,
    "part.done": 20 * ROW,
    "kernel": 2000 * ROW,
    "looked": 10 * ROW,
    "summed": 20 * ROW + 40,  # in place: the rows read and written, and their indices
}


def test_on_chip_memory_costs_no_traffic():
    program = hlo.parse(ON_TPU)
    found = {one.name: bytes_moved(program, one) for one, _ in program.runs()}
    assert {name: size for name, size in found.items() if size} == MOVED


def test_a_fusion_computes_only_what_it_looks_up():
    """The logits of labels: of an array that a fusion changes element by element, it reads the elements it needs."""
    text = """%picked (all.1: f32[1000,256], wide: bf16[1000,256], rows: s32[10], one: f32[256]) -> f32[10,256] {
  %all.1 = f32[1000,256]{1,0} parameter(0)
  %wide = bf16[1000,256]{1,0} parameter(1)
  %rows = s32[10]{0} parameter(2)
  %one = f32[256]{0} parameter(3)
  %converted = f32[1000,256]{1,0} convert(%wide)
  %both = f32[1000,256]{1,0} add(%all.1, %converted)
  %row = f32[1000,256]{1,0} broadcast(%one), dimensions={1}
  %three = f32[1000,256]{1,0} add(%both, %row)
  ROOT %looked = f32[10,256]{1,0} gather(%three, %rows), offset_dims={1}
}

ENTRY %main (a: f32[1000,256], b: bf16[1000,256], c: s32[10], d: f32[256]) -> f32[10,256] {
  %a = f32[1000,256]{1,0} parameter(0)
  %b = bf16[1000,256]{1,0} parameter(1)
  %c = s32[10]{0} parameter(2)
  %d = f32[256]{0} parameter(3)
  ROOT %result = f32[10,256]{1,0} fusion(%a, %b, %c, %d), kind=kLoop, calls=%picked
}
"""
    program = hlo.parse(text)
    found = {one.name: bytes_moved(program, one) for one, _ in program.runs()}
    assert found["result"] == 10 * ROW + 10 * ROW + 10 * ROW // 2 + 10 * 4 + ROW


# Collectives in all forms that the compiler writes: plain, as start and done, and spread over fusions.
ON_SEVERAL = """HloModule m

%send (p.1: bf16[64,64]) -> (bf16[64,64], bf16[1024,64]) {
  %p.1 = bf16[64,64]{1,0} parameter(0)
  %all-gather.1 = bf16[1024,64]{1,0} all-gather(%p.1), channel_id=3, dimensions={0}
  ROOT %s = (bf16[64,64]{1,0}, bf16[1024,64]{1,0}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%meanwhile (p.2: bf16[64,64], w.2: f32[32]) -> (f32[32], bf16[1024,64]) {
  %p.2 = bf16[64,64]{1,0} parameter(0)
  %w.2 = f32[32]{0} parameter(1)
  %all-gather.2 = bf16[1024,64]{1,0} all-gather(%p.2), channel_id=3, dimensions={0}
  %n.2 = f32[32]{0} negate(%w.2)
  ROOT %m = (f32[32]{0}, bf16[1024,64]{1,0}) tuple(%n.2, %all-gather.2)
}

%receive (p.3: bf16[64,64]) -> bf16[1024,64] {
  %p.3 = bf16[64,64]{1,0} parameter(0)
  %all-gather.3 = bf16[1024,64]{1,0} all-gather(%p.3), channel_id=3, dimensions={0}
  ROOT %r = bf16[1024,64]{1,0} custom-call(%p.3, %all-gather.3), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: bf16[64,64], w: f32[32]) -> bf16[1024,64] {
  %x = bf16[64,64]{1,0} parameter(0)
  %w = f32[32]{0} parameter(1)
  %summed = bf16[64,64]{1,0} all-reduce(%x), channel_id=1, to_apply=%add
  %gathering = (bf16[64,64]{1,0}, bf16[1024,64]{1,0}) all-gather-start(%x), channel_id=2, dimensions={0}
  %gathered = bf16[1024,64]{1,0} all-gather-done(%gathering)
  %sent = (bf16[64,64]{1,0}, bf16[1024,64]{1,0}) fusion(%x), kind=kLoop, calls=%send
  %work = (f32[32]{0}, bf16[1024,64]{1,0}) fusion(%x, %w), kind=kLoop, calls=%meanwhile
  ROOT %received = bf16[1024,64]{1,0} fusion(%x), kind=kLoop, calls=%receive
}
"""


def test_collectives_are_left_out_of_the_bound_and_concurrent_work_is_not():
    program = hlo.parse(ON_SEVERAL)
    found = {one.name: bytes_moved(program, one) for one, _ in program.runs()}
    assert {name: size for name, size in found.items() if size} == {"work": 2 * 32 * 4}


# An all-reduce that matmuls hide passes its arrays through their fusions; the compiler names what stays in place.
UNDERWAY = """HloModule m

%matmul (sum: f32[1000,256], w: f32[16,256]) -> (f32[16,256], f32[1000,256], f32[1000,256]) {
  %sum = f32[1000,256]{1,0} parameter(0)
  %w = f32[16,256]{1,0} parameter(1)
  %n = f32[16,256]{1,0} negate(%w)
  %all-reduce.1 = f32[1000,256]{1,0} all-reduce(%sum), channel_id=1, to_apply=%add
  ROOT %t = (f32[16,256]{1,0}, f32[1000,256]{1,0}, f32[1000,256]{1,0}) tuple(%n, %sum, %all-reduce.1)
}

ENTRY %main (x: f32[1000,256], w.1: f32[16,256]) -> f32[16,256] {
  %x = f32[1000,256]{1,0} parameter(0)
  %w.1 = f32[16,256]{1,0} parameter(1)
  %hidden = (f32[16,256]{1,0}, f32[1000,256]{1,0}, f32[1000,256]{1,0}) fusion(%x, %w.1), kind=kOutput, calls=%matmul, \
backend_config={"aliasing_operands":{"lists":[{"indices":["0","3","4"]}]}}
  ROOT %result = f32[16,256]{1,0} get-tuple-element(%hidden), index=0
}
"""


@pytest.mark.parametrize(("lists", "bytes_of_sum"), [('{"indices":["0","3","4"]}', 0), ("", 2 * 1000 * ROW)])
def test_arrays_that_a_fusion_passes_on_in_place_are_not_moved(lists, bytes_of_sum):
    program = hlo.parse(UNDERWAY.replace('{"indices":["0","3","4"]}', lists))
    found = {one.name: bytes_moved(program, one) for one, _ in program.runs()}
    assert found["hidden"] == 2 * 16 * ROW + bytes_of_sum


def test_the_bound_is_the_slower_of_arithmetic_and_memory():
    program = hlo.parse(ON_TPU)
    traffic = sum(MOVED.values())
    least = roofline(program, V6E, Flops(xla=3e9, pallas=1e9), devices=2, head_width=64)
    assert least.traffic == traffic and least.memory == pytest.approx(traffic / V6E.memory_bandwidth)
    # Heads of 64 fill a quarter of a matrix unit of 256.
    assert least.arithmetic == pytest.approx((1.5e9 + 4 * 0.5e9) / V6E.peak_flops)
    assert least.lower_bound == max(least.arithmetic, least.memory)
