"""TPU slices by name, as v5e:16x16, described by libtpu on a machine that has none."""

import importlib.util
import math
import os
import re
from dataclasses import dataclass
from typing import Any

import jax

from bert_jax.command import UserError
from bert_jax.planning.chips import CHIPS, Chip

EXAMPLES = "v4:2x2x4, v5e:4x4, v5e:16x16, v5p:4x4x4, v6e:8x8, tpu7x:2x2x2"

# libtpu asks a TPU machine's metadata server for its name and neighbours, and elsewhere waits for an answer; it logs
# while it compiles; and it lets one process alone have it, for the sake of real chips.
ALONE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

# The two cores of a v4 as one device, which is what jax makes of them on real ones.
AS_ONE_DEVICE = {"v4": "megacore"}


@dataclass(frozen=True)
class Topology:
    """A slice: its name, what it is made of, and devices that programs can be compiled for but not run on."""

    name: str
    chip: Chip
    devices: tuple[Any, ...]
    sides: tuple[int, ...]  # chips of a slice along each axis
    slices: int = 1

    @property
    def title(self) -> str:
        """4 x v5e:16x16 for four slices of it."""
        return self.name if self.slices == 1 else f"{self.slices} x {self.name}"

    def links(self, group: int) -> float:
        """Links of a device that a group of so many devices can use at once.

        As few axes of the slice as hold the group; two links on each whose ends are joined, and one on others, where
        the last device of a line is fed from one side. Where a chip has two devices they share its links.
        """
        left, links = math.ceil(group / self.chip.cores), 0
        for side, joined in sorted(zip(self.sides, self.chip.joined(self.sides), strict=True), reverse=True):
            if side > 1 and left > 1:
                links += 2 if joined else 1
                left = math.ceil(left / side)
        return max(links, 1) / self.chip.cores


def read_name(name: str) -> tuple[Chip, tuple[int, ...]]:
    """The chip and the sides of KIND:AxB or KIND:AxBxC. Raises UserError for what is no such name."""
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)+)", name)
    if not match or match[1] not in CHIPS:
        raise UserError(
            f"no topology {name!r}; it is KIND:AxB or KIND:AxBxC of {', '.join(CHIPS)}, in chips, as {EXAMPLES}"
        )
    chip, sides = CHIPS[match[1]], tuple(int(side) for side in match[2].split("x"))
    if len(sides) != chip.dimensions or not all(sides):
        wanted = "x".join("ABC"[: chip.dimensions])
        raise UserError(
            f"no topology {name!r}; {chip.name} has {chip.dimensions} axes, {chip.name}:{wanted}: {EXAMPLES}"
        )
    if math.prod(sides) > chip.largest:
        raise UserError(
            f"no topology {name!r}; a slice of {chip.name} has {chip.largest} chips at most: use --slices for more"
        )
    return chip, sides


def open_topology(name: str, slices: int = 1) -> Topology:
    """So many slices of that name.

    Raises UserError for a name that is none, for a slice that libtpu does not know, and where libtpu is not installed.
    """
    chip, sides = read_name(name)
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("libtpu, the TPUs' compiler, is not installed; it needs no TPU: pip install 'bert_jax[tpu]'")
    for variable, value in ALONE.items():
        os.environ.setdefault(variable, value)
    # Only here: it takes time, and libtpu writes to standard error.
    from jax.experimental import topologies

    options: dict[str, Any] = {}
    if math.prod(sides) == 1:  # a host has several chips; a slice of one has to be told that its host has one
        options["chips_per_host_bounds"] = [1, 1, 1]
    if chip.name in AS_ONE_DEVICE:
        options["chip_config_name"] = AS_ONE_DEVICE[chip.name]
    if slices > 1:
        options["num_slices"] = slices
    try:
        found = topologies.get_topology_desc(name, "tpu", **options)
    except (jax.errors.JaxRuntimeError, ValueError, RuntimeError) as error:
        raise UserError(f"no topology {name!r} by libtpu ({_first_line(error)}); use one as {EXAMPLES}") from error
    return Topology(name, chip, tuple(found.devices), sides, slices)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
