"""Text infilling (bert_jax/data/masking/masker.py): spans of any number of words become one position.

The reference below is plain Python, one sequence at a time. Statistical tests state the rate of false alarms of each.
"""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import NamedTuple

import hypothesis
import numpy as np
import pytest
from building import contents
from hypothesis import strategies as st
from masking_reference import (
    CLS,
    FIRST_WHOLE,
    GOLDEN,
    MASK,
    PAD,
    SEP,
    VOCABULARY,
    WORD,
    Sequence,
    apply,
    combine,
    mix,
    neighbours,
    order_hash,
    pack_rows,
    random_rows,
    sequences,
    words_of,
)
from scipy import stats

from bert_jax.config import ModelConfig, ObjectiveConfig, PretrainConfig
from bert_jax.data.loader import DatasetLoader
from bert_jax.data.masking.rule import MaskingRule, ReplacementShares
from bert_jax.data.masking.selection import RunLengths
from bert_jax.data.shards import open_dataset
from bert_jax.errors import UserError
from bert_jax.lineage import BiLSTM
from bert_jax.train.objectives.pretraining import ShardTraits, pretraining_objective
from data_prep.build import build
from data_prep.build_options import BuildOptions
from data_prep.inspection import verify

FALSE_ALARM = 1e-6
ALL_MASKS = ReplacementShares(1.0, 0.0, 0.0)


class Infilled(NamedTuple):
    ids: list[int]
    first_length: int
    predicted: dict[int, int]  # the original token at each predicted position


def poisson(value: int) -> int:
    """The number of words for a uniform 32-bit value."""
    weights = [3.0**size / math.factorial(size) for size in range(21)]
    return next(
        size for size in range(21) if size == 20 or value < round(sum(weights[: size + 1]) / sum(weights) * 2**32)
    )


def spans_of(sequence: Sequence, rule: MaskingRule, seed: int, epoch: int) -> tuple[list[list[int]], set[int]]:
    """The positions of each span, and the positions before which an empty span is."""
    words = words_of(sequence, "word")
    order_state, length_state = (combine(stream, seed, epoch, sequence.key) for stream in (1, 4))
    order = sorted(range(len(words)), key=lambda word: (order_hash(order_state, words[word][0]), word))
    left = max(1, round(rule.rate * len(sequence.ids)))
    spans: list[list[int]] = []
    empty: set[int] = set()
    for number in order:
        first = words[number][0]
        if left == 0 or any(first in span for span in spans):
            continue
        wanted = poisson(mix((length_state + first * GOLDEN) % WORD) >> 32)
        if wanted == 0:
            empty.add(first)
            continue
        span: list[int] = []
        for word in neighbours(sequence, words, number)[:wanted]:
            met = word[0] != first and (word[0] in empty or any(word[0] in other for other in spans))
            if met or len(span) + len(word) > left:
                break
            span += word
        if span:
            spans.append(span)
            left -= len(span)
    if not spans and words:
        spans = [words[order[0]][: max(1, round(rule.rate * len(sequence.ids)))]]
    removed = sum(len(span) - 1 for span in spans)
    return spans, set(sorted(empty)[:removed])


def infilled(sequence: Sequence, rule: MaskingRule, seed: int, epoch: int) -> Infilled:
    spans, empty = spans_of(sequence, rule, seed, epoch)
    state = combine(2, seed, epoch, sequence.key)
    ordinary = range(FIRST_WHOLE, VOCABULARY)
    ids: list[int] = []
    first_length, predicted = None, {}
    for position, token in enumerate(sequence.ids):
        if position == sequence.first_length:
            first_length = len(ids)
        if position in empty:
            ids.append(MASK)
        if any(position in span[1:] for span in spans):
            continue
        if any(position == span[0] for span in spans):
            predicted[len(ids)] = token
            word = mix((state + position * GOLDEN) % WORD)
            random = ordinary[(word % 2**32) * len(ordinary) >> 32]
            if word >> 32 < round(rule.split.mask * 2**32):
                token = MASK
            elif word >> 32 < round((rule.split.mask + rule.split.random) * 2**32):
                token = random
        ids.append(token)
    return Infilled(ids, len(ids) if first_length is None else first_length, predicted)


