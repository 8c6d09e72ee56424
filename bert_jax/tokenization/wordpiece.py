"""WordPiece (Schuster and Nakajima 2012; Devlin et al. 2019): its files, its specification and its engine.

The specification comes from vocab.txt as in google-research/bert (one token per line; the line number is the id), or
from tokenizer.json as the `tokenizers` library writes it, with tokenizer_config.json and special_tokens_map.json as in
`transformers`. The engine encodes most words by `LongestMatch` and the others by the library.
"""

import functools
import itertools
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from bert_jax.array_types import Bool, Int32, Int64, UInt8
from bert_jax.errors import UserError
from bert_jax.progress import print_note
from bert_jax.tokenization.engine import ChunkedTexts, LibraryEngine, add_tokens, template, text_tokens, turkic_case
from bert_jax.tokenization.specification import (
    BERT_ROLES,
    HASHED_IF_CHANGED,
    MPNET_ROLES,
    TURKIC_STEPS,
    AddedToken,
    Roles,
    TokenList,
    added_tokens,
    check_added_ids,
    id_dtype,
    named_roles,
    placeholder,
    refuse_contradiction,
    refuse_repeated,
    stated_separators,
    tokens_by_id,
    write_settings,
)

# BERT's special tokens, in the order in which vocabularies trained by bert_jax contain them (ids 0 to 4).
SPECIAL_TOKENS = BERT_ROLES
# MPNet's first tokens. BERT's tokens follow them, special tokens included.
_MPNET_HEAD = ("<s>", "<pad>", "</s>")
# Tokenizer classes in transformers, without Tokenizer and Fast, that split text into words as BERT's does.
_CLASSES = (
    *("Bert", "DistilBert", "Electra", "MPNet", "PreTrained", "TokenizersBackend", "ConvBert", "MobileBert"),
    *("SqueezeBert", "Funnel", "LayoutLM", "Lxmert", "RetriBert", "DPRContextEncoder", "DPRQuestionEncoder"),
)
# Longer words are unknown. `transformers` and published tokenizer.json files use 100; google-research/bert
# (WordpieceTokenizer) uses 200.
MAX_WORD_LENGTH = 100
# Unicode's White_Space except " " and "\n". str.isspace also includes U+001C to U+001F.
WHITE_SPACE = "\t\x0b\x0c\r\x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
_LINE_SPACE = " " + WHITE_SPACE
_PREFIX = "##"  # before tokens inside words


@dataclass(frozen=True)
class WordPieceSpec(TokenList):
    """Everything that determines a WordPiece tokenizer's ids."""

    tokens: tuple[str, ...]  # by id
    lowercase: bool
    strip_accents: bool
    split_chinese: bool = True  # each CJK ideograph is a word
    clean_text: bool = True  # control characters dropped
    continuation_prefix: str = _PREFIX
    max_word_length: int = MAX_WORD_LENGTH
    added: tuple[AddedToken, ...] = ()  # __post_init__ adds the roles' tokens
    roles: Roles = field(default=BERT_ROLES, metadata=HASHED_IF_CHANGED)
    pair_separators: int = field(default=1, metadata=HASHED_IF_CHANGED)
    turkic: bool = field(default=False, metadata=HASHED_IF_CHANGED)  # lower-cased as in Turkish and Azeri

    def __post_init__(self) -> None:
        refuse_repeated(self.tokens)
        # The roles' tokens come first and are marked special, so that equal tokenizers hash equal. MPNet's mask absorbs
        # the space before it, as RoBERTa's does.
        specials = [AddedToken(token, lstrip=token == MPNET_ROLES.mask_token) for token in dict.fromkeys(self.roles)]
        others = {token.content: token for token in self.added if token.content not in self.roles}
        object.__setattr__(self, "added", (*specials, *others.values()))
        if missing := [token for token in self.roles if token not in self.tokens]:
            raise UserError(
                f"the vocabulary lacks {', '.join(missing)}. Add a line for each, or give a BERT vocabulary"
            )

    kind = "wordpiece"
    adds_special_tokens = True
    keeps_newlines = False

    def is_inside(self, token: str) -> bool:
        return token.startswith(self.continuation_prefix)

    def surface(self, token: str) -> str:
        return token.removeprefix(self.continuation_prefix)

    def utf8(self, token: str) -> bytes:
        return self.surface(token).encode()

    def within_text(self) -> "WordPieceSpec":
        return self

    def write(self, directory: Path) -> None:
        """Writes vocab.txt, tokenizer_config.json and special_tokens_map.json."""
        bert, mpnet = self.roles == BERT_ROLES, (self.roles, self.pair_separators) == (MPNET_ROLES, 2)
        kind = "BertTokenizer" if bert else "MPNetTokenizer" if mpnet else "PreTrainedTokenizerFast"
        config = {
            # Other classes of transformers make the normalizer from these settings, without Turkish casing.
            "tokenizer_class": "PreTrainedTokenizerFast" if self.turkic else kind,
            "do_lower_case": self.lowercase,
            "strip_accents": self.strip_accents,
            "tokenize_chinese_chars": self.split_chinese,
        } | ({"turkic_case": True} if self.turkic else {})
        (directory / "vocab.txt").write_text("".join(token + "\n" for token in self.tokens), encoding="utf-8")
        write_settings(directory, config, self.roles, self.added, ends=not bert)


