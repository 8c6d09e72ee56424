"""Text to token ids and back, by one interface for all kinds of tokenizer.

WordPiece and byte-level BPE use the Hugging Face `tokenizers` library; SentencePiece's Unigram and BPE models use the
`sentencepiece` library. A kind consists of a specification (plain data that determines every id), an engine (the
library that encodes) and the files that store it. The rest of the program mostly uses this module and
bert_jax.tokenization.vocabulary.
"""

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.array_types import Int64, Integer, UInt
from bert_jax.storage.files import read_json, write_json
from bert_jax.tokenization import vocabulary
from bert_jax.tokenization.engine import ChunkCache, Engine, refuse_surrogates
from bert_jax.tokenization.specification import TokenizerSpec
from bert_jax.tokenization.vocabulary import Vocabulary
from bert_jax.tokenization.wordpiece import WordPieceEngine


class Tokenizer(Vocabulary):
    """A vocabulary with an encoder and a decoder.

    All ids equal the library's own. A tokenizer pickles as its specification, so processes fill
    caches of their own. It is not safe for use by several threads at once.
    """

    def __init__(self, spec: TokenizerSpec, matches_special: bool = False) -> None:
        """With `matches_special`, special tokens written in a text are these tokens, and otherwise ordinary text."""
        super().__init__(spec)
        self._matches_special = matches_special
        # The longest first, as the libraries match them.
        special = sorted((re.escape(self._tokens[index]) for index in self.special_ids), key=len, reverse=True)
        self._special = re.compile("|".join(special)) if matches_special else None
        self._engine: Engine
        spec_of_kind: Any = spec
        if self.kind == "wordpiece":
            self._engine = WordPieceEngine(spec_of_kind)
        elif self.kind == "bpe":
            from bert_jax.tokenization.byte_bpe import ByteBPEEngine  # takes a while to import

            self._engine = ByteBPEEngine(spec_of_kind)
        elif self.kind == "word_bpe":
            from bert_jax.tokenization.word_bpe import WordBPEEngine

            self._engine = WordBPEEngine(spec_of_kind)
        else:  # SentencePiece's library is imported only if it is needed
            from bert_jax.tokenization.sentencepiece_engine import SentencePieceEngine

            self._engine = SentencePieceEngine(spec_of_kind)
        self._cache = ChunkCache(self._engine, self.id_dtype)

    def __reduce__(self) -> tuple[type["Tokenizer"], tuple[TokenizerSpec, bool]]:
        return Tokenizer, (self.spec, self._matches_special)

    @functools.cached_property
    def within_text(self) -> "Tokenizer":
        """The tokenizer for the continuation of a text without a space: it puts none before the first word."""
        spec = self.spec.within_text()
        return self if spec == self.spec else Tokenizer(spec, self._matches_special)

    @functools.cached_property
    def of_tasks(self) -> "Tokenizer":
        """The tokenizer for the texts of tasks and embeddings. Special tokens in a text ("[SEP]", "[E1]") are matched.

        Users write them, or add them to a vocabulary for such texts. transformers matches them, too, except with
        split_special_tokens, which only leaves those without a role.
        """
        spec, matches = self.spec.of_tasks(), not self.spec.split_special_tokens
        return self if (spec, matches) == (self.spec, self._matches_special) else Tokenizer(spec, matches)

    def encode(self, text: str) -> UInt[np.ndarray, "n"]:
        """Encodes a text without adding special tokens. "[MASK]" and the like in the text are ordinary text."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> tuple[UInt[np.ndarray, "n"], Int64[np.ndarray, "boundaries"]]:
        """Encodes many texts. This is several times faster than one call per text: pass at least a whole document.

        Returns:
            The concatenated ids, and the offsets at which texts begin: text i has ids[offsets[i]:offsets[i + 1]],
            which equal those from `encode`.

        Raises:
            UserError: a lone surrogate.
        """
        special = [index for index, text in enumerate(texts) if self._special.search(text)] if self._special else []
        special_ids = [self.encode_special(texts[index]) for index in special]
        if special:
            texts = list(texts)
            for index in special:
                texts[index] = ""
        try:
            ids, counts = self._cache.encode(texts)
        except UnicodeEncodeError:
            refuse_surrogates(texts)
            raise
        if special:
            # The places of these texts, which have no ids yet, before the insertion.
            places = (np.cumsum(counts) - counts)[special]
            counts[special] = [len(part) for part in special_ids]
            ids = np.insert(ids, np.repeat(places, counts[special]), np.concatenate(special_ids))
        return ids, np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])

    def as_in_text(self, words: Sequence[str]) -> list[str]:
        """Prepares words for `encode_many` so that they get the same ids as within the whole text.

        In byte-level BPE a word includes the space before it, which a text's first word does not have.
        """
        if self.kind != "bpe":
            return list(words)
        return [f" {word}" if index else word for index, word in enumerate(words)]

    def encode_special(self, text: str) -> UInt[np.ndarray, "n"]:
        """Like `encode`, but special tokens written in the text ("[MASK]", "<mask>") become their ids."""
        refuse_surrogates([text])
        return np.array(self._engine.encode_special(text), self.id_dtype)

    def encode_offsets(self, text: str) -> tuple[UInt[np.ndarray, "n"], Int64[np.ndarray, "n 2"]]:
        """Encodes a text; also returns the character span [start, end) of each id. See `encode_offsets_many`."""
        ids, _, offsets = self.encode_offsets_many([text])
        return ids, offsets

    def encode_offsets_many(
        self, texts: Sequence[str]
    ) -> tuple[UInt[np.ndarray, "n"], Int64[np.ndarray, "boundaries"], Int64[np.ndarray, "n 2"]]:
        """Like `encode_many`, but also returns the character span [start, end) of its text for each id.

        A token's span excludes white space before its word. A token of white space alone has its span or, with
        SentencePiece, an empty span at the next word's beginning. All bytes of one character have its span. This method
        bypasses the cache, so it is slower than `encode_many`.
        """
        refuse_surrogates(texts)
        ids, offsets = [np.zeros(0, self.id_dtype)], [np.zeros((0, 2), np.int64)]
        for text in texts:
            text_ids, spans = self._engine.encode_offsets(text, special=self._special is not None)
            ids.append(np.array(text_ids, self.id_dtype))
            offsets.append(np.array(spans, np.int64).reshape(-1, 2))
        boundaries = np.cumsum([len(part) for part in ids], dtype=np.int64)
        return np.concatenate(ids), boundaries, np.concatenate(offsets)

    def encode_words_many(
        self, texts: Sequence[str]
    ) -> tuple[UInt[np.ndarray, "n"], Int64[np.ndarray, "boundaries"], Int64[np.ndarray, "n"]]:
        """Like `encode_many`, but also returns the word of each id, numbered from 0 in its text.

        Words are those of the tokenizer's own splits, as `word_ids` in transformers gives them: WordPiece splits at
        white space and punctuation, byte-level BPE by its regular expression, SentencePiece at white space. Like
        `encode_offsets_many`, this method bypasses the cache.
        """
        refuse_surrogates(texts)
        ids, words = [np.zeros(0, self.id_dtype)], [np.zeros(0, np.int64)]
        for text in texts:
            text_ids, text_words = self._engine.encode_words(text, special=self._special is not None)
            ids.append(np.array(text_ids, self.id_dtype))
            words.append(np.array(text_words, np.int64))
        boundaries = np.cumsum([len(part) for part in ids], dtype=np.int64)
        return np.concatenate(ids), boundaries, np.concatenate(words)

    def decode(self, ids: Sequence[int] | Integer[np.ndarray, "n"]) -> str:
        """Readable text: tokens joined to words, special tokens kept. Normalization is not undone."""
        return self._engine.decode([int(token) for token in ids])

    def save(self, directory: str | Path) -> None:
        """Writes a Hugging Face tokenizer folder, including tokenizer.json and tokenizer_config.json.

        `load` and `transformers.AutoTokenizer.from_pretrained` read it back as an equal tokenizer. Equal tokenizers
        write equal bytes.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self.spec.write(directory)
        if self.spec.split_special_tokens:
            settings = directory / "tokenizer_config.json"
            write_json(settings, read_json(settings) | {"split_special_tokens": True})
        (directory / "tokenizer.json").write_text(self._engine.to_json(), encoding="utf-8")


def load(path: str | Path, lowercase: bool | None = None) -> Tokenizer:
    """Loads a tokenizer from a folder or a file; see `vocabulary.load`."""
    return Tokenizer(vocabulary.load(path, lowercase).spec)
