"""One face over the tokenizers: text to ids, quickly, and the facts of a vocabulary that masking needs.

The kinds: WordPiece and byte-level BPE by the Hugging Face `tokenizers` library, Unigram and BPE by `sentencepiece`.
Each is plain data (what decides ids), a library at work, and files; the rest of the program sees only this face.
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

# What the kinds are called.
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
    """Text to ids and back, with the facts of the vocabulary.

    Equal in every id to the library alone. Pickles as what decides its ids; each process warms a cache of its own.
    Not for use by several threads at once.

    kind                       wordpiece, bpe (byte-level), unigram or sentencepiece_bpe
    vocab_size                 ids are 0..vocab_size-1
    pad_id, unk_id, cls_id, sep_id, mask_id
    roles                      the tokens of those five; in GPT-2's vocabulary one token is all of them
    has_mask, has_unknown      whether there is a token for masks alone; for what has no other, that ends no text
    special_ids                ascending; the five and every further special token
    pair_separators            how many separators this kind's published models have between two texts: 2 for
                               RoBERTa and XLM-R (<s> A </s></s> B </s>), else 1
    lowercase                  whether text is lower-cased before it is looked up
    continuation               bool[V]: True where the id is the inside of a word: "##ing"; no leading space (BPE)
    content_hash               sha256 over all that decides ids: equal however it was loaded or saved
    id_dtype                   uint16 where every id fits, else uint32
    """

    def __init__(self, content: TokenizerSpec) -> None:
        self._content = content
        self._tokens = content.all_tokens()
        self._ids = {token: index for index, token in enumerate(self._tokens)}
        self._engine = content.engine()
        self.kind = content.kind
        self.vocab_size = len(self._tokens)
        self.roles: Roles = content.roles
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (self._ids[token] for token in self.roles)
        self.has_mask = self.mask_id not in (self.pad_id, self.unk_id, self.cls_id, self.sep_id)
        self.has_unknown = self.unk_id not in (self.cls_id, self.sep_id)
        self.special_ids = content.special_ids()
        self.pair_separators = content.pair_separators
        self.lowercase = content.lowercase
        self.id_dtype = id_dtype(self.vocab_size)
        self._cache = ChunkCache(self._engine, self.id_dtype)

    def __reduce__(self) -> tuple[type["Tokenizer"], tuple[TokenizerSpec]]:
        return Tokenizer, (self._content,)

    @functools.cached_property
    def continuation(self) -> Bool[np.ndarray, "V"]:
        inside = np.array([self._content.is_inside(token) for token in self._tokens])
        inside[list(self.special_ids)] = False
        return inside

    @functools.cached_property
    def content_hash(self) -> str:
        return self._content.content_hash()

    def encode(self, text: str) -> UInt[np.ndarray, "n"]:
        """The ids of a text, without special tokens; "[MASK]" and its like in the text are ordinary text."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> tuple[UInt[np.ndarray, "n"], Int64[np.ndarray, "boundaries"]]:
        """The ids of many texts, joined, and where each begins.

        Text i is ids[offsets[i]:offsets[i + 1]]. As `encode` on each, several times faster: give it a document
        or more at a time.
        """
        try:
            ids, counts = self._cache.encode(texts)
        except UnicodeEncodeError:
            refuse_surrogates(texts)
            raise
        return ids, np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])

    def as_in_text(self, words: Sequence[str]) -> list[str]:
        """The words of a text for `encode_many`, which then gives each its ids within that text.

        A word of byte-level BPE has the space before it; the first word of a text has none.
        """
        if self.kind != "bpe":
            return list(words)
        return [f" {word}" if place else word for place, word in enumerate(words)]

    def encode_special(self, text: str) -> UInt[np.ndarray, "n"]:
        """As `encode`, but the special tokens written in the text ("[MASK]", "<mask>") become their ids."""
        refuse_surrogates([text])
        return np.array(self._engine.encode_special(text), self.id_dtype)

    def encode_offsets(self, text: str) -> tuple[UInt[np.ndarray, "n"], Int64[np.ndarray, "n 2"]]:
        """The ids of a text, and the characters [start, end) of the text that each comes from; see the next."""
        ids, _, offsets = self.encode_offsets_many([text])
        return ids, offsets

    def encode_offsets_many(
        self, texts: Sequence[str]
    ) -> tuple[UInt[np.ndarray, "n"], Int64[np.ndarray, "boundaries"], Int64[np.ndarray, "n 2"]]:
        """As `encode_many`, and the characters [start, end) of its text that each id comes from.

        White space before a word is not its first piece's; a piece that is nothing else has what it stands for, or
        (SentencePiece) an empty span where the word begins. All bytes of a character have that character. Not
        remembered by the cache: slower than `encode_many`.
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
        """Readable text: pieces joined to words, special tokens kept; what normalising took stays away."""
        return self._engine.decode([int(token) for token in ids])

    def tokens(self, ids: Sequence[int] | Integer[np.ndarray, "n"]) -> list[str]:
        """The token of each id, as the vocabulary writes it. Raises IndexError for an id outside of it."""
        return [self._tokens[int(token)] for token in ids]

    def surfaces(self, ids: Sequence[int] | Integer[np.ndarray, "n"]) -> list[str]:
        """The characters of each id, without the mark of a word's beginning or inside; special tokens as they are."""
        special = set(self.special_ids)
        tokens = zip(ids, self.tokens(ids), strict=True)
        return [token if int(index) in special else self._content.surface(token) for index, token in tokens]

    def id_of(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it ("##ing"), or None when it is not there."""
        return self._ids.get(token)

    def save(self, directory: str | Path) -> None:
        """Writes the files of a Hugging Face folder of this kind, tokenizer.json and tokenizer_config.json among them.

        `load` gives an equal tokenizer back, and so does `transformers.AutoTokenizer.from_pretrained`. The
        same tokenizer gives the same bytes.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._content.write(directory)
        (directory / "tokenizer.json").write_text(self._engine.to_json(), encoding="utf-8")


def load(path: str | Path, lowercase: bool | None = None) -> Tokenizer:
    """Loads a folder of `Tokenizer.save`, a Hugging Face folder of any of the kinds, or one of the files.

    The files: vocab.txt (WordPiece); vocab.json with merges.txt beside it (byte-level BPE); a SentencePiece .model
    (with the ids of XLM-R, or of ALBERT where its pieces have [CLS]); tokenizer.json of any kind.

    Lower-casing is that of tokenizer_config.json in the folder (or beside the file), or of tokenizer.json;
    else the argument; else what the vocabulary shows: one without capitals is for lower-cased text. Raises
    UserError for a missing or broken file, missing special tokens, another kind of tokenizer, and an argument
    that contradicts the files.
    """
    if not str(path):  # to pathlib this is the current folder
        raise UserError("the tokenizer's path is empty. Give a tokenizer folder or one of its files, such as vocab.txt")
    return Tokenizer(read(Path(path), lowercase))


def read(path: Path, lowercase: bool | None = None) -> TokenizerSpec:
    """What decides the ids of the tokenizer at a path; see `load`."""
    if not path.exists():
        raise UserError(f"no tokenizer at {path}. Give a tokenizer folder or one of its files, such as vocab.txt")
    file = _main_file(path) if path.is_dir() else path
    try:
        whole = path / "tokenizer.json"
        if path.is_dir() and (path / "added_tokens.json").exists() and not whole.exists():
            raise UserError("has added_tokens.json and no tokenizer.json. Save it again with a fast tokenizer")
        content = _read_file(file, read_settings(file.parent), lowercase)
        if path.is_dir() and file.suffix == ".model" and whole.exists():
            _refuse_other_ids(content, read_json(whole))
        return content
    except UserError as error:
        raise UserError(f"tokenizer {file}: {error}") from None
    except (KeyError, AttributeError, TypeError, ValueError, StopIteration) as error:
        lacks = f"no field {error}" if isinstance(error, KeyError) else "a field that is not of the kind it should be"
        raise UserError(f"tokenizer {file}: {lacks}. Fetch or save the tokenizer again") from error


def _refuse_other_ids(content: TokenizerSpec, library: dict[str, Any]) -> None:
    """Raises UserError where the tokenizer.json beside a SentencePiece model numbers its special or added tokens
    otherwise: words that a user added, or another family's numbering (CamemBERT's)."""
    ids = {token: index for index, token in enumerate(content.all_tokens())}
    for token in library.get("added_tokens") or []:
        if ids.get(token["content"]) != token["id"]:
            raise UserError(
                f"tokenizer.json beside it has {token['content']!r} as id {token['id']}, and the model has it as "
                f"{ids.get(token['content'], 'none')}. Only the numbering of XLM-R or of ALBERT, and no added tokens, "
                "are supported"
            )


def _main_file(folder: Path) -> Path:
    """The file that says most; a SentencePiece model before the tokenizer.json that was made of it."""
    for name in (*_MODEL_FILES, "tokenizer.json", "vocab.json", "vocab.txt"):
        if (folder / name).exists():
            return folder / name
    raise UserError(
        f"{folder} holds neither tokenizer.json nor vocab.txt, vocab.json or a SentencePiece .model. "
        "Give a tokenizer's folder"
    )


def _read_file(file: Path, settings: dict[str, Any], lowercase: bool | None) -> TokenizerSpec:
    if file.suffix == ".model":
        from bert_jax.tokenization import (
            sentencepiece_model,  # brings SentencePiece and protobuf in, which other kinds do not need
        )

        return sentencepiece_model.from_model(file, settings, lowercase)
    if file.name == "merges.txt":
        raise UserError("half of a byte-level BPE tokenizer. Give vocab.json, which lies beside it, or the folder")
    if file.suffix != ".json":
        return wordpiece.from_lines(file, settings, lowercase)
    content = read_json(file)
    if file.name == "vocab.json":
        from bert_jax.tokenization import byte_bpe

        return byte_bpe.from_files(content, file.parent / "merges.txt", settings, lowercase)
    model = content.get("model") or {}
    if not model:
        raise UserError("holds no tokenizer's model. Give the folder, or its tokenizer.json, vocab.json or vocab.txt")
    # Files of old versions name no model type; a WordPiece one is known by its own field, a BPE one too.
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
    raise UserError(f"its model is {kind}. WordPiece, BPE and Unigram are supported")
