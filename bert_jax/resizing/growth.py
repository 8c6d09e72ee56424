"""Adds words to a vocabulary, each as a token of its own, for text of a domain that it splits into many pieces.

Texts without the words keep their tokens. In WordPiece and SentencePiece a longer word may begin with the token of an
added word, as with any other token.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import decoders, pre_tokenizers

from bert_jax.command import UserError
from bert_jax.resizing.change import VocabularyChange
from bert_jax.tokenization import byte_bpe_engine, wordpiece_engine
from bert_jax.tokenization.byte_bpe import ByteBPESpec
from bert_jax.tokenization.sentencepiece_engine import SentencePieceEngine
from bert_jax.tokenization.sentencepiece_json import parse
from bert_jax.tokenization.sentencepiece_model import SPACE, SentencePieceSpec
from bert_jax.tokenization.tokenizer_spec import TokenizerSpec
from bert_jax.tokenization.wordpiece import WordPieceSpec
from bert_jax.tokenizer import Tokenizer
from bert_jax.vocabulary import KINDS

# How far the score of unknown text is below that of the rarest piece: kUnkPenalty of google/sentencepiece,
# src/unigram_model.cc.
_UNKNOWN_PENALTY = 10.0


class _NewToken(NamedTuple):
    token: str  # as the vocabulary spells it
    text: str  # the text that it stands for


class _Lookup(NamedTuple):
    """What a tokenizer does to text before it looks words up."""

    normalize: Callable[[str], str]
    split: Callable[[str], list[str]]  # into words, as the vocabulary spells them
    forms: Callable[[str], tuple[str, ...]] = lambda word: (word,)  # the texts of a word that have tokens of their own


def grow(tokenizer: Tokenizer, words: Sequence[str]) -> VocabularyChange:
    """Returns the vocabulary with a token for each word after its other tokens, in the order of the words.

    In byte-level BPE a word has two tokens, with and without the space before it. In XLM-R's numbering <mask> remains
    the last id. The rows of a new token come from the tokens that its text had before.

    Raises UserError for no words; for a word that occurs twice, contains white space, is a token already, or is changed
    or split by the tokenizer before it looks words up; and for a vocabulary that cannot have further words.
    """
    if not words:
        raise UserError("it has no words. Write one word on each line")
    most_frequent, count = Counter(words).most_common(1)[0]
    if count > 1:
        raise UserError(f"it has {most_frequent!r} {count} times. Remove the repetitions")
    lookup = _lookup(tokenizer.spec)
    tokens = [new for word in words for new in _new_tokens(tokenizer, lookup, word)]
    pieces = _pieces(tokenizer, tokens)
    grown = _with_tokens(tokenizer, tokens, pieces)
    _check_whole(Tokenizer(grown), tokens)
    sources = {new.token: ids for new, ids in zip(tokens, pieces, strict=True)}
    return VocabularyChange.of(tokenizer.spec, grown, sources)


def _lookup(spec: TokenizerSpec) -> _Lookup:
    """Raises UserError for a kind of vocabulary that cannot grow."""
    if isinstance(spec, WordPieceSpec):
        library = wordpiece_engine.library_tokenizer(spec)
        return _Lookup(lambda word: library.normalizer.normalize_str(word).strip(), _splitter(library.pre_tokenizer))
    if isinstance(spec, ByteBPESpec):
        library = byte_bpe_engine.library_tokenizer(spec)
        normalize = library.normalizer.normalize_str if library.normalizer else str
        split = _splitter(pre_tokenizers.ByteLevel(add_prefix_space=False))
        return _Lookup(normalize, split, lambda word: (f" {word}", word))
    if isinstance(spec, SentencePieceSpec) and spec.kind == "unigram":
        if not spec.parsed.normalizer_spec.add_dummy_prefix:
            raise UserError("its SentencePiece model has add_dummy_prefix off, with which it cannot grow")
        engine = SentencePieceEngine(spec)
        return _Lookup(
            lambda word: engine.normalize(word).removeprefix(SPACE).replace(SPACE, " "), lambda word: [SPACE + word]
        )
    raise UserError(
        f"its vocabulary is {KINDS[spec.kind]}, which makes words by merges of pieces alone and cannot grow. Use a "
        "checkpoint with WordPiece, byte-level BPE or SentencePiece Unigram"
    )


def _splitter(library: pre_tokenizers.PreTokenizer) -> Callable[[str], list[str]]:
    return lambda text: [piece for piece, _ in library.pre_tokenize_str(text)]


def _new_tokens(tokenizer: Tokenizer, lookup: _Lookup, word: str) -> list[_NewToken]:
    """The tokens that a word gets. Raises UserError if it has them already, or cannot have them."""
    if not word or SPACE in word or any(map(str.isspace, word)):
        raise UserError(f"{word!r} contains white space, so it cannot be one token. Write one word on each line")
    read = lookup.normalize(word)
    if read != word:
        raise UserError(
            f"the tokenizer changes {word!r} to {read!r} before it looks words up. Write the word in that form, or "
            "remove it"
        )
    found = []
    for text in lookup.forms(word):
        pieces = lookup.split(text)
        if len(pieces) != 1:
            raise UserError(
                f"the tokenizer splits {word!r} into {' '.join(pieces)} before it looks words up, so it cannot be one "
                "token. Write the parts on lines of their own, or remove it"
            )
        found.append(_NewToken(pieces[0], text))
    if missing := [new for new in found if tokenizer.id_of(new.token) is None]:
        return missing
    raise UserError(f"the vocabulary has a token for {word!r} (id {tokenizer.id_of(found[0].token)}). Remove the word")


def _pieces(tokenizer: Tokenizer, tokens: Sequence[_NewToken]) -> list[tuple[int, ...]]:
    """The ids of each new token's text."""
    encoder = tokenizer.within_text if tokenizer.kind == "bpe" else tokenizer
    ids, offsets = encoder.encode_many([new.text for new in tokens])
    return [tuple(part.tolist()) for part in np.split(ids, offsets[1:-1])]


