"""Temporary folders: they do not outlive their process for long."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest
from tiny_runs import ROOT

from bert_jax.errors import UserError
from bert_jax.storage.files import scratch_folder

KILLED = """
import os, signal
from bert_jax.storage.files import scratch_folder
with scratch_folder() as folder:
    (folder / "large").write_bytes(b"x")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_folder_is_removed_at_its_end_or_after_its_process_was_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", KILLED], cwd=ROOT, env=environment)
    assert ended.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    beginning, elsewhere = left.with_name(f"{left.name}x"), tmp_path / "bert_jax-staging-elsewhere-x"
    beginning.mkdir()  # its process has not locked it yet
    shutil.copytree(left, elsewhere)
    with scratch_folder() as one, scratch_folder() as two:
        assert not left.exists() and one != two and one.is_dir() and two.is_dir()
        (two / "file").write_bytes(b"x")
    assert {*tmp_path.iterdir()} == {beginning, elsewhere}


def test_a_full_folder_is_explained(tmp_path, monkeypatch):
    def full(**_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    said = r"temporary folder \(No space left on device\)\. Free some space, or set TMPDIR"
    with pytest.raises(UserError, match=said), scratch_folder():
        pass
