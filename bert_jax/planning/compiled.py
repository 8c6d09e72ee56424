"""Compiles a train step for a topology and reports its program and memory, or by how much the memory is exceeded."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from jax.experimental.compilation_cache import compilation_cache

from bert_jax.command import UserError
from bert_jax.planning import flops, hlo
from bert_jax.planning.abstract_step import AbstractStep
from bert_jax.planning.flops import Flops
from bert_jax.planning.memory import Memory, bytes_per_device


@dataclass(frozen=True)
class Compiled:
    """The result of a compilation; program is None if the compiler failed because the step exceeds the memory."""

    program: hlo.Program | None
    memory: Memory
    flops: Flops  # summed over all devices


def compile_step(step: AbstractStep) -> Compiled:
    """Compiles the step for the devices of its topology, which takes minutes. Raises UserError if the compiler fails.

    The compiler gets the options of training (train/compiler.py), and those that compiling without a device needs.
    """
    traced = step.traced()
    counted = flops.count_flops(traced.jaxpr)
    state = step.state()
    parameters = bytes_per_device(state.params)
    optimizer = bytes_per_device(state) - parameters
    topology = step.topology
    try:
        with _without_cache():
            built = traced.lower().compile(compiler_options=topology.compile_only_options or None)
    except jax.errors.JaxRuntimeError as error:
        wanted = topology.parse_out_of_memory(str(error), parameters + optimizer)
        if wanted is None:
            first = str(error).strip().splitlines()[0][:300]
            raise UserError(f"{topology.compiler} could not compile the step for {topology.name}: {first}") from error
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
    memory = Memory(parameters, optimizer, max(total - parameters - optimizer, 0), int(topology.memory_bytes))
    return Compiled(hlo.parse(built.as_text()), memory, counted)


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Leaves the cache of compiled programs alone: jax writes those of absent devices there, and fails to read them."""
    enabled = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # else jax keeps to what it found before
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()
