"""One face over the tokenizer: text to ids, quickly, and the facts of a vocabulary that masking needs.

Encoding is WordPiece (Schuster and Nakajima 2012; as in Devlin et al. 2019) by the Hugging Face
`tokenizers` library, behind a cache keyed by the raw chunk between two white spaces. What is not in the cache
goes to the library, so no Unicode rule is written again here; this file only knows some of the places where
the library parts text.
"""

import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from jaxtyping import Bool, Int, Int64, Integer, UInt

from bert_jax import tokenizer_files
from bert_jax.command import UserError
from bert_jax.tokenizer_files import SPECIAL_TOKENS, Vocabulary

# Entries of the cache, each about 200 bytes (key, ids, dictionary slot): 60 MB. In two halves, so that filling up
# loses what was not asked for lately and nothing else.
CACHE_CHUNKS = 300_000
# Longer chunks (sentences of unspaced scripts, URLs) seldom come twice, and would make the size unbounded.
CACHED_CHUNK_LENGTH = 40
# Characters of text looked up together, and chunks given to the library in one call.
BLOCK_CHARACTERS = 1 << 20
LIBRARY_CHUNKS = 20_000

# str.split parts at these, the library does not: its clean-up drops them first, as other control characters.
_DROPPED_SEPARATORS = "\x0b\x0c\x1c\x1d\x1e\x1f\x85"
_DROP = str.maketrans("", "", _DROPPED_SEPARATORS)
# Without clean-up it parts at Unicode's White_Space, which has not U+001C to U+001F.
_WHITE_SPACE = re.compile("[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+")
# Marks that the library always makes words of their own: all of ASCII's, and the usual ones of typeset text.
_PUNCTUATION = re.compile("([!-/:-@[-`{-~‘’“”…–—])")


