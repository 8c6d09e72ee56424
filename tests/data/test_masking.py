"""Law 2: masks are a function of (seed, epoch, sequence key, rate, unit) and the position in the sequence.

Statistical tests run on fixed seeds, so they either pass always or fail always; the false-alarm rate they state
is the chance that a sound program would have failed on the seed chosen.
"""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from masking_reference import (
    CLS,
    FIRST_WHOLE,
    KEEPING,
    MASK,
    PAD,
    SEP,
    UNK,
    VOCABULARY,
    Facts,
    Sequence,
    apply,
    pack_rows,
    random_rows,
    reference,
    sequences,
    words_of,
)
from scipy import stats

from bert_jax.data.example import Rows, max_predictions
from bert_jax.data.masking.masker import Masker
from bert_jax.data.masking.rule import UNITS, MaskingRule, ReplacementShares

FALSE_ALARM = 1e-6


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(
    packed=st.lists(st.lists(sequences(24), max_size=4), min_size=1, max_size=4),
    room=st.integers(0, 9),
    unit=st.sampled_from(KEEPING),
    rate=st.floats(0.01, 1),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 2**40),
    reorder_rate=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    split=st.sampled_from([(0.8, 0.1, 0.1), (0.5, 0.5, 0.0), (0.0, 0.3, 0.7)]).map(lambda s: ReplacementShares(*s)),
    words=st.sampled_from(["spaces", "scripts"]),
)
def test_masks_equal_a_reference_in_plain_python(packed, room, unit, rate, seed, epoch, split, reorder_rate, words):
    reorder_rate = 0.0 if unit == "span" else reorder_rate
    pack = max(1, max(len(row) for row in packed))
    width = max(1, room + max(sum(len(sequence.ids) for sequence in row) for row in packed))
    rows = pack_rows(packed, width, pack)
    masked = apply(rows, unit, rate, seed, epoch, split=split, reorder_rate=reorder_rate, words=words)
    rule = MaskingRule(unit, rate, split, reorder_rate=reorder_rate, words=words)
    for row, row_sequences in enumerate(packed):
        wanted, start = {}, 0
        for sequence in row_sequences:
            replaced = reference(sequence, rule, seed, epoch)
            wanted |= {start + position: token for position, token in replaced.items()}
            start += len(sequence.ids)
        count = masked.counts[row]
        assert masked.positions[row, :count].tolist() == list(wanted)
        assert masked.ids[row, :count].tolist() == rows.input_ids[row, list(wanted)].tolist()
        assert not masked.positions[row, count:].any() and not masked.ids[row, count:].any()
        after = rows.input_ids[row].astype(int)
        after[list(wanted)] = list(wanted.values())
        assert masked.input_ids[row].tolist() == after.tolist()


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(
    packed=st.lists(st.lists(sequences(24), min_size=1, max_size=4), min_size=1, max_size=4),
    rate=st.floats(0.01, 0.5),
    words=st.sampled_from(["spaces", "scripts"]),
)
def test_words_and_those_longer_than_the_budget_are_counted(packed, rate, words):
    rows = pack_rows(packed, 4 * 24, 4)
    found = [
        (len(word), max(1, round(rate * len(sequence.ids))))
        for row in packed
        for sequence in row
        for word in words_of(sequence, "word", words)
    ]
    masker = Masker(Facts(), MaskingRule("word", rate, words=words), 0)
    assert masker.count_words(rows) == (len(found), sum(length > budget for length, budget in found))


@pytest.mark.parametrize(
    ("tokens", "spaces", "scripts"),
    [
        ([7, 30, 38], [[1, 2, 3]], [[1, 2, 3]]),
        ([7, 26, 27], [[1, 2, 3]], [[1], [2], [3]]),
        ([22, 30, 31], [[1, 2, 3]], [[1], [2, 3]]),
        ([26, 38, 30, 39], [[1, 2, 3, 4]], [[1, 2], [3, 4]]),
    ],
)
def test_rules_for_words_differ_where_a_script_without_spaces_occurs(tokens, spaces, scripts):
    """The reference, against words by hand."""
    sequence = Sequence([CLS, *tokens, SEP], len(tokens) + 2, 0)
    assert words_of(sequence, "word") == spaces and words_of(sequence, "word", "scripts") == scripts


@pytest.mark.parametrize("unit", UNITS)
def test_a_mask_depends_on_no_other_row_nor_on_their_order(unit):
    rows = random_rows(50, 64)
    whole = apply(rows, unit)
    order = np.random.default_rng(1).permutation(50)[:20]
    some = apply(Rows(*(column[order] for column in rows[:5])), unit)
    for alone, together in zip(some, whole, strict=True):
        np.testing.assert_array_equal(alone, together[order])


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("width", [64, 5000])  # wider rows than 4095 are sorted by wider keys
def test_a_packed_sequence_has_the_masks_it_has_alone(width, unit):
    generator = np.random.default_rng(2)
    lengths = [20, 3, 31, 9]
    packed = []
    for key, length in enumerate(lengths):
        body = generator.integers(FIRST_WHOLE, VOCABULARY, length - 2).tolist()
        packed.append(Sequence([CLS, *body, SEP], length, key))
    together = apply(pack_rows([packed], width, 6), unit)
    start, seen = 0, []
    for sequence in packed:
        alone = apply(pack_rows([[sequence]], 40, 1), unit)
        length, count = int(alone.sequence_lengths[0, 0]), alone.counts[0]
        np.testing.assert_array_equal(together.input_ids[0, start : start + length], alone.input_ids[0, :length])
        seen += (alone.positions[0, :count] + start).tolist()
        start += length
    assert together.positions[0, : together.counts[0]].tolist() == seen


