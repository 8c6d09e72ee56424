"""What decides a tokenizer's ids, as plain data, and the files that keep it: Google's and Hugging Face's.

Formats: vocab.txt of google-research/bert (a token a line, the line number is the id); tokenizer.json of the
`tokenizers` library; tokenizer_config.json and special_tokens_map.json of `transformers`.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from bert_jax.command import UserError

# Of BERT, in the order in which our own vocabularies hold them (ids 0 to 4).
PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# Longer words are unknown. transformers and the tokenizer.json files of published models say 100
# (google-research/bert, WordpieceTokenizer, says 200).
MAX_WORD_LENGTH = 100


@dataclass(frozen=True)
class AddedToken:
    """A token looked for before text is split: a special one, or a word that a user added to a vocabulary."""

    content: str
    special: bool = True
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


@dataclass(frozen=True)
class Vocabulary:
    """All that decides the ids of a WordPiece tokenizer, so that two of equal content are equal."""

    tokens: tuple[str, ...]  # by id
    lowercase: bool
    strip_accents: bool
    split_chinese: bool = True  # each CJK ideograph is a word
    clean_text: bool = True  # control characters dropped
    continuation_prefix: str = "##"
    max_word_length: int = MAX_WORD_LENGTH
    added: tuple[AddedToken, ...] = tuple(AddedToken(token) for token in SPECIAL_TOKENS)

    def __post_init__(self) -> None:
        first: dict[str, int] = {}
        for index, token in enumerate(self.tokens):
            if first.setdefault(token, index) != index:
                raise UserError(f"token {token!r} comes twice, as id {first[token]} and {index}. Mend the vocabulary")
        if missing := [token for token in SPECIAL_TOKENS if token not in first]:
            raise UserError(f"no {', '.join(missing)} in the vocabulary. Is it one of BERT? Add a line for each")

    def all_tokens(self) -> tuple[str, ...]:
        """Every token by id: those of the model, then the added ones that the model has not."""
        known = set(self.tokens)
        return self.tokens + tuple(token.content for token in self.added if token.content not in known)

    def special_ids(self) -> tuple[int, ...]:
        """The ids of the special tokens, ascending."""
        special = {token.content for token in self.added if token.special} | set(SPECIAL_TOKENS)
        return tuple(index for index, token in enumerate(self.all_tokens()) if token in special)

    def has_text_tokens(self) -> bool:
        """Whether an added token is looked for in ordinary text."""
        return any(not token.special for token in self.added)

    def content_hash(self) -> str:
        """sha256, hexadecimal."""
        content = json.dumps({"kind": "wordpiece"} | dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def build(self) -> tokenizers.Tokenizer:
        """The library's tokenizer of this content."""
        model = models.WordPiece(
            {token: index for index, token in enumerate(self.tokens)},
            unk_token=UNK,
            continuing_subword_prefix=self.continuation_prefix,
            max_input_chars_per_word=self.max_word_length,
        )
        library = tokenizers.Tokenizer(model)
        library.normalizer = normalizers.BertNormalizer(
            clean_text=self.clean_text,
            handle_chinese_chars=self.split_chinese,
            strip_accents=self.strip_accents,
            lowercase=self.lowercase,
        )
        library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        library.decoder = decoders.WordPiece(prefix=self.continuation_prefix)
        for token in self.added:
            options = dataclasses.asdict(token)
            added = tokenizers.AddedToken(options.pop("content"), **options)
            (library.add_special_tokens if token.special else library.add_tokens)([added])
        library.post_processor = processors.TemplateProcessing(
            single=f"{CLS}:0 $A:0 {SEP}:0",
            pair=f"{CLS}:0 $A:0 {SEP}:0 $B:1 {SEP}:1",
            special_tokens=[(token, library.token_to_id(token)) for token in (CLS, SEP)],
        )
        return library


def read(path: Path, lowercase: bool | None) -> Vocabulary:
    """The vocabulary of a folder, a tokenizer.json or a vocab.txt file; see `bert_jax.tokenizer.load`."""
    if not path.exists():
        raise UserError(f"no tokenizer at {path}. Give a tokenizer folder or a vocab.txt file")
    file = path
    if path.is_dir():
        file = path / "tokenizer.json"
        if not file.exists():
            file = path / "vocab.txt"
        if not file.exists():
            raise UserError(
                f"{path} holds neither tokenizer.json nor vocab.txt. Give a WordPiece tokenizer's folder "
                "(byte-level BPE and SentencePiece are not supported now)"
            )
    config_file = file.parent / "tokenizer_config.json"
    config = _read_json(config_file) if config_file.exists() else {}
    try:
        if file.suffix == ".json":
            return _from_json(_read_json(file), config, lowercase)
        if (file.parent / "added_tokens.json").exists() and path.is_dir():
            raise UserError("has added_tokens.json and no tokenizer.json. Save it again with a fast tokenizer")
        return _from_lines(file, config, lowercase)
    except UserError as error:
        raise UserError(f"tokenizer {file}: {error}") from None
    except (KeyError, AttributeError, TypeError, ValueError, StopIteration) as error:
        lacks = f"no field {error}" if isinstance(error, KeyError) else "a field that is not of the kind it should be"
        raise UserError(f"tokenizer {file}: {lacks}. Fetch or save the tokenizer again") from error


