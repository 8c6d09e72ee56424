"""A bounded memory of chunks of text and their ids, so that the library meets most words once.

A chunk is what lies between two white spaces; which texts may be parted so, and where, each kind of tokenizer knows
(`ChunkEncoder`). A chunk that is not cached goes to the library, so no Unicode rule is written again here. Texts are
split and their chunks counted as arrays of bytes (numpy, Arrow), so that Python handles each distinct chunk of a
block once.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

try:
    # pyarrow.compute wraps and documents each function there is when it is imported: some 20 ms.
    from pyarrow._compute import call_function
except ImportError:
    from pyarrow.compute import call_function

from bert_jax.array_types import Int64, Integer, UInt

# Entries, each about 200 bytes (key, ids, dictionary slot): 60 MB. In two halves, so that filling up loses what was
# not asked for lately and nothing else.
CACHE_CHUNKS = 300_000
# Longer chunks (sentences of unspaced scripts, URLs) seldom come twice, and would make the size unbounded.
CACHED_CHUNK_LENGTH = 40
# Characters of text looked up together: the more, the fewer of its chunks are distinct.
BLOCK_CHARACTERS = 1 << 22

_SPACE, _NEWLINE = b" ", b"\n"
_MARKS = b"!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
# What each byte is in a text: part of a chunk, a chunk of its own, or between chunks.
_INNER, _MARK, _GAP = range(3)
_ROLES = bytes(_GAP if byte in _SPACE + _NEWLINE else _INNER for byte in range(256))
_ROLES_WITH_MARKS = bytes(_MARK if byte in _MARKS else role for byte, role in enumerate(_ROLES))


class ChunkedTexts(NamedTuple):
    """Texts as chunks.

    block    a line a text, of the keys of its chunks with spaces between; no line for what is in `apart` but ""
    firsts   for each text the key of its first chunk, where that is another than in `block`
    marks    whether each punctuation mark of ASCII, and from U+2010 to U+2027, is a chunk of its own
    fold     whether capitals of ASCII are small letters
    apart    by its place, a text that is not in `block`: the keys of its chunks, or None where only the library can
    """

    block: str
    firsts: Sequence[str] | None = None
    marks: bool = False
    fold: bool = False
    apart: dict[int, list[str] | None] = {}  # noqa: RUF012 (never changed)


@runtime_checkable
class ChunkEncoder(Protocol):
    """A library's tokenizer, and what is known of where it parts text. Ids are bytes of the tokenizer's id_dtype."""

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """The ids of each text by the library alone."""

    def part(self, texts: Sequence[str]) -> ChunkedTexts | None:
        """The chunks of texts, whose ids, joined, are those of the text; None: of no text."""

    def encode_chunks(self, keys: Sequence[str]) -> list[bytes]:
        """The ids of each chunk by the library."""

    def words(self, keys: Sequence[str]) -> dict[str, list[str]]:
        """Of the chunks that are known to be several words, the keys whose ids, joined, are the chunk's."""


