"""Byte-level BPE (Radford et al. 2019; Liu et al. 2019): its files, its specification and its engine.

The specification comes from tokenizer.json as the `tokenizers` library writes it, or from GPT-2's vocab.json with
merges.txt. The engine encodes by that library.
"""

import dataclasses
import itertools
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from bert_jax.errors import UserError
from bert_jax.storage.files import write_json
from bert_jax.tokenization import word_bpe
from bert_jax.tokenization.engine import ChunkedTexts, LibraryEngine, add_tokens, template, text_tokens, turkic_case
from bert_jax.tokenization.specification import (
    BERT_ROLES,
    GPT2_ROLES,
    HASHED_IF_CHANGED,
    ROBERTA_ROLES,
    TURKIC_STEPS,
    UNHASHED,
    AddedToken,
    Roles,
    Template,
    TokenList,
    added_tokens,
    check_added_ids,
    id_dtype,
    named_roles,
    refuse_contradiction,
    refuse_repeated,
    stated_separators,
    stated_template,
    tokens_by_id,
    write_settings,
)
from bert_jax.tokenization.wordpiece import WHITE_SPACE

# The library's normalizers that a byte-level tokenizer may have; they take no settings.
NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents")
# bert_jax's name for several steps: ı of I and i of İ (specification.TURKIC_CASE).
TURKIC = "TurkicCase"
# Normalizers that neither create white space nor delete all characters between two white spaces.
CHUNKABLE_NORMALIZERS = ("NFC", "NFD", "Lowercase", TURKIC)
_SPACES = tuple(" \t\n\v\f\r")


@dataclass(frozen=True)
class ByteBPESpec(TokenList):
    """Everything that determines a byte-level BPE tokenizer's ids."""

    tokens: tuple[str, ...]  # by id; bytes are written as GPT-2 writes them
    merges: tuple[tuple[str, str], ...]  # by rank
    roles: Roles = ROBERTA_ROLES
    add_prefix_space: bool = False  # whether a text's first word gets a space before it
    normalizers: tuple[str, ...] = ()  # from NORMALIZERS, possibly after TURKIC, in the order in which they apply
    ignore_merges: bool = False  # whether pre-tokens in the vocabulary are not merged
    added: tuple[AddedToken, ...] = ()  # __post_init__ adds the roles' tokens
    adds_special_tokens: bool = field(default=True, metadata=UNHASHED)
    split_special_tokens: bool = field(default=False, metadata=UNHASHED)
    separators: int = field(default=0, metadata=HASHED_IF_CHANGED)  # between two texts; 0: as usual with the roles

    kind = "bpe"

    def __post_init__(self) -> None:
        refuse_repeated(self.tokens)
        if missing := [token for token in self.roles if token not in self.all_tokens()]:
            raise UserError(
                f"the vocabulary lacks {', '.join(missing)}. Name the tokens for cls, sep, pad, unk and mask in "
                "special_tokens_map.json of the same folder"
            )
        # The roles' tokens come first and with the same flags, so that equal tokenizers hash equal. As in RoBERTa, the
        # mask absorbs the space before it. Tokens that the model lacks keep their order, which determines their ids.
        mask = self.roles.mask_token if self.roles.mask_token not in self.roles[:-1] else None
        roles = [AddedToken(token, lstrip=token == mask) for token in dict.fromkeys(self.roles)]
        others = [token for token in self.added if token.content not in self.roles]
        places = {token.content: index for index, token in enumerate(self.added) if token.content not in self.tokens}
        ordered = sorted(roles + others, key=lambda token: places.get(token.content, -1))
        object.__setattr__(self, "added", tuple(ordered))

    @property
    def lowercase(self) -> bool:
        return "Lowercase" in self.normalizers

    @property
    def pair_separators(self) -> int:
        return self.separators or _usual_separators(self.roles)

    def is_inside(self, token: str) -> bool:
        return _token_text(token)[:1] not in _SPACES

    def surface(self, token: str) -> str:
        return _token_text(token).removeprefix(" ")

    def utf8(self, token: str) -> bytes:
        return _token_bytes(token).removeprefix(b" ")

    def within_text(self) -> "ByteBPESpec":
        return dataclasses.replace(self, add_prefix_space=False)

    @property
    def keeps_newlines(self) -> bool:
        # StripAccents deletes accents only, so white space does not move past other characters.
        normalizers = set(self.normalizers) <= {*CHUNKABLE_NORMALIZERS, "StripAccents"}
        across = [t for t in self.added if not t.special and (t.rstrip or re.search(r"\S\s", t.content))]
        return "Ċ" in self.tokens and normalizers and not across

    def write(self, directory: Path) -> None:
        """Writes vocab.json, merges.txt, tokenizer_config.json and special_tokens_map.json."""
        general = self.normalizers or self.ignore_merges or self.separators or not self.adds_special_tokens
        roberta = self.roles == ROBERTA_ROLES and not general
        config = {
            "tokenizer_class": "RobertaTokenizer" if roberta else "PreTrainedTokenizerFast",
            "add_prefix_space": self.add_prefix_space,
            "trim_offsets": True,
        }
        merges = "".join(f"{left} {right}\n" for left, right in self.merges)
        write_json(directory / "vocab.json", {token: index for index, token in enumerate(self.tokens)})
        (directory / "merges.txt").write_text(f"#version: 0.2\n{merges}", encoding="utf-8")
        write_settings(directory, config, self.roles, self.added)


