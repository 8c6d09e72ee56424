"""The structure of training steps that the compilers of TPUs and GPUs make: arrays that must not exist, and reductions.

Each claim also holds for its opposite: the array exists without the option that removes it. `make compilers` installs
the extras that these tests need, and no device.
"""

import functools
import importlib.util
import math
import re

import pytest

from bert_jax.config import MaskedLM, MeshConfig, ModelOptions, PretrainConfig
from bert_jax.errors import UserError
from bert_jax.planning import program as programs
from bert_jax.planning.compile import AbstractStep, RowSpec, bytes_per_device, compile_step
from bert_jax.planning.program import Collective, Program, collectives
from bert_jax.planning.topology import PLUGINS, open_topology
from bert_jax.train import sharding

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra tpu")
needs_cuda = pytest.mark.skipif(
    not any(importlib.util.find_spec(plugin) for plugin in PLUGINS), reason="needs the extra gpu12 or gpu"
)
TPU = pytest.param("v5e:2x2", marks=needs_libtpu, id="v5e")
GPU = pytest.param("h100:4", marks=needs_cuda, id="h100")
pytestmark = pytest.mark.slow

LENGTH, VOCABULARY, ROWS = 256, 2048, 16
SMALL = {"layers": 2, "width": 128, "heads": 2, "feed_forward": 512, "max_positions": 320}


@functools.cache
def compiled(
    topology: str,
    *,
    preset: str = "tiny",
    pack: int = 1,
    microbatches: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    slices: int = 1,
    **model: object,
) -> tuple[AbstractStep, Program]:
    """A step of 16 rows of 256 positions, and its program."""
    config = PretrainConfig(
        model=ModelOptions(preset=preset, **{**SMALL, **model}),
        batch_size=ROWS,
        microbatches=microbatches,
        objective=MaskedLM(next_sentence=False),
        mesh=MeshConfig(fsdp=fsdp, tensor=tensor),
    )
    rows = RowSpec(LENGTH, pack, predictions=40, vocab_size=VOCABULARY, labelled=False)
    step = AbstractStep.of(config, open_topology(topology, slices), rows)
    program = compile_step(step).program
    assert program is not None
    return step, program


def arrays(program: Program) -> set[tuple[int, ...]]:
    """The dimensions of all results of instructions that run, those inside fusions excluded."""
    found = set()
    for instruction, _ in program.runs():
        shapes = re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", instruction.shape)
        found |= {tuple(map(int, shape.split(","))) for shape in shapes}
    return found


def has_square(program: Program) -> bool:
    """Whether an array has the scores of attention, [B, N, T, T], or their mask, [B, 1, T, T].

    Compilers write them with fewer axes, too: [B * N, T, T], [B, T, T].
    """
    return any(len(sizes) >= 3 and sizes.count(LENGTH) >= 2 for sizes in arrays(program))


@pytest.mark.parametrize(
    ("shape", "square"),
    [
        ("bf16[4,2,256,256]{3,2,1,0}", True),
        ("pred[4,1,256,256]{3,2,1,0}", True),
        ("(pred[4,256,256]{2,1,0}, u8[16]{0})", True),
        ("f32[8,256,256]{2,1,0}", True),
        ("bf16[4,256,2,64]{3,2,1,0}", False),
        ("f32[256,256]{1,0}", False),
    ],
)
def test_scores_and_masks_are_seen_in_every_shape(shape, square):
    text = f"ENTRY %main (x: f32[2]) -> {shape} {{\n  ROOT %made = {shape} fusion(%x), kind=kLoop, calls=%body\n}}\n"
    assert has_square(programs.parse(text)) == square


def has_logits(program: Program) -> bool:
    """Whether an array has the vocabulary's logits of all predictions of a device, 40 in each of its rows."""
    logits = ROWS // 4 * 40 * VOCABULARY
    return any(VOCABULARY in sizes and math.prod(sizes) >= logits for sizes in arrays(program))


@pytest.mark.parametrize(
    ("topology", "kernel"),
    [pytest.param("v5e:2x2", "flash", marks=needs_libtpu), pytest.param("h100:4", "triton", marks=needs_cuda)],
)
def test_the_kernels_with_dropout_store_no_scores(topology, kernel):
    """With the dropout of the preset."""
    found = [has_square(compiled(topology, attention=chosen)[1]) for chosen in ("einsum", kernel)]
    assert found == [True, False]


