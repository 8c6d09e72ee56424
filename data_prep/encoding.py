"""Encodes the text of a unit: sentence splitting, then the tokenizer; or the result that a token cache holds."""

from collections.abc import Sequence

import numpy as np

from bert_jax.array_types import Int64, UInt
from bert_jax.command import UserError
from bert_jax.tokenizer import Tokenizer
from bert_jax.vocabulary import KINDS
from data_prep.line_breaks import joined_sentences, kept_pieces
from data_prep.objectives import Encoded
from data_prep.token_cache import TokenCache
from data_prep.units import Unit


def refuse_newlines(tokenizer: Tokenizer) -> None:
    """Raises UserError for a tokenizer that cannot keep line breaks."""
    if not tokenizer.spec.keeps_newlines:
        more = ", or its normalizer or added tokens join white space" if tokenizer.kind == "bpe" else ""
        raise UserError(
            f"--newlines keep: the {KINDS[tokenizer.kind]} vocabulary has no tokens for line breaks{more}. Leave the "
            "option out, or use byte-level BPE such as the vocabularies of GPT-2, RoBERTa and ModernBERT"
        )


def encode(tokenizer: Tokenizer, unit: Unit, cache: TokenCache | None = None, newlines: str = "join") -> Encoded:
    """The ids of a unit's sentences, from the tokenizer or from the cache.

    newlines   "join" or "keep" (data_prep.line_breaks); with "keep" the ids of a document are those of its whole text
    """
    if cache is None:
        return _encode(tokenizer, unit, newlines)
    encoded = cache.load(tokenizer.content_hash, unit.text_hash)
    if encoded is None:
        encoded = _encode(tokenizer, unit, newlines)
        cache.store(tokenizer.content_hash, unit.text_hash, encoded)
    return encoded


def _encode(tokenizer: Tokenizer, unit: Unit, newlines: str) -> Encoded:
    texts: list[str] = []
    direct: list[bool] = []  # whether a text continues the one before without a space
    counts = []
    for document in unit.documents:
        found, follows = _texts(tokenizer, document.decode(), newlines)
        texts += found
        direct += follows
        counts.append(len(found))
    ids, offsets = _encode_texts(tokenizer, texts, direct)
    present = np.diff(offsets) > 0
    # Number of sentences with tokens before each sentence, and from that before each document.
    before = np.concatenate([[0], np.cumsum(present)])
    borders = before[np.concatenate([[0], np.cumsum(counts)])]
    documents = np.stack([borders[:-1], borders[1:]], axis=1)
    documents = documents[documents[:, 0] < documents[:, 1]]
    kept = np.append(offsets[:-1][present], offsets[-1])
    return Encoded(ids, kept, documents, len(unit.documents) - len(documents))


def _texts(tokenizer: Tokenizer, document: str, newlines: str) -> tuple[list[str], list[bool]]:
    """The sentences of a document with the white space that their ids include, and whether each continues the text."""
    if newlines == "keep":
        pieces = kept_pieces(document)
        return pieces, [number > 0 for number in range(len(pieces))]
    sentences, direct = joined_sentences(document)
    if tokenizer.kind == "bpe":
        # Tokens of byte-level BPE include the space before a word, so a sentence inside of a text is encoded
        # differently from one that begins it: to RoBERTa "well. As such" is one text, and "As" has a space before it.
        follows = zip(sentences, direct, strict=True)
        spaced = [one if not number or joins else f" {one}" for number, (one, joins) in enumerate(follows)]
        return spaced, direct
    return sentences, direct


def _encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], direct: Sequence[bool]
) -> tuple[UInt[np.ndarray, "n"], Int64[np.ndarray, "boundaries"]]:
    """The concatenated ids of the texts, and the offsets at which each text begins."""
    if not any(direct) or tokenizer.within_text is tokenizer:
        return tokenizer.encode_many(texts)
    within = np.array(direct)
    encoders = (tokenizer, ~within), (tokenizer.within_text, within)
    parts = [
        encoder.encode_many([text for text, chosen in zip(texts, some, strict=True) if chosen])
        for encoder, some in encoders
    ]
    ids = np.concatenate([part for part, _ in parts])
    begins, lengths = np.zeros((2, len(texts)), np.int64)
    for first, (_, some), (_, offsets) in zip((0, len(parts[0][0])), encoders, parts, strict=True):
        begins[some], lengths[some] = first + offsets[:-1], np.diff(offsets)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    return ids[np.repeat(begins - ends[:-1], lengths) + np.arange(ends[-1])], ends
