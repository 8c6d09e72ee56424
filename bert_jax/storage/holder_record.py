"""Describes the process that holds a folder, and tells whether it is known to have ended."""

import dataclasses
import json
import os
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

RECORD_BYTES = 512  # of any record: it is written in one piece and replaces another one completely


@dataclass(frozen=True)
class Record:
    """The content of holder.json: a process and where its process number is valid."""

    host: str
    process: int
    since: str
    boot: str  # identifies a machine from one start to the next
    pid_namespace: str  # of the process number: containers of one machine count their processes separately
    id: str

    @classmethod
    def of_this_process(cls) -> "Record":
        host = socket.gethostname()[:100]
        return cls(
            host=host,
            process=os.getpid(),
            since=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
            boot=_boot_id() or host,
            pid_namespace=_pid_namespace(),
            id=os.urandom(8).hex(),
        )

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"

    def encoded(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).ljust(RECORD_BYTES - 1).encode() + b"\n"

    def has_ended(self, here: "Record", locked: bool) -> bool:
        """Whether the process is known to have ended. locked: `here` has the lock that it would have."""
        if self.boot != here.boot:
            return False
        return locked or (self.pid_namespace == here.pid_namespace and not _is_running(self.process))


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        pass
    return True


def _boot_id() -> str:
    """Returns what Linux calls this start of the machine; an empty string on other systems."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