def from_json(content: Mapping[str, Any], settings: Mapping[str, Any], lowercase: bool | None) -> ByteBPESpec:
    """Reads a tokenizer.json.

    Args:
        settings: tokenizer_config.json and the files next to it, which name the special tokens.

    Raises:
        UserError: it is another kind of BPE, or does not split text as GPT-2 does.
    """
    model = content["model"]
    splitter = content.get("pre_tokenizer") or {}
    options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback")
    problem = ""
    if splitter.get("type") != "ByteLevel" or not splitter.get("use_regex", True):
        problem = (
            f"its model is BPE with pre_tokenizer {splitter.get('type')}. Only ByteLevel with GPT-2's regular "
            "expression is supported. If the folder has a SentencePiece .model, give that file"
        )
    elif option := next((name for name in options if model.get(name)), None):
        problem = f"its model has {option} {model[option]!r}, which is not supported. Save it without"
    if problem:
        raise UserError(problem)
    added = added_tokens(content)
    known = {*model["vocab"], *(token.content for token in added)}
    roles = named_roles(settings, known, *_usual_roles(settings, known))
    # RobertaTokenizer in transformers, the class for the type roberta, makes both steps from its own settings.
    kind = settings.get("tokenizer_class") or settings.get("model_type")
    roberta = str(kind).lower().startswith("roberta")
    template = _template(content, settings, roles)
    separators = 2 if roberta else template.separators
    normalizer = content.get("normalizer") or {"normalizers": []}
    steps = normalizer.get("normalizers", [normalizer])
    first = len(TURKIC_STEPS) if steps[: len(TURKIC_STEPS)] == TURKIC_STEPS else 0
    names = tuple(step["type"] for step in steps[first:])
    if wrong := [name for name in names if name not in NORMALIZERS]:
        raise UserError(f"unsupported normalizer {wrong[0]}; choose from {', '.join(NORMALIZERS)}")
    spec = ByteBPESpec(
        tokens=tokens_by_id(model["vocab"]),
        merges=tuple(_merge(merge) for merge in model["merges"]),
        roles=roles,
        add_prefix_space=bool(settings.get("add_prefix_space")) if roberta else splitter["add_prefix_space"],
        normalizers=(TURKIC, *names) if first else names,
        ignore_merges=model.get("ignore_merges", False),
        added=added,
        adds_special_tokens=template.adds_special_tokens,
        separators=0 if separators == _usual_separators(roles) else separators or 0,
    )
    check_added_ids(content, spec.all_tokens())
    refuse_contradiction(lowercase, spec.lowercase)
    return spec


