"""The progress of a long job on stderr."""

import io
import logging
import re
import sys

import pytest

from bert_jax import progress
from bert_jax.progress import LOGGER, Reporter, print_note, quietly

LINE = r"counting words:  25\.0%  2\.50 MB/s  1,250 tokens/s  \d+ MB of memory  45 s left\n"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that a Reporter sees."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_line_has_share_rates_memory_and_time_left(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter("counting words", 100, ["MB", "tokens"]) as reporter:
        clock[0] += 10
        reporter.update(25, 25, 12_500)
        assert capsys.readouterr().err == ""  # one line in 15 s
        clock[0] += 5
        reporter.update(25, 37.5, 18_750)
        clock[0] += 0.25
        reporter.update(25, 37.5, 18_750)
    printed = capsys.readouterr().err
    assert re.fullmatch(LINE, printed), printed


def test_what_an_earlier_run_did_says_nothing_about_the_time_left(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with Reporter("counting words", 100, ["MB", "tokens"]) as reporter:
        clock[0] += 15
        reporter.skip(50)
        reporter.update(50, 0, 0)
        clock[0] += 15
        reporter.update(75, 75, 37_500)
    first, second = capsys.readouterr().err.splitlines(keepends=True)
    assert " 50.0%" in first and "time left unknown" in first
    assert re.fullmatch(LINE.replace("25\\.0", "75\\.0").replace("45 s", "30 s"), second), second


def test_progress_is_shown_to_somebody_who_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, and where stderr is what a notebook's kernel puts in its place."""
    assert not progress.is_watched()
    for settings in ({"isatty": lambda self: True}, {"__module__": "ipykernel.iostream"}):
        monkeypatch.setattr(sys, "stderr", type("OutStream", (io.StringIO,), settings)())
        assert progress.is_watched()


def test_nothing_is_printed_when_quiet(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter("counting words", 100, ["MB"], quiet=True) as reporter:
        clock[0] += 100
        reporter.update(25, 25)
    assert capsys.readouterr().err == ""


def test_the_time_left_is_unknown_at_the_start(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter("verifying", 0, ["MB"]) as reporter:
        clock[0] += 100
        reporter.update(0, 0)
    assert "time left unknown" in capsys.readouterr().err


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """The logger as a new process has it."""
    monkeypatch.setattr(LOGGER, "handlers", [])
    monkeypatch.setattr(LOGGER, "propagate", True)
    before = LOGGER.level
    LOGGER.setLevel(logging.NOTSET)
    yield LOGGER
    LOGGER.setLevel(before)


def test_lines_go_to_stderr_by_their_level(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    print_note("read 5% of the rows")
    print_note("warning: rows are missing")
    assert capsys.readouterr().err == "read 5% of the rows\nwarning: rows are missing\n"
    logger.setLevel(logging.WARNING)
    print_note("read 5% of the rows")
    print_note("warning: rows are missing")
    assert capsys.readouterr().err == "warning: rows are missing\n"


def test_a_program_takes_the_lines(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    print_note("so far")
    print_note("warning: too few")
    assert [(record.levelname, record.getMessage()) for record in records] == [
        ("INFO", "so far"),
        ("WARNING", "too few"),
    ]
    assert capsys.readouterr().err == "" and logger.propagate and len(logger.handlers) == 1


def test_quietly_shows_only_warnings_and_ends(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="x"), quietly():
        print_note("hidden")
        print_note("warning: shown")
        raise ValueError("x")
    with quietly(False):
        print_note("shown, too")
    assert capsys.readouterr().err == "warning: shown\nshown, too\n"
    logger.setLevel(logging.ERROR)
    with quietly():
        print_note("warning: hidden, as the program asked for")
    assert capsys.readouterr().err == "" and logger.level == logging.ERROR
