"""Processes that find each other and hear of each other's end; here they are threads, for no jax is in it."""

import contextlib
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from bert_jax.command_line import EXIT_LOST
from bert_jax.errors import UserError
from bert_jax.train import failure_detection


@pytest.fixture(autouse=True)
def short_goodbyes(monkeypatch) -> None:
    monkeypatch.setattr(failure_detection, "LEAVE_SECONDS", 0.5)


@pytest.fixture
def port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def call(port: int, count: int, process: int, timeout: float = 20.0) -> failure_detection.Peers:
    return failure_detection.call("127.0.0.1", port, count, process, timeout)


@contextlib.contextmanager
def peers(port: int, count: int) -> Iterator[list[failure_detection.Peers]]:
    """All processes of a run, connected."""
    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(lambda process: call(port, count, process), range(count)))
    try:
        yield found
    finally:
        for peer in reversed(found):
            peer.leave()


def die(peer: failure_detection.Peers) -> None:
    """Ends the connections for the other side, as the kernel does for a process that is killed.

    The number of the file stays in use until the thread that watches closes it: a second close could hit another file.
    """
    for connection in peer.connections.values():
        with (
            contextlib.suppress(OSError, TypeError),  # that thread has closed it just now
            socket.socket(fileno=os.dup(connection.fileno())) as same,
        ):
            same.shutdown(socket.SHUT_RDWR)


def watched(found: list[failure_detection.Peers], heartbeat: float) -> list["queue.Queue[tuple[int, str]]"]:
    """What each process receives when another one ends; it then ends itself."""
    told: list[queue.Queue[tuple[int, str]]] = [queue.Queue() for _ in found]

    def watch(peer: failure_detection.Peers, channel: "queue.Queue[tuple[int, str]]") -> None:
        def end(code: int, why: str) -> None:
            channel.put((code, why))
            die(peer)

        peer.watch(heartbeat, end)

    for peer, channel in zip(found, told, strict=True):
        watch(peer, channel)
    return told


def test_all_processes_wait_for_the_last_one(port):
    with ThreadPoolExecutor(4) as pool:
        early = [pool.submit(call, port, 4, process) for process in (3, 0, 1)]
        time.sleep(0.3)
        assert not any(future.done() for future in early)
        last = pool.submit(call, port, 4, 2)
        found = [future.result(20) for future in (*early, last)]
    assert [peer.process for peer in found] == [3, 0, 1, 2]
    for peer in found:
        peer.leave()


@pytest.mark.parametrize("host", ["127.0.0.1", "nowhere.invalid"])
def test_without_a_coordinator_there_is_one_line_after_the_time_that_was_given(port, host):
    with pytest.raises(UserError, match=rf"no answer from the coordinator.*{host}:{port} in 0.6 s") as caught:
        failure_detection.call(host, port, 2, 1, 0.6)
    assert "\n" not in str(caught.value)


def test_what_answers_otherwise_is_no_coordinator(port):
    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.close()

    with socket.create_server(("127.0.0.1", port)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        with pytest.raises(UserError, match="does not wait for processes"):
            call(port, 2, 1, timeout=0.7)
        listener.shutdown(socket.SHUT_RDWR)


def test_missing_processes_are_named_by_all_that_are_there(port):
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(call, port, 4, process, 0.8) for process in (0, 2)]:
            with pytest.raises(UserError, match=r"2 of 4 processes are present; missing: 1, 3"):
                future.result(20)


def test_a_port_that_is_in_use_is_reported(port):
    with socket.create_server(("", port)), pytest.raises(UserError, match=f"cannot listen on port {port}"):
        call(port, 2, 0, timeout=1.0)


def test_two_of_one_number_and_another_count_are_refused(port):
    with ThreadPoolExecutor(5) as pool:
        good = [pool.submit(call, port, 3, process) for process in (0, 1)]
        time.sleep(0.3)
        with pytest.raises(UserError, match="two processes were started with --process_id=1"):
            call(port, 3, 1)
        with pytest.raises(UserError, match="process 0 was started with --num_processes=3, process 2 with 4"):
            call(port, 4, 2)
        good.append(pool.submit(call, port, 3, 2))
        for future in good:
            future.result(20).leave()


def test_other_connections_and_processes_that_left_delay_nobody(port):
    hello = b'{"process": 1, "count": 2}'
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(call, port, 2, 0)
        time.sleep(0.2)
        for content in (b"", b"GET / HTTP/1.1\r\n\r\n", struct.pack("!i", len(hello)) + hello):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(content)
        # The last of them is process 1 that died: with it the roll is full, and its end is heard at once.
        peer = first.result(20)
    assert watched([peer], 20.0)[0].get(timeout=60)[0] == EXIT_LOST


@pytest.mark.parametrize(("dead", "others"), [(2, (0, 1)), (0, (1, 2))])
def test_a_process_that_dies_stops_all_others_at_once(port, dead, others):
    with peers(port, 3) as found:
        told = watched([found[process] for process in others], heartbeat=60.0)
        die(found[dead])
        for channel in told:
            code, why = channel.get(timeout=60)
            assert code == EXIT_LOST and why.startswith(f"process {dead} of 3 has stopped: its connection was closed")


def test_a_process_that_falls_silent_counts_as_dead(port):
    with peers(port, 2) as found:
        told = watched(found[:1], heartbeat=0.5)  # process 1 does not watch, so it says nothing
        code, why = told[0].get(timeout=60)
        assert code == EXIT_LOST and "it sent nothing for 0.5 s" in why


def test_all_processes_report_why_one_stops(port):
    with peers(port, 3) as found:
        told = watched(found, heartbeat=60.0)
        found[1].announce(2, "no such file")
        die(found[1])
        for channel in (told[0], told[2]):
            assert channel.get(timeout=60) == (2, "process 1 of 3 has stopped: no such file")


def test_a_process_that_stops_as_soon_as_it_watches_is_heard(port, monkeypatch):
    run = threading.Thread.run

    def run_late(thread: threading.Thread) -> None:
        time.sleep(0.05)
        run(thread)

    monkeypatch.setattr(threading.Thread, "run", run_late)
    with peers(port, 2) as found:
        told = watched(found, heartbeat=60.0)
        die(found[1])  # before its thread has begun
        assert told[0].get(timeout=60)[0] == EXIT_LOST


def test_those_who_have_ended_well_stop_nobody(port):
    with peers(port, 3) as found:
        told = watched(found, heartbeat=0.6)
        found[2].leave()
        time.sleep(1.0)
        assert all(channel.empty() for channel in told)
