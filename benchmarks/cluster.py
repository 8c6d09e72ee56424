"""Measures what the process that runs a job does for each unit, with text and output in an emulated store.

    python -m benchmarks.cluster --engine ray --workers 1 8 --units 300

needs the extras beam, ray and stores. Each answer of the store takes 50 ms more. For each number of workers, a first
run is killed after half of the units, and a second one finishes the job. One JSON line has the second run's processor
seconds for each of its units, in the process that runs the job, and among the settings its requests and the workers'
requests for a unit, its wall time, and how many units each run built.
"""

import argparse
import functools
import http.client
import importlib
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.common import REPOSITORY, emit
from bert_jax.storage.remote import Folder
from data_prep import cluster
from data_prep import job as jobs
from data_prep.build import build
from data_prep.build_options import BuildOptions

DELAY_SECONDS = 0.05
_HOP_HEADERS = ("connection", "keep-alive", "transfer-encoding", "content-length")


class _Slow(BaseHTTPRequestHandler):
    """Passes requests on to a store, counts them, and waits."""

    protocol_version = "HTTP/1.1"
    behind, requests = "", 0
    lock = threading.Lock()

    def _answer(self) -> None:
        with self.lock:
            type(self).requests += 1
        time.sleep(DELAY_SECONDS)
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            chunks = []
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            body = b"".join(chunks)
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_HEADERS}
        connection = http.client.HTTPConnection(self.behind.removeprefix("http://"), timeout=120)
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _HOP_HEADERS:
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _answer

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The run that is killed closes its connections; that is no error of the store."""


def _serve(behind: str) -> tuple[str, type[_Slow]]:
    """Returns the address of a slow store, and the class that counts its requests."""
    handler = type("Handler", (_Slow,), {"behind": behind, "requests": 0})
    server = _Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}", handler


def at(url: str, task: str, site: cluster.Site, name: str) -> None:
    """On a worker: runs a task that uses the store at another address, which counts the workers' requests."""
    os.environ["AWS_ENDPOINT_URL"] = url
    getattr(cluster, task)(site, name)


def _text(bucket: Folder, units: int, seed: int = 0) -> None:
    """Writes text for about this many units of 10 kB into the store, in 12 files."""
    generator = random.Random(seed)
    words = [f"word{number}" for number in range(2000)]
    for file in range(12):
        documents = [" ".join(generator.choices(words, k=140)) + "." for _ in range(units * 10_000 // 1110 // 12)]
        bucket.write(f"text/{file:02d}.txt", "\n\n".join(documents).encode())


def _options(engine: str, workers: int, output: str, vocabulary: Path) -> BuildOptions:
    text = "s3://bucket/text/*.txt"
    return BuildOptions(text, vocabulary, output, 64, engine=engine, workers=workers, unit_mb=0.01, eval_fraction=0.05)


def job(engine: str, workers: int, url: str, output: str, vocabulary: str) -> None:
    """The process that runs a job: prints its processor seconds, wall seconds and units."""
    for stage in ("list_range", "build_unit", "join_units"):
        setattr(cluster, stage, functools.partial(at, url, stage))
    finish, units = jobs.Job.finish, 0

    def counted(self: jobs.Job, records: Sequence[jobs.UnitRecord], *rest: Any) -> dict[str, Any]:
        nonlocal units
        units = len(records)
        return finish(self, records, *rest)

    jobs.Job.finish = counted  # type: ignore[method-assign, assignment]
    begin, spent = time.monotonic(), time.process_time()
    build(_options(engine, workers, output, Path(vocabulary)))
    print(json.dumps([time.process_time() - spent, time.monotonic() - begin, units]))


def measure(engine: str, workers: int, units: int, behind: str, vocabulary: Path) -> None:
    (here, mine), (there, theirs) = _serve(behind), _serve(behind)
    output = Folder(f"s3://bucket/{engine}-{workers}")  # this process asks the store itself
    line = [sys.executable, "-m", "benchmarks.cluster", "--job", engine, str(workers), there, output.address]
    environment = os.environ | {"AWS_ENDPOINT_URL": here, "PYTHONPATH": str(REPOSITORY)}

    def start() -> "subprocess.Popen[str]":
        arguments = [*line, str(vocabulary)]
        return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment, cwd=REPOSITORY)

    def finished() -> int:
        return sum(name.endswith(".json") for name in output.names("job/units"))

    with start() as killed:
        while killed.poll() is None and finished() < units // 2:
            time.sleep(0.1)
        killed.kill()
    after = finished()
    mine.requests = theirs.requests = 0
    with start() as second:
        assert second.stdout is not None
        processor, seconds, total = json.loads(second.stdout.read().strip().splitlines()[-1])
    left = max(total - after, 1)
    settings: dict[str, Any] = {"engine": engine, "workers": workers, "delay_ms": 50, "units": total}
    settings |= {"units_before_kill": after, "units_after": left, "job_seconds": round(seconds, 1)}
    settings |= {"requests_per_unit": round(mine.requests / left, 2)}
    settings |= {"worker_requests_per_unit": round(theirs.requests / left, 2)}
    emit("cluster_driver_seconds_per_unit", processor / left, "s", None, None, settings, lower_is_better=True)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("local", "beam", "ray"), default="ray")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--units", type=int, default=300)
    parser.add_argument("--job", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.job:
        engine, workers, url, output, vocabulary = options.job
        return importlib.import_module("benchmarks.cluster").job(engine, int(workers), url, output, vocabulary)
    specification = importlib.util.spec_from_file_location(
        "store_emulators", REPOSITORY / "tests" / "helpers" / "store_emulators.py"
    )
    assert specification is not None and specification.loader is not None
    emulators = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(emulators)
    with tempfile.TemporaryDirectory() as folder, emulators.S3.run() as variables:
        os.environ.update(variables)
        vocabulary = Path(folder) / "vocab.txt"
        tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "word", "."] + [f"##{number}" for number in range(1000)]
        vocabulary.write_text("\n".join(tokens))
        _text(Folder("s3://bucket"), options.units)
        for workers in options.workers:
            measure(options.engine, workers, options.units, variables["AWS_ENDPOINT_URL"], vocabulary)


if __name__ == "__main__":
    main(sys.argv[1:])
