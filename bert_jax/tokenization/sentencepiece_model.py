"""The specification of a SentencePiece tokenizer (Unigram: Kudo 2018; BPE), read from a model or a tokenizer.json.

It supports three numberings. In XLM-R's, which comes from fairseq, <s> <pad> </s> <unk> are 0 to 3, the model's pieces
follow with ids one higher than in the model, and <mask> is last. CamemBERT's has other first tokens. In ALBERT's, ids
are the model's own, whose pieces include [CLS], [SEP], <pad>, <unk> and [MASK]. Read `SentencePieceSpec` first, then
`from_model` and `from_json`, which rebuilds a model from the tokenizer.json of a Unigram model.
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
from typing import Any

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
    stated_template,
    write_settings,
)
from bert_jax.tokenization.wordpiece import has_capitals

schema: Any = sentencepiece_model_pb2  # protobuf creates its classes at import
SPACE = "▁"  # U+2581, which represents a space in pieces
# The types of pieces that are special tokens.
MARKED = (schema.ModelProto.SentencePiece.UNKNOWN, schema.ModelProto.SentencePiece.CONTROL)
XLM_R_FILE, ALBERT_FILE = "sentencepiece.bpe.model", "spiece.model"
# SentencePiece drops spaces at both ends of a text and joins runs of spaces.
SPACES_AT_ENDS, RUNS_OF_SPACES = r"\A +| +\z", " {2,}"
_KINDS = {schema.TrainerSpec.UNIGRAM: "unigram", schema.TrainerSpec.BPE: "sentencepiece_bpe"}
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # a piece that stands for a byte
# The first pieces of a model that XLM-R's numbering requires.
_FAIRSEQ_HEAD = ("<unk>", "<s>", "</s>")
ROBERTA_HEAD = ("<s>", "<pad>", "</s>", "<unk>")  # XLM-R's first tokens
# CamemBERT's first tokens, which come before all pieces but the model's first one.
CAMEMBERT_HEAD = ("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED")
# Unicode's white space but the space, at which WhitespaceSplit splits.
_WHITE_SPACE = "\t\n\v\f\r\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
# The steps before a model's own rules in ALBERT's tokenizer.json, in their order.
_QUOTES = [{"type": "Replace", "pattern": {"String": marks}, "content": '"'} for marks in ("``", "''")]
_ACCENTS = [{"type": "NFKD"}, {"type": "StripAccents"}]
_LOWERCASE = [{"type": "Lowercase"}]
_DROP = {"type": "Replace", "pattern": {"Regex": SPACES_AT_ENDS}, "content": ""}
_JOIN = {"type": "Replace", "pattern": {"Regex": RUNS_OF_SPACES}, "content": " "}
# transformers' form of _DROP and _JOIN, before Metaspace, which treats a space at the beginning alike. It once had
# _JOIN only.
_CONVERTED = [{"type": "Strip", "strip_left": False, "strip_right": True}, _JOIN | {"content": SPACE}]


def parse(model: bytes) -> Any:
    """Parses a serialized model.

    Raises:
        UserError: the bytes are not a SentencePiece model.
    """
    try:
        parsed = schema.ModelProto.FromString(model)
    except DecodeError:
        parsed = schema.ModelProto()
    if not parsed.pieces:
        raise UserError("not a SentencePiece model. Download it again")
    return parsed


@dataclass(frozen=True)
class SentencePieceSpec:
    """Everything that determines a SentencePiece tokenizer's ids.

    model             a serialized ModelProto
    roles             ROBERTA_ROLES: XLM-R's numbering; others: the model's own, followed by the mask if it lacks one
    do_lower_case     lower-case before the model's own normalization, as ALBERT does
    strip_accents     likewise, drop accents after the compatibility decomposition (NFKD)
    replace_quotes    likewise, replace `` and '' by a double quote
    adds_special_tokens, split_special_tokens   as in TokenizerSpec; no text's ids depend on them
    camembert         XLM-R's special tokens in CamemBERT's numbering
    """

    model: bytes
    roles: Roles = ROBERTA_ROLES
    do_lower_case: bool = False
    strip_accents: bool = False
    replace_quotes: bool = False
    adds_special_tokens: bool = True
    split_special_tokens: bool = False
    camembert: bool = False

    keeps_newlines = False  # nearly all models normalize them to spaces

    def __post_init__(self) -> None:
        trainer, normalizer, known = self.parsed.trainer_spec, self.parsed.normalizer_spec, self.all_tokens()
        problem = ""
        if trainer.model_type not in _KINDS:
            problem = "its model type is neither Unigram nor BPE. Train the model with one of these types"
        elif self.fairseq and self.pieces[:3] != _FAIRSEQ_HEAD:
            problem = f"its first pieces are {', '.join(self.pieces[:3])}; XLM-R's numbering requires <unk>, <s>, </s>"
        elif self.fairseq and self.prepares:
            problem = "XLM-R's numbering supports only the model's own normalization. Train it with nmt_nfkc_cf"
        elif missing := [token for token in self.roles if token not in known]:
            problem = f"its pieces lack {', '.join(missing)}. Give a model that is numbered as XLM-R or ALBERT"
        elif not normalizer.escape_whitespaces or trainer.treat_whitespace_as_suffix:
            problem = "models that do not mark the beginning of words are not supported. Train with the defaults"
        if problem:
            raise UserError(problem)
        # Last, because with a wrong head XLM-R's numbering itself would repeat tokens.
        refuse_repeated(known)

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

    @functools.cached_property
    def lowercase(self) -> bool:
        rules = schema.ModelProto(normalizer_spec=self.parsed.normalizer_spec).SerializeToString()
        own_rules = sentencepiece.SentencePieceNormalizer(model_proto=rules)
        return self.do_lower_case or bool(own_rules.normalize("A").endswith("a"))

    def all_tokens(self) -> tuple[str, ...]:
        if self.camembert:
            return (*CAMEMBERT_HEAD, *self.pieces[1:], "<mask>")
        if self.fairseq:
            return (*ROBERTA_HEAD, *self.pieces[3:], "<mask>")
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
        return self  # special tokens without a role are the model's control symbols, which stand for no text

    def content_hash(self) -> str:
        """The hash over everything that determines ids. Training settings and the file's layout stay out."""
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
        } | ({"camembert": True} if self.camembert else {})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def write(self, directory: Path) -> None:
        """Writes the model, tokenizer_config.json and special_tokens_map.json."""
        # transformers' own classes rebuild these tokenizers from the vocabulary alone.
        unigram = self.kind == "unigram" and not self.parsed.trainer_spec.byte_fallback
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if not self.adds_special_tokens:
            pass
        elif unigram and self.fairseq and not self.prepares:
            config = {"tokenizer_class": "CamembertTokenizer" if self.camembert else "XLMRobertaTokenizer"}
        elif unigram and self.roles == ALBERT_ROLES and self.replace_quotes:
            config = {"tokenizer_class": "AlbertTokenizer"}
        config |= {"do_lower_case": self.do_lower_case, "keep_accents": not self.strip_accents}
        if self.replace_quotes != (self.roles == ALBERT_ROLES):
            config["replace_quotes"] = self.replace_quotes
        (directory / (XLM_R_FILE if self.fairseq else ALBERT_FILE)).write_bytes(self.model)
        write_settings(directory, config, self.roles)


