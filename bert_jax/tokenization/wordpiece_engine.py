"""WordPiece at work (Schuster and Nakajima 2012; as in Devlin et al. 2019), by the `tokenizers` library.

Only some of the places where the library parts text are known here: its white space and some punctuation; and that it
makes the capitals of ASCII small.
"""

from collections.abc import Callable, Mapping, Sequence

import tokenizers

from bert_jax.tokenization.cache import Parted
from bert_jax.tokenization.library import LibraryEngine

# str.split parts at these, the library does not: its clean-up drops them first, as other control characters.
_DROPPED_SEPARATORS = "\x0b\x0c\x1c\x1d\x1e\x1f\x85"
_DROP = str.maketrans("", "", _DROPPED_SEPARATORS)
# Unicode's White_Space but for " " and "\n". str.isspace has U+001C to U+001F besides.
WHITE_SPACE = "\t\x0b\x0c\r\x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
_SPACES = dict.fromkeys(WHITE_SPACE, " ")
_CLEANED = _SPACES | dict.fromkeys(_DROPPED_SEPARATORS, "")


class WordPieceEngine(LibraryEngine):
    """The library's WordPiece, and that words end at white space and at punctuation."""

    def __init__(
        self,
        build: Callable[[], tokenizers.Tokenizer],
        dtype: type,
        *,
        lowercase: bool,
        clean_text: bool,
        has_text_tokens: bool,
    ) -> None:
        super().__init__(build, dtype)
        self._lowercase = lowercase
        self._clean_text = clean_text
        self._has_text_tokens = has_text_tokens

    def part(self, texts: Sequence[str]) -> Parted | None:
        if self._has_text_tokens:
            return None  # added tokens that are found in running text may span white space
        block = replaced(lines(texts), _CLEANED if self._clean_text else _SPACES)
        return Parted(block, marks=True, fold=self._lowercase)

    def words(self, key: str) -> list[str]:
        return [key]

    def encode_chunks(self, keys: Sequence[str]) -> list[bytes]:
        return self.encode(keys)


def split_chunks(text: str) -> list[str]:
    """The chunks of a text between white spaces, as the library parts them when it cleans text up."""
    return text.translate(_DROP).split()


def lines(texts: Sequence[str]) -> str:
    """A line a text; white space within one is a space."""
    block = "\n".join(texts)
    if block.count("\n") >= len(texts):
        block = "\n".join(text.replace("\n", " ") for text in texts)
    return block


def replaced(block: str, characters: Mapping[str, str]) -> str:
    """A text with some characters replaced, quick where most of them do not occur."""
    ascii_only = block.isascii()
    for character, other in characters.items():
        if not (ascii_only and character > "\x7f") and character in block:
            block = block.replace(character, other)
    return block
