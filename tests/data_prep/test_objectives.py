import random
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.data.manifest import OBJECTIVES, PAIRS
from bert_jax.tokenization import tokenizer as tokenizers
from data_prep.packing import pack
from data_prep.readers import corpus as readers
from data_prep.sequences import (
    SHORTEST,
    Encoded,
    Spans,
    cut_long_sentences,
    left_out,
    sequence_lengths,
    spans,
    usable,
)
from data_prep.units import UnitSplitter
from data_prep.worker import encode

SEPARATOR = 0  # other ids count from 1, each once

documents_of_lengths = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=40), min_size=2, max_size=8)


def unit(lengths: list[list[int]]) -> Encoded:
    offsets = np.array([0, *accumulate(length for document in lengths for length in document)])
    lasts = np.cumsum([len(document) for document in lengths])
    documents = np.stack([lasts - [len(document) for document in lengths], lasts], axis=1)
    return Encoded(np.arange(1, offsets[-1] + 1, dtype=np.uint32), offsets, documents, 0)


def made(objective: str, encoded: Encoded, seq_len: int, most: int, seed: int) -> Spans:
    return spans(objective, encoded, seq_len, most, 0.0, SEPARATOR, random.Random(seed))


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(lengths=documents_of_lengths, seq_len=st.integers(8, 64), most=st.integers(1, 6), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=50)
def test_sequences_keep_the_guarantees_of_the_format(
    objective: str, lengths: list[list[int]], seq_len: int, most: int, seed: int
) -> None:
    """Lengths, contiguity, borders and labels, packed (where some are cut again) or not."""
    encoded, skipped = usable(objective, unit(lengths))
    if not len(encoded.documents):
        return
    found = made(objective, encoded, seq_len, most, seed)
    owner = np.repeat(np.arange(len(encoded.documents)), np.diff(encoded.offsets[encoded.documents])[:, 0])
    assert sequence_lengths(found.sequences, found.segments).max() <= seq_len
    used = np.zeros(len(unit(lengths).ids) + 1, int)
    if skipped:
        owner = None
    for a_begin, a_end, b_begin, b_end, label in found.sequences.tolist():
        a, b = found.ids[a_begin:a_end], found.ids[b_begin:b_end]
        used[a] += 1
        assert a[0] != SEPARATOR != a[-1]
        if objective not in PAIRS:
            assert label == -1 and not len(b)
            if objective != "full_sentences" and owner is not None:
                assert owner[a[0] - 1] == owner[a[-1] - 1]
            continue
        assert len(b)
        if objective == "sop" or label == 0:
            used[b] += 1
        if owner is None:
            continue
        owners = owner[a[0] - 1], owner[a[-1] - 1], owner[b[0] - 1], owner[b[-1] - 1]
        assert owners[0] == owners[1] and owners[2] == owners[3]
        assert (owners[0] != owners[2]) == (objective == "nsp" and label == 1)
        if objective == "sop":
            assert (b_end <= a_begin) if label else (a_end <= b_begin)
        elif label == 0:
            assert a_end <= b_begin
    if objective in PAIRS:
        assert (used <= 1).all()
    else:
        assert (used[1:] == 1).all(), "every id is in one sequence"


@pytest.mark.parametrize("objective", PAIRS)
@given(lengths=documents_of_lengths, seq_len=st.integers(8, 64), most=st.integers(2, 6), seed=st.integers(0, 999))
@settings(deadline=None, max_examples=200)
def test_cutting_again_loses_no_token_of_a_pair(
    objective: str, lengths: list[list[int]], seq_len: int, most: int, seed: int
) -> None:
    """Of random segments it may: each is some other sequence's own."""
    encoded, _ = usable(objective, unit(lengths))
    if not len(encoded.documents):
        return

    def used(most: int) -> set[int]:
        sequences = made(objective, encoded, seq_len, most, seed).sequences.tolist()
        own = [(a, b) if label and objective == "nsp" else (a, b, c, d) for a, b, c, d, label in sequences]
        return {
            place
            for each in own
            for begin, end in zip(each[::2], each[1::2], strict=True)
            for place in range(begin, end)
        }

    assert used(most) == used(1)


def test_documents_that_an_objective_cannot_use_are_counted() -> None:
    encoded = unit([[1], [2, 3], [1]])._replace(empty=2)
    assert usable("sop", encoded)[1] == {"no_tokens": 2, "too_short": 2}
    assert usable("sop", encoded)[0].documents.tolist() == [[1, 3]]
    assert usable("nsp", encoded) == (encoded, {"no_tokens": 2})
    one = unit([[2, 3]])
    assert usable("nsp", one)[1] == {"no_other_document": 1} and not len(usable("nsp", one)[0].documents)
    assert usable("single", one) == (one, {})