def from_model(file: Path, settings: Mapping[str, Any], lowercase: bool | None) -> SentencePieceSpec:
    """Reads a SentencePiece .model: in its own numbering if [CLS] is among its pieces, otherwise in XLM-R's.

    In its own numbering the settings tell how text is prepared. With ALBERT's roles, they default to ALBERT's.
    """
    model = file.read_bytes()
    _refuse_damaged(model)
    pieces = {piece.piece for piece in parse(model).pieces}
    roles = ROBERTA_ROLES
    if BERT_ROLES.cls_token in pieces:
        roles = named_roles(settings, pieces | {BERT_ROLES.mask_token}, ALBERT_ROLES, BERT_ROLES)
    chosen = {"do_lower_case": False, "keep_accents": True, "replace_quotes": False}
    if roles == ALBERT_ROLES:
        lower = lowercase if lowercase is not None else not has_capitals(tuple(pieces))
        chosen = {"do_lower_case": lower, "keep_accents": False, "replace_quotes": True}
    if roles != ROBERTA_ROLES:
        chosen |= {name: settings[name] for name in chosen if settings.get(name) is not None}
    kind = str(settings.get("tokenizer_class") or settings.get("model_type")).lower()
    spec = SentencePieceSpec(
        model,
        roles,
        chosen["do_lower_case"],
        not chosen["keep_accents"],
        chosen["replace_quotes"],
        camembert=roles == ROBERTA_ROLES and kind.startswith("camembert"),
    )
    refuse_contradiction(lowercase, spec.lowercase)
    return spec


def _refuse_damaged(model: bytes) -> None:
    """Raises UserError if `sentencepiece` rejects a model, or if its pieces are not valid UTF-8."""
    if not all(isinstance(piece.piece, str) for piece in parse(model).pieces):
        raise UserError("damaged SentencePiece model: a piece is not UTF-8. Download it again")
    try:
        sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise UserError(f"damaged SentencePiece model: {error}. Download it again") from None


