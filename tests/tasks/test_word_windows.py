"""Windows of long sentences: their words, the answers of taggers, and what they train."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_finetuning
from hypothesis import given, settings
from hypothesis import strategies as st
from random_checkpoints import odd_config, random_checkpoint

from bert_jax.model.heads.config import Heads
from bert_jax.tasks.inference import FineTuned
from bert_jax.tasks.kinds.tagging import TaggingTask
from bert_jax.tasks.prediction import predict
from bert_jax.tasks.rows import Sentence, Split
from bert_jax.tasks.windows import cut_word_windows
from bert_jax.tasks.word_rows import encode_words

letters = tiny_finetuning.letters  # a fixture

TASK = TaggingTask("own", ("N", "V", "X"), max_length=12, metrics=("accuracy",))


def windows_by_hand(sizes: list[int], room: int, stride: int) -> list[tuple[int, int]]:
    """The words of each window, [first, end), one word at a time."""
    windows, first = [], 0
    while True:
        end = first
        while end < len(sizes) and sum(sizes[first : end + 1]) <= room:
            end += 1
        windows.append((first, end))
        if end == len(sizes):
            return windows
        later = [
            start
            for start in range(first + 1, end + 1)
            if sum(sizes[first:start]) <= stride and sum(sizes[start : end + 1]) <= room
        ]
        reaching = [start for start in range(first + 1, end + 1) if sum(sizes[start : end + 1]) <= room]
        first = max(later, default=min(reaching))


def best_by_hand(sizes: list[int], windows: list[tuple[int, int]]) -> list[int]:
    """The window that answers for each word."""
    best = []
    for word in range(len(sizes)):
        contexts = {}
        for number, (first, end) in enumerate(windows):
            if first <= word < end:
                sides = [sum(sizes[first:word])] * (first > 0) + [sum(sizes[word + 1 : end])] * (end < len(sizes))
                contexts[number] = min(sides, default=float("inf"))
        best.append(max(contexts, key=lambda number, contexts=contexts: (contexts[number], -number)))
    return best


@given(st.data(), st.integers(1, 24), st.integers(1, 30))
@settings(max_examples=200, deadline=None)
def test_windows_are_those_of_a_plain_loop(data, room, stride):
    sizes = data.draw(st.lists(st.integers(1, room), min_size=1, max_size=60))
    by_hand = windows_by_hand(sizes, room, stride)
    best = best_by_hand(sizes, by_hand)
    answering = sorted(set(best))
    windows = cut_word_windows(np.array(sizes), room, stride)
    assert windows[:, :2].tolist() == [list(by_hand[number]) for number in answering]
    owned = [[word for word, number in enumerate(best) if number == window] for window in answering]
    assert [list(range(*window[2:])) for window in windows] == owned


def sentence(words: list[str]) -> Sentence:
    return Sentence(tuple(words), tuple("NVX"[len(word) % 3] for word in words), tuple(range(1, len(words) + 1)))


texts = st.lists(st.lists(st.text("abcdefg", min_size=1, max_size=9), min_size=1, max_size=25), min_size=1, max_size=4)


@given(texts, st.integers(0, 12))
@settings(max_examples=50, deadline=None)
def test_rows_hold_their_windows_and_sentences_that_fit_have_one(letters, lists, stride):
    split = Split(Path("train.conll"), tuple(map(sentence, lists)), labelled=True)
    rows = encode_words(split, letters, 12, stride)
    apart = encode_words(split, letters, 12)
    expected, owners = [], []
    for item in split.items:
        pieces = [letters.encode(word).tolist()[:10] for word in item.words]
        sizes = list(map(len, pieces))
        windows = windows_by_hand(sizes, 10, stride or 5) if sum(sizes) > 10 else [(0, len(sizes))]
        best = best_by_hand(sizes, windows)
        owners += [len(expected) + sorted(set(best)).index(number) for number in best]
        expected += [[*itertools.chain(*pieces[slice(*windows[number])])] for number in sorted(set(best))]
    ids = [row.tolist()[1:-1] for row in np.split(rows.input_ids, rows.offsets[1:-1])]
    assert ids == expected and rows.word_rows.tolist() == owners
    # Without overlap, the rows of a sentence hold each of its pieces once.
    assert len(apart.input_ids) - 2 * apart.count == apart.word_sizes.sum()
    if apart.count == len(split.items):
        assert all((apart.arrays()[name] == array).all() for name, array in rows.arrays().items())


def test_a_word_trains_once_whatever_overlaps(letters):
    split = Split(Path("train.conll"), (sentence(["ab", "c", "def"] * 12),), labelled=True)
    rows = replace(TASK, doc_stride=2).encode(split, letters)
    batch = rows.batch(np.arange(rows.count), 12)
    assert rows.count > 6 and batch.label_weights.sum() == 36
    # The words of each row that are context alone have a number, by which decode=mean reads them, and no weight.
    assert ((batch.labels.words > 0) & (batch.label_weights == 0)).sum() > 36
    (remark,) = TASK.describe(rows).remarks
    assert remark == (
        f"train.conll: 1 of 1 sentences are longer than task.max_length=12 tokens, and are read in {rows.count} windows"
    )


@pytest.mark.parametrize("crf", [False, True])
def test_answers_of_a_long_sentence_are_those_of_its_windows(tmp_path, capsys, crf):
    labels = ["O", "B-X", "I-X"]
    task = {"name": "own", "kind": "tagging", "labels": labels, "max_length": 12, "crf": crf, "doc_stride": 3}
    loaded = random_checkpoint(tmp_path, odd_config(layers=1), Heads(tags=3, crf=crf), task=task)
    model = FineTuned(loaded)
    draw = np.random.default_rng(0)
    words = [f"w{number}" for number in draw.integers(0, 9, 23)]
    split = Split(Path("in"), (sentence(words), sentence(words[:4])), labelled=False)
    rows = model.encode(split)
    long, short = model.predictions(rows)
    alone = model.predictions(model.encode(replace(split, items=split.items[1:])))
    assert short["tags"] == alone[0]["tags"]
    np.testing.assert_allclose(short["tag_scores"], alone[0]["tag_scores"], rtol=1e-5)
    assert predict(loaded, [{"tokens": words}, {"tokens": words[:4]}]) == [long, short]
    assert "1 of 2 inputs are longer than 12 tokens (--max_length) and are read in several windows" in (
        capsys.readouterr().err
    )
    # The windows as sentences of their own.
    sizes = rows.word_sizes[: len(words)].tolist()
    by_hand = windows_by_hand(sizes, 10, 3)
    best = best_by_hand(sizes, by_hand)
    parts = model.encode(replace(split, items=tuple(sentence(words[slice(*window)]) for window in by_hand)))
    assert parts.count == len(by_hand) > 3
    answers = model.answers(parts)
    places = [(number, parts.sentence_offsets[number] + word - by_hand[number][0]) for word, number in enumerate(best)]
    if not crf:
        expected = [answers[row].tags[parts.word_slots[place]] for row, place in places]
        assert long["tags"] == [labels[tag] for tag in expected]
        return
    logits = np.array([answers[row].logits[parts.word_slots[place]] for row, place in places])
    params = {name: loaded.params[f"crf/{name}"] for name in ("transitions", "start", "end")}
    # Best paths word by word, by the tag that they end with.
    paths = {(tag,): params["start"][tag] + logits[0, tag] for tag in (0, 1)}
    for word in range(1, len(words)):
        longer: dict = {}
        for (path, score), tag in itertools.product(paths.items(), range(3)):
            if (path[-1], tag) != (0, 2):
                total = score + params["transitions"][path[-1], tag] + logits[word, tag]
                if total > longer.get(tag, (-np.inf,))[0]:
                    longer[tag] = total, (*path, tag)
        paths = {path: score for score, path in longer.values()}
    best_score, expected = max((score + params["end"][path[-1]], path) for path, score in paths.items())
    assert np.isfinite(best_score) and long["tags"] == [labels[tag] for tag in expected]
    assert all(0 < score <= 1 + 1e-5 for score in long["tag_scores"])
