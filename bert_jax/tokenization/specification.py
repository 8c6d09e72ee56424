"""The common part of all kinds' specifications: special tokens, settings files, refusals.

A specification is plain data, which training reads without the libraries that encode text. The second part knows the
scripts that put no space between words.
"""

import dataclasses
import hashlib
import itertools
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from bert_jax.errors import UserError
from bert_jax.storage.files import read_json, write_json

# Boolean settings of `transformers`' tokenizer_config.json.
_SWITCHES = (
    *("do_lower_case", "strip_accents", "tokenize_chinese_chars", "keep_accents", "add_prefix_space"),
    "split_special_tokens",
    *("replace_quotes", "turkic_case"),  # bert_jax's own
)


@dataclass(frozen=True)
class AddedToken:
    """A token to match before text is split: a special token, or a word added to a vocabulary by a user."""

    content: str
    special: bool = True
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


# Languages that lower-case I to ı and İ to i, and these rules as replacements before the usual lower-casing (Unicode's
# SpecialCasing.txt; the first rule is for a decomposed İ).
TURKIC = ("tr", "az")
TURKIC_CASE = (("I\u0307", "i"), ("\u0130", "i"), ("I", "\u0131"))
# The same as steps of a normalizer in tokenizer.json.
TURKIC_STEPS = [{"type": "Replace", "pattern": {"String": old}, "content": new} for old, new in TURKIC_CASE]


class Roles(NamedTuple):
    """The special tokens by role, with the names in `transformers`."""

    pad_token: str
    unk_token: str
    cls_token: str
    sep_token: str
    mask_token: str


