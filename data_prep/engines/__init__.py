"""Where work units run: on this machine (local), in a Beam pipeline (beam), on a Ray cluster (ray).

An engine takes a function of a job's folder and a unit, and the stream of units; it yields the records, in any order.
`work` is picklable, gives the same wherever and however often it runs, and needs nothing of the folder but the
tokenizer. docs/engines.md has the commands.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from bert_jax.command import UserError
from data_prep.engines import local
from data_prep.engines.remote import Work
from data_prep.job import UnitRecord
from data_prep.units import Unit

NAMES = ("local", "beam", "ray")


def begin(name: str, workers: int) -> None:
    """Starts what takes its time, before `run` is called with the same."""
    if name == "local":
        local.begin(workers)


def run(
    name: str, work: Work, units: Iterable[Unit], workers: int, *, directory: Path, options: str = ""
) -> Iterator[UnitRecord]:
    """Runs the units of the job whose folder is `directory` on one of NAMES.

    workers is the number of processes, 0 for what is there; options are flags of the engine's own, in one string.
    Memory does not grow with the number of units. Raises UserError, with the finished units kept, for a mistake in
    the options, a package or a service that is not there, and workers that are killed.
    """
    if name == "local":
        if options.strip():
            raise UserError("--engine_options is for --engine beam and ray; the local engine has none")
        return local.run(work, units, workers, directory)
    if name == "beam":
        from data_prep.engines import beam

        return beam.run(work, units, workers, directory, options)
    from data_prep.engines import ray

    return ray.run(work, units, workers, directory, options)
