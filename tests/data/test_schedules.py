"""Values by step: which rows each step reads, by formula and by going through the steps, and the mask rate."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.data.phases import parse_phases
from bert_jax.data.schedules import StepSchedule, batch_schedule, batch_segments, rate_schedule
from bert_jax.errors import UserError

STEPS = 60
borders = st.lists(st.integers(1, STEPS - 5), max_size=4, unique=True).map(lambda steps: (0, *sorted(steps)))


@given(steps=borders, rows=st.lists(st.integers(1, 9), min_size=5, max_size=5), starts=borders)
def test_each_step_reads_the_rows_after_those_of_the_steps_before_it_in_its_phase(steps, rows, starts):
    """By brute force: a counter for each phase, step by step."""
    batches = StepSchedule(steps, tuple(rows[: len(steps)]))
    parts = batch_segments(batches, starts)
    counters = [0 for _ in starts]
    for step in range(STEPS):
        phase = max(number for number, first in enumerate(starts) if first <= step)
        wanted = rows[max(number for number, first in enumerate(steps) if first <= step)]
        holding = [(number, segment) for number, part in enumerate(parts) for segment in part if segment.contains(step)]
        assert [number for number, _ in holding] == [phase]
        segment = holding[0][1]
        assert segment.rows == wanted == batches.at(step)
        assert segment.before + (step - segment.first) * segment.rows == counters[phase]
        counters[phase] += wanted


def test_one_size_and_one_data_set_are_one_segment():
    assert batch_segments(batch_schedule("", 8), [0]) == [[(0, None, 8, 0)]]


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (lambda text: batch_schedule(text, 8), "256", "not of the form STEP:VALUE,STEP:VALUE, such as 0:256,10000:512"),
        (lambda text: batch_schedule(text, 8), "0:256,9:big", "not of the form STEP:VALUE"),
        (lambda text: batch_schedule(text, 8), "5:256", "Its steps must ascend from 0"),
        (lambda text: batch_schedule(text, 8), "0:256,9:512,9:64", "Its steps must ascend from 0"),
        (
            lambda text: batch_schedule(text, 8),
            "0:256,9:0",
            r"batch_size is 0 in batch_schedule '0:256,9:0'\. Use at least one row",
        ),
        (rate_schedule, "0:0.3;9:0.1", "data.mask_schedule is .*not of the form STEP:VALUE,STEP:VALUE, such as 0:0.30"),
        (lambda text: parse_phases("first", text), "0:other", "data.phases is '0:other'. Its steps must ascend from 1"),
        (lambda text: parse_phases("first", text), "9:", "not of the form STEP:VALUE"),
        (lambda text: parse_phases("first", text), "9:one,two", "not of the form STEP:VALUE"),
        (lambda text: parse_phases("first", text), "9:a=one:1,b=two:2,19:", "not of the form STEP:VALUE"),
    ],
)
def test_an_invalid_schedule_is_refused_with_an_example(read, text, said):
    with pytest.raises(UserError, match=said):
        read(text)


def test_a_folder_of_a_phase_may_be_an_address():
    assert parse_phases("one", "9:gs://bucket/two, 20:C:three") == [(0, "one"), (9, "gs://bucket/two"), (20, "C:three")]


def test_a_phase_may_be_a_mixture_whose_commas_are_not_those_of_the_next_phase():
    text = "9:a=gs://bucket/one:0.5,b=two:0.5, 20:three,30:c=one,d=two:alpha=0.3"
    mixtures = [(9, "a=gs://bucket/one:0.5,b=two:0.5"), (20, "three"), (30, "c=one,d=two:alpha=0.3")]
    assert parse_phases("first", text) == [(0, "first"), *mixtures]


def test_a_schedule_holds_each_rate_until_the_next_step():
    schedule = rate_schedule("0:0.30,50000:0.15,90000:0.05")
    steps = (0, 1, 49_999, 50_000, 89_999, 90_000, 10**9)
    assert [schedule.at(step) for step in steps] == [0.3, 0.3, 0.3, 0.15, 0.15, 0.05, 0.05]
    assert max(schedule.values) == 0.3


def test_a_linear_schedule_interpolates_between_its_points():
    schedule = rate_schedule("0:0.30,40:0.15,50:0.05,60:0.2", shape="linear")
    steps = np.arange(80)
    wanted = np.interp(steps, [0, 40, 50, 60], [0.3, 0.15, 0.05, 0.2])
    np.testing.assert_allclose([schedule.at(step) for step in steps.tolist()], wanted, rtol=1e-12)
    assert [schedule.at(step) for step in (0, 40, 50, 60, 10**9)] == [0.3, 0.15, 0.05, 0.2, 0.2]
    assert max(schedule.values) == 0.3


@pytest.mark.parametrize(
    ("text", "rate", "shape", "said"),
    [
        ("0:0.3,9:0.1", None, "cosine", r"unknown data\.mask_shape 'cosine'; choose from steps, linear"),
        ("0:0.3", None, "linear", r"only one mask rate.*data\.mask_schedule="),
        ("", 0.3, "linear", "only one mask rate"),
    ],
)
def test_an_unknown_or_impossible_shape_is_refused(text, rate, shape, said):
    with pytest.raises(UserError, match=said):
        rate_schedule(text, rate, shape)


@pytest.mark.parametrize(
    "text", ["", "0.3", "0:0.3,", "5:0.3", "0:0.3,0:0.2", "0:0.3,9:0.1,4:0.2", "0:1.5", "0:0", "0:nan"]
)
def test_an_invalid_schedule_is_refused(text):
    with pytest.raises(UserError, match=r"mask(_schedule is| rate)"):
        rate_schedule(text)
