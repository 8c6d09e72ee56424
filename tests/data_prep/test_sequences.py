"""Pairs, passages, and their places in rows."""

import random
from itertools import accumulate, chain

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.packing import gaps, pack
from data_prep.sequences import Pair, blocks, next_sentence_pairs, sentence_order_pairs, sentence_passages, truncate

# Documents as the lengths of their sentences in tokens.
documents_of_lengths = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=30), min_size=2, max_size=6)


def laid_out(documents: list[list[int]]) -> tuple[list[int], list[tuple[int, int]]]:
    """Sentence offsets and documents' sentence ranges, as pairing takes them."""
    offsets = [0, *accumulate(length for document in documents for length in document)]
    lasts = list(accumulate(map(len, documents)))
    return offsets, list(zip([0, *lasts], lasts, strict=False))


def reference_pairs(
    documents: list[list[list[int]]], seq_len: int, short_seq_prob: float, generator: random.Random
) -> list[tuple[list[int], list[int], int, int, int]]:
    """The published procedure on lists of tokens: A and B before truncation, label, and both lengths after it."""
    draw = generator.random
    room = seq_len - 3
    found = []
    for own, document in enumerate(documents):
        target = room
        if draw() < short_seq_prob:
            target = 2 + int(draw() * (room - 1))
        chunk: list[list[int]] = []
        i = 0
        while i < len(document):
            chunk.append(document[i])
            if i == len(document) - 1 or sum(map(len, chunk)) >= target:
                a_end = 1 + int(draw() * (len(chunk) - 1)) if len(chunk) >= 2 else 1
                a = list(chain.from_iterable(chunk[:a_end]))
                b: list[int] = []
                label = int(len(chunk) == 1 or draw() < 0.5)
                if label:
                    others = [other for other in range(len(documents)) if other != own]
                    other = documents[others[int(draw() * len(others))]]
                    for sentence in other[int(draw() * len(other)) :]:
                        b += sentence
                        if len(b) >= target - len(a):
                            break
                    i -= len(chunk) - a_end
                else:
                    b = list(chain.from_iterable(chunk[a_end:]))
                a_lost, b_lost = lost_by_truncation(len(a), len(b), room)
                for lost in (a_lost, b_lost):
                    for _ in range(-(-lost // 53)):  # one draw gives 53 coins
                        draw()
                found.append((a, b, label, len(a) - a_lost, len(b) - b_lost))
                chunk = []
            i += 1
    return found


@given(documents_of_lengths, st.integers(8, 64), st.floats(0, 1), st.integers(0, 1000))
@settings(deadline=None)
def test_pairs_are_those_of_the_published_procedure(
    lengths: list[list[int]], seq_len: int, short_seq_prob: float, seed: int
) -> None:
    offsets, ranges = laid_out(lengths)
    pairs = next_sentence_pairs(offsets, ranges, seq_len, short_seq_prob, random.Random(seed))
    tokens = [[list(range(offsets[i], offsets[i + 1])) for i in range(*each)] for each in ranges]
    expected = reference_pairs(tokens, seq_len, short_seq_prob, random.Random(seed))
    assert len(pairs) == len(expected)
    for pair, (a, b, label, a_length, b_length) in zip(pairs, expected, strict=True):
        assert pair.label == label
        # Tokens are numbered, so a contiguous piece of A is a range within it.
        assert (pair.a_end - pair.a_begin, pair.b_end - pair.b_begin) == (a_length, b_length)
        assert a[0] <= pair.a_begin <= pair.a_end <= a[-1] + 1
        assert b[0] <= pair.b_begin <= pair.b_end <= b[-1] + 1


@given(documents_of_lengths, st.integers(8, 64), st.integers(0, 1000))
@settings(deadline=None)
def test_b_is_from_another_document_if_and_only_if_labelled_random(
    lengths: list[list[int]], seq_len: int, seed: int
) -> None:
    offsets, ranges = laid_out(lengths)
    owner = np.repeat(np.arange(len(ranges)), [offsets[last] - offsets[first] for first, last in ranges])
    for pair in next_sentence_pairs(offsets, ranges, seq_len, 0.1, random.Random(seed)):
        assert pair.a_end > pair.a_begin and pair.b_end > pair.b_begin
        assert (pair.a_end - pair.a_begin) + (pair.b_end - pair.b_begin) + 3 <= seq_len
        a_owners, b_owners = set(owner[pair.a_begin : pair.a_end]), set(owner[pair.b_begin : pair.b_end])
        assert len(a_owners) == len(b_owners) == 1
        assert (a_owners != b_owners) == (pair.label == 1)
        if pair.label == 0:
            assert pair.b_begin >= pair.a_end


@given(documents_of_lengths, st.integers(0, 1000))
@settings(deadline=None)
def test_every_token_is_used_once_when_nothing_is_truncated(lengths: list[list[int]], seed: int) -> None:
    """With a row longer than any document each is one chunk, until sentences are put back; none is lost or doubled."""
    offsets, ranges = laid_out(lengths)
    pairs = next_sentence_pairs(offsets, ranges, 3 * offsets[-1] + 10, 0.0, random.Random(seed))
    used = np.zeros(offsets[-1], int)
    for pair in pairs:
        used[pair.a_begin : pair.a_end] += 1
        if pair.label == 0:
            used[pair.b_begin : pair.b_end] += 1
    assert (used == 1).all()


def test_half_of_the_pairs_are_random() -> None:
    """Chunks of many sentences: a fair coin each. A 5-sigma bound: 6 false alarms in ten million runs."""
    offsets, ranges = laid_out([[5] * 400] * 50)
    pairs = next_sentence_pairs(offsets, ranges, 128, 0.0, random.Random(7))
    # The last chunk of a document may be one sentence, whose B must be random: those are no coins.
    last_sentences = {offsets[last - 1] for _, last in ranges}
    labels = [pair.label for pair in pairs if pair.a_begin not in last_sentences]
    assert abs(sum(labels) - len(labels) / 2) < 5 * np.sqrt(len(labels) / 4)


def test_document_of_one_sentence_gets_a_random_segment() -> None:
    offsets, ranges = laid_out([[4], [6]])
    assert [pair.label for pair in next_sentence_pairs(offsets, ranges, 32, 0.0, random.Random(0))] == [1, 1]


@given(st.integers(1, 300), st.integers(1, 300), st.integers(2, 200), st.integers(0, 1000))
def test_truncation_keeps_the_lengths_of_one_token_at_a_time(a: int, b: int, room: int, seed: int) -> None:
    pair = truncate(Pair(0, a, 1000, 1000 + b, 1), room, random.Random(seed))
    a_lost, b_lost = lost_by_truncation(a, b, room)
    assert (pair.a_end - pair.a_begin, pair.b_end - pair.b_begin) == (a - a_lost, b - b_lost)
    assert pair.a_begin >= 0 and pair.a_end <= a and pair.b_begin >= 1000 and pair.b_end <= 1000 + b


def test_truncation_takes_from_a_fair_random_end() -> None:
    """100 tokens lost of A, 2000 times: mean 50, variance 25. 5-sigma bounds: about 1 false alarm in a million runs."""
    generator = random.Random(3)
    fronts = np.array([truncate(Pair(0, 150, 0, 20, 0), 70, generator).a_begin for _ in range(2000)])
    assert abs(fronts.mean() - 50) < 5 * np.sqrt(25 / 2000)
    assert abs(fronts.var() - 25) < 5 * 25 * np.sqrt(2 / 2000)


def test_some_documents_are_cut_short() -> None:
    """Sentences of one token: a pair with B next is as long as the target. 5 sigma: 6 false alarms in ten million."""
    offsets, ranges = laid_out([[1] * 125] * 2000)
    firsts = {first for first, _ in ranges}
    pairs = next_sentence_pairs(offsets, ranges, 128, 0.1, random.Random(5))
    lengths = np.array([pair.b_end - pair.a_begin for pair in pairs if pair.a_begin in firsts and pair.label == 0])
    probability = 0.1 * 123 / 124  # a short target is uniform on 2..125
    assert abs((lengths < 125).mean() - probability) < 5 * np.sqrt(probability * (1 - probability) / len(lengths))
    assert lengths.min() < 30


def reference_order_pairs(
    documents: list[list[list[int]]], seq_len: int, short_seq_prob: float, generator: random.Random
) -> list[tuple[list[int], list[int], int]]:
    """The published procedure on lists of tokens, before truncation; chunks of one sentence are split within it."""
    draw = generator.random
    found = []
    for document in documents:
        target = seq_len - 3
        if draw() < short_seq_prob:
            target = 2 + int(draw() * (target - 1))
        chunk: list[list[int]] = []
        for i, sentence in enumerate(document):
            chunk.append(sentence)
            rest = list(chain.from_iterable(document[i + 1 :]))
            if rest and (sum(map(len, chunk)) < target or len(rest) == 1):
                continue
            if len(chunk) > 1:
                a_end = 1 + int(draw() * (len(chunk) - 1))
                a, b = list(chain.from_iterable(chunk[:a_end])), list(chain.from_iterable(chunk[a_end:]))
            else:
                a_end = 1 + int(draw() * (len(sentence) - 1))
                a, b = sentence[:a_end], sentence[a_end:]
            label = int(draw() < 0.5)
            found.append((b, a, 1) if label else (a, b, 0))
            for lost in lost_by_truncation(*map(len, found[-1][:2]), seq_len - 3):
                for _ in range(-(-lost // 53)):
                    draw()
            chunk = []
    return found


def lost_by_truncation(a: int, b: int, room: int) -> tuple[int, int]:
    a_length, b_length = a, b
    while a_length + b_length > room:
        if a_length > b_length:
            a_length -= 1
        else:
            b_length -= 1
    return a - a_length, b - b_length


def of_two_tokens(documents: list[list[int]]) -> list[list[int]]:
    return [document if sum(document) > 1 else [2] for document in documents]


@given(documents_of_lengths.map(of_two_tokens), st.integers(8, 64), st.floats(0, 1), st.integers(0, 1000))
@settings(deadline=None)
def test_order_pairs_are_those_of_the_published_procedure(
    lengths: list[list[int]], seq_len: int, short_seq_prob: float, seed: int
) -> None:
    offsets, ranges = laid_out(lengths)
    pairs = sentence_order_pairs(offsets, ranges, seq_len, short_seq_prob, random.Random(seed))
    tokens = [[list(range(offsets[i], offsets[i + 1])) for i in range(*each)] for each in ranges]
    expected = reference_order_pairs(tokens, seq_len, short_seq_prob, random.Random(seed))
    assert len(pairs) == len(expected)
    for pair, (a, b, label) in zip(pairs, expected, strict=True):
        a_lost, b_lost = lost_by_truncation(len(a), len(b), seq_len - 3)
        assert pair.label == label
        assert (pair.a_end - pair.a_begin, pair.b_end - pair.b_begin) == (len(a) - a_lost, len(b) - b_lost)
        assert a[0] <= pair.a_begin < pair.a_end <= a[-1] + 1
        assert b[0] <= pair.b_begin < pair.b_end <= b[-1] + 1
        assert (pair.b_begin < pair.a_begin) == (label == 1), "swapped if and only if labelled so"


@given(documents_of_lengths.map(of_two_tokens), st.integers(0, 1000))
@settings(deadline=None)
def test_order_pairs_use_every_token_once_when_nothing_is_truncated(lengths: list[list[int]], seed: int) -> None:
    offsets, ranges = laid_out(lengths)
    used = np.zeros(offsets[-1], int)
    for pair in sentence_order_pairs(offsets, ranges, 3 * offsets[-1] + 10, 0.0, random.Random(seed)):
        used[pair.a_begin : pair.a_end] += 1
        used[pair.b_begin : pair.b_end] += 1
        assert pair.a_begin == pair.b_end if pair.label else pair.a_end == pair.b_begin
    assert (used == 1).all()


def test_half_of_the_order_pairs_are_swapped() -> None:
    """A 5-sigma bound: 6 false alarms in ten million runs."""
    offsets, ranges = laid_out([[5] * 400] * 50)
    labels = [pair.label for pair in sentence_order_pairs(offsets, ranges, 128, 0.0, random.Random(7))]
    assert len(labels) > 500 and abs(sum(labels) - len(labels) / 2) < 5 * np.sqrt(len(labels) / 4)


# Documents as the lengths of their sentences in tokens.
ranges_of_lengths = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=8), min_size=1, max_size=6)


def stream(lengths: list[list[int]]) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """Sentences' begins and ends with a separator before each document, and the documents' sentences."""
    begins, ends, documents, place = [], [], [], 0
    for document in lengths:
        place += 1
        documents.append((len(begins), len(begins) + len(document)))
        for length in document:
            begins.append(place)
            place += length
            ends.append(place)
    return begins, ends, documents


@given(ranges_of_lengths, st.integers(2, 40), st.booleans())
def test_nothing_is_lost_or_doubled_and_no_sentence_that_fits_is_cut(
    lengths: list[list[int]], room: int, across: bool
) -> None:
    begins, ends, documents = stream(lengths)
    spans = sentence_passages(begins, ends, [(0, len(begins))] if across else documents, room)
    used = np.zeros(ends[-1], int)
    for begin, end in spans:
        assert 0 < end - begin <= room
        used[begin:end] += 1
    tokens = np.zeros(ends[-1], bool)
    for begin, end in zip(begins, ends, strict=True):
        tokens[begin:end] = True
    assert (used[tokens] == 1).all()
    assert (used[~tokens] <= across).all(), "a separator stands inside a passage of full sentences or is left out"
    starts = {begin for begin, _ in spans}
    for begin, end in zip(begins, ends, strict=True):
        if end - begin <= room:
            assert not any(begin < start < end for start in starts)


@given(ranges_of_lengths, st.integers(2, 40))
def test_passages_are_as_long_as_they_can_be(lengths: list[list[int]], room: int) -> None:
    begins, ends, documents = stream(lengths)
    spans = sentence_passages(begins, ends, documents, room)
    last_of_document = {ends[last - 1] for _, last in documents}
    for begin, end in spans:
        if end in ends and end not in last_of_document:
            assert ends[ends.index(end) + 1] - begin > room, "the next sentence would have fitted"


def test_full_sentences_continue_across_documents() -> None:
    # Two documents of sentences 3, 4 and 5, 2, separators at 0 and 8.
    begins, ends, documents = stream([[3, 4], [5, 2]])
    assert sentence_passages(begins, ends, [(0, 4)], 12) == [(1, 8), (9, 16)]
    assert sentence_passages(begins, ends, [(0, 4)], 13) == [(1, 14), (14, 16)]
    assert sentence_passages(begins, ends, documents, 13) == [(1, 8), (9, 16)]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 200)), min_size=1, max_size=9), st.integers(1, 50))
