"""Text to token ids and back, by one interface for all kinds of tokenizer.

WordPiece and byte-level BPE use the Hugging Face `tokenizers` library; Unigram and BPE models of SentencePiece use the
`sentencepiece` library. Each kind consists of a specification (plain data that determines every id), an engine (the
library that encodes) and the files that store it. The rest of the program uses only this module.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.array_types import Bool, Int64, Integer, UInt
from bert_jax.command import UserError
from bert_jax.storage.local import read_json
from bert_jax.tokenization import wordpiece
from bert_jax.tokenization.chunk_cache import ChunkCache
from bert_jax.tokenization.tokenizer_spec import Roles, TokenizerSpec, id_dtype, read_settings, refuse_surrogates

# The kinds by their display names.
KINDS = {
    "wordpiece": "WordPiece",
    "bpe": "byte-level BPE",
    "unigram": "SentencePiece Unigram",
    "sentencepiece_bpe": "SentencePiece BPE",
}
_MODEL_FILES = (
    "sentencepiece.bpe.model",
    "spiece.model",
    "spm.model",
    "sentencepiece.model",
    "tokenizer.model",
)


class Tokenizer:
    """Encodes text as ids, decodes ids, and describes the vocabulary.

    Every id equals the one that the library alone would give. A tokenizer pickles as its specification; each process
    fills a cache of its own. It is not safe for use by several threads at once.

    kind                       wordpiece, bpe (byte-level), unigram or sentencepiece_bpe
    vocab_size                 ids are 0..vocab_size-1
    pad_id, unk_id, cls_id, sep_id, mask_id
    roles                      the tokens behind these five ids; GPT-2's vocabulary uses one token for all of them
    has_mask                   whether the vocabulary has a token that is used for masks only
    has_unknown                whether the token for unknown text differs from those that begin and end a text
    special_ids                ids of all special tokens, ascending; the five above are among them
    pair_separators            number of separators that published models of this kind place between two texts: 2 for
                               RoBERTa and XLM-R (<s> A </s></s> B </s>), otherwise 1
    lowercase                  whether text is lower-cased before lookup
    continuation               bool[V]: True for ids that continue a word ("##ing"; in BPE: no leading space)
    content_hash               sha256 over everything that determines ids; independent of how the tokenizer was loaded
    id_dtype                   uint16 if every id fits, otherwise uint32
    """

    def __init__(self, spec: TokenizerSpec) -> None:
        self._spec = spec
        self._tokens = spec.all_tokens()
        self._ids = {token: index for index, token in enumerate(self._tokens)}
        self._engine = spec.engine()
        self.kind = spec.kind
        self.vocab_size = len(self._tokens)
        self.roles: Roles = spec.roles
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (self._ids[token] for token in self.roles)
        self.has_mask = self.mask_id not in (self.pad_id, self.unk_id, self.cls_id, self.sep_id)
        self.has_unknown = self.unk_id not in (self.cls_id, self.sep_id)
        self.special_ids = spec.special_ids()
        self.pair_separators = spec.pair_separators
        self.lowercase = spec.lowercase
        self.id_dtype = id_dtype(self.vocab_size)
        self._cache = ChunkCache(self._engine, self.id_dtype)

    def __reduce__(self) -> tuple[type["Tokenizer"], tuple[TokenizerSpec]]:
        return Tokenizer, (self._spec,)

    @functools.cached_property
    def continuation(self) -> Bool[np.ndarray, "V"]:
        continues = np.array([self._spec.is_inside(token) for token in self._tokens])
        continues[list(self.special_ids)] = False
        return continues

    @functools.cached_property
    def content_hash(self) -> str:
        return self._spec.content_hash()

    def encode(self, text: str) -> UInt[np.ndarray, "n"]:
        """The ids of a text, without special tokens. "[MASK]" and the like in the text are ordinary text."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> tuple[UInt[np.ndarray, "n"], Int64[np.ndarray, "boundaries"]]:
        """The concatenated ids of many texts, and the offsets at which each text begins.

        The ids of text i are ids[offsets[i]:offsets[i + 1]], equal to those of `encode`. This is several times faster
        than one call per text, so pass a whole document or more at a time. Raises UserError for a lone surrogate.
        """
        try:
            ids, counts = self._cache.encode(texts)
        except UnicodeEncodeError:
            refuse_surrogates(texts)
            raise
        return ids, np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])

    def as_in_text(self, words: Sequence[str]) -> list[str]:
        """Words prepared for `encode_many` so that each gets the ids it has within the whole text.

        In byte-level BPE a word includes the space before it, which the first word of a text does not have.
        """
        if self.kind != "bpe":
            return list(words)
        return [f" {word}" if index else word for index, word in enumerate(words)]

    def encode_special(self, text: str) -> UInt[np.ndarray, "n"]:
        """Like `encode`, but special tokens written in the text ("[MASK]", "<mask>") become their ids."""
        refuse_surrogates([text])
        return np.array(self._engine.encode_special(text), self.id_dtype)

    def encode_offsets(self, text: str) -> tuple[UInt[np.ndarray, "n"], Int64[np.ndarray, "n 2"]]:
        """The ids of a text and the character span [start, end) of each; see `encode_offsets_many`."""
        ids, _, offsets = self.encode_offsets_many([text])
        return ids, offsets

    def encode_offsets_many(
        self, texts: Sequence[str]
    ) -> tuple[UInt[np.ndarray, "n"], Int64[np.ndarray, "boundaries"], Int64[np.ndarray, "n 2"]]:
        """Like `encode_many`, and also the character span [start, end) of its text that each id comes from.

        A token's span excludes white space before its word. A token that consists of white space alone has the span of
        that white space or, with SentencePiece, an empty span where the next word begins. All bytes of one character
        have the span of that character. This method bypasses the cache, so it is slower than `encode_many`.
        """
        refuse_surrogates(texts)
        ids, offsets = [np.zeros(0, self.id_dtype)], [np.zeros((0, 2), np.int64)]
        for text in texts:
            found, spans = self._engine.encode_offsets(text)
            ids.append(np.array(found, self.id_dtype))
            offsets.append(np.array(spans, np.int64).reshape(-1, 2))
        boundaries = np.cumsum([len(part) for part in ids], dtype=np.int64)
        return np.concatenate(ids), boundaries, np.concatenate(offsets)

    def decode(self, ids: Sequence[int] | Integer[np.ndarray, "n"]) -> str:
        """Readable text: tokens joined to words, special tokens kept. Normalization is not undone."""
        return self._engine.decode([int(token) for token in ids])

    def tokens(self, ids: Sequence[int] | Integer[np.ndarray, "n"]) -> list[str]:
        """The token of each id as the vocabulary spells it. Raises IndexError for an id outside the vocabulary."""
        return [self._tokens[int(token)] for token in ids]

    def surfaces(self, ids: Sequence[int] | Integer[np.ndarray, "n"]) -> list[str]:
        """The characters of each id, without the mark of a word's beginning or inside; special tokens unchanged."""
        special = set(self.special_ids)
        tokens = zip(ids, self.tokens(ids), strict=True)
        return [token if int(index) in special else self._spec.surface(token) for index, token in tokens]

    def id_of(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it ("##ing"), or None if the vocabulary lacks it."""
        return self._ids.get(token)

    def save(self, directory: str | Path) -> None:
        """Writes a Hugging Face tokenizer folder, including tokenizer.json and tokenizer_config.json.

        `load` and `transformers.AutoTokenizer.from_pretrained` read it back as an equal tokenizer. Equal tokenizers
        write equal bytes.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._spec.write(directory)
        (directory / "tokenizer.json").write_text(self._engine.to_json(), encoding="utf-8")


def load(path: str | Path, lowercase: bool | None = None) -> Tokenizer:
    """Loads a folder written by `Tokenizer.save`, a Hugging Face folder of a supported kind, or one of their files.

    The files are vocab.txt (WordPiece), vocab.json with merges.txt in the same folder (byte-level BPE), a SentencePiece
    .model (with ALBERT's ids if its pieces include [CLS], otherwise with XLM-R's), and tokenizer.json of any kind.

    Lower-casing follows tokenizer_config.json or tokenizer.json in the folder of the file. If neither states it, it
    follows the argument; without an argument, a vocabulary without capitals is taken to be lower-cased. Raises
    UserError for a missing or broken file, missing special tokens, an unsupported kind of tokenizer, and an argument
    that contradicts the files.
    """
    if not str(path):  # pathlib reads an empty path as the current folder
        raise UserError("the tokenizer path is empty. Give a tokenizer folder or one of its files, such as vocab.txt")
    return Tokenizer(read(Path(path), lowercase))


def read(path: Path, lowercase: bool | None = None) -> TokenizerSpec:
    """The specification of the tokenizer at a path; see `load`."""
    if not path.exists():
        raise UserError(f"no tokenizer at {path}. Give a tokenizer folder or one of its files, such as vocab.txt")
    file = _main_file(path) if path.is_dir() else path
    try:
        whole = path / "tokenizer.json"
        if path.is_dir() and (path / "added_tokens.json").exists() and not whole.exists():
            raise UserError("has added_tokens.json but no tokenizer.json. Save it again with a fast tokenizer")
        spec = _read_file(file, read_settings(file.parent), lowercase)
        if path.is_dir() and file.suffix == ".model" and whole.exists():
            _refuse_other_ids(spec, read_json(whole))
        return spec
    except UserError as error:
        raise UserError(f"tokenizer {file}: {error}") from None
    except (KeyError, AttributeError, TypeError, ValueError, StopIteration) as error:
        problem = f"field {error} is missing" if isinstance(error, KeyError) else "a field has the wrong type"
        raise UserError(f"tokenizer {file}: {problem}. Download or save the tokenizer again") from error


def _refuse_other_ids(spec: TokenizerSpec, library: dict[str, Any]) -> None:
    """Raises UserError if tokenizer.json numbers special or added tokens differently from the SentencePiece model.

    This is the case for tokens that a user added, and for other families' numbering (CamemBERT's).
    """
    ids = {token: index for index, token in enumerate(spec.all_tokens())}
    for token in library.get("added_tokens") or []:
        if ids.get(token["content"]) != token["id"]:
            raise UserError(
                f"tokenizer.json gives {token['content']!r} the id {token['id']}, but the model gives it "
                f"{ids.get(token['content'], 'none')}. Only the numbering of XLM-R or ALBERT without added tokens is "
                "supported"
            )


def _main_file(folder: Path) -> Path:
    """The most complete file; a SentencePiece model comes before the tokenizer.json that was derived from it."""
    for name in (*_MODEL_FILES, "tokenizer.json", "vocab.json", "vocab.txt"):
        if (folder / name).exists():
            return folder / name
    raise UserError(
        f"{folder} contains no tokenizer: no tokenizer.json, vocab.txt, vocab.json or SentencePiece .model. "
        "Give a tokenizer folder"
    )


def _read_file(file: Path, settings: dict[str, Any], lowercase: bool | None) -> TokenizerSpec:
    if file.suffix == ".model":
        from bert_jax.tokenization import (
            sentencepiece_model,  # imports protobuf, which other kinds do not need
        )

        return sentencepiece_model.from_model(file, settings, lowercase)
    if file.name == "merges.txt":
        raise UserError("it is half of a byte-level BPE tokenizer. Give vocab.json of the same folder, or the folder")
    if file.suffix != ".json":
        return wordpiece.from_lines(file, settings, lowercase)
    content = read_json(file)
    if file.name == "vocab.json":
        from bert_jax.tokenization import byte_bpe

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
        from bert_jax.tokenization import byte_bpe

        return byte_bpe.from_json(content, settings, lowercase)
    if kind == "Unigram":
        from bert_jax.tokenization import sentencepiece_model

        return sentencepiece_model.from_json(content, settings, lowercase)
    raise UserError(f"unsupported model type {kind}; choose a tokenizer of type WordPiece, BPE or Unigram")
