"""WordPiece at work (Schuster and Nakajima 2012; as in Devlin et al. 2019), by the `tokenizers` library.

Only some of the places where the library parts text are known here: its white space and some punctuation.
"""

import re
from collections.abc import Callable, Sequence

import tokenizers

from bert_jax.tokenizer_library import LibraryEngine

# str.split parts at these, the library does not: its clean-up drops them first, as other control characters.
_DROPPED_SEPARATORS = "\x0b\x0c\x1c\x1d\x1e\x1f\x85"
_DROP = str.maketrans("", "", _DROPPED_SEPARATORS)
# Without clean-up it parts at Unicode's White_Space, which has not U+001C to U+001F.
WHITE_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_SPACES = re.compile(f"[{WHITE_SPACE}]+")
# Marks that the library always makes words of their own: all of ASCII's, and the usual ones of typeset text.
_PUNCTUATION = re.compile("([!-/:-@[-`{-~‘’“”…–—])")


class WordPieceEngine(LibraryEngine):
    """The library's WordPiece, and that words end at white space and at punctuation."""

    def __init__(
        self, build: Callable[[], tokenizers.Tokenizer], dtype: type, *, clean_text: bool, has_text_tokens: bool
    ) -> None:
        super().__init__(build, dtype)
        self._clean_text = clean_text
        self._has_text_tokens = has_text_tokens

    def parter(self, texts: Sequence[str]) -> Callable[[str], list[str] | None] | None:
        if self._has_text_tokens:
            return None  # added tokens that are found in running text may span white space
        # One scan of the block finds out whether str.split does as the library does.
        block = "\n".join(texts)
        if not any(separator in block for separator in _DROPPED_SEPARATORS):
            return str.split
        return split_chunks if self._clean_text else _split_white_space

    def words(self, key: str) -> list[str]:
        return _PUNCTUATION.split(key)

    def encode_chunks(self, keys: Sequence[str]) -> list[bytes]:
        return self.encode(keys)


def split_chunks(text: str) -> list[str]:
    """The chunks of a text between white spaces, as the library parts them when it cleans text up."""
    return text.translate(_DROP).split()


def _split_white_space(text: str) -> list[str]:
    return [chunk for chunk in _SPACES.split(text) if chunk]
