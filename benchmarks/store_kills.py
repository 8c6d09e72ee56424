"""Kills a run whose workdir is in an object store, and compares it with an uninterrupted one on disk (law 4).

    python -m benchmarks.store_kills              100 SIGKILLs of a run on gs:// of a local emulator: bit-equal?
    python -m benchmarks.store_kills --store s3   the same on s3://

Kills fall at random instants, as in benchmarks/chaos.py. The stores are fake-gcs-server with preconditions
(benchmarks/gcs_emulator.py) and moto (benchmarks/s3_emulator.py), so this needs the extra `stores`. Prints one JSON
line, and exits with code 2 if anything differs that must not.
"""

import os
import tempfile
import unittest.mock
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import chaos, common, gcs_emulator, s3_emulator
from bert_jax import command
from bert_jax.command import UserError
from bert_jax.storage.location import location

EMULATORS = {"gs": gcs_emulator, "s3": s3_emulator}
# Of the encoder, not of the run: a small one leaves the time to requests and saves, where kills matter.
SMALL = (
    "--config.model.layers=1",
    "--config.model.width=32",
    "--config.model.heads=4",
    "--config.model.feed_forward=48",
)


def killed_in_a_store(data: Path, work: Path, kills: int, steps: int, seed: int, workdir: str) -> dict[str, Any]:
    """Runs the command on a workdir in a store, killed `kills` times; returns what chaos.fixed does."""
    with unittest.mock.patch.dict(os.environ, TMPDIR=str(work)):  # where chaos watches what is staged
        return chaos.fixed(data, work, kills, steps, seed, SMALL, killed=location(workdir))


def measure(store: str, kills: int, steps: int, seed: int) -> dict[str, Any]:
    """Runs it on an emulator, prints the JSON line, and raises UserError if anything differs."""
    if missing := EMULATORS[store].missing():
        raise UserError(missing)
    with tempfile.TemporaryDirectory() as folder, EMULATORS[store].emulator() as variables:
        os.environ.update(variables)
        work = Path(folder)
        figures = killed_in_a_store(chaos.shards(work), work, kills, steps, seed, f"{store}://bucket/killed")
    settings = figures | {"recipe": "bert_tiny", "layers": 1, "width": 32, "batch_size": chaos.ROWS, "seed": seed}
    unit = f"tensors or files that differ after {kills} SIGKILLs"
    name = "store kills" if store == "gs" else f"store kills, {store}"
    result = common.emit(name, float(len(figures["differing"])), unit, None, None, settings, lower_is_better=True)
    chaos.check("fixed", figures)
    return result


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("python -m benchmarks.store_kills", __doc__ or "")
    parser.add_argument("--store", choices=tuple(EMULATORS), default="gs", help="the kind of store (default: gs)")
    parser.add_argument("--kills", type=int, default=100, help="number of SIGKILLs (default: 100)")
    parser.add_argument("--steps", type=int, default=1200, help="training steps (default: 1200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random instants (default: 0)")
    flags = parser.parse_args(arguments)
    measure(flags.store, flags.kills, flags.steps, flags.seed)


if __name__ == "__main__":
    command.run(main)