def write(vocabulary: Vocabulary, directory: Path) -> None:
    """Writes the four files of a BERT tokenizer folder, over those that are there."""
    directory.mkdir(parents=True, exist_ok=True)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL_TOKENS, strict=True))
    further = [token.content for token in vocabulary.added if token.special and token.content not in SPECIAL_TOKENS]
    special: dict[str, Any] = names | ({"additional_special_tokens": further} if further else {})
    config = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": vocabulary.lowercase,
        "strip_accents": vocabulary.strip_accents,
        "tokenize_chinese_chars": vocabulary.split_chinese,
    } | special
    (directory / "vocab.txt").write_text("".join(token + "\n" for token in vocabulary.tokens), encoding="utf-8")
    (directory / "tokenizer.json").write_text(vocabulary.build().to_str(pretty=True), encoding="utf-8")
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", special)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _from_json(content: dict[str, Any], config: dict[str, Any], lowercase: bool | None) -> Vocabulary:
    model, normalizer = content.get("model") or {}, content.get("normalizer") or {}
    splitter = content.get("pre_tokenizer") or {}
    # Files of old versions name no model type; a WordPiece one is known by its own field.
    kind = model.get("type") or ("WordPiece" if "max_input_chars_per_word" in model else "unknown")
    if kind != "WordPiece":
        raise UserError(f"its model is {kind}. Only WordPiece (BERT) is supported now")
    if normalizer.get("type") != "BertNormalizer" or splitter.get("type") != "BertPreTokenizer":
        raise UserError(
            f"it normalises by {normalizer.get('type')} and splits by {splitter.get('type')}. "
            "Only BertNormalizer with BertPreTokenizer is supported now"
        )
    if model.get("unk_token") != UNK:
        raise UserError(f"its unknown token is {model.get('unk_token')!r}. Only {UNK} is supported now")
    by_id = {index: token for token, index in model["vocab"].items()}
    if sorted(by_id) != list(range(len(model["vocab"]))):
        raise UserError("its ids do not run from 0 without gaps. Give a tokenizer of contiguous ids")
    added = sorted(content.get("added_tokens") or [], key=lambda token: token["id"])
    flags = ("content", "special", "single_word", "lstrip", "rstrip", "normalized")
    stated = _first(config.get("do_lower_case"), normalizer["lowercase"])
    _refuse_contradiction(lowercase, stated)
    vocabulary = Vocabulary(
        tokens=tuple(by_id[index] for index in range(len(by_id))),
        lowercase=stated,
        # Without a setting, accents go with the capitals, as in google-research/bert's BasicTokenizer.
        strip_accents=_first(config.get("strip_accents"), normalizer["strip_accents"], stated),
        split_chinese=_first(config.get("tokenize_chinese_chars"), normalizer["handle_chinese_chars"]),
        clean_text=normalizer["clean_text"],
        continuation_prefix=model["continuing_subword_prefix"],
        max_word_length=model["max_input_chars_per_word"],
        added=_with_specials(AddedToken(**{flag: token[flag] for flag in flags}) for token in added),
    )
    tokens = vocabulary.all_tokens()
    if wrong := [token for token in added if tokens.index(token["content"]) != token["id"]]:
        raise UserError(f"added token {wrong[0]['content']!r} has id {wrong[0]['id']}, out of order. Renumber it")
    return vocabulary


def _from_lines(file: Path, config: dict[str, Any], lowercase: bool | None) -> Vocabulary:
    try:
        lines = file.read_bytes().decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 at byte {error.start}. Is it a vocab.txt of a token a line?") from None
    if lines[-1] == "":
        lines.pop()
    tokens = tuple(line.removesuffix("\r") for line in lines)
    stated = config.get("do_lower_case")
    _refuse_contradiction(lowercase, stated)
    chosen = _first(stated, lowercase, not _has_capitals(tokens))
    return Vocabulary(
        tokens=tokens,
        lowercase=chosen,
        strip_accents=_first(config.get("strip_accents"), chosen),  # as Google's BasicTokenizer: with lower-casing
        split_chinese=_first(config.get("tokenize_chinese_chars"), True),
    )


def _with_specials(added: Iterable[AddedToken]) -> tuple[AddedToken, ...]:
    """The added tokens with the five of BERT first and special, so that equal tokenizers hash equal."""
    by_content = {token.content: token for token in added}
    five = tuple(AddedToken(token) for token in SPECIAL_TOKENS)
    return five + tuple(token for content, token in by_content.items() if content not in SPECIAL_TOKENS)


def _has_capitals(tokens: tuple[str, ...]) -> bool:
    """Whether a token other than a marker in brackets ([CLS], <S>) holds a capital."""
    return any(token != token.lower() and token[0] + token[-1] not in ("[]", "<>") for token in tokens)


def _refuse_contradiction(argument: bool | None, stated: bool | None) -> None:
    if argument is not None and stated is not None and argument != stated:
        flag, truth = (
            ("--lowercase" if argument else "--nolowercase"),
            ("lower-cases" if stated else "keeps case"),
        )
        raise UserError(f"{flag} was given, but its own settings say that it {truth}. Leave the flag out")


def _first(*values: bool | None) -> bool:
    return next(value for value in values if value is not None)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{file} is not JSON ({error}). Fetch or save the tokenizer again") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} holds no JSON object. Fetch or save the tokenizer again")
    return content
