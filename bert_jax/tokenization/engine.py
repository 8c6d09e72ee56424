"""The common part of all engines: their protocol, the cache, and encoding by the `tokenizers` library.

An engine turns text into ids. A bounded cache from text chunks to ids makes it several times as fast, because the
library then encodes most words once. A chunk is the text between two white spaces; an engine knows which texts may be
split in this way, and at which characters (`Engine.split`). Unknown chunks go to the library, so this code reimplements
no Unicode rule. Texts are split and their chunks counted as byte arrays (numpy, Arrow), so Python handles a distinct
chunk once in a block. Read `ChunkCache.encode` first.
"""

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import pyarrow as pa
import tokenizers
from tokenizers import normalizers, processors

from bert_jax.array_types import Int64, UInt
from bert_jax.errors import UserError
from bert_jax.tokenization.specification import TURKIC_CASE, AddedToken

try:
    # Importing pyarrow.compute wraps and documents every function, which takes about 20 ms.
    from pyarrow._compute import call_function
except ImportError:
    from pyarrow.compute import call_function

# Entries take about 200 bytes each (key, ids, dictionary entry): 60 MB. The cache has two halves, so that filling it up
# evicts only chunks without recent use.
CACHE_CHUNKS = 300_000
# Longer chunks (sentences in unspaced scripts, URLs) seldom recur, and would make the memory unbounded.
CACHED_CHUNK_LENGTH = 40
# Characters of text whose chunks are looked up together. Larger blocks have a smaller share of distinct chunks.
BLOCK_CHARACTERS = 1 << 22
# Chunks passed to the library in one call.
LIBRARY_CHUNKS = 20_000

_SPACE, _NEWLINE = b" ", b"\n"
_MARKS = b"!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
# A byte's role in a text: part of a chunk, a chunk of its own, or a separator between chunks.
_INNER, _MARK, _GAP = range(3)
_ROLES = bytes(_GAP if byte in _SPACE + _NEWLINE else _INNER for byte in range(256))
_ROLES_WITH_MARKS = bytes(_MARK if byte in _MARKS else role for byte, role in enumerate(_ROLES))


class ChunkedTexts(NamedTuple):
    """Texts split into chunks.

    block      one line per text: its chunks' keys, separated by spaces; empty for the texts in `exceptions`
    firsts     the keys of the texts' first chunks, if they may differ from the keys in `block`
    marks      whether punctuation marks in ASCII, and from U+2010 to U+2027, are chunks of their own
    fold       whether ASCII capitals are lower-cased
    exceptions texts outside of `block`, by index: their chunks' keys, or None if only the library can encode the whole
               text
    """

    block: str
    firsts: Sequence[str] | None = None
    marks: bool = False
    fold: bool = False
    exceptions: dict[int, list[str] | None] = {}  # noqa: RUF012 (never changed)


@runtime_checkable
class Engine(Protocol):
    """A library's tokenizer and the rules by which it splits text.

    Texts are Unicode. Ids are lists, or the bytes of an array of id_dtype.
    """

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Encodes whole texts by the library."""

    def split(self, texts: Sequence[str]) -> ChunkedTexts | None:
        """Splits texts into chunks whose concatenated ids are the texts' ids; None if no text may be split."""

    def encode_chunks(self, keys: Sequence[str]) -> list[bytes]:
        """Encodes chunks by the library."""
        return self.encode(keys)

    def words(self, keys: Sequence[str]) -> dict[str, list[str]]:
        """For chunks known to contain several words, the keys whose concatenated ids are the chunk's ids."""
        return {}

    def encode_special(self, text: str) -> list[int]:
        """Encodes a text in which special tokens are replaced by their ids."""

    def encode_offsets(self, text: str, special: bool = False) -> tuple[list[int], list[tuple[int, int]]]:
        """Encodes a text, with `special` as encode_special; also returns the ids' character spans [start, end)."""

    def encode_words(self, text: str, special: bool = False) -> tuple[list[int], list[int]]:
        """Encodes a text as encode_offsets; also returns the ids' words, numbered in order.

        A word is what the tokenizer splits before it looks for pieces; an added token is one of its own.
        """

    def decode(self, ids: list[int]) -> str:
        """Readable text, including special tokens."""

    def to_json(self) -> str:
        """A tokenizer.json with which the `tokenizers` library gives the same ids, or nearly the same."""


