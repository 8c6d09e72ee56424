"""Grows or shrinks a trained model's vocabulary, together with its token embeddings.

`grow` adds words, and `Usage.trim` drops unused tokens. Both return a VocabularyChange, which `with_vocabulary` applies
to a model and `resize_checkpoint` to a checkpoint.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from tokenizers import decoders, pre_tokenizers

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.interop import export, huggingface_export, sentence_transformers
from bert_jax.interop.family import pad_rows
from bert_jax.interop.loaded_model import LoadedModel, select_part
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import layers
from bert_jax.model.bert import abstract_params
from bert_jax.model.heads.config import Heads
from bert_jax.storage.files import refuse_existing
from bert_jax.tokenization import byte_bpe, wordpiece
from bert_jax.tokenization.byte_bpe import ByteBPESpec
from bert_jax.tokenization.sentencepiece_engine import SentencePieceEngine
from bert_jax.tokenization.sentencepiece_model import SPACE, SentencePieceSpec, parse
from bert_jax.tokenization.specification import TokenizerSpec
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.tokenization.vocabulary import KINDS
from bert_jax.tokenization.wordpiece import WordPieceSpec

# How far the score of unknown text is below the rarest piece's: kUnkPenalty of google/sentencepiece,
# src/unigram_model.cc.
_UNKNOWN_PENALTY = 10.0


class VocabularyChange(NamedTuple):
    """A vocabulary that replaces another one."""

    spec: TokenizerSpec
    sources: tuple[tuple[int, ...], ...]  # by new id: the old ids whose rows are averaged; one for a token that stays


def _change(
    old: TokenizerSpec, new: TokenizerSpec, added: dict[str, tuple[int, ...]] | None = None
) -> VocabularyChange:
    """The change between two vocabularies; `added` has the new tokens' sources. Other tokens keep their strings."""
    sources = {token: (index,) for index, token in enumerate(old.all_tokens())} | (added or {})
    return VocabularyChange(new, tuple(sources[token] for token in new.all_tokens()))


class Resized(NamedTuple):
    """A model with its new vocabulary, and its sizes before and after."""

    loaded: LoadedModel
    tokens_before: int
    bytes_before: int | None  # of weight files; None if the checkpoint is not a Hugging Face folder
    bytes_after: int | None  # the same for the output


def resize_checkpoint(
    checkpoint: str | Path, output: str | Path, change: Callable[[LoadedModel], VocabularyChange], average: str = ""
) -> Resized:
    """Changes a checkpoint's vocabulary.

    Args:
        checkpoint: As in open_checkpoint, like `average`.
        output: The folder to create: for transformers, or a workdir if no such folder can hold the model. It appears
            complete or not at all.
        change: Makes the change from the opened model, e.g. by `grow`.
        average: As in open_checkpoint.

    Raises:
        UserError: The output exists, or open_checkpoint, `change` or the export refuses.
    """
    refuse_existing(Path(output))
    loaded = open_checkpoint(checkpoint, average)
    # The output may be a Hugging Face folder, which holds one part.
    if loaded.heads.generator:
        loaded = select_part(loaded, "discriminator")
    # The same format as the checkpoint had, as far as possible.
    task = loaded.task or {}
    embeds = task.get("kind") == sentence_transformers.KIND and sentence_transformers.has_known_pooling(task)
    format = "sentence_transformers" if embeds else "hf"
    try:
        huggingface_export.check(huggingface_export.sentence_encoder(loaded)[0] if embeds else loaded)
    except UserError:
        format = "orbax"
    resized = with_vocabulary(loaded, change(loaded))
    export.export_loaded(resized, output, format)
    before, after = (
        sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) or None
        for folder in (checkpoint, output)
    )
    return Resized(resized, loaded.vocabulary.vocab_size, before, after)


