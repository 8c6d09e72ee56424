"""Encodes the text of a unit: sentence splitting, then the tokenizer; or the result that a token cache holds."""

import numpy as np

from bert_jax.tokenizer import Tokenizer
from data_prep.objectives import Encoded
from data_prep.sentences import document_sentences
from data_prep.token_cache import TokenCache
from data_prep.units import Unit


def encode(tokenizer: Tokenizer, unit: Unit, cache: TokenCache | None = None) -> Encoded:
    """The ids of a unit's sentences, from one call of the tokenizer or from the cache."""
    if cache is None:
        return _encode(tokenizer, unit)
    encoded = cache.load(tokenizer.content_hash, unit.text_hash)
    if encoded is None:
        encoded = _encode(tokenizer, unit)
        cache.store(tokenizer.content_hash, unit.text_hash, encoded)
    return encoded


def _encode(tokenizer: Tokenizer, unit: Unit) -> Encoded:
    # Tokens of byte-level BPE include the space before a word, so a sentence inside of a text is encoded differently
    # from one that begins it: to RoBERTa "well. As such" is one text, and "As" has a space before it.
    space = " " if tokenizer.kind == "bpe" else ""
    sentences: list[str] = []
    counts = []
    for document in unit.documents:
        found = document_sentences(document.decode())
        sentences += [space * (number > 0) + sentence for number, sentence in enumerate(found)]
        counts.append(len(found))
    ids, offsets = tokenizer.encode_many(sentences)
    present = np.diff(offsets) > 0
    # Number of sentences with tokens before each sentence, and from that before each document.
    before = np.concatenate([[0], np.cumsum(present)])
    borders = before[np.concatenate([[0], np.cumsum(counts)])]
    documents = np.stack([borders[:-1], borders[1:]], axis=1)
    documents = documents[documents[:, 0] < documents[:, 1]]
    kept = np.append(offsets[:-1][present], offsets[-1])
    return Encoded(ids, kept, documents, len(unit.documents) - len(documents))
