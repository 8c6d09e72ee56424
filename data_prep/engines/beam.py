"""Runs units in a Beam pipeline: in several local processes (DirectRunner), or on Dataflow, Flink or Spark.

A pipeline takes all its elements before it starts, and most runners keep small elements in memory. So this module first
writes the units' text to an exchange folder that all workers can reach, and then runs one pipeline over their names.
Neither this process nor a runner holds more than a few units, and a service that takes minutes to start is started
once. Results appear in the same folder and move to the job's folder as they come, so every runner shows progress.
"""

import contextlib
import functools
import logging
import multiprocessing
import os
import platform
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bert_jax.command_line import Parser, explain_os_error
from bert_jax.errors import RunAgain, UserError
from bert_jax.storage.remote import Folder
from data_prep.engines.remote import Work, do_unit, pack_tokenizer, pack_unit, put_in_place, split_options, unpack_unit
from data_prep.job import UnitRecord
from data_prep.processes import KEPT, KILLED, cores
from data_prep.units import Unit

# Names in the exchange folder.
UNITS, RESULTS, TOKENIZER = "units", "results", "tokenizer.tar"
# Listing a bucket costs a request, so stores are polled less often.
_LOCAL_POLL_SECONDS, _REMOTE_POLL_SECONDS = 0.3, 5.0
_SECONDS_TO_STOP = 30.0


def run(work: Work, units: Iterable[Unit], workers: int, directory: Path, options: str) -> Iterator[UnitRecord]:
    """Runs units in one Beam pipeline.

    Args:
        workers: DirectRunner processes; 0: one per core.
        options: Pipeline options (--runner=DataflowRunner --project=...), and --exchange=FOLDER for the text and the
            results while the job runs; by default a folder in `directory`.

    Raises:
        UserError: The pipeline fails.
    """
    parser = Parser(
        "bert-jax build-examples --engine beam --engine_options",
        "Options of the beam engine; all other options go to Beam.",
    )
    parser.add_argument("--exchange", metavar="FOLDER", help="a folder that all workers can reach")
    own, flags = parser.parse_known_args(split_options(options))
    for left in (directory / "job").glob("exchange-*"):  # by a killed run
        shutil.rmtree(left, ignore_errors=True)
    job = os.urandom(8).hex()
    try:
        exchange = Folder(f"{(own.exchange or str(directory / 'job')).rstrip('/')}/exchange-{job}")
    except UserError as error:
        raise UserError(f"--exchange {error}") from None
    waiting = set()
    try:
        for unit in units:
            exchange.write(f"{UNITS}/{unit.name}", pack_unit(unit))
            waiting.add(unit.name)
        if not waiting:
            return
        exchange.write(TOKENIZER, pack_tokenizer(directory))
        task = functools.partial(_do, work, job, exchange.address)
        with _started(task, sorted(waiting), workers or cores(), flags) as answer:
            # The results are listed once more after the answer, because the last ones may have appeared just before it.
            ended = False
            while not ended:
                ended = answer.poll(_REMOTE_POLL_SECONDS if "://" in exchange.address else _LOCAL_POLL_SECONDS)
                results = {name.rpartition("/")[2] for name in exchange.names(RESULTS)}
                for name in sorted(waiting & results):
                    record = put_in_place(directory, exchange.read(f"{RESULTS}/{name}"))
                    waiting.remove(name)
                    # In this order: if a worker retries the unit and finds no text, the unit is finished.
                    exchange.remove(f"{UNITS}/{name}")
                    exchange.remove(f"{RESULTS}/{name}")
                    yield record
            _check_answer(answer, waiting)
    finally:
        exchange.clear()


@contextlib.contextmanager
def _started(task: Callable[[str], None], names: list[str], workers: int, flags: list[str]) -> Iterator[Connection]:
    """Runs the pipeline in a separate process; yields the connection on which its answer arrives."""
    # DirectRunner cannot be stopped, but a process can, and its workers end with their process group.
    context = multiprocessing.get_context("spawn")
    answer, to_answer = context.Pipe(duplex=False)
    process = context.Process(target=_run_pipeline, args=(task, names, workers, flags, to_answer))
    process.start()
    # This process's copy would keep the pipe open, so that the death of the other process would go unnoticed.
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
    """Raises a worker's error, or UserError if the pipeline failed or units are left."""
    try:
        problem = answer.recv()
    except EOFError:
        problem = "its process was killed"
    if problem is None and waiting:
        problem = f"{len(waiting)} units, such as {min(waiting)}, have no result"
    if problem is None:
        return
    if marked := _MARKED.search(problem):
        raise (RunAgain if marked[1] == "RunAgain" else UserError)(marked[2])
    lines = [line.strip() for line in problem.splitlines() if line.strip()] or ["no reason given"]
    raise UserError(f"the Beam pipeline failed ({lines[-1]}); {KEPT}")


