"""Byte-level BPE and SentencePiece against their libraries; test_train_tokenizer.py has WordPiece."""

import io
import random

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from bert_jax.errors import UserError
from data_prep import counting, learners
from data_prep.learners import MASK, SPECIAL_TOKENS
from data_prep.readers import corpus as readers


def word_counts(splitter, documents):
    counter = counting.ChunkCounter(splitter)
    counter.add(documents)
    return counting.count_words(counter.counts, splitter)


def byte_counts(documents):
    return word_counts(learners.ByteSplitter(), documents)


def piece_counts(documents):
    return word_counts(learners.SentencePieceSplitter(), documents)


def library(model: models.BPE) -> tokenizers.Tokenizer:
    built = tokenizers.Tokenizer(model)
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return built


def test_tokens_and_merges_are_those_of_the_library(sample_text):
    documents = list(readers.documents(sample_text))
    tokens, merges = learners.learn_byte_bpe(byte_counts(documents), 2500)
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


def test_white_space_of_code_is_learned_as_the_library_learns_it():
    draw = random.Random(0)
    documents = []
    for name in ("parse", "write", "read", "merge") * 20:
        lines = [f"{draw.choice(['', '    ', '        ', chr(9), chr(9) * 2])}{name}(x,  y)" for _ in range(12)]
        documents.append(draw.choice(["\n", "\n\n", "\r\n"]).join(lines) + draw.choice(["", "\n", "  \n\n"]))
        documents.append("   " + documents[-1].replace(" ", "\u00a0\u3000"))
    size = 420
    tokens, merges = learners.learn_byte_bpe(byte_counts(documents), size)
    theirs = tokenizers.ByteLevelBPETokenizer()
    theirs.train_from_iterator(documents, size - 5, min_frequency=2, show_progress=False)
    assert set(tokens) - {*SPECIAL_TOKENS, MASK} == set(theirs.get_vocab())
    assert {"\u0120\u0120\u0120", "\u010a\u0120\u0120\u0120", "\u010d\u010a"} <= set(tokens)
    ours = library(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    for document in documents:
        assert ours.encode(document).tokens == theirs.encode(document).tokens


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


KINDS = list(learners.MODEL_TYPES)


@pytest.mark.parametrize("kind", KINDS)
def test_model_is_as_the_librarys_own_on_the_text(kind, sample_text):
    documents = list(readers.documents(sample_text))
    told: list[float] = []
    model = learners.learn_sentence_pieces(piece_counts(documents), 1500, kind=kind, on_share=told.append)
    ours = sentencepiece.SentencePieceProcessor(model_proto=model)
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for document in documents for line in document.split("\n")),
        model_writer=written,
        model_type=learners.MODEL_TYPES[kind],
        vocab_size=1500 - learners.ADDED_TOKENS,
        minloglevel=2,
        max_sentence_length=1 << 20,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    pieces = [[each.id_to_piece(index) for index in range(each.get_piece_size())] for each in (ours, theirs)]
    assert pieces[0][:3] == pieces[1][:3] == ["<unk>", "<s>", "</s>"] and len(pieces[0]) == len(pieces[1]) == 1498
    assert len(set(pieces[0]) & set(pieces[1])) > 0.97 * 1498
    found, expected = (sum(map(len, each.encode(documents))) for each in (ours, theirs))
    assert abs(found - expected) < 0.01 * expected
    assert all("text.txt" not in text and "tmp" not in text for text in (str(model), ours.id_to_piece(5)))
    assert told == sorted(told) and 0 <= told[0] <= told[-1] <= 1


@pytest.mark.parametrize("kind", ["bpe", *KINDS])
def test_order_of_the_words_decides_nothing(kind, sample_text):
    def learn(counts):
        if kind == "bpe":
            return learners.learn_byte_bpe(dict(counts), 900)
        return learners.learn_sentence_pieces(dict(counts), 1200, kind=kind)

    counts = list((byte_counts if kind == "bpe" else piece_counts)(readers.documents(sample_text)).items())
    learned = learn(counts)
    random.Random(0).shuffle(counts)
    assert learn(counts) == learned


def test_words_begin_with_the_mark_and_windows_do_not():
    splitter = learners.SentencePieceSplitter()
    assert list(splitter.words("word")) == ["\u2581word"]
    first, *others = splitter.words("ก" * 90)
    assert first == "\u2581" + "ก" * 30 and others == ["ก" * 30] * 2


def test_lowercase_folds(sample_text):
    model = learners.learn_sentence_pieces(
        piece_counts(readers.documents(sample_text)), 600, kind="unigram", lowercase=True
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert processor.encode("The HOUSE") == processor.encode("the house") and 0 not in processor.encode("The HOUSE")


def test_mistakes_are_one_line():
    counts = {f"\u2581{chr(97 + index)}b": 5 for index in range(20)}
    with pytest.raises(UserError, match=r"--vocab_size 12 is too small: .* already take 26\. Use more") as caught:
        learners.learn_sentence_pieces(counts, 12, kind="unigram")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="the sentencepiece library failed"):
        learners.learn_sentence_pieces({}, 100, kind="sentencepiece_bpe")


def test_smaller_model_than_asked_for_is_given():
    generator = random.Random(0)
    counts = {"\u2581" + "".join(generator.choices("abc", k=4)): 3 for _ in range(30)}
    for kind in KINDS:
        model = learners.learn_sentence_pieces(counts, 5000, kind=kind)
        assert 10 < sentencepiece.SentencePieceProcessor(model_proto=model).get_piece_size() < 400