def from_files(
    vocabulary: Mapping[str, int], merges_file: Path, settings: Mapping[str, Any], lowercase: bool | None
) -> ByteBPESpec | word_bpe.WordBPESpec:
    """Builds a specification from the content of vocab.json and the file merges.txt.

    Raises:
        UserError: merges.txt is missing or broken, or is neither byte-level nor HerBERT's.
    """
    refuse_contradiction(lowercase, False)
    if not merges_file.exists():
        raise UserError(f"byte-level BPE needs {merges_file.name} in the same folder. Download it too")
    try:
        lines = merges_file.read_bytes().decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{merges_file} is not UTF-8 at byte {error.start}. Download it again") from None
    merges = [line.removesuffix("\r") for line in lines if line and not line.startswith("#version")]
    problem = ""
    if wrong := [line for line in merges if len(line.split(" ")) != 2]:
        problem = f"has the line {wrong[0][:40]!r}, not two tokens. Download it again"
    words = any(token.endswith(word_bpe.END) for token in (*vocabulary, *merges))
    # XLM and FlauBERT split text by rules of languages instead.
    if words and not problem and not str(settings.get("tokenizer_class")).startswith("Herbert"):
        problem = (
            f"marks the ends of words ({word_bpe.END}), and only HerbertTokenizer as tokenizer_class in "
            "tokenizer_config.json says how words are found. Give a folder with tokenizer.json"
        )
    if problem:
        raise UserError(f"{merges_file} {problem}")
    if words:
        return word_bpe.from_files(vocabulary, merges, settings, lowercase)
    roles = named_roles(settings, vocabulary, *_usual_roles(settings, vocabulary))
    return ByteBPESpec(
        tokens=tokens_by_id(vocabulary),
        merges=tuple(_merge(line) for line in merges),
        roles=roles,
        add_prefix_space=bool(settings.get("add_prefix_space", False)),
        adds_special_tokens=not _is_gpt2(settings, roles),
    )


def _usual_separators(roles: Roles) -> int:
    return 2 if roles.sep_token == ROBERTA_ROLES.sep_token else 1


def _template(content: Mapping[str, Any], settings: Mapping[str, Any], roles: Roles) -> Template:
    """The special tokens that a text gets: as its class in transformers adds them, otherwise as tokenizer.json does."""
    gpt2 = _is_gpt2(settings, roles)
    stated = stated_template(content, {} if gpt2 else settings, roles)
    # A class of another family makes its template itself, always with special tokens.
    usual = stated_separators(content.get("post_processor")) or _usual_separators(roles)
    return stated or Template(True, usual)


def _is_gpt2(settings: Mapping[str, Any], roles: Roles) -> bool:
    """Whether a tokenizer is GPT-2's, which adds no special tokens unless tokenizer.json's post_processor does.

    Raises:
        UserError: its settings add the first one only.
    """
    kind = settings.get("tokenizer_class") or settings.get("model_type")
    gpt2 = roles.cls_token == roles.sep_token or str(kind).lower().startswith("gpt2")
    if gpt2 and settings.get("add_bos_token"):
        raise UserError(f"it sets add_bos_token, which adds {roles.cls_token} before a text only. Set it to false")
    return gpt2


def _usual_roles(settings: Mapping[str, Any], known: Container[str]) -> tuple[Roles, ...]:
    """The sets of special tokens to choose from: only GPT-2's if no other set can begin or end a sequence.

    In a folder whose settings name GPT-2's token and neither cls nor sep, other tokens begin and end none either.
    """
    others = (ROBERTA_ROLES, BERT_ROLES)
    named = [value.get("content") if isinstance(value, dict) else value for value in map(settings.get, _ENDS)]
    ends = {token for token in named if token} or {
        token for roles in others for token in (roles.cls_token, roles.sep_token) if token in known
    }
    if GPT2_ROLES.sep_token in known and ends <= {GPT2_ROLES.sep_token}:
        return (GPT2_ROLES,)
    return others


