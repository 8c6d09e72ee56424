"""Conversion between a SentencePiece model and the tokenizer.json with which `tokenizers` does nearly the same."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import sentencepiece
import tokenizers
from google.protobuf.message import DecodeError
from numpy import ndarray
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from bert_jax.array_types import Int64
from bert_jax.command import UserError
from bert_jax.tokenization.tokenizer_spec import ROBERTA_ROLES, Roles, added_tokens

schema: Any = sentencepiece_model_pb2  # protobuf creates its classes at import
# The first pieces of a model that XLM-R's numbering requires.
FAIRSEQ_HEAD = ("<unk>", "<s>", "</s>")
_UNIGRAM, _BPE = schema.TrainerSpec.UNIGRAM, schema.TrainerSpec.BPE
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


def library_tokenizer(
    model: Any,
    tokens: Sequence[str],
    token_ids: Int64[ndarray, "n"],
    roles: Roles,
    normalizer: normalizers.Normalizer | None,
) -> tokenizers.Tokenizer:
    """The `tokenizers` library's tokenizer for a SentencePiece model, converted as transformers does.

    It encodes word by word and adds scores in float64, so it may segment a word differently where scores tie.
    """
    scores = dict(zip(token_ids.tolist(), (piece.score for piece in model.pieces), strict=True))
    special = [piece.piece for piece in model.pieces if piece.type in (_PIECE.UNKNOWN, _PIECE.CONTROL)]
    unk = tokens.index(roles.unk_token)
    fallback = model.trainer_spec.byte_fallback
    if model.trainer_spec.model_type == _UNIGRAM:
        vocabulary = [(token, scores.get(index, 0.0)) for index, token in enumerate(tokens)]
        library = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=unk, byte_fallback=fallback))
    else:
        ids = {token: index for index, token in enumerate(tokens)}
        library = tokenizers.Tokenizer(
            models.BPE(ids, _merges(model), unk_token=roles.unk_token, fuse_unk=True, byte_fallback=fallback)
        )
    steps = [normalizer] if normalizer else []
    if rules := model.normalizer_spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules))
    if steps:
        library.normalizer = normalizers.Sequence(steps)
    scheme = "always" if model.normalizer_spec.add_dummy_prefix else "never"
    metaspace = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])
    joined = decoders.Metaspace(prepend_scheme=scheme)
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), joined]) if fallback else joined
    for token in dict.fromkeys([*special, *roles]):
        is_mask = token == roles.mask_token
        library.add_special_tokens([tokenizers.AddedToken(token, lstrip=is_mask, normalized=False)])
    cls, sep = roles.cls_token, roles.sep_token
    between = f"{sep}:0 {sep}:0" if roles == ROBERTA_ROLES else f"{sep}:0"
    second = 0 if roles == ROBERTA_ROLES else 1
    library.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {between} $B:{second} {sep}:{second}",
        special_tokens=[(token, tokens.index(token)) for token in (cls, sep)],
    )
    return library


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
    trainer.model_type, trainer.vocab_size, trainer.byte_fallback = _UNIGRAM, len(vocabulary), fallback
    trainer.unk_id, trainer.unk_piece = unk, vocabulary[unk][0]
    trainer.bos_id = trainer.eos_id = trainer.pad_id = -1
    settings = content.get("normalizer") or {}
    for step in settings.get("normalizers", [settings]):
        if step.get("type") == "Precompiled":
            spec.precompiled_charsmap = base64.b64decode(step["precompiled_charsmap"] or "")
    spec.add_dummy_prefix = prefix != "never"
    return bytes(model.SerializeToString())


def _merges(model: Any) -> list[tuple[str, str]]:
    """The pairs of pieces that merge into a piece, ordered by the score of that piece."""
    pieces = {piece.piece: piece.score for piece in model.pieces if piece.type == _PIECE.NORMAL}
    ranked = sorted(pieces, key=lambda piece: -pieces[piece])
    return [
        (piece[:cut], piece[cut:])
        for piece in ranked
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