def from_json(content: Mapping[str, Any], config: Mapping[str, Any], lowercase: bool | None) -> WordPieceSpec:
    """Reads a tokenizer.json whose model is WordPiece; `config` holds the folder's settings.

    Raises:
        UserError: the normalizer or pre-tokenizer is not BERT's, or the unknown token is not the one in its roles
            ([UNK]).
    """
    model, normalizer = content.get("model") or {}, content.get("normalizer") or {}
    *before, last = normalizer.get("normalizers") or [normalizer]
    if turkic := before == TURKIC_STEPS:
        normalizer = last
    splitter = content.get("pre_tokenizer") or {}
    if normalizer.get("type") != "BertNormalizer" or splitter.get("type") != "BertPreTokenizer":
        raise UserError(
            f"its normalizer is {normalizer.get('type')} and its pre_tokenizer {splitter.get('type')}. "
            "Only BertNormalizer with BertPreTokenizer is supported"
        )
    for name in ("lowercase", "strip_accents", "handle_chinese_chars", "clean_text"):
        kind = bool | None if name == "strip_accents" else bool  # null: as lowercase
        if not isinstance(normalizer[name], kind):
            raise UserError(f"its normalizer's {name} is {normalizer[name]!r}. Change it to true or false")
    tokens = tokens_by_id(model["vocab"], fill=True)
    roles = _roles(tokens, config)
    if model.get("unk_token") != roles.unk_token:
        raise UserError(f"its unknown token is {model.get('unk_token')!r}. Only {roles.unk_token} is supported")
    stated = _first(config.get("do_lower_case"), normalizer["lowercase"])
    refuse_contradiction(lowercase, stated)
    spec = WordPieceSpec(
        tokens=tokens,
        lowercase=stated,
        # Without a setting, accents are stripped if text is lower-cased, as in google-research/bert's BasicTokenizer.
        strip_accents=_first(config.get("strip_accents"), normalizer["strip_accents"], stated),
        split_chinese=_first(config.get("tokenize_chinese_chars"), normalizer["handle_chinese_chars"]),
        clean_text=normalizer["clean_text"],
        continuation_prefix=model["continuing_subword_prefix"],
        max_word_length=model["max_input_chars_per_word"],
        added=added_tokens(content),
        roles=roles,
        pair_separators=_pair_separators(roles, content.get("post_processor")),
        turkic=turkic,
    )
    check_added_ids(content, spec.all_tokens())
    return spec