@needs_cuda
def test_attention_with_dropout_stores_no_scores_on_hopper_by_default():
    assert not has_square(compiled("h100:4")[1])


@needs_cuda
def test_cudnn_reads_lengths_instead_of_a_mask_where_rows_hold_one_sequence():
    found = [has_square(compiled("h100:4", attention="cudnn", attention_dropout=0.0, pack=pack)[1]) for pack in (3, 1)]
    assert found == [True, False]


@pytest.mark.parametrize("topology", [TPU, GPU])
def test_chunks_of_the_vocabulary_leave_no_array_of_all_logits(topology):
    found = [has_logits(compiled(topology, **chunks)[1]) for chunks in ({}, {"logits_at_once": 256})]
    assert found == [True, False]


@pytest.mark.parametrize("topology", [TPU, GPU])
def test_layers_that_differ_are_scanned_without_a_branch(topology):
    _, program = compiled(topology, preset="modernbert_base", layers=7, layer_loop="scan")
    opcodes = {one.opcode for instructions in program.computations.values() for one in instructions}
    assert "while" in opcodes and "conditional" not in opcodes


def sent(program: Program, devices: int, slices: int = 1) -> list[Collective]:
    """The program's collectives, whose times do not matter here."""
    return collectives(program, devices, slices, transfer_seconds=lambda _: 0.0, work_seconds=lambda _: 0.0)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("topology", [TPU, GPU])
def test_devices_that_share_no_parameters_reduce_gradients_once_a_step(topology, microbatches):
    step, program = compiled(topology, **({} if microbatches == 1 else {"microbatches": microbatches}))
    reduced = sum(one.bytes for one in sent(program, 4) if one.kind in ("all-reduce", "reduce-scatter"))
    params = step.state().params
    # Those of matmuls may be reduced in bfloat16, and the two parts of the token table's gradient apart.
    whole, table = bytes_per_device(params), bytes_per_device(params["embeddings"]["token"]["table"])
    assert 0.5 * whole < reduced <= whole + table + 1000


@needs_libtpu
def test_libtpu_takes_requested_options_and_those_that_it_lacks_are_left_out(monkeypatch, capsys):
    mesh = sharding.make_mesh(MeshConfig(), open_topology("v5e:2x2").devices)
    ours = sharding.default_options("TPU v5 lite", 4, overlap=True)
    monkeypatch.setitem(sharding.ON_SEVERAL, "TPU v5 lite", ours | {"xla_tpu_of_another_version": "true"})
    requested = (("xla_enable_async_all_reduce", False),)
    assert sharding.options(mesh, requested, overlap=True) == ours | dict(requested)
    assert "has no option xla_tpu_of_another_version" in capsys.readouterr().err
    with pytest.raises(UserError, match="'xla_tpu_of_another_version'"):
        sharding.options(mesh, (("xla_tpu_of_another_version", True),))


@needs_libtpu
def test_slices_reduce_what_is_left_after_the_reduction_within_each():
    """Each of the four chips of a slice exchanges a fourth of the gradients with its peer, in padded layouts."""
    step, program = compiled("v5e:2x2", slices=2)
    found = [one for one in sent(program, 8, 2) if one.slices == 2]
    assert {(one.kind, one.group) for one in found} == {("all-reduce", 2)}
    quarter = bytes_per_device(step.state().params) / 4
    assert quarter < sum(one.bytes for one in found) < 2 * quarter


@pytest.mark.parametrize("topology", [TPU, GPU])
def test_with_tensor_microbatches_add_no_gather_and_no_scatter(topology):
    _, program = compiled(topology, fsdp=2, tensor=2, microbatches=4)
    moves = [(one.opcode, times) for one, times in program.runs() if re.match("all-gather|reduce-scatter", one.opcode)]
    assert moves and {times for _, times in moves} == {1}


@needs_cuda
def test_no_matmul_on_gpus_has_a_single_row():
    """The gradient of a bias as a product with a row of ones would be one; sums of such gradients are reductions."""
    _, program = compiled("h100:4")
    products = [one for one, _ in program.runs() if "__cublas" in one.text or one.opcode == "dot"]
    sizes = [tuple(map(int, re.findall(r"\d+", one.shape.partition("[")[2].partition("]")[0]))) for one in products]
    assert len(sizes) > 10 and all(min(shape[-2:]) > 1 for shape in sizes)
