"""The specification of a SentencePiece tokenizer (Unigram: Kudo 2018; BPE), read from a model or a tokenizer.json.

It supports two numberings. In XLM-R's (that of fairseq), <s> <pad> </s> <unk> are 0 to 3, the model's pieces follow
with ids one higher than in the model, and <mask> is last. In ALBERT's, ids are those of the model, whose pieces
include [CLS], [SEP], <pad>, <unk> and [MASK]. Read `SentencePieceSpec`, `from_model` and `from_json`, which rebuilds a
model from the tokenizer.json of a Unigram model; what they use comes first.
"""

import base64
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from bert_jax.errors import UserError
from bert_jax.tokenization.specification import (
    ALBERT_ROLES,
    BERT_ROLES,
    ROBERTA_ROLES,
    Roles,
    added_tokens,
    check_added_ids,
    named_roles,
    refuse_contradiction,
    refuse_repeated,
    special_token_map,
    write_settings,
)
from bert_jax.tokenization.wordpiece import has_capitals

schema: Any = sentencepiece_model_pb2  # protobuf creates its classes at import
# The first pieces of a model that XLM-R's numbering requires.
FAIRSEQ_HEAD = ("<unk>", "<s>", "</s>")
_PIECE = schema.ModelProto.SentencePiece
# The steps that precede a model's own rules in ALBERT's files, in their order.
_QUOTES = [{"type": "Replace", "pattern": {"String": marks}, "content": '"'} for marks in ("``", "''")]
_ACCENTS = [{"type": "NFKD"}, {"type": "StripAccents"}]
_LOWERCASE = [{"type": "Lowercase"}]
# SentencePiece drops spaces at the ends of a text and joins runs of spaces.
SPACES_AT_ENDS, RUNS_OF_SPACES = r"\A +| +\z", " {2,}"
_DROP = {"type": "Replace", "pattern": {"Regex": SPACES_AT_ENDS}, "content": ""}
_JOIN = {"type": "Replace", "pattern": {"Regex": RUNS_OF_SPACES}, "content": " "}
# How transformers converts this, before Metaspace, which treats a space at the beginning alike; it once had _JOIN only.
_CONVERTED = [{"type": "Strip", "strip_left": False, "strip_right": True}, _JOIN | {"content": "▁"}]
# Unicode's white space but the space, at which WhitespaceSplit splits.
_WHITE_SPACE = "\t\n\v\f\r\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))


def parse(model: bytes) -> Any:
    """The parsed model. Raises UserError for bytes that are not a SentencePiece model."""
    try:
        parsed = schema.ModelProto.FromString(model)
    except DecodeError:
        parsed = schema.ModelProto()
    if not parsed.pieces:
        raise UserError("not a SentencePiece model. Download it again")
    return parsed


def refuse_damaged(model: bytes) -> None:
    """Raises UserError for a model that `sentencepiece` rejects, or whose pieces are not valid UTF-8."""
    if not all(isinstance(piece.piece, str) for piece in parse(model).pieces):
        raise UserError("damaged SentencePiece model: a piece is not UTF-8. Download it again")
    try:
        sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise UserError(f"damaged SentencePiece model: {error}. Download it again") from None


def folds_case(model: Any) -> bool:
    """Whether the model's own normalization lower-cases text."""
    rules = schema.ModelProto(normalizer_spec=model.normalizer_spec).SerializeToString()
    return bool(sentencepiece.SentencePieceNormalizer(model_proto=rules).normalize("A").endswith("a"))


@functools.cache
def white_space_rules() -> bytes:
    """The normalization rules that replace all white space by spaces, as a model stores them."""
    sentencepiece.set_min_log_level(1)  # it would report the number of rules
    compiled = sentencepiece.SentencePieceNormalizer(norm_map=[(space, " ") for space in _WHITE_SPACE])
    return bytes(schema.NormalizerSpec.FromString(compiled.serialized_normalizer_spec()).precompiled_charsmap)


class Preparation(NamedTuple):
    """What a tokenizer.json does to a text before pieces are looked up, by the names of SentencePieceSpec."""

    replace_quotes: bool
    strip_accents: bool
    do_lower_case: bool
    rules: bytes  # of the model's own normalization
    add_dummy_prefix: bool  # whether it puts a space before a text


def _steps(normalizer: Mapping[str, Any]) -> list[Any]:
    if "normalizers" not in normalizer:
        return [normalizer]
    return [step for part in normalizer["normalizers"] for step in _steps(part)]


