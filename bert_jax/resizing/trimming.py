"""Drops the tokens of a vocabulary that given texts do not use.

The texts keep their tokens exactly, alone and within a document. Special and added tokens, bytes and single characters
always stay, so any other text has tokens too, though possibly more and shorter ones.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from bert_jax.command import UserError
from bert_jax.resizing.change import VocabularyChange
from bert_jax.tokenization import wordpiece_engine
from bert_jax.tokenization.byte_bpe import ByteBPESpec
from bert_jax.tokenization.sentencepiece_model import SentencePieceSpec
from bert_jax.tokenization.tokenizer_spec import TokenizerSpec
from bert_jax.tokenization.wordpiece import WordPieceSpec
from bert_jax.tokenizer import Tokenizer


class Usage:
    """Collects what texts need of a vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._used = np.zeros(tokenizer.vocab_size, bool)
        self._texts = 0
        self._unknown: set[str] = set()  # words
        spec = tokenizer.spec
        self._library = wordpiece_engine.library_tokenizer(spec) if isinstance(spec, WordPieceSpec) else None

    def add(self, texts: Sequence[str]) -> None:
        """Counts the tokens of texts alone, of those that continue a document (data_prep.encoding), and of tasks."""
        self._add(self._tokenizer, texts)
        if self._tokenizer.within_text is not self._tokenizer:
            self._used[self._tokenizer.within_text.encode_many(texts)[0]] = True
        if self._tokenizer.of_tasks is not self._tokenizer:
            self._add(self._tokenizer.of_tasks, texts)

    def _add(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        ids, offsets = tokenizer.encode_many(texts)
        self._used[ids] = True
        if tokenizer.kind == "bpe":
            self._used[tokenizer.encode_many([f" {text}" for text in texts if text])[0]] = True
        self._texts += len(ids) > 0
        if self._library:
            unknown = np.flatnonzero(ids == tokenizer.unk_id)
            for index in np.unique(np.searchsorted(offsets, unknown, side="right") - 1):
                found, spans = tokenizer.encode_offsets(texts[index])
                for begin, end in spans[found == tokenizer.unk_id].tolist():
                    normal = self._library.normalizer.normalize_str(texts[index][begin:end])
                    self._unknown.update(word for word, _ in self._library.pre_tokenizer.pre_tokenize_str(normal))

    def trim(self) -> VocabularyChange:
        """Returns the vocabulary without unused tokens; the others keep their order.

        Raises UserError if the texts had no tokens.
        """
        if not self._texts:
            raise UserError("it has no text. Name the text whose tokens are to be kept")
        spec = self._tokenizer.spec
        tokens = spec.all_tokens()
        kept = {tokens[index] for index in np.flatnonzero(self._used)}
        kept |= {tokens[index] for index in spec.special_ids()}
        trimmed: TokenizerSpec
        if isinstance(spec, WordPieceSpec):
            trimmed = _trim_wordpiece(spec, kept, self._unknown)
        elif isinstance(spec, ByteBPESpec):
            trimmed = _trim_byte_bpe(spec, kept)
        else:
            assert isinstance(spec, SentencePieceSpec)
            trimmed = _trim_sentencepiece(spec, kept)
        return VocabularyChange.of(spec, trimmed)


def _trim_wordpiece(spec: WordPieceSpec, kept: set[str], unknown: Iterable[str]) -> WordPieceSpec:
    """Without the tokens that were not taken, the longest match still takes those that it took.

    An unknown word could become known where a match becomes shorter, so all tokens that occur in it stay.
    """
    kept = kept | {token.content for token in spec.added} | {one for one in spec.tokens if len(spec.surface(one)) == 1}
    for word in unknown:
        kept.update(_occurring(spec, word))
    return dataclasses.replace(spec, tokens=tuple(token for token in spec.tokens if token in kept))


def _occurring(spec: WordPieceSpec, word: str) -> Iterator[str]:
    """The tokens that a word may be matched with, whether the vocabulary has them or not."""
    if len(word) <= spec.max_word_length:  # longer ones are unknown in any vocabulary
        for begin in range(len(word)):
            prefix = spec.continuation_prefix if begin else ""
            yield from (prefix + word[begin:end] for end in range(begin + 1, len(word) + 1))


def _trim_byte_bpe(spec: ByteBPESpec, kept: set[str]) -> ByteBPESpec:
    """The merges that build kept tokens stay, with their parts, so the same merges apply in the same order."""
    kept = kept | {token.content for token in spec.added} | {token for token in spec.tokens if len(token) == 1}
    parts: dict[str, list[tuple[str, str]]] = {}
    for left, right in spec.merges:
        parts.setdefault(left + right, []).append((left, right))
    kept = _with_parts(kept, lambda token: parts.get(token, ()))
    merges = tuple(merge for merge in spec.merges if "".join(merge) in kept)
    return dataclasses.replace(spec, tokens=tuple(token for token in spec.tokens if token in kept), merges=merges)


def _trim_sentencepiece(spec: SentencePieceSpec, kept: set[str]) -> SentencePieceSpec:
    """Pieces other than normal ones stay (special ones, bytes, those of users), and what determines the best path.

    In Unigram this is the rarest piece, from which the score of unknown text follows, and the most frequent one, from
    which that of users' pieces follows. In BPE a piece is built of two pieces, so these stay too.
    """
    model = spec.parsed
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == piece.NORMAL}
    kept = kept | {piece.piece for piece in model.pieces if piece.type != piece.NORMAL or len(piece.piece) == 1}
    if spec.kind == "unigram":
        kept |= {min(scores, key=scores.__getitem__), max(scores, key=scores.__getitem__)}
    else:
        known = set(spec.pieces)
        kept = _with_parts(kept, lambda piece: [part for part in _halves(piece) if known.issuperset(part)])
    trimmed = type(model)()
    trimmed.CopyFrom(model)
    trimmed.DiscardUnknownFields()  # among them samples by which the library tests an unchanged model
    trimmed.ClearField("pieces")
    trimmed.pieces.extend(piece for piece in model.pieces if piece.piece in kept)
    ids = {piece.piece: index for index, piece in enumerate(trimmed.pieces)}
    trainer = trimmed.trainer_spec
    trainer.vocab_size = len(ids)
    for field in ("unk_id", "bos_id", "eos_id", "pad_id"):
        if 0 <= (old := getattr(trainer, field)) < len(spec.pieces):
            setattr(trainer, field, ids.get(spec.pieces[old], -1))
    return dataclasses.replace(spec, model=trimmed.SerializeToString())


def _halves(piece: str) -> list[tuple[str, str]]:
    return [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]


def _with_parts(tokens: Iterable[str], parts: Callable[[str], Iterable[tuple[str, str]]]) -> set[str]:
    """The tokens with all of their parts, and the parts of these; parts lists the pairs that a token is merged from."""
    found: set[str] = set()
    waiting = list(tokens)
    while waiting:
        token = waiting.pop()
        if token not in found:
            found.add(token)
            waiting += [part for pair in parts(token) for part in pair]
    return found
