import pytest

from bert_jax.command import UserError
from bert_jax.config import TrainConfig
from bert_jax.train.profiler import Profiler, parse_steps


def test_steps_are_two_numbers():
    assert parse_steps("100:105") == (100, 105)


@pytest.mark.parametrize("text", ["100", "5:5", "7:3", "a:b", "1:2:3", "-1:4"])
def test_other_steps_are_refused_with_an_example(text, tmp_path):
    with pytest.raises(UserError, match=f"profile is '{text}'.*as 100:105"):
        Profiler(text, tmp_path)


def test_without_steps_nothing_is_traced(tmp_path):
    profiler = Profiler("", tmp_path)
    with profiler.step(0):
        pass
    assert not profiler.done(1)
    profiler.stop()
    assert not list(tmp_path.iterdir())


def test_an_unknown_generator_is_refused():
    with pytest.raises(UserError, match=r"unknown config\.prng 'mt19937'; choose from threefry2x32, rbg"):
        TrainConfig(prng="mt19937")
