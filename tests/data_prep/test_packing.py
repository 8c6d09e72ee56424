import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.packing import gaps, pack


def best_fit_decreasing(lengths: list[int], seq_len: int) -> list[int]:
    """Best fit as in textbooks; returns the lengths in each row."""
    rows: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row, held in enumerate(rows) if held + length <= seq_len]
        if fitting:
            rows[max(fitting, key=lambda row: rows[row])] += length
        else:
            rows.append(length)
    return sorted(rows)


some_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=120)


def none_late(lengths: list[int]) -> np.ndarray:
    return np.zeros(len(lengths), bool)


@given(some_lengths, st.integers(0, 1 << 120), st.integers(40, 70), st.integers(1, 9))
def test_every_sequence_has_a_place_of_its_own_within_a_row(
    lengths: list[int], coins: int, seq_len: int, most: int
) -> None:
    late = np.array([coins >> number & 1 for number in range(len(lengths))], bool)
    packed = pack(np.array(lengths), late, seq_len, most)
    assert sorted(packed.order.tolist()) == list(range(len(lengths)))
    taken = np.zeros((packed.rows[-1] + 1, seq_len), int)
    for number, row, slot in zip(packed.order, packed.rows, packed.starts, strict=True):
        assert slot + lengths[number] <= seq_len
        taken[row, slot : slot + lengths[number]] += 1
    assert taken.max() == 1
    for row, held in enumerate(taken):
        of_row = packed.rows == row
        assert 1 <= of_row.sum() <= most
        assert packed.places[of_row].tolist() == list(range(of_row.sum()))
        assert (np.diff(packed.order[of_row]) > 0).all()
        assert (np.diff(held) <= 0).all(), "sequences lie one after the other from slot 0 on"
    firsts = packed.order[packed.places == 0]
    assert (np.diff(firsts) > 0).all(), "rows are in the order of their first sequences"


@given(some_lengths, st.integers(40, 70))
def test_rows_are_those_of_best_fit_decreasing(lengths: list[int], seq_len: int) -> None:
    packed = pack(np.array(lengths), none_late(lengths), seq_len, len(lengths) + 2)
    held = np.bincount(packed.rows, np.array(lengths)[packed.order])
    assert sorted(held.tolist()) == best_fit_decreasing(lengths, seq_len)


@given(some_lengths, st.integers(40, 70), st.integers(2, 9))
def test_rooms_are_what_rows_with_a_free_place_have_left(lengths: list[int], seq_len: int, most: int) -> None:
    packed = pack(np.array(lengths), none_late(lengths), seq_len, most)
    held, count = np.bincount(packed.rows, np.array(lengths)[packed.order]), np.bincount(packed.rows)
    assert sorted(gaps(np.array(lengths), seq_len, most)) == sorted((seq_len - held)[count < most].tolist())


@given(some_lengths, st.integers(41, 70), st.integers(3, 9))
def test_late_sequences_as_long_as_the_rooms_fill_all_rows(lengths: list[int], seq_len: int, most: int) -> None:
    left = [room for room in gaps(np.array(lengths), seq_len, most) if room]
    together = np.array(lengths + left)
    packed = pack(together, np.arange(len(together)) >= len(lengths), seq_len, most)
    assert together.sum() == (packed.rows[-1] + 1) * seq_len


def test_one_sequence_a_row_leaves_them_as_they_are() -> None:
    packed = pack(np.array([3, 9, 1]), np.zeros(3, bool), 9, 1)
    assert packed.order.tolist() == packed.rows.tolist() == [0, 1, 2]
    assert packed.places.tolist() == packed.starts.tolist() == [0, 0, 0]


def test_sequence_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="sequences of 3 to 9 tokens do not fit rows of 8"):
        pack(np.array([3, 9]), np.zeros(2, bool), 8, 2)


def test_many_sequences_of_all_lengths_fill_their_rows() -> None:
    lengths = np.random.default_rng(0).integers(5, 129, 1_000_000)
    packed = pack(lengths, np.zeros(1_000_000, bool), 128, 8)
    assert lengths.sum() / ((packed.rows[-1] + 1) * 128) > 0.995