def _merge(merge: Any) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return str(left), str(right)


# The settings that name the tokens around a text.
_ENDS = ("cls_token", "sep_token", "bos_token", "eos_token")

# GPT-2's character for each byte: the byte's own character if printable, otherwise the next from U+0100 on.
_PRINTING = (*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1))
_OTHERS = sorted({*range(256)}.difference(_PRINTING))
_BYTES = {chr(byte): byte for byte in _PRINTING} | {chr(256 + index): byte for index, byte in enumerate(_OTHERS)}


def _token_text(token: str) -> str:
    """A token's text. Bytes that do not form a whole character become U+FFFD."""
    return _token_bytes(token).decode("utf-8", "replace")


def _token_bytes(token: str) -> bytes:
    """A token's bytes. In tokens added by a user, characters stand for themselves."""
    if not all(character in _BYTES for character in token):
        return token.encode()
    return bytes(_BYTES[character] for character in token)


# The library splits text by GPT-2's regular expression (Radford et al. 2019), in which a word includes the space before
# it. The engine relies on one fact about any text: the expression splits before a space unless white space follows. For
# ASCII text it uses the whole expression.

# The white-space half of GPT-2's expression: a space, or the last of several, belongs to the word that follows it.
_SPLIT_SPACES = f" \\n{WHITE_SPACE}"
PRE_TOKENS = re.compile(f" ?[^{_SPLIT_SPACES}]+|[{_SPLIT_SPACES}]+(?![^{_SPLIT_SPACES}])|[{_SPLIT_SPACES}]+")
# GPT-2's expression for ASCII text.
_ASCII_PRE_TOKENS = re.compile("'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?[^\t-\r A-Za-z0-9]+")


class ByteBPEEngine(LibraryEngine):
    """Encodes by the library's byte-level BPE, in chunks that begin at a space with no white space after it.

    Most chunks begin with exactly one space, so a chunk's key is its text after that space. The key for a chunk without
    one begins with a space instead.
    """

    def __init__(self, spec: ByteBPESpec) -> None:
        super().__init__(library_tokenizer(spec), id_dtype(len(spec.all_tokens())))
        # A chunk has its own space.
        self._chunk_library = library_tokenizer(dataclasses.replace(spec, add_prefix_space=False))
        self._chunk_library.encode_special_tokens = True
        self._add_prefix_space = spec.add_prefix_space
        self._text_tokens = text_tokens(spec.added)
        # Tokens that are matched in normalized text may occur although the text itself lacks them.
        matched = any(token.normalized for token in spec.added if not token.special)
        self._whole = matched and bool(spec.normalizers)
        # Other normalizers may move the splits, so only ASCII text, which they leave alone, is split here.
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
                exceptions[index] = [_key(part) for part in PRE_TOKENS.findall(text)]
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


def library_normalizer(names: Sequence[str]) -> normalizers.Normalizer:
    """The library's normalizer with these steps."""
    steps = [turkic_case() if name == TURKIC else [getattr(normalizers, name)()] for name in names]
    return normalizers.Sequence(list(itertools.chain.from_iterable(steps)))


def library_tokenizer(spec: ByteBPESpec) -> tokenizers.Tokenizer:
    """The `tokenizers` library's tokenizer. Raises UserError if the merges do not fit the vocabulary."""
    vocabulary = {token: index for index, token in enumerate(spec.tokens)}
    try:
        model = models.BPE(vocab=vocabulary, merges=list(spec.merges), ignore_merges=spec.ignore_merges)
    except Exception as error:  # the library raises no narrower class
        raise UserError(f"the merges do not fit the vocabulary ({error}). Download both again") from None
    library = tokenizers.Tokenizer(model)
    if spec.normalizers:
        library.normalizer = library_normalizer(spec.normalizers)
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
