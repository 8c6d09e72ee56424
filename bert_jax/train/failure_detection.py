"""Detects within a second that a run has lost a process, and connects the processes at startup.

Process 0 listens, and every other process connects to it and sends its number. Once all are connected, process 0 lets
them continue, and the connections stay open. A lost process closes its connection, and a lost machine stops sending
heartbeats; process 0 then informs all others, which exit with EXIT_LOST and name the lost process in one line. A wrong
address or a missing process at startup is a UserError, also in one line, where jax's own client aborts.

Measured with two processes on one CPU machine (jax 0.10.2), from one's SIGKILL to the other's exit: 0.03 to
0.06 s with this module. Without it jax aborts the other by SIGABRT with a stack trace: after 0.1 to 0.2 s if process 0
was killed, and only after the heartbeat timeout (100 s by default) if process 1 was.

Every message is a JSON object in a frame of multiprocessing.connection. This module does not import jax.
"""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from typing import Any

from bert_jax.command_line import EXIT_LOST
from bert_jax.errors import UserError

_HELLO_SECONDS = 2.0  # for a new connection to send its number
_RETRY_SECONDS = 0.25  # between two attempts to connect
_GRACE_SECONDS = 5.0  # the others wait this much longer than process 0, which can name what is missing
LEAVE_SECONDS = 3.0  # how long process 0 waits for the others to exit
_MESSAGE_SECONDS = 2  # for the rest of a message that has begun, and to send a few bytes to a machine that is lost
_LONGEST_MESSAGE = 1 << 16
_one_closes = threading.Lock()  # a second thread's close could hit another file with the same number

Stop = Callable[[int, str], None]  # called with an exit code and one line with the reason


class Peers:
    """A process's connections: from process 0 to all others, and from any other to process 0."""

    def __init__(self, process: int, count: int, connections: dict[int, Connection]) -> None:
        self.process, self.count = process, count
        self.connections = connections
        self._left: set[int] = set()  # ended successfully
        self._closing = threading.Event()
        self._sending = threading.Lock()
        self._thread: threading.Thread | None = None

    def watch(self, heartbeat_timeout: float, on_stop: Stop) -> None:
        """Calls on_stop, once and in a thread, if a process stops or sends nothing for heartbeat_timeout seconds."""
        self._thread = threading.Thread(
            target=self._watch, args=(heartbeat_timeout, on_stop), name="failure_detection", daemon=True
        )
        self._thread.start()

    def announce(self, code: int, message: str) -> None:
        """Makes all others stop, because this process stops; process 0 then waits briefly for them."""
        self._tell({"stop": {"process": self.process, "code": code, "message": message}})
        self._let_others_go()

    def leave(self) -> None:
        """Tells all others that this process has finished, and closes its connections."""
        # The message goes first, then the flag, then the connections: so neither this process's watcher nor another's
        # takes a closed connection for a loss.
        self._tell({"end": self.process})
        self._closing.set()
        if self._thread is not None:
            self._thread.join(LEAVE_SECONDS)
        for connection in self.connections.values():
            _close(connection)

    def _tell(self, message: dict[str, Any], but: int = -1) -> None:
        # The watching thread and the one that ends the run both send, and frames must not mix.
        with self._sending:
            for process, connection in self.connections.items():
                if process != but:
                    _send(connection, message)

    def _let_others_go(self) -> None:
        """Makes process 0 exit last, because it runs jax's service, without which the others abort."""
        until = time.monotonic() + LEAVE_SECONDS
        while self.process == 0 and time.monotonic() < until:
            if all(map(_is_closed, self.connections.values())):
                break
            time.sleep(0.02)

    def _watch(self, heartbeat_timeout: float, on_stop: Stop) -> None:
        interval = heartbeat_timeout / 5  # some signs may be late without an alarm
        next_sign = 0.0
        heard = dict.fromkeys(self.connections, time.monotonic())
        while not self._closing.is_set():
            if time.monotonic() >= next_sign:
                self._tell({"alive": self.process})
                next_sign = time.monotonic() + interval
            watched = {process: link for process, link in self.connections.items() if process not in self._left}
            # Not the whole interval, so that `leave` need not wait for it.
            ready = wait([link for link in watched.values() if not link.closed], min(interval, 0.2))
            for process, connection in watched.items():
                if connection not in ready:
                    continue
                heard[process] = time.monotonic()
                # Any message proves that the process lives. None means that its connection was closed.
                message = _receive(connection)
                if message is None and not self._closing.is_set():
                    return self._stop(process, *_lost(process, self.count), on_stop)
                if message and "stop" in message:
                    stop = message["stop"]
                    return self._stop(stop["process"], stop["code"], stop["message"], on_stop)
                if message and "end" in message:
                    self._left.add(process)
            # A lost machine closes no connection.
            for process in watched:
                if process not in self._left and time.monotonic() - heard[process] > heartbeat_timeout:
                    return self._stop(process, *_lost(process, self.count, heartbeat_timeout), on_stop)

    def _stop(self, process: int, code: int, message: str, on_stop: Stop) -> None:
        if self.process == 0:  # only process 0 knows all others; the lost one no longer listens
            self._tell({"stop": {"process": process, "code": code, "message": message}}, but=process)
        self._let_others_go()
        # Last, because on_stop exits this process.
        on_stop(code, f"process {process} of {self.count} has stopped: {message}")


def _lost(process: int, count: int, silent_for: float = 0.0) -> tuple[int, str]:
    how = f"it sent nothing for {silent_for:g} s" if silent_for else "its connection was closed"
    return EXIT_LOST, f"{how}. See its log, and run the same command on every host to resume"


