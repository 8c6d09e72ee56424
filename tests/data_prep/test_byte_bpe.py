"""Merges are those of the library's BpeTrainer, ties and all, and encode any text."""

import random

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from bert_jax.errors import UserError
from data_prep import counting, learners
from data_prep.learners import MASK, SPECIAL_TOKENS
from data_prep.readers import corpus as readers


def word_counts(documents):
    splitter = learners.ByteSplitter()
    counter = counting.ChunkCounter(splitter)
    counter.add(documents)
    return counting.count_words(counter.counts, splitter)


def library(model: models.BPE) -> tokenizers.Tokenizer:
    built = tokenizers.Tokenizer(model)
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return built


def test_tokens_and_merges_are_those_of_the_library(sample_text):
    documents = list(readers.documents(sample_text))
    tokens, merges = learners.learn_byte_bpe(word_counts(documents), 2500)
    theirs = library(models.BPE())
    theirs.train_from_iterator(
        (line for document in documents for line in document.split("\n")),
        trainers.BpeTrainer(
            vocab_size=2499,
            min_frequency=2,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    assert {token: index for index, token in enumerate(tokens)} == theirs.get_vocab() | {MASK: 2499}
    ours = library(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    for document in documents:
        assert ours.encode(document).ids == theirs.encode(document).ids


def test_order_of_the_words_decides_nothing(sample_text):
    counts = word_counts(readers.documents(sample_text))
    shuffled = list(counts.items())
    random.Random(0).shuffle(shuffled)
    assert learners.learn_byte_bpe(dict(shuffled), 900) == learners.learn_byte_bpe(counts, 900)


@given(text=st.text(max_size=60))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_bytes_are_written_as_the_library_writes_them(text):
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    assert learners.written_bytes(text) == "".join(piece for piece, _ in pieces)


def test_special_tokens_and_bytes_come_first_and_mask_last():
    tokens, merges = learners.learn_byte_bpe({"\u0120low": 5, "low": 4, "new": 1}, 270)
    assert tokens[:4] == ["<s>", "<pad>", "</s>", "<unk>"] and tokens[-1] == "<mask>"
    assert sorted(tokens[4:260]) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert merges == [("l", "o"), ("lo", "w"), ("\u0120", "low")] and tokens[260:-1] == ["lo", "low", "\u0120low"]
    with pytest.raises(UserError, match=r"--vocab_size 260 is too small: .* already take 261"):
        learners.learn_byte_bpe({"low": 5}, 260)
