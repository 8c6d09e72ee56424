"""Shares of rows: every source gets its share of any stretch of rows, in order, and computed anywhere at once."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.data.mixture import LaneShares, RowShares
from bert_jax.errors import UserError

some_weights = st.lists(st.integers(1, 1000), min_size=1, max_size=6).map(tuple)
ROWS = 120


@given(some_weights)
def test_every_row_is_the_next_one_of_its_source(weights):
    """By going through the rows: a counter for each source."""
    shares = RowShares(weights)
    sources, ordinals = shares.assign(np.arange(ROWS))
    read = [0] * len(weights)
    for number, (source, ordinal) in enumerate(zip(sources.tolist(), ordinals.tolist(), strict=True)):
        assert shares.counts(number) == tuple(read)
        assert ordinal == read[source]
        read[source] += 1


@given(some_weights, st.integers(0, ROWS), st.integers(0, ROWS))
def test_any_consecutive_rows_have_the_shares_within_a_row_for_each_other_source(weights, first, count):
    shares, others = RowShares(weights), len(weights) - 1
    wanted = np.array([Fraction(weight, sum(weights)) for weight in weights])
    from_the_first = np.array(shares.counts(count)) - wanted * count
    assert max(abs(from_the_first)) <= Fraction(others, 2)
    sources, _ = shares.assign(np.arange(first, first + count))
    assert max(abs(np.bincount(sources, minlength=others + 1) - wanted * count)) <= others


@given(some_weights, st.integers(1, 9), st.integers(1, 5))
def test_every_lane_has_the_shares_and_numbers_its_own_rows(weights, lanes, spacing):
    """By going through the rows, with a counter for each source in each lane; batches have `spacing` rows of a lane."""
    shares = LaneShares(RowShares(weights), lanes, spacing)
    wanted = np.array([Fraction(weight, sum(weights)) for weight in weights])
    numbers = np.arange(lanes * spacing * 4)
    sources, ordinals = shares.assign(numbers)
    read = np.zeros((len(weights), lanes), int)
    for number, source, ordinal in zip(numbers.tolist(), sources.tolist(), ordinals.tolist(), strict=True):
        if number % lanes == 0:
            np.testing.assert_array_equal(shares.counts(number), read)
        if number % (lanes * spacing) == 0:  # a whole number of batches, each of which has its shares
            batch = np.bincount(sources[number : number + lanes * spacing], minlength=len(weights))
            assert max(abs(batch - wanted * lanes * spacing)) <= len(weights) - 1
        assert ordinal == read[source, number % lanes]
        read[source, number % lanes] += 1
    np.testing.assert_array_equal(RowShares(weights).assign(numbers), LaneShares(RowShares(weights)).assign(numbers))


@given(some_weights, st.integers(0, 10**15), st.integers(1, 20))
def test_rows_far_away_are_those_that_exact_arithmetic_gives(weights, first, count):
    shares, numbers = RowShares(weights), np.arange(first, first + count)
    sources, ordinals = shares.assign(numbers)
    for number, source, ordinal in zip(numbers.tolist(), sources.tolist(), ordinals.tolist(), strict=True):
        before, after = (exact_counts(weights, rows) for rows in (number, number + 1))
        assert shares.counts(number) == before
        assert [later - earlier for earlier, later in zip(before, after, strict=True)] == [
            int(other == source) for other in range(len(before))
        ]
        assert before[source] == ordinal


def exact_counts(weights: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """The rows of each source: its part of what the sources before it leave, rounded half up."""
    found: list[int] = []
    for number, weight in enumerate(weights):
        part = Fraction((rows - sum(found)) * weight, sum(weights[number:]))
        found.append(int(part + Fraction(1, 2)))
    return tuple(found)


@pytest.mark.parametrize("batch_size", [1, 16])
def test_after_ten_thousand_steps_the_shares_are_met_within_a_thousandth(batch_size):
    weights = [0.5, 0.3, 0.1999, 0.0001]
    shares = RowShares.of(weights, "abcd", "data.mixture")
    rows = 10_000 * batch_size
    sources, _ = shares.assign(np.arange(rows))
    np.testing.assert_allclose(np.bincount(sources, minlength=4) / rows, weights, rtol=0, atol=1e-3)


def test_weights_are_relative_and_decimal_shares_are_exact():
    for weights in ([0.5, 0.3, 0.2], [5.0, 3.0, 2.0], [5e307, 3e307, 2e307]):
        assert RowShares.of(weights, "abc", "data.mixture").fractions == (0.5, 0.3, 0.2)


def test_a_share_that_would_vanish_is_refused_by_name():
    with pytest.raises(UserError, match=r"the share of rare in data\.mixture is less than 1e-07 of the rows"):
        RowShares.of([1.0, 1e-9], ("common", "rare"), "data.mixture")
