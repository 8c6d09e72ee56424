"""The SentencePiece engine (Kudo and Richardson 2018), by the `sentencepiece` library, with the tokenizer's ids."""

import hashlib
import re
from collections.abc import Callable, Sequence

import numpy as np
import sentencepiece
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from bert_jax.array_types import Int64
from bert_jax.tokenization.chunk_cache import ChunkedTexts
from bert_jax.tokenization.tokenizer_spec import refuse_surrogates
from bert_jax.tokenization.wordpiece_engine import lines, replaced

SPACE = "▁"  # U+2581, which represents a space in pieces

# sha256 of the library's built-in normalization rules (0.1.96, 0.2.3). A test verifies from the rules that none of them
# looks across a space, produces two spaces or produces U+2581. Nothing is known of other rules.
_RULES_WITHIN_CHUNKS = (
    hashlib.sha256(b"").hexdigest(),  # identity
    "1e2c7b43d3ee9755ceaa2ac335e253d8703604e0249ee1e81156c92b46423844",  # nmt_nfkc
    "2c03512e62f9ed965ec90d85314211b63b5b8aa0395311ea2147eec9ff738907",  # nmt_nfkc_cf
    "7e46d9e08af4b6a37991b04fb8388644c1595a0abcd0f26d6a5d575e2a3663ea",  # nfkc
    "d8dfef3d6db0eef0742f8b55a73aee7fce6c1e21d26a09b8d3d4b52c42a791cb",  # nfkc_cf
    "ec4a65fa10ad2a465f4f30ac3ee83a4ba4e9f507a4b092e07ff790c1c7c318af",  # nfkc, 0.1.96
)
_WHITE_SPACE = [chr(code) for code in range(0x3001) if chr(code).isspace()]


