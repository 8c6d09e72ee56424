"""The rule of masking, the room for predictions, and random tokens by frequency."""

import json

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from masking_reference import CLS, FIRST_WHOLE, SEP, VOCABULARY, Facts, Sequence, pack_rows, random_rows
from scipy import stats

from bert_jax.data.example import SHORTEST_SEQUENCE, max_predictions
from bert_jax.data.masking.masker import Masker
from bert_jax.data.masking.rule import UNITS, MaskingRule, ReplacementShares
from bert_jax.errors import UserError

FALSE_ALARM = 1e-6


def budget(rate: float, positions: int) -> int:
    return max(1, round(rate * positions))


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.15, 0.2, 0.3, 0.5, 0.85, 1.0])
def test_no_packing_overflows_its_row(rate):
    """By dynamic programming over every packing of up to 8 sequences into up to 48 positions."""
    positions = 48
    budgets = np.array([budget(rate, length) for length in range(SHORTEST_SEQUENCE, positions + 1)])
    most = np.zeros(positions + 1, int)  # the maximum over any number of sequences so far, by positions
    for pack in range(1, 9):
        more = most.copy()
        for total in range(positions + 1):
            # What the other sequences can predict in the positions that a growing last one leaves them.
            rest = most[: max(0, total + 1 - SHORTEST_SEQUENCE)][::-1]
            more[total] = max(more[total], (rest + budgets[: len(rest)]).max(initial=0))
        most = np.maximum.accumulate(more)
        for total in range(8, positions + 1):
            room = max_predictions(total, pack, rate)
            assert min(most[total], total) <= room <= most[total] + pack // 2 + 1, (
                f"{pack} sequences in {total} positions"
            )


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    bodies=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    rate=st.floats(0.001, 1),
    room=st.integers(0, 5),
    rule=st.sampled_from([("token", 0.0), ("span", 0.0), ("infill", 0.0), ("token", 0.2), ("word", 1.0)]),
)
def test_packed_rows_of_any_lengths_have_room(bodies, rate, room, rule):
    packed = [Sequence([CLS, *[FIRST_WHOLE] * body, SEP], body + 2, key) for key, body in enumerate(bodies)]
    width = sum(body + 2 for body in bodies) + room
    masker = Masker(Facts(), MaskingRule(rule[0], rate, reorder_rate=rule[1]), 0)
    most = max_predictions(width, len(bodies), rate, rule[1])
    masker.apply(pack_rows([packed], width, len(bodies)), np.zeros(1, int), most)


def test_rows_of_one_sequence_have_the_room_they_always_had():
    for rate in (0.05, 0.15, 0.2, 0.3, 0.4):
        for positions in (8, 64, 128, 384, 512, 8192):
            assert max_predictions(positions, 1, rate) == max(1, int(rate * positions + 0.5 + 1e-6))
    assert max_predictions(128, 1, 0.15) == 19
    assert max_predictions(512, 1, 0.15) == 77


def test_a_rule_survives_the_manifest():
    rule = MaskingRule("word", 0.2, ReplacementShares(0.5, 0.25, 0.25), "unigram", 0.05)
    assert MaskingRule.from_manifest(json.loads(json.dumps(rule.to_manifest()))) == rule


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"split": [0.8, 0.2]}, r"masking\.split is \[0\.8, 0\.2\]"),
        ({"split": [0.8, 0.1, 0.2]}, "three shares that sum to 1"),
        ({"split": [1.1, -0.1, 0.0]}, "three shares that sum to 1"),
        ({"split": [0.0, 0.0, 0.0]}, "three shares that sum to 1"),
        ({"split": [float("nan"), 0.5, 0.5]}, "three shares that sum to 1"),
        ({"span_max": 0}, "span_max"),
        ({"unit": "sentence"}, "unknown masking unit 'sentence'; choose from token, word, ngram, span"),
        ({"rate": 0.0}, "mask rate"),
        ({"rate": -0.1}, "mask rate"),
        ({"rate": 1.5}, "mask rate"),
        ({"reorder_rate": 0.1}, "0 with unit span"),
        ({"unit": "word", "reorder_rate": 1.1}, "a share from 0 to 1"),
    ],
)
def test_an_invalid_rule_is_refused(damage, message):
    with pytest.raises(UserError, match=message):
        MaskingRule.from_manifest(MaskingRule("span").to_manifest() | damage)


@pytest.mark.parametrize("unit", ["token", "span"])
def test_each_row_may_have_a_rate_of_its_own(unit):
    rows = random_rows(40, 64)
    masker = Masker(Facts(), MaskingRule(unit), 3)
    epochs = np.zeros(40, int)
    mixed = masker.apply(rows, epochs, 64, np.where(np.arange(40) % 2, 0.3, 0.05))
    for parity, rate in ((0, 0.05), (1, 0.3)):
        alone = Masker(Facts(), MaskingRule(unit, rate), 3).apply(rows, epochs, 64)
        for some, whole in zip(mixed, alone, strict=True):
            np.testing.assert_array_equal(some[parity::2], whole[parity::2])


def test_random_tokens_come_as_often_as_in_the_text():
    """Chi-square, false-alarm rate 1e-6."""
    counts = np.zeros(VOCABULARY, np.int64)
    counts[FIRST_WHOLE:] = np.random.default_rng(0).zipf(1.5, VOCABULARY - FIRST_WHOLE).clip(max=10**12)
    counts[FIRST_WHOLE + 3] = 0
    counts[:FIRST_WHOLE] = 10**9  # special tokens are never sampled, even with the highest counts
    rows = random_rows(3000, 128)
    rule = MaskingRule("token", split=ReplacementShares(0.0, 1.0, 0.0), random="unigram")
    masked = Masker(Facts(), rule, 0, counts).apply(rows, np.zeros(3000, int), 19)
    drawn = np.take_along_axis(masked.input_ids, masked.positions, axis=1)
    histogram = np.bincount(drawn.reshape(-1), minlength=VOCABULARY)
    assert not histogram[:FIRST_WHOLE].any() and not histogram[FIRST_WHOLE + 3]
    likely = counts[FIRST_WHOLE:] / counts[FIRST_WHOLE:].sum()
    often = likely * drawn.size >= 5
    got = np.append(histogram[FIRST_WHOLE:][often], histogram[FIRST_WHOLE:][~often].sum())
    wanted = np.append(likely[often], likely[~often].sum()) * drawn.size
    assert stats.chisquare(got[wanted > 0], wanted[wanted > 0]).pvalue > FALSE_ALARM


def test_random_tokens_by_frequency_need_the_counts():
    rule = MaskingRule("token", split=ReplacementShares(0.0, 1.0, 0.0), random="unigram")
    rows = random_rows(3, 16)
    assert Masker(Facts(), rule, 0).count(rows, np.zeros(3, int)).tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="need unigram_counts"):
        Masker(Facts(), rule, 0).apply(rows, np.zeros(3, int), 16)
    with pytest.raises(UserError, match="contain no ordinary token"):
        Masker(Facts(), rule, 0, np.zeros(VOCABULARY, np.int64))


@pytest.mark.parametrize("rate", [0.15, 0.4, 0.7, 1.0])
@pytest.mark.parametrize("unit", UNITS)
def test_counting_needs_no_replacing(unit: str, rate: float):
    """At the higher rates there are not words enough of one token to tell without drawing."""
    rows = random_rows(200, 64)
    masker, epochs = Masker(Facts(), MaskingRule(unit, rate=rate), 1), np.arange(200)
    np.testing.assert_array_equal(masker.count(rows, epochs), masker.apply(rows, epochs, 64).counts)