def from_lines(file: Path, config: Mapping[str, Any], lowercase: bool | None) -> WordPieceSpec:
    """Reads a vocab.txt; `config` holds the folder's settings.

    Without a setting or an argument, a vocabulary without capitals is taken to be lower-cased.

    Raises:
        UserError: the tokenizer does not split text into words as BERT's does.
    """
    # Settings such as MeCab's: vocab.txt alone does not tell how such a tokenizer finds words.
    for name, known in (("word_tokenizer_type", "basic"), ("subword_tokenizer_type", "wordpiece")):
        if config.get(name) not in (None, known):
            raise UserError(f"its {name} is {config[name]!r}. Only {known} is supported")
    kind = str(config.get("tokenizer_class") or "BertTokenizer").removesuffix("Fast").removesuffix("Tokenizer")
    if kind not in _CLASSES:
        raise UserError(
            f"its tokenizer_class is {config['tokenizer_class']}, whose words vocab.txt does not say. Give a folder "
            f"with tokenizer.json, or a class of {', '.join(_CLASSES[:4])}"
        )
    try:
        content = file.read_bytes().decode("utf-8").removeprefix("\ufeff")  # drops a byte order mark
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 at byte {error.start}. Give a vocab.txt with one token per line") from None
    tokens = _tokens_by_line(file, content.split("\n"))
    stated = config.get("do_lower_case")
    refuse_contradiction(lowercase, stated)
    chosen = _first(stated, lowercase, not has_capitals(tokens))
    roles = _roles(tokens, config)
    return WordPieceSpec(
        tokens=tokens,
        lowercase=chosen,
        strip_accents=_first(config.get("strip_accents"), chosen),  # as in Google's BasicTokenizer
        split_chinese=_first(config.get("tokenize_chinese_chars"), True),
        roles=roles,
        pair_separators=_pair_separators(roles, None),
        turkic=bool(config.get("turkic_case")),
    )


def _tokens_by_line(file: Path, lines: Sequence[str]) -> tuple[str, ...]:
    """Reads the lines as the `tokenizers` library does: without white space at their ends, and the last of equal ones.

    Other equal or empty lines keep their ids, which a model has rows for, by tokens that no text contains. Empty lines
    at the end of the file are ignored.
    """
    tokens = [line.removesuffix("\r") for line in lines]
    # White space is the token itself in bert-base-chinese, whose lines 344 and 13503 are U+2028 and ##U+2028.
    ends = [index for index, token in enumerate(tokens) if token.rstrip(_LINE_SPACE) not in (token, "", _PREFIX)]
    for index in ends:
        tokens[index] = tokens[index].rstrip(_LINE_SPACE)
    while tokens and not tokens[-1]:
        tokens.pop()
    last = {token: index for index, token in enumerate(tokens)}
    skipped = [index for index, token in enumerate(tokens) if not token or last[token] > index]
    if ends:
        _remark(f"tokenizer {file}: removed white space at the ends of lines ({len(ends)}), as transformers does")
    if skipped:
        _remark(
            f"tokenizer {file}: no text gets the ids of lines that are empty or repeated later ({len(skipped)}, the "
            f"first is line {skipped[0] + 1}), as in transformers"
        )
    for index in skipped:
        tokens[index] = placeholder(index)
    return tuple(tokens)


@functools.cache
def _remark(line: str) -> None:
    """Prints a line once in a process, although commands load a tokenizer several times."""
    print_note(line)


def _roles(tokens: tuple[str, ...], settings: Mapping[str, Any]) -> Roles:
    """The special tokens by role: BERT's, unless the vocabulary is MPNet's, or lacks them and the settings name others.

    MPNet's vocabulary contains BERT's special tokens too. It begins with <s>, <pad> and </s>, and its folders name
    MPNetTokenizer. Raises UserError if an MPNet vocabulary lacks one of its own.
    """
    known = set(tokens)
    if tokens[:3] == _MPNET_HEAD or str(settings.get("tokenizer_class")).startswith("MPNetTokenizer"):
        return named_roles(settings, known, MPNET_ROLES)
    if known.issuperset(BERT_ROLES) or not any(settings.get(role) for role in Roles._fields):
        return BERT_ROLES
    return named_roles(settings, known, BERT_ROLES)


