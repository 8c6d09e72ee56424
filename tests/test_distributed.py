"""What a process of several says when it ends. Runs of real processes are in test_hosts.py."""

import os
import threading
from pathlib import Path

import pytest

from bert_jax.train import distributed


@pytest.fixture
def shown(tmp_path, monkeypatch) -> Path:
    """Where stderr leads to."""
    path = tmp_path / "stderr"
    monkeypatch.setattr(distributed, "_STDERR", os.open(path, os.O_CREAT | os.O_WRONLY))
    return path


def test_the_last_line_is_whole_and_last_whatever_other_threads_write(shown):
    """They write to the descriptor itself, as C++ does, in pieces without line ends."""
    begun, over = threading.Barrier(5), threading.Event()

    def write() -> None:
        begun.wait()
        while not over.wait(0.001):
            os.write(distributed._STDERR, b'grpc_message:"Socket closed" ')

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.wait()
    over.wait(0.02)
    distributed._say_last("error: process 1 of 2 has stopped", begun_by_others=True)
    over.wait(0.05)
    over.set()
    for thread in threads:
        thread.join()
    *before, last = shown.read_text().removesuffix("\n").split("\n")
    assert last == "error: process 1 of 2 has stopped" and "Socket closed" in "".join(before)


def test_one_that_may_open_no_more_files_says_its_last_line_too(shown, monkeypatch):
    def refuse(_: int) -> int:
        raise OSError

    monkeypatch.setattr(os, "dup", refuse)
    distributed._say_last("interrupted")
    assert shown.read_text() == "interrupted\n"