class ChunkCache:
    """Encodes texts by an engine and caches the ids of chunks. Not safe for several threads at once."""

    def __init__(self, engine: Engine, id_dtype: type) -> None:
        self._engine = engine
        self._id_dtype = id_dtype
        # When the newer half is full, it becomes the older half.
        self._cache: dict[str, bytes] = {}
        self._older: dict[str, bytes] = {}

    def encode(self, texts: Sequence[str]) -> tuple[UInt[np.ndarray, "n"], Int64[np.ndarray, "m"]]:
        """Returns the concatenated ids of all texts, and the texts' numbers of ids."""
        blocks = [self._encode_block(block) for block in _blocks(texts)]
        ids = [np.zeros(0, self._id_dtype), *(ids for ids, _ in blocks)]
        counts = [np.zeros(0, np.int64), *(counts for _, counts in blocks)]
        return np.concatenate(ids), np.concatenate(counts)

    def _encode_block(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        chunked = self._engine.split(texts)
        if chunked is None:
            return self._joined(self._engine.encode(texts))
        chunks, keys, bounds = _distinct(chunked)
        if chunked.firsts is not None:
            # The first chunk of a text may have another key than the same characters later in it, as byte-level BPE
            # gives a word without a space before it other ids.
            firsts = list(itertools.compress(chunked.firsts, (np.diff(bounds) > 0).tolist()))
            indices = {key: len(keys) + index for index, key in enumerate(dict.fromkeys(firsts))}
            chunks[bounds[:-1][np.diff(bounds) > 0]] = list(map(indices.__getitem__, firsts))
            keys = [*keys, *indices]
        separate = [key for own_keys in chunked.exceptions.values() for key in own_keys or ()]
        cached = list(map(self._cache.get, [*keys, *separate]))
        unknown = [key for key, ids in zip([*keys, *separate], cached, strict=True) if ids is None]
        too_long = self._learn(dict.fromkeys(unknown))
        cache = self._cache
        distinct_ids, lengths = self._joined(
            [cache[key] if ids is None else ids for key, ids in zip(keys, cached, strict=False)]
        )
        begins = np.cumsum(lengths) - lengths
        ends = np.concatenate([[0], np.cumsum(lengths[chunks])])
        # Each id of the output as an index into `distinct_ids`: its chunk's first id, plus its place within the chunk.
        sources = np.repeat(begins[chunks] - ends[:-1], lengths[chunks]) + np.arange(ends[-1])
        ids, counts = distinct_ids[sources], np.diff(ends[bounds])
        if chunked.exceptions:
            # Insert the ids of texts outside of the block, whose lines in it are empty: their counts are 0.
            whole = [index for index, own_keys in chunked.exceptions.items() if own_keys is None]
            encoded = dict(zip(whole, self._engine.encode([texts[index] for index in whole]), strict=True))
            for index, own_keys in chunked.exceptions.items():
                if own_keys is not None:
                    encoded[index] = b"".join(map(cache.__getitem__, own_keys))
            # np.insert takes positions in the array before the insertion, and keeps the order of equal ones.
            order = sorted(encoded)
            places = (np.cumsum(counts) - counts)[order]
            added, lengths = self._joined([encoded[index] for index in order])
            counts[order] = lengths
            ids = np.insert(ids, np.repeat(places, lengths), added)
        # Only now, because this block needed them.
        for key in too_long:
            del cache[key]
        if len(cache) > CACHE_CHUNKS // 2:
            self._older, self._cache = cache, {}
        return ids, counts

    def _joined(self, encoded: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        width = np.dtype(self._id_dtype).itemsize
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded)) // width
        return np.frombuffer(b"".join(encoded), self._id_dtype), lengths

    def _learn(self, keys: Iterable[str]) -> list[str]:
        """Caches chunks that the newer half lacks, and the words within them. Returns those too long to keep."""
        unknown = self._recall(keys)
        words = self._engine.words(unknown)
        if words:
            # "end", "end." and "(end" then cost the library one word, which is most of the time of a cold cache.
            parts = dict.fromkeys(key for key in unknown if key not in words)
            parts |= dict.fromkeys(itertools.chain.from_iterable(words.values()))
            unknown = self._recall([part for part in parts if part not in self._cache])
        self._cache.update(zip(unknown, self._engine.encode_chunks(unknown), strict=True))
        for chunk, within in words.items():
            self._cache[chunk] = b"".join(map(self._cache.__getitem__, within))
        return [key for key in (*words, *unknown) if len(key) > CACHED_CHUNK_LENGTH]

    def _recall(self, chunks: Iterable[str]) -> list[str]:
        """Moves chunks from the older half of the cache into the newer one. Returns those that neither has."""
        if not self._older:
            return list(chunks)
        unknown = []
        for chunk in chunks:
            if (ids := self._older.get(chunk)) is None:
                unknown.append(chunk)
            else:
                self._cache[chunk] = ids
        return unknown


