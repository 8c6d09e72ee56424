"""Runs tasks in a Beam pipeline: in several local processes (DirectRunner), or on Dataflow, Flink or Spark.

Results appear in the job's folder, so every runner shows progress. The pipeline has a process of its own, because
DirectRunner cannot be stopped, but a process can, and its workers end with its process group.
"""

import functools
import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from bert_jax.command_line import explain_os_error
from bert_jax.errors import RunAgain, UserError
from data_prep import processes
from data_prep.processes import KEPT, KILLED, Task, cores

_POLL_SECONDS = 5.0  # a look-up may cost a request to a store; the first ones come sooner, for short jobs
# A worker's error is marked in the text of an exception, because a runner passes on only that text.
_MARKED = re.compile(r"\[\[build_examples (\w+): (.*?)(?: :build_examples\]\]|\Z)", re.DOTALL)


def run(
    task: Task, names: Sequence[str], finished: Callable[[], set[str]], workers: int, flags: list[str]
) -> Iterator[str]:
    """Runs a task for each name in one Beam pipeline.

    Args:
        workers: DirectRunner processes; 0: one per core.
        flags: Pipeline options (--runner=DataflowRunner --project=...).

    Raises:
        UserError: The pipeline fails.
    """
    waiting, poll = set(names), 0.3
    work = functools.partial(_do, task)
    with processes.own_group(_run_pipeline, work, list(names), workers or cores(), flags) as answer:
        ended = False
        while not ended:
            # Looked up once more after the answer, because the last ones may have appeared just before it.
            ended, poll = answer.poll(poll), min(2 * poll, _POLL_SECONDS)
            results = finished() & waiting
            waiting -= results
            yield from sorted(results)
        _check_answer(answer, waiting)


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


def _mark(kind: str, problem: object) -> str:
    return f"[[build_examples {kind}: {problem} :build_examples]]"


def _run_pipeline(
    task: Callable[[str], None], names: list[str], workers: int, flags: list[str], answer: Connection
) -> None:
    """Runs the pipeline, answers None or the problem, and exits with all processes that it started.

    SIGTERM cancels the pipeline, and so does the end of the parent, whatever its cause.
    """

    def thread_failed(failed: threading.ExceptHookArgs) -> None:
        # DirectRunner waits forever for a worker that was killed, and only one of its threads fails.
        if "Worker subprocess exited" in str(failed.exc_value):
            answer.send(_mark("UserError", KILLED))
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            threading.__excepthook__(failed)

    processes.lead_group()
    threading.excepthook = thread_failed
    logging.getLogger().setLevel(logging.ERROR)  # Beam warns of packages that are not installed and of its own options
    result = None
    try:
        import apache_beam

        runner, options = _runner(workers, flags)
        pipeline = apache_beam.Pipeline(runner=runner, options=options)
        _ = pipeline | apache_beam.Create(names) | apache_beam.Reshuffle() | apache_beam.Map(task)
        result = pipeline.run()
        state = result.wait_until_finish()
        answer.send(None if state == "DONE" else f"it ended as {state}")
    except processes.GroupStopped:
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


def _do(task: Task, name: str) -> None:
    try:
        task(name)
    except (UserError, RunAgain) as error:
        raise RuntimeError(_mark("RunAgain" if isinstance(error, RunAgain) else "UserError", error)) from error
    except OSError as error:
        if explained := explain_os_error(error):
            raise RuntimeError(_mark("UserError", explained)) from error
        raise
