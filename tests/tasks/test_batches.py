"""Training batches of tasks: their rows, order and padded lengths."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.config import ModelOptions
from bert_jax.model import sizes
from bert_jax.model.runtime import Runtime
from bert_jax.tasks import batches
from bert_jax.tasks.batches import (
    SHAPES,
    STEP,
    TaskSource,
    best_lengths,
    longest_rows,
    padded_length,
    price,
    sorted_batches,
)
from bert_jax.tasks.rows import LabelledRows, Split, TaskRows, spans

MAX_LENGTH = 70


def rows_of(count: int) -> TaskRows:
    """Rows of 2 to 70 tokens; row r has the label r and the token 10 + r everywhere."""
    lengths = 2 + np.arange(count) * 7 % (MAX_LENGTH - 1)
    return LabelledRows(
        input_ids=np.repeat(10 + np.arange(count), lengths).astype(np.int32),
        first_lengths=lengths.astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        labels=np.arange(count, dtype=np.int32),
        label_weights=np.ones(count, np.float32),
        pad_id=0,
        truncated=0,
        split=Split(Path("train.tsv"), (), labelled=True),
    )


def source_of(rows: TaskRows, batch_size: int, seed: int = 0, **more: int) -> TaskSource:
    lengths = best_lengths(longest_rows(rows, batch_size), MAX_LENGTH)
    return TaskSource(rows, batch_size=batch_size, seed=seed, lengths=lengths, **more)


def test_a_batch_is_a_function_of_seed_and_step():
    rows = rows_of(23)
    one, again, other = source_of(rows, 8), source_of(rows, 8), source_of(rows, 8, seed=1)
    again.batch(7)
    for step in (0, 5, 1):
        for left, right in zip(one.batch(step), again.batch(step), strict=True):
            np.testing.assert_array_equal(left, right)
    assert any((one.indices(step) != other.indices(step)).any() for step in range(3))
    assert one.fingerprints == again.fingerprints != source_of(rows_of(24), 8).fingerprints
    assert one.rows_at(3) == len(one.batch(3).labels) == 8


@settings(max_examples=40)
@given(
    count=st.integers(1, 40),
    batch_size=st.integers(1, 50),
    pool=st.integers(2, 9),
    over=st.integers(0, 20),
    seed=st.integers(0, 99),
)
def test_a_pool_holds_the_rows_of_the_chain_by_length(count, batch_size, pool, over, seed):
    rows = rows_of(count)
    steps = 2 * pool + over
    plain = source_of(rows, batch_size, seed, steps=steps)
    one, other = (source_of(rows, batch_size, number, pool=pool, steps=steps) for number in (seed, seed + 1))
    for first in range(0, steps, pool):
        inside = range(first, min(first + pool, steps))
        drawn = [one.indices(step) for step in inside]
        assert sorted(np.concatenate(drawn)) == sorted(np.concatenate([plain.indices(step) for step in inside]))
        ranges = np.array([(rows.lengths[part].min(), rows.lengths[part].max()) for part in drawn])
        order = np.lexsort(ranges.T[::-1])
        assert (ranges[order][:-1, 1] <= ranges[order][1:, 0]).all()
        if len({tuple(one) for one in ranges}) == len(ranges):  # another seed has its shortest rows at the same step
            shortest = np.array([rows.lengths[other.indices(step)].min() for step in inside])
            assert (np.diff(shortest[order]) >= 0).all()
    np.testing.assert_array_equal(one.indices(steps + 3), one.indices(steps + 3))


def test_batches_of_a_pool_come_in_no_order_of_length():
    rows = rows_of(400)
    source = source_of(rows, 4, pool=50)
    longest = [rows.lengths[source.indices(step)].max() for step in range(50)]
    assert abs(np.corrcoef(longest, np.arange(50))[0, 1]) < 0.4


@given(count=st.integers(1, 40), batch_size=st.integers(1, 50), epochs=st.integers(1, 4))
def test_every_epoch_holds_each_row_once_and_no_tail_is_dropped(count, batch_size, epochs):
    source = source_of(rows_of(count), batch_size)
    steps = -(-count * epochs // batch_size)
    seen = np.concatenate([source.indices(step) for step in range(steps)])
    for epoch in range(epochs):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_epochs_are_in_different_orders():
    source = source_of(rows_of(40), 40)
    assert (source.indices(0) != source.indices(1)).any()


def test_a_slice_of_rows_is_that_slice_of_the_whole_batch():
    source = source_of(rows_of(23), 8)
    for step in range(4):
        whole, part = source.batch(step), source.batch(step, slice(2, 5))
        for left, right in zip(whole, part, strict=True):
            np.testing.assert_array_equal(left[2:5], right)


def test_a_batch_is_padded_to_the_smallest_length_that_holds_it():
    rows = rows_of(60)
    source = source_of(rows, 3)
    lengths = best_lengths(longest_rows(rows, 3), MAX_LENGTH)
    assert len(lengths) == SHAPES and lengths[-1] == MAX_LENGTH
    for step in range(40):
        longest = rows.lengths[source.indices(step)].max()
        assert source.batch(step).input_ids.shape[1] == min(length for length in lengths if length >= longest)
    assert {padded_length(length, MAX_LENGTH) for length in range(1, MAX_LENGTH + 1)} == {16, 32, 48, 64, 70}


@pytest.mark.parametrize(("count", "batch_size", "pool"), [(1, 3, 1), (40, 7, 1), (40, 7, 5), (60, 1, 9), (9, 20, 4)])
def test_lengths_fit_the_longest_rows_of_batches(monkeypatch, count, batch_size, pool):
    monkeypatch.setattr(batches, "SAMPLED_STEPS", 12)
    rows = rows_of(count)
    longest = longest_rows(rows, batch_size, pool)
    source = TaskSource(rows, batch_size, 0, (MAX_LENGTH,), pool=pool)
    wanted = [rows.lengths[source.indices(step)].max() for step in range(-(-12 // pool) * pool)]
    assert sorted(longest) == sorted([*wanted, rows.lengths.max()])
    for seed in range(3):  # any seed's batches have a length
        other = source_of(rows, batch_size, seed, pool=pool)
        assert all(other.batch(step).input_ids.shape[1] >= rows.lengths[other.indices(step)].max() for step in range(5))


@settings(max_examples=40)
@given(count=st.integers(1, 40), batch_size=st.integers(1, 20), pool=st.integers(1, 9), steps=st.integers(0, 30))
def test_the_first_steps_of_each_length_have_different_lengths(count, batch_size, pool, steps):
    source = source_of(rows_of(count), batch_size, pool=pool, steps=steps)
    first = source.first_of_each_length()
    found = [source.batch(step).input_ids.shape[1] for step in first]
    every = {source.batch(step).input_ids.shape[1]: step for step in reversed(range(steps or 64))}
    assert dict(zip(found, first, strict=True)) == every


@pytest.mark.parametrize(("count", "batch_size"), [(23, 8), (3, 8), (16, 8)])
def test_evaluation_sees_each_row_once_and_fillers_weigh_nothing(count, batch_size):
    seen = []
    for indices, batch in sorted_batches(rows_of(count), batch_size, MAX_LENGTH):
        assert len(indices) == len(batch.labels) == batch_size
        real = indices >= 0
        np.testing.assert_array_equal(batch.labels[real], indices[real])
        np.testing.assert_array_equal(batch.input_ids[real, 0], 10 + indices[real])
        assert batch.label_weights[real].all() and not batch.label_weights[~real].any()
        assert not batch.sequence_ids[~real].any() and not batch.input_ids[~real].any()
        seen += indices[real].tolist()
    assert sorted(seen) == list(range(count))


def test_spans_are_counted_out():
    assert spans(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=30).map(np.array),
    max_length=st.sampled_from([100, 104, 77]),
    shapes=st.integers(1, 4),
    passes=st.floats(0.1, 9),
    each=st.sampled_from([0, 0, 5, 60, 400]),
)
def test_no_other_choice_of_lengths_costs_less(lengths, max_length, shapes, passes, each):
    lengths = np.minimum(lengths, max_length)
    found = best_lengths(lengths, max_length, shapes, passes=passes, price=float(each))

    def cost(chosen: tuple[int, ...]) -> float:
        return passes * sum(min(size for size in chosen if size >= length) for length in lengths) + each * len(chosen)

    sizes = sorted({min(-(-int(length) // STEP) * STEP, max_length) for length in lengths})
    every = ((*some, sizes[-1]) for count in range(shapes) for some in itertools.combinations(sizes[:-1], count))
    assert sorted(set(found)) == list(found) and set(found) <= set(sizes) and len(found) <= shapes
    assert cost(found) == pytest.approx(min(map(cost, every)))


def test_a_short_run_of_a_small_model_has_few_lengths_and_a_long_one_many():
    lengths = np.random.default_rng(0).gamma(4, 8, 4000).astype(int) + 3

    def price_of(preset: str, platform: str) -> float:
        return price(sizes.model_config(ModelOptions(preset=preset), 30522), Runtime(), platform)

    mini, base, on_gpu = price_of("mini", "cpu"), price_of("base", "cpu"), price_of("base", "gpu")
    assert 50_000 < mini < 200_000 and 4_000 < base < 8_000

    def count(each: float, epochs: float) -> int:
        return len(best_lengths(lengths, 128, passes=float(epochs), price=each))

    assert count(base, 3) == SHAPES and count(mini, 3) < SHAPES and count(mini, 100) == SHAPES
    assert count(on_gpu, 3) == 1 and count(on_gpu, 1000) > 3
