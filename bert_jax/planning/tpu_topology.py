"""Describes TPU slices by name, such as v5e:16x16, with libtpu on a machine without a TPU."""

import importlib.util
import math
import os
import re
from dataclasses import dataclass
from typing import Any

import jax

from bert_jax.command import UserError, install_hint
from bert_jax.config import ModelConfig
from bert_jax.planning.collectives import Collective, collectives
from bert_jax.planning.flops import Flops
from bert_jax.planning.hlo import Instruction, Program
from bert_jax.planning.memory import GIB, Memory
from bert_jax.planning.roofline import Roofline
from bert_jax.planning.slice_transfers import slice_transfers
from bert_jax.planning.step_time import StepTime
from bert_jax.planning.tpu_chips import ASSUMED_NETWORK, CHIPS, Chip
from bert_jax.planning.tpu_step_time import kernel_efficiency, roofline, step_time
from bert_jax.train import compiler

EXAMPLES = "v4:2x2x4, v5e:4x4, v5e:16x16, v5p:4x4x4, v6e:8x8, tpu7x:2x2x2"

# libtpu queries a TPU machine's metadata server for its name and neighbours, and waits for an answer
# on other machines; it logs while it compiles; and it allows only one process at a time, to protect
# real chips.
LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}
_SIZE = r"([\d.]+)([KMGTB]?)"
_USED = re.compile(rf"Used {_SIZE} of {_SIZE} hbm")
_TEMPORARIES = re.compile(rf"HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)")