def from_json(content: Mapping[str, Any], settings: Mapping[str, Any], lowercase: bool | None) -> SentencePieceSpec:
    """Reads a tokenizer.json whose model is Unigram, by rebuilding its SentencePiece model.

    A file with the step Precompiled was converted from a SentencePiece model. It is read as this model, from which
    conversions differ in rare white space.

    Raises:
        UserError: `sentencepiece` cannot reproduce the normalizer or pre-tokenizer.
    """
    known = {piece for piece, _ in content["model"]["vocab"]} | {token.content for token in added_tokens(content)}
    roles = named_roles(settings, known, ROBERTA_ROLES, ALBERT_ROLES, BERT_ROLES)
    steps = _steps(content.get("normalizer") or {"normalizers": []})
    prepares = []
    for group in (_QUOTES, _ACCENTS, _LOWERCASE):
        prepares.append(steps[: len(group)] == group)
        steps = steps[len(group) :] if prepares[-1] else steps
    quotes, accents, lower = prepares
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
    # Files of older versions of the library have add_prefix_space instead of prepend_scheme.
    prefix = metaspace.get("prepend_scheme", "always" if metaspace.get("add_prefix_space", True) else "never")
    problem = ""
    if metaspace.get("type") != "Metaspace" or metaspace["replacement"] != SPACE or not (split or not first):
        kind = splitter.get("type")
        problem = f"its model is Unigram with pre_tokenizer {kind}. Only Metaspace with {SPACE} is supported"
    elif split and prefix != "always":
        problem = f"its pre_tokenizer has WhitespaceSplit and prepend_scheme {prefix!r}. Only 'always' is supported"
    elif not split and steps != [_DROP, _JOIN] and not (rules and steps):
        advice = "Give its SentencePiece .model" if rules else "Put WhitespaceSplit before it"
        problem = f"its pre_tokenizer Metaspace keeps white space that SentencePiece drops. {advice}"
    if problem:
        raise UserError(problem)
    if split and not rules:
        rules = white_space_rules()
    model = _unigram_model(content, roles, rules, prefix != "never")
    _refuse_damaged(model)
    template = stated_template(content, settings, roles)
    adds = template is None or template.adds_special_tokens
    camembert = roles == ROBERTA_ROLES and content["model"]["vocab"][0][0] == CAMEMBERT_HEAD[0]
    spec = SentencePieceSpec(model, roles, lower, accents, quotes, adds, camembert=camembert)
    if adds and template and template.separators != spec.pair_separators:
        raise UserError(
            f"its post_processor puts {template.separators} separators between two texts; supported with these special "
            f"tokens are {spec.pair_separators}"
        )
    check_added_ids(content, spec.all_tokens())
    refuse_contradiction(lowercase, spec.lowercase)
    return spec


def _steps(normalizer: Mapping[str, Any]) -> list[Any]:
    if "normalizers" not in normalizer:
        return [normalizer]
    return [step for part in normalizer["normalizers"] for step in _steps(part)]


@functools.cache
def white_space_rules() -> bytes:
    """The normalization rules that replace all white space by spaces, as a model stores them."""
    sentencepiece.set_min_log_level(1)  # it would report the number of rules
    compiled = sentencepiece.SentencePieceNormalizer(norm_map=[(space, " ") for space in _WHITE_SPACE])
    return bytes(schema.NormalizerSpec.FromString(compiled.serialized_normalizer_spec()).precompiled_charsmap)


def _unigram_model(content: Mapping[str, Any], roles: Roles, rules: bytes, add_dummy_prefix: bool) -> bytes:
    """Serializes the SentencePiece model for a tokenizer.json whose model is Unigram."""
    vocabulary = [(piece, score) for piece, score in content["model"]["vocab"]]
    unk = content["model"]["unk_id"]
    # XLM-R's ids are fairseq's, which begin with four tokens, while its SentencePiece model begins with three others.
    if roles == ROBERTA_ROLES:
        head = tuple(piece for piece, _ in vocabulary[:7])
        known = next((k for k in (ROBERTA_HEAD, (*CAMEMBERT_HEAD, "<s>", "</s>")) if head[: len(k)] == k), None)
        if known is None:
            raise UserError(f"its first tokens are {', '.join(head[:4])}; XLM-R's are {', '.join(ROBERTA_HEAD)}")
        rest = vocabulary[len(known) :]
        rest = rest[:-1] if vocabulary[-1][0] == roles.mask_token else rest
        vocabulary, unk = [(piece, 0.0) for piece in _FAIRSEQ_HEAD] + rest, 0
    special = {token.content for token in added_tokens(content) if token.special} | set(roles)
    fallback = bool(content["model"].get("byte_fallback"))
    model, kinds = schema.ModelProto(), schema.ModelProto.SentencePiece
    for index, (piece, score) in enumerate(vocabulary):
        kind = kinds.NORMAL
        if index == unk:
            kind = kinds.UNKNOWN
        elif piece in special:
            kind = kinds.CONTROL
        elif fallback and len(piece) == len("<0x00>") and piece.startswith("<0x"):
            kind = kinds.BYTE
        model.pieces.add(piece=piece, score=score, type=kind)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.vocab_size = schema.TrainerSpec.UNIGRAM, len(vocabulary)
    trainer.byte_fallback = fallback
    trainer.unk_id, trainer.unk_piece = unk, vocabulary[unk][0]
    trainer.bos_id = trainer.eos_id = trainer.pad_id = -1
    normalizer.precompiled_charsmap, normalizer.add_dummy_prefix = rules, add_dummy_prefix
    return bytes(model.SerializeToString())
