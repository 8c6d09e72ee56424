"""Which rows a step reads, over ramps of the batch and phases of data: by formula, and by going through the steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.command import UserError
from bert_jax.data.batch_schedule import batch_schedule, batch_segments
from bert_jax.data.masking import rate_schedule
from bert_jax.data.phases import parse_phases
from bert_jax.data.step_schedule import StepSchedule

STEPS = 60
borders = st.lists(st.integers(1, STEPS - 5), max_size=4, unique=True).map(lambda steps: (0, *sorted(steps)))


@given(
    steps=borders,
    rows=st.lists(st.integers(1, 9), min_size=5, max_size=5),
    starts=borders,
    names=st.lists(st.sampled_from("ab"), min_size=5, max_size=5),
)
def test_each_step_reads_on_where_the_steps_before_it_ended(steps, rows, starts, names):
    """By brute force: phases that read two data sets in turns, and a counter for each of these, step by step."""
    batches = StepSchedule(steps, tuple(rows[: len(steps)]))
    phases = list(zip(starts, names, strict=False))
    parts = batch_segments(batches, phases)
    counters = {"a": 0, "b": 0}
    for step in range(STEPS):
        phase = max(number for number, (first, _) in enumerate(phases) if first <= step)
        wanted = rows[max(number for number, first in enumerate(steps) if first <= step)]
        holding = [(number, segment) for number, part in enumerate(parts) for segment in part if segment.contains(step)]
        assert [number for number, _ in holding] == [phase]
        stretch = holding[0][1]
        name = phases[phase][1]
        assert stretch.rows == wanted == batches.at(step)
        assert stretch.before + (step - stretch.first) * stretch.rows == counters[name]
        counters[name] += wanted


def test_one_size_and_one_data_set_are_one_stretch():
    assert batch_segments(batch_schedule("", 8), [(0, "a")]) == [[(0, None, 8, 0)]]


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
        (
            rate_schedule,
            "0:0.3;9:0.1",
            "data.mask_schedule is .*not of the form STEP:VALUE,STEP:VALUE, such as 0:0.30",
        ),
        (lambda text: parse_phases("first", text), "0:other", "data.phases is '0:other'. Its steps must ascend from 1"),
        (lambda text: parse_phases("first", text), "9:", "not of the form STEP:VALUE"),
    ],
)
def test_an_invalid_schedule_is_refused_with_an_example(read, text, said):
    with pytest.raises(UserError, match=said):
        read(text)


def test_a_folder_of_a_phase_may_be_an_address():
    assert parse_phases("one", "9:gs://bucket/two, 20:C:three") == [(0, "one"), (9, "gs://bucket/two"), (20, "C:three")]