def preparation(content: Mapping[str, Any]) -> Preparation:
    """Reads the normalizer and the pre-tokenizer of a tokenizer.json whose model is Unigram.

    A file with Precompiled was converted from a SentencePiece model. It is read as that model, from which conversions
    differ in rare white space. Raises UserError for steps that `sentencepiece` does not follow.
    """
    steps = _steps(content.get("normalizer") or {"normalizers": []})
    found = []
    for group in (_QUOTES, _ACCENTS, _LOWERCASE):
        found.append(steps[: len(group)] == group)
        steps = steps[len(group) :] if found[-1] else steps
    rules = b""
    if steps and steps[0]["type"] == "Precompiled":
        rules = base64.b64decode(steps.pop(0)["precompiled_charsmap"] or "")
    if steps not in ([], [_JOIN], [_DROP, _JOIN]) and not (rules and steps == _CONVERTED):
        raise UserError(
            f"unsupported normalizer {steps[0]['type']} for a Unigram model; supported are, in this order, Replace of "
            "`` and '', NFKD with StripAccents, Lowercase, Precompiled. Give its SentencePiece .model"
        )
    splitter = content.get("pre_tokenizer") or {}
    *first, metaspace = splitter.get("pretokenizers") or [splitter]
    split = [part["type"] for part in first] == ["WhitespaceSplit"]
    if metaspace.get("type") != "Metaspace" or metaspace["replacement"] != "▁" or not (split or not first):
        kind = splitter.get("type")
        raise UserError(f"its model is Unigram with pre_tokenizer {kind}. Only Metaspace with ▁ is supported")
    prefix = metaspace.get("prepend_scheme", "always" if metaspace.get("add_prefix_space", True) else "never")
    if split and prefix != "always":
        raise UserError(
            f"its pre_tokenizer has WhitespaceSplit and prepend_scheme {prefix!r}. Only 'always' is supported"
        )
    if not split and steps != [_DROP, _JOIN] and not (rules and steps):
        advice = "Give its SentencePiece .model" if rules else "Put WhitespaceSplit before it"
        raise UserError(f"its pre_tokenizer Metaspace keeps white space that SentencePiece drops. {advice}")
    if split and not rules:
        rules = white_space_rules()
    quotes, accents, lower = found
    return Preparation(quotes, accents, lower, rules, prefix != "never")


def unigram_model(content: Mapping[str, Any], roles: Roles, prepared: Preparation) -> bytes:
    """The serialized SentencePiece model of a tokenizer.json whose model is Unigram."""
    vocabulary = [(piece, score) for piece, score in content["model"]["vocab"]]
    unk = content["model"]["unk_id"]
    # XLM-R's ids are fairseq's, which begin with four tokens where its SentencePiece model begins with other three.
    if roles == ROBERTA_ROLES:
        head = tuple(piece for piece, _ in vocabulary[:4])
        if head != ("<s>", "<pad>", "</s>", "<unk>"):
            raise UserError(f"its first tokens are {', '.join(head)}; XLM-R's are <s>, <pad>, </s>, <unk>")
        rest = vocabulary[4:-1] if vocabulary[-1][0] == roles.mask_token else vocabulary[4:]
        vocabulary, unk = [(piece, 0.0) for piece in FAIRSEQ_HEAD] + rest, 0
    special = {token.content for token in added_tokens(content) if token.special} | set(roles)
    fallback = bool(content["model"].get("byte_fallback"))
    model = schema.ModelProto()
    for index, (piece, score) in enumerate(vocabulary):
        kind = _PIECE.NORMAL
        if index == unk:
            kind = _PIECE.UNKNOWN
        elif piece in special:
            kind = _PIECE.CONTROL
        elif fallback and len(piece) == len("<0x00>") and piece.startswith("<0x"):
            kind = _PIECE.BYTE
        model.pieces.add(piece=piece, score=score, type=kind)
    trainer, spec = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.vocab_size = schema.TrainerSpec.UNIGRAM, len(vocabulary)
    trainer.byte_fallback = fallback
    trainer.unk_id, trainer.unk_piece = unk, vocabulary[unk][0]
    trainer.bos_id = trainer.eos_id = trainer.pad_id = -1
    spec.precompiled_charsmap, spec.add_dummy_prefix = prepared.rules, prepared.add_dummy_prefix
    return bytes(model.SerializeToString())


