"""Law 2: masks are a function of (seed, epoch, sequence key, rate, unit) and the position in the sequence.

Statistical tests run on fixed seeds, so they either pass always or fail always; the false-alarm rate they state
is the chance that a sound program would have failed on the seed chosen.
"""

from typing import NamedTuple

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import stats

from bert_jax.command import UserError
from bert_jax.data.example import Rows, max_predictions
from bert_jax.data.masking import Masked, Masker

FALSE_ALARM = 1e-6
PAD, UNK, CLS, SEP, MASK = range(5)
VOCABULARY, FIRST_WHOLE, FIRST_INSIDE = 40, 5, 25


class Facts(NamedTuple):
    """A vocabulary of forty: 0-4 special, 5-24 start a word, 25-39 go on with one."""

    vocab_size: int = VOCABULARY
    mask_id: int = MASK
    special_ids: tuple[int, ...] = (PAD, UNK, CLS, SEP, MASK)
    continuation: np.ndarray = np.arange(VOCABULARY) >= FIRST_INSIDE


class Sequence(NamedTuple):
    ids: list[int]
    first_length: int
    key: int


def pack_rows(packed: list[list[Sequence]], width: int, pack: int) -> Rows:
    count = len(packed)
    ids = np.full((count, width), PAD, np.uint16)
    lengths, firsts = np.zeros((2, count, pack), np.uint16)
    keys = np.zeros((count, pack), np.uint64)
    for row, sequences in enumerate(packed):
        joined = [token for sequence in sequences for token in sequence.ids]
        ids[row, : len(joined)] = joined
        for s, sequence in enumerate(sequences):
            lengths[row, s], firsts[row, s], keys[row, s] = len(sequence.ids), sequence.first_length, sequence.key
    return Rows(ids, lengths, firsts, np.full((count, pack), -1, np.int8), keys)


def apply(rows: Rows, unit: str = "word", rate: float = 0.15, seed: int = 1, epoch: int = 0) -> Masked:
    masker = Masker(Facts(), unit, rate, seed)
    return masker.apply(rows, np.full(len(rows.input_ids), epoch, np.int64), rows.input_ids.shape[1])


def random_rows(count: int, width: int, seed: int = 0, inside_share: float = 0.3) -> Rows:
    """Full rows of one pair each: [CLS] A [SEP] B [SEP]."""
    generator = np.random.default_rng(seed)
    ids = generator.integers(FIRST_WHOLE, FIRST_INSIDE, (count, width)).astype(np.uint16)
    inside = generator.random(ids.shape) < inside_share
    ids[inside] = generator.integers(FIRST_INSIDE, VOCABULARY, inside.sum())
    first = generator.integers(3, width - 2, count)
    ids[:, 0], ids[:, -1], ids[np.arange(count), first - 1] = CLS, SEP, SEP
    lengths = np.full((count, 1), width, np.uint16)
    keys = np.arange(count, dtype=np.uint64)[:, None]
    return Rows(ids, lengths, first[:, None].astype(np.uint16), np.zeros((count, 1), np.int8), keys)


# The reference: the same law in plain Python, one sequence at a time.

WORD = 2**64


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB % WORD
    return x ^ x >> 31


def combine(*parts: int) -> int:
    state = 0
    for part in parts:
        state = mix((state + 0x9E3779B97F4A7C15) % WORD ^ part % WORD)
    return state


def order_of(state: int, position: int) -> int:
    x = (position * 0x9E3779B1 + state) % 2**32
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = ((x ^ x >> 13) + (state >> 32)) * 0xC2B2AE35 % 2**32
    return (x ^ x >> 16) >> 12


def words_of(sequence: Sequence, unit: str) -> list[list[int]]:
    words: list[list[int]] = []
    for position, token in enumerate(sequence.ids):
        if token < FIRST_WHOLE:
            continue
        after_special = sequence.ids[position - 1] < FIRST_WHOLE if position else True
        goes_on = unit == "word" and token >= FIRST_INSIDE
        if goes_on and not after_special and position != sequence.first_length:
            words[-1].append(position)
        else:
            words.append([position])
    return words