def _pair_separators(roles: Roles, post_processor: Mapping[str, Any] | None) -> int:
    """Number of separators between two texts: 1 with BERT's special tokens, otherwise as tokenizer.json states it.

    If it does not, it is 2 with MPNet's special tokens, as in MPNetTokenizer of transformers.
    """
    if roles == BERT_ROLES:
        return 1
    stated = stated_separators(post_processor)
    return stated if stated is not None else 2 if roles.sep_token == MPNET_ROLES.sep_token else 1


def has_capitals(tokens: tuple[str, ...]) -> bool:
    """Whether a token contains a capital, apart from markers in brackets ([CLS], <S>)."""
    return any(token != token.lower() and token[0] + token[-1] not in ("[]", "<>") for token in tokens)


def _first(*values: bool | None) -> bool:
    return next(value for value in values if value is not None)


# WordPiece's greedy longest match for many words at once, by numpy (Schuster and Nakajima 2012; Devlin et al. 2019).
#
# From left to right, a word's next token is the longest prefix of its rest in the vocabulary. If there is none, the
# whole word is unknown. Two tries in one table hold the tokens: one for a word's beginning, one for its inside. All
# words walk the table in step. The reference is WordpieceTokenizer in google-research/bert; the `tokenizers` library
# looks up one shorter prefix after another.

# States in the table: no token continues in this way; nothing read yet, at the beginning or inside of a word.
_NOWHERE, _BEGIN, _INSIDE = range(3)
_NO_TOKEN = -1


class _Spelling(NamedTuple):
    """Texts encoded as columns of the table."""

    columns: UInt8[np.ndarray, "n"]  # of all texts; a 0 follows each text
    begins: Int64[np.ndarray, "m"]  # each text's first index in `columns`
    ends: Int64[np.ndarray, "m"]

    def has_columns(self) -> Bool[np.ndarray, "m"]:
        """Which texts are not empty and have only characters with a column."""
        # Two equal running counts of zeros mean that no character between the two places lacks a column. The count
        # at the first character includes that character, so it is checked by itself.
        before = np.cumsum(self.columns == 0)
        return (
            (self.begins < self.ends) & (before[self.begins] == before[self.ends - 1]) & (self.columns[self.begins] > 0)
        )


