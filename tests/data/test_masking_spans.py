"""Runs of words (bert_jax/data/masking/selection.py): n-grams as ALBERT's, spans as SpanBERT's, and their targets.

Statistical tests: see test_masking.py.
"""

from itertools import pairwise

import numpy as np
import pytest
from masking_reference import CLS, FIRST_WHOLE, MASK, PAD, SEP, Sequence, apply, pack_rows, random_rows, words_of
from scipy import stats

from bert_jax.data.loader import token_layout
from bert_jax.data.masking.rule import MaskingRule
from bert_jax.data.masking.selection import RunLengths, span_targets

FALSE_ALARM = 1e-6
DRAWS = 200_000


def draw(unit: str, room: int) -> np.ndarray:
    values = np.random.default_rng(0).integers(0, 2**32, DRAWS).astype(np.uint64)
    return RunLengths(MaskingRule(unit)).draw(values, np.full(DRAWS, room))


def spans_of(positions: list[int]) -> list[list[int]]:
    """Runs of consecutive numbers."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and runs[-1][-1] == position - 1:
            runs[-1].append(position)
        else:
            runs.append([position])
    return runs


def test_spans_have_the_lengths_of_the_paper():
    """Joshi et al. 2020, section 3.1: geometric with p = 0.2, at most 10 words, a mean of 3.8."""
    lengths = draw("span", 1000)
    geometric = 0.2 * 0.8 ** np.arange(10)
    wanted = geometric / geometric.sum()
    assert abs(np.arange(1, 11) @ wanted - 3.8) < 0.005
    assert stats.chisquare(np.bincount(lengths, minlength=11)[1:], wanted * DRAWS).pvalue > FALSE_ALARM
    error = np.sqrt(np.arange(1, 11) ** 2 @ wanted - 3.797**2) / np.sqrt(DRAWS)
    assert abs(lengths.mean() - np.arange(1, 11) @ wanted) < stats.norm.isf(FALSE_ALARM / 2) * error


@pytest.mark.parametrize(("room", "wanted"), [(9, [6, 3, 2]), (3, [6, 3, 2]), (2, [2, 1]), (1, [1])])
def test_n_grams_are_sampled_by_one_over_n(room, wanted):
    """Lan et al. 2020, section 4.1: p(n) = (1/n) / (1/1 + 1/2 + 1/3), over the lengths that there is room for."""
    counts = np.bincount(draw("ngram", room))[1:]
    assert len(counts) == len(wanted)
    if len(wanted) > 1:
        assert stats.chisquare(counts, np.array(wanted) / sum(wanted) * DRAWS).pvalue > FALSE_ALARM


def test_the_number_of_spans_agrees_with_renewal_theory():
    """Spans of the lengths above until 40 tokens are taken, the last one cut; in 4000 words 1 in 100 touches another.

    Bound of a normal, false-alarm rate 1e-6.
    """
    weights = 0.8 ** np.arange(10)
    expected = np.zeros(41)  # spans that a budget takes
    for budget in range(1, 41):
        expected[budget] = 1 + sum(
            weight / weights.sum() * expected[max(0, budget - size)] for size, weight in enumerate(weights, start=1)
        )
    rows = random_rows(400, 4000, inside_share=0)
    masked = apply(rows, "span", rate=0.01)
    assert (masked.counts == 40).all()
    spans = sum(len(spans_of(masked.positions[row, :40].tolist())) for row in range(400))
    noise = stats.norm.isf(FALSE_ALARM / 2) * np.sqrt(400 * 40 * 7.4 / 3.8**3)
    assert 0.98 * 400 * expected[40] - noise < spans < 400 * expected[40] + noise


@pytest.mark.parametrize("unit", ["ngram", "span"])
def test_runs_are_of_whole_words_within_a_segment_and_the_budget(unit):
    rows = random_rows(300, 96, inside_share=0.4)
    masked = apply(rows, unit)
    for row in range(300):
        chosen = set(masked.positions[row, : masked.counts[row]].tolist())
        words = words_of(Sequence(rows.input_ids[row].tolist(), int(rows.first_segment_lengths[row, 0]), 0), "word")
        touched = [word for word in words if chosen & set(word)]
        assert all(chosen >= set(word) for word in touched), f"row {row}: a word is cut"
        assert len(chosen) <= 14
    assert masked.counts.mean() > 0.99 * 14


def test_a_span_is_replaced_alike():
    """Each span is all [MASK], all kept or all random (a random token may equal the label), by shares of the split."""
    rows = random_rows(4000, 128)
    masked = apply(rows, "span")
    cases = np.zeros(3, int)
    for row in range(4000):
        for run in spans_of(masked.positions[row, : masked.counts[row]].tolist()):
            after, truth = masked.input_ids[row, run], rows.input_ids[row, run]
            if (after == MASK).any():
                assert (after == MASK).all()
                cases[0] += 1
            else:
                cases[1 + (after == truth).all()] += 1
    by_chance = 1 / 35  # a random token equals the label once in 35 times, so a span of one token may look kept
    assert abs(cases[0] / cases.sum() - 0.8) < stats.norm.isf(FALSE_ALARM) * np.sqrt(0.16 / cases.sum())
    noise = stats.norm.isf(FALSE_ALARM) * np.sqrt(0.09 / cases.sum())
    assert -noise - 0.1 * by_chance < cases[1] / cases.sum() - 0.1 < noise


def test_the_first_word_of_a_span_is_any_word_equally_often():
    rows = random_rows(20_000, 34, inside_share=0)
    rows.input_ids[:, 1:-1] = FIRST_WHOLE
    masked = apply(rows, "span", rate=1 / 34)  # one prediction: the head of one span
    assert (masked.counts == 1).all()
    starts = np.bincount(masked.positions[:, 0], minlength=34)[1:-1]
    assert stats.chisquare(starts).pvalue > FALSE_ALARM


def test_targets_are_the_positions_around_a_span_and_the_offset_in_it():
    bodies = [[6, 30, 7, 8], [9, 30, 31], [5] * 12]
    packed = [Sequence([CLS, *body, SEP], len(body) + 2, key) for key, body in enumerate(bodies)]
    for epoch in range(50):
        rows = pack_rows([packed, packed[:1]], 30, 3)
        masked = apply(rows, "span", rate=0.4, epoch=epoch)
        targets = span_targets(masked.positions, masked.counts, token_layout(rows).sequence_ids)
        for row in range(2):
            positions = masked.positions[row, : masked.counts[row]].tolist()
            wanted = [
                (run[0] - 1, run[-1] + 1, place) for run in spans_of(positions) for place, _ in enumerate(run, start=1)
            ]
            got = np.stack(targets)[:, row]
            assert list(zip(*got[:, : len(positions)].tolist(), strict=True)) == wanted
            assert not got[:, len(positions) :].any()
            for left, right, _ in wanted:
                assert left not in positions and right not in positions, "a border is masked"


def test_targets_stay_in_their_sequence():
    """Of sequences without special tokens at their ends, which build_examples never writes."""
    rows = pack_rows([[Sequence([6, 7], 2, 0), Sequence([8, 9, 6], 3, 1)]], 5, 2)
    masked = apply(rows, "span", rate=1.0)
    assert masked.counts.tolist() == [5]
    left, right, offsets = span_targets(masked.positions, masked.counts, token_layout(rows).sequence_ids)
    assert left.tolist() == [[0, 0, 2, 2, 2]]
    assert right.tolist() == [[1, 1, 4, 4, 4]]
    assert offsets.tolist() == [[1, 2, 1, 2, 3]]
    rows = pack_rows([[Sequence([6, 7], 2, 0)], [Sequence([8, 9], 2, 1)]], 2, 1)  # the next row is another text
    masked = apply(rows, "span", rate=1.0)
    left, right, offsets = span_targets(masked.positions, masked.counts, token_layout(rows).sequence_ids)
    assert (left.tolist(), right.tolist(), offsets.tolist()) == ([[0, 0]] * 2, [[1, 1]] * 2, [[1, 2]] * 2)


def test_no_predictions_have_no_targets():
    rows = pack_rows([[Sequence([CLS, SEP], 2, 0)], []], 8, 1)
    assert not any(field.any() for field in span_targets(*apply(rows, "span")[1:4:2], token_layout(rows).sequence_ids))
    assert rows.input_ids[1].tolist() == [PAD] * 8


@pytest.mark.parametrize("unit", ["ngram", "span"])
def test_a_lower_rate_takes_of_the_same_words_first(unit):
    """The order of words and the lengths of runs know nothing of the rate."""
    rows = random_rows(200, 128, inside_share=0)
    few, many = (apply(rows, unit, rate=rate) for rate in (0.008, 0.1))
    assert (few.counts == 1).all() and (many.counts == 13).all()
    assert (many.positions[:, :13] == few.positions[:, :1]).any(axis=1).all()


def test_spans_part_at_special_tokens():
    packed = [[Sequence([CLS, 6, 7, SEP, 8, 9, SEP], 4, key)] for key in range(300)]
    masked = apply(pack_rows(packed, 7, 1), "span", rate=2 / 7)
    seen = {tuple(row[:count]) for row, count in zip(masked.positions.tolist(), masked.counts, strict=True)}
    assert all(position not in (0, 3, 6) for chosen in seen for position in chosen)
    assert {(1, 2), (4, 5)} <= seen
    assert all(b > a for chosen in seen for a, b in pairwise(chosen))