@hypothesis.settings(max_examples=120, deadline=None)
@hypothesis.given(
    packed=st.lists(st.lists(sequences(30), max_size=4), min_size=1, max_size=4),
    room=st.integers(0, 9),
    rate=st.floats(0.01, 1),
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 2**40),
    split=st.sampled_from([ALL_MASKS, ReplacementShares(0.8, 0.1, 0.1), ReplacementShares(0.0, 0.3, 0.7)]),
)
# The only word that fits the budget begins an empty span, so it is replaced after all, without the word behind it.
@hypothesis.example([[Sequence([5, 5, 25, 25], 1, 545)]], 0, 0.5, 14231147, 525496727, ALL_MASKS)
def test_rows_equal_the_reference(packed, room, rate, seed, epoch, split):
    pack = max(1, max(len(row) for row in packed))
    width = max(1, room + max(sum(len(sequence.ids) for sequence in row) for row in packed))
    masked = apply(pack_rows(packed, width, pack), "infill", rate, seed, epoch, split=split)
    for row, row_sequences in enumerate(packed):
        found = [infilled(each, MaskingRule("infill", rate, split), seed, epoch) for each in row_sequences]
        starts = np.cumsum([0, *(len(each.ids) for each in found)])
        ids = [token for each in found for token in each.ids]
        predicted = {
            start + place: token
            for start, each in zip(starts.tolist(), found, strict=False)
            for place, token in each.predicted.items()
        }
        assert masked.input_ids[row].tolist() == ids + [PAD] * (width - len(ids))
        count = masked.counts[row]
        assert masked.positions[row, :count].tolist() == list(predicted)
        assert masked.ids[row, :count].tolist() == list(predicted.values())
        assert not masked.positions[row, count:].any() and not masked.ids[row, count:].any()
        absent = [0] * (pack - len(found))
        assert masked.sequence_lengths[row].tolist() == [len(each.ids) for each in found] + absent
        assert masked.first_segment_lengths[row].tolist() == [each.first_length for each in found] + absent


def test_lengths_of_spans_are_poisson():
    """Chi-squared, false-alarm rate 1e-6; the expected counts are scipy's. Lengths of 12 and more are one class."""
    draws = 200_000
    values = np.random.default_rng(0).integers(0, 2**32, draws).astype(np.uint64)
    lengths = RunLengths(MaskingRule("infill")).draw(values, np.full(draws, 1000))
    wanted = stats.poisson.pmf(np.arange(12), 3)
    got = np.bincount(np.minimum(lengths, 12), minlength=13)
    assert stats.chisquare(got, np.append(wanted, 1 - wanted.sum()) * draws).pvalue > FALSE_ALARM


def test_numbers_of_spans_and_masks_are_those_of_the_rate():
    """Rows of 4,000 words, of which 1% is replaced: spans rarely meet, and only the last one is cut.

    Spans are counted by renewal theory for a budget of 40; 1 in 50 may meet another. Normal bounds, false-alarm rate
    1e-6.
    """
    weights = stats.poisson.pmf(np.arange(21), 3)
    positive = weights[1:] / weights[1:].sum()
    expected = np.zeros(41)
    for budget in range(1, 41):
        expected[budget] = 1 + sum(p * expected[max(0, budget - size)] for size, p in enumerate(positive, start=1))
    rows = random_rows(300, 4000, inside_share=0)
    masked = apply(rows, "infill", rate=0.01, split=ALL_MASKS)
    spans, masks = masked.counts.sum(), (masked.input_ids == MASK).sum()
    mean, variance = 3 / (1 - math.exp(-3)), 12 / (1 - math.exp(-3)) - (3 / (1 - math.exp(-3))) ** 2
    sigmas = stats.norm.isf(FALSE_ALARM / 2)
    noise = sigmas * np.sqrt(300 * 40 * variance / mean**3)
    assert 300 * expected[40] - noise < spans < 1.02 * 300 * expected[40] + noise
    # Before each span that has words, a geometric number of empty ones is met.
    odds = weights[0] / (1 - weights[0])
    empty = masks - spans
    assert abs(empty - odds * spans) < sigmas * np.sqrt(spans * odds * (1 + odds))
    # Every sequence lost the 40 tokens, and has a mask for each of its spans.
    per_row = (masked.input_ids == MASK).sum(axis=1)
    np.testing.assert_array_equal(masked.sequence_lengths[:, 0], 4000 - 40 + per_row)


