"""A vocabulary in which every letter is a piece."""

import pytest

from bert_jax.tokenization import tokenizer as tokenizer_lib
from bert_jax.tokenization.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The letters of the alphabet and a question mark, at the beginning of a word and within it."""
    alphabet = "abcdefghijklmnopqrstuvwxyz?"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    path = tmp_path_factory.mktemp("letters") / "vocab.txt"
    path.write_text("\n".join([*special, *alphabet, *(f"##{letter}" for letter in alphabet)]) + "\n")
    return tokenizer_lib.load(path, lowercase=True)
