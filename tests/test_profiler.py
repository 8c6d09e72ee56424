import contextlib

import pytest

from bert_jax.command import UserError
from bert_jax.train.profiler import Profiler, parse_steps


def test_steps_are_two_numbers():
    assert parse_steps("100:105") == (100, 105)


@pytest.mark.parametrize("text", ["100", "5:5", "7:3", "a:b", "1:2:3", "-1:4"])
def test_other_steps_are_refused_with_an_example(text, tmp_path):
    with pytest.raises(UserError, match=f"profile is '{text}'.*such as 100:105"):
        Profiler(text, tmp_path)


def test_without_steps_nothing_is_traced(tmp_path):
    profiler = Profiler("", tmp_path)
    with profiler.step(0):
        pass
    reported: list[str] = []
    profiler.end_step(1, contextlib.nullcontext, reported.append)
    profiler.close(reported.append)
    assert not list(tmp_path.iterdir()) and not reported


def test_steps_that_never_ran_are_reported_at_the_end(tmp_path):
    profiler, reported = Profiler("3:5", tmp_path), list[str]()
    with profiler.step(0):
        pass
    profiler.end_step(1, contextlib.nullcontext, reported.append)
    profiler.close(reported.append)
    assert reported == ["config.profile=3:5: none of these steps ran, so nothing was traced"]