class LongestMatch:
    """Encodes words of certain ASCII characters, which normalization does not change, as WordPiece ids.

    Args:
        tokens: the vocabulary, by id.
        prefix: of tokens inside words: "##".
        characters: the ASCII characters in such words.
        longest: longer words are not encoded here.
        unknown_id: for words without a sequence of tokens that spells them.
    """

    def __init__(
        self, tokens: Sequence[str], *, prefix: str, characters: str, longest: int, unknown_id: int, dtype: type
    ) -> None:
        # Column 0 stands for all other characters: no transition leads on from them.
        self._columns = bytes(characters.find(chr(byte)) + 1 for byte in range(256))
        self._longest, self._unknown_id, self._dtype = longest, unknown_id, dtype
        whole = self._spell(tokens)
        inside = np.flatnonzero(np.fromiter((token.startswith(prefix) for token in tokens), bool, len(tokens)))
        begins = np.concatenate([whole.begins, whole.begins[inside] + len(prefix.encode())])
        spelling = _Spelling(whole.columns, begins, np.concatenate([whole.ends, whole.ends[inside]]))
        spelled = spelling.has_columns()
        ids = np.concatenate([np.arange(len(tokens)), inside])[spelled]
        # Level by level, all unfinished tokens (`reading`) step from `state` by the column at `at`. `ended` keeps the
        # tokens' last states.
        state = np.repeat([_BEGIN, _INSIDE], [len(tokens), len(inside)])[spelled]
        at, end = spelling.begins[spelled], spelling.ends[spelled]
        reading, ended = np.arange(len(ids)), np.zeros(len(ids), np.int64)
        width = len(characters) + 1
        rows, first, last = [], 0, _INSIDE + 1  # the states on this level
        while first < last:
            # An edge is numbered by its state on this level and its column. Tokens with a common prefix share edges,
            # and each distinct edge leads to a new state on the next level.
            edge = (state - first) * width + spelling.columns[at]
            used = np.zeros((last - first) * width, bool)
            used[edge] = True
            edges = np.flatnonzero(used)
            leads = np.full(len(used), _NOWHERE, np.int32)
            leads[edges] = np.arange(last, last + len(edges))
            rows.append(leads.reshape(-1, width))
            state, at = leads[edge].astype(np.int64), at + 1
            over = at == end[reading]
            ended[reading[over]] = state[over]
            state, at, reading = state[~over], at[~over], reading[~over]
            first, last = last, last + len(edges)
        self._table = np.concatenate(rows)  # the next state, by state and column
        self._token = np.full(last, _NO_TOKEN, np.int32)  # the token that ends at a state
        self._token[ended] = ids

    def encode(self, words: Sequence[str]) -> list[bytes | None]:
        """Encodes words.

        Returns:
            The bytes of every word's ids; None for a word that is empty, too long, or has other characters.

        Raises:
            UnicodeEncodeError: a word contains a lone surrogate.
        """
        spelling = self._spell(words)
        encodable = spelling.has_columns() & (spelling.ends - spelling.begins <= self._longest)
        owners, ids = self._walk(spelling, np.flatnonzero(encodable))
        # `owners` ascends, so word i has the ids between the first places for i and for i + 1, here counted in bytes.
        bounds = (np.searchsorted(owners, np.arange(len(words) + 1)) * np.dtype(self._dtype).itemsize).tolist()
        joined = ids.astype(self._dtype).tobytes()
        return [joined[first:last] or None for first, last in itertools.pairwise(bounds)]

    def _spell(self, texts: Sequence[str]) -> _Spelling:
        encoded = [text.encode() for text in texts]
        columns = np.frombuffer(b"\0".join([*encoded, b""]).translate(self._columns), np.uint8)
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        ends = np.cumsum(lengths + 1) - 1
        return _Spelling(columns, ends - lengths, ends)

    def _walk(
        self, spelling: _Spelling, word: Int64[np.ndarray, "k"]
    ) -> tuple[Int64[np.ndarray, "n"], Int32[np.ndarray, "n"]]:
        """Encodes the selected words. Returns the word of each id, ascending, and the ids."""
        columns = spelling.columns
        at = spelling.begins[word]
        state = np.full(len(word), _BEGIN, np.int32)
        # The longest token read since the last match, and the index at which it ends.
        token, end = np.full(len(word), _NO_TOKEN, np.int32), at.copy()
        owners, matches = [word[:0]], [token[:0]]
        while len(word):
            state = self._table[state, columns[at]]
            at += 1
            here = self._token[state]
            np.copyto(token, here, where=here != _NO_TOKEN)
            np.copyto(end, at, where=here != _NO_TOKEN)
            stuck = np.flatnonzero(state == _NOWHERE)
            if not len(stuck):
                continue
            # These words cannot read on: emit their longest token, and restart behind it or finish.
            owners.append(word[stuck])
            matches.append(token[stuck])
            over = (token[stuck] == _NO_TOKEN) | (columns[end[stuck]] == 0)
            state[stuck], at[stuck], token[stuck] = _INSIDE, end[stuck], _NO_TOKEN
            if over.any():
                left = np.ones(len(word), bool)
                left[stuck[over]] = False
                word, at, state, token, end = word[left], at[left], state[left], token[left], end[left]
        owner, match = np.concatenate(owners), np.concatenate(matches)
        # If no token begins the rest of a word, the word becomes the unknown token alone.
        lost = match == _NO_TOKEN
        unknown = np.zeros(len(spelling.begins), bool)
        unknown[owner[lost]] = True
        valid = lost | ~unknown[owner]
        # Rounds emitted the ids, so a word's ids are apart but in order. A stable sort keeps this order.
        order = np.argsort(owner[valid], kind="stable")
        return owner[valid][order], np.where(lost, np.int32(self._unknown_id), match)[valid][order]


