"""Compiles a train step for TPUs and reports its program and memory, or by how much the memory is exceeded."""

import math
import re
from dataclasses import dataclass
from typing import Any

import jax

from bert_jax.command import UserError
from bert_jax.planning import flops, hlo
from bert_jax.planning.abstract_step import AbstractStep
from bert_jax.planning.chips import GIB
from bert_jax.planning.flops import Flops

# libtpu 0.0.51 fails to build the step when gathers and scatters run on the SparseCore
# ("async-update instruction should have 1 operands"), and on tpu7x when all-reduces do. Training on
# real chips keeps the defaults.
_GATHERS = (
    "xla_tpu_enable_offloading_gather_to_sparsecore",
    "xla_tpu_enable_offloading_scatter_to_sparsecore",
    "xla_tpu_offload_gather_to_sparsecore",
)
_REDUCTIONS = (
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce",
    "xla_tpu_enable_sparse_core_collective_aggregator",
)
DISABLED_OPTIONS = {"v5p": _GATHERS, "v6e": _GATHERS, "tpu7x": _GATHERS + _REDUCTIONS}

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}
_SIZE = r"([\d.]+)([KMGTB]?)"
_USED = re.compile(rf"Used {_SIZE} of {_SIZE} hbm")
_TEMPORARIES = re.compile(rf"HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)")


@dataclass(frozen=True)
class Memory:
    """Bytes on one device. Activations are all that a step allocates: residuals, gradients, temporaries, the batch."""

    parameters: int
    optimizer: int
    activations: int
    available: int

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + self.activations

    @property
    def fits(self) -> bool:
        return self.total <= self.available


@dataclass(frozen=True)
class Compiled:
    """The result of a compilation; program is None if the step exceeds the memory, since the compiler then fails."""

    program: hlo.Program | None
    memory: Memory
    flops: Flops  # summed over all devices


def compile_step(step: AbstractStep) -> Compiled:
    """Compiles the step for the devices of its topology, which takes minutes. Raises UserError if libtpu fails."""
    traced = step.traced()
    counted = flops.count_flops(traced.jaxpr)
    state = step.state()
    parameters = bytes_per_device(state.params)
    optimizer = bytes_per_device(state) - parameters
    chip = step.topology.chip
    options = dict.fromkeys(DISABLED_OPTIONS.get(chip.name, ()), "false")
    try:
        built = traced.lower().compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        wanted = parse_out_of_memory(str(error), parameters + optimizer)
        if wanted is None:
            first = str(error).strip().splitlines()[0][:300]
            raise UserError(f"libtpu could not compile the step for {step.topology.name}: {first}") from error
        total, available = wanted
        return Compiled(None, Memory(parameters, optimizer, total - parameters - optimizer, available), counted)
    found = built.memory_analysis()
    total = (
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        - found.alias_size_in_bytes
        + found.temp_size_in_bytes
        + found.generated_code_size_in_bytes
    )
    memory = Memory(parameters, optimizer, max(total - parameters - optimizer, 0), int(chip.memory_bytes))
    return Compiled(hlo.parse(built.as_text()), memory, counted)


def parse_out_of_memory(message: str, arguments: int) -> tuple[int, int] | None:
    """Returns the bytes wanted and available in a compiler's out-of-memory message, or None for other messages.

    One form of the message counts only temporaries; the bytes of the arguments are added to it.
    """
    if match := _USED.search(message):
        return _bytes(match[1], match[2]), _bytes(match[3], match[4])
    if match := _TEMPORARIES.search(message):
        return _bytes(match[1], match[2]) + arguments, _bytes(match[3], match[4])
    return None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


def bytes_per_device(tree: Any) -> int:
    """Returns the bytes that a tree of arrays, or of shapes with shardings, takes on one device."""

    def size(leaf: Any) -> int:
        return math.prod(leaf.sharding.shard_shape(leaf.shape)) * int(leaf.dtype.itemsize)

    return sum(size(leaf) for leaf in jax.tree.leaves(tree))
