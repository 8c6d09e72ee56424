"""The process of a Beam pipeline and the work of its workers. Only this module imports Beam."""

import functools
import logging
import multiprocessing
import os
import platform
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from bert_jax.command_line import explain_os_error
from bert_jax.errors import RunAgain, UserError
from bert_jax.storage.remote import Folder
from data_prep.engines.remote import KILLED, Work, do_unit, unpack_unit

# Names in the exchange folder.
UNITS, RESULTS, TOKENIZER = "units", "results", "tokenizer.tar"

_SECONDS_TO_CANCEL = 30.0
# Mark an error of a worker in the text of an exception, because that text is all that a runner passes on.
_BEGIN, _BEGIN_AGAIN, _END = "[[build_examples: ", "[[build_examples again: ", " :build_examples]]"


class Task(NamedTuple):
    """What a worker needs in addition to the name of a unit."""

    work: Work
    job: str  # a unique name
    exchange: str


class _Stopped(BaseException):
    pass


def main(task: Task, names: list[str], workers: int, flags: list[str], answer: Connection) -> None:
    """Runs the pipeline and answers None, or what went wrong; then exits with every process that it started.

    The parent handles Ctrl-C. SIGTERM and the end of the parent, whatever its cause, cancel the pipeline.
    """
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    threading.excepthook = functools.partial(_thread_failed, answer)
    logging.getLogger().setLevel(logging.ERROR)  # Beam warns of packages that are not installed and of its own options
    result = None
    try:
        import apache_beam

        runner, options = _runner(workers, flags)
        pipeline = apache_beam.Pipeline(runner=runner, options=options)
        _ = pipeline | apache_beam.Create(names) | apache_beam.Map(functools.partial(_do, task))
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


def error_in(problem: str) -> UserError | RunAgain | None:
    """The error of a worker, if the text of a failure holds one."""
    for begin, kind in ((_BEGIN, UserError), (_BEGIN_AGAIN, RunAgain)):
        _, begun, rest = problem.partition(begin)
        if begun:
            return kind(rest.partition(_END)[0])
    return None


def _runner(workers: int, flags: list[str]) -> tuple[Any, Any]:
    """The runner and options for the given flags; DirectRunner gets as many processes as there are workers."""
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
    """On a worker: builds a unit, unless an earlier attempt at the same bundle has."""
    try:
        exchange = Folder(task.exchange)
        tokenizer = functools.partial(read_tokenizer, exchange)
        packed = exchange.read_if_present(f"{UNITS}/{name}")
        if packed is None:  # an earlier attempt finished the unit, or this worker does not see the folder
            tokenizer()
            return
        exchange.write(f"{RESULTS}/{name}", do_unit(task.work, task.job, tokenizer, unpack_unit(packed)))
    except UserError as error:
        raise RuntimeError(f"{_BEGIN}{error}{_END}") from error
    except RunAgain as error:
        raise RuntimeError(f"{_BEGIN_AGAIN}{error}{_END}") from error
    except OSError as error:
        if explained := explain_os_error(error):
            raise RuntimeError(f"{_BEGIN}{explained}{_END}") from error
        raise


def read_tokenizer(exchange: Folder) -> bytes:
    """Reads the first file that a worker needs. Raises UserError if it does not see the folder."""
    content = exchange.read_if_present(TOKENIZER)
    if content is None:
        raise UserError(
            f"{exchange.address} does not exist on worker {platform.node()}: name a folder that all workers can reach, "
            "for example --engine_options '--exchange=gs://BUCKET/FOLDER'"
        )
    return content


def _thread_failed(answer: Connection, failed: threading.ExceptHookArgs) -> None:
    """Ends the job if a worker was killed: DirectRunner waits for it forever, and only one of its threads fails."""
    if "Worker subprocess exited" in str(failed.exc_value):
        answer.send(f"{_BEGIN}{KILLED}{_END}")
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        threading.__excepthook__(failed)


def _stop(number: int, frame: Any) -> None:
    raise _Stopped


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(_SECONDS_TO_CANCEL)
    os.killpg(os.getpid(), signal.SIGKILL)
