"""Describes vocabularies: their tokens, special ids and words' beginnings, without the libraries that encode text.

Training needs no more from a tokenizer. bert_jax.tokenization.tokenizer adds encoding and decoding.
"""

import dataclasses
import functools
import itertools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.array_types import Bool, Integer
from bert_jax.errors import UserError
from bert_jax.storage.files import read_json
from bert_jax.storage.location import named_folder
from bert_jax.tokenization import wordpiece
from bert_jax.tokenization.specification import (
    Roles,
    TokenizerSpec,
    begins_unspaced,
    check_added_ids,
    continues_character,
    id_dtype,
    read_settings,
)

# The kinds that train-tokenizer learns and their display names.
LEARNED_KINDS = {
    "wordpiece": "WordPiece",
    "bpe": "byte-level BPE",
    "unigram": "SentencePiece Unigram",
    "sentencepiece_bpe": "SentencePiece BPE",
}
KINDS = {**LEARNED_KINDS, "word_bpe": "BPE of words"}  # the last one is read from folders of other programs only
TOKENIZER = "tokenizer"  # the folder in a workdir that contains its tokenizer's files
# From the most complete file on; a SentencePiece model comes before the tokenizer.json that was derived from it.
_FILES = (
    *("sentencepiece.bpe.model", "spiece.model", "spm.model", "sentencepiece.model", "tokenizer.model"),
    *("tokenizer.json", "vocab.json", "vocab.txt"),
)


class Vocabulary:
    """A tokenizer's tokens and their use.

    spec                       everything that determines the tokenizer's ids
    kind                       wordpiece, bpe (byte-level), word_bpe, unigram or sentencepiece_bpe
    vocab_size                 ids are 0..vocab_size-1
    pad_id, unk_id, cls_id, sep_id, mask_id
    roles                      the tokens behind these five ids; GPT-2's vocabulary uses one token for all of them
    has_mask                   whether the vocabulary has a token for masks only
    has_unknown                whether the token for unknown text differs from cls and sep
    special_ids                ids of all special tokens, ascending; the five above are among them
    pair_separators            number of separators between two texts, as published models of this kind have it: 2 for
                               RoBERTa, XLM-R and MPNet (<s> A </s></s> B </s>), otherwise 1
    adds_special_tokens        whether sequences are cls A sep (B sep). In a published GPT-2 they are A B, without
                               special tokens; shards, and models trained on them, always have them
    begin, between, end        number of special tokens before a text, between two texts, and at the end: 1,
                               pair_separators and 1, or all 0 without special tokens
    lowercase                  whether text is lower-cased before lookup
    continuation               bool[V]: whether an id continues a word ("##ing"; in BPE: no leading space)
    unspaced                   bool[V]: whether an id begins with a character in a script without spaces between words
                               (bert_jax/tokenization/specification.py)
    attached                   bool[V]: whether an id begins within a character, or with a mark in those scripts
    content_hash               sha256 over everything that determines ids; independent of how the tokenizer was loaded
    id_dtype                   uint16 if every id fits, otherwise uint32
    """

    def __init__(self, spec: TokenizerSpec, path: Path | None = None) -> None:
        """`path` is the file or folder from which the specification was read."""
        self.spec = spec
        self._path = path
        self._tokens = spec.all_tokens()
        self._ids = {token: index for index, token in enumerate(self._tokens)}
        self.kind = spec.kind
        self.vocab_size = len(self._tokens)
        self.roles: Roles = spec.roles
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (self._ids[token] for token in self.roles)
        self.has_mask = self.mask_id not in (self.pad_id, self.unk_id, self.cls_id, self.sep_id)
        self.has_unknown = self.unk_id not in (self.cls_id, self.sep_id)
        self.special_ids = spec.special_ids()
        self.pair_separators = spec.pair_separators
        self.adds_special_tokens = spec.adds_special_tokens
        added = (1, spec.pair_separators, 1) if spec.adds_special_tokens else (0, 0, 0)
        self.begin, self.between, self.end = added
        self.lowercase = spec.lowercase
        self.id_dtype = id_dtype(self.vocab_size)

    @functools.cached_property
    def continuation(self) -> Bool[np.ndarray, "V"]:
        continues = np.array([self.spec.is_inside(token) for token in self._tokens])
        continues[list(self.special_ids)] = False
        return continues

    @functools.cached_property
    def unspaced(self) -> Bool[np.ndarray, "V"]:
        return self._beginning(begins_unspaced)

    @functools.cached_property
    def attached(self) -> Bool[np.ndarray, "V"]:
        return self._beginning(continues_character) & self.continuation

    def _beginning(self, holds: Callable[[bytes], bool]) -> Bool[np.ndarray, "V"]:
        """Which ids are ordinary tokens whose bytes satisfy a condition."""
        # Most tokens are ASCII, so their bytes need no look, unless they name a byte ("<0xE4>").
        holding = np.array(
            [(not token.isascii() or token[:1] == "<") and holds(self.spec.utf8(token)) for token in self._tokens]
        )
        holding[list(self.special_ids)] = False
        return holding

    @functools.cached_property
    def content_hash(self) -> str:
        return self.spec.content_hash()

    def tokens(self, ids: Sequence[int] | Integer[np.ndarray, "n"]) -> list[str]:
        """Turns ids into tokens as the vocabulary spells them. Raises IndexError for an id outside the vocabulary."""
        return [self._tokens[int(token)] for token in ids]

    def surfaces(self, ids: Sequence[int] | Integer[np.ndarray, "n"]) -> list[str]:
        """Turns ids into characters, without the mark for a word's beginning or inside; special tokens unchanged."""
        special = set(self.special_ids)
        tokens = zip(ids, self.tokens(ids), strict=True)
        return [token if int(index) in special else self.spec.surface(token) for index, token in tokens]

    def token_id(self, token: str) -> int | None:
        """A token's id, as the vocabulary spells it ("##ing"), or None if the vocabulary lacks it."""
        return self._ids.get(token)

    def save(self, directory: str | Path) -> None:
        """Copies the folder from which the vocabulary was read."""
        assert self._path is not None and self._path.is_dir()
        shutil.copytree(self._path, directory, dirs_exist_ok=True)


