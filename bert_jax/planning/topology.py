"""Describes TPU slices by name, such as v5e:16x16, with libtpu on a machine without a TPU."""

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

# libtpu queries a TPU machine's metadata server for its name and neighbours, and waits for an answer
# on other machines; it logs while it compiles; and it allows only one process at a time, to protect
# real chips.
LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclass(frozen=True)
class Topology:
    """A slice: its name, its kind of chip, and devices that programs can be compiled for but not run on."""

    name: str
    chip: Chip
    devices: tuple[Any, ...]
    sides: tuple[int, ...]  # chips along each axis of a slice
    slices: int = 1

    @property
    def title(self) -> str:
        """The name with the number of slices: 4 x v5e:16x16."""
        return self.name if self.slices == 1 else f"{self.slices} x {self.name}"

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


def open_topology(name: str, slices: int = 1) -> Topology:
    """Returns the description of this many slices of a topology.

    Raises UserError for an unknown name, for a slice that libtpu does not know, and if libtpu is not
    installed.
    """
    chip, sides = parse_topology(name)
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("libtpu, the TPU compiler, is not installed; run: pip install 'bert_jax[tpu]' (no TPU needed)")
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
    return Topology(name, chip, tuple(found.devices), sides, slices)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