def test_epochs_seeds_and_keys_each_change_the_masks():
    rows = random_rows(20, 64)
    base = apply(rows, seed=1, epoch=0).positions
    other_keys = rows._replace(sequence_keys=rows.sequence_keys + np.uint64(1 << 32))
    for other in (apply(rows, seed=1, epoch=1), apply(rows, seed=2, epoch=0), apply(other_keys)):
        assert (other.positions != base).any(axis=1).all()
    mixed = Masker(Facts(), MaskingRule("word"), 1).apply(rows, np.arange(20) % 2, 64)
    np.testing.assert_array_equal(mixed.positions[::2], base[::2])
    np.testing.assert_array_equal(mixed.positions[1::2], apply(rows, epoch=1).positions[1::2])


def test_token_masking_meets_the_budget_exactly():
    for width in (6, 10, 30, 64, 128):
        masked = apply(random_rows(200, width), "token")
        np.testing.assert_array_equal(masked.counts, max(1, round(0.15 * width)))


def test_word_masking_keeps_the_rate():
    """With a third of the tokens inside words, a budget of 19 is left unmet only where no short word is left."""
    masked = apply(random_rows(2000, 128))
    assert masked.counts.max() == 19
    assert masked.counts.mean() > 0.999 * 19


@pytest.mark.parametrize("inside_share", [0.0, 0.3, 0.9, 1.0])
def test_words_are_masked_whole(inside_share):
    rows = random_rows(300, 64, inside_share=inside_share)
    masked = apply(rows)
    for row in range(300):
        chosen = set(masked.positions[row, : masked.counts[row]].tolist())
        words = words_of(Sequence(rows.input_ids[row].tolist(), int(rows.first_segment_lengths[row, 0]), 0), "word")
        touched = [word for word in words if chosen & set(word)]
        assert 1 <= len(chosen) <= 10
        cut = [word for word in touched if not chosen >= set(word)]
        assert not cut or (len(touched) == 1 and min(map(len, words)) > 10), f"row {row}: words cut: {cut}"


def test_the_tail_of_a_truncated_word_is_a_word():
    sequence = Sequence([CLS, 30, 6, SEP, 31, 32, SEP], 4, 0)
    assert words_of(sequence, "word") == [[1], [2], [4, 5]]
    rows = pack_rows([[sequence._replace(key=key)] for key in range(200)], 7, 1)
    masked = apply(rows, rate=2 / 7)
    seen = {tuple(row[:count]) for row, count in zip(masked.positions.tolist(), masked.counts, strict=True)}
    assert seen == {(1, 2), (4, 5)}


def test_a_segment_start_begins_a_word_even_without_a_separator():
    rows = pack_rows([[Sequence([CLS, 6, 30, 31, SEP], 3, key)] for key in range(200)], 5, 1)
    masked = apply(rows, rate=0.2)
    assert set(masked.positions[:, 0].tolist()) == {3}  # [1, 2] does not fit; as one word, its head 1 would stand here
    assert (masked.counts == 1).all()


def test_special_and_padding_positions_are_never_predicted():
    rows = random_rows(500, 64)
    rows.input_ids[:, 40] = UNK
    rows.sequence_lengths[:] = 50
    rows.input_ids[:250, 50:] = PAD  # and in the other half, what is beyond the length is no token either
    masked = apply(rows, rate=0.5)
    filled = np.arange(64) < masked.counts[:, None]
    assert (masked.ids[filled] >= FIRST_WHOLE).all()
    assert (masked.positions[filled] < 50).all()


def test_a_sequence_has_a_prediction_unless_all_of_it_is_special():
    long_word = [6] + [30] * 20
    packed = [
        [Sequence([CLS, 6, SEP], 3, 1)],
        [Sequence([CLS, *long_word, SEP], 23, 2)],
        [Sequence([CLS, SEP], 2, 3)],
        [Sequence([CLS, UNK, SEP], 3, 4)],
        [],
    ]
    masked = apply(pack_rows(packed, 24, 1))
    assert masked.counts.tolist() == [1, 3, 0, 0, 0]
    assert masked.positions[1, :3].tolist() == [1, 2, 3]  # the head of a word longer than the budget


def test_no_rows_give_no_masks():
    for pack in (1, 3):
        masked = apply(pack_rows([], 16, pack))
        assert masked.input_ids.shape == (0, 16) and masked.positions.shape == (0, 16)


