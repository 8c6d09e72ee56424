"""The WordPiece engine (Schuster and Nakajima 2012; as in Devlin et al. 2019), by the `tokenizers` library.

This module knows only some of the positions at which the library splits text: at white space and at some punctuation.
It also knows that the library lower-cases ASCII capitals and leaves other ASCII letters and digits unchanged.
"""

import functools
import string
from collections.abc import Mapping, Sequence

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from bert_jax.tokenization.chunk_cache import ChunkedTexts
from bert_jax.tokenization.engine import LibraryEngine, NormalizedTokens, add_tokens, template, text_tokens
from bert_jax.tokenization.longest_match import LongestMatch
from bert_jax.tokenization.tokenizer_spec import id_dtype
from bert_jax.tokenization.wordpiece import WordPieceSpec

# str.split splits at these. The library does not: its clean-up first drops them, as it drops other control
# characters.
_DROPPED_SEPARATORS = "\x0b\x0c\x1c\x1d\x1e\x1f\x85"
_DROP = str.maketrans("", "", _DROPPED_SEPARATORS)
# Unicode's White_Space except " " and "\n". str.isspace also includes U+001C to U+001F.
WHITE_SPACE = "\t\x0b\x0c\r\x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
_SPACES = dict.fromkeys(WHITE_SPACE, " ")
_CLEANED = _SPACES | dict.fromkeys(_DROPPED_SEPARATORS, "")


class WordPieceEngine(LibraryEngine):
    """Encodes by the library's WordPiece, split at white space and punctuation.

    Words of ASCII letters and digits, which are most words of a text, go to `longest_match` instead.
    """

    def __init__(self, spec: WordPieceSpec) -> None:
        super().__init__(library_tokenizer(spec), id_dtype(len(spec.all_tokens())))
        self._spec = spec
        self._text_tokens = text_tokens(spec.added)
        normalized = [token.content for token in spec.added if token.normalized and not token.special]
        self._normalized = NormalizedTokens(normalized, self._library.normalizer.normalize_str) if normalized else None

    def split(self, texts: Sequence[str]) -> ChunkedTexts:
        # Added tokens that are matched in running text may span white space.
        exceptions: dict[int, list[str] | None] = {}
        if self._text_tokens is not None:
            exceptions = {index: None for index, text in enumerate(texts) if self._has_tokens(text)}
            texts = ["" if index in exceptions else text for index, text in enumerate(texts)]
        block = replaced(lines(texts), _CLEANED if self._spec.clean_text else _SPACES)
        return ChunkedTexts(block, marks=True, fold=self._spec.lowercase, exceptions=exceptions)

    def _has_tokens(self, text: str) -> bool:
        if self._text_tokens and self._text_tokens.search(text):
            return True
        return self._normalized is not None and self._normalized.occur(text)

    def encode_chunks(self, keys: Sequence[str]) -> list[bytes]:
        found = self._longest_match.encode(keys)
        others = iter(self.encode([key for key, ids in zip(keys, found, strict=True) if ids is None]))
        return [next(others) if ids is None else ids for ids in found]

    @functools.cached_property
    def _longest_match(self) -> LongestMatch:
        """Gives the same ids for the ASCII words that normalization does not change."""
        letters = string.ascii_lowercase if self._spec.lowercase else string.ascii_letters
        return LongestMatch(
            self._spec.tokens,
            prefix=self._spec.continuation_prefix,
            characters=letters + string.digits,
            longest=self._spec.max_word_length,
            unknown_id=self._spec.tokens.index(self._spec.roles.unk_token),
            dtype=self.id_dtype,
        )


def library_tokenizer(spec: WordPieceSpec) -> tokenizers.Tokenizer:
    """The `tokenizers` library's tokenizer of a specification."""
    model = models.WordPiece(
        {token: index for index, token in enumerate(spec.tokens)},
        unk_token=spec.roles.unk_token,
        continuing_subword_prefix=spec.continuation_prefix,
        max_input_chars_per_word=spec.max_word_length,
    )
    library = tokenizers.Tokenizer(model)
    library.normalizer = normalizers.BertNormalizer(
        clean_text=spec.clean_text,
        handle_chinese_chars=spec.split_chinese,
        strip_accents=spec.strip_accents,
        lowercase=spec.lowercase,
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix=spec.continuation_prefix)
    add_tokens(library, spec.added)
    cls, sep = ((token, spec.tokens.index(token)) for token in (spec.roles.cls_token, spec.roles.sep_token))
    if spec.pair_separators == 2:
        library.post_processor = processors.RobertaProcessing(sep, cls, trim_offsets=True, add_prefix_space=False)
    else:
        library.post_processor = template(cls, sep)
    return library


def split_chunks(text: str) -> list[str]:
    """The chunks of a text between white spaces, as the library splits it when it cleans text up."""
    return text.translate(_DROP).split()


def lines(texts: Sequence[str]) -> str:
    """One line per text; line breaks within a text become spaces."""
    block = "\n".join(texts)
    if block.count("\n") >= len(texts):
        block = "\n".join(text.replace("\n", " ") for text in texts)
    return block


def replaced(block: str, characters: Mapping[str, str]) -> str:
    """A text with some characters replaced. Fast if most of the characters do not occur."""
    ascii_only = block.isascii()
    for character, replacement in characters.items():
        if not (ascii_only and character > "\x7f") and character in block:
            block = block.replace(character, replacement)
    return block
