"""What kinds of tokenizer share: the parts special tokens play, what a kind has to say, the `tokenizers` library."""

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import tokenizers

from bert_jax.command import UserError
from bert_jax.storage.local import read_json
from bert_jax.tokenization.chunk_cache import ChunkEncoder

# What tokenizer_config.json of `transformers` says by true or false.
_SWITCHES = ("do_lower_case", "strip_accents", "tokenize_chinese_chars", "keep_accents", "add_prefix_space")
# Chunks given to the library in one call.
LIBRARY_CHUNKS = 20_000


@dataclass(frozen=True)
class AddedToken:
    """A token looked for before text is split: a special one, or a word that a user added to a vocabulary."""

    content: str
    special: bool = True
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


class Roles(NamedTuple):
    """The special tokens by the parts they play, as `transformers` names them."""

    pad_token: str
    unk_token: str
    cls_token: str
    sep_token: str
    mask_token: str


BERT_ROLES = Roles("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ALBERT_ROLES = Roles("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
ROBERTA_ROLES = Roles("<pad>", "<unk>", "<s>", "</s>", "<mask>")
GPT2_ROLES = Roles(*["<|endoftext|>"] * 5)  # its one special token: between texts, and for want of any other


@runtime_checkable
class Engine(ChunkEncoder, Protocol):
    """A library's tokenizer at work: what the face asks of it, beside what the cache does. Texts are Unicode."""

    def encode_special(self, text: str) -> list[int]:
        """The ids of a text in which special tokens become their ids."""

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of a text, and the characters [start, end) of each."""

    def decode(self, ids: list[int]) -> str:
        """Readable text, special tokens kept."""

    def to_json(self) -> str:
        """What tokenizer.json holds, by which the `tokenizers` library does the same, or nearly."""


@runtime_checkable
class TokenizerSpec(Protocol):
    """What a kind of tokenizer is: all that decides ids, as plain data that pickles. Equal contents hash equal."""

    @property
    def kind(self) -> str:
        """wordpiece, bpe (byte-level), unigram or sentencepiece_bpe."""

    @property
    def lowercase(self) -> bool: ...

    @property
    def roles(self) -> Roles: ...

    @property
    def pair_separators(self) -> int:
        """How many separators this kind's own models have between two texts."""

    def all_tokens(self) -> tuple[str, ...]:
        """Every token by id."""

    def special_ids(self) -> tuple[int, ...]:
        """The ids of the special tokens, ascending."""

    def is_inside(self, token: str) -> bool:
        """Whether an ordinary token is the inside of a word."""

    def surface(self, token: str) -> str:
        """The characters of an ordinary token, without what marks the beginning or inside of a word."""

    def content_hash(self) -> str:
        """sha256, hexadecimal."""

    def engine(self) -> Engine: ...

    def write(self, directory: Path) -> None:
        """Writes the files of a Hugging Face folder into one that is there, but for tokenizer.json."""


class LibraryEngine:
    """A tokenizer of the `tokenizers` library at work, one text or many."""

    def __init__(self, build: Callable[[], tokenizers.Tokenizer], dtype: type) -> None:
        self._id_dtype = dtype
        self._library = build()
        self._library.encode_special_tokens = True  # "[MASK]" in a text is text
        self._build = build

    @functools.cached_property
    def _special_library(self) -> tokenizers.Tokenizer:
        return self._build()

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
        """The ids of each text, as bytes: one call for many texts, as a call costs more than a word."""
        encoded: list[bytes] = []
        width = np.dtype(self._id_dtype).itemsize
        for start in range(0, len(texts), LIBRARY_CHUNKS):
            part = texts[start : start + LIBRARY_CHUNKS]
            # As pre-tokenized input each is normalised and split by itself; word_ids says whose an id is.
            # (encode_batch_fast would be a fifth faster, but leaves word_ids empty.)
            try:
                encoding = library.encode(list(part), is_pretokenized=True, add_special_tokens=False)
            except TypeError:
                refuse_surrogates(part)
                raise
            ids = np.array(encoding.ids, self._id_dtype).tobytes()
            owners = np.array(encoding.word_ids, np.int64)
            bounds = (np.searchsorted(owners, np.arange(len(part) + 1)) * width).tolist()
            encoded += [ids[first:last] for first, last in itertools.pairwise(bounds)]
        return encoded


def id_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """The narrowest type that every id fits."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def refuse_surrogates(texts: Iterable[str]) -> None:
    """Raises UserError for text that UTF-8 cannot write: bytes of a terminal that were not UTF-8 show up so."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"not Unicode text (a lone surrogate U+{ord(text[error.start]):04X}): {text[:40]!a}. Give UTF-8"
            ) from None


