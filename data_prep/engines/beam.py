"""Runs units in a Beam pipeline: in several local processes (DirectRunner), or on Dataflow, Flink or Spark.

A pipeline takes all its elements before it starts, and most runners keep small elements in memory. So the text of the
units is first written to an exchange folder that all workers can reach, and one pipeline runs over their names: neither
this process nor a runner holds more than a few units, and a service that takes minutes to start is started once. The
results appear in the same folder and are moved into the job's folder at once, so every runner shows progress.
"""

import contextlib
import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bert_jax.command_line import Parser
from bert_jax.errors import UserError
from bert_jax.storage.remote import Folder
from data_prep.engines import beam_pipeline
from data_prep.engines.remote import KEPT, Work, pack_tokenizer, pack_unit, put_in_place, split_options
from data_prep.processes import cores
from data_prep.resumable import UnitRecord
from data_prep.units import Unit

# Listing a bucket costs a request, so stores are polled less often.
_LOCAL_POLL_SECONDS, _REMOTE_POLL_SECONDS = 0.3, 5.0
_SECONDS_TO_STOP = 30.0


def run(work: Work, units: Iterable[Unit], workers: int, directory: Path, options: str) -> Iterator[UnitRecord]:
    """Runs units in one Beam pipeline; workers is the number of DirectRunner processes, 0 for one per core.

    options   pipeline options (--runner=DataflowRunner --project=...), and --exchange=FOLDER for the text and the
              results while the job runs; by default a folder in `directory`

    Raises UserError if the pipeline fails.
    """
    given, flags = _options(options)
    for left in (directory / "job").glob("exchange-*"):  # by a killed run
        shutil.rmtree(left, ignore_errors=True)
    name = os.urandom(8).hex()
    exchange = _exchange(f"{(given.exchange or str(directory / 'job')).rstrip('/')}/exchange-{name}")
    waiting = set()
    try:
        for unit in units:
            exchange.write(f"{beam_pipeline.UNITS}/{unit.name}", pack_unit(unit))
            waiting.add(unit.name)
        if not waiting:
            return
        exchange.write(beam_pipeline.TOKENIZER, pack_tokenizer(directory))
        task = beam_pipeline.Task(work, name, exchange.address)
        with _started(task, sorted(waiting), workers or cores(), flags) as answer:
            ended = False
            while not ended:
                ended = answer.poll(_REMOTE_POLL_SECONDS if "://" in exchange.address else _LOCAL_POLL_SECONDS)
                results = {name.rpartition("/")[2] for name in exchange.names(beam_pipeline.RESULTS)}
                for found in sorted(waiting & results):
                    record = put_in_place(directory, exchange.read(f"{beam_pipeline.RESULTS}/{found}"))
                    waiting.remove(found)
                    # In this order: a worker that retries the unit and finds no text knows that it is finished.
                    exchange.remove(f"{beam_pipeline.UNITS}/{found}")
                    exchange.remove(f"{beam_pipeline.RESULTS}/{found}")
                    yield record
            _check_answer(answer, waiting)
    finally:
        exchange.clear()


def _options(options: str) -> tuple[Any, list[str]]:
    parser = Parser(
        "bert-jax build-examples --engine beam --engine_options",
        "Options of the beam engine; all other options go to Beam.",
    )
    parser.add_argument("--exchange", metavar="FOLDER", help="a folder that all workers can reach")
    return parser.parse_known_args(split_options(options))


def _exchange(address: str) -> Folder:
    """The folder through which this process and the workers exchange units and results."""
    try:
        return Folder(address)
    except UserError as error:
        raise UserError(f"--exchange {error}") from None


@contextlib.contextmanager
def _started(task: "beam_pipeline.Task", names: list[str], workers: int, flags: list[str]) -> Iterator[Connection]:
    """Runs the pipeline in a separate process; yields the connection on which its answer arrives.

    DirectRunner cannot be stopped, but a process can, and its workers end with their process group.
    """
    context = multiprocessing.get_context("spawn")
    answer, to_answer = context.Pipe(duplex=False)
    process = context.Process(target=beam_pipeline.main, args=(task, names, workers, flags, to_answer))
    process.start()
    to_answer.close()
    try:
        yield answer
    finally:
        # SIGTERM makes the process cancel a remote pipeline.
        process.terminate()
        process.join(_SECONDS_TO_STOP)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()


def _check_answer(answer: Connection, waiting: set[str]) -> None:
    """Raises the error of a worker, or UserError, unless the pipeline succeeded and no unit is left."""
    try:
        problem = answer.recv()
    except EOFError:
        problem = "its process was killed"
    if problem is None and waiting:
        problem = f"{len(waiting)} units, such as {min(waiting)}, have no result"
    if problem is None:
        return
    if error := beam_pipeline.error_in(problem):
        raise error
    lines = [line.strip() for line in problem.splitlines() if line.strip()] or ["no reason given"]
    raise UserError(f"the Beam pipeline failed ({lines[-1]}); {KEPT}")
