"""A train step compiled for TPUs: its program and the memory it wants, or how much too much that is."""

import re
from dataclasses import dataclass
from typing import Any

import jax

from bert_jax.command import UserError
from bert_jax.planning import flops, hlo
from bert_jax.planning.chips import GIB
from bert_jax.planning.flops import Flops
from bert_jax.planning.step import Step

# libtpu 0.0.51 fails to build the step with gathers and scatters on the SparseCore ("async-update instruction should
# have 1 operands"), and on tpu7x with all-reduces there. Training on real chips leaves the defaults.
_GATHERS = (
    "xla_tpu_enable_offloading_gather_to_sparsecore",
    "xla_tpu_enable_offloading_scatter_to_sparsecore",
    "xla_tpu_offload_gather_to_sparsecore",
)
_REDUCTIONS = (
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce",
    "xla_tpu_enable_sparse_core_collective_aggregator",
)
SWITCHED_OFF = {"v5p": _GATHERS, "v6e": _GATHERS, "tpu7x": _GATHERS + _REDUCTIONS}

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}
_SIZE = r"([\d.]+)([KMGTB]?)"
_USED = re.compile(rf"Used {_SIZE} of {_SIZE} hbm")
_TEMPORARIES = re.compile(rf"HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)")


@dataclass(frozen=True)
class Memory:
    """Bytes of one device. Activations are all that a step makes: kept values, gradients, temporaries, the batch."""

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
    """program is None where the step wants more memory than there is: the compiler then gives none."""

    program: hlo.Program | None
    memory: Memory
    flops: Flops  # of all devices together


def compile_step(step: Step) -> Compiled:
    """Compiles for the devices of step.topology; takes a minute or several. Raises UserError where libtpu fails."""
    traced = step.traced()
    counted = flops.of_jaxpr(traced.jaxpr)
    state = step.state()
    parameters = bytes_of_device(state.params)
    optimizer = bytes_of_device(state) - parameters
    chip = step.topology.chip
    options = dict.fromkeys(SWITCHED_OFF.get(chip.name, ()), "false")
    try:
        built = traced.lower().compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        wanted = bytes_wanted(str(error), parameters + optimizer)
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


def bytes_wanted(message: str, arguments: int) -> tuple[int, int] | None:
    """What a compiler's out-of-memory message says was wanted and available, or None for another message.

    One form counts temporaries alone; the arguments are then added.
    """
    if match := _USED.search(message):
        return _bytes(match[1], match[2]), _bytes(match[3], match[4])
    if match := _TEMPORARIES.search(message):
        return _bytes(match[1], match[2]) + arguments, _bytes(match[3], match[4])
    return None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


def bytes_of_device(tree: Any) -> int:
    """Bytes of a tree of arrays, or of shapes with shardings, on one device."""

    def size(leaf: Any) -> int:
        shape = leaf.sharding.shard_shape(leaf.shape)
        count = 1
        for side in shape:
            count *= side
        return count * leaf.dtype.itemsize

    return sum(size(leaf) for leaf in jax.tree.leaves(tree))
