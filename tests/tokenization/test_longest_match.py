"""LongestMatch gives the same ids as WordPiece in the `tokenizers` library, for any vocabulary."""

import string

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from bert_jax.tokenization.wordpiece import LongestMatch

UNKNOWN = "[UNK]"
OURS = string.ascii_lowercase + string.digits
# Few letters, so that words often contain tokens; some letters are in no token.
tokens = st.text("abc1", min_size=1, max_size=4)
prefixes = st.sampled_from(["##", "a", "@", "", "é"])
words = st.text("abc1Aé#\n ", max_size=12)


def match(vocabulary: list[str], *, prefix: str = "##", longest: int = 100, dtype: type = np.uint16) -> LongestMatch:
    unknown_id = vocabulary.index(UNKNOWN)
    return LongestMatch(vocabulary, prefix=prefix, characters=OURS, longest=longest, unknown_id=unknown_id, dtype=dtype)


def by_library(vocabulary: list[str], prefix: str, longest: int, words: list[str]) -> list[list[int]]:
    """Encodes words one by one with the library's model alone, without normalization or splitting."""
    ids = {token: index for index, token in enumerate(vocabulary)}
    model = models.WordPiece(ids, unk_token=UNKNOWN, continuing_subword_prefix=prefix, max_input_chars_per_word=longest)
    library = tokenizers.Tokenizer(model)
    return [library.encode(word, add_special_tokens=False).ids for word in words]


@given(st.lists(tokens, unique=True), st.lists(tokens, unique=True), prefixes, st.lists(words), st.integers(1, 12))
def test_ids_are_the_librarys(first: list[str], inside: list[str], prefix: str, words: list[str], longest: int) -> None:
    vocabulary = list(dict.fromkeys(["é", "a#", UNKNOWN, *first, *(prefix + token for token in inside), "\n", "a\nb"]))
    encoded = match(vocabulary, prefix=prefix, longest=longest).encode(words)
    expected = by_library(vocabulary, prefix, longest, words)
    for word, ids, library in zip(words, encoded, expected, strict=True):
        ours = 0 < len(word) <= longest and set(word) <= set(OURS)
        assert (ids is not None) == ours
        if ids is not None:
            assert np.frombuffer(ids, np.uint16).tolist() == library, word


@pytest.mark.parametrize(
    ("word", "pieces"),
    [
        ("unaffable", ["un", "##aff", "##able"]),  # the example of google-research/bert, tokenization.py
        ("unaffablex", [UNKNOWN]),  # no token matches its end, so the whole word is unknown
        ("un", ["un"]),
        ("aff", [UNKNOWN]),  # a token inside of words only
        ("ununun", ["un", "##un", "##un"]),
        ("unaf", ["un", "##a", "##f"]),
        ("unaffaffle", ["un", "##aff", "##affle"]),  # the longest, not the first
    ],
)
def test_a_word_is_cut_into_the_longest_tokens_from_the_left(word: str, pieces: list[str]) -> None:
    vocabulary = [UNKNOWN, "un", "##un", "##aff", "##able", "##affle", "##a", "##f", "affabl"]
    ids = match(vocabulary).encode([word])[0]
    assert ids is not None
    assert [vocabulary[index] for index in np.frombuffer(ids, np.uint16)] == pieces


def test_no_words_no_tokens_and_wide_ids() -> None:
    assert match([UNKNOWN]).encode([]) == []
    assert match([UNKNOWN]).encode(["a", "", "é"]) == [np.uint16(0).tobytes(), None, None]
    wide = [UNKNOWN, *(f"[{number}]" for number in range(70_000)), "a"]
    assert match(wide, dtype=np.uint32).encode(["a"]) == [np.uint32(70_001).tobytes()]
