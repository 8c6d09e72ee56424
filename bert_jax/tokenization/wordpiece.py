"""The specification of a WordPiece tokenizer, and the files of Google and Hugging Face that store it.

Formats: vocab.txt of google-research/bert (one token per line; the line number is the id), tokenizer.json of the
`tokenizers` library, and tokenizer_config.json and special_tokens_map.json of `transformers`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bert_jax.command import UserError
from bert_jax.tokenization.tokenizer_spec import (
    BERT_ROLES,
    HASHED_IF_CHANGED,
    MPNET_ROLES,
    AddedToken,
    Roles,
    TokenList,
    added_tokens,
    check_added_ids,
    named_roles,
    refuse_contradiction,
    refuse_repeated,
    separators_of,
    special_token_map,
    tokens_by_id,
    write_settings,
)

# BERT's special tokens, in the order in which vocabularies trained by bert_jax contain them (ids 0 to 4).
SPECIAL_TOKENS = BERT_ROLES
_BERT_ADDED = tuple(AddedToken(token) for token in SPECIAL_TOKENS)
# The first tokens of MPNet's vocabulary, which are followed by BERT's, special tokens included.
_MPNET_HEAD = ("<s>", "<pad>", "</s>")
# Classes of transformers, without Tokenizer and Fast, that split text into words as BERT's does.
_CLASSES = (
    *("Bert", "DistilBert", "Electra", "MPNet", "PreTrained", "TokenizersBackend", "ConvBert", "MobileBert"),
    *("SqueezeBert", "Funnel", "LayoutLM", "Lxmert", "RetriBert", "DPRContextEncoder", "DPRQuestionEncoder"),
)
# Longer words are unknown. `transformers` and the tokenizer.json files of published models use 100;
# google-research/bert (WordpieceTokenizer) uses 200.
MAX_WORD_LENGTH = 100


@dataclass(frozen=True)
class WordPieceSpec(TokenList):
    """Everything that determines the ids of a WordPiece tokenizer."""

    tokens: tuple[str, ...]  # by id
    lowercase: bool
    strip_accents: bool
    split_chinese: bool = True  # each CJK ideograph is a word
    clean_text: bool = True  # control characters dropped
    continuation_prefix: str = "##"
    max_word_length: int = MAX_WORD_LENGTH
    added: tuple[AddedToken, ...] = _BERT_ADDED  # with other roles, __post_init__ replaces these five by theirs
    roles: Roles = field(default=BERT_ROLES, metadata=HASHED_IF_CHANGED)
    pair_separators: int = field(default=1, metadata=HASHED_IF_CHANGED)

    def __post_init__(self) -> None:
        refuse_repeated(self.tokens)
        if self.roles != BERT_ROLES:
            added = () if self.added == _BERT_ADDED else self.added
            object.__setattr__(self, "added", _with_specials(added, self.roles))
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
        config = {
            "tokenizer_class": "BertTokenizer" if bert else "MPNetTokenizer" if mpnet else "PreTrainedTokenizerFast",
            "do_lower_case": self.lowercase,
            "strip_accents": self.strip_accents,
            "tokenize_chinese_chars": self.split_chinese,
        }
        (directory / "vocab.txt").write_text("".join(token + "\n" for token in self.tokens), encoding="utf-8")
        ends = {} if bert else {"bos_token": self.roles.cls_token, "eos_token": self.roles.sep_token}
        write_settings(directory, config, ends | special_token_map(self.roles, self.added))


def from_json(content: Mapping[str, Any], config: Mapping[str, Any], lowercase: bool | None) -> WordPieceSpec:
    """Reads a tokenizer.json whose model is WordPiece; `config` holds the folder's settings.

    Raises UserError for a normalizer or pre-tokenizer other than BERT's, and for an unknown token of the model that
    is not the one of its roles ([UNK]).
    """
    model, normalizer = content.get("model") or {}, content.get("normalizer") or {}
    splitter = content.get("pre_tokenizer") or {}
    if normalizer.get("type") != "BertNormalizer" or splitter.get("type") != "BertPreTokenizer":
        raise UserError(
            f"its normalizer is {normalizer.get('type')} and its pre_tokenizer {splitter.get('type')}. "
            "Only BertNormalizer with BertPreTokenizer is supported"
        )
    for name in ("lowercase", "strip_accents", "handle_chinese_chars", "clean_text"):
        wanted = bool | None if name == "strip_accents" else bool  # null: the value of lowercase
        if not isinstance(normalizer[name], wanted):
            raise UserError(f"its normalizer's {name} is {normalizer[name]!r}. Change it to true or false")
    tokens = tokens_by_id(model["vocab"])
    roles = _roles(tokens, config)
    if model.get("unk_token") != roles.unk_token:
        raise UserError(f"its unknown token is {model.get('unk_token')!r}. Only {roles.unk_token} is supported")
    stated = _first(config.get("do_lower_case"), normalizer["lowercase"])
    refuse_contradiction(lowercase, stated)
    vocabulary = WordPieceSpec(
        tokens=tokens,
        lowercase=stated,
        # Without a setting, accents are stripped if text is lower-cased, as in google-research/bert's BasicTokenizer.
        strip_accents=_first(config.get("strip_accents"), normalizer["strip_accents"], stated),
        split_chinese=_first(config.get("tokenize_chinese_chars"), normalizer["handle_chinese_chars"]),
        clean_text=normalizer["clean_text"],
        continuation_prefix=model["continuing_subword_prefix"],
        max_word_length=model["max_input_chars_per_word"],
        added=_with_specials(added_tokens(content), roles),
        roles=roles,
        pair_separators=_pair_separators(roles, content.get("post_processor")),
    )
    check_added_ids(content, vocabulary.all_tokens())
    return vocabulary


def from_lines(file: Path, config: Mapping[str, Any], lowercase: bool | None) -> WordPieceSpec:
    """Reads a vocab.txt; `config` holds the folder's settings.

    Without a setting or an argument, a vocabulary without capitals is taken to be lower-cased. Raises UserError for a
    tokenizer that splits text into words otherwise than BERT's.
    """
    _refuse_other_words(config)
    try:
        lines = file.read_bytes().decode("utf-8").removeprefix("\ufeff").split("\n")  # drops a byte order mark
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 at byte {error.start}. Give a vocab.txt with one token per line") from None
    if lines[-1] == "":
        lines.pop()
    tokens = tuple(line.removesuffix("\r") for line in lines)
    if "" in tokens:
        raise UserError(f"line {tokens.index('') + 1} is empty. Give a vocab.txt with one token per line")
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
    )


def _refuse_other_words(settings: Mapping[str, Any]) -> None:
    """Raises UserError for settings of a tokenizer whose words a vocab.txt alone does not say, such as MeCab's."""
    for name, known in (("word_tokenizer_type", "basic"), ("subword_tokenizer_type", "wordpiece")):
        if settings.get(name) not in (None, known):
            raise UserError(f"its {name} is {settings[name]!r}. Only {known} is supported")
    kind = str(settings.get("tokenizer_class") or "BertTokenizer").removesuffix("Fast").removesuffix("Tokenizer")
    if kind not in _CLASSES:
        raise UserError(
            f"its tokenizer_class is {settings['tokenizer_class']}, whose words vocab.txt does not say. Give a folder "
            f"with tokenizer.json, or a class of {', '.join(_CLASSES[:4])}"
        )