def read_settings(directory: Path) -> dict[str, Any]:
    """special_tokens_map.json and, above it, tokenizer_config.json of a folder; what is not there says nothing.

    Raises UserError for a switch that is neither on nor off.
    """
    files = (directory / name for name in ("special_tokens_map.json", "tokenizer_config.json"))
    settings: dict[str, Any] = {}
    for file in files:
        found = read_json(file) if file.exists() else {}
        for name in _SWITCHES:
            if not isinstance(value := found.get(name), bool | None):
                raise UserError(f"{name} is {value!r} in {file.name} beside it. Write true or false there")
        settings |= found
    return settings


def tokens_by_id(vocabulary: Mapping[str, int]) -> tuple[str, ...]:
    """The tokens of a vocabulary in the order of their ids. Raises UserError for ids with gaps."""
    by_id = {index: token for token, index in vocabulary.items()}
    if sorted(by_id) != list(range(len(vocabulary))):
        raise UserError("its ids do not run from 0 without gaps. Give a tokenizer of contiguous ids")
    return tuple(by_id[index] for index in range(len(by_id)))


def tokens_beside(tokens: tuple[str, ...], added: Sequence[AddedToken]) -> tuple[str, ...]:
    """The added tokens that a model's own tokens lack, in their order."""
    present = {token.content for token in added}.intersection(tokens)
    return tuple(token.content for token in added if token.content not in present)


def hash_of(content: Any) -> str:
    """sha256, hexadecimal, over the kind and the fields of a dataclass that is a tokenizer's content."""
    # Not asdict of the whole, which copies every token.
    fields = {field.name: getattr(content, field.name) for field in dataclasses.fields(content)}
    told = json.dumps({"kind": content.kind} | fields, sort_keys=True, default=dataclasses.asdict)
    return hashlib.sha256(told.encode()).hexdigest()


def added_tokens(content: Mapping[str, Any]) -> tuple[AddedToken, ...]:
    """The added tokens of a tokenizer.json, by id."""
    flags = [field.name for field in dataclasses.fields(AddedToken)]
    added = sorted(content.get("added_tokens") or [], key=lambda token: token["id"])
    return tuple(AddedToken(**{flag: token[flag] for flag in flags}) for token in added)


def check_added_ids(content: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """Raises UserError where a tokenizer.json gives an added token another id than its place among `tokens`."""
    ids = {token: index for index, token in enumerate(tokens)}
    for token in content.get("added_tokens") or []:
        if ids.get(token["content"]) != token["id"]:
            raise UserError(f"added token {token['content']!r} has id {token['id']}, out of order. Renumber it")


def named_roles(settings: Mapping[str, Any], known: Container[str], *usual: Roles) -> Roles:
    """The roles as a folder's settings name them, those they do not name being of the usual set that is known best.

    Raises UserError where that leaves one open.
    """
    fallback = max(usual, key=lambda roles: sum(token in known for token in roles))
    found: dict[str, Any] = {}
    for role in Roles._fields:
        named = settings.get(role)
        named = named.get("content") if isinstance(named, dict) else named
        found[role] = named or getattr(fallback, role)
    if missing := [role for role, token in found.items() if token not in known]:
        raise UserError(
            f"no token for {', '.join(missing)}. Name them in special_tokens_map.json; each has to be in the vocabulary"
        )
    return Roles(**found)


def refuse_contradiction(argument: bool | None, stated: bool | None) -> None:
    """Raises UserError for a --lowercase or --nolowercase that is not what the files say."""
    if argument is not None and stated is not None and argument != stated:
        flag, truth = (
            ("--lowercase" if argument else "--nolowercase"),
            ("lower-cases" if stated else "keeps case"),
        )
        raise UserError(f"{flag} was given, but its own settings say that it {truth}. Leave the flag out")
