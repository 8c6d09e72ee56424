"""Grows or shrinks the vocabulary of a trained model, together with its token embeddings.

`grow` adds words to a vocabulary and `Usage.trim` drops the tokens that given texts do not use. Both return a
VocabularyChange, which `with_vocabulary` applies to the token tables and biases of a model.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from tokenizers import decoders, pre_tokenizers

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model import layers
from bert_jax.model.bert import abstract_params
from bert_jax.model.heads.config import Heads
from bert_jax.tokenization import byte_bpe, wordpiece
from bert_jax.tokenization.byte_bpe import ByteBPESpec
from bert_jax.tokenization.sentencepiece_engine import SentencePieceEngine
from bert_jax.tokenization.sentencepiece_model import SPACE, SentencePieceSpec, parse
from bert_jax.tokenization.specification import TokenizerSpec
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.tokenization.vocabulary import KINDS
from bert_jax.tokenization.wordpiece import WordPieceSpec

# How far the score of unknown text is below that of the rarest piece: kUnkPenalty of google/sentencepiece,
# src/unigram_model.cc.
_UNKNOWN_PENALTY = 10.0


class VocabularyChange(NamedTuple):
    """A vocabulary that replaces another one.

    spec      the new vocabulary
    sources   for each of its ids, the ids of the old vocabulary whose mean its rows are; a token that stays has one
    """

    spec: TokenizerSpec
    sources: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls, old: TokenizerSpec, new: TokenizerSpec, added: dict[str, tuple[int, ...]] | None = None
    ) -> "VocabularyChange":
        """The change between two vocabularies, of which tokens with the same string are the same.

        added   the sources of the tokens that only the new vocabulary has
        """
        ids = {token: (index,) for index, token in enumerate(old.all_tokens())}
        known = ids | (added or {})
        return cls(new, tuple(known[token] for token in new.all_tokens()))


def with_vocabulary(loaded: LoadedModel, change: VocabularyChange) -> LoadedModel:
    """Returns the model with another vocabulary, whose rows are means of the old vocabulary's (VocabularyChange).

    It has as many rows as the vocabulary has tokens; rows of the old model that no token used are dropped. Rows with
    one source are copied exactly. The model's metrics, which were measured with the old vocabulary, are dropped.
    """
    model = dataclasses.replace(loaded.model, vocab_size=len(change.sources))
    wanted = layers.flatten(abstract_params(model, loaded.heads))
    params = dict(loaded.params)
    for path, axis in vocabulary_axes(loaded.model, loaded.heads).items():
        by_row = np.moveaxis(loaded.params[path], axis, 0)
        rows = _mean_rows(by_row, change.sources, loaded.dtype)
        padding = wanted[path].shape[axis] - len(rows)
        rows = np.pad(rows, [(0, padding)] + [(0, 0)] * (rows.ndim - 1))
        params[path] = np.ascontiguousarray(np.moveaxis(rows, 0, axis))
    return dataclasses.replace(loaded, model=model, params=params, vocabulary=Tokenizer(change.spec), metrics={})


def vocabulary_axes(model: ModelConfig, heads: Heads) -> dict[str, int]:
    """Returns the parameters that have a row for each token, by path, with the axis of these rows.

    They are those whose shape depends on the size of the vocabulary: token tables, and biases of outputs.
    """
    larger = dataclasses.replace(model, vocab_size=2 * model.vocab_size + 1_000)
    shapes, others = (
        {path: leaf.shape for path, leaf in layers.flatten(abstract_params(config, heads)).items()}
        for config in (model, larger)
    )
    differing = {path: np.flatnonzero(np.not_equal(shape, others[path])) for path, shape in shapes.items()}
    return {path: int(axes[0]) for path, axes in differing.items() if len(axes)}


def _mean_rows(table: np.ndarray, sources: Sequence[tuple[int, ...]], dtype: str) -> np.ndarray:
    """Returns a float32 table whose rows are means of rows of another; means are rounded to a dtype."""
    rows = table[[source[0] for source in sources]]
    for index, source in enumerate(sources):
        if len(source) > 1:
            rows[index] = table[list(source)].mean(0, dtype=np.float64).astype(jnp.dtype(dtype))
    return rows


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

    Texts without the words keep their tokens. In WordPiece and SentencePiece a longer word may begin with the token of
    an added word, as with any other token.

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
        library = wordpiece.library_tokenizer(spec)
        return _Lookup(lambda word: library.normalizer.normalize_str(word).strip(), _splitter(library.pre_tokenizer))
    if isinstance(spec, ByteBPESpec):
        library = byte_bpe.library_tokenizer(spec)
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
    tokens = []
    for text in lookup.forms(word):
        pieces = lookup.split(text)
        if len(pieces) != 1:
            raise UserError(
                f"the tokenizer splits {word!r} into {' '.join(pieces)} before it looks words up, so it cannot be one "
                "token. Write the parts on lines of their own, or remove it"
            )
        tokens.append(_NewToken(pieces[0], text))
    if missing := [new for new in tokens if tokenizer.id_of(new.token) is None]:
        return missing
    raise UserError(f"the vocabulary has a token for {word!r} (id {tokenizer.id_of(tokens[0].token)}). Remove the word")


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


class Usage:
    """Collects the tokens that texts use, and drops the others from the vocabulary.

    The texts keep their tokens exactly, alone and within a document. Special and added tokens, bytes and single
    characters always stay, so any other text has tokens too, though possibly more and shorter ones.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._used = np.zeros(tokenizer.vocab_size, bool)
        self._texts = 0
        self._unknown: set[str] = set()  # words
        spec = tokenizer.spec
        self._library = wordpiece.library_tokenizer(spec) if isinstance(spec, WordPieceSpec) else None

    def add(self, texts: Sequence[str]) -> None:
        """Counts the tokens of texts alone, of those that continue a document (data_prep.worker), and of tasks."""
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
                tokens, spans = tokenizer.encode_offsets(texts[index])
                for begin, end in spans[tokens == tokenizer.unk_id].tolist():
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
    kept = kept | {token.content for token in spec.added}
    kept |= {token for token in spec.tokens if len(spec.surface(token)) == 1}
    for word in unknown:
        if len(word) <= spec.max_word_length:  # longer ones are unknown in any vocabulary
            for begin in range(len(word)):
                prefix = spec.continuation_prefix if begin else ""
                kept.update(prefix + word[begin:end] for end in range(begin + 1, len(word) + 1))
    return dataclasses.replace(spec, tokens=tuple(token for token in spec.tokens if token in kept))


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
        kept = _with_parts(
            kept,
            lambda piece: [
                parts for cut in range(1, len(piece)) if known.issuperset(parts := (piece[:cut], piece[cut:]))
            ],
        )
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


def _with_parts(tokens: Iterable[str], parts: Callable[[str], Iterable[tuple[str, str]]]) -> set[str]:
    """Returns tokens with all of their parts, recursively; parts lists the pairs that a token is merged from."""
    reached: set[str] = set()
    waiting = list(tokens)
    while waiting:
        token = waiting.pop()
        if token not in reached:
            reached.add(token)
            waiting += [part for pair in parts(token) for part in pair]
    return reached
