"""The byte-level BPE engine, by the `tokenizers` library.

The library splits text by GPT-2's regular expression (Radford et al. 2019), in which a word includes the space before
it. This module uses two facts about it: it always splits before a space that is followed by anything but white space,
and, for ASCII text, all of its rules.
"""

import dataclasses
import re
from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from bert_jax.command import UserError
from bert_jax.tokenization.byte_bpe import CHUNKABLE_NORMALIZERS, ByteBPESpec
from bert_jax.tokenization.chunk_cache import ChunkedTexts
from bert_jax.tokenization.engine import LibraryEngine, add_tokens, template, text_tokens
from bert_jax.tokenization.tokenizer_spec import id_dtype
from bert_jax.tokenization.wordpiece_engine import WHITE_SPACE

# The white-space half of GPT-2's expression: a space belongs to what follows it; of several, the last one does.
_SPACES = f" \\n{WHITE_SPACE}"
_PRE_TOKENS = re.compile(f" ?[^{_SPACES}]+|[{_SPACES}]+(?![^{_SPACES}])|[{_SPACES}]+")
# GPT-2's expression for text that is all ASCII.
_ASCII_PRE_TOKENS = re.compile("'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?[^\t-\r A-Za-z0-9]+")


class ByteBPEEngine(LibraryEngine):
    """Encodes by the library's byte-level BPE, in chunks that begin at a space with no white space after it.

    Most chunks begin with exactly one space, so the key of a chunk is what follows that space. The key of a chunk
    without one begins with a space instead.
    """

    def __init__(self, spec: ByteBPESpec) -> None:
        super().__init__(library_tokenizer(spec), id_dtype(len(spec.all_tokens())))
        # A chunk has its own space.
        self._chunk_library = library_tokenizer(dataclasses.replace(spec, add_prefix_space=False))
        self._chunk_library.encode_special_tokens = True
        self._add_prefix_space = spec.add_prefix_space
        self._text_tokens = text_tokens(spec.added)
        # Those that are matched in normalized text may occur where the text itself lacks them.
        matched = any(token.normalized for token in spec.added if not token.special)
        self._whole = matched and bool(spec.normalizers)
        # Other normalizers may change where text splits, so only ASCII text, which they leave alone, is split here.
        self._only_ascii = not set(spec.normalizers) <= set(CHUNKABLE_NORMALIZERS)
        self._splits_ascii = "Lowercase" not in spec.normalizers and not spec.ignore_merges

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


def library_tokenizer(spec: ByteBPESpec) -> tokenizers.Tokenizer:
    """The `tokenizers` library's tokenizer. Raises UserError for merges that do not fit the vocabulary."""
    vocabulary = {token: index for index, token in enumerate(spec.tokens)}
    try:
        model = models.BPE(vocab=vocabulary, merges=list(spec.merges), ignore_merges=spec.ignore_merges)
    except Exception as error:  # the library raises no narrower class
        raise UserError(f"the merges do not fit the vocabulary ({error}). Download both again") from None
    library = tokenizers.Tokenizer(model)
    if spec.normalizers:
        library.normalizer = normalizers.Sequence([getattr(normalizers, name)() for name in spec.normalizers])
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spec.add_prefix_space)
    library.decoder = decoders.ByteLevel()
    add_tokens(library, spec.added)
    tokens = spec.all_tokens()
    sep, cls = ((token, tokens.index(token)) for token in (spec.roles.sep_token, spec.roles.cls_token))
    trim = processors.ByteLevel(trim_offsets=True, add_prefix_space=spec.add_prefix_space)
    if not spec.adds_special_tokens:
        library.post_processor = trim
    elif spec.pair_separators == 2:
        library.post_processor = processors.RobertaProcessing(sep, cls, add_prefix_space=spec.add_prefix_space)
    else:
        library.post_processor = processors.Sequence([trim, template(cls, sep)])
    return library
