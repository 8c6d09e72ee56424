"""BPE of words whose last pieces end with a mark, </w>, as HerBERT's (Sennrich et al. 2016; Mroczkowski et al. 2021).

Words are found as in BERT. The specification comes from tokenizer.json, or from vocab.json with merges.txt; the
`tokenizers` library encodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from bert_jax.errors import UserError
from bert_jax.storage.files import write_json
from bert_jax.tokenization.engine import ChunkedTexts, LibraryEngine, add_tokens, template
from bert_jax.tokenization.specification import (
    BERT_ROLES,
    HASHED_IF_CHANGED,
    ROBERTA_ROLES,
    UNHASHED,
    AddedToken,
    Roles,
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

END = "</w>"  # of the last piece of a word


@dataclass(frozen=True)
class WordBPESpec(TokenList):
    """Everything that determines the ids of a BPE of words."""

    tokens: tuple[str, ...]  # by id
    merges: tuple[tuple[str, str], ...]  # by rank
    roles: Roles = ROBERTA_ROLES
    lowercase: bool = False
    strip_accents: bool = False
    split_chinese: bool = True
    clean_text: bool = True
    added: tuple[AddedToken, ...] = ()  # __post_init__ adds the roles' tokens
    adds_special_tokens: bool = field(default=True, metadata=UNHASHED)
    split_special_tokens: bool = field(default=False, metadata=UNHASHED)
    pair_separators: int = field(default=1, metadata=HASHED_IF_CHANGED)

    kind = "word_bpe"
    keeps_newlines = False

    def __post_init__(self) -> None:
        refuse_repeated(self.tokens)
        others = [token for token in self.added if token.content not in self.roles]
        roles = [AddedToken(token) for token in dict.fromkeys(self.roles)]
        object.__setattr__(self, "added", (*roles, *others))

    def is_inside(self, token: str) -> bool:
        return False  # pieces show where words end, not where they begin

    def surface(self, token: str) -> str:
        return token.removesuffix(END)

    def utf8(self, token: str) -> bytes:
        return self.surface(token).encode()

    def within_text(self) -> "WordBPESpec":
        return self

    def write(self, directory: Path) -> None:
        """Writes vocab.json, merges.txt, tokenizer_config.json and special_tokens_map.json."""
        # HerbertTokenizer in transformers builds both steps and the sequences itself.
        usual = (self.lowercase, self.strip_accents, self.split_chinese, self.clean_text, self.pair_separators)
        herbert = self.adds_special_tokens and usual == (False, False, True, True, 1)
        config = {"tokenizer_class": "HerbertTokenizer" if herbert else "PreTrainedTokenizerFast"}
        merges = "".join(f"{left} {right}\n" for left, right in self.merges)
        write_json(directory / "vocab.json", {token: index for index, token in enumerate(self.tokens)})
        (directory / "merges.txt").write_text(f"#version: 0.2\n{merges}", encoding="utf-8")
        write_settings(directory, config, self.roles, self.added)


def is_word_bpe(model: Mapping[str, Any]) -> bool:
    """Whether the model of a tokenizer.json is a BPE that marks the ends of words."""
    return model.get("end_of_word_suffix") == END


def from_json(content: Mapping[str, Any], settings: Mapping[str, Any], lowercase: bool | None) -> WordBPESpec:
    """Reads a tokenizer.json; `settings` are as in byte_bpe.from_json.

    Raises:
        UserError: text is not normalized and split as in BERT, or the model has an option that is not supported.
    """
    model, normalizer = content["model"], content.get("normalizer") or {}
    splitter = (content.get("pre_tokenizer") or {}).get("type")
    options = ("dropout", "continuing_subword_prefix", "fuse_unk", "byte_fallback", "ignore_merges")
    problem = next((f"its model has {name} {model[name]!r}" for name in options if model.get(name)), "")
    if splitter != "BertPreTokenizer" or normalizer.get("type") != "BertNormalizer":
        problem = f"it has normalizer {normalizer.get('type')} and pre_tokenizer {splitter} for words that end in {END}"
    if problem:
        raise UserError(f"{problem}. Only BertNormalizer and BertPreTokenizer, without such options, are supported")
    added = added_tokens(content)
    roles = named_roles(settings, {*model["vocab"], *(token.content for token in added)}, ROBERTA_ROLES, BERT_ROLES)
    stated = stated_template(content, settings, roles)
    accents = normalizer["strip_accents"]
    spec = WordBPESpec(
        tokens=tokens_by_id(model["vocab"]),
        merges=_merges(model["merges"]),
        roles=roles,
        lowercase=normalizer["lowercase"],
        strip_accents=normalizer["lowercase"] if accents is None else accents,
        split_chinese=normalizer["handle_chinese_chars"],
        clean_text=normalizer["clean_text"],
        added=added,
        adds_special_tokens=stated is None or stated.adds_special_tokens,
        pair_separators=(stated.separators if stated else stated_separators(content.get("post_processor"))) or 1,
    )
    check_added_ids(content, spec.all_tokens())
    refuse_contradiction(lowercase, spec.lowercase)
    return spec


def from_files(
    vocabulary: Mapping[str, int], merges: Sequence[str], settings: Mapping[str, Any], lowercase: bool | None
) -> WordBPESpec:
    """Builds the specification of HerBERT's class from the content of vocab.json and the lines of merges.txt."""
    refuse_contradiction(lowercase, False)
    roles = named_roles(settings, vocabulary, ROBERTA_ROLES, BERT_ROLES)
    return WordBPESpec(tokens=tokens_by_id(vocabulary), merges=_merges(merges), roles=roles)


def _merges(merges: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in merges)
    return tuple((str(left), str(right)) for left, right in pairs)


class WordBPEEngine(LibraryEngine):
    """Encodes whole texts by the library."""

    def __init__(self, spec: WordBPESpec) -> None:
        super().__init__(library_tokenizer(spec), id_dtype(len(spec.all_tokens())))

    def split(self, texts: Sequence[str]) -> ChunkedTexts | None:
        return None


def library_tokenizer(spec: WordBPESpec) -> tokenizers.Tokenizer:
    """The `tokenizers` library's tokenizer. Raises UserError if the merges do not fit the vocabulary."""
    vocabulary = {token: index for index, token in enumerate(spec.tokens)}
    unk = spec.roles.unk_token
    try:
        model = models.BPE(vocab=vocabulary, merges=list(spec.merges), unk_token=unk, end_of_word_suffix=END)
    except Exception as error:  # the library raises no narrower class
        raise UserError(f"the merges do not fit the vocabulary ({error}). Download both again") from None
    library = tokenizers.Tokenizer(model)
    library.normalizer = normalizers.BertNormalizer(
        clean_text=spec.clean_text,
        handle_chinese_chars=spec.split_chinese,
        strip_accents=spec.strip_accents,
        lowercase=spec.lowercase,
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.BPEDecoder(suffix=END)
    add_tokens(library, spec.added)
    tokens = spec.all_tokens()
    cls, sep = ((token, tokens.index(token)) for token in (spec.roles.cls_token, spec.roles.sep_token))
    if spec.adds_special_tokens and spec.pair_separators == 1:
        library.post_processor = processors.BertProcessing(sep, cls)
    elif spec.adds_special_tokens:
        library.post_processor = template(cls, sep, separators=spec.pair_separators)
    return library
