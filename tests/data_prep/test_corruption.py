from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.noise import corrupt, room_for
from data_prep.sequences import Spans, sequence_lengths

ORDINARY = np.arange(200_000) > 4  # ids 0 to 4 are special


def sequences(lengths: list[tuple[int, int]], segments: int) -> Spans:
    """Segments of numbered ids (A and B of each sequence), so that the remaining ids can be identified."""
    spans, place = [], 0
    for a, b in lengths:
        b = b if segments == 2 else 0
        spans.append([place, place + a, place + a, place + a + b, 0 if segments == 2 else -1])
        place += a + b
    return Spans(np.arange(5, 5 + place).astype(np.uint32), np.array(spans), segments, np.zeros(len(spans), bool))


def noisy(spans: Spans, seed: int, delete_rate: float, insert_rate: float, seq_len: int = 10**6) -> Spans:
    keys = np.arange(len(spans.sequences), dtype=np.uint64) + np.uint64(7 << 32)
    return corrupt(spans, keys, seed, delete_rate, insert_rate, seq_len, ORDINARY)


some_lengths = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12)


@given(some_lengths, st.sampled_from([1, 2]), st.floats(0, 0.5), st.floats(0, 0.5), st.integers(0, 99))
@settings(deadline=None)
def test_segments_are_what_is_left_in_order_with_ordinary_tokens_between(
    lengths: list[tuple[int, int]], segments: int, delete_rate: float, insert_rate: float, seed: int
) -> None:
    before = sequences(lengths, segments)
    seq_len = 90
    after = noisy(before, seed, delete_rate, insert_rate, seq_len)
    assert after.sequences[:, 4].tolist() == before.sequences[:, 4].tolist()
    assert (sequence_lengths(after.sequences, segments) <= seq_len).all()
    for old, new in zip(before.sequences.tolist(), after.sequences.tolist(), strict=True):
        for begin in (0, 2)[:segments]:
            source = before.ids[old[begin] : old[begin + 1]].tolist()
            result = after.ids[new[begin] : new[begin + 1]].tolist()
            assert result, "no segment is lost"
            assert min(result) > 4
            # What is left of the source comes in its order (an inserted id may be one of the source's, by chance).
            kept = [token for token in result if token in source]
            assert sum(a >= b for a, b in pairwise(kept)) <= 2
            if not insert_rate:
                assert kept == result
            if not delete_rate:
                assert set(source) <= set(result)


def test_rates_are_those_asked_for() -> None:
    """100,000 tokens: 6 sigma bounds, two in a billion."""
    before = sequences([(100, 100)] * 500, 2)
    old = len(before.ids)
    deleted = old - len(noisy(before, 0, 0.2, 0.0).ids)
    assert abs(deleted - 0.2 * old) < 6 * np.sqrt(0.16 * old)
    inserted = len(noisy(before, 0, 0.0, 0.1).ids) - old
    assert abs(inserted - 0.1 * old) < 6 * np.sqrt(0.09 * old)
    both = noisy(before, 0, 0.2, 0.1).ids
    assert abs(np.isin(before.ids, both).sum() - 0.8 * old) < 0.03 * old


def test_noise_is_a_function_of_seed_and_key_alone() -> None:
    """Alone or among others a sequence has the same noise; with another seed another."""
    whole = sequences([(30, 20)] * 50, 2)
    keys = np.arange(50, dtype=np.uint64)
    together = corrupt(whole, keys, 3, 0.1, 0.1, 128, ORDINARY)
    for number in (0, 17, 49):
        alone = whole._replace(sequences=whole.sequences[[number]], late=whole.late[[number]])
        found = corrupt(alone, keys[[number]], 3, 0.1, 0.1, 128, ORDINARY)
        begin, end = together.sequences[number, [0, 3]]
        np.testing.assert_array_equal(found.ids, together.ids[begin:end])
    other = corrupt(whole, keys, 4, 0.1, 0.1, 128, ORDINARY)
    assert len(other.ids) != len(together.ids) or (other.ids != together.ids).any()


def test_special_tokens_stay() -> None:
    spans = Spans(
        np.tile(np.array([2, 9], np.uint16), 500), np.array([[0, 1000, 1000, 1000, -1]]), 1, np.zeros(1, bool)
    )
    found = noisy(spans, 0, 0.5, 0.0)
    assert (found.ids == 2).sum() == 500 and (found.ids == 9).sum() < 300


@pytest.mark.parametrize("segments", [1, 2])
def test_sequences_are_made_shorter_where_noise_makes_them_longer(segments: int) -> None:
    assert room_for(128, 0.1, 0.1, segments) == room_for(128, 0.1, 0.0, segments) == 128
    made = room_for(128, 0.0, 0.1, segments)
    assert made == segments + 1 + int((127 - segments) / 1.1)
    assert room_for(8, 0.0, 0.5, segments) >= 2 * segments + 1
