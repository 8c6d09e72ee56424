"""Deleted and inserted tokens, permuted sentences and rotated documents."""

import math
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from building import contents
from hypothesis import given, settings
from hypothesis import strategies as st
from masking_reference import GOLDEN, WORD, combine, mix
from scipy import stats

from bert_jax.data.example import unmasked_ids
from bert_jax.data.shards import open_dataset
from data_prep.build import build
from data_prep.build_options import BuildOptions
from data_prep.inspection import verify
from data_prep.noise import corrupt, rearrange, room_for
from data_prep.sequences import Encoded, Spans, borders, sequence_lengths, spans

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


FALSE_ALARM = 1e-6
SEPARATOR = 3
UNIT = 5 << 32  # the keys of the sequences below


def encoded(documents: list[list[int]]) -> Encoded:
    """Documents of sentences with the given numbers of tokens; every token of the text has its own id."""
    lengths = [length for document in documents for length in document]
    offsets = np.cumsum([0, *lengths])
    counts = np.cumsum([0, *map(len, documents)])
    ids = np.arange(100, 100 + offsets[-1]).astype(np.uint32)
    return Encoded(ids, offsets, np.stack([counts[:-1], counts[1:]], axis=1), 0)


def some_text(seed: int, documents: int) -> Encoded:
    generator = np.random.default_rng(seed)
    return encoded([generator.integers(1, 12, generator.integers(1, 9)).tolist() for _ in range(documents)])


def sequences_of(objective: str, text: Encoded, seq_len: int = 40, pack: int = 1) -> Spans:
    return spans(objective, text, seq_len, pack, 0.0, SEPARATOR, random.Random(1))


def changed(objective: str, text: Encoded, permute: float, rotate: float, seed: int = 7, pack: int = 1) -> Spans:
    found = sequences_of(objective, text, pack=pack)
    keys = np.arange(UNIT, UNIT + len(found.sequences), dtype=np.uint64)
    return rearrange(found, keys, borders(objective, text), seed, permute, rotate)


def token_lists(found: Spans) -> list[list[int]]:
    return [found.ids[begin:end].tolist() for begin, end in found.sequences[:, :2].tolist()]


def sentences_of(tokens: list[int], text: Encoded) -> list[list[list[int]]]:
    """The documents of an unchanged sequence, each as the sentences, or pieces of them, that it contains."""
    sentence_of = dict(
        zip(text.ids.tolist(), np.repeat(np.arange(len(text.offsets) - 1), np.diff(text.offsets)), strict=True)
    )
    pieces: list[list[list[int]]] = [[]]
    for token in tokens:
        if token == SEPARATOR:
            pieces.append([])
        elif pieces[-1] and sentence_of[pieces[-1][-1][-1]] == sentence_of[token]:
            pieces[-1][-1].append(token)
        else:
            pieces[-1].append([token])
    return pieces


def reference(tokens: list[int], text: Encoded, key: int, seed: int, permute: float, rotate: float) -> list[int]:
    result: list[int] = []
    for document in sentences_of(tokens, text):
        result += [SEPARATOR] if result else []
        start = place = len(result)
        words = []
        for sentence in document:
            words.append(mix((combine(102, seed, key) + place * GOLDEN) % WORD))
            place += len(sentence)
        count = math.ceil(round(permute * len(document), 6))
        chosen = sorted(sorted(range(len(document)), key=lambda number: words[number] >> 32)[:count])
        order = list(range(len(document)))
        for target, source in zip(chosen, sorted(chosen, key=lambda number: words[number] % 2**32), strict=True):
            order[target] = source
        moved = [token for number in order for token in document[number]]
        word = mix((combine(103, seed, key) + start * GOLDEN) % WORD)
        first = (word % 2**32) * len(moved) >> 32 if word >> 32 < round(rotate * 2**32) else 0
        result += moved[first:] + moved[:first]
    return result


@pytest.mark.parametrize("objective", ["single", "doc_sentences", "full_sentences"])
@pytest.mark.parametrize(("permute", "rotate"), [(1.0, 0.0), (0.4, 0.0), (0.0, 1.0), (0.07, 0.3), (1.0, 0.5)])
@pytest.mark.parametrize("pack", [1, 3])
def test_sequences_equal_the_reference(objective: str, permute: float, rotate: float, pack: int) -> None:
    text = some_text(3, 40)
    before = sequences_of(objective, text, pack=pack)
    after = changed(objective, text, permute, rotate, pack=pack)
    wanted = [
        reference(tokens, text, UNIT + number, 7, permute, rotate) for number, tokens in enumerate(token_lists(before))
    ]
    assert token_lists(after) == wanted != token_lists(before)
    assert after.late.tolist() == before.late.tolist()
    assert (after.sequences[:, 1:4] == after.sequences[:, 1:2]).all() and (after.sequences[:, 4] == -1).all()


def test_permutation_keeps_sentences_and_rotation_keeps_the_circle() -> None:
    text = some_text(4, 60)
    before = token_lists(sequences_of("full_sentences", text))
    permuted = token_lists(changed("full_sentences", text, 1.0, 0.0))
    rotated = token_lists(changed("full_sentences", text, 0.0, 1.0))
    for old, mixed, turned in zip(before, permuted, rotated, strict=True):
        documents = sentences_of(old, text)
        ends = np.cumsum([sum(map(len, document)) + 1 for document in documents])
        for document, end in zip(documents, ends.tolist(), strict=True):
            whole = [token for sentence in document for token in sentence]
            begin = end - 1 - len(whole)
            assert mixed[end - 1 : end] == turned[end - 1 : end] == old[end - 1 : end]  # a separator, or the end
            [found] = sentences_of(mixed[begin : end - 1], text)
            assert Counter(map(tuple, found)) == Counter(map(tuple, document))
            first = whole.index(turned[begin])
            assert turned[begin : end - 1] == whole[first:] + whole[:first]


