"""The SentencePiece engine (Kudo and Richardson 2018), by the `sentencepiece` library, with the tokenizer's ids."""

import hashlib
import re
from collections.abc import Sequence

import numpy as np
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from bert_jax.array_types import Int64
from bert_jax.tokenization.engine import ChunkedTexts, Engine, add_tokens, portable_json, refuse_surrogates, template
from bert_jax.tokenization.sentencepiece_model import (
    CAMEMBERT_HEAD,
    MARKED,
    RUNS_OF_SPACES,
    SPACE,
    SPACES_AT_ENDS,
    SentencePieceSpec,
    schema,
    white_space_rules,
)
from bert_jax.tokenization.specification import AddedToken, id_dtype
from bert_jax.tokenization.wordpiece import lines, replaced

# sha256 of the library's built-in normalization rules (0.1.96, 0.2.3). A test verifies from the rules that none of them
# looks across a space, produces two spaces or produces U+2581. Other rules may do so.
_RULES_WITHIN_CHUNKS = (
    hashlib.sha256(b"").hexdigest(),  # identity
    "1e2c7b43d3ee9755ceaa2ac335e253d8703604e0249ee1e81156c92b46423844",  # nmt_nfkc
    "2c03512e62f9ed965ec90d85314211b63b5b8aa0395311ea2147eec9ff738907",  # nmt_nfkc_cf
    "7e46d9e08af4b6a37991b04fb8388644c1595a0abcd0f26d6a5d575e2a3663ea",  # nfkc
    "d8dfef3d6db0eef0742f8b55a73aee7fce6c1e21d26a09b8d3d4b52c42a791cb",  # nfkc_cf
    "ec4a65fa10ad2a465f4f30ac3ee83a4ba4e9f507a4b092e07ff790c1c7c318af",  # nfkc, 0.1.96
)
_WHITE_SPACE = [chr(code) for code in range(0x3001) if chr(code).isspace()]


