"""A folder in an object store is held by one process at a time: requests with preconditions, and a lease."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import tensorstore
from etils import epath
from store_emulators import S3

from bert_jax.errors import RunAgain, UserError
from bert_jax.storage import hold as conditional
from bert_jax.storage.hold import HOLDER_FILE, Held, NoLongerHeld, Record, StoredHold, Times, hold

LEASE = 1.0
TIMES = Times(renew_stored=0.2, lease=LEASE, poll_stored=0.05)
FOLDER = epath.Path("gs://bucket/run")
FAR = dataclasses.replace(Record.of_this_process(), host="far", boot="another start of another machine")


class Failing:
    """A client of a store that answers until the network fails."""

    def __init__(self, client: Any) -> None:
        self.client, self.failure = client, ""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.client, name)
        if not self.failure or not callable(found):
            return found

        def fail(*arguments: Any, **named: Any) -> None:
            raise (OSError if name == "call_s3" else ValueError)(self.failure)

        return fail


class Objects:
    """The objects of a folder, with the failures of their client."""

    def __init__(self, client: Failing, through: conditional.Objects) -> None:
        self.client, self.through = client, through

    def put(self, content: bytes | None) -> None:
        """Replaces holder.json, whatever it holds, also while its holder renews it."""
        while (found := self.get()) is not None or content is not None:
            if found is not None and found.content == content:
                return
            self.through.write(HOLDER_FILE, content, None if found is None else found.version)

    def get(self) -> Any:
        return self.through.read(HOLDER_FILE)


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """A client of an S3 server on this machine."""
    if S3.missing():
        pytest.skip(S3.missing())
    import fsspec

    with S3.run() as variables, pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield fsspec.filesystem("s3", skip_instance_cache=True)  # another test's would use its emulator


@pytest.fixture(params=["tensorstore", "s3"], autouse=True)
def objects(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Objects:
    """The objects of the folder, by tensorstore's own rules for preconditions or by those of S3, and short times."""
    if request.param == "tensorstore":
        client = Failing(tensorstore.KvStore.open({"driver": "memory"}, context=tensorstore.Context()).result())
        made = Objects(client, conditional.GoogleObjects(client))
    else:
        client = Failing(request.getfixturevalue("s3"))
        made = Objects(client, conditional.S3Objects(client, "bucket", "run"))
        made.put(None)
    monkeypatch.setattr(conditional, "open_objects", lambda folder: made.through)
    monkeypatch.setattr(conditional, "TIMES", TIMES)
    return made


@contextlib.contextmanager
def held_elsewhere(record: Record) -> Iterator[StoredHold]:
    held = StoredHold(FOLDER, print, record)
    try:
        yield held
    finally:
        held.release()


def holder_in(objects: Objects) -> dict[str, Any]:
    return json.loads(objects.get().content)


def test_a_second_run_is_refused_and_learns_who_holds_the_folder(objects):
    lines: list[str] = []
    with held_elsewhere(FAR), pytest.raises(Held, match=rf"gs://bucket/run is held by .*process {FAR.process} on far"):
        hold(FOLDER, lines.append).__enter__()
    assert len(lines) == 1 and "waiting for up to 1 s" in lines[0]
    with hold(FOLDER, lines.append) as mine:
        mine.check()
        assert holder_in(objects)["process"] == os.getpid()
    assert objects.get() is None and len(lines) == 1


def test_a_killed_run_of_this_machine_is_replaced_at_once_and_another_after_its_lease(objects):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here = Record.of_this_process()
    for record, least in ((dataclasses.replace(here, process=ended.pid), 0.0), (FAR, LEASE)):
        objects.put(record.encoded())
        lines: list[str] = []  # on waiting
        began = time.monotonic()
        with hold(FOLDER, lines.append):
            assert time.monotonic() - began >= least and len(lines) == (least > 0)


