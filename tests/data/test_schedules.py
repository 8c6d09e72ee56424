"""Values by step: which rows each step reads, by formula and by going through the steps, and the mask rate."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.config import PretrainDataConfig
from bert_jax.data.phases import later_phases
from bert_jax.data.schedules import StepSchedule, batch_schedule, batch_segments, mask_rates
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
    assert batch_segments(batch_schedule({}, 8), [0]) == [[(0, None, 8, 0)]]


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ({5: 256}, r"batch_schedule is \{5: 256\}. Its steps must begin at 0, such as \{0: 256"),
        ({0: 256, 9: 0}, r"batch_size is 0 in batch_schedule\. Use at least one row"),
        ({}, "batch_size is 0. Use at least one row"),
    ],
)
def test_an_invalid_schedule_is_refused_with_an_example(schedule, said):
    with pytest.raises(UserError, match=said):
        batch_schedule(schedule, 0)


def test_steps_may_come_from_json_and_in_any_order():
    assert batch_schedule({"10": 16, "0": 8}, 1) == StepSchedule((0, 10), (8, 16))
    assert list(later_phases(PretrainDataConfig(phases={20: "b", 9: "a"})).items()) == [(9, "a"), (20, "b")]
    with pytest.raises(UserError, match=r"data\.phases is \{0: 'other'\}. Its steps must begin at 1"):
        later_phases(PretrainDataConfig(phases={0: "other"}))


def test_a_schedule_holds_each_rate_until_the_next_step():
    schedule = mask_rates(None, {0: 0.30, 50000: 0.15, 90000: 0.05})
    steps = (0, 1, 49_999, 50_000, 89_999, 90_000, 10**9)
    assert [schedule.at(step) for step in steps] == [0.3, 0.3, 0.3, 0.15, 0.15, 0.05, 0.05]
    assert max(schedule.values) == 0.3


def test_a_linear_schedule_interpolates_between_its_points():
    schedule = mask_rates(None, {0: 0.30, 40: 0.15, 50: 0.05, 60: 0.2}, shape="linear")
    steps = np.arange(80)
    wanted = np.interp(steps, [0, 40, 50, 60], [0.3, 0.15, 0.05, 0.2])
    np.testing.assert_allclose([schedule.at(step) for step in steps.tolist()], wanted, rtol=1e-12)
    assert [schedule.at(step) for step in (0, 40, 50, 60, 10**9)] == [0.3, 0.15, 0.05, 0.2, 0.2]
    assert max(schedule.values) == 0.3


@pytest.mark.parametrize(
    ("schedule", "rate", "shape", "said"),
    [
        ({0: 0.3, 9: 0.1}, None, "cosine", r"unknown data\.mask_shape 'cosine'; choose from steps, linear"),
        ({0: 0.3}, None, "linear", r"only one mask rate.*data\.mask_schedule="),
        ({}, 0.3, "linear", "only one mask rate"),
        ({0: 0.3}, 0.3, "steps", "both set; set only one of them"),
        ({5: 0.3}, None, "steps", "Its steps must begin at 0"),
        *(({0: rate}, None, "steps", "mask rate") for rate in (1.5, 0.0, float("nan"))),
    ],
)
def test_an_impossible_schedule_of_rates_is_refused(schedule, rate, shape, said):
    with pytest.raises(UserError, match=said):
        mask_rates(rate, schedule, shape)