def test_cut_again_are_few_sequences_and_none_too_short() -> None:
    generator = random.Random(0)
    encoded = unit([[generator.randrange(1, 60) for _ in range(generator.randrange(1, 200))] for _ in range(60)])
    for objective in OBJECTIVES:
        plain, packed = made(objective, encoded, 256, 1, 0), made(objective, encoded, 256, 4, 0)
        kept = {tuple(each) for each in plain.sequences.tolist()} & {tuple(each) for each in packed.sequences.tolist()}
        assert len(kept) > 0.85 * len(plain.sequences)
        lengths = sequence_lengths(packed.sequences, packed.segments)
        assert (lengths < SHORTEST).mean() < 0.03, "rests alone are shorter"


@pytest.mark.slow
@pytest.mark.parametrize(("seq_len", "most", "filled"), [(128, 4, 0.99), (512, 3, 0.995), (512, 8, 0.995)])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_packed_rows_of_wikipedia_are_full(
    bert_jax_data: Path, objective: str, seq_len: int, most: int, filled: float
) -> None:
    tokenizer = tokenizers.load(bert_jax_data / "vocab" / "bert-base-uncased.txt")
    documents = readers.documents(bert_jax_data / "pretrain" / "wiki_en_0.txt.xz")
    first = next(UnitSplitter(1_000_000, 0.0, 2).split(documents))
    encoded, _ = usable(objective, encode(tokenizer, first))
    found = made(objective, encoded, seq_len, most, 0)
    lengths = sequence_lengths(found.sequences, found.segments)
    packed = pack(lengths, found.late, seq_len, most)
    assert lengths.sum() / ((packed.rows[-1] + 1) * seq_len) > filled


def test_long_sentences_are_cut_into_pieces_and_others_are_not() -> None:
    """Pieces have the ids of their sentence in order, and no unpunctuated text is lost but a part of the last chunk."""
    draw = random.Random(0)
    for _ in range(50):
        lengths = [draw.choice([1, 5, 20, 62, 63, 200, 3000]) for _ in range(draw.randint(2, 12))]
        split = draw.randint(1, len(lengths) - 1)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        text = Encoded(np.arange(offsets[-1]), offsets, np.array([[0, split], [split, len(lengths)]]), 0)
        pieces, documents = cut_long_sentences(text, 125)
        assert pieces == sorted(set(pieces)) and {*offsets.tolist()} <= {*pieces}
        assert [(pieces[first], pieces[last]) for first, last in documents] == [
            (offsets[first], offsets[last]) for first, last in text.documents.tolist()
        ]
        for begin, length in zip(offsets.tolist(), lengths, strict=False):
            inside = [end - start for start, end in pairwise(pieces) if begin <= start < begin + length]
            assert (inside == [length]) if length <= 62 else (max(inside) <= 15 and max(inside) - min(inside) <= 1)


@pytest.mark.parametrize("seq_len", [8, 16, 64, 128, 512])
def test_text_without_long_sentences_is_not_cut(seq_len: int) -> None:
    room = seq_len - 3
    text = unit([[1, room // 2, 2], [room // 2] * 5])
    offsets, documents = cut_long_sentences(text, room)
    assert (offsets, documents) == (text.offsets.tolist(), [(0, 3), (3, 8)])
    longer = unit([[room // 2 + 1, room + 1, 9 * room]])
    pieces, _ = cut_long_sentences(longer, room)
    assert max(end - begin for begin, end in pairwise(pieces)) <= max(room // 8, 4)


@pytest.mark.parametrize("objective", ["nsp", "sop"])
def test_text_without_punctuation_is_kept(objective: str) -> None:
    lengths = [4000, 2500, 3000]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    text = Encoded(np.arange(offsets[-1]), offsets, np.array([[0, 1], [1, 2], [2, 3]]), 0)
    pairs = spans(objective, text, 128, 1, 0.1, 1, random.Random(0))
    held = np.zeros(len(text.ids), bool)
    for a_begin, a_end, b_begin, b_end, _ in pairs.sequences.tolist():
        held[a_begin:a_end] = held[b_begin:b_end] = True
    assert left_out(pairs, len(text.ids)) == np.count_nonzero(~held) < 0.08 * len(text.ids)
    if objective == "nsp":
        assert 0.4 < np.mean(pairs.sequences[:, 4] == 1) < 0.6