BERT_ROLES = Roles("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ALBERT_ROLES = Roles("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
ROBERTA_ROLES = Roles("<pad>", "<unk>", "<s>", "</s>", "<mask>")
MPNET_ROLES = Roles("<pad>", "[UNK]", "<s>", "</s>", "<mask>")
GPT2_ROLES = Roles(*["<|endoftext|>"] * 5)  # GPT-2's only special token, which separates texts


@runtime_checkable
class TokenizerSpec(Protocol):
    """Everything that determines a tokenizer's ids, as plain data that pickles. Equal specifications hash equal."""

    @property
    def kind(self) -> str:
        """wordpiece, bpe (byte-level), word_bpe, unigram or sentencepiece_bpe."""

    @property
    def lowercase(self) -> bool: ...

    @property
    def roles(self) -> Roles: ...

    @property
    def pair_separators(self) -> int:
        """Number of separators between two texts, as published models of this kind have it."""

    @property
    def adds_special_tokens(self) -> bool:
        """Whether the model's sequences are [CLS] text [SEP]; False for a published GPT-2, which has text alone."""

    @property
    def split_special_tokens(self) -> bool:
        """Whether special tokens written in a task's text are ordinary text, as tokenizer_config.json may ask."""

    @property
    def keeps_newlines(self) -> bool:
        """Whether line breaks have tokens, and splitting a text before white space keeps its ids."""

    def all_tokens(self) -> tuple[str, ...]:
        """Every token by id: the model's tokens, then further added tokens."""

    def special_ids(self) -> tuple[int, ...]:
        """The special tokens' ids, ascending."""

    def is_inside(self, token: str) -> bool:
        """Whether an ordinary token continues a word."""

    def surface(self, token: str) -> str:
        """An ordinary token's characters, without the mark for a word's beginning or inside."""

    def utf8(self, token: str) -> bytes:
        """An ordinary token's bytes, which may be parts of characters, likewise."""

    def within_text(self) -> "TokenizerSpec":
        """The tokenizer for the continuation of a text: it puts no space before the first word."""

    def of_tasks(self) -> "TokenizerSpec":
        """The tokenizer for task texts, in which it matches special tokens without a role."""

    def content_hash(self) -> str:
        """sha256, hexadecimal."""

    def write(self, directory: Path) -> None:
        """Writes the files of a Hugging Face folder, except tokenizer.json, into an existing folder."""


# Mark dataclass fields for content_hash: one that changes no text's ids stays out, and one that was added later enters
# only if it differs from its default, so that hashes stay as they were.
UNHASHED = {"hashed": False}
HASHED_IF_CHANGED = {"hashed": "if changed"}


class TokenList:
    """A specification with a list of its model's tokens, and of added tokens."""

    kind: str
    tokens: tuple[str, ...]  # by id
    added: tuple[AddedToken, ...]
    roles: Roles

    def all_tokens(self) -> tuple[str, ...]:
        present = {token.content for token in self.added}.intersection(self.tokens)
        return self.tokens + tuple(token.content for token in self.added if token.content not in present)

    def special_ids(self) -> tuple[int, ...]:
        special = {token.content for token in self.added if token.special} | set(self.roles)
        return tuple(index for index, token in enumerate(self.all_tokens()) if token in special)

    def of_tasks(self) -> TokenizerSpec:
        spec: Any = self
        added = tuple(dataclasses.replace(token, special=token.content in self.roles) for token in self.added)
        return dataclasses.replace(spec, added=added) if added != self.added else spec

    def content_hash(self) -> str:
        """The hexadecimal sha256 of the kind and the dataclass fields, with their names, except marked ones."""
        fields = {}  # dataclasses.asdict would copy every token
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, rule = getattr(self, field.name), field.metadata.get("hashed", True)
            if rule is True or (rule == "if changed" and value != field.default):
                fields[field.name] = value
        serialized = json.dumps({"kind": self.kind} | fields, sort_keys=True, default=dataclasses.asdict)
        return hashlib.sha256(serialized.encode()).hexdigest()


def id_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """The narrowest dtype that holds every id."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def read_settings(directory: Path) -> dict[str, Any]:
    """Reads the settings in a folder's special_tokens_map.json, overridden by those in its tokenizer_config.json.

    If they name no tokenizer class, config.json decides it, and its model type, as for AutoTokenizer in transformers.
    A missing file contributes no settings.

    Raises:
        UserError: a boolean setting has another type.
    """
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        values = read_json(directory / name) if (directory / name).exists() else {}
        for switch in _SWITCHES:
            if not isinstance(value := values.get(switch), bool | None):
                raise UserError(f"{switch} is {value!r} in {name} of the same folder. Change it to true or false")
        settings |= values
    config = directory / "config.json"
    if not settings.get("tokenizer_class") and config.exists():
        values = read_json(config)
        settings |= {name: values.get(name) for name in ("tokenizer_class", "model_type")}
    return settings


def stated_separators(post_processor: Mapping[str, Any] | None) -> int | None:
    """Counts the separators between two texts in tokenizer.json's post_processor; None if it does not say."""
    for step in (post_processor.get("processors") or [post_processor]) if post_processor else ():
        if step["type"] == "TemplateProcessing":
            texts = [index for index, part in enumerate(step["pair"]) if "Sequence" in part]
            return len(step["pair"][texts[0] + 1 : texts[1]])
        if step["type"] in ("BertProcessing", "RobertaProcessing"):
            return 1 if step["type"] == "BertProcessing" else 2
    return None


class Template(NamedTuple):
    """The special tokens that a text gets: none, or cls A sep, with separators between A and B of a pair."""

    adds_special_tokens: bool
    separators: int = 0


def stated_template(content: Mapping[str, Any], settings: Mapping[str, Any], roles: Roles) -> Template | None:
    """Reads the post_processor of a tokenizer.json; None if the tokenizer's class decides, as in transformers 5.

    Classes of a family build a template of their own; only general classes take the file's.

    Raises:
        UserError: the template has other tokens than cls and sep, or has them in other places.
    """
    kind = str(settings.get("tokenizer_class") or settings.get("model_type") or "").removesuffix("Fast")
    if kind.removesuffix("Tokenizer") not in ("", "PreTrained", "TokenizersBackend", "modernbert"):
        return None
    step = content.get("post_processor") or {}
    # ByteLevel only trims offsets.
    steps = [part for part in step.get("processors", [step] if step else []) if part["type"] != "ByteLevel"]
    if not steps:
        return Template(False)
    cls, sep = roles.cls_token, roles.sep_token
    single, pair = ["?"], ["?"]
    if len(steps) == 1 and steps[0]["type"] == "TemplateProcessing":
        single, pair = (
            [next(iter(part.values()))["id"] if "SpecialToken" in part else "" for part in steps[0][name]]
            for name in ("single", "pair")
        )
    elif len(steps) == 1 and steps[0]["type"] in ("BertProcessing", "RobertaProcessing"):
        first, last = steps[0]["cls"][0], steps[0]["sep"][0]
        between = [last] * (1 if steps[0]["type"] == "BertProcessing" else 2)
        single, pair = [first, "", last], [first, "", *between, "", last]
    if single == [""] and pair == ["", ""]:
        return Template(False)
    between = pair[2:-2]
    if single == [cls, "", sep] and pair == [cls, "", *between, "", sep] and set(between) == {sep}:
        return Template(True, len(between))
    shown = " ".join(token or "TEXT" for token in (pair if single == [cls, "", sep] else single))
    raise UserError(
        f"its post_processor makes {shown} of a text; supported are {cls} TEXT {sep}, and the text alone. Save it "
        "with one of these, or name its class as tokenizer_class in tokenizer_config.json"
    )


def write_settings(
    directory: Path, config: Mapping[str, Any], roles: Roles, added: Sequence[AddedToken] = (), ends: bool = True
) -> None:
    """Writes tokenizer_config.json and special_tokens_map.json, with the names in `transformers`.

    Args:
        added: its special tokens without a role are written too.
        ends: whether cls and sep are also written as bos_token and eos_token.
    """
    special: dict[str, Any] = {"bos_token": roles.cls_token, "eos_token": roles.sep_token} if ends else {}
    special |= roles._asdict()
    if further := [token.content for token in added if token.special and token.content not in roles]:
        special["additional_special_tokens"] = further
    write_json(directory / "tokenizer_config.json", {**config, **special})
    write_json(directory / "special_tokens_map.json", special)


def placeholder(index: int) -> str:
    """A token for an id that no text gets: WordPiece splits text at brackets."""
    return f"[line {index + 1}]"


def tokens_by_id(vocabulary: Mapping[str, int], fill: bool = False) -> tuple[str, ...]:
    """Sorts a vocabulary's tokens by id.

    Args:
        fill: whether placeholders take the ids of repeated lines of a vocab.txt, which its tokenizer.json lacks.

    Raises:
        UserError: the ids are not contiguous from 0.
    """
    if fill and len(vocabulary) <= (end := max(vocabulary.values(), default=0) + 1) <= 2 * len(vocabulary):
        missing = set(range(end)).difference(vocabulary.values())
        vocabulary = {**vocabulary, **{placeholder(index): index for index in missing}}
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise UserError("its ids are not contiguous from 0. Give a tokenizer whose ids have no gaps")
    return tuple(sorted(vocabulary, key=vocabulary.__getitem__))


def refuse_repeated(tokens: Sequence[str]) -> None:
    """Refuses a vocabulary in which a token occurs twice."""
    if len(set(tokens)) < len(tokens):
        repeated, _ = Counter(tokens).most_common(1)[0]
        first, second, *_ = (index for index, token in enumerate(tokens) if token == repeated)
        raise UserError(f"token {repeated!r} occurs twice, as id {first} and {second}. Correct the vocabulary")


def added_tokens(content: Mapping[str, Any]) -> tuple[AddedToken, ...]:
    """The added tokens in a tokenizer.json, by id."""
    flags = [field.name for field in dataclasses.fields(AddedToken)]
    added = sorted(content.get("added_tokens") or [], key=lambda token: token["id"])
    return tuple(AddedToken(**{flag: token[flag] for flag in flags}) for token in added)


def check_added_ids(content: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """Refuses a tokenizer.json that gives an added token another id than its index in `tokens`.

    With a SentencePiece model this happens if a user added tokens, or if its family has another numbering (CamemBERT).
    """
    ids = {token: index for index, token in enumerate(tokens)}
    for token in content.get("added_tokens") or []:
        if ids.get(token["content"]) != token["id"]:
            raise UserError(
                f"tokenizer.json gives {token['content']!r} the id {token['id']}, but its index in the vocabulary is "
                f"{ids.get(token['content'], 'none')}. Renumber it; a SentencePiece model needs the numbering of XLM-R "
                "or ALBERT without added tokens"
            )


def named_roles(settings: Mapping[str, Any], known: Container[str], *usual: Roles) -> Roles:
    """The special tokens by role, as a folder's settings name them.

    A role without a setting comes from the set in `usual` that shares the most tokens with the vocabulary.

    Raises:
        UserError: a role's token is not in the vocabulary.
    """
    fallback = max(usual, key=lambda roles: sum(token in known for token in roles))
    tokens: dict[str, Any] = {}
    for role in Roles._fields:
        named = settings.get(role)
        named = named.get("content") if isinstance(named, dict) else named
        tokens[role] = named or getattr(fallback, role)
    if missing := [role for role, token in tokens.items() if token not in known]:
        raise UserError(
            f"no token for {', '.join(missing)}. Name tokens of the vocabulary for them in special_tokens_map.json"
        )
    return Roles(**tokens)


def refuse_contradiction(argument: bool | None, stated: bool | None) -> None:
    """Refuses --lowercase or --nolowercase if it contradicts the tokenizer's files."""
    if argument is not None and stated is not None and argument != stated:
        flag = "--lowercase" if argument else "--nolowercase"
        setting = "lower-cases text" if stated else "keeps capitals"
        raise UserError(f"{flag} contradicts the tokenizer's files, by which it {setting}. Omit the flag")


# Characters in scripts that put no space between words, as the first bytes of a token show them.
#
# A vocabulary marks words by the space before them, so in these scripts a whole phrase would count as one word. Masking
# therefore takes each token that begins with such a character as a word (bert_jax/data/masking/rule.py). The scripts
# are those whose words Unicode finds by a dictionary (UAX #14, Line_Break=SA: Thai, Lao, Myanmar, Khmer, Tai) or that
# it breaks between any two characters (Line_Break=ID: Chinese and Japanese), with their punctuation, and Tibetan.
# Korean separates words by spaces, so its letters are not among them.

# First and last code points.
UNSPACED = (
    (0x0E00, 0x0FFF),  # Thai, Lao, Tibetan
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x1950, 0x19FF),  # Tai Le, New Tai Lue, Khmer symbols
    (0x1A20, 0x1AAF),  # Tai Tham
    (0x2E80, 0x312F),  # radicals, punctuation, Hiragana, Katakana, Bopomofo
    (0x3190, 0x9FFF),  # ideographs and symbols; the letters of Korean before them are left out
    (0xA9E0, 0xA9FF),  # Myanmar Extended-B
    (0xAA60, 0xAADF),  # Myanmar Extended-A, Tai Viet
    (0xF900, 0xFAFF),  # compatibility ideographs
    (0xFE30, 0xFE4F),  # compatibility forms
    (0xFF01, 0xFF9F),  # fullwidth forms, halfwidth Katakana
    (0x1AFF0, 0x1B16F),  # Kana supplements
    (0x20000, 0x3FFFF),  # ideographs of the supplementary planes
)
# Signs that belong to the character before them: vowels, tones and voicing (general categories Mn and Mc).
MARKS = (
    *((0x0E31, 0x0E31), (0x0E34, 0x0E3A), (0x0E47, 0x0E4E)),  # Thai
    *((0x0EB1, 0x0EB1), (0x0EB4, 0x0EBC), (0x0EC8, 0x0ECE)),  # Lao
    *((0x0F18, 0x0F19), (0x0F35, 0x0F35), (0x0F37, 0x0F37), (0x0F39, 0x0F39), (0x0F3E, 0x0F3F)),  # Tibetan
    *((0x0F71, 0x0F84), (0x0F86, 0x0F87), (0x0F8D, 0x0FBC), (0x0FC6, 0x0FC6)),
    *((0x102B, 0x103E), (0x1056, 0x1059), (0x105E, 0x1060), (0x1062, 0x1064), (0x1067, 0x106D)),  # Myanmar
    *((0x1071, 0x1074), (0x1082, 0x108D), (0x108F, 0x108F), (0x109A, 0x109D)),
    *((0x17B4, 0x17D3), (0x17DD, 0x17DD)),  # Khmer
    (0x3099, 0x309A),  # Kana
)


# The code points at which ranges begin and end, ascending.
_UNSPACED_BORDERS, _MARK_BORDERS = (
    [border for first, last in ranges for border in (first, last + 1)] for ranges in (UNSPACED, MARKS)
)


def _within(borders: list[int], code: int) -> bool:
    return bisect_right(borders, code) % 2 == 1  # an odd number of borders at or below a code point: it is in a range


def is_unspaced(character: str) -> bool:
    """Whether a character's script puts no space between words."""
    return character >= "\u0e00" and _within(_UNSPACED_BORDERS, ord(character))


def begins_unspaced(utf8: bytes) -> bool:
    """Whether a token's bytes begin with a character in such a script, except a mark.

    If they end within this character, all possible characters must lie between two characters in such scripts.
    """
    if utf8 < b"\xe0":  # a lower code point, as in most tokens
        return False
    codes = _first_character(utf8)
    return codes is not None and not _is_mark(codes) and all(_within(_UNSPACED_BORDERS, code) for code in codes)


def continues_character(utf8: bytes) -> bool:
    """Whether a token's bytes begin within a character, or with a mark in one of these scripts."""
    codes = _first_character(utf8)
    return codes is None or _is_mark(codes)


def _is_mark(codes: tuple[int, int]) -> bool:
    return codes[0] == codes[1] and _within(_MARK_BORDERS, codes[0])


def _first_character(utf8: bytes) -> tuple[int, int] | None:
    """The first character's lowest and highest possible code point; None if it began before.

    They differ if bytes are missing at the end.
    """
    if not utf8 or utf8[0] < 0x80 or utf8[0] >= 0xF8:  # ASCII, or a byte that UTF-8 does not use
        return (0, 0)
    if utf8[0] < 0xC0:
        return None
    size = 2 if utf8[0] < 0xE0 else 3 if utf8[0] < 0xF0 else 4
    # The first byte of a character with `size` bytes holds its highest 7 - size bits, and all others hold 6.
    low = utf8[0] & (0x7F >> size)
    present = list(itertools.takewhile(lambda byte: 0x80 <= byte < 0xC0, utf8[1:size]))
    for byte in present:
        low = low << 6 | byte & 0x3F
    missing = 6 * (size - 1 - len(present))
    return low << missing, (low + 1 << missing) - 1