def with_vocabulary(loaded: LoadedModel, change: VocabularyChange) -> LoadedModel:
    """Replaces a model's vocabulary. Rows with one source are copied exactly, others are means of old rows.

    The model gets as many rows as there are tokens, so old rows without a token are dropped, and so are metrics, which
    were measured with the old vocabulary.
    """
    model = dataclasses.replace(loaded.model, vocab_size=len(change.sources))
    shapes = layers.flatten(abstract_params(model, loaded.heads))
    params = dict(loaded.params)
    for path, axis in vocabulary_axes(loaded.model, loaded.heads).items():
        table = np.moveaxis(loaded.params[path], axis, 0)
        rows = table[[source[0] for source in change.sources]]
        for index, source in enumerate(change.sources):
            if len(source) > 1:
                # Rounded to the dtype of the file, so that a half-precision model is exported in half precision.
                rows[index] = table[list(source)].mean(0, dtype=np.float64).astype(jnp.dtype(loaded.dtype))
        # Tables have a multiple of rows; the rest is 0, as after training.
        rows = pad_rows(rows, shapes[path].shape[axis])
        params[path] = np.ascontiguousarray(np.moveaxis(rows, 0, axis))
    return dataclasses.replace(loaded, model=model, params=params, vocabulary=Tokenizer(change.spec), metrics={})


def vocabulary_axes(model: ModelConfig, heads: Heads) -> dict[str, int]:
    """Finds the parameters with a row per token (token tables and output biases), by path, with the rows' axis."""
    # Their shapes are those that depend on the vocabulary's size.
    # The size grows by more than the padding of tables, so that padded tables differ, too.
    larger = dataclasses.replace(model, vocab_size=2 * model.vocab_size + 1_000)
    shapes, others = (layers.flatten(abstract_params(config, heads)) for config in (model, larger))
    differing = {path: np.flatnonzero(np.not_equal(shapes[path].shape, others[path].shape)) for path in shapes}
    return {path: int(axes[0]) for path, axes in differing.items() if len(axes)}


def grow(tokenizer: Tokenizer, words: Sequence[str]) -> VocabularyChange:
    """Adds tokens for words after the other tokens, in the words' order.

    Texts without the words keep their tokens. In WordPiece and SentencePiece a longer word may begin with an added
    word's token, as with any other token. In byte-level BPE a word has two tokens, with and without the space before
    it. In XLM-R's numbering <mask> remains the last id. A new token's rows come from the tokens that its text had.

    Raises:
        UserError: There are no words; a word occurs twice, contains white space, is a token already, or is changed or
            split by the tokenizer before it looks words up; or the vocabulary cannot grow.
    """
    [(most_frequent, count)] = Counter(words).most_common(1) or [("", 0)]
    if count != 1:
        raise UserError(
            f"it has {most_frequent!r} {count} times. Remove the repetitions"
            if words
            else "it has no words. Write one word on each line"
        )
    spec = tokenizer.spec
    normalize, split = _lookup(spec)
    texts: dict[str, str] = {}  # by new token
    for word in words:
        texts |= _new_tokens(tokenizer, normalize, split, word)
    sources = dict(zip(texts, _encode(tokenizer, texts.values()), strict=True))
    if isinstance(spec, SentencePieceSpec):
        grown: TokenizerSpec = _add_unigram_pieces(
            spec, {token: tokenizer.tokens(ids) for token, ids in sources.items()}
        )
    else:
        assert isinstance(spec, WordPieceSpec | ByteBPESpec)
        before = spec.all_tokens()
        ids = {token: index for index, token in enumerate(before)}
        # Now `tokens` also lists the tokens that `added` alone had, so the order of `added` no longer determines ids.
        added = tuple(sorted(spec.added, key=lambda token: ids[token.content]))
        grown = dataclasses.replace(spec, tokens=(*before, *texts), added=added)
        if isinstance(grown, ByteBPESpec) and not grown.ignore_merges:
            # No merges build the new tokens, so words are looked up before bytes are merged.
            _check_ignoring_merges(tokenizer)
            grown = dataclasses.replace(grown, ignore_merges=True)
    # Each text must now be its one token.
    larger = Tokenizer(grown)
    for (token, text), encoded in zip(texts.items(), _encode(larger, texts.values()), strict=True):
        if encoded != (larger.token_id(token),):
            raise UserError(
                f"{text.strip()!r:.60} would still be {' '.join(larger.tokens(encoded))}, since it is too long or "
                "contains a token that takes precedence. Remove it"
            )
    return _change(spec, grown, sources)


