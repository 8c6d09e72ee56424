"""Byte-level BPE at work, by the `tokenizers` library, and the characters by which it writes bytes.

The library cuts text by GPT-2's regular expression (Radford et al. 2019), in which a word's leading space belongs to
it. This file only knows where that must cut: before a space that is followed by anything but white space, whatever
stands there; and all of its rules for ASCII.
"""

import re
from collections.abc import Callable, Sequence

import tokenizers

from bert_jax.tokenization.chunk_cache import ChunkedTexts
from bert_jax.tokenization.tokenizer_spec import LibraryEngine
from bert_jax.tokenization.wordpiece_engine import WHITE_SPACE

# The white-space half of GPT-2's expression: a space goes with what follows it; of a run the last one does.
_SPACES = f" \\n{WHITE_SPACE}"
_CUTS = re.compile(f" ?[^{_SPACES}]+|[{_SPACES}]+(?![^{_SPACES}])|[{_SPACES}]+")
# GPT-2's expression where all characters are ASCII.
_ASCII_CUTS = re.compile("'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?[^\t-\r A-Za-z0-9]+")


# Normalizers of the library that turn nothing into white space and nothing into nothing.
KEEPING_WHITE_SPACE = ("NFC", "NFD", "Lowercase")


class ByteBPEEngine(LibraryEngine):
    """The library's byte-level BPE, and that it cuts before a space followed by anything but white space.

    A chunk's key is what follows its one leading space, for most have one; a chunk without one has its key begin with
    a space instead.
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
        """`build_for_chunks` makes the same with no space put before a text, for a chunk has its own."""
        super().__init__(build, dtype)
        self._chunk_library = build_for_chunks()
        self._chunk_library.encode_special_tokens = True
        self._add_prefix_space = add_prefix_space
        self._text_tokens = re.compile("|".join(map(re.escape, text_tokens))) if text_tokens else None
        self._whole = bool(text_tokens and normalizers)
        # What normalizing turns into white space or into nothing is not parted, where it may do so.
        self._only_ascii = not set(normalizers) <= set(KEEPING_WHITE_SPACE)
        self._ascii_cuts = "Lowercase" not in normalizers and not ignore_merges

    def part(self, texts: Sequence[str]) -> ChunkedTexts | None:
        if self._whole:
            return None
        apart: dict[int, list[str] | None] = {}
        for place, text in enumerate(texts):
            if (self._only_ascii and not text.isascii()) or (self._text_tokens and self._text_tokens.search(text)):
                apart[place] = None
            elif (regular := " ".join(text.split())) != text and (not regular or text != " " + regular):
                if self._add_prefix_space and text[0] != " ":
                    text = " " + text
                apart[place] = [_key(cut) for cut in _CUTS.findall(text)]
        if apart:
            texts = ["" if place in apart else text for place, text in enumerate(texts)]
        # The first chunk of a text has the space before it that is written there, or none.
        firsts = [" " + text.split(" ", 1)[0] if text[:1] != " " else text[1:].split(" ", 1)[0] for text in texts]
        return ChunkedTexts("\n".join(texts), None if self._add_prefix_space else firsts, apart=apart)

    def words(self, keys: Sequence[str]) -> dict[str, list[str]]:
        if not self._ascii_cuts:
            return {}
        words = {}
        for key in keys:
            if key.isascii():
                text = _chunk(key)
                cuts: list[str] = _ASCII_CUTS.findall(text)
                if len(cuts) > 1 and sum(map(len, cuts)) == len(text):
                    words[key] = [_key(cut) for cut in cuts]
        return words

    def encode_chunks(self, keys: Sequence[str]) -> list[bytes]:
        return self.library_ids(self._chunk_library, [_chunk(key) for key in keys])


def _key(cut: str) -> str:
    return cut[1:] if cut[0] == " " and cut[1:2] != " " else " " + cut


def _chunk(key: str) -> str:
    return key[1:] if key[:1] == " " else " " + key


def _byte_characters() -> dict[str, int]:
    """The character that GPT-2 writes for each byte: itself where it prints, else the next from U+0100 on."""
    printing = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_characters()


def token_text(token: str) -> str:
    """What a token stands for; bytes that make no whole character are U+FFFD."""
    if not all(character in _BYTES for character in token):
        return token
    return bytes(_BYTES[character] for character in token).decode("utf-8", "replace")
