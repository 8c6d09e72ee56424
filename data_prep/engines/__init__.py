"""Where a job's work runs: in processes of this machine (local), a Beam pipeline (beam), or on a Ray cluster (ray).

An engine runs a function for each of some names, and yields the names as they are finished, in any order. The function
is picklable, may run more than once for a name, and writes its result to the job's folder (data_prep/cluster.py).
docs/data.md has the commands.
"""

import importlib.util
import shlex
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from typing import NamedTuple

from bert_jax.errors import UserError, install_hint
from data_prep import processes
from data_prep.processes import Task

_PACKAGES = {"beam": "apache_beam", "ray": "ray"}


class Engine(NamedTuple):
    """An engine with its settings, from `choose`."""

    name: str  # one of build_options.ENGINES
    workers: int  # processes; 0: all available
    flags: list[str]  # its own

    def run(self, task: Task, names: Sequence[str], finished: Callable[[], set[str]]) -> Iterator[str]:
        """Runs a task for each name, and yields finished ones.

        Args:
            finished: Looks up in the job's folder which names are finished.

        Raises:
            UserError: An option has a mistake, a service is missing, or workers were killed; what is finished is kept.
        """
        if not names:
            return
        if self.name == "beam":
            from data_prep.engines import beam

            yield from beam.run(task, names, finished, self.workers, self.flags)
        elif self.name == "ray":
            from data_prep.engines import ray

            yield from ray.run(task, names, self.workers, self.flags)
        else:
            yield from _run_here(task, names, self.workers or processes.cores())


def choose(name: str, workers: int, options: str) -> Engine:
    """Checks an engine's options.

    Args:
        options: The engine's own flags, in one string.

    Raises:
        UserError: They have a mistake, or a package is missing.
    """
    try:
        flags = shlex.split(options)
    except ValueError as error:
        raise UserError(f"--engine_options {options!r}: {error}") from None
    if name == "local" and flags:
        raise UserError("--engine_options is only for --engine beam and ray; leave it out for the local engine")
    if name in _PACKAGES and importlib.util.find_spec(_PACKAGES[name]) is None:
        raise UserError(f"--engine {name} needs packages that are not installed: {install_hint(name)}")
    return Engine(name, workers, flags)


def _run_here(task: Task, names: Sequence[str], workers: int) -> Iterator[str]:
    if min(workers, len(names)) == 1:
        for name in names:
            task(name)
            yield name
        return
    with processes.open_pool(min(workers, len(names))) as pool:
        futures = {pool.submit(task, name): name for name in names}
        try:
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