def reference(sequence: Sequence, unit: str, rate: float, seed: int, epoch: int) -> dict[int, int]:
    """What stands at each predicted position after masking."""
    state = combine(1, seed, epoch, sequence.key)
    words = sorted(words_of(sequence, unit), key=lambda word: (order_of(state, word[0]), word[0]))
    budget = max(1, round(rate * len(sequence.ids)))
    chosen: list[int] = []
    for word in words:
        if len(chosen) + len(word) <= budget:
            chosen += word
    if not chosen and words:
        chosen = words[0][:budget]
    ordinary = range(FIRST_WHOLE, VOCABULARY)
    replaced = {}
    for position in sorted(chosen):
        word = mix((combine(2, seed, epoch, sequence.key) + position * 0x9E3779B97F4A7C15) % WORD)
        case, random_id = word >> 32, ordinary[(word % 2**32) * len(ordinary) >> 32]
        original = sequence.ids[position]
        replaced[position] = MASK if case < round(0.8 * 2**32) else random_id if case < round(0.9 * 2**32) else original
    return replaced


tokens = st.one_of(st.integers(FIRST_WHOLE, VOCABULARY - 1), st.integers(0, VOCABULARY - 1))
sequences = st.builds(
    lambda ids, share, key: Sequence(ids, max(1, round(share * len(ids))), key),
    st.lists(tokens, min_size=1, max_size=24),
    st.floats(0, 1),
    st.integers(0, WORD - 1),
)


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(
    packed=st.lists(st.lists(sequences, max_size=4), min_size=1, max_size=4),
    room=st.integers(0, 9),
    unit=st.sampled_from(["token", "word"]),
    rate=st.floats(0.01, 1),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 2**40),
)
def test_masks_equal_a_reference_in_plain_python(packed, room, unit, rate, seed, epoch):
    pack = max(1, max(len(row) for row in packed))
    width = max(1, room + max(sum(len(sequence.ids) for sequence in row) for row in packed))
    rows = pack_rows(packed, width, pack)
    masked = apply(rows, unit, rate, seed, epoch)
    for row, row_sequences in enumerate(packed):
        wanted, start = {}, 0
        for sequence in row_sequences:
            replaced = reference(sequence, unit, rate, seed, epoch)
            wanted |= {start + position: token for position, token in replaced.items()}
            start += len(sequence.ids)
        count = masked.counts[row]
        assert masked.positions[row, :count].tolist() == list(wanted)
        assert masked.ids[row, :count].tolist() == rows.input_ids[row, list(wanted)].tolist()
        assert not masked.positions[row, count:].any() and not masked.ids[row, count:].any()
        after = rows.input_ids[row].astype(int)
        after[list(wanted)] = list(wanted.values())
        assert masked.input_ids[row].tolist() == after.tolist()


@pytest.mark.parametrize("unit", ["token", "word"])
def test_a_mask_depends_on_no_other_row_nor_on_their_order(unit):
    rows = random_rows(50, 64)
    whole = apply(rows, unit)
    order = np.random.default_rng(1).permutation(50)[:20]
    some = apply(Rows(*(column[order] for column in rows[:5])), unit)
    for alone, together in zip(some, whole, strict=True):
        np.testing.assert_array_equal(alone, together[order])


@pytest.mark.parametrize("width", [64, 5000])  # wider rows than 4095 are sorted by wider keys
def test_a_packed_sequence_has_the_masks_it_has_alone(width):
    generator = np.random.default_rng(2)
    lengths = [20, 3, 31, 9]
    packed = []
    for key, length in enumerate(lengths):
        body = generator.integers(FIRST_WHOLE, VOCABULARY, length - 2).tolist()
        packed.append(Sequence([CLS, *body, SEP], length, key))
    together = apply(pack_rows([packed], width, 6))
    start, seen = 0, []
    for sequence in packed:
        alone = apply(pack_rows([[sequence]], 40, 1))
        length, count = len(sequence.ids), alone.counts[0]
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
    mixed = Masker(Facts(), "word", 0.15, 1).apply(rows, np.arange(20) % 2, 64)
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
    masker, epochs = Masker(Facts(), "token", 0.15, 0), np.zeros(4, np.int64)
    assert masker.apply(rows, epochs, max_predictions(64, 1, 0.15)).positions.shape == (4, 10)
    with pytest.raises(ValueError, match="a row has 10 predictions, and max_predictions is 9"):
        masker.apply(rows, epochs, 9)


def test_unknown_units_and_rates_are_the_users_mistake():
    with pytest.raises(UserError, match="unit of masking 'sentence'; it is one of: token, word"):
        Masker(Facts(), "sentence", 0.15, 0)
    for rate in (0.0, -0.1, 1.5):
        with pytest.raises(UserError, match="mask rate"):
            Masker(Facts(), "token", rate, 0)


@pytest.mark.parametrize("unit", ["token", "word"])
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
    by_chance = 0.1 / ordinary  # a random token is the truth once in 35 times
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