def _roles(tokens: tuple[str, ...], settings: Mapping[str, Any]) -> Roles:
    """The special tokens by role: BERT's, unless the vocabulary is MPNet's or lacks them and the settings name others.

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
    """The separators between two texts by tokenizer.json's post_processor: 1 for BERT's special tokens.

    Without one it is 2 for MPNet's special tokens, as MPNetTokenizer of transformers has it.
    """
    if roles == BERT_ROLES:
        return 1
    stated = separators_of(post_processor)
    return stated if stated is not None else 2 if roles.sep_token == MPNET_ROLES.sep_token else 1


def _with_specials(added: Iterable[AddedToken], roles: Roles) -> tuple[AddedToken, ...]:
    """The added tokens with those of the roles first, marked special, so that equal tokenizers hash equal.

    MPNet's mask absorbs the space before it, as RoBERTa's does.
    """
    by_content = {token.content: token for token in added}
    first = tuple(AddedToken(token, lstrip=token == MPNET_ROLES.mask_token) for token in dict.fromkeys(roles))
    return first + tuple(token for content, token in by_content.items() if content not in roles)


def has_capitals(tokens: tuple[str, ...]) -> bool:
    """Whether a token contains a capital, apart from markers in brackets ([CLS], <S>)."""
    return any(token != token.lower() and token[0] + token[-1] not in ("[]", "<>") for token in tokens)


def _first(*values: bool | None) -> bool:
    return next(value for value in values if value is not None)
