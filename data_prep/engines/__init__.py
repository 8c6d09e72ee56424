"""Where work units run: on this machine (local), in a Beam pipeline (beam), or on a Ray cluster (ray).

An engine takes units and a function that builds a unit in a job's folder, and yields the records in any order. The
function is picklable, gives the same result wherever and however often it runs, and reads only the tokenizer in the
folder. docs/data.md has the commands.
"""

import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

from bert_jax.errors import UserError, install_hint
from data_prep import processes
from data_prep.engines.remote import Work
from data_prep.job import UnitRecord
from data_prep.units import Unit

_PACKAGES = {"beam": "apache_beam", "ray": "ray"}


def run(
    name: str, work: Work, units: Iterable[Unit], workers: int, *, directory: Path, options: str = ""
) -> Iterator[UnitRecord]:
    """Runs the units of the job in `directory`. Memory does not grow with the number of units.

    Args:
        name: One of build_options.ENGINES.
        workers: Number of processes; 0: all available.
        options: The engine's own flags, in one string.

    Raises:
        UserError: An option has a mistake, a package or service is missing, or workers were killed; the finished units
            are kept.
    """
    if name == "local":
        if options.strip():
            raise UserError("--engine_options is only for --engine beam and ray; leave it out for the local engine")
        return processes.run_units(work, units, workers, directory)
    if importlib.util.find_spec(_PACKAGES[name]) is None:
        raise UserError(f"--engine {name} needs packages that are not installed: {install_hint(name)}")
    if name == "beam":
        from data_prep.engines import beam

        return beam.run(work, units, workers, directory, options)
    from data_prep.engines import ray

    return ray.run(work, units, workers, directory, options)