# The pipeline's process, and its workers' task. Functions import Beam, so that the job's own process never does.

_SECONDS_TO_CANCEL = 30.0
# A worker's error is marked in the text of an exception, because a runner passes on only that text.
_MARKED = re.compile(r"\[\[build_examples (\w+): (.*?)(?: :build_examples\]\]|\Z)", re.DOTALL)


def _mark(kind: str, problem: object) -> str:
    return f"[[build_examples {kind}: {problem} :build_examples]]"


class _Stopped(BaseException):
    pass


def _run_pipeline(
    task: Callable[[str], None], names: list[str], workers: int, flags: list[str], answer: Connection
) -> None:
    """Runs the pipeline, answers None or the problem, and exits with all processes that it started.

    The parent handles Ctrl-C. SIGTERM cancels the pipeline, and so does the end of the parent, whatever its cause.
    """

    def stop(number: int, frame: Any) -> None:
        raise _Stopped

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(_SECONDS_TO_CANCEL)
        os.killpg(os.getpid(), signal.SIGKILL)

    def thread_failed(failed: threading.ExceptHookArgs) -> None:
        # DirectRunner waits forever for a worker that was killed, and only one of its threads fails.
        if "Worker subprocess exited" in str(failed.exc_value):
            answer.send(_mark("UserError", KILLED))
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            threading.__excepthook__(failed)

    # A process group of its own, so that the pipeline and its workers can be killed together.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, stop)
    threading.Thread(target=end_with_parent, daemon=True).start()
    threading.excepthook = thread_failed
    logging.getLogger().setLevel(logging.ERROR)  # Beam warns of packages that are not installed and of its own options
    result = None
    try:
        import apache_beam

        runner, options = _runner(workers, flags)
        pipeline = apache_beam.Pipeline(runner=runner, options=options)
        _ = pipeline | apache_beam.Create(names) | apache_beam.Map(task)
        result = pipeline.run()
        state = result.wait_until_finish()
        answer.send(None if state == "DONE" else f"it ended as {state}")
    except _Stopped:
        if result is not None:
            result.cancel()
    except BaseException as error:
        answer.send(f"{type(error).__name__}: {error}")
    finally:
        answer.close()
        os.killpg(os.getpid(), signal.SIGKILL)


def _runner(workers: int, flags: list[str]) -> tuple[Any, Any]:
    """Returns the runner and options for some flags; DirectRunner gets `workers` processes."""
    from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions

    options = PipelineOptions(flags)
    if options.view_as(StandardOptions).runner not in (None, "DirectRunner"):
        logging.getLogger().setLevel(logging.INFO)  # a service logs where its job can be watched
        return None, options
    # The name DirectRunner would first search the network for a runner written in Go.
    from apache_beam.portability.api import beam_provision_api_pb2
    from apache_beam.runners.portability.fn_api_runner import FnApiRunner, fn_runner
    from apache_beam.runners.portability.portable_runner import JobServiceHandle

    mode = "multi_processing" if workers > 1 else "in_memory"
    defaults = [f"--direct_num_workers={workers}", f"--direct_running_mode={mode}"]
    for_processes = JobServiceHandle.encode_pipeline_options({"default_sdk_harness_log_level": "ERROR"})
    provision = beam_provision_api_pb2.ProvisionInfo(pipeline_options=for_processes)
    runner = FnApiRunner(provision_info=fn_runner.ExtendedProvisionInfo(provision))
    return runner, PipelineOptions([*defaults, *flags])


def _do(work: Work, job: str, address: str, name: str) -> None:
    """On a worker: builds a unit, unless an earlier attempt at the same bundle has done so."""
    try:
        exchange = Folder(address)
        tokenizer = functools.partial(read_tokenizer, exchange)
        packed = exchange.read_if_present(f"{UNITS}/{name}")
        if packed is None:  # an earlier attempt finished the unit, or this worker does not see the folder
            tokenizer()
            return
        exchange.write(f"{RESULTS}/{name}", do_unit(work, job, tokenizer, unpack_unit(packed)))
    except (UserError, RunAgain) as error:
        raise RuntimeError(_mark("RunAgain" if isinstance(error, RunAgain) else "UserError", error)) from error
    except OSError as error:
        if explained := explain_os_error(error):
            raise RuntimeError(_mark("UserError", explained)) from error
        raise


def read_tokenizer(exchange: Folder) -> bytes:
    """Reads the first file that a worker needs.

    Raises:
        UserError: The worker does not see the folder.
    """
    content = exchange.read_if_present(TOKENIZER)
    if content is None:
        raise UserError(
            f"{exchange.address} does not exist on worker {platform.node()}: name a folder that all workers can reach, "
            "for example --engine_options '--exchange=gs://BUCKET/FOLDER'"
        )
    return content
