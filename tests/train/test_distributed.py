"""What one of several processes prints when it ends. Runs of real processes are in test_hosts.py."""

import os
import threading

from bert_jax.train import distributed


def test_the_last_line_is_whole_and_last_while_other_threads_write(capfd):
    """The threads write to the descriptor, as C++ does, in pieces without line ends."""
    begun, over = threading.Barrier(5), threading.Event()

    def write() -> None:
        begun.wait()
        while not over.wait(0.001):
            os.write(2, b'grpc_message:"Socket closed" ')

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.wait()
    over.wait(0.02)
    distributed.print_last("error: process 1 of 2 has stopped", begun_by_others=True)
    over.wait(0.05)
    over.set()
    for thread in threads:
        thread.join()
    *before, last = capfd.readouterr().err.removesuffix("\n").split("\n")
    assert last == "error: process 1 of 2 has stopped" and "Socket closed" in "".join(before)


def test_a_process_that_may_open_no_more_files_prints_its_last_line(capfd, monkeypatch):
    def refuse(_: int) -> int:
        raise OSError

    with monkeypatch.context() as patch:
        patch.setattr(os, "dup", refuse)
        distributed.print_last("interrupted")
    assert capfd.readouterr().err == "interrupted\n"
