"""config.profile: which steps are traced, and what is reported if none are."""

import contextlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jaxtyping
import pytest

from bert_jax.config import TrainConfig
from bert_jax.errors import UserError
from bert_jax.train.hooks import Point, Profile
from bert_jax.train.prepare import traced_steps


@pytest.mark.parametrize("steps", [(100,), (5, 5), (7, 3), (1, 2, 3), (-1, 4)])
def test_other_steps_are_refused_with_an_example(steps):
    with pytest.raises(UserError, match=re.escape(f"profile is {steps}; give") + r".*such as \(100, 105\)"):
        traced_steps(steps)


@pytest.fixture(autouse=True)
def unchecked_types(monkeypatch):
    """As in a user's program: the recorder of these tests has only what a profile reads."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def one_step(steps: tuple[int, ...], workdir: Path) -> list[str]:
    """What is reported in a run of one step."""
    reported: list[str] = []
    run = SimpleNamespace(config=TrainConfig(profile=steps), workdir=workdir)
    accumulator = SimpleNamespace(paused=contextlib.nullcontext)
    recorder: Any = SimpleNamespace(run=run, accumulator=accumulator, report=reported.append)
    profile, state = Profile(recorder), Any
    with profile.during(0):
        pass
    assert not profile.due(Point(1, state, 1.0, done=True))
    profile.close()
    return reported


def test_without_steps_nothing_is_traced(tmp_path):
    assert not one_step((), tmp_path)
    assert not list(tmp_path.iterdir())


def test_steps_that_never_ran_are_reported_at_the_end(tmp_path):
    reported = one_step((3, 5), tmp_path)
    assert reported == ["config.profile=3,5: none of these steps ran, so nothing was traced"]