@pytest.mark.parametrize(
    ("before", "after", "at_once"),
    [
        ({"JOBSET_NAME": "a"}, {"JOBSET_NAME": "a", "JOBSET_RESTART_ATTEMPT": "2"}, True),
        ({"JOBSET_NAME": "a"}, {"JOBSET_NAME": "b", "JOBSET_RESTART_ATTEMPT": "2"}, False),
        ({"JOBSET_NAME": "a", "JOBSET_UID": "1"}, {"JOBSET_NAME": "a", "JOBSET_RESTART_ATTEMPT": "2"}, False),
        ({"JOBSET_NAME": "a"}, {"JOBSET_NAME": "a"}, False),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, True),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, False),
        ({}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, False),
    ],
)
def test_a_later_attempt_of_the_same_job_takes_the_folder_over_at_once(objects, monkeypatch, before, after, at_once):
    monkeypatch.setattr(conditional, "TIMES", dataclasses.replace(TIMES, lease=60.0))
    first, second = (conditional.scheduled(environment) for environment in (before, after))
    objects.put(dataclasses.replace(FAR, job=first[0], attempt=first[1]).encoded())
    here = dataclasses.replace(Record.of_this_process(), job=second[0], attempt=second[1])

    class Waits(Exception):
        pass

    def wait(line: str) -> None:
        raise Waits(line)

    with contextlib.nullcontext() if at_once else pytest.raises(Waits, match="waiting for up to"):
        StoredHold(FOLDER, wait, here).release()


def test_a_record_fits_its_size_whatever_the_scheduler_calls_the_job(monkeypatch):
    monkeypatch.setenv("JOBSET_NAME", "n" * 300)
    monkeypatch.setenv("JOBSET_RESTART_ATTEMPT", "12345")
    monkeypatch.setattr(conditional.socket, "gethostname", lambda: "h" * 300)
    assert len(Record.of_this_process().encoded()) == conditional.RECORD_BYTES


def test_of_many_runs_that_find_a_dead_holder_one_replaces_it(objects):
    objects.put(FAR.encoded())
    held: list[StoredHold] = []
    refused: list[Held] = []

    def start(number: int) -> None:
        try:
            held.append(StoredHold(FOLDER, lambda _: None, dataclasses.replace(FAR, id=f"{number:016d}")))
        except Held as error:
            refused.append(error)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 1 and len(refused) == 11
    held[0].check()
    held[0].release()


def test_a_replaced_run_notices_it_and_neither_renews_nor_removes_the_other(objects, monkeypatch):
    monkeypatch.setattr(conditional, "TIMES", dataclasses.replace(TIMES, renew_stored=1.5 * LEASE))
    suspended = StoredHold(FOLDER, print, FAR)  # its next renewal comes after the lease has run out
    monkeypatch.setattr(conditional, "TIMES", dataclasses.replace(TIMES, renew_stored=60.0))
    with hold(FOLDER, print) as mine:
        version = objects.get().version
        with pytest.raises(NoLongerHeld, match=rf"was taken over by process {os.getpid()}"):
            suspended.check()
        time.sleep(LEASE)
        suspended.release()
        mine.check()
        assert objects.get().version == version


def test_a_removed_object_is_reported_and_an_unreadable_store_is_not_taken_for_it(objects):
    with hold(FOLDER, print) as mine:
        objects.client.failure = "UNAVAILABLE: the network is down"
        time.sleep(2 * TIMES.renew_stored)
        mine.check()
        objects.client.failure = ""
        mine.check()
        objects.put(None)
        with pytest.raises(NoLongerHeld, match=r"gs://bucket/run/holder\.json was removed during training"):
            mine.check()


def test_a_store_that_refuses_is_an_error_of_one_line(objects):
    objects.client.failure = "PERMISSION_DENIED: no\nmore"
    with pytest.raises(UserError, match=r"^gs://bucket/run/holder\.json: cannot read: PERMISSION_DENIED: no\. Check"):
        hold(FOLDER, print).__enter__()
    objects.client.failure = "UNAVAILABLE: the network is down"
    with pytest.raises(RunAgain, match=r"^gs://bucket/run/holder\.json: cannot read: UNAVAILABLE"):
        hold(FOLDER, print).__enter__()
