"""Sentences to ids: what a model reads is the text as it stood."""

from pathlib import Path

import pytest
import tokenizer_kinds

from bert_jax.tokenization import tokenizer
from data_prep.units import Unit
from data_prep.worker import encode

DOCUMENTS = ("It was well. As such, he left! “Why?” she asked.\nNobody knew.", "Another one. It ends.")


@pytest.mark.parametrize("kind", ["bpe", "bpe_prefix_space"])
def test_sentences_of_byte_pairs_keep_the_space_before_them(kind: str, sample_text: Path, tmp_path: Path) -> None:
    """The ids of a document are those of its text in one piece, as the library encodes it."""
    library = tokenizer_kinds.make(kind, [*sample_text.read_text(encoding="utf-8").split("\n"), *DOCUMENTS], tmp_path)
    loaded = tokenizer.load(tmp_path)
    unit = Unit("train", 0, tuple(text.encode() for text in DOCUMENTS), "")
    encoded = encode(loaded, unit)
    whole = library([text.replace("\n", " ") for text in DOCUMENTS])
    for (first, last), ids in zip(encoded.documents, whole, strict=True):
        assert encoded.ids[encoded.offsets[first] : encoded.offsets[last]].tolist() == ids
        begins = encoded.ids[encoded.offsets[first + 1 : last]]
        assert last - first > 1 and not loaded.continuation[begins].any()
