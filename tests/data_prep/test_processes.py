"""An ordered map over other processes, and what passes between them."""

import functools
import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bert_jax.errors import UserError
from data_prep.build import build
from data_prep.build_options import BuildOptions
from data_prep.processes import map_in_order
from data_prep.readers import Refusal


def _slow_first(number: int) -> tuple[int, int]:
    time.sleep(0.2 if number == 0 else 0)
    return number, os.getpid()


def _end_at(last: int, number: int) -> int:
    if number == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def _refuse(number: int) -> int:
    raise Refusal("bad_row", f"row {number}", "it is bad", "Remove it")


def test_results_come_in_order_from_other_processes_and_few_are_ahead() -> None:
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        for number in range(30):
            taken += 1
            yield number

    results = map_in_order(_slow_first, items(), 2)
    first = next(results)
    assert taken <= 2 * 2 + 1
    found = [first, *results]
    assert [number for number, _ in found] == list(range(30))
    assert os.getpid() not in {process for _, process in found}
    assert [number for number, _ in map_in_order(_slow_first, range(5), 1)] == list(range(5))
    assert list(map_in_order(_slow_first, [7], 9)) == [(7, os.getpid())], "one item is worth no process"
    assert list(map_in_order(_slow_first, [], 9)) == []


def test_a_killed_process_and_a_refusal_end_the_map_in_one_line() -> None:
    with pytest.raises(UserError, match="a process that reads --input was killed"):
        list(map_in_order(functools.partial(_end_at, 3), range(9), 2))
    with pytest.raises(Refusal, match=r"row 0: it is bad\. Remove it, or use --on_error skip") as caught:
        list(map_in_order(_refuse, range(9), 2))
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.reason) == (str(caught.value), "bad_row")


def test_parts_in_other_processes_report_what_they_refuse(tmp_path: Path, sample_text: Path, vocab_dir: Path) -> None:
    (tmp_path / "a.txt").write_bytes(sample_text.read_bytes())
    (tmp_path / "b.txt").write_bytes(b"fine\n\ncaf\xe9\n")
    with pytest.raises(UserError, match=r"b\.txt, line 3: not UTF-8 \(byte 0xe9 in column 4\)"):
        build(BuildOptions(f"{tmp_path}/*.txt", vocab_dir, tmp_path / "out", 64, part="all/2", workers=2))