def test_every_order_and_every_first_token_is_equally_likely() -> None:
    """Chi-squared tests, each with a false-alarm rate of 1e-6."""
    text = encoded([[1, 2, 1, 3]] * 6000)
    permuted = np.array(token_lists(changed("single", text, 1.0, 0.0)))
    tokens = (permuted - 100) % 7
    orders = Counter(map(tuple, tokens[np.isin(tokens, [0, 1, 3, 4])].reshape(-1, 4)))  # the sentences begin with these
    assert len(orders) == math.factorial(4)
    assert stats.chisquare(list(orders.values())).pvalue > FALSE_ALARM
    firsts = np.array([tokens[0] for tokens in token_lists(changed("single", text, 0.0, 1.0))]) - 100
    assert stats.chisquare(np.bincount(firsts % 7)).pvalue > FALSE_ALARM


def test_shares_are_those_asked_for() -> None:
    """Of 10 sentences 3 are shuffled, among any places; each is a fixed point with probability 1/3.

    Normal bounds with a false-alarm rate of 1e-6.
    """
    text = encoded([[1] * 10] * 4000)
    permuted = np.array(token_lists(changed("single", text, 0.3, 0.0))) - 100
    moved = permuted != np.arange(40_000).reshape(4000, 10)
    sigmas = stats.norm.isf(FALSE_ALARM / 2)
    assert moved.sum(axis=1).max() == 3
    assert abs(moved.sum() - 4000 * 2) < sigmas * np.sqrt(4000 * 1.0)  # fixed points have a variance of 1
    assert stats.chisquare(moved.sum(axis=0)).pvalue > FALSE_ALARM
    rotated = np.array(token_lists(changed("single", text, 0.0, 0.25))) - 100
    share = (rotated[:, 0] % 10 != 0).mean()
    assert abs(share - 0.25 * 0.9) < sigmas * np.sqrt(0.225 * 0.775 / 4000)


def test_a_sequence_has_the_same_order_alone_and_among_others() -> None:
    text = some_text(5, 30)
    whole = sequences_of("doc_sentences", text)
    keys = np.arange(UNIT, UNIT + len(whole.sequences), dtype=np.uint64)
    places = borders("doc_sentences", text)
    together = token_lists(rearrange(whole, keys, places, 3, 1.0, 0.5))
    for number in (0, 11, len(keys) - 1):
        alone = whole._replace(sequences=whole.sequences[[number]], late=whole.late[[number]])
        assert token_lists(rearrange(alone, keys[[number]], places, 3, 1.0, 0.5)) == [together[number]]
    assert token_lists(rearrange(whole, keys, places, 4, 1.0, 0.5)) != together


def test_borders_are_those_of_the_text() -> None:
    text = encoded([[2, 3], [1], [4, 1]])
    np.testing.assert_array_equal(borders("single", text).positions, [0, 2, 5, 6, 10])
    assert not borders("single", text).separators.any()
    found = borders("full_sentences", text)
    np.testing.assert_array_equal(found.positions, [0, 1, 3, 6, 7, 8, 9, 13])
    np.testing.assert_array_equal(found.positions[found.separators], [0, 6, 8])
    stream = sequences_of("full_sentences", text).ids
    assert (np.flatnonzero(stream == SEPARATOR) == [0, 6, 8]).all()


NOISE = {"permute_sentences": 1.0, "rotate_documents": 0.5}


@pytest.mark.parametrize(
    "options",
    [
        {"objective": "single"},
        {"objective": "full_sentences", "pack": 3, "delete_rate": 0.1},
        {"objective": "doc_sentences", "masking": "static", "mask_unit": "span", "dupe_factor": 2},
    ],
    ids=str,
)
def test_shards_are_the_same_with_any_number_of_workers_and_verify(
    corpus: Path, vocab_dir: Path, tmp_path: Path, options: dict
) -> None:
    """And every row has the tokens of the same row of the job without noise."""
    shared = {"seq_len": 64, "eval_fraction": 0.1, "unit_mb": 0.05} | options
    outputs = {}
    for name, more in {"one": NOISE, "two": NOISE, "plain": {}}.items():
        workers = 2 if name == "two" else 1
        given = BuildOptions(corpus, vocab_dir, tmp_path / name, workers=workers, **shared, **more)
        outputs[name] = build(given)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert outputs["one"]["corruption"] == outputs["plain"]["corruption"] | NOISE
    assert verify(tmp_path / "one").manifest == outputs["one"]
    assert outputs["one"]["counts"]["documents"] == 120
    if "delete_rate" in options:
        return
    for part in ("train", "eval"):
        noisy, plain = (open_dataset(tmp_path / name, part) for name in ("one", "plain"))
        assert noisy.rows == plain.rows
        rows, others = (dataset.gather(np.arange(dataset.rows)) for dataset in (noisy, plain))
        np.testing.assert_array_equal(rows.sequence_keys, others.sequence_keys)
        np.testing.assert_array_equal(rows.sequence_lengths, others.sequence_lengths)
        ids, unchanged = unmasked_ids(rows), unmasked_ids(others)
        assert (ids != unchanged).any(axis=1).mean() > 0.5  # most rows have several sentences
        np.testing.assert_array_equal(np.sort(ids, axis=1), np.sort(unchanged, axis=1))
