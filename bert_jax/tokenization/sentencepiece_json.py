"""Parses SentencePiece models, and rebuilds them from the tokenizer.json of a Unigram model."""

import base64
from collections.abc import Mapping
from typing import Any

import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from bert_jax.command import UserError
from bert_jax.tokenization.tokenizer_spec import ROBERTA_ROLES, Roles, added_tokens

schema: Any = sentencepiece_model_pb2  # protobuf creates its classes at import
# The first pieces of a model that XLM-R's numbering requires.
FAIRSEQ_HEAD = ("<unk>", "<s>", "</s>")
_PIECE = schema.ModelProto.SentencePiece
# Normalization steps in the files of XLM-R and ALBERT. The model itself collapses runs of spaces.
_STEPS = ("Replace", "NFKD", "StripAccents", "Lowercase", "Precompiled")
_RUNS_OF_SPACES = {"Regex": " {2,}"}


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


def normalizer_steps(content: Mapping[str, Any]) -> list[str]:
    """The steps of a tokenizer.json's normalizer by name. Raises UserError for an unsupported step."""
    settings = content.get("normalizer") or {"normalizers": []}
    steps = settings.get("normalizers", [settings])
    for step in steps:
        quotes = step["type"] != "Replace" or step["pattern"] == _RUNS_OF_SPACES or step["content"] == '"'
        if step["type"] not in _STEPS or not quotes:
            raise UserError(f"unsupported normalizer {step['type']} for a Unigram model. Give its SentencePiece .model")
    return [step["type"] for step in steps if step.get("pattern") != _RUNS_OF_SPACES]


def unigram_model(content: Mapping[str, Any], roles: Roles) -> bytes:
    """The serialized SentencePiece model of a tokenizer.json whose model is Unigram.

    Raises UserError for a pre-tokenizer that does not split text as SentencePiece does.
    """
    splitter = content.get("pre_tokenizer") or {}
    parts = splitter.get("pretokenizers", [splitter])
    if [part.get("type") for part in parts] not in (["Metaspace"], ["WhitespaceSplit", "Metaspace"]):
        raise UserError(f"its model is Unigram with pre_tokenizer {splitter.get('type')}. Only Metaspace is supported")
    prefix = parts[-1].get("prepend_scheme", "always" if parts[-1].get("add_prefix_space", True) else "never")
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
    settings = content.get("normalizer") or {}
    for step in settings.get("normalizers", [settings]):
        if step.get("type") == "Precompiled":
            spec.precompiled_charsmap = base64.b64decode(step["precompiled_charsmap"] or "")
    spec.add_dummy_prefix = prefix != "never"
    return bytes(model.SerializeToString())
