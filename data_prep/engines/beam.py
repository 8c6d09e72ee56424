"""Units in a Beam pipeline: of several processes here (DirectRunner), or on Dataflow, Flink or Spark.

A pipeline takes all its elements before it starts, and most runners keep small elements in memory. So the text of the
units is first written to a folder that all workers reach, and one pipeline runs over their names: neither this process
nor a runner holds more than a few units, and a service that takes minutes to start is started once. What a unit
gave is left in the same folder and put in place here as it appears, so progress is seen with every runner.
"""

import contextlib
import importlib.util
import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bert_jax.command import Parser, UserError
from bert_jax.storage.remote import Folder
from data_prep.engines import beam_pipeline
from data_prep.engines.local import cores
from data_prep.engines.remote import KEPT, Work, missing, pack_tokenizer, pack_unit, put_in_place, split_options
from data_prep.job import UnitRecord
from data_prep.units import Unit

# Listing a bucket costs a request.
_SECONDS_BETWEEN_LOOKS, _SECONDS_BETWEEN_FAR_LOOKS = 0.3, 5.0
_SECONDS_TO_STOP = 30.0


def run(work: Work, units: Iterable[Unit], workers: int, directory: Path, options: str) -> Iterator[UnitRecord]:
    """Runs units in one Beam pipeline; workers are the processes of DirectRunner, 0 one for each core.

    options   pipeline options (--runner=DataflowRunner --project=...), and --exchange=FOLDER for the text and the
              results while the job runs; by default a folder in `directory`

    Raises UserError when the pipeline fails.
    """
    if importlib.util.find_spec("apache_beam") is None:
        raise missing("beam")
    given, flags = _options(options)
    for left in (directory / "job").glob("exchange-*"):  # by a run that was killed
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
                ended = answer.poll(_SECONDS_BETWEEN_LOOKS if exchange.is_local else _SECONDS_BETWEEN_FAR_LOOKS)
                results = {name.rpartition("/")[2] for name in exchange.names(beam_pipeline.RESULTS)}
                for found in sorted(waiting & results):
                    record = put_in_place(directory, exchange.read(f"{beam_pipeline.RESULTS}/{found}"))
                    waiting.remove(found)
                    # In this order: a worker that tries the unit again and finds no text knows that it is done.
                    exchange.remove(f"{beam_pipeline.UNITS}/{found}")
                    exchange.remove(f"{beam_pipeline.RESULTS}/{found}")
                    yield record
            _check_answer(answer, waiting)
    finally:
        exchange.clear()


def _options(options: str) -> tuple[Any, list[str]]:
    parser = Parser("data_prep.build_examples --engine beam --engine_options", "Flags of the beam engine.")
    parser.add_argument("--exchange", metavar="FOLDER", help="that all workers reach")
    return parser.parse_known_args(split_options(options))


def _exchange(address: str) -> Folder:
    """The folder through which this process and the workers exchange units and results."""
    try:
        return Folder(address)
    except UserError as error:
        raise UserError(f"--exchange {error}") from None


@contextlib.contextmanager
def _started(task: "beam_pipeline.Task", names: list[str], workers: int, flags: list[str]) -> Iterator[Connection]:
    """The pipeline in a process of its own; gives the end where its answer will come.

    A process, since DirectRunner cannot be asked to stop, and its workers end with their process group.
    """
    context = multiprocessing.get_context("spawn")
    answer, to_answer = context.Pipe(duplex=False)
    process = context.Process(target=beam_pipeline.main, args=(task, names, workers, flags, to_answer))
    process.start()
    to_answer.close()
    try:
        yield answer
    finally:
        # SIGTERM cancels a pipeline elsewhere.
        process.terminate()
        process.join(_SECONDS_TO_STOP)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()


def _check_answer(answer: Connection, waiting: set[str]) -> None:
    """Raises UserError unless the pipeline ended well and no unit is left."""
    try:
        problem = answer.recv()
    except EOFError:
        problem = "its process was killed"
    if problem is None and waiting:
        problem = f"{len(waiting)} units, as {min(waiting)}, gave nothing"
    if problem is None:
        return
    if told := beam_pipeline.told(problem):
        raise UserError(told)
    lines = [line.strip() for line in problem.splitlines() if line.strip()] or ["no word why"]
    raise UserError(f"the Beam pipeline failed ({lines[-1]}); {KEPT}")
