"""The byte-level BPE engine, by the `tokenizers` library, and the characters that stand for bytes.

The library splits text by GPT-2's regular expression (Radford et al. 2019), in which a word includes the space before
it. This module uses two facts about it: it always splits before a space that is followed by anything but white space,
and, for ASCII text, all of its rules.
"""

import re
from collections.abc import Callable, Sequence

import tokenizers

from bert_jax.tokenization.chunk_cache import ChunkedTexts
from bert_jax.tokenization.tokenizer_spec import LibraryEngine
from bert_jax.tokenization.wordpiece_engine import WHITE_SPACE

# The white-space half of GPT-2's expression: a space belongs to what follows it; of several, the last one does.
_SPACES = f" \\n{WHITE_SPACE}"
_PRE_TOKENS = re.compile(f" ?[^{_SPACES}]+|[{_SPACES}]+(?![^{_SPACES}])|[{_SPACES}]+")
# GPT-2's expression for text that is all ASCII.
_ASCII_PRE_TOKENS = re.compile("'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?[^\t-\r A-Za-z0-9]+")


# Normalizers that neither create white space nor delete characters.
CHUNKABLE_NORMALIZERS = ("NFC", "NFD", "Lowercase")


class ByteBPEEngine(LibraryEngine):
    """Encodes by the library's byte-level BPE, in chunks that begin at a space with no white space after it.

    Most chunks begin with exactly one space, so the key of a chunk is what follows that space. The key of a chunk
    without one begins with a space instead.
    """

    def __init__(
        self,
        build: Callable[[], tokenizers.Tokenizer],
        build_for_chunks: Callable[[], tokenizers.Tokenizer],
        dtype: type,
        *,
        add_prefix_space: bool,
        text_tokens: Sequence[str],
        normalizers: Sequence[str],
        ignore_merges: bool,
    ) -> None:
        """`build_for_chunks` makes the same tokenizer without add_prefix_space, because a chunk has its own space."""
        super().__init__(build, dtype)
        self._chunk_library = build_for_chunks()
        self._chunk_library.encode_special_tokens = True
        self._add_prefix_space = add_prefix_space
        self._text_tokens = re.compile("|".join(map(re.escape, text_tokens))) if text_tokens else None
        self._whole = bool(text_tokens and normalizers)
        # Other normalizers may change where text splits, so only ASCII text, which they leave alone, is split here.
        self._only_ascii = not set(normalizers) <= set(CHUNKABLE_NORMALIZERS)
        self._splits_ascii = "Lowercase" not in normalizers and not ignore_merges

    def split(self, texts: Sequence[str]) -> ChunkedTexts | None:
        if self._whole:
            return None
        exceptions: dict[int, list[str] | None] = {}
        for index, text in enumerate(texts):
            if (self._only_ascii and not text.isascii()) or (self._text_tokens and self._text_tokens.search(text)):
                exceptions[index] = None
            elif (regular := " ".join(text.split())) != text and (not regular or text != " " + regular):
                if self._add_prefix_space and text[0] != " ":
                    text = " " + text
                exceptions[index] = [_key(part) for part in _PRE_TOKENS.findall(text)]
        if exceptions:
            texts = ["" if index in exceptions else text for index, text in enumerate(texts)]
        # The first chunk of a text has a space before it only if the text begins with one.
        firsts = [" " + text.split(" ", 1)[0] if text[:1] != " " else text[1:].split(" ", 1)[0] for text in texts]
        return ChunkedTexts("\n".join(texts), None if self._add_prefix_space else firsts, exceptions=exceptions)

    def words(self, keys: Sequence[str]) -> dict[str, list[str]]:
        if not self._splits_ascii:
            return {}
        words = {}
        for key in keys:
            if key.isascii():
                text = _chunk(key)
                parts: list[str] = _ASCII_PRE_TOKENS.findall(text)
                if len(parts) > 1 and sum(map(len, parts)) == len(text):
                    words[key] = [_key(part) for part in parts]
        return words

    def encode_chunks(self, keys: Sequence[str]) -> list[bytes]:
        return self.library_ids(self._chunk_library, [_chunk(key) for key in keys])


def _key(chunk: str) -> str:
    return chunk[1:] if chunk[0] == " " and chunk[1:2] != " " else " " + chunk


def _chunk(key: str) -> str:
    return key[1:] if key[:1] == " " else " " + key


def _byte_characters() -> dict[str, int]:
    """GPT-2's character for each byte: the byte's own character if printable, otherwise the next from U+0100 on."""
    printing = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_characters()


def token_text(token: str) -> str:
    """The text of a token. Bytes that do not form a whole character become U+FFFD."""
    if not all(character in _BYTES for character in token):
        return token
    return bytes(_BYTES[character] for character in token).decode("utf-8", "replace")
