"""The cycles that the TPU compiler estimates for plain matmuls and sums, compared with their lower bounds.

    python -m benchmarks.tpu_cycles [--only v6e]

A plan (`bert-jax plan`) derives its time from the compiler's cycles. Here they are measured for single
instructions on one device of each kind of TPU, and compared with the arithmetic at peak speed or the traffic at full
memory bandwidth, whichever takes longer. Prints one JSON line each, and the table of
docs/decisions/planning_and_accelerators.md. Needs libtpu (pip install '.[tpu]') but no TPU; takes a quarter of a
minute per kind.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import common
from bert_jax import command

# A small slice of each kind; one of its devices is used.
SLICES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
# Rows, contracted dimension, columns, in bfloat16: 32,768 tokens in the layers of BERT-Base, and a large square.
PRODUCTS = ((32768, 768, 768), (32768, 768, 3072), (32768, 3072, 768), (8192, 8192, 8192))
SUMMED = (65536, 768)


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("python -m benchmarks.tpu_cycles", __doc__ or "")
    parser.add_argument("--only", choices=SLICES, help="one kind of TPU")
    flags = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    found = {kind: shares(kind) for kind in SLICES if flags.only in (None, kind)}
    print(f"| | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|", sep="\n")
    for work in next(iter(found.values())):
        print(f"| {work} | {' | '.join(f'{values[work]:.0%}' for values in found.values())} |")


def shares(kind: str) -> dict[str, float]:
    """The lower bound as a share of the compiler's time, for each operation on a kind of TPU."""
    import jax.numpy as jnp

    found = {}
    for rows, inner, columns in PRODUCTS:
        name = f"product of [{rows:,}, {inner:,}] and [{inner:,}, {columns:,}]"
        shapes = [((rows, inner), jnp.bfloat16), ((inner, columns), jnp.bfloat16)]
        found[name] = share(kind, jnp.matmul, shapes, 2.0 * rows * inner * columns)
    for dtype in ("bfloat16", "float32"):
        found[f"sum of two [{SUMMED[0]:,}, {SUMMED[1]:,}], {dtype}"] = share(kind, jnp.add, [(SUMMED, dtype)] * 2, 0.0)
    for name, value in found.items():
        common.emit("tpu_cycles", value, "least time / compiler's", None, None, {"chip": kind, "work": name})
    return found


def share(kind: str, work: Callable[..., Any], arrays: Sequence[tuple[tuple[int, ...], Any]], flops: float) -> float:
    """The lower bound of the time of a function, which has so many FLOPs, as a share of the compiler's time."""
    import jax
    from jax.sharding import SingleDeviceSharding

    from bert_jax.planning import hlo
    from bert_jax.planning.flops import Flops
    from bert_jax.planning.tpu_step_time import roofline
    from bert_jax.planning.tpu_topology import open_slices

    topology = open_slices(SLICES[kind])
    where = SingleDeviceSharding(topology.devices[0])
    shapes = [jax.ShapeDtypeStruct(shape, dtype, sharding=where) for shape, dtype in arrays]
    text = jax.jit(work, out_shardings=where).lower(*shapes).compile().as_text()
    program = hlo.parse(text or "")
    cycles = sum(times * (one.cycles or 0) for one, times in program.runs())
    least = roofline(program, topology.chip, Flops(xla=flops), devices=1, head_width=topology.chip.unit)
    return least.lower_bound / (cycles / topology.chip.clock)


if __name__ == "__main__":
    command.run(main)