def load(path: str | Path, lowercase: bool | None = None) -> Vocabulary:
    """Loads a tokenizer's vocabulary.

    Args:
        path: a folder written by `Tokenizer.save`, a Hugging Face folder of a supported kind, one of their files, or
            hf:NAME, a model on the Hugging Face Hub. The files are vocab.txt (WordPiece), vocab.json with merges.txt in
            the same folder (byte-level BPE), a SentencePiece .model (with ALBERT's ids if its pieces include [CLS],
            otherwise with XLM-R's), and tokenizer.json for any kind.
        lowercase: whether text is lower-cased, if neither tokenizer_config.json nor tokenizer.json states it. By
            default, if the vocabulary has no capitals.

    Raises:
        UserError: a missing or broken file, missing special tokens, an unsupported kind of tokenizer, or a
            contradiction between `lowercase` and the files.
    """
    if not str(path):  # pathlib reads an empty path as the current folder
        raise UserError("the tokenizer path is empty. Give a tokenizer folder or one of its files, such as vocab.txt")
    path = Path(named_folder(path, "tokenizer"))
    return Vocabulary(_read(path, lowercase), path)


def _read(path: Path, lowercase: bool | None) -> TokenizerSpec:
    if not path.exists():
        raise UserError(f"no tokenizer at {path}. Give a tokenizer folder or one of its files, such as vocab.txt")
    file, is_folder = path, path.is_dir()
    if is_folder:
        if (path / TOKENIZER).is_dir() and not any((path / name).exists() for name in _FILES):
            path /= TOKENIZER
        name = next((name for name in _FILES if (path / name).exists()), None)
        if name is None:
            raise UserError(
                f"{path} contains no tokenizer: no tokenizer.json, vocab.txt, vocab.json or SentencePiece .model. "
                "Give a tokenizer folder"
            )
        file = path / name
    try:
        whole, added = path / "tokenizer.json", path / "added_tokens.json"
        settings = read_settings(file.parent)
        spec: Any = _read_file(file, settings, lowercase)
        if settings.get("split_special_tokens"):
            spec = dataclasses.replace(spec, split_special_tokens=True)
        if is_folder and added.exists() and not whole.exists():
            # Tokens with a role and its id add nothing; old versions of transformers also wrote empty files.
            known = dict(zip(spec.all_tokens(), itertools.count(), strict=False))
            if further := [t for t, index in read_json(added).items() if t not in spec.roles or known[t] != index]:
                raise UserError(
                    f"has added_tokens.json with {further[0]!r} but no tokenizer.json. Save it again with a fast "
                    "tokenizer"
                )
        if is_folder and file.suffix == ".model" and whole.exists():
            check_added_ids(read_json(whole), spec.all_tokens())
        result: TokenizerSpec = spec
        return result
    except UserError as error:
        raise UserError(f"tokenizer {file}: {error}") from None
    except (KeyError, AttributeError, TypeError, ValueError, StopIteration) as error:
        problem = f"field {error} is missing" if isinstance(error, KeyError) else "a field has the wrong type"
        raise UserError(f"tokenizer {file}: {problem}. Download or save the tokenizer again") from error


def _read_file(file: Path, settings: dict[str, Any], lowercase: bool | None) -> TokenizerSpec:
    if file.suffix == ".model":  # SentencePiece's library is imported only if it is needed
        from bert_jax.tokenization import sentencepiece_model

        return sentencepiece_model.from_model(file, settings, lowercase)
    if file.name == "merges.txt":
        raise UserError("it is half of a byte-level BPE tokenizer. Give vocab.json of the same folder, or the folder")
    if file.suffix != ".json":
        return wordpiece.from_lines(file, settings, lowercase)
    content = read_json(file)
    if file.name == "vocab.json":
        from bert_jax.tokenization import byte_bpe  # takes a while to import

        return byte_bpe.from_files(content, file.parent / "merges.txt", settings, lowercase)
    model = content.get("model") or {}
    if not model:
        raise UserError("it has no field `model`. Give the folder, or its tokenizer.json, vocab.json or vocab.txt")
    # Old files name no model type: a field of its own identifies WordPiece, and `merges` identifies BPE.
    kind = model.get("type") or (
        "WordPiece" if "max_input_chars_per_word" in model else "BPE" if "merges" in model else "unknown"
    )
    if kind == "WordPiece":
        return wordpiece.from_json(content, settings, lowercase)
    if kind == "BPE":
        from bert_jax.tokenization import word_bpe

        if word_bpe.is_word_bpe(model):
            return word_bpe.from_json(content, settings, lowercase)
        from bert_jax.tokenization import byte_bpe

        return byte_bpe.from_json(content, settings, lowercase)
    if kind == "Unigram":
        from bert_jax.tokenization import sentencepiece_model

        return sentencepiece_model.from_json(content, settings, lowercase)
    raise UserError(f"unsupported model type {kind}; choose a tokenizer of type WordPiece, BPE or Unigram")
