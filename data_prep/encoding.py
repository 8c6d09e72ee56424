"""A unit's text as ids: sentences, then the tokenizer; or what a cache of tokens has kept of that."""

import numpy as np

from bert_jax.tokenizer import Tokenizer
from data_prep.objectives import Encoded
from data_prep.sentences import document_sentences
from data_prep.token_cache import TokenCache
from data_prep.units import Unit


def encode(tokenizer: Tokenizer, unit: Unit, cache: TokenCache | None = None) -> Encoded:
    """The ids of a unit's sentences, in one call of the tokenizer, or none where the cache has them."""
    if cache is None:
        return _encode(tokenizer, unit)
    encoded = cache.load(tokenizer.content_hash, unit.text_hash)
    if encoded is None:
        encoded = _encode(tokenizer, unit)
        cache.store(tokenizer.content_hash, unit.text_hash, encoded)
    return encoded


def _encode(tokenizer: Tokenizer, unit: Unit) -> Encoded:
    # Byte-level BPE has the space before a word in its tokens, so a sentence within a text is not encoded as one that
    # begins it: "well. As such" is one text to RoBERTa, and its "As" the start of a word.
    space = " " if tokenizer.kind == "bpe" else ""
    sentences: list[str] = []
    counts = []
    for document in unit.documents:
        found = document_sentences(document.decode())
        sentences += [space * (number > 0) + sentence for number, sentence in enumerate(found)]
        counts.append(len(found))
    ids, offsets = tokenizer.encode_many(sentences)
    present = np.diff(offsets) > 0
    # How many sentences with a token lie before each one, and so before each document.
    before = np.concatenate([[0], np.cumsum(present)])
    borders = before[np.concatenate([[0], np.cumsum(counts)])]
    documents = np.stack([borders[:-1], borders[1:]], axis=1)
    documents = documents[documents[:, 0] < documents[:, 1]]
    kept = np.append(offsets[:-1][present], offsets[-1])
    return Encoded(ids, kept, documents, len(unit.documents) - len(documents))
