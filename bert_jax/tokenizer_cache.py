"""A bounded memory of chunks of text and their ids, so that the library meets most words once.

A chunk is what lies between two white spaces; which texts may be parted so, and where, each kind of tokenizer knows
(`Codec`). What is not remembered goes to the library, so no Unicode rule is written again here.
"""

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

# Entries, each about 200 bytes (key, ids, dictionary slot): 60 MB. In two halves, so that filling up loses what was
# not asked for lately and nothing else.
CACHE_CHUNKS = 300_000
# Longer chunks (sentences of unspaced scripts, URLs) seldom come twice, and would make the size unbounded.
CACHED_CHUNK_LENGTH = 40
# Characters of text looked up together.
BLOCK_CHARACTERS = 1 << 20


@runtime_checkable
class Codec(Protocol):
    """A library's tokenizer, and what is known of where it parts text. Ids are bytes of the tokenizer's id_dtype."""

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """The ids of each text by the library alone."""

    def parter(self, texts: Sequence[str]) -> Callable[[str], list[str] | None] | None:
        """For texts looked up together: parts one into the keys of its chunks, or None where only the library can.

        The ids of a text are those of its chunks, joined. None instead of a function: nothing here may be parted.
        """

    def encode_chunks(self, keys: Sequence[str]) -> list[bytes]:
        """The ids of each chunk by the library."""

    def words(self, key: str) -> list[str]:
        """Keys whose ids, joined, are those of the chunk: itself alone where nothing is known."""


class ChunkCache:
    """Encodes by a codec and remembers. Not for several threads at once."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        # The older half is what the newer one was when it last filled up.
        self._cache: dict[str, bytes] = {}
        self._older: dict[str, bytes] = {}

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """The ids of each text."""
        encoded: list[bytes] = []
        for block in _blocks(texts):
            encoded += self._encode_block(block)
        return encoded

    def _encode_block(self, texts: Sequence[str]) -> list[bytes]:
        part = self._codec.parter(texts)
        if part is None:
            return self._codec.encode(texts)
        lookup = self._cache.get
        encoded = [b""] * len(texts)
        whole: list[int] = []
        missed: dict[int, list[str]] = {}
        unknown: dict[str, None] = {}
        for index, text in enumerate(texts):
            chunks = part(text)
            if chunks is None:
                whole.append(index)
                continue
            found = list(map(lookup, chunks))
            if None in found:
                missed[index] = chunks
                absent = itertools.compress(chunks, map(operator.is_, found, itertools.repeat(None)))
                unknown.update(dict.fromkeys(absent))
            else:
                encoded[index] = b"".join(found)  # type: ignore[arg-type]
        for index, ids in zip(whole, self._codec.encode([texts[index] for index in whole]), strict=True):
            encoded[index] = ids
        if missed:
            passing = self._learn(unknown)
            for index, chunks in missed.items():
                encoded[index] = b"".join(map(self._cache.__getitem__, chunks))
            self._forget(passing)
        return encoded

    def _learn(self, chunks: Iterable[str]) -> list[str]:
        """Puts chunks into the cache, and the words within them; returns those too long to stay."""
        # "end", "end." and "(end" then cost one word of the library's time, which is most of that of a cold cache.
        words = {chunk: self._codec.words(chunk) for chunk in self._recall(chunks)}
        unknown = self._recall(dict.fromkeys(itertools.chain.from_iterable(words.values())))
        self._cache.update(zip(unknown, self._codec.encode_chunks(unknown), strict=True))
        for chunk, parts in words.items():
            if len(parts) > 1:
                self._cache[chunk] = b"".join(map(self._cache.__getitem__, parts))
        return [key for key in {**words, **dict.fromkeys(unknown)} if len(key) > CACHED_CHUNK_LENGTH]

    def _recall(self, chunks: Iterable[str]) -> list[str]:
        """Takes what the older half of the cache knows into the newer, and returns what neither knows."""
        absent = [chunk for chunk in chunks if chunk not in self._cache]
        self._cache.update({chunk: self._older[chunk] for chunk in absent if chunk in self._older})
        return [chunk for chunk in absent if chunk not in self._older]

    def _forget(self, passing: Iterable[str]) -> None:
        """Takes chunks out of the cache, and drops its older half when the newer one is full."""
        for chunk in passing:
            del self._cache[chunk]
        if len(self._cache) > CACHE_CHUNKS // 2:
            self._older, self._cache = self._cache, {}


def _blocks(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Runs of texts of about BLOCK_CHARACTERS, at least one text each."""
    start = characters = 0
    for index, text in enumerate(texts):
        characters += len(text)
        if characters >= BLOCK_CHARACTERS:
            yield texts[start : index + 1]
            start, characters = index + 1, 0
    if start < len(texts):
        yield texts[start:]
