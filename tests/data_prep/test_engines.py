"""Where units run: processes of this machine, and the parts of engines that need neither Beam nor Ray."""

import functools
import importlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from building import ROOT

from bert_jax.errors import UserError
from data_prep import build_options, engines, processes
from data_prep.build import build
from data_prep.build_options import BuildOptions
from data_prep.job import UnitRecord
from data_prep.processes import map_in_order
from data_prep.readers import Refusal
from data_prep.units import Unit


@pytest.mark.parametrize("engine, package", [("beam", "apache_beam"), ("ray", "ray")])
def test_missing_package_names_the_extra(monkeypatch, engine: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"pip install --editable '.*\[{engine}\]'"):
        engines.choose(engine, 1, "")


@pytest.mark.parametrize("name", processes.PRELOADED)
def test_preloaded_modules_exist(name: str) -> None:
    """The fork server passes over what it cannot import."""
    assert importlib.import_module(name)


def _units(count: int, size: int = 4) -> list[Unit]:
    return [Unit("train", number, (b"x" * size,), "") for number in range(count)]


def _slowly(seconds: float, directory: Path, unit: Unit) -> UnitRecord:
    """Says in the folder who has done a unit, and in its counts, too."""
    time.sleep(seconds)
    (directory / f"{unit.name} {os.getpid()}").touch(exist_ok=False)
    return UnitRecord(unit.name, "", {"process": os.getpid()}, {}, [])


def _fails_away_from(process: int, directory: Path, unit: Unit) -> UnitRecord:
    record = _slowly(0.05, directory, unit)
    if os.getpid() != process:
        raise UserError(f"{unit.name} is bad")
    return record


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 40])
def test_each_unit_is_done_once(tmp_path: Path, count: int, workers: int) -> None:
    units = _units(count)
    records = list(processes.run_units(functools.partial(_slowly, 0.001), units, workers, tmp_path))
    assert sorted(record.name for record in records) == [unit.name for unit in units]
    assert len(list(tmp_path.iterdir())) == count
    if count < 3:
        assert all(record.counts["process"] == os.getpid() for record in records), "no process for what one can do"


def test_two_large_units_are_shared(tmp_path: Path) -> None:
    units = _units(2, size=processes.WORTH_A_PROCESS)
    records = processes.run_units(functools.partial(_slowly, 0.05), units, 2, tmp_path)
    assert len({record.counts["process"] for record in records}) == 2


def test_units_are_shared_with_other_processes(tmp_path: Path) -> None:
    records = processes.run_units(functools.partial(_slowly, 0.05), _units(30), 3, tmp_path)
    done = {record.counts["process"] for record in records}
    assert os.getpid() in done and len(done) > 1


def _waits_for_the_long_one(here: int, long: str, directory: Path, unit: Unit) -> UnitRecord:
    """In process `here`, waits until another one has begun the long unit."""
    if unit.name == long:
        (directory / "begun").touch()
    until = time.monotonic() + 60
    while os.getpid() == here and unit.name > long and not (directory / "begun").exists():
        assert time.monotonic() < until, "nobody begins the long unit"
        time.sleep(0.005)
    return _slowly(0.005, directory, unit)


def test_the_process_that_hands_units_on_takes_no_long_one(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(processes, "LONG_UNIT", 100)
    units = _units(20)
    units[6] = units[6]._replace(documents=(b"x" * 100,))
    work = functools.partial(_waits_for_the_long_one, os.getpid(), units[6].name)
    done_by = {one.name: one.counts["process"] for one in processes.run_units(work, units, 2, tmp_path)}
    assert done_by[units[6].name] != os.getpid() and os.getpid() in done_by.values()


def test_what_a_unit_raises_elsewhere_is_raised_here(tmp_path: Path) -> None:
    """After the units that have begun, so that nothing writes into the folder any more."""
    switch_interval = sys.getswitchinterval()
    with pytest.raises(UserError, match=r"^train-\d+ is bad$"):
        list(processes.run_units(functools.partial(_fails_away_from, os.getpid()), _units(400), 2, tmp_path))
    done = len(list(tmp_path.iterdir()))
    assert 0 < done < 400
    time.sleep(0.2)
    assert len(list(tmp_path.iterdir())) == done and sys.getswitchinterval() == switch_interval


def test_caller_that_stops_early_leaves_no_unit_half_done(tmp_path: Path) -> None:
    records = processes.run_units(functools.partial(_slowly, 0.02), _units(30), 2, tmp_path)
    next(records)
    records.close()
    done = len(list(tmp_path.iterdir()))
    assert 0 < done < 30
    time.sleep(0.2)
    assert len(list(tmp_path.iterdir())) == done


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="leave it out for the local engine"):
        engines.choose("local", 1, "--address=auto")
    with pytest.raises(UserError, match=r"--engine_options .*No closing quotation"):
        engines.choose("local", 1, "' ")
    with pytest.raises(UserError, match="unknown --engine 'spark'; choose from local, beam, ray"):
        build(BuildOptions("a", "b", tmp_path / "out", 64, engine="spark"))
    given = ["--input=a", "--engine_options", "--address=auto", "--tokenizer=b", "--output=c", "--seq_len=64"]
    assert build_options.parse(given).engine_options == "--address=auto"


def test_ctrl_c_while_workers_are_imported_for_shows_no_traceback() -> None:
    """The fork server receives it as well and has no handler yet; the handler of the caller runs."""
    code = (
        "import os, signal, time, concurrent.futures, multiprocessing\n"
        "from multiprocessing import forkserver\n"
        "from data_prep import processes\n"
        "signal.signal(signal.SIGINT, lambda *_: print('told', flush=True))\n"
        "processes.begin(2)\n"
        "server = forkserver._forkserver._forkserver_pid\n"
        "for _ in range(20): os.kill(server, signal.SIGINT); time.sleep(0.02)\n"
        "assert os.waitpid(server, os.WNOHANG) == (0, 0), 'it is gone'\n"
        "signal.raise_signal(signal.SIGINT)\n"
        "context = multiprocessing.get_context('forkserver')\n"
        "with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool: pool.submit(os.getpid).result()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (ended.stderr, ended.stdout, ended.returncode) == ("", "told\n", 0)


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
