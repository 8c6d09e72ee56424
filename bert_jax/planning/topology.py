"""Opens topologies by name: devices that programs can be compiled for but not run on.

TPUs and GPUs have their own modules for what differs: names and figures, the time of an instruction, the links between
devices, notes and advice (tpu_topology.py, gpu_topology.py and the modules that they import). The rest of a plan knows
the protocol below only.
"""

from typing import Any, Protocol, runtime_checkable

from bert_jax.command import UserError
from bert_jax.config import ModelConfig
from bert_jax.planning import gpu_topology, tpu_topology
from bert_jax.planning.collectives import Collective
from bert_jax.planning.flops import Flops
from bert_jax.planning.gpu_chips import GPUS
from bert_jax.planning.hlo import Program
from bert_jax.planning.memory import Memory
from bert_jax.planning.roofline import Roofline
from bert_jax.planning.step_time import StepTime
from bert_jax.planning.tpu_chips import CHIPS


@runtime_checkable
class Topology(Protocol):
    """Devices of one kind, and how the time of a step on them is estimated."""

    @property
    def name(self) -> str:
        """The name as given: v5e:16x16, h100:8."""

    @property
    def title(self) -> str:
        """The name, with the number of slices: 4 x v5e:16x16."""

    @property
    def platform(self) -> str:
        """The platform that programs are compiled for, as jax.default_backend() names it."""

    @property
    def capability(self) -> str:
        """The compute capability of NVIDIA GPUs, such as 9.0; empty for other devices."""

    @property
    def compiler(self) -> str:
        """The name of the compiler in messages."""

    @property
    def devices(self) -> tuple[Any, ...]:
        """All devices; those of a slice follow one another."""

    @property
    def slices(self) -> int:
        """The number of groups of devices with a slower network between them: TPU slices, hosts with GPUs."""

    @property
    def slice_name(self) -> str:
        """What such a group is called: slice, host."""

    @property
    def peak_flops(self) -> float:
        """The bfloat16 FLOPs per second of a device."""

    @property
    def memory_bytes(self) -> float:
        """The bytes of a device that a program can use."""

    @property
    def fused_attention(self) -> str:
        """The attention kernel of the platform that stores no scores, as a sentence names it."""

    @property
    def dropout_attention(self) -> str:
        """The kernel that stores no scores either, and has dropout, as model.attention names it."""

    @property
    def dropout_attention_status(self) -> str:
        """Why model.attention=auto did not take that kernel, as part of a sentence."""

    @property
    def time_basis(self) -> str:
        """One sentence that says what the time of an instruction is."""

    @property
    def compile_only_options(self) -> dict[str, Any]:
        """Compiler options that compiling without a device needs in addition to those of training."""

    def parse_out_of_memory(self, message: str, arguments: int) -> tuple[int, int] | None:
        """Returns the bytes wanted and available if a compiler's message says that memory is exceeded, else None.

        arguments   bytes of the step's arguments, which some messages leave out
        """

    def seconds(self, collective: Collective, sent: float) -> float:
        """Returns the time of `sent` of a collective's bytes."""

    def collectives(self, program: Program) -> list[Collective]:
        """Returns the collectives of a compiled program, the largest first, with what computation hides of them."""

    def flops(self, program: Program, counted: Flops) -> Flops:
        """Returns the FLOPs of a step on all devices, of which those in the traced function were counted."""

    def estimate(self, program: Program, flops: Flops, model: ModelConfig, exposed: float) -> tuple[StepTime, Roofline]:
        """Returns the time of a compiled step, and the least time that its work could take.

        flops     of all devices
        exposed   seconds in which a device waits for collectives
        """

    def assumptions(self, model: ModelConfig) -> dict[str, Any]:
        """Returns the assumed figures behind the time, for --json."""

    def notes(self, model: ModelConfig, flops: Flops, time: StepTime | None) -> list[str]:
        """Returns what a reader should know about how the figures were obtained on this kind of device."""

    def advice(self, memory: Memory, time: StepTime | None) -> list[str]:
        """Returns lines of advice that only hold for this kind of device."""


def open_topology(name: str, slices: int = 1) -> Topology:
    """Returns the description of a topology: this many slices of TPUs, or the hosts that the name of GPUs has.

    Raises UserError for an unknown name, for devices that the compiler does not know, and if the compiler is not
    installed.
    """
    kind = name.partition(":")[0]
    if kind in GPUS:
        if slices > 1:
            raise UserError(f"--slices is for TPUs; write several hosts of GPUs as {kind}:8x{slices}")
        return gpu_topology.open_hosts(name)
    if kind in CHIPS:
        return tpu_topology.open_slices(name, slices)
    raise UserError(
        f"unknown topology {name!r}; use one of TPUs such as {tpu_topology.EXAMPLES}, or of GPUs such as "
        f"{gpu_topology.EXAMPLES}"
    )
