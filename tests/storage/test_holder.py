"""One process at a time holds a folder; a dead one is replaced at once, a silent one after its lease."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from building import ROOT

from bert_jax.storage import hold as holder
from bert_jax.storage.hold import HOLDER_FILE, Held, Hold, NoLongerHeld, Record, Times, hold

HOLDING = (
    "import sys, time, pathlib; from bert_jax.storage import hold as holder\n"
    "with holder.hold(pathlib.Path(sys.argv[1]), print) as held:\n"
    "    print('held', flush=True); sys.stdin.readline()"
)


FAR = dataclasses.replace(Record.of_this_process(), host="far", boot="another start of another machine")
LEASE = 1.0


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holder, "TIMES", Times(renew=0.1, lease=LEASE, ending=0.2, settle=0.2, poll=0.02))


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system such as Lustre without the option flock, or NFS without a lock daemon."""

    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", flock)


@contextlib.contextmanager
def holding_process(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDING, folder], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def unexpected(line: str) -> None:
    raise AssertionError(f"did not decide at once: {line}")


def test_a_second_process_learns_who_holds_the_folder_and_a_killed_one_is_replaced_at_once(tmp_path: Path) -> None:
    """A process that is only suspended keeps its hold: on its own machine, the lock decides."""
    folder = tmp_path / "run"
    with holding_process(folder) as process:
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5 * LEASE)
        message = f"run is held by another run: process {process.pid} on {socket.gethostname()}, since 2.* UTC. Wait"
        with pytest.raises(Held, match=message), hold(folder, unexpected):
            pass
        process.kill()
        process.wait()
        assert (folder / HOLDER_FILE).exists()
        with hold(folder, unexpected) as mine:
            mine.check()
    assert os.listdir(folder.parent) == ["run"] and not os.listdir(folder)


def test_a_holder_that_ends_leaves_no_file_and_no_folder_that_it_created(tmp_path: Path) -> None:
    with hold(tmp_path / "new", unexpected):
        pass
    with pytest.raises(ValueError, match="of the run"), hold(tmp_path / "new", unexpected):
        raise ValueError("of the run")
    assert not os.listdir(tmp_path)
    with hold(tmp_path / "used", unexpected):
        (tmp_path / "used" / "file").touch()
    assert os.listdir(tmp_path / "used") == ["file"]


def test_only_the_thread_that_holds_a_folder_may_hold_it_again(tmp_path: Path) -> None:
    refused = []

    def elsewhere() -> None:
        try:
            with hold(tmp_path, unexpected):
                pass
        except Held as error:
            refused.append(str(error))

    with hold(tmp_path, unexpected) as outer:
        with hold(tmp_path / ".." / tmp_path.name, unexpected) as inner:
            assert inner is outer
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        outer.check()
        assert (tmp_path / HOLDER_FILE).exists()
    assert len(refused) == 1 and f"process {os.getpid()} on " in refused[0]


@pytest.mark.parametrize("locks", [True, False])
def test_a_holder_on_another_machine_is_refused_while_it_renews_its_lease(tmp_path, monkeypatch, locks, request):
    """Where its lock is not seen, because there are none, or because they are those of one machine."""
    if not locks:
        request.getfixturevalue("no_locks")
    far = Hold(tmp_path, unexpected, FAR)
    if locks:
        monkeypatch.setattr(holder, "try_lock", lambda file: True)
    lines: list[str] = []
    with pytest.raises(Held, match=f"process {os.getpid()} on far, since"), hold(tmp_path, lines.append):
        pass
    assert len(lines) == 1 and "was held by process" in lines[0] and "waiting for up to 1 s" in lines[0]
    far.check()
    far.release()


@pytest.mark.parametrize("locks", [True, False])
def test_a_silent_holder_is_replaced_after_its_lease_and_notices_it(tmp_path, monkeypatch, locks, request):
    folder = tmp_path / "run"
    if not locks:
        request.getfixturevalue("no_locks")
    with monkeypatch.context() as patch:
        patch.setattr(holder, "TIMES", Times(renew=3600.0))  # it is suspended
        suspended = Hold(folder, unexpected, FAR)
    if locks:
        monkeypatch.setattr(holder, "try_lock", lambda file: True)  # on this machine its lock does not show
    began = time.monotonic()
    with hold(folder, lambda line: None) as mine:
        assert time.monotonic() - began >= LEASE
        message = f"run was taken over by process {os.getpid()} on {socket.gethostname()}, .*wrote nothing more"
        with pytest.raises(NoLongerHeld, match=message):
            suspended.check()
        before = (folder / HOLDER_FILE).stat().st_mtime_ns
        suspended.release()
        assert (folder / HOLDER_FILE).stat().st_mtime_ns == before
        mine.check()


@pytest.mark.parametrize("locks", [True, False])
def test_a_dead_process_of_this_machine_and_an_empty_record_are_no_holder(tmp_path, locks, request):
    """A kill leaves the record of a process that has ended, or an empty one."""
    if not locks:
        request.getfixturevalue("no_locks")
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        pass
    gone = json.dumps(json.loads(Record.of_this_process().encoded()) | {"process": ended.pid})
    for record in (gone, ""):
        (tmp_path / HOLDER_FILE).write_text(record)
        with hold(tmp_path, unexpected):
            pass


def test_a_removed_record_ends_the_run_that_it_names(tmp_path: Path) -> None:
    with pytest.raises(NoLongerHeld, match=r"holder\.json was removed during training"), hold(tmp_path, print) as held:
        (tmp_path / HOLDER_FILE).unlink()
        held.check()


@pytest.mark.parametrize(("locks", "rounds"), [(True, 20), (False, 4)])
def test_one_of_many_simultaneous_starts_holds_the_folder(tmp_path, monkeypatch, locks, rounds, request):
    """Three threads stand for processes: the lock of each is its own."""
    if not locks:
        request.getfixturevalue("no_locks")
    monkeypatch.setattr(holder, "TIMES", dataclasses.replace(holder.TIMES, ending=0.0))

    def start(folder: Path, starting: threading.Barrier, held: list[Hold]) -> None:
        starting.wait()
        with contextlib.suppress(Held):
            held.append(Hold(folder, lambda line: None))

    for number in range(rounds):
        folder, starting, held = tmp_path / str(number), threading.Barrier(3), list[Hold]()
        threads = [threading.Thread(target=start, args=(folder, starting, held)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(held) == 1
        held[0].check()
        held[0].release()
        assert not os.listdir(folder)


def test_a_renewal_changes_nothing_but_the_time(tmp_path: Path) -> None:
    with hold(tmp_path, unexpected) as held:
        path = tmp_path / HOLDER_FILE
        content, before = path.read_bytes(), path.stat().st_mtime_ns
        until = time.monotonic() + 10
        while path.stat().st_mtime_ns == before and time.monotonic() < until:
            time.sleep(0.02)
        assert path.stat().st_mtime_ns > before and path.read_bytes() == content
        held.check()
