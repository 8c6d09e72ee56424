import random
from itertools import accumulate, chain

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.sequences import Pair, next_sentence_pairs, sentence_order_pairs, truncate

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
                a_length, b_length = len(a), len(b)
                while a_length + b_length > room:
                    if a_length > b_length:
                        a_length -= 1
                    else:
                        b_length -= 1
                for lost in (len(a) - a_length, len(b) - b_length):
                    for _ in range(-(-lost // 53)):  # one draw gives 53 coins
                        draw()
                found.append((a, b, label, a_length, b_length))
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
    a_length, b_length = a, b
    while a_length + b_length > room:
        if a_length > b_length:
            a_length -= 1
        else:
            b_length -= 1
    assert (pair.a_end - pair.a_begin, pair.b_end - pair.b_begin) == (a_length, b_length)
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