def call(host: str, port: int, count: int, process: int, timeout: float) -> Peers:
    """Waits until all `count` processes of a run are present, at most `timeout` seconds, and connects them.

    Args:
        host, port: the address at which process 0 listens.
        process: the number of this process, from 0.

    Raises:
        UserError: processes are missing, a number is used twice, the counts differ, or the port is in use.
    """
    if process == 0:
        return Peers(0, count, _gather(port, count, timeout))
    return Peers(process, count, {0: _join(host, port, count, process, timeout)})


def free_address() -> tuple[str, int]:
    """Returns an address by which other hosts reach this machine, and a free port."""
    # Another program may take the port before process 0 listens there, which then raises UserError.
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    # No packet is sent: connecting a datagram socket only selects the interface that leads to other networks. The name
    # of this machine would often resolve to a loopback address.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outgoing:
        outgoing.connect(("192.0.2.1", 9))  # reserved for documentation (RFC 5737)
        return outgoing.getsockname()[0], port
    return socket.gethostname(), port


def _gather(port: int, count: int, timeout: float) -> dict[int, Connection]:
    """Returns the connections to all other processes, once they are present."""
    here: dict[int, Connection] = {}
    until = time.monotonic() + timeout
    with _listen(port) as listener:
        while len(here) < count - 1:
            # Never 0, which would make accept() return at once.
            listener.settimeout(max(until - time.monotonic(), 0.01))
            try:
                connection = _framed(listener.accept()[0])
            except TimeoutError:
                missing = ", ".join(str(number) for number in range(1, count) if number not in here)
                why = (
                    f"after {timeout:g} s {len(here) + 1} of {count} processes are present; missing: {missing}. Start "
                    "them with the same --coordinator_address, or give --startup_timeout more seconds"
                )
                _refuse(here.values(), why)
                raise UserError(why) from None
            if (hello := _receive(connection, _HELLO_SECONDS)) is None or "process" not in hello:
                connection.close()  # not a process of a run: a port scan or a health check
                continue
            # A refused process ends with this message; process 0 waits on for the right one.
            number, others = hello["process"], hello["count"]
            if others != count:
                text = f"process 0 was started with --num_processes={count}, process {number} with {others}"
                _refuse([connection], f"{text}; give one count")
            elif number in here and not _is_closed(here[number]):
                text = f"two processes were started with --process_id={number}"
                _refuse([connection], f"{text}; give each its own, from 0 to {count - 1}")
            else:
                if number in here:
                    here[number].close()  # it died while it waited, and was started again
                here[number] = connection
    # Only now, so that no process begins before all are present.
    for connection in here.values():
        _send(connection, {"go": count})
    return here


def _refuse(connections: Iterable[Connection], why: str) -> None:
    for connection in connections:
        _send(connection, {"refused": why})
        connection.close()


def _listen(port: int) -> socket.socket:
    try:
        # Both families, since --coordinator_address may name either. The backlog holds all processes of a large run.
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen on port {port} ({error.strerror}): another run may use it. Name another port in "
            "--coordinator_address=HOST:PORT, the same for all processes"
        ) from error


def _join(host: str, port: int, count: int, process: int, timeout: float) -> Connection:
    """Returns the connection to process 0 once all processes are present."""
    until = time.monotonic() + timeout
    why = ""
    while (left := until - time.monotonic()) > 0:
        try:  # process 0 may start later than this one
            connection = _framed(socket.create_connection((host, port), timeout=left))
        except OSError as error:
            why = error.strerror or str(error)
            time.sleep(_RETRY_SECONDS)
            continue
        _send(connection, {"process": process, "count": count})
        answer = _receive(connection, left + _GRACE_SECONDS)
        if answer is not None and "go" in answer:
            return connection
        connection.close()
        if answer is not None and "refused" in answer:
            raise UserError(str(answer["refused"]))
        # Something else may still listen at the port, e.g. the run that is being replaced, so this tries again.
        why = "the program that answers there does not wait for processes; it may be a run that has started"
        time.sleep(_RETRY_SECONDS)
    raise UserError(
        f"no answer from the coordinator, process 0, at {host}:{port} in {timeout:g} s ({why}). Check "
        "--coordinator_address and that process 0 was started there, or give --startup_timeout more seconds"
    )


def _framed(connected: socket.socket) -> Connection:
    """The connection of a socket, which it takes over."""
    # Connection reads and writes the descriptor itself, so a timeout of the Python object would only make it
    # non-blocking. The kernel's timeouts (a struct timeval) bound each call instead.
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _MESSAGE_SECONDS, 0))
    return Connection(connected.detach())


def _send(connection: Connection, message: dict[str, Any]) -> None:
    """Sends a message, or drops it if it cannot be delivered, since reading reports that the other end is gone."""
    with contextlib.suppress(OSError):
        connection.send_bytes(json.dumps(message).encode())


def _receive(connection: Connection, seconds: float = 0.0) -> dict[str, Any] | None:
    """Returns the next message; None if none arrives in time or the other end is closed, and then closes this one."""
    # TypeError: the thread that ends the run has closed the connection after `poll`, so it has no handle any more.
    with contextlib.suppress(EOFError, OSError, ValueError, TypeError):
        if connection.poll(seconds):
            message = json.loads(connection.recv_bytes(_LONGEST_MESSAGE))
            if isinstance(message, dict):
                return message
    _close(connection)
    return None


def _close(connection: Connection) -> None:
    """Closes a connection once, though the watching thread and the one that ends the run may both do so."""
    with _one_closes:
        connection.close()


def _is_closed(connection: Connection) -> bool:
    """Whether the other end is known to have closed it; drops messages that have arrived."""
    with contextlib.suppress(OSError):
        while not connection.closed and connection.poll():
            _receive(connection)
    return connection.closed
