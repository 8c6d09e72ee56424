"""An Amazon S3 of this machine for tests: moto's server, which answers conditional requests in turn.

    python tests/helpers/s3_emulator.py       serves until its standard input ends; prints the port

moto compares the ETag of a conditional request and then writes, in a thread for each request. So that two of them
cannot both find what they expect, a lock makes each of them wait for the one before. `allow_writes` makes it refuse all
writes after a number of them, as if the process that writes had been killed there. The extra `stores` has moto.
"""

import contextlib
import importlib.util
import logging
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from typing import Any

PACKAGES = ("s3fs", "moto")
_WRITES = ("PUT", "POST", "DELETE")
_ALLOWED = "/-/allowed-writes/"  # no bucket has this name
_CONDITIONS = ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH")
_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


def missing() -> str:
    """Returns which packages are missing, in words; an empty string if the emulator can run."""
    absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} not installed; pip install '.[stores]'" if absent else ""


@contextlib.contextmanager
def emulator(bucket: str = "bucket") -> Iterator[dict[str, str]]:
    """Runs a store with one bucket; yields the environment variables by which processes use it."""
    line = [sys.executable, __file__]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        port = process.stdout.readline().strip()
        if not port:
            raise RuntimeError("moto's server did not start; install the extra `stores` again")
        url = f"http://127.0.0.1:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{url}/{bucket}", method="PUT")).close()
        try:
            yield variables(url)
        finally:
            process.stdin.close()


def variables(url: str) -> dict[str, str]:
    """The environment of processes that use the store at a URL."""
    return {"AWS_ENDPOINT_URL": url, **_CREDENTIALS}


def allow_writes(url: str, count: int | None) -> None:
    """Makes the store at a URL refuse all writes after `count` of them; None: refuse none from now on."""
    address = f"{url}{_ALLOWED}{'' if count is None else count}"
    urllib.request.urlopen(urllib.request.Request(address, method="PUT")).close()


def serve() -> None:
    """Serves until the standard input ends."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs each request
    application = _Front(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


class _Front:
    """Answers requests by moto's application, conditional ones in turn, and counts writes."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application = application
        self._conditional, self._counting = threading.Lock(), threading.Lock()
        self._allowed: int | None = None

    def __call__(self, environment: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environment["PATH_INFO"]
        if path.startswith(_ALLOWED):
            count = path.removeprefix(_ALLOWED)
            self._allowed = int(count) if count else None
            start_response("200 OK", [])
            return [b""]
        if environment["REQUEST_METHOD"] in _WRITES and not self._count():
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AccessDenied</Code><Message>no more writes</Message></Error>"]
        is_conditional = any(name in environment for name in _CONDITIONS)
        with self._conditional if is_conditional else contextlib.nullcontext():
            return self._application(environment, start_response)

    def _count(self) -> bool:
        """Whether a further write is allowed."""
        with self._counting:
            if self._allowed is not None:
                self._allowed -= 1
            return self._allowed is None or self._allowed >= 0


if __name__ == "__main__":
    serve()