# The engine knows only some of the positions at which the library splits text: at white space and at some punctuation.
# It also knows that the library lower-cases ASCII capitals and leaves other ASCII letters and digits unchanged.

# str.split splits at these. The library first drops them in its clean-up, like other control characters.
_DROPPED_SEPARATORS = "\x0b\x0c\x1c\x1d\x1e\x1f\x85"
_DROP = str.maketrans("", "", _DROPPED_SEPARATORS)
_SPACES = dict.fromkeys(WHITE_SPACE, " ")
_CLEANED = _SPACES | dict.fromkeys(_DROPPED_SEPARATORS, "")


class WordPieceEngine(LibraryEngine):
    """Encodes by the library's WordPiece, split at white space and punctuation.

    Words of ASCII letters and digits, which are most words in a text, go to `LongestMatch` instead.
    """

    def __init__(self, spec: WordPieceSpec) -> None:
        super().__init__(library_tokenizer(spec), id_dtype(len(spec.all_tokens())))
        self._spec = spec
        self._text_tokens = text_tokens(spec.added)
        normalize = self._library.normalizer.normalize_str
        self._folds = spec.lowercase and not spec.turkic  # whether ASCII capitals become the usual small letters
        # Added tokens that are matched in normalized text, as the library looks them up.
        self._normalized = [normalize(token.content) for token in spec.added if token.normalized and not token.special]

    def split(self, texts: Sequence[str]) -> ChunkedTexts:
        exceptions: dict[int, list[str] | None] = {}
        if self._text_tokens is not None:  # added tokens that are matched in running text may span white space
            for index, text in enumerate(texts):
                if self._text_tokens.search(text) or self._has_normalized_token(text):
                    exceptions[index] = None
            texts = ["" if index in exceptions else text for index, text in enumerate(texts)]
        block = replaced(lines(texts), _CLEANED if self._spec.clean_text else _SPACES)
        return ChunkedTexts(block, marks=True, fold=self._folds, exceptions=exceptions)

    def _has_normalized_token(self, text: str) -> bool:
        if not self._normalized:
            return False
        # Printable ASCII is at most lower-cased. The library's normalization takes about as long as its encoding.
        if text.isascii() and text.isprintable() and not self._spec.turkic:
            normal = text.lower() if self._spec.lowercase else text
        else:
            normal = self._library.normalizer.normalize_str(text)
        return any(token in normal for token in self._normalized)

    def encode_chunks(self, keys: Sequence[str]) -> list[bytes]:
        matched = self._longest_match.encode(keys)
        others = iter(self.encode([key for key, ids in zip(keys, matched, strict=True) if ids is None]))
        return [next(others) if ids is None else ids for ids in matched]

    @functools.cached_property
    def _longest_match(self) -> LongestMatch:
        """Gives the library's ids for ASCII words that normalization does not change."""
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
    """The `tokenizers` library's tokenizer for a specification."""
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
    if spec.turkic:
        library.normalizer = normalizers.Sequence([*turkic_case(), library.normalizer])
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
    """A text's chunks between white spaces, as the library splits it if it cleans text up."""
    return text.translate(_DROP).split()


def lines(texts: Sequence[str]) -> str:
    """One line per text; line breaks within a text become spaces."""
    block = "\n".join(texts)
    if block.count("\n") >= len(texts):
        block = "\n".join(text.replace("\n", " ") for text in texts)
    return block


def replaced(block: str, characters: Mapping[str, str]) -> str:
    """Replaces some characters in a text. Fast if most of them do not occur."""
    ascii_only = block.isascii()
    for character, replacement in characters.items():
        if not (ascii_only and character > "\x7f") and character in block:
            block = block.replace(character, replacement)
    return block
