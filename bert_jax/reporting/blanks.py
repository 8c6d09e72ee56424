"""A masked word, what stands around it, and guesses at it, as text for a person. Imports no jax."""

from collections.abc import Sequence
from dataclasses import dataclass

from bert_jax.tokenization.wordpiece import SPECIAL_TOKENS

BLANK = "[MASK]"

_NO_SPACE_BEFORE = set(",.;:!?)]}%”’…'—–-")
_NO_SPACE_AFTER = set("([{“‘$£’'—–-")


@dataclass(frozen=True)
class Guess:
    token: str
    probability: float


@dataclass(frozen=True)
class Blank:
    """One masked token: the text around it as the model saw it, the truth, and the likeliest tokens."""

    before: str
    after: str
    truth: str
    truth_probability: float
    guesses: tuple[Guess, ...]


def readable(tokens: Sequence[str]) -> str:
    """Tokens as a line of text: pieces joined to words, marks set against the words they belong to."""
    text = ""
    for token in tokens:
        if token.startswith("##"):
            text += token[2:]
        elif not text or token in _NO_SPACE_BEFORE or (text[-1] in _NO_SPACE_AFTER and token not in SPECIAL_TOKENS):
            text += token
        else:
            text += f" {token}"
    return text
