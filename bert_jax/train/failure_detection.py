"""Detects within a second that a process of a run was lost, and connects the processes at startup.

Process 0 listens, and every other process connects to it and sends its number. Once all are connected, process 0 lets
them continue, and the connections stay open. A lost process closes its connection, and a lost machine stops sending
heartbeats; process 0 then informs all others, which exit with EXIT_LOST and a line that names the lost process. At
startup, a wrong address or a missing process is reported in one line, where jax's own client aborts.

Measured with two processes on one CPU machine (jax 0.10.2), from SIGKILL of one to the exit of the other: 0.03 to
0.06 s with this module. Without it jax aborts the other by SIGABRT with a stack trace: after 0.1 to 0.2 s where process
0 was killed, and only after the heartbeat timeout (100 s by default) where process 1 was.

Every message is one line of JSON. This module does not import jax.
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

_HELLO_SECONDS = 2.0  # for a new connection to send its number
_RETRY_SECONDS = 0.25  # between two attempts to connect
_GRACE_SECONDS = 5.0  # the others wait this much longer than process 0, which can name what is missing
_LEAVE_SECONDS = 3.0  # how long process 0 waits for the others to exit
_SEND_SECONDS = 2.0  # for a few bytes, which a lost machine does not accept
_LONGEST_LINE = 1 << 16

Stop = Callable[[int, str], None]  # called with an exit code and one line with the reason


class Peers:
    """The connections of one process: process 0 has one to each other, the others have one to process 0."""

    def __init__(self, process: int, count: int, connections: dict[int, "Connection"]) -> None:
        self.process, self.count = process, count
        self._connections = connections
        self._left: set[int] = set()  # ended successfully
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, heartbeat_timeout: float, on_stop: Stop) -> None:
        """Calls on_stop, once and in a thread, as soon as another process stops before all have left.

        A process that is silent for heartbeat_timeout seconds counts as lost.
        """
        selector = selectors.DefaultSelector()
        for process, peer in self._connections.items():
            selector.register(peer.socket, selectors.EVENT_READ, process)
            peer.heard = time.monotonic()
        self._thread = threading.Thread(
            target=self._watch, args=(selector, heartbeat_timeout, on_stop), name="failure_detection", daemon=True
        )
        self._thread.start()

    def announce(self, code: int, message: str) -> None:
        """Tells all others that this process stops, so that they stop too; process 0 then waits briefly for them."""
        self._tell({"stop": {"process": self.process, "code": code, "message": message}})
        self._let_others_go()

    def leave(self) -> None:
        """Tells all others that this process has finished, and closes its connections."""
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
        """Makes process 0 exit last, because it runs jax's service, without which the others abort."""
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
        """Reads what a process has sent; returns who has stopped, its exit code and the reason, or None."""
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
    how = f"it sent nothing for {silent_for:g} s" if silent_for else "its connection was closed"
    return EXIT_LOST, f"{how}. See its log, and run the same command on every host to resume"


def call(host: str, port: int, count: int, process: int, timeout: float) -> Peers:
    """Waits until all `count` processes of a run are present, at most `timeout` seconds, and connects them.

    Raises UserError when process 0 is missing, other processes are missing (by number), a number is used twice, the
    counts differ, or the port is in use.
    """
    if process == 0:
        return Peers(0, count, _gather(port, count, timeout))
    return Peers(process, count, {0: _join(host, port, count, process, timeout)})


def free_address() -> tuple[str, int]:
    """Returns an address of this machine, as other hosts reach it, and a port that is free."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    # No packet is sent: connecting a datagram socket only selects the interface that leads to other networks. The name
    # of this machine would often resolve to a loopback address.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outgoing:
        outgoing.connect(("192.0.2.1", 9))  # reserved for documentation (RFC 5737)
        return outgoing.getsockname()[0], port
    return socket.gethostname(), port


def _gather(port: int, count: int, timeout: float) -> dict[int, "Connection"]:
    """Returns the connections of all other processes, once they are present."""
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
                    f"after {timeout:g} s {len(here) + 1} of {count} processes are present; missing: {missing}. Start "
                    "them with the same --coordinator_address, or give --startup_timeout more seconds"
                )
                _refuse(here.values(), why)
                raise UserError(why) from None
            if (hello := connection.first(_HELLO_SECONDS)) is None or "process" not in hello:
                connection.close()  # not a process of a run: a port scan or a health check
                continue
            number = hello["process"]
            if why := _why_refused(hello, count, here):
                _refuse([connection], why)
                continue
            if number in here:
                here[number].close()  # it died while it waited, and was started again
            here[number] = connection
    for connection in here.values():
        connection.send({"go": count})
    return here


def _why_refused(hello: dict[str, Any], count: int, here: dict[int, "Connection"]) -> str:
    number, others = hello["process"], hello["count"]
    if others != count:
        return f"process 0 was started with --num_processes={count}, process {number} with {others}; give one count"
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
            f"process 0 cannot listen on port {port} ({error.strerror}): another run may use it. Name another port in "
            "--coordinator_address=HOST:PORT, the same for all processes"
        ) from error


def _join(host: str, port: int, count: int, process: int, timeout: float) -> "Connection":
    """Returns the connection to process 0, once all processes are present."""
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
        why = "the program that answers there does not wait for processes; it may be a run that has started"
        time.sleep(_RETRY_SECONDS)
    raise UserError(
        f"no answer from the coordinator, process 0, at {host}:{port} in {timeout:g} s ({why}). Check "
        "--coordinator_address and that process 0 was started there, or give --startup_timeout more seconds"
    )


class Connection:
    """One end of a connection, which carries lines of JSON; records whether the other end has closed it."""

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
        """Sends a message; drops one that cannot be delivered, since reading reports that the other end is gone."""
        with self._sending, contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Waits for data or the end of the connection, and returns the messages received."""
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
        """Returns the first message, or None where none arrives in time; later ones are left for `receive`."""
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
        """Whether the other end is known to have closed it; drops messages that have arrived."""
        with contextlib.suppress(OSError, ValueError):  # ValueError: closed at this end
            while not self.ended and select.select([self.socket], [], [], 0)[0]:
                self.receive()
            return self.ended
        return True

    def close(self) -> None:
        self.socket.close()