def _with_tokens(tokenizer: Tokenizer, tokens: Sequence[_NewToken], pieces: Sequence[tuple[int, ...]]) -> TokenizerSpec:
    """The specification with new tokens; pieces are the ids that their texts had."""
    spec = tokenizer.spec
    if isinstance(spec, SentencePieceSpec):
        return _with_unigram_pieces(spec, tokens, [tokenizer.tokens(ids) for ids in pieces])
    assert isinstance(spec, WordPieceSpec | ByteBPESpec)
    before = spec.all_tokens()
    ids = {token: index for index, token in enumerate(before)}
    # From here on `tokens` has those that `added` alone had, so the order of `added` no longer determines ids.
    added = tuple(sorted(spec.added, key=lambda token: ids[token.content]))
    grown = dataclasses.replace(spec, tokens=before + tuple(new.token for new in tokens), added=added)
    return _looking_up_words(tokenizer, grown) if isinstance(grown, ByteBPESpec) else grown


def _looking_up_words(tokenizer: Tokenizer, grown: ByteBPESpec) -> ByteBPESpec:
    """The byte-level BPE that looks words up before it merges bytes, since no merges build the new tokens.

    Raises UserError if this would change other texts. They would change only where a word of theirs is a token that
    the merges do not build.
    """
    if grown.ignore_merges:
        return grown
    decode = decoders.ByteLevel().decode
    texts = [decode([token]) for token in tokenizer.spec.all_tokens()]
    texts = [text for text in texts if "\ufffd" not in text]  # the others are parts of characters, never whole words
    within = tokenizer.within_text
    assert isinstance(within.spec, ByteBPESpec)
    looking_up = Tokenizer(dataclasses.replace(within.spec, ignore_merges=True))
    if not all(map(np.array_equal, within.encode_many(texts), looking_up.encode_many(texts))):
        raise UserError(
            "the merges of its byte-level BPE do not build all of its tokens, so looking up whole words would change "
            "the tokens of other texts. Use another checkpoint"
        )
    return dataclasses.replace(grown, ignore_merges=True)


def _with_unigram_pieces(
    spec: SentencePieceSpec, tokens: Sequence[_NewToken], pieces: Sequence[Sequence[str]]
) -> SentencePieceSpec:
    """The Unigram model with new pieces at its end, each with the mean score of those that it replaces.

    Scores are logarithms of probabilities. A mean of several exceeds their sum, so the new piece is preferred.
    """
    model = parse(spec.model)
    scores = {piece.piece: piece.score for piece in model.pieces}
    lowest = min(piece.score for piece in model.pieces if piece.type == piece.NORMAL)
    scores[spec.roles.unk_token] = lowest - _UNKNOWN_PENALTY
    for new, replaced in zip(tokens, pieces, strict=True):
        mean = float(np.mean([scores[piece] for piece in replaced]))
        model.pieces.add(piece=new.token, score=max(mean, lowest))  # a lower one would change that of unknown text
    model.trainer_spec.vocab_size = len(model.pieces)
    model.DiscardUnknownFields()  # among them samples by which the library tests an unchanged model
    return dataclasses.replace(spec, model=model.SerializeToString())


def _check_whole(grown: Tokenizer, tokens: Sequence[_NewToken]) -> None:
    """Raises UserError unless the text of each new token is this token alone."""
    for new, ids in zip(tokens, _pieces(grown, tokens), strict=True):
        if ids != (grown.id_of(new.token),):
            raise UserError(
                f"{new.text.strip()!r:.60} would still be {' '.join(grown.tokens(ids))}, since it is too long or "
                "contains a token that takes precedence. Remove it"
            )
