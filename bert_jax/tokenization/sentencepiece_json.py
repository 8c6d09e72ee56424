"""Parses SentencePiece models, and rebuilds them from the tokenizer.json of a Unigram model."""

import base64
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from bert_jax.command import UserError
from bert_jax.tokenization.tokenizer_spec import ROBERTA_ROLES, Roles, added_tokens

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