def test_more_predictions_than_room_are_refused():
    rows = random_rows(4, 64)
    masker, epochs = Masker(Facts(), MaskingRule("token"), 0), np.zeros(4, np.int64)
    assert masker.apply(rows, epochs, max_predictions(64, 1, 0.15)).positions.shape == (4, 10)
    with pytest.raises(ValueError, match="a row has 10 predictions, and max_predictions is 9"):
        masker.apply(rows, epochs, 9)


@pytest.mark.parametrize("unit", ["token", "word", "ngram"])
def test_predictions_are_replaced_80_10_10(unit):
    """Chi-square, false-alarm rate 1e-6: the three cases, and the random tokens uniform over the ordinary ones."""
    rows = random_rows(4000, 128)
    masked = apply(rows, unit)
    filled = np.arange(128) < masked.counts[:, None]
    truth = masked.ids[filled]
    after = np.take_along_axis(masked.input_ids, masked.positions, axis=1)[filled]
    ordinary = VOCABULARY - FIRST_WHOLE
    counts = [(after == MASK).sum(), (after == truth).sum()]
    counts.append(len(after) - sum(counts))
    by_chance = 0.1 / ordinary  # a random token equals the label once in 35 times
    wanted = np.array([0.8, 0.1 + by_chance, 0.1 - by_chance]) * len(after)
    assert stats.chisquare(counts, wanted).pvalue > FALSE_ALARM, f"{counts}, wanted about {wanted}"
    changed = (after != MASK) & (after != truth)
    assert (after[changed] >= FIRST_WHOLE).all()
    distance = (after[changed] - truth[changed]) % ordinary
    histogram = np.bincount(distance, minlength=ordinary)[1:]
    assert stats.chisquare(histogram).pvalue > FALSE_ALARM, f"random ids are not uniform: {histogram}"


def test_each_position_is_chosen_equally_often_and_apart_from_its_neighbour():
    """Bounds of a normal, false-alarm rate 1e-6 over all 125 positions and 124 pairs."""
    count, width, budget = 20_000, 128, 19
    rows = random_rows(count, width, inside_share=0)
    rows.input_ids[:, 1:-1] = FIRST_WHOLE  # so that every position but the first and the last is a token
    chosen = np.zeros((count, width), bool)
    np.put_along_axis(chosen, apply(rows, "token").positions[:, :budget], True, axis=1)
    inner = chosen[:, 1:-1]
    bound = stats.norm.isf(FALSE_ALARM / 2 / 250)
    share = budget / 126
    single = (inner.mean(axis=0) - share) / np.sqrt(share * (1 - share) / count)
    both = share * (budget - 1) / 125
    pairs = ((inner[:, 1:] & inner[:, :-1]).mean(axis=0) - both) / np.sqrt(both * (1 - both) / count)
    assert abs(single).max() < bound and abs(pairs).max() < bound


def test_masks_of_two_epochs_are_independent():
    """The overlap of two epochs' masks is hypergeometric: a normal bound, false-alarm rate 1e-6."""
    count, width, budget = 5000, 128, 19
    rows = random_rows(count, width, inside_share=0)
    rows.input_ids[:, 1:-1] = FIRST_WHOLE
    chosen = np.zeros((2, count, width), bool)
    for epoch in (0, 1):
        np.put_along_axis(chosen[epoch], apply(rows, "token", epoch=epoch).positions[:, :budget], True, axis=1)
    overlap = stats.hypergeom(126, budget, budget)
    mean = (chosen[0] & chosen[1]).sum() / count
    assert abs(mean - overlap.mean()) < stats.norm.isf(FALSE_ALARM / 2) * overlap.std() / np.sqrt(count)


def test_tokens_out_of_order_are_unmasked_trigrams_in_any_order():
    """Chi-square, false-alarm rate 1e-6: each of the six orders is as likely, the true one too."""
    rows = random_rows(2000, 66, inside_share=0)
    rows.input_ids[:, 1:-1] = FIRST_WHOLE + np.arange(64) % 35  # so that a token tells its neighbours
    masked, plain = apply(rows, reorder_rate=0.3), apply(rows)
    filled = np.arange(66) < masked.counts[:, None]
    assert (masked.counts - plain.counts <= 21).all()  # round(0.3 * 66 / 3) trigrams
    assert (masked.counts - plain.counts).mean() > 20  # special and masked tokens leave less room
    np.testing.assert_array_equal(
        np.where(filled, np.take_along_axis(rows.input_ids, masked.positions, 1), 0), masked.ids
    )
    orders: dict[tuple, int] = {}
    for row in range(2000):
        alone = set(plain.positions[row, : plain.counts[row]].tolist())
        chosen = masked.positions[row, : masked.counts[row]].tolist()
        assert alone <= set(chosen), "masks know nothing of what is moved"
        moved = [position for position in chosen if position not in alone]
        for place in range(0, len(moved), 3):
            trigram = moved[place : place + 3]
            assert trigram == list(range(trigram[0], trigram[0] + 3))
            truth, after = rows.input_ids[row, trigram].tolist(), masked.input_ids[row, trigram].tolist()
            order = tuple(truth.index(token) for token in after)
            orders[order] = orders.get(order, 0) + 1
    assert len(orders) == 6 and stats.chisquare(list(orders.values())).pvalue > FALSE_ALARM