class SentencePieceEngine(Engine):
    """Encodes and decodes by a SentencePiece model.

    BPE merges within words only, so the ids of its words can be cached. Unigram's best path is a float32 sum over the
    whole text: of two equally good segmentations of a word ("00" "0" or "0" "00"), the preceding words decide. Only the
    library on the whole text gives the library's ids, and it is faster than a cache would be.
    """

    def __init__(self, spec: SentencePieceSpec) -> None:
        self._spec = spec
        self._model = sentencepiece.SentencePieceProcessor(model_proto=spec.model)
        self._tokens = spec.all_tokens()
        ids = piece_ids(spec)
        self._ids: np.ndarray = ids.astype(id_dtype(len(self._tokens)))
        self._piece_of_id = dict(zip(ids.tolist(), range(len(ids)), strict=True))
        self._special = {self._tokens[index]: index for index in spec.special_ids()}
        by_length = sorted(self._special, key=len, reverse=True)
        self._special_pattern = re.compile(f"({'|'.join(map(re.escape, by_length))})")
        self._normalizer = _normalizer(spec)
        # Whether words may be encoded one by one.
        rules = spec.parsed.normalizer_spec
        self._chunks = (
            spec.kind == "sentencepiece_bpe"
            and SPACE in spec.pieces
            and all(SPACE not in piece[1:] and " " not in piece for piece in spec.pieces)
            and rules.add_dummy_prefix
            and rules.remove_extra_whitespaces
            and hashlib.sha256(rules.precompiled_charsmap).hexdigest() in _RULES_WITHIN_CHUNKS
        )
        spaces = [space for space in _WHITE_SPACE if self._model.normalize(f"a{space}b") == f"{SPACE}a{SPACE}b"]
        self._spaces = dict.fromkeys((space for space in spaces if space not in " \n"), " ")
        # Texts with these characters go to the library whole: U+2581 if the model keeps it, and the line break if the
        # model does not split at it.
        kept = [] if self._model.normalize(f"{SPACE}a") == f"{SPACE}a" else [SPACE]
        self._library_only = [*kept, *(end for end in "\n" if end not in spaces)]

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        try:
            encoded = self._model.encode(self._prepared(texts), return_type="numpy", num_threads=1)
        except (RuntimeError, TypeError, UnicodeEncodeError):
            refuse_surrogates(texts)
            raise
        return [self._ids[pieces].tobytes() for pieces in encoded]

    def split(self, texts: Sequence[str]) -> ChunkedTexts | None:
        if not self._chunks:
            return None
        exceptions: dict[int, list[str] | None] = {}
        for mark in self._library_only:
            exceptions |= {index: None for index, text in enumerate(texts) if mark in text}
        if exceptions:
            texts = ["" if index in exceptions else text for index, text in enumerate(texts)]
        return ChunkedTexts(replaced(lines(texts), self._spaces), exceptions=exceptions)

    def encode_special(self, text: str) -> list[int]:
        ids: list[int] = []
        # The pattern has a group, so `split` returns the special tokens too, between the texts around them.
        for part in self._special_pattern.split(text):
            if part in self._special:
                ids.append(self._special[part])
            elif part:
                ids += self._ids[self._model.encode(self._prepared([part])[0])].tolist()
        return ids

    def encode_offsets(self, text: str, special: bool = False) -> tuple[list[int], list[tuple[int, int]]]:
        if special and self._special_pattern.search(text):
            ids: list[int] = []
            spans: list[tuple[int, int]] = []
            start = 0
            for part in self._special_pattern.split(text):
                if part in self._special:
                    part_ids, part_spans = [self._special[part]], [(0, len(part))]
                else:
                    part_ids, part_spans = self.encode_offsets(part)
                ids += part_ids
                spans += [(start + first, start + last) for first, last in part_spans]
                start += len(part)
            return ids, spans
        prepared = self._prepared([text])[0]
        encoded = self._model.encode(prepared, return_type="offset_mapping")
        offsets = list(encoded["offsets"])
        # If one character becomes several (a ligature's letters, bytes), the library assigns it to the last piece only:
        # the others take its span.
        for index in range(len(offsets) - 2, -1, -1):
            if offsets[index][0] == offsets[index][1] and self._model.id_to_piece(encoded["ids"][index]) != SPACE:
                offsets[index] = offsets[index + 1]
        if prepared != text and self._normalizer:
            # A tokenizer of single characters tells the span of `text` from which each character of `prepared` comes.
            library = tokenizers.Tokenizer(models.WordLevel({"": 0}, unk_token=""))
            library.normalizer = self._normalizer
            library.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
            origin = library.encode(text, add_special_tokens=False).offsets
            # An empty span lies before the character at which it begins, and may lie at the text's end.
            starts = [begin for begin, _ in origin] + [len(text)]
            ends = [0] + [end for _, end in origin]
            offsets = [(starts[begin], max(starts[begin], ends[end])) for begin, end in offsets]
        spans = []
        for begin, end in offsets:  # without white space on both sides
            stripped = text[begin:end].lstrip()
            spans.append((end - len(stripped), end - len(stripped) + len(stripped.rstrip())))
        return self._ids[encoded["ids"]].tolist(), spans

    def encode_words(self, text: str, special: bool = False) -> tuple[list[int], list[int]]:
        ids, words, word = [], [], -1
        for part in filter(None, self._special_pattern.split(text) if special else [text]):
            matched = special and part in self._special
            encoded = [self._special[part]] if matched else self._ids[self._model.encode(self._prepared([part])[0])]
            for index, token in enumerate(encoded):
                # A space begins a word, as does the text before or after a special token.
                word += index == 0 or self._tokens[token].startswith(SPACE)
                ids.append(int(token))
                words.append(word)
        return ids, words

    def decode(self, ids: list[int]) -> str:
        # The model decodes runs of its own pieces. It does not know some special tokens, so these are inserted as text.
        text = ""
        run: list[int] = []
        for index in [*ids, None]:
            if index is not None and self._tokens[index] not in self._special:
                run.append(self._piece_of_id[index])
                continue
            if run:
                space = " " if text and self._model.id_to_piece(run[0]).startswith(SPACE) else ""
                text += space + self._model.decode(run)
                run = []
            text += "" if index is None else self._tokens[index]
        return text

    def normalize(self, text: str) -> str:
        """The text in which pieces are looked up, with U+2581 for spaces."""
        return str(self._model.normalize(self._prepared([text])[0]))

    def to_json(self) -> str:
        return portable_json(library_tokenizer(self._spec))

    def _prepared(self, texts: Sequence[str]) -> list[str]:
        """Applies the normalizer that precedes the model."""
        if self._normalizer is None:
            return list(texts)
        prepared = []
        for text in texts:
            if text.isascii():  # here the normalizer reduces to this, which runs ten times faster
                if self._spec.replace_quotes:
                    text = text.replace("``", '"').replace("''", '"')
                prepared.append(text.lower() if self._spec.do_lower_case else text)
            else:
                prepared.append(self._normalizer.normalize_str(text))
        return prepared