def _lookup(spec: TokenizerSpec) -> tuple[Callable[[str], str], Callable[[str], list[str]]]:
    """The two steps before a tokenizer looks words up: normalizing a text, and splitting it as the vocabulary does."""

    def splitter(library: pre_tokenizers.PreTokenizer) -> Callable[[str], list[str]]:
        return lambda text: [piece for piece, _ in library.pre_tokenize_str(text)]

    if isinstance(spec, WordPieceSpec):
        library = wordpiece.library_tokenizer(spec)
        return lambda word: library.normalizer.normalize_str(word).strip(), splitter(library.pre_tokenizer)
    if isinstance(spec, ByteBPESpec):
        library = byte_bpe.library_tokenizer(spec)
        normalize = library.normalizer.normalize_str if library.normalizer else str
        return normalize, splitter(pre_tokenizers.ByteLevel(add_prefix_space=False))
    problem = f"vocabulary is {KINDS[spec.kind]}, which makes words by merges of pieces alone and"
    if isinstance(spec, SentencePieceSpec) and spec.kind == "unigram":
        engine = SentencePieceEngine(spec)
        # The engine normalizes with the space that add_dummy_prefix puts before a text; `split` adds it again.
        if spec.parsed.normalizer_spec.add_dummy_prefix:
            return (
                lambda word: engine.normalize(word).removeprefix(SPACE).replace(SPACE, " "),
                lambda word: [SPACE + word],
            )
        problem = "SentencePiece model has add_dummy_prefix off, with which it"
    raise UserError(
        f"its {problem} cannot grow. Use a checkpoint with WordPiece, byte-level BPE or SentencePiece Unigram"
    )


def _new_tokens(
    tokenizer: Tokenizer, normalize: Callable[[str], str], split: Callable[[str], list[str]], word: str
) -> dict[str, str]:
    """The tokens that a word gets, with their texts."""
    if not word or SPACE in word or any(map(str.isspace, word)):
        raise UserError(f"{word!r} contains white space, so it cannot be one token. Write one word on each line")
    normal = normalize(word)
    # Byte-level BPE spells a word after a space in another way than at the beginning of a text.
    texts = (f" {word}", word) if tokenizer.kind == "bpe" else (word,)
    pieces = [split(text) for text in texts]
    tokens = {parts[0]: text for parts, text in zip(pieces, texts, strict=True) if len(parts) == 1}
    new = {token: text for token, text in tokens.items() if tokenizer.token_id(token) is None}
    if normal != word:
        problem = f"the tokenizer changes {word!r} to {normal!r} before it looks words up. Write it in that form"
    elif any(len(parts) != 1 for parts in pieces):
        parts = next(parts for parts in pieces if len(parts) != 1)
        problem = (
            f"the tokenizer splits {word!r} into {' '.join(parts)} before it looks words up, so it cannot be one "
            "token. Write the parts on lines of their own"
        )
    elif not new:
        problem = (
            f"the vocabulary has a token for {word!r} (id {tokenizer.token_id(next(iter(tokens)))}). Name another word"
        )
    else:
        return new
    raise UserError(f"{problem}, or remove it")


def _encode(tokenizer: Tokenizer, texts: Iterable[str]) -> list[tuple[int, ...]]:
    """The ids of new tokens' texts."""
    # Some tokenizers add a space before a text, but here both spellings are given.
    encoder = tokenizer.within_text if tokenizer.kind == "bpe" else tokenizer
    ids, offsets = encoder.encode_many(list(texts))
    return [tuple(part.tolist()) for part in np.split(ids, offsets[1:-1])]