def _blocks(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Groups consecutive texts with about BLOCK_CHARACTERS characters together, at least one text each."""
    start = characters = 0
    for index, text in enumerate(texts):
        characters += len(text)
        if characters >= BLOCK_CHARACTERS:
            yield texts[start : index + 1]
            start, characters = index + 1, 0
    if start < len(texts):
        yield texts[start:]


def _distinct(chunked: ChunkedTexts) -> tuple[np.ndarray, list[str], Int64[np.ndarray, "boundaries"]]:
    """Returns all chunks as indices into the distinct chunks, these, and the indices at which lines begin and end.

    Raises UnicodeEncodeError for a lone surrogate.
    """
    encoded = chunked.block.encode()
    encoded = encoded.lower() if chunked.fold else encoded
    data = np.frombuffer(encoded, np.uint8)
    # bytes.translate looks up and drops bytes in less than half of numpy's time.
    role = np.frombuffer(encoded.translate(_ROLES_WITH_MARKS if chunked.marks else _ROLES), np.uint8)
    gap = role == _GAP
    # A chunk begins after a gap, after a mark and at a mark.
    ends = role != _INNER
    begins = np.empty(len(data), bool)
    begins[:1] = True
    begins[1:] = ends[:-1]
    if chunked.marks:
        begins |= ends
        # U+2010 to U+2027 are the three bytes E2 80 90 to E2 80 A7: such a mark begins a chunk, as does what follows.
        typeset = np.flatnonzero((data[:-2] == 0xE2) & (data[1:-1] == 0x80) & (data[2:] - 0x90 <= 0xA7 - 0x90))
        begins[typeset] = True
        begins[typeset[typeset + 3 < len(data)] + 3] = True
    begins &= ~gap
    starts = np.flatnonzero(begins)
    bounds = np.concatenate([[0], np.searchsorted(starts, np.flatnonzero(data == _NEWLINE[0])), [len(starts)]])
    # Without the gaps, chunks follow each other as Arrow stores strings: one buffer, and the offset of each.
    inner = encoded.translate(None, _SPACE + _NEWLINE)
    offsets = np.empty(len(starts) + 1, np.int32)
    offsets[:-1] = starts - np.cumsum(gap, dtype=np.int32)[starts]
    offsets[-1] = len(inner)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(inner)]
    chunks = call_function("dictionary_encode", [pa.Array.from_buffers(pa.utf8(), len(starts), buffers)])
    return np.array(chunks.indices), chunks.dictionary.to_pylist(), bounds


class LibraryEngine(Engine):
    """Encodes by a tokenizer from the `tokenizers` library."""

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

    def encode_offsets(self, text: str, special: bool = False) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._encoding(text, special)
        return list(encoding.ids), list(encoding.offsets)

    def encode_words(self, text: str, special: bool = False) -> tuple[list[int], list[int]]:
        encoding = self._encoding(text, special)
        return list(encoding.ids), cast(list[int], list(encoding.word_ids))  # None for added special tokens alone

    def _encoding(self, text: str, special: bool) -> tokenizers.Encoding:
        return (self._special_library if special else self._library).encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        return str(self._library.decode(ids, skip_special_tokens=False))

    def to_json(self) -> str:
        return portable_json(self._library)

    def library_ids(self, library: tokenizers.Tokenizer, texts: Sequence[str]) -> list[bytes]:
        """Encodes texts as bytes, many in one call, because a call costs more than a word."""
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
    """Adds tokens to match before text is split."""
    for token in added:
        options = dataclasses.asdict(token)
        library_token = tokenizers.AddedToken(options.pop("content"), **options)
        (library.add_special_tokens if token.special else library.add_tokens)([library_token])


def portable_json(library: tokenizers.Tokenizer) -> str:
    """The content of a tokenizer.json that versions of the library before 0.20 read, too."""
    written: str = library.to_str(pretty=True)
    content = json.loads(written)
    merges = content["model"].get("merges")
    # These versions only know merges as text with a space between two tokens, which themselves have none.
    if not merges or any(" " in token for merge in merges for token in merge):
        return written
    content["model"]["merges"] = [" ".join(merge) for merge in merges]
    return json.dumps(content, ensure_ascii=False, indent=2)


def turkic_case() -> list[normalizers.Normalizer]:
    """Steps before lower-casing that make ı of I and i of İ, as Turkish and Azeri do."""
    return [normalizers.Replace(old, new) for old, new in TURKIC_CASE]


def text_tokens(added: Iterable[AddedToken]) -> re.Pattern[str] | None:
    """A pattern for the added tokens to match in running text; None if there are none."""
    contents = [re.escape(token.content) for token in added if not token.special]
    return re.compile("|".join(contents)) if contents else None


def template(
    cls: tuple[str, int], sep: tuple[str, int], *, separators: int = 1, second: int = 1
) -> processors.TemplateProcessing:
    """The sequences for one text and for two texts.

    Args:
        cls, sep: tokens and their ids.
        separators: number of separators between two texts.
        second: token type of the second text and the separator after it.
    """
    between = " ".join([f"{sep[0]}:0"] * separators)
    return processors.TemplateProcessing(
        single=f"{cls[0]}:0 $A:0 {sep[0]}:0",
        pair=f"{cls[0]}:0 $A:0 {between} $B:{second} {sep[0]}:{second}",
        special_tokens=[cls, sep],
    )


def refuse_surrogates(texts: Iterable[str]) -> None:
    """Refuses text with a lone surrogate, which UTF-8 cannot represent.

    Python decodes terminal input that is not valid UTF-8 to such text.
    """
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"text contains the lone surrogate U+{ord(text[error.start]):04X}: {text[:40]!a}. Give valid UTF-8"
            ) from None
