"""What the engines of all kinds of tokenizer share: their protocol, and encoding by the `tokenizers` library."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import tokenizers
from tokenizers import processors

from bert_jax.command import UserError
from bert_jax.tokenization.chunk_cache import ChunkEncoder
from bert_jax.tokenization.tokenizer_spec import AddedToken

# Chunks passed to the library in one call.
LIBRARY_CHUNKS = 20_000
# Frequent characters of English text, roughly from rare to frequent. All others are rarer.
_FREQUENT = "zqjxkv'bpgywmfucldrhsinoate-.,# "


@runtime_checkable
class Engine(ChunkEncoder, Protocol):
    """A library's tokenizer that encodes and decodes, in addition to what the cache needs. Texts are Unicode."""

    def encode_special(self, text: str) -> list[int]:
        """The ids of a text in which special tokens are replaced by their ids."""

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of a text and the character span [start, end) of each."""

    def decode(self, ids: list[int]) -> str:
        """Readable text, including special tokens."""

    def to_json(self) -> str:
        """The content of tokenizer.json, by which the `tokenizers` library gives the same ids, or nearly the same."""


class LibraryEngine(Engine):
    """Encodes by a tokenizer of the `tokenizers` library."""

    def __init__(self, library: tokenizers.Tokenizer, id_dtype: type) -> None:
        self.id_dtype = id_dtype
        self._library = library
        self._library.encode_special_tokens = True  # "[MASK]" in a text is ordinary text

    @functools.cached_property
    def _special_library(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(self._library.to_str())  # which does not store encode_special_tokens

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        return self.library_ids(self._library, texts)

    def encode_special(self, text: str) -> list[int]:
        return list(self._special_library.encode(text, add_special_tokens=False).ids)

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._library.encode(text, add_special_tokens=False)
        return list(encoding.ids), list(encoding.offsets)

    def decode(self, ids: list[int]) -> str:
        return str(self._library.decode(ids, skip_special_tokens=False))

    def to_json(self) -> str:
        return str(self._library.to_str(pretty=True))

    def library_ids(self, library: tokenizers.Tokenizer, texts: Sequence[str]) -> list[bytes]:
        """The ids of each text, as bytes. One call encodes many texts, because a call costs more than a word."""
        encoded: list[bytes] = []
        width = np.dtype(self.id_dtype).itemsize
        for start in range(0, len(texts), LIBRARY_CHUNKS):
            part = texts[start : start + LIBRARY_CHUNKS]
            # Pre-tokenized input is normalized and split text by text, and word_ids gives the text of each id.
            # (encode_batch_fast would be a fifth faster, but leaves word_ids empty.)
            try:
                encoding = library.encode(list(part), is_pretokenized=True, add_special_tokens=False)
            except TypeError:
                refuse_surrogates(part)
                raise
            ids = np.array(encoding.ids, self.id_dtype).tobytes()
            owners = np.array(encoding.word_ids, np.int64)
            bounds = (np.searchsorted(owners, np.arange(len(part) + 1)) * width).tolist()
            encoded += [ids[first:last] for first, last in itertools.pairwise(bounds)]
        return encoded


def add_tokens(library: tokenizers.Tokenizer, added: Iterable[AddedToken]) -> None:
    """Adds tokens that are matched before text is split."""
    for token in added:
        options = dataclasses.asdict(token)
        of_library = tokenizers.AddedToken(options.pop("content"), **options)
        (library.add_special_tokens if token.special else library.add_tokens)([of_library])


def text_tokens(added: Iterable[AddedToken]) -> re.Pattern[str] | None:
    """Matches the added tokens that are matched in running text; None if there are none."""
    contents = [re.escape(token.content) for token in added if not token.special]
    return re.compile("|".join(contents)) if contents else None


class NormalizedTokens:
    """Finds the texts in whose normalized form tokens occur. The normalizer maps each character independently.

    To normalize a text takes about as long as to encode it. So of each token the rarest character is taken, and only
    texts with a character that normalizes to it are normalized.
    """

    def __init__(self, contents: Iterable[str], normalize: Callable[[str], str]) -> None:
        self._normalize = normalize
        self._tokens = [normalize(content) for content in contents]  # as the library looks them up
        self._rare = {min(token, key=_FREQUENT.find, default="") for token in self._tokens}
        self._seen: set[str] = set()  # characters of texts
        self._sources: list[str] = []  # those that normalize to a rare one
        self._see(map(chr, range(128)))

    def occur(self, text: str) -> bool:
        """Whether one of the tokens occurs in the normalized text."""
        if not text.isascii():
            self._see(set(text) - self._seen)
        if not any(source in text for source in self._sources):
            return False
        normal = self._normalize(text)
        return any(token in normal for token in self._tokens)

    def _see(self, characters: Iterable[str]) -> None:
        for one in characters:
            self._seen.add(one)
            if any(rare in self._normalize(one) for rare in self._rare):
                self._sources.append(one)


def template(
    cls: tuple[str, int], sep: tuple[str, int], *, separators: int = 1, second: int = 1
) -> processors.TemplateProcessing:
    """The sequences of one text and of two texts.

    cls, sep    tokens and their ids
    separators  the number of separators between two texts
    second      the token type of the second text and of the separator after it
    """
    between = " ".join([f"{sep[0]}:0"] * separators)
    return processors.TemplateProcessing(
        single=f"{cls[0]}:0 $A:0 {sep[0]}:0",
        pair=f"{cls[0]}:0 $A:0 {between} $B:{second} {sep[0]}:{second}",
        special_tokens=[cls, sep],
    )


def refuse_surrogates(texts: Iterable[str]) -> None:
    """Raises UserError for text with a lone surrogate, which UTF-8 cannot represent.

    Python decodes terminal input that is not valid UTF-8 to such text.
    """
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"text contains the lone surrogate U+{ord(text[error.start]):04X}: {text[:40]!a}. Give valid UTF-8"
            ) from None