def _check_ignoring_merges(tokenizer: Tokenizer) -> None:
    """Refuses a tokenizer if looking words up before merging would change other texts.

    It changes only words that are tokens which the merges do not build.
    """
    decode = decoders.ByteLevel().decode
    texts = [decode([token]) for token in tokenizer.spec.all_tokens()]
    texts = [text for text in texts if "\ufffd" not in text]  # the others are parts of characters, never whole words
    merging = tokenizer.within_text
    assert isinstance(merging.spec, ByteBPESpec)
    looking_up = Tokenizer(dataclasses.replace(merging.spec, ignore_merges=True))
    if not all(map(np.array_equal, merging.encode_many(texts), looking_up.encode_many(texts))):
        raise UserError(
            "the merges of its byte-level BPE do not build all of its tokens, so looking up whole words would change "
            "the tokens of other texts. Use another checkpoint"
        )


def _add_unigram_pieces(spec: SentencePieceSpec, replaced: Mapping[str, Sequence[str]]) -> SentencePieceSpec:
    """Appends pieces to a Unigram model, each with the mean score of the pieces that it replaces."""
    # Scores are log probabilities, so a mean of several exceeds their sum, and the new piece is preferred.
    model = parse(spec.model)
    scores = {piece.piece: piece.score for piece in model.pieces}
    lowest = min(piece.score for piece in model.pieces if piece.type == piece.NORMAL)
    scores[spec.roles.unk_token] = lowest - _UNKNOWN_PENALTY
    for new, pieces in replaced.items():
        mean = float(np.mean([scores[piece] for piece in pieces]))
        # A score below the lowest would change the score of unknown text.
        model.pieces.add(piece=new, score=max(mean, lowest))
    model.trainer_spec.vocab_size = len(model.pieces)
    model.DiscardUnknownFields()  # among them samples by which the library tests an unchanged model
    return dataclasses.replace(spec, model=model.SerializeToString())


