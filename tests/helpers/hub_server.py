"""A local server that answers as the Hugging Face Hub does; tests give it their files."""

import contextlib
import http.server
import threading
from collections.abc import Iterator


class HubHandler(http.server.BaseHTTPRequestHandler):
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
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