class Tokenizer:
    """Text to ids and back, with the facts of the vocabulary.

    Equal in every id to the library without the cache. Pickles as its vocabulary; each process warms a
    cache of its own. Not for use by several threads at once.

    vocab_size                 ids are 0..vocab_size-1
    pad_id, unk_id, cls_id, sep_id, mask_id
    special_ids                ascending; the five and every further special token
    lowercase                  whether text is lower-cased before it is looked up
    continuation               bool[V]: True where the id is the inside of a word ("##ing")
    content_hash               sha256 over all that decides ids: equal however it was loaded or saved
    id_dtype                   uint16 where every id fits, else uint32
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokens = vocabulary.all_tokens()
        self._library = vocabulary.build()
        self._library.encode_special_tokens = True  # "[MASK]" in a text is text
        # Raw chunk to ids, as bytes of id_dtype; the older half is what the newer one was when it last filled up.
        self._cache: dict[str, bytes] = {}
        self._older: dict[str, bytes] = {}
        self.vocab_size = len(self._tokens)
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (
            self._tokens.index(token) for token in SPECIAL_TOKENS
        )
        self.special_ids = vocabulary.special_ids()
        self.lowercase = vocabulary.lowercase
        self.id_dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32

    def __reduce__(self) -> tuple[type["Tokenizer"], tuple[Vocabulary]]:
        return Tokenizer, (self._vocabulary,)

    @functools.cached_property
    def continuation(self) -> Bool[np.ndarray, "V"]:
        prefix = self._vocabulary.continuation_prefix
        inside = np.array([token.startswith(prefix) for token in self._tokens])
        inside[list(self.special_ids)] = False
        return inside

    @functools.cached_property
    def content_hash(self) -> str:
        return self._vocabulary.content_hash()

    def encode(self, text: str) -> UInt[np.ndarray, "n"]:
        """The ids of a text, without special tokens; "[MASK]" and its like in the text are ordinary text."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> tuple[UInt[np.ndarray, "n"], Int64[np.ndarray, "boundaries"]]:
        """The ids of many texts, joined, and where each begins.

        Text i is ids[offsets[i]:offsets[i + 1]]. As `encode` on each, several times faster: give it a document
        or more at a time.
        """
        encoded: list[bytes] = []
        for block in _blocks(texts):
            encoded += self._encode_block(block)
        offsets = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(ids) for ids in encoded], out=offsets[1:])
        width = np.dtype(self.id_dtype).itemsize
        # A bytearray, so that the array may be written to.
        return np.frombuffer(bytearray().join(encoded), self.id_dtype), offsets // width

    def encode_special(self, text: str) -> UInt[np.ndarray, "n"]:
        """As `encode`, but the special tokens written in the text ("[MASK]") become their ids."""
        ids = self._special_library.encode(_checked(text), add_special_tokens=False).ids
        return np.array(ids, self.id_dtype)

    def encode_offsets(self, text: str) -> tuple[UInt[np.ndarray, "n"], Int[np.ndarray, "n 2"]]:
        """The ids of a text, and the characters [start, end) of the text that each comes from."""
        encoding = self._library.encode(_checked(text), add_special_tokens=False)
        return np.array(encoding.ids, self.id_dtype), np.array(encoding.offsets, np.int64).reshape(-1, 2)

    def decode(self, ids: Sequence[int] | Integer[np.ndarray, "n"]) -> str:
        """Readable text: pieces joined to words, special tokens kept; what normalising took stays away."""
        return self._library.decode([int(token) for token in ids], skip_special_tokens=False)

    def tokens(self, ids: Sequence[int] | Integer[np.ndarray, "n"]) -> list[str]:
        """The token of each id, as the vocabulary writes it. Raises IndexError for an id outside of it."""
        return [self._tokens[int(token)] for token in ids]

    def id_of(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it ("##ing"), or None when it is not there."""
        return self._library.token_to_id(token)

    def save(self, directory: str | Path) -> None:
        """Writes vocab.txt, tokenizer.json, tokenizer_config.json and special_tokens_map.json into a folder.

        `load` gives an equal tokenizer back, and so does `transformers.AutoTokenizer.from_pretrained`. The
        same tokenizer gives the same bytes.
        """
        tokenizer_files.write(self._vocabulary, Path(directory))

    @functools.cached_property
    def _special_library(self) -> tokenizers.Tokenizer:
        return self._vocabulary.build()

    @functools.cached_property
    def _split(self) -> Callable[[str], list[str]]:
        if self._vocabulary.clean_text:
            return split_chunks
        return lambda text: [chunk for chunk in _WHITE_SPACE.split(text) if chunk]

    def _encode_block(self, texts: Sequence[str]) -> list[bytes]:
        """The ids of each text, as bytes of id_dtype."""
        if self._vocabulary.has_text_tokens():
            # Added tokens that are found in running text may span white space, so chunks cannot be cached.
            return self._library_ids(texts)
        # One scan of the block finds out whether str.split does as the library does.
        block = "\n".join(texts)
        plain = not any(separator in block for separator in _DROPPED_SEPARATORS)
        split = str.split if plain else self._split
        lookup = self._cache.get
        encoded = [b""] * len(texts)
        missed: dict[int, list[str]] = {}
        unknown: dict[str, None] = {}
        for index, text in enumerate(texts):
            chunks = split(text)
            found = list(map(lookup, chunks))
            if None in found:
                missed[index] = chunks
                absent = itertools.compress(chunks, map(operator.is_, found, itertools.repeat(None)))
                unknown.update(dict.fromkeys(absent))
            else:
                encoded[index] = b"".join(found)  # type: ignore[arg-type]
        if missed:
            passing = self._learn(unknown)
            for index, chunks in missed.items():
                encoded[index] = b"".join(map(self._cache.__getitem__, chunks))
            self._forget(passing)
        return encoded

    def _learn(self, chunks: Iterable[str]) -> list[str]:
        """Puts chunks into the cache, and the words within them; returns those too long to stay."""
        # The library makes each punctuation mark a word, so a chunk is the sum of what marks part. "end", "end."
        # and "(end" then cost one word of the library's time, which is most of the time of a cold cache.
        words = {chunk: _PUNCTUATION.split(chunk) for chunk in self._recall(chunks)}
        unknown = self._recall(dict.fromkeys(itertools.chain.from_iterable(words.values())))
        self._cache.update(zip(unknown, self._library_ids(unknown), strict=True))
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

    def _library_ids(self, texts: Sequence[str]) -> list[bytes]:
        """The ids of each text by the library: one call for many, as a call costs more than a word."""
        encoded: list[bytes] = []
        width = np.dtype(self.id_dtype).itemsize
        for start in range(0, len(texts), LIBRARY_CHUNKS):
            part = [_checked(text) for text in texts[start : start + LIBRARY_CHUNKS]]
            # As pre-tokenized input each is normalised and split by itself; word_ids says whose an id is.
            # (encode_batch_fast would be a fifth faster, but leaves word_ids empty.)
            encoding = self._library.encode(part, is_pretokenized=True, add_special_tokens=False)
            ids = np.array(encoding.ids, self.id_dtype).tobytes()
            owners = np.array(encoding.word_ids, np.int64)
            bounds = (np.searchsorted(owners, np.arange(len(part) + 1)) * width).tolist()
            encoded += [ids[first:last] for first, last in itertools.pairwise(bounds)]
        return encoded


def load(path: str | Path, lowercase: bool | None = None) -> Tokenizer:
    """Loads a folder of `Tokenizer.save`, a Hugging Face WordPiece folder, or a vocab.txt file.

    Lower-casing is that of tokenizer_config.json in the folder (or beside the file), or of tokenizer.json;
    else the argument; else what the vocabulary shows: one without capitals is for lower-cased text. Raises
    UserError for a missing or broken file, missing special tokens, another kind of tokenizer, and an argument
    that contradicts the files.
    """
    return Tokenizer(tokenizer_files.read(Path(path), lowercase))


def split_chunks(text: str) -> list[str]:
    """The chunks of a text between white spaces, as the library parts them when it cleans text up."""
    return text.translate(_DROP).split()


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


def _checked(text: str) -> str:
    """The text, which UTF-8 must be able to write; bytes of a terminal that were not UTF-8 show up here."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"not Unicode text (a lone surrogate U+{ord(text[error.start]):04X}): {text[:40]!a}. Give UTF-8"
        ) from None
    return text