def piece_ids(spec: SentencePieceSpec) -> Int64[np.ndarray, "n"]:
    """The tokenizer's ids of the model's pieces."""
    ids = np.arange(len(spec.pieces))
    if spec.camembert:
        ids += len(CAMEMBERT_HEAD) - 1
        ids[0] = CAMEMBERT_HEAD.index(spec.roles.unk_token)
    elif spec.fairseq:
        # The model begins with <unk>, <s> and </s>; fairseq with <s>, <pad>, </s> and <unk>, one token more.
        ids += 1
        ids[:3] = 3, 0, 2
    return ids


def _normalizer(spec: SentencePieceSpec) -> normalizers.Normalizer | None:
    """The normalizer before the model's own, as in transformers' AlbertTokenizer; None if there is none."""
    parts: list[normalizers.Normalizer] = []
    if spec.replace_quotes:
        parts += [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if spec.strip_accents:
        parts += [normalizers.NFKD(), normalizers.StripAccents()]
    if spec.do_lower_case:
        parts.append(normalizers.Lowercase())
    return normalizers.Sequence(parts) if parts else None


def library_tokenizer(spec: SentencePieceSpec) -> tokenizers.Tokenizer:
    """The `tokenizers` library's tokenizer for a SentencePiece model, converted as transformers does.

    It encodes word by word and adds scores in float64, so it may segment a word differently if scores tie.
    """
    model, tokens, roles = spec.parsed, spec.all_tokens(), spec.roles
    fallback = model.trainer_spec.byte_fallback
    if spec.kind == "unigram":
        scores = dict(zip(piece_ids(spec).tolist(), (piece.score for piece in model.pieces), strict=True))
        vocabulary = [(token, scores.get(index, 0.0)) for index, token in enumerate(tokens)]
        unk = tokens.index(roles.unk_token)
        library = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=unk, byte_fallback=fallback))
    else:
        ids = {token: index for index, token in enumerate(tokens)}
        # The pairs of pieces that merge into a piece, ordered by this piece's score.
        normal = schema.ModelProto.SentencePiece.NORMAL
        pieces = {piece.piece: piece.score for piece in model.pieces if piece.type == normal}
        merges = [
            (piece[:cut], piece[cut:])
            for piece in sorted(pieces, key=lambda piece: -pieces[piece])
            for cut in range(1, len(piece))
            if piece[:cut] in pieces and piece[cut:] in pieces
        ]
        library = tokenizers.Tokenizer(
            models.BPE(ids, merges, unk_token=roles.unk_token, fuse_unk=True, byte_fallback=fallback)
        )
    normalizer = _normalizer(spec)
    steps = [normalizer] if normalizer else []
    rules, prefix = model.normalizer_spec.precompiled_charsmap, model.normalizer_spec.add_dummy_prefix
    scheme = "always" if prefix else "never"
    metaspace = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    library.pre_tokenizer = metaspace
    split = bool(rules and prefix)
    if rules and not (split and rules == white_space_rules()):
        steps.append(normalizers.Precompiled(rules))
    if split:
        library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])
    else:
        ends, runs = tokenizers.Regex(SPACES_AT_ENDS), tokenizers.Regex(RUNS_OF_SPACES)
        steps += [normalizers.Replace(ends, ""), normalizers.Replace(runs, " ")]
    if steps:
        library.normalizer = normalizers.Sequence(steps)
    joined = decoders.Metaspace(prepend_scheme=scheme)
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), joined]) if fallback else joined
    special = [piece.piece for piece in model.pieces if piece.type in MARKED]
    for token in dict.fromkeys([*special, *roles]):
        add_tokens(library, [AddedToken(token, lstrip=token == roles.mask_token)])
    cls, sep = ((token, tokens.index(token)) for token in (roles.cls_token, roles.sep_token))
    if spec.adds_special_tokens:
        library.post_processor = template(cls, sep, separators=spec.pair_separators, second=0 if spec.fairseq else 1)
    return library
