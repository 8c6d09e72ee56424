"""Kills a run whose workdir is in Google Cloud Storage, and compares it with an uninterrupted one on disk (law 4).

    python -m benchmarks.store_kills              100 SIGKILLs of a run on gs:// of a local emulator: bit-equal?

Kills fall at random instants, as in benchmarks/chaos.py. The store is fake-gcs-server with preconditions
(benchmarks/gcs_emulator.py), so this needs the extra `stores`. Prints one JSON line, and exits with code 2 if anything
differs that must not.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import chaos, common, gcs_emulator
from bert_jax import command
from bert_jax.command import UserError
from bert_jax.storage.location import location

WORKDIR = "gs://bucket/killed"
# Of the encoder, not of the run: a small one leaves the time to requests and saves, where kills matter.
SMALL = (
    "--config.model.layers=1",
    "--config.model.width=32",
    "--config.model.heads=4",
    "--config.model.feed_forward=48",
)


def killed_in_a_store(data: Path, work: Path, kills: int, steps: int, seed: int) -> dict[str, Any]:
    """Runs the command on a store of its own, killed `kills` times; returns what chaos.fixed does."""
    with gcs_emulator.emulator() as variables:
        os.environ.update(variables)
        return chaos.fixed(data, work, kills, steps, seed, SMALL, killed=location(WORKDIR))


def measure(kills: int, steps: int, seed: int) -> dict[str, Any]:
    """Runs it, prints the JSON line, and raises UserError if anything differs."""
    if missing := gcs_emulator.missing():
        raise UserError(missing)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        figures = killed_in_a_store(chaos.shards(work), work, kills, steps, seed)
    settings = figures | {"recipe": "bert_tiny", "layers": 1, "width": 32, "batch_size": chaos.ROWS, "seed": seed}
    unit = f"tensors or files that differ after {kills} SIGKILLs"
    result = common.emit(
        "store kills", float(len(figures["differing"])), unit, None, None, settings, lower_is_better=True
    )
    chaos.check("fixed", figures)
    return result


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("benchmarks.store_kills", __doc__ or "")
    parser.add_argument("--kills", type=int, default=100, help="number of SIGKILLs (default: 100)")
    parser.add_argument("--steps", type=int, default=1200, help="training steps (default: 1200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random instants (default: 0)")
    flags = parser.parse_args(arguments)
    measure(flags.kills, flags.steps, flags.seed)


if __name__ == "__main__":
    command.run(main)