@dataclass(frozen=True)
class TpuTopology:
    """Slices of one shape (planning.topology.Topology)."""

    name: str
    chip: Chip
    devices: tuple[Any, ...]
    sides: tuple[int, ...]  # chips along each axis of a slice
    slices: int = 1
    platform: str = "tpu"
    capability: str = ""
    compiler: str = "libtpu"
    slice_name: str = "slice"
    fused_attention: str = "the splash kernel"
    dropout_attention: str = "flash"
    dropout_attention_status: str = "opt-in: compiled for such devices, but untested on one"
    time_basis: str = "Times are the compiler's cycle counts, with loop bodies counted as often as they run."

    @property
    def title(self) -> str:
        return self.name if self.slices == 1 else f"{self.slices} x {self.name}"

    @property
    def peak_flops(self) -> float:
        return self.chip.peak_flops

    @property
    def memory_bytes(self) -> float:
        return self.chip.memory_bytes

    @property
    def compile_only_options(self) -> dict[str, Any]:
        return {}

    def parse_out_of_memory(self, message: str, arguments: int) -> tuple[int, int] | None:
        """One form of the message counts only temporaries; the bytes of the arguments are added to it."""
        if match := _USED.search(message):
            return _bytes(match[1], match[2]), _bytes(match[3], match[4])
        if match := _TEMPORARIES.search(message):
            return _bytes(match[1], match[2]) + arguments, _bytes(match[3], match[4])
        return None

    def seconds(self, collective: Collective, sent: float) -> float:
        """A ring over the links of a slice, or between slices over the data-center network."""
        links = self.chip.link_bandwidth * self.links(collective.group)
        return collective.ring_seconds(sent, self.chip.network_bandwidth if collective.slices > 1 else links)

    def collectives(self, program: Program) -> list[Collective]:
        between = slice_transfers(program, self.slices, self.seconds, 1 / self.chip.clock) if self.slices > 1 else []
        within = collectives(program, len(self.devices), self.overlapped, self.slices)
        return sorted(between + within, key=lambda one: -one.bytes)

    def overlapped(self, program: Program, collective: Collective, between: list[Instruction]) -> float:
        """Returns 1 if any computation, an instruction with estimated cycles, stands between start and end."""
        return float(any(one.cycles and one.opcode in ("fusion", "convolution", "custom-call") for one in between))

    def flops(self, program: Program, counted: Flops) -> Flops:
        return counted

    def estimate(self, program: Program, flops: Flops, model: ModelConfig, exposed: float) -> tuple[StepTime, Roofline]:
        devices, head_width = len(self.devices), model.width // model.heads
        pallas_flops = flops.pallas / devices
        time = step_time(
            program, self.chip, pallas_flops=pallas_flops, head_width=head_width, exposed_collectives=exposed
        )
        # Causal and windowed masks skip blocks of a kernel's grid, and the program does not say which, so
        # their kernels do not count towards the lower bound.
        least_flops = Flops(flops.xla, flops.pallas * (not (model.causal or model.window)))
        return time, roofline(program, self.chip, least_flops, devices, head_width)

    def assumptions(self, model: ModelConfig) -> dict[str, Any]:
        return {"kernel_efficiency": kernel_efficiency(self.chip, model.width // model.heads)}

    def notes(self, model: ModelConfig, flops: Flops, time: StepTime | None) -> list[str]:
        notes = []
        if off := compiler.DISABLED.get(self.devices[0].device_kind):
            notes.append(f"compiled with {len(off)} options off, because libtpu fails with them: {', '.join(off)}")
        if self.chip.cores > 1:
            notes.append(
                f"{self.chip.name}: a device is one of the {self.chip.cores} cores of a chip, as libtpu compiles for it"
            )
        if self.slices > 1:
            notes.append(
                f"collectives between slices are rings over the data-center network, "
                f"{self.chip.network_bandwidth * 1e-9:.4g} GB/s from each device"
                + (" (assumed)" if self.chip.name in ASSUMED_NETWORK else "")
                + ", one after another; the way to the host counts as free"
            )
        if flops.pallas and time:
            share = kernel_efficiency(self.chip, model.width // model.heads)
            notes.append(
                f"Pallas kernels are counted at {share:.0%} of the peak, since the compiler estimates no cycles for "
                "them"
            )
        if time and time.unpriced:
            notes.append(
                f"{time.unpriced} instructions (gathers, scatters) have no estimated cycles and are counted by their "
                "bytes"
            )
        return notes

    def advice(self, memory: Memory, time: StepTime | None) -> list[str]:
        return []

    def links(self, group: int) -> float:
        """Returns how many links of a device a group of devices can use at once.

        The group spans as few axes of the slice as hold it. An axis that wraps around gives two links;
        a line gives one, since its last device receives from one side only. The devices of one chip
        share the chip's links.
        """
        left, links = math.ceil(group / self.chip.cores), 0
        for side, wraps in sorted(zip(self.sides, self.chip.wraps_around(self.sides), strict=True), reverse=True):
            if side > 1 and left > 1:
                links += 2 if wraps else 1
                left = math.ceil(left / side)
        return max(links, 1) / self.chip.cores


def parse_topology(name: str) -> tuple[Chip, tuple[int, ...]]:
    """Parses KIND:AxB or KIND:AxBxC into chip and sides. Raises UserError for any other name."""
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)+)", name)
    if not match or match[1] not in CHIPS:
        raise UserError(
            f"unknown topology {name!r}; use KIND:AxB or KIND:AxBxC in chips, with KIND one of "
            f"{', '.join(CHIPS)}: {EXAMPLES}"
        )
    chip, sides = CHIPS[match[1]], tuple(int(side) for side in match[2].split("x"))
    if len(sides) != chip.dimensions or not all(sides):
        wanted = "x".join("ABC"[: chip.dimensions])
        raise UserError(
            f"unknown topology {name!r}; {chip.name} has {chip.dimensions} axes ({chip.name}:{wanted}): {EXAMPLES}"
        )
    if math.prod(sides) > chip.largest:
        raise UserError(
            f"unknown topology {name!r}; a slice of {chip.name} has at most {chip.largest} chips; use --slices for more"
        )
    return chip, sides


def open_slices(name: str, slices: int = 1) -> TpuTopology:
    """Returns the description of this many slices of a topology.

    Raises UserError for an unknown name, for a slice that libtpu does not know, and if libtpu is not
    installed.
    """
    chip, sides = parse_topology(name)
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(f"libtpu, the TPU compiler, is not installed; run {install_hint('tpu')} (no TPU needed)")
    for variable, value in LIBTPU_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    # Imported here because the import is slow and makes libtpu write to standard error.
    from jax.experimental import topologies

    options: dict[str, Any] = {}
    if math.prod(sides) == 1:  # libtpu assumes several chips per host unless this is set
        options["chips_per_host_bounds"] = [1, 1, 1]
    if chip.name == "v4":  # jax presents the two cores of a chip as one device
        options["chip_config_name"] = "megacore"
    if slices > 1:
        options["num_slices"] = slices
    try:
        found = topologies.get_topology_desc(name, "tpu", **options)
    except (jax.errors.JaxRuntimeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"libtpu refuses topology {name!r} ({_first_line(error)}); use one such as {EXAMPLES}"
        ) from error
    return TpuTopology(name, chip, tuple(found.devices), sides, slices)


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