def test_blocks_are_full_but_for_the_last_of_a_document(documents: list[tuple[int, int]], room: int) -> None:
    begins, ends, expected, place = [], [], [], 0
    for gap, length in documents:
        place += gap
        begins.append(place)
        expected += [[start, min(start + room, place + length)] for start in range(place, place + length, room)]
        place += length
        ends.append(place)
    assert blocks(np.array(begins), np.array(ends), room).tolist() == expected


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
    packed = pack(np.array(lengths), np.zeros(len(lengths), bool), seq_len, len(lengths) + 2)
    held = np.bincount(packed.rows, np.array(lengths)[packed.order])
    assert sorted(held.tolist()) == best_fit_decreasing(lengths, seq_len)


@given(some_lengths, st.integers(40, 70), st.integers(2, 9))
def test_rooms_are_what_rows_with_a_free_place_have_left(lengths: list[int], seq_len: int, most: int) -> None:
    packed = pack(np.array(lengths), np.zeros(len(lengths), bool), seq_len, most)
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


def test_many_sequences_of_all_lengths_fill_their_rows() -> None:
    lengths = np.random.default_rng(0).integers(5, 129, 1_000_000)
    packed = pack(lengths, np.zeros(1_000_000, bool), 128, 8)
    assert lengths.sum() / ((packed.rows[-1] + 1) * 128) > 0.995