class ChunkCache:
    """Encodes by a codec and remembers. Not for several threads at once."""

    def __init__(self, codec: ChunkEncoder, id_dtype: type) -> None:
        self._codec = codec
        self._id_dtype = id_dtype
        # The older half is what the newer one was when it last filled up.
        self._cache: dict[str, bytes] = {}
        self._older: dict[str, bytes] = {}

    def encode(self, texts: Sequence[str]) -> tuple[UInt[np.ndarray, "n"], Int64[np.ndarray, "m"]]:
        """The ids of the texts, joined, and how many each has."""
        blocks = [self._encode_block(block) for block in _blocks(texts)]
        ids = [np.zeros(0, self._id_dtype), *(found for found, _ in blocks)]
        counts = [np.zeros(0, np.int64), *(found for _, found in blocks)]
        return np.concatenate(ids), np.concatenate(counts)

    def _encode_block(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        parted = self._codec.part(texts)
        if parted is None:
            return self._joined(self._codec.encode(texts))
        chunks, keys, bounds = _distinct(parted)
        if parted.firsts is not None:
            firsts = list(itertools.compress(parted.firsts, (np.diff(bounds) > 0).tolist()))
            places = {key: len(keys) + index for index, key in enumerate(dict.fromkeys(firsts))}
            chunks[bounds[:-1][np.diff(bounds) > 0]] = list(map(places.__getitem__, firsts))
            keys = [*keys, *places]
        apart = [key for found in parted.apart.values() for key in found or ()]
        known = list(map(self._cache.get, [*keys, *apart]))
        unknown = [key for key, ids in zip([*keys, *apart], known, strict=True) if ids is None]
        passing = self._learn(dict.fromkeys(unknown))
        cache = self._cache
        ids, counts = self._gathered(
            chunks, bounds, [cache[key] if ids is None else ids for key, ids in zip(keys, known, strict=False)]
        )
        if parted.apart:
            ids, counts = self._with_apart(ids, counts, texts, parted.apart)
        self._forget(passing)
        return ids, counts

    def _gathered(
        self, chunks: Integer[np.ndarray, "n"], bounds: Int64[np.ndarray, "boundaries"], known: list[bytes]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The ids of chunks, of which `known` has those of each distinct one, and how many each line has."""
        ids, lengths = self._joined(known)
        firsts = np.cumsum(lengths) - lengths
        ends = np.concatenate([[0], np.cumsum(lengths[chunks])])
        places = np.repeat(firsts[chunks] - ends[:-1], lengths[chunks]) + np.arange(ends[-1])
        return ids[places], np.diff(ends[bounds])

    def _with_apart(
        self, ids: np.ndarray, counts: np.ndarray, texts: Sequence[str], apart: dict[int, list[str] | None]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids and counts with those of the texts apart put in their places."""
        whole = [place for place, keys in apart.items() if keys is None]
        by_library = dict(zip(whole, self._codec.encode([texts[place] for place in whole]), strict=True))
        places = sorted(apart)
        found = [
            by_library[place] if place in by_library else b"".join(map(self._cache.__getitem__, apart[place] or ()))
            for place in places
        ]
        begins = (np.cumsum(counts) - counts)[places]
        added, lengths = self._joined(found)
        counts[places] = lengths
        return np.insert(ids, np.repeat(begins, lengths), added), counts

    def _joined(self, encoded: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        width = np.dtype(self._id_dtype).itemsize
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded)) // width
        return np.frombuffer(b"".join(encoded), self._id_dtype), lengths

    def _learn(self, keys: Iterable[str]) -> list[str]:
        """Puts chunks that the newer half lacks into it, and the words within them; returns those too long to stay."""
        unknown = self._recall(keys)
        words = self._codec.words(unknown)
        if words:
            # "end", "end." and "(end" then cost one word of the library's time, which is most of that of a cold cache.
            parts = dict.fromkeys(key for key in unknown if key not in words)
            parts |= dict.fromkeys(itertools.chain.from_iterable(words.values()))
            unknown = self._recall([part for part in parts if part not in self._cache])
        self._cache.update(zip(unknown, self._codec.encode_chunks(unknown), strict=True))
        for chunk, within in words.items():
            self._cache[chunk] = b"".join(map(self._cache.__getitem__, within))
        return [key for key in (*words, *unknown) if len(key) > CACHED_CHUNK_LENGTH]

    def _recall(self, chunks: Iterable[str]) -> list[str]:
        """Takes what the older half of the cache knows into the newer, and returns what it does not know."""
        if not self._older:
            return list(chunks)
        unknown = []
        for chunk in chunks:
            if (ids := self._older.get(chunk)) is None:
                unknown.append(chunk)
            else:
                self._cache[chunk] = ids
        return unknown

    def _forget(self, passing: Iterable[str]) -> None:
        """Takes chunks out of the cache, and drops its older half when the newer one is full."""
        for chunk in passing:
            del self._cache[chunk]
        if len(self._cache) > CACHE_CHUNKS // 2:
            self._older, self._cache = self._cache, {}


def _distinct(parted: ChunkedTexts) -> tuple[np.ndarray, list[str], Int64[np.ndarray, "boundaries"]]:
    """The chunks of lines as places among the distinct ones, these, and where each line's chunks begin and end.

    Raises UnicodeEncodeError for a lone surrogate.
    """
    encoded = parted.block.encode()
    encoded = encoded.lower() if parted.fold else encoded
    data = np.frombuffer(encoded, np.uint8)
    # bytes.translate looks bytes up, and leaves bytes out, in less than half of numpy's time.
    role = np.frombuffer(encoded.translate(_ROLES_WITH_MARKS if parted.marks else _ROLES), np.uint8)
    gap = role == _GAP
    # A chunk begins after a gap and after a mark, and with a mark.
    ends = role != _INNER
    begins = np.empty(len(data), bool)
    begins[:1] = True
    begins[1:] = ends[:-1]
    if parted.marks:
        begins |= ends
        typeset = np.flatnonzero((data[:-2] == 0xE2) & (data[1:-1] == 0x80) & (data[2:] - 0x90 <= 0xA7 - 0x90))
        begins[typeset] = True
        begins[typeset[typeset + 3 < len(data)] + 3] = True
    begins &= ~gap
    places = np.flatnonzero(begins)
    lines = np.flatnonzero(data == _NEWLINE[0])
    bounds = np.concatenate([[0], np.searchsorted(places, lines), [len(places)]])
    kept = encoded.translate(None, _SPACE + _NEWLINE)
    offsets = np.empty(len(places) + 1, np.int32)
    offsets[:-1] = places - np.cumsum(gap, dtype=np.int32)[places]
    offsets[-1] = len(kept)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(kept)]
    chunks = call_function("dictionary_encode", [pa.Array.from_buffers(pa.utf8(), len(places), buffers)])
    return np.array(chunks.indices), chunks.dictionary.to_pylist(), bounds


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
