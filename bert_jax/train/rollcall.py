"""The processes of a run find each other, and hear at once when one of them stops.

Process 0 listens, every other one connects to it and says who it is; when all are there, process 0 lets them go on, and
the connections stay. A process that dies closes its connection, one whose machine is gone no longer sends a sign of
life: process 0 then tells all others. jax's own service does the same in minutes, and by aborting the process; at the
start it also aborts where an address is wrong or a process is missing.

Every message is one line of JSON. No jax in here.
"""

import contextlib
import json
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from bert_jax.command import EXIT_LOST, UserError

_HELLO_SECONDS = 2.0  # for one that has connected to say who it is
_RETRY_SECONDS = 0.25  # between two tries to connect
_GRACE_SECONDS = 5.0  # a process waits that much longer than process 0, which knows better what is missing
_LEAVE_SECONDS = 3.0  # so long process 0 waits for the others to be gone
_SEND_SECONDS = 2.0  # for the few bytes of a message, which a machine that is gone does not take
_LONGEST_LINE = 1 << 16

Stop = Callable[[int, str], None]  # an exit code, and one line that says why


class Peers:
    """The connections of one process: process 0 has one to each other, the others have one to process 0."""

    def __init__(self, process: int, count: int, connections: dict[int, "Connection"]) -> None:
        self.process, self.count = process, count
        self._connections = connections
        self._left: set[int] = set()  # have ended well
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, heartbeat_timeout: float, on_stop: Stop) -> None:
        """From now on calls on_stop, once and in a thread, as soon as another process stops before all have left.

        A process that is silent for heartbeat_timeout seconds counts as stopped.
        """
        selector = selectors.DefaultSelector()
        for process, peer in self._connections.items():
            selector.register(peer.socket, selectors.EVENT_READ, process)
            peer.heard = time.monotonic()
        self._thread = threading.Thread(
            target=self._watch, args=(selector, heartbeat_timeout, on_stop), name="rollcall", daemon=True
        )
        self._thread.start()

    def announce(self, code: int, message: str) -> None:
        """Tells all others that this process stops, so that they do; process 0 then waits a moment until they have."""
        self._tell({"stop": {"process": self.process, "code": code, "message": message}})
        self._let_others_go()

    def leave(self) -> None:
        """Says that this process has ended well, and closes its connections."""
        self._tell({"end": self.process})
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_LEAVE_SECONDS)
        for peer in self._connections.values():
            peer.close()

    def _tell(self, message: dict[str, Any], but: int = -1) -> None:
        for process, peer in self._connections.items():
            if process != but:
                peer.send(message)

    def _let_others_go(self) -> None:
        """Process 0 goes last: without jax's service, which it runs, the others would be aborted."""
        until = time.monotonic() + _LEAVE_SECONDS
        while self.process == 0 and time.monotonic() < until:
            if all(peer.closed() for peer in self._connections.values()):
                break
            time.sleep(0.02)

    def _watch(self, selector: selectors.BaseSelector, heartbeat_timeout: float, on_stop: Stop) -> None:
        interval = heartbeat_timeout / 5
        next_sign = 0.0
        with selector:
            while not self._closing.is_set():
                if time.monotonic() >= next_sign:
                    self._tell({"alive": self.process})
                    next_sign = time.monotonic() + interval
                for key, _ in selector.select(min(interval, 0.2)):
                    if stopped := self._hear(key.data, selector):
                        return self._stop(*stopped, on_stop)
                silent = [
                    process
                    for process, peer in self._connections.items()
                    if process not in self._left and time.monotonic() - peer.heard > heartbeat_timeout
                ]
                if silent:
                    return self._stop(silent[0], *_lost(silent[0], self.count, heartbeat_timeout), on_stop)

    def _hear(self, process: int, selector: selectors.BaseSelector) -> tuple[int, int, str] | None:
        """Reads what a process has sent: who has stopped, with which exit code and why, or None."""
        peer = self._connections[process]
        for message in peer.receive():
            if "end" in message:
                self._left.add(process)
            if "stop" in message:
                stop = message["stop"]
                return stop["process"], stop["code"], stop["message"]
        if peer.ended:
            selector.unregister(peer.socket)
            if process not in self._left and not self._closing.is_set():
                return process, *_lost(process, self.count)
        return None

    def _stop(self, process: int, code: int, message: str, on_stop: Stop) -> None:
        if self.process == 0:
            self._tell({"stop": {"process": process, "code": code, "message": message}}, but=process)
        self._let_others_go()
        on_stop(code, f"process {process} of {self.count} has stopped: {message}")


def _lost(process: int, count: int, silent_for: float = 0.0) -> tuple[int, str]:
    how = f"nothing was heard of it for {silent_for:g} s" if silent_for else "its connection is closed"
    return EXIT_LOST, f"{how}. See its log, and run the same command on every host to go on"