def test_what_stays_is_the_text_in_order_and_each_prediction_the_token_after_what_stays_before_it():
    generator = np.random.default_rng(3)
    packed = [[Sequence([CLS, *generator.permutation(35)[:30] + FIRST_WHOLE, SEP], 32, key)] for key in range(300)]
    masked = apply(pack_rows(packed, 32, 1), "infill", 0.3, split=ALL_MASKS)
    for row, [sequence] in enumerate(packed):
        length, count = int(masked.sequence_lengths[row, 0]), masked.counts[row]
        shown = masked.input_ids[row, :length].tolist()
        labels = dict(zip(masked.positions[row, :count].tolist(), masked.ids[row, :count].tolist(), strict=True))
        assert all(shown[place] == MASK for place in labels)
        # Every token occurs once, so its place in the text is known.
        places = [
            sequence.ids.index(labels.get(place, token))
            for place, token in enumerate(shown)
            if token != MASK or place in labels
        ]
        assert places == sorted(set(places)) and places[0] == 0 and places[-1] == 31
        for before, after in itertools.pairwise(places):
            gap = after - before > 1  # the tokens in between are of the span that begins at `before`
            assert not gap or sequence.ids[before] in labels.values()
        assert 1 <= count <= 10 and length <= 32 and len(places) == 32 - 10 + count


@pytest.mark.parametrize("pack", [1, 3])
def test_shards_verify_and_their_batches_are_shorter(corpus: Path, vocab_dir: Path, tmp_path: Path, pack: int) -> None:
    options = {"seq_len": 64, "eval_fraction": 0.1, "unit_mb": 0.05, "objective": "single", "pack": pack}
    masks = {"mask_unit": "infill", "mask_rate": 0.3, "mask_split": (1.0, 0.0, 0.0)}
    for name, workers in (("one", 1), ("two", 2)):
        manifest = build(BuildOptions(corpus, vocab_dir, tmp_path / name, workers=workers, **options, **masks))
    plain = build(BuildOptions(corpus, vocab_dir, tmp_path / "plain", workers=1, **options))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert manifest["shards"] == plain["shards"]
    assert verify(tmp_path / "one").manifest == manifest
    assert manifest["counts"]["documents"] == 120
    dataset = open_dataset(tmp_path / "one", "train")
    vocabulary = dataset.vocabulary()
    loader = DatasetLoader(dataset, vocabulary, seed=manifest["seed"])
    batches = list(loader.evaluation_batches(64))
    rows = dataset.gather(np.arange(dataset.rows))
    positions = sum(int((batch.sequence_ids > 0).sum()) for batch in batches)
    masked = sum(int((batch.input_ids == vocabulary.mask_id).sum()) for batch in batches)
    predicted = sum(int(batch.masked_weights.sum()) for batch in batches)
    budget = np.maximum(1, np.rint(0.3 * rows.sequence_lengths[rows.sequence_lengths > 0])).sum()
    whole = rows.sequence_lengths.sum(dtype=int)
    # Budgets are nearly used up, since WordPiece words are short. Every span leaves one mask in its place.
    assert 0.98 * budget < whole - (positions - masked) <= budget
    assert predicted < masked < 1.1 * predicted and positions < 0.85 * whole
    stated = manifest["parts"]["train"]["predictions"]
    assert predicted == stated  # held-out masks have seed 0 and epoch 0, as those of the manifest here


@pytest.mark.parametrize("objective", ["causal", "bidirectional_lm", "replaced_tokens", "diffusion"])
def test_objectives_that_need_the_text_refuse_infilled_shards(objective: str, tiny_config: ModelConfig) -> None:
    model = dataclasses.replace(tiny_config, causal=objective == "causal")
    if objective == "bidirectional_lm":
        model = dataclasses.replace(tiny_config, encoder=BiLSTM(), positions="none")
    traits = [ShardTraits("shards/infilled", False, "infill")]
    with pytest.raises(UserError, match=f"objective={objective} needs every token of a text, but batches of shards/"):
        pretraining_objective(PretrainConfig(objective=ObjectiveConfig.kinds[objective]()), model, traits)
    traits = [ShardTraits("shards/masked", False, "span")]
    pretraining_objective(PretrainConfig(objective=ObjectiveConfig.kinds[objective]()), model, traits)