class Usage:
    """Collects the tokens that texts use, and drops all others from the vocabulary.

    The texts keep their tokens exactly, alone and within a document. Special and added tokens, bytes and single
    characters always stay, so other texts have tokens, too, though maybe more and shorter ones.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._used = np.zeros(tokenizer.vocab_size, bool)
        self._texts = 0
        self._unknown: set[str] = set()  # words
        spec = tokenizer.spec
        self._library = wordpiece.library_tokenizer(spec) if isinstance(spec, WordPieceSpec) else None

    def add(self, texts: Sequence[str]) -> None:
        """Counts the tokens in texts: alone, within a document (data_prep.worker), and in tasks."""
        self._add(self._tokenizer, texts)
        # Shards encode sentences within a document, where some tokenizers add no space before a text.
        if self._tokenizer.within_text is not self._tokenizer:
            self._used[self._tokenizer.within_text.encode_many(texts)[0]] = True
        if self._tokenizer.of_tasks is not self._tokenizer:
            self._add(self._tokenizer.of_tasks, texts)

    def _add(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        ids, offsets = tokenizer.encode_many(texts)
        self._used[ids] = True
        # A text may also follow a space in a document.
        if tokenizer.kind == "bpe":
            self._used[tokenizer.encode_many([f" {text}" for text in texts if text])[0]] = True
        self._texts += len(ids) > 0
        if not self._library:
            return
        # Unknown words, which `trim` must not make known.
        unknown = np.flatnonzero(ids == tokenizer.unk_id)
        for index in np.unique(np.searchsorted(offsets, unknown, side="right") - 1):
            tokens, spans = tokenizer.encode_offsets(texts[index])
            for begin, end in spans[tokens == tokenizer.unk_id].tolist():
                normal = self._library.normalizer.normalize_str(texts[index][begin:end])
                self._unknown.update(word for word, _ in self._library.pre_tokenizer.pre_tokenize_str(normal))

    def trim(self) -> VocabularyChange:
        """Drops unused tokens; the others keep their order.

        Raises:
            UserError: The texts had no tokens.
        """
        if not self._texts:
            raise UserError("it has no text. Name the text whose tokens are to be kept")
        spec = self._tokenizer.spec
        tokens = spec.all_tokens()
        used = {tokens[index] for index in (*np.flatnonzero(self._used), *spec.special_ids())}
        if isinstance(spec, SentencePieceSpec):
            return _change(spec, _trim_sentencepiece(spec, used))
        assert isinstance(spec, WordPieceSpec | ByteBPESpec)
        used |= {token.content for token in spec.added}
        if isinstance(spec, WordPieceSpec):
            # In known words the longest matches stay the longest. An unknown word could become known if a match became
            # shorter, so all tokens that occur in it stay.
            used |= {token for token in spec.tokens if len(spec.surface(token)) == 1}
            for word in self._unknown:
                if len(word) <= spec.max_word_length:  # longer ones are unknown in any vocabulary
                    for begin in range(len(word)):
                        prefix = spec.continuation_prefix if begin else ""
                        used.update(prefix + word[begin:end] for end in range(begin + 1, len(word) + 1))
            tokens = tuple(token for token in spec.tokens if token in used)
            return _change(spec, dataclasses.replace(spec, tokens=tokens))
        # Merges that build used tokens stay, with their parts, so the same merges apply in the same order.
        parts: dict[str, list[tuple[str, str]]] = {}
        for left, right in spec.merges:
            parts.setdefault(left + right, []).append((left, right))
        used |= {token for token in spec.tokens if len(token) == 1}
        used = _with_parts(used, lambda token: parts.get(token, ()))
        merges = tuple(merge for merge in spec.merges if "".join(merge) in used)
        tokens = tuple(token for token in spec.tokens if token in used)
        return _change(spec, dataclasses.replace(spec, tokens=tokens, merges=merges))


def _trim_sentencepiece(spec: SentencePieceSpec, used: set[str]) -> SentencePieceSpec:
    """Drops unused normal pieces that do not influence the best path."""
    model = spec.parsed
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == piece.NORMAL}
    used = used | {piece.piece for piece in model.pieces if piece.type != piece.NORMAL or len(piece.piece) == 1}
    # In Unigram, unknown text is scored by the rarest piece, and users' pieces by the most frequent one. In BPE, pieces
    # are built from two pieces, which stay, too.
    if spec.kind == "unigram":
        used |= {min(scores, key=scores.__getitem__), max(scores, key=scores.__getitem__)}
    else:
        known = set(spec.pieces)

        def parts(piece: str) -> Iterable[tuple[str, str]]:
            pairs = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
            return (pair for pair in pairs if known.issuperset(pair))

        used = _with_parts(used, parts)
    trimmed = type(model)()
    trimmed.CopyFrom(model)
    trimmed.DiscardUnknownFields()  # among them samples by which the library tests an unchanged model
    trimmed.ClearField("pieces")
    trimmed.pieces.extend(piece for piece in model.pieces if piece.piece in used)
    ids = {piece.piece: index for index, piece in enumerate(trimmed.pieces)}
    trainer = trimmed.trainer_spec
    # The special ids are indices of pieces, which have moved.
    trainer.vocab_size = len(ids)
    for field in ("unk_id", "bos_id", "eos_id", "pad_id"):
        if 0 <= (old := getattr(trainer, field)) < len(spec.pieces):
            setattr(trainer, field, ids.get(spec.pieces[old], -1))
    return dataclasses.replace(spec, model=trimmed.SerializeToString())


def _with_parts(tokens: Iterable[str], parts: Callable[[str], Iterable[tuple[str, str]]]) -> set[str]:
    """Adds all parts of tokens, recursively; `parts` lists the pairs from which a token is merged."""
    reached: set[str] = set()
    waiting = list(tokens)
    while waiting:
        token = waiting.pop()
        if token not in reached:
            reached.add(token)
            waiting += [part for pair in parts(token) for part in pair]
    return reached