def call(host: str, port: int, count: int, process: int, timeout: float) -> Peers:
    """Waits until all `count` processes of a run are there, at most `timeout` seconds, and connects them.

    Raises UserError: no process 0 there, processes missing (by number), the same one twice, another count, a port
    that is taken.
    """
    if process == 0:
        return Peers(0, count, _gather(port, count, timeout))
    return Peers(process, count, {0: _join(host, port, count, process, timeout)})


def _gather(port: int, count: int, timeout: float) -> dict[int, "Connection"]:
    """The connections of all others, once they are there."""
    here: dict[int, Connection] = {}
    until = time.monotonic() + timeout
    with _listen(port) as listener:
        while len(here) < count - 1:
            listener.settimeout(max(until - time.monotonic(), 0.01))
            try:
                connection = Connection(listener.accept()[0])
            except TimeoutError:
                missing = ", ".join(str(number) for number in range(1, count) if number not in here)
                why = (
                    f"after {timeout:g} s {len(here) + 1} of {count} processes are here; missing: {missing}. Start "
                    "them with the same --coordinator_address, or give --startup_timeout more seconds"
                )
                _refuse(here.values(), why)
                raise UserError(why) from None
            if (hello := connection.first(_HELLO_SECONDS)) is None or "process" not in hello:
                connection.close()  # no process of a run: a scan of ports, a check of health
                continue
            number = hello["process"]
            if why := _why_refused(hello, count, here):
                _refuse([connection], why)
                continue
            if number in here:
                here[number].close()  # of one that died while it waited, and was started again
            here[number] = connection
    for connection in here.values():
        connection.send({"go": count})
    return here


def _why_refused(hello: dict[str, Any], count: int, here: dict[int, "Connection"]) -> str:
    number, others = hello["process"], hello["count"]
    if others != count:
        return f"process 0 was started with --num_processes={count}, process {number} with {others}; give all the same"
    if number in here and not here[number].closed():
        return f"two processes were started with --process_id={number}; give each its own, from 0 to {count - 1}"
    return ""


def _refuse(connections: Iterable["Connection"], why: str) -> None:
    for connection in connections:
        connection.send({"refused": why})
        connection.close()


def _listen(port: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen on port {port} ({error.strerror}): another run may have it. Name another one in "
            "--coordinator_address=HOST:PORT, the same for all processes"
        ) from error


def _join(host: str, port: int, count: int, process: int, timeout: float) -> "Connection":
    """The connection to process 0, once all are there."""
    until = time.monotonic() + timeout
    why = ""
    while (left := until - time.monotonic()) > 0:
        try:
            connection = Connection(socket.create_connection((host, port), timeout=left))
        except OSError as error:
            why = error.strerror or str(error)
            time.sleep(_RETRY_SECONDS)
            continue
        connection.send({"process": process, "count": count})
        answer = connection.first(left + _GRACE_SECONDS)
        if answer is not None and "go" in answer:
            return connection
        connection.close()
        if answer is not None and "refused" in answer:
            raise UserError(str(answer["refused"]))
        why = "what answers there does not wait for processes: is it a run that goes on?"
        time.sleep(_RETRY_SECONDS)
    raise UserError(
        f"no answer from the coordinator, process 0, at {host}:{port} in {timeout:g} s ({why}). Check "
        "--coordinator_address and that process 0 was started there, or give --startup_timeout more seconds"
    )


class Connection:
    """One end of a connection: lines of JSON, and whether the other end has closed it."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.heard = time.monotonic()
        self.ended = False
        self._buffer = b""
        self._waiting: list[dict[str, Any]] = []
        self._sending = threading.Lock()
        connected.settimeout(_SEND_SECONDS)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message; one that cannot be delivered is dropped, for reading tells that the other end is gone."""
        with self._sending, contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come, after waiting for something to come or for the end."""
        try:
            received = self.socket.recv(_LONGEST_LINE)
        except TimeoutError:
            return self._taken()
        except OSError:
            received = b""
        self.heard = time.monotonic()
        self._buffer += received
        *lines, self._buffer = self._buffer.split(b"\n")
        self.ended = not received or len(self._buffer) > _LONGEST_LINE
        for line in lines:
            with contextlib.suppress(ValueError):
                if isinstance(message := json.loads(line), dict):
                    self._waiting.append(message)
        return self._taken()

    def _taken(self) -> list[dict[str, Any]]:
        taken, self._waiting = self._waiting, []
        return taken

    def first(self, seconds: float) -> dict[str, Any] | None:
        """The first message, or None where none comes in time; later ones are left for receive."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self.ended:
            self.socket.settimeout(left)
            messages = self.receive()
            self.socket.settimeout(_SEND_SECONDS)
            if messages:
                self._waiting = messages[1:]
                return messages[0]
        return None

    def closed(self) -> bool:
        """Whether the other end has closed it, as far as is known yet; what has come is dropped."""
        with contextlib.suppress(OSError, ValueError):  # ValueError: closed at this end
            while not self.ended and select.select([self.socket], [], [], 0)[0]:
                self.receive()
            return self.ended
        return True

    def close(self) -> None:
        self.socket.close()