_KINDS = {schema.TrainerSpec.UNIGRAM: "unigram", schema.TrainerSpec.BPE: "sentencepiece_bpe"}
# The types of pieces that are special tokens.
MARKED = (schema.ModelProto.SentencePiece.UNKNOWN, schema.ModelProto.SentencePiece.CONTROL)
SPACE = "▁"  # U+2581, which represents a space in pieces
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # a piece that stands for a byte
XLM_R_FILE, ALBERT_FILE = "sentencepiece.bpe.model", "spiece.model"


@dataclass(frozen=True)
class SentencePieceSpec:
    """Everything that determines the ids of a SentencePiece tokenizer.

    model             a serialized ModelProto
    roles             ROBERTA_ROLES: XLM-R's numbering; others: the model's own, followed by the mask if it lacks one
    do_lower_case     lower-case before the model's own normalization, as ALBERT does
    strip_accents     likewise, drop accents after the compatibility decomposition (NFKD)
    replace_quotes    likewise, replace `` and '' by a double quote
    """

    model: bytes
    roles: Roles = ROBERTA_ROLES
    do_lower_case: bool = False
    strip_accents: bool = False
    replace_quotes: bool = False

    def __post_init__(self) -> None:
        if self.parsed.trainer_spec.model_type not in _KINDS:
            raise UserError("its model type is neither Unigram nor BPE. Train the model with one of these types")
        pieces = self.pieces
        if self.fairseq and pieces[:3] != FAIRSEQ_HEAD:
            raise UserError(
                f"its first pieces are {', '.join(pieces[:3])}; XLM-R's numbering requires <unk>, <s>, </s>"
            )
        if self.fairseq and self.prepares:
            raise UserError("XLM-R's numbering supports only the model's own normalization. Train it with nmt_nfkc_cf")
        known = self.all_tokens()
        refuse_repeated(known)
        if missing := [token for token in self.roles if token not in known]:
            raise UserError(f"its pieces lack {', '.join(missing)}. Give a model that is numbered as XLM-R or ALBERT")
        spec = self.parsed.normalizer_spec
        if not spec.escape_whitespaces or self.parsed.trainer_spec.treat_whitespace_as_suffix:
            raise UserError("models that do not mark the beginning of words are not supported. Train with the defaults")

    def __reduce__(self) -> tuple[type["SentencePieceSpec"], tuple[Any, ...]]:
        return SentencePieceSpec, tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    @functools.cached_property
    def parsed(self) -> Any:
        """The parsed ModelProto."""
        return parse(self.model)

    @functools.cached_property
    def pieces(self) -> tuple[str, ...]:
        """The model's pieces, in its order."""
        return tuple(piece.piece for piece in self.parsed.pieces)

    @property
    def fairseq(self) -> bool:
        return self.roles == ROBERTA_ROLES

    @property
    def kind(self) -> str:
        return _KINDS[self.parsed.trainer_spec.model_type]

    @property
    def prepares(self) -> bool:
        """Whether text is normalized before the model's own normalization."""
        return self.do_lower_case or self.strip_accents or self.replace_quotes

    @property
    def pair_separators(self) -> int:
        return 2 if self.fairseq else 1

    @property
    def adds_special_tokens(self) -> bool:
        return True

    @property
    def keeps_newlines(self) -> bool:
        return False  # nearly all models normalize them to spaces

    @functools.cached_property
    def lowercase(self) -> bool:
        return self.do_lower_case or folds_case(self.parsed)

    def all_tokens(self) -> tuple[str, ...]:
        if self.fairseq:
            return ("<s>", "<pad>", "</s>", "<unk>", *self.pieces[3:], "<mask>")
        mask = () if self.roles.mask_token in self.pieces else (self.roles.mask_token,)
        return self.pieces + mask

    def special_ids(self) -> tuple[int, ...]:
        special = {piece.piece for piece in self.parsed.pieces if piece.type in MARKED} | set(self.roles)
        return tuple(index for index, token in enumerate(self.all_tokens()) if token in special)

    def is_inside(self, token: str) -> bool:
        return not token.startswith(SPACE)

    def surface(self, token: str) -> str:
        return token.removeprefix(SPACE)

    def utf8(self, token: str) -> bytes:
        if self.parsed.trainer_spec.byte_fallback and _BYTE.fullmatch(token):
            return bytes.fromhex(token[3:5])
        return self.surface(token).encode()

    def within_text(self) -> "SentencePieceSpec":
        model = parse(self.model)
        model.normalizer_spec.add_dummy_prefix = False
        return dataclasses.replace(self, model=model.SerializeToString())

    def of_tasks(self) -> "SentencePieceSpec":
        return self  # its special tokens without a role are control symbols of the model, which stand for no text

    def content_hash(self) -> str:
        """The hash of everything that determines ids, which excludes training settings and the file's layout."""
        model, spec, trainer = self.parsed, self.parsed.normalizer_spec, self.parsed.trainer_spec
        content = {
            "kind": self.kind,
            "pieces": [(piece.piece, piece.score, piece.type) for piece in model.pieces],
            "rules": hashlib.sha256(spec.precompiled_charsmap).hexdigest(),
            "add_dummy_prefix": spec.add_dummy_prefix,
            "remove_extra_whitespaces": spec.remove_extra_whitespaces,
            "byte_fallback": trainer.byte_fallback,
            "roles": self.roles,
            "do_lower_case": self.do_lower_case,
            "strip_accents": self.strip_accents,
            "replace_quotes": self.replace_quotes,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def write(self, directory: Path) -> None:
        """Writes the model, tokenizer_config.json and special_tokens_map.json."""
        special = {"bos_token": self.roles.cls_token, "eos_token": self.roles.sep_token}
        # transformers' own classes rebuild these tokenizers from the vocabulary alone.
        unigram = self.kind == "unigram" and not self.parsed.trainer_spec.byte_fallback
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if unigram and self.fairseq and not self.prepares:
            config = {"tokenizer_class": "XLMRobertaTokenizer"}
        elif unigram and self.roles == ALBERT_ROLES and self.replace_quotes:
            config = {"tokenizer_class": "AlbertTokenizer"}
        settings = {"do_lower_case": self.do_lower_case, "keep_accents": not self.strip_accents}
        if self.replace_quotes != (self.roles == ALBERT_ROLES):
            settings["replace_quotes"] = self.replace_quotes
        (directory / (XLM_R_FILE if self.fairseq else ALBERT_FILE)).write_bytes(self.model)
        write_settings(directory, config | settings, special | special_token_map(self.roles))


def from_model(file: Path, settings: Mapping[str, Any], lowercase: bool | None) -> SentencePieceSpec:
    """Reads a SentencePiece .model: in its own numbering if [CLS] is among its pieces, otherwise in XLM-R's.

    In its own numbering the settings state how text is prepared, by default as for ALBERT where the roles are ALBERT's.
    """
    model = file.read_bytes()
    refuse_damaged(model)
    pieces = {piece.piece for piece in parse(model).pieces}
    roles = ROBERTA_ROLES
    if BERT_ROLES.cls_token in pieces:
        roles = named_roles(settings, pieces | {BERT_ROLES.mask_token}, ALBERT_ROLES, BERT_ROLES)
    if roles == ROBERTA_ROLES:
        return _checked_case(SentencePieceSpec(model, roles), lowercase)
    chosen = {"do_lower_case": False, "keep_accents": True, "replace_quotes": False}
    if roles == ALBERT_ROLES:
        lower = lowercase if lowercase is not None else not has_capitals(tuple(pieces))
        chosen = {"do_lower_case": lower, "keep_accents": False, "replace_quotes": True}
    chosen |= {name: settings[name] for name in chosen if settings.get(name) is not None}
    read = SentencePieceSpec(
        model,
        roles,
        do_lower_case=chosen["do_lower_case"],
        strip_accents=not chosen["keep_accents"],
        replace_quotes=chosen["replace_quotes"],
    )
    return _checked_case(read, lowercase)


def from_json(content: Mapping[str, Any], settings: Mapping[str, Any], lowercase: bool | None) -> SentencePieceSpec:
    """Reads a tokenizer.json whose model is Unigram, by rebuilding its SentencePiece model.

    Raises UserError for a normalizer or pre-tokenizer that `sentencepiece` does not follow.
    """
    known = {piece for piece, _ in content["model"]["vocab"]} | {token.content for token in added_tokens(content)}
    roles = named_roles(settings, known, ROBERTA_ROLES, ALBERT_ROLES, BERT_ROLES)
    prepared = preparation(content)
    model = unigram_model(content, roles, prepared)
    refuse_damaged(model)
    read = SentencePieceSpec(
        model,
        roles,
        do_lower_case=prepared.do_lower_case,
        strip_accents=prepared.strip_accents,
        replace_quotes=prepared.replace_quotes,
    )
    check_added_ids(content, read.all_tokens())
    return _checked_case(read, lowercase)


def _checked_case(content: SentencePieceSpec, lowercase: bool | None) -> SentencePieceSpec:
    refuse_contradiction(lowercase, content.lowercase)
    return content
