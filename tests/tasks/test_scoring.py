"""Scores equal those of masking each position by hand, and those that minicons computed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_checkpoints import odd_config, random_checkpoint, sensitive
from tokenizer_kinds import byte_pairs

from bert_jax.errors import UserError
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model import layers
from bert_jax.model.bert import bind
from bert_jax.model.heads.config import Heads
from bert_jax.model.outputs import vocabulary_logits
from bert_jax.model.runtime import Runtime
from bert_jax.tasks import scoring
from bert_jax.tasks.rows import TaskBatch
from bert_jax.tasks.scoring import MASKINGS, ORIGINAL, WITHIN_WORD, PairScore, score
from bert_jax.tokenization import tokenizer

# The sentences that differ in one word share a row, with more targets than a row scores at once.
TEXTS = ["the cat sat.", "the dog sat.", "the mat sat.", "the river sat.", "the on sat.", "the [MASK] sat."]
TEXTS += ["unwantable rivers on a mat", "a", "the cat sat.", "cats unwantable cats [SEP] unwantable"]
LENGTH = 16  # of all rows that are computed by hand
# By minicons 0.3.39 with transformers 5.24 and torch 2.14, for an export of `loaded` (make peers compares it again):
# MaskedLMScorer.sequence_score(..., reduction=lambda x: x.sum(0).item(), PLL_metric=MASKING).
MINICONS: dict[str, dict[str, float]] = {
    ORIGINAL: {"the cat sat.": -26.19246, "unwantable rivers on a mat": -47.93177, "cats unwantable cats": -39.44323},
    WITHIN_WORD: {
        "the cat sat.": -26.19246,
        "unwantable rivers on a mat": -48.06397,
        "cats unwantable cats": -39.42142,
    },
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> LoadedModel:
    return sensitive(random_checkpoint(tmp_path_factory.mktemp("vocabulary"), odd_config()))


@functools.partial(jax.jit, static_argnums=(0, 1))
def all_log_probabilities(config, heads, params, batch):
    model = bind(config, heads, params, Runtime())
    return jax.nn.log_softmax(vocabulary_logits(model, model.encode(batch).last))


def by_hand(loaded: LoadedModel, words: list[list[str]], masking: str) -> float:
    """Masks the pieces of words one by one, and computes all positions of each row, without the code under test."""
    vocabulary = loaded.vocabulary
    ids = [vocabulary.cls_id, *(vocabulary.token_id(piece) for word in words for piece in word), vocabulary.sep_id]
    rows = np.full((LENGTH, LENGTH), vocabulary.pad_id, np.int32)
    rows[:, : len(ids)] = ids
    start, scored = 1, []
    for word in words:
        for position in range(start, start + len(word)):
            last = position + 1 if masking == ORIGINAL else start + len(word)
            rows[position, position:last] = vocabulary.mask_id
            scored += [position] * (ids[position] not in (vocabulary.cls_id, vocabulary.sep_id))
        start += len(word)
    real = np.broadcast_to(np.arange(LENGTH) < len(ids), rows.shape).astype(np.int32)
    batch = TaskBatch(rows, rows * 0, real, np.arange(LENGTH, dtype=np.int32) * real, None, None)
    params = jax.tree.map(jnp.asarray, layers.unflatten(dict(loaded.params)))
    computed = all_log_probabilities(loaded.model, loaded.heads, params, batch)
    return sum(float(computed[position, position, ids[position]]) for position in scored)


PIECES = {
    "the cat sat.": [["the"], ["cat"], ["sat"], ["."]],
    "unwantable rivers on a mat": [["un", "##want", "##able"], ["river", "##s"], ["on"], ["a"], ["mat"]],
    "cats unwantable cats [SEP] unwantable": [
        *(["cat", "##s"], ["un", "##want", "##able"], ["cat", "##s"], ["[SEP]"], ["un", "##want", "##able"])
    ],
    "the [MASK] sat.": [["the"], ["[MASK]"], ["sat"], ["."]],
}


@pytest.mark.parametrize("masking", MASKINGS)
def test_scores_are_those_of_masking_by_hand(loaded, masking):
    scores = dict(zip(TEXTS, score(loaded, TEXTS, masking), strict=True))
    for text, words in PIECES.items():
        assert scores[text] == pytest.approx(by_hand(loaded, words, masking), abs=1e-4), text


@pytest.mark.slow
def test_words_of_byte_pairs_hold_their_space(tmp_path):
    byte_pairs(tmp_path, ["Ġ c", "a t"])
    bpe = tokenizer.load(tmp_path)
    config = odd_config(vocab_size=bpe.vocab_size, segment_types=1, position_offset=2)
    loaded = sensitive(random_checkpoint(tmp_path / "other", config, Heads(mlm=True)))
    loaded = dataclasses.replace(loaded, vocabulary=bpe)
    words = [["a", "b"], ["Ġc", "at"], [","], ["Ġ", "at"]]
    for masking in MASKINGS:
        expected = by_hand(loaded, words, masking)
        assert score(loaded, ["ab cat, at"], masking) == [pytest.approx(expected, abs=1e-4)]


@pytest.mark.slow
@pytest.mark.parametrize("masking", MASKINGS)
def test_a_score_depends_on_its_text_alone(loaded, masking, monkeypatch):
    together = score(loaded, TEXTS, masking)
    assert together[0] == together[8]  # the same text
    np.testing.assert_allclose(together, [score(loaded, [text], masking)[0] for text in TEXTS], rtol=1e-5)
    monkeypatch.setattr(scoring, "WINDOW_POSITIONS", 20)
    np.testing.assert_allclose(score(loaded, TEXTS, masking), together, rtol=1e-5)
    monkeypatch.setattr(scoring, "price", lambda *_: 0.0)  # each length has a program of its own
    np.testing.assert_allclose(score(loaded, TEXTS[5:8], masking), together[5:8], rtol=1e-5)


def test_equal_rows_are_computed_once(loaded):
    sentences = scoring.encode(TEXTS[:6], loaded_tokenizer(loaded), ORIGINAL)
    rows = scoring.masked_rows(sentences, np.arange(6), 6)
    # Of 24 tokens, the second one has the same row in all texts, but six targets, which need two rows of four.
    assert len(rows.row) == 24 and len(rows.lengths) == 18 + 2
    shared = rows.row[1::4]
    assert len(set(shared.tolist())) == 2
    np.testing.assert_array_equal(
        rows.targets[shared, rows.slot[1::4]], [sentences.input_ids[2 + 6 * i] for i in range(6)]
    )


def loaded_tokenizer(loaded: LoadedModel) -> tokenizer.Tokenizer:
    return tokenizer.Tokenizer(loaded.vocabulary.spec)


def test_pairs_have_both_scores_and_the_preferred_text(loaded):
    first, second = score(loaded, ["the cat sat", "cat the sat"])
    scores = score(loaded, [("the cat sat", "cat the sat"), ("cat the sat", "the cat sat"), "the cat sat", ("A", "a")])
    better = int(first < second)
    assert scores[:3] == [PairScore(first, second, better), PairScore(second, first, 1 - better), first]
    assert scores[3].first == scores[3].second and scores[3].preferred is None  # lower case
    assert scoring.preferred(float("nan"), 1.0) is None
    assert score(loaded, []) == []


@pytest.mark.parametrize("masking", MASKINGS)
def test_scores_are_those_of_minicons(loaded, masking):
    np.testing.assert_allclose(
        score(loaded, list(MINICONS[masking]), masking), [*MINICONS[masking].values()], atol=1e-4
    )


@pytest.mark.parametrize(
    "texts, message",
    [
        (["a", " "], "text 2 is empty: it has no token to score"),
        (["a", ("a", "[SEP]")], "text 2 is empty: it has no token to score"),
        (["a cat " * 12], "text 1 has 26 tokens, but the model 24 positions"),
        ([3], "text 1 is 3; expected a string, or a tuple of two strings"),
    ],
)
def test_texts_without_a_score_are_refused(loaded, texts, message, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as in a user's program
    with pytest.raises(UserError, match=message):
        score(loaded, texts)


def test_models_without_a_masked_head_are_refused(tmp_path):
    headless = random_checkpoint(tmp_path, odd_config(), Heads())
    with pytest.raises(UserError, match=r"scoring texts needs a masked language model, but .* has no masked"):
        score(headless, ["a"])