class SentencePieceEngine:
    """Encodes and decodes by a SentencePiece model.

    model       a serialized ModelProto
    ids         the tokenizer's id of each piece of the model
    tokens      every token by id; tokens that are not pieces of the model are special
    special     the ids of the special tokens, which `encode_special` looks for
    normalizer  a normalizer of the `tokenizers` library that precedes the model's own; None for none
    chunks      whether pieces and settings allow words to be encoded one by one
    rules       the model's normalization rules, which must allow it too
    build       makes a tokenizer of the `tokenizers` library that gives nearly the same ids

    BPE merges within words only, so the ids of its words can be cached. Unigram's best path is a float32 sum over the
    whole text: of two equally good segmentations of a word ("00" "0" or "0" "00"), the preceding words decide. Only the
    library on the whole text gives the library's ids, and it is faster than a cache would be.
    """

    def __init__(
        self,
        model: bytes,
        ids: Int64[np.ndarray, "n"],
        tokens: Sequence[str],
        special: Sequence[int],
        normalizer: normalizers.Normalizer | None,
        *,
        dtype: type,
        ascii_normalizer: Callable[[str], str],
        chunks: bool,
        rules: bytes,
        build: Callable[[], tokenizers.Tokenizer],
    ) -> None:
        self._model = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._ids: np.ndarray = ids.astype(dtype)
        self._piece_of_id = dict(zip(ids.tolist(), range(len(ids)), strict=True))
        self._tokens = tokens
        self._special = {tokens[index]: index for index in special}
        by_length = sorted(self._special, key=len, reverse=True)
        self._special_pattern = re.compile(f"({'|'.join(map(re.escape, by_length))})")
        self._normalizer = normalizer
        self._ascii_normalizer = ascii_normalizer
        self._build = build
        self._chunks = chunks and hashlib.sha256(rules).hexdigest() in _RULES_WITHIN_CHUNKS
        spaces = [space for space in _WHITE_SPACE if self._model.normalize(f"a{space}b") == f"{SPACE}a{SPACE}b"]
        self._spaces = dict.fromkeys((space for space in spaces if space not in " \n"), " ")
        # Texts with these characters go to the library whole: U+2581 if the model keeps it, and the line break if the
        # model does not split there.
        kept = [] if self._model.normalize(f"{SPACE}a") == f"{SPACE}a" else [SPACE]
        self._library_only = [*kept, *(end for end in "\n" if end not in spaces)]

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        try:
            found = self._model.encode(self._prepared(texts), return_type="numpy", num_threads=1)
        except (RuntimeError, TypeError, UnicodeEncodeError):
            refuse_surrogates(texts)
            raise
        return [self._ids[own].tobytes() for own in found]

    def split(self, texts: Sequence[str]) -> ChunkedTexts | None:
        if not self._chunks:
            return None
        exceptions: dict[int, list[str] | None] = {}
        for mark in self._library_only:
            exceptions |= {index: None for index, text in enumerate(texts) if mark in text}
        if exceptions:
            texts = ["" if index in exceptions else text for index, text in enumerate(texts)]
        return ChunkedTexts(replaced(lines(texts), self._spaces), exceptions=exceptions)

    def words(self, keys: Sequence[str]) -> dict[str, list[str]]:
        return {}

    def encode_chunks(self, keys: Sequence[str]) -> list[bytes]:
        return self.encode(keys)

    def encode_special(self, text: str) -> list[int]:
        found: list[int] = []
        for part in self._special_pattern.split(text):
            if part in self._special:
                found.append(self._special[part])
            elif part:
                found += self._ids[self._model.encode(self._prepared([part])[0])].tolist()
        return found

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        prepared = self._prepared([text])[0]
        found = self._model.encode(prepared, return_type="offset_mapping")
        offsets = list(found["offsets"])
        # If one character becomes several (letters of a ligature, bytes), the library assigns it to the last piece
        # only: the others take its span.
        for index in range(len(offsets) - 2, -1, -1):
            if offsets[index][0] == offsets[index][1] and self._model.id_to_piece(found["ids"][index]) != SPACE:
                offsets[index] = offsets[index + 1]
        if prepared != text and self._normalizer:
            origin = _origins(self._normalizer, text)
            # An empty span lies before the character at its begin.
            starts = [begin for begin, _ in origin] + [len(text)]
            ends = [0] + [end for _, end in origin]
            offsets = [(starts[begin], max(starts[begin], ends[end])) for begin, end in offsets]
        return self._ids[found["ids"]].tolist(), [_without_spaces(text, begin, end) for begin, end in offsets]

    def decode(self, ids: list[int]) -> str:
        text = ""
        run: list[int] = []
        for index in [*ids, None]:
            if index is not None and self._tokens[index] not in self._special:
                run.append(self._piece_of_id[index])
                continue
            if run:
                space = " " if text and self._model.id_to_piece(run[0]).startswith(SPACE) else ""
                text += space + self._model.decode(run)
                run = []
            text += "" if index is None else self._tokens[index]
        return text

    def to_json(self) -> str:
        return str(self._build().to_str(pretty=True))

    def _prepared(self, texts: Sequence[str]) -> list[str]:
        """The texts after the normalizer that precedes the model."""
        if self._normalizer is None:
            return list(texts)
        normalize, ascii_normalize = self._normalizer.normalize_str, self._ascii_normalizer
        return [ascii_normalize(text) if text.isascii() else normalize(text) for text in texts]


def _origins(normalizer: normalizers.Normalizer, text: str) -> list[tuple[int, int]]:
    """The character span [start, end) of a text that each character of its normalized form comes from."""
    library = tokenizers.Tokenizer(models.WordLevel({"": 0}, unk_token=""))
    library.normalizer = normalizer
    library.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    return list(library.encode(text, add_special_tokens=False).offsets)


def _without_spaces(text: str, begin: int, end: int) -> tuple[int, int]:
    surface = text[begin:end]
    stripped = surface.lstrip()
    return end - len(stripped), end - len(stripped) + len(stripped.rstrip())
