"""Builds one unit: encodes its text and writes it as files of rows, which data_prep/joining.py joins into shards.

Start with `build_unit` at the end, which any process may run for any unit. `encode` returns the sentences' ids, from
the tokenizer or a `TokenCache`; data_prep/sequences.py makes sequences of them, as spans; `fill_rows` copies the ids
into rows; `mask_rows` applies static masks.
"""

import contextlib
import functools
import hashlib
import io
import os
import random
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bert_jax.array_types import Bool, Int64, UInt, UInt64
from bert_jax.data.example import Rows
from bert_jax.data.masking.masker import Masker
from bert_jax.errors import UserError
from bert_jax.storage.files import naming
from bert_jax.tokenization import tokenizer as tokenizers
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.tokenization.vocabulary import KINDS
from data_prep import output_files
from data_prep.build_options import Arguments
from data_prep.job import UNITS, UnitRecord, write_record
from data_prep.noise import corrupt, rearrange, room_for
from data_prep.packing import Packed, pack
from data_prep.sentences import RULE_VERSION, joined_sentences, kept_pieces
from data_prep.sequences import (
    RANDOM_SEGMENT,
    Encoded,
    Spans,
    borders,
    left_out,
    segment_count,
    sequence_lengths,
    spans,
    usable,
)
from data_prep.units import Unit

_SUFFIX = ".ids"
_UNFINISHED = ".unfinished"
_DIGEST_BYTES = 16
_NAMED_BY = 16  # characters of the tokenizer's hash; the files hold all of it
_LEFT_BEHIND = 24 * 3600  # seconds after which an unfinished file has no writer any more


@dataclass
class _Listed:
    """A cache's size when this process last listed it."""

    bytes: int  # also of the units that this process has stored since then
    since: int = 0  # bytes of units since then, including those that did not fit


_LISTED: dict[Path, _Listed] = {}


@dataclass(frozen=True)
class TokenCache:
    """Keeps token ids for jobs with another length or objective on the same text (--token_cache DIR).

    The file DIR/TOKENIZER-rRULE/TEXT.ids holds one unit's ids: TOKENIZER and TEXT are hashes, RULE is the version of
    the sentence rules, with -keep if line breaks are kept. Any number of jobs may use one folder at the same time,
    because a file is renamed when it is complete, and ends with a hash of its content.

    The folder holds at most `limit` bytes; further units are not stored.
    """

    directory: Path
    limit: int
    newlines: str = "join"  # or keep, as in BuildOptions

    @property
    def rule(self) -> str:
        return str(RULE_VERSION) if self.newlines == "join" else f"{RULE_VERSION}-{self.newlines}"

    def prepare(self) -> None:
        """Creates the folder, and removes files that killed writers left.

        Raises:
            UserError: The path is a file.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise UserError(f"--token_cache {self.directory} is a file. Choose a folder") from None
        _LISTED.pop(self.directory, None)
        for path in self.directory.glob(f"*/*{_UNFINISHED}"):
            with contextlib.suppress(FileNotFoundError):  # another job has just finished or removed it
                if time.time() - path.stat().st_mtime > _LEFT_BEHIND:
                    path.unlink()

    def bytes(self) -> int:
        """Adds up the stored units' sizes."""
        total = 0
        for folder in os.scandir(self.directory):
            for entry in os.scandir(folder) if folder.is_dir() else ():
                if entry.name.endswith(_SUFFIX):
                    with contextlib.suppress(FileNotFoundError):
                        total += entry.stat().st_size
        return total

    def holds(self, tokenizer_hash: str, text_hash: str) -> bool:
        return self._path(tokenizer_hash, text_hash).exists()

    def load(self, tokenizer_hash: str, text_hash: str) -> Encoded | None:
        """Returns a stored unit; None if it is missing, incomplete or modified."""
        try:
            content = self._path(tokenizer_hash, text_hash).read_bytes()
            body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
            if _digest(body) != digest:
                return None
            stream = io.BytesIO(body)
            names, ids, *lengths, empty = (np.load(stream) for _ in range(5))
        except (FileNotFoundError, ValueError):  # missing, or in another format
            return None
        if names.tolist() != [tokenizer_hash, text_hash, self.rule]:
            return None
        sentences, documents = map(_offsets, lengths)
        return Encoded(
            ids.astype(ids.dtype.newbyteorder("="), copy=False),
            sentences,
            np.stack([documents[:-1], documents[1:]], axis=1),
            int(empty),
        )

    def store(self, tokenizer_hash: str, text_hash: str, encoded: Encoded) -> None:
        """Stores an encoded unit, unless the cache is full.

        Raises:
            OSError: The file cannot be written, for example because the disk is full.
        """
        names, lengths = [tokenizer_hash, text_hash, self.rule], np.diff(encoded.offsets)
        per_document = np.diff(encoded.documents, axis=1)[:, 0]
        body = io.BytesIO()
        for array in (names, encoded.ids, lengths.astype("<u4"), per_document.astype("<u4"), encoded.empty):
            np.save(body, array)
        path = self._path(tokenizer_hash, text_hash)
        path.parent.mkdir(parents=True, exist_ok=True)  # an engine's worker may be the first to need it
        # The folder may hold thousands of files, so it is not listed for every unit: only after a thousandth of the
        # limit, and in the last tenth. Up to a hundred processes then exceed the limit by at most one unit each.
        content = body.getvalue()
        size, listed = len(content) + _DIGEST_BYTES, _LISTED.get(self.directory)
        full = listed is not None and listed.bytes + size > self.limit
        if listed is None or listed.since > self.limit // 1000 or (self.limit * 9 // 10 < listed.bytes and not full):
            listed = _LISTED[self.directory] = _Listed(self.bytes())
        listed.since += size
        if listed.bytes + size > self.limit:
            return
        listed.bytes += size
        unfinished = path.with_name(f"{path.stem}.{os.getpid()}.{secrets.token_hex(4)}{_UNFINISHED}")
        try:
            with naming(self.directory):
                unfinished.write_bytes(content + _digest(content))
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    def _path(self, tokenizer_hash: str, text_hash: str) -> Path:
        return self.directory / f"{tokenizer_hash[:_NAMED_BY]}-r{self.rule}" / (text_hash + _SUFFIX)


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def refuse_newlines(tokenizer: Tokenizer) -> None:
    """Checks that the tokenizer can keep line breaks.

    Raises:
        UserError: It cannot.
    """
    if not tokenizer.spec.keeps_newlines:
        more = ", or its normalizer or added tokens join white space" if tokenizer.kind == "bpe" else ""
        raise UserError(
            f"--newlines keep: the {KINDS[tokenizer.kind]} vocabulary has no tokens for line breaks{more}. Leave the "
            "option out, or use byte-level BPE such as the vocabularies of GPT-2, RoBERTa and ModernBERT"
        )


def encode(tokenizer: Tokenizer, unit: Unit, cache: TokenCache | None = None, newlines: str = "join") -> Encoded:
    """Returns the ids for a unit's sentences, from the cache or from the tokenizer.

    Args:
        newlines: "join" joins a document's lines (data_prep/sentences.py); "keep" gives the ids of its text as it is.
    """
    if cache and (cached := cache.load(tokenizer.content_hash, unit.text_hash)):
        return cached
    texts: list[str] = []
    direct: list[bool] = []  # whether a text continues the one before without a space
    counts = []
    for document in unit.documents:
        sentences, follows = _texts(tokenizer, document.decode(), newlines)
        texts += sentences
        direct += follows
        counts.append(len(sentences))
    ids, offsets = _encode_texts(tokenizer, texts, np.array(direct, bool))
    # Sentences and documents without a token are dropped. `borders` counts the other sentences before each document.
    present = np.diff(offsets) > 0
    borders = _offsets(present)[_offsets(np.array(counts, np.int64))]
    documents = np.stack([borders[:-1], borders[1:]], axis=1)
    documents = documents[documents[:, 0] < documents[:, 1]]
    offsets = np.append(offsets[:-1][present], offsets[-1])
    encoded = Encoded(ids, offsets, documents, len(unit.documents) - len(documents))
    if cache:
        cache.store(tokenizer.content_hash, unit.text_hash, encoded)
    return encoded


def _texts(tokenizer: Tokenizer, document: str, newlines: str) -> tuple[list[str], list[bool]]:
    """Splits a document into sentences with the white space that belongs to their ids.

    Also returns whether each continues the one before without a space.
    """
    if newlines == "keep":
        pieces = kept_pieces(document)
        return pieces, [number > 0 for number in range(len(pieces))]
    sentences, direct = joined_sentences(document)
    if tokenizer.kind == "bpe":
        # In byte-level BPE, a token includes the space before its word, so a sentence inside a text has other ids than
        # one that begins it: to RoBERTa "well. As such" is one text, and "As" has a space before it.
        follows = zip(sentences, direct, strict=True)
        sentences = [text if not number or joins else f" {text}" for number, (text, joins) in enumerate(follows)]
    return sentences, direct


def _encode_texts(
    tokenizer: Tokenizer, texts: list[str], direct: Bool[np.ndarray, "n"]
) -> tuple[UInt[np.ndarray, "k"], Int64[np.ndarray, "n+1"]]:
    """Encodes texts, and returns their concatenated ids and the offsets at which they begin."""
    if not direct.any() or tokenizer.within_text is tokenizer:
        return tokenizer.encode_many(texts)
    # Encoding many texts at once is fast, so each tokenizer gets all of its texts; text i then has the ids
    # ids[begins[i]:begins[i] + lengths[i]], which the last line puts in the order of the texts.
    begins, lengths = np.zeros((2, len(texts)), np.int64)
    ids = np.zeros(0, tokenizer.id_dtype)
    for encoder, chosen in ((tokenizer, ~direct), (tokenizer.within_text, direct)):
        chosen_ids, offsets = encoder.encode_many([texts[index] for index in np.flatnonzero(chosen)])
        begins[chosen], lengths[chosen] = len(ids) + offsets[:-1], np.diff(offsets)
        ids = np.concatenate([ids, chosen_ids])
    ends = _offsets(lengths)
    return ids[np.repeat(begins - ends[:-1], lengths) + np.arange(ends[-1])], ends


# Rows processed at a time, which bounds the memory for working arrays. It does not change results.
ROWS_PER_BATCH = 4096


def fill_rows(
    spans: Spans, keys: UInt64[np.ndarray, "Q"], packed: Packed, seq_len: int, pack: int, tokenizer: Tokenizer
) -> Rows:
    """Makes rows from sequences, `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`, at their packed positions."""
    sequences, segments = spans.sequences[packed.order], spans.segments
    # bounds[sequence, segment] = [begin, end) in spans.ids; ends[sequence, segment] is the position of the segment's
    # [SEP] in its sequence, in which [CLS] has the position 0; `starts` index the rows flattened to R*T.
    bounds = sequences[:, : 2 * segments].reshape(-1, segments, 2)
    lengths = bounds[..., 1] - bounds[..., 0]
    ends = np.cumsum(lengths + 1, axis=1)
    count = int(packed.rows[-1]) + 1
    starts = packed.rows * seq_len + packed.starts

    ids = np.full(count * seq_len, tokenizer.pad_id, tokenizer.id_dtype)
    ids[starts] = tokenizer.cls_id
    ids[starts[:, None] + ends] = tokenizer.sep_id
    # All segments are copied in one step: the n-th id copied goes to targets[n]. `firsts` is where a segment's ids
    # begin in the rows, and `before` the number of ids copied before them.
    firsts = starts[:, None] + ends - lengths
    repeats = lengths.reshape(-1)
    before = np.cumsum(repeats) - repeats
    running = np.arange(repeats.sum())
    targets = running + np.repeat(firsts.reshape(-1) - before, repeats)
    ids[targets] = spans.ids[running + np.repeat(bounds[..., 0].reshape(-1) - before, repeats)]

    def column(values: np.ndarray, absent: int, dtype: type[np.integer]) -> np.ndarray:
        filled = np.full((count, pack), absent, dtype)
        filled[packed.rows, packed.places] = values
        return filled

    return Rows(
        input_ids=ids.reshape(count, seq_len),
        sequence_lengths=column(ends[:, -1] + 1, 0, np.uint16),
        first_segment_lengths=column(ends[:, 0] + 1, 0, np.uint16),
        next_sentence_labels=column(sequences[:, 4], -1, np.int8),
        sequence_keys=column(keys[packed.order], 0, np.uint64),
    )


def mask_rows(rows: Rows, masker: Masker, max_predictions: int) -> Rows:
    """Applies static masks: the dynamic masks that a loader would apply in epoch 0 (law 2).

    With unit infill, sequences become shorter and lose the masked text.
    """
    id_dtype = rows.input_ids.dtype
    parts = [masker.apply(part, np.zeros(len(part.input_ids), np.int64), max_predictions) for part in row_batches(rows)]
    return rows._replace(
        input_ids=np.concatenate([part.input_ids for part in parts]).astype(id_dtype),
        sequence_lengths=np.concatenate([part.sequence_lengths for part in parts]),
        first_segment_lengths=np.concatenate([part.first_segment_lengths for part in parts]),
        masked_positions=np.concatenate([part.positions for part in parts]).astype(np.uint16),
        masked_ids=np.concatenate([part.ids for part in parts]).astype(id_dtype),
        masked_counts=np.concatenate([part.counts for part in parts]).astype(np.uint16),
    )


def row_batches(rows: Rows) -> Iterator[Rows]:
    """Yields the rows in batches of ROWS_PER_BATCH."""
    for start in range(0, len(rows.input_ids), ROWS_PER_BATCH):
        yield Rows(*(None if column is None else column[start : start + ROWS_PER_BATCH] for column in rows))  # type: ignore[arg-type]


def build_unit(arguments: Arguments, cache: TokenCache | None, directory: Path, unit: Unit) -> UnitRecord:
    """Writes a unit's rows, one file per pairing (dupe_factor), and then its record.

    The result is a function of the arguments and the unit, so any process may build any unit, with or without a cache.

    Args:
        directory: The job's folder.
    """
    tokenizer = _tokenizer(directory, arguments.tokenizer_hash)
    options = arguments.options
    masker = Masker(tokenizer, options.rule, options.seed)
    encoded, skipped = usable(options.objective, encode(tokenizer, unit, cache, options.newlines))
    counts = dict.fromkeys(options.counted, 0) | {
        "documents": len(unit.documents),
        "used": len(encoded.documents),
        "sentences": len(encoded.offsets) - 1,
        "source_tokens": len(encoded.ids),
        "left_out": 0 if len(encoded.documents) else len(encoded.ids) * options.dupe_factor,
        "one_sentence": int(np.count_nonzero(np.diff(encoded.documents, axis=1) == 1)),
    }
    unigrams = np.zeros(tokenizer.vocab_size, np.int64)
    lengths = np.zeros(options.seq_len + 1, np.int64)
    shards = []
    for dupe in range(options.dupe_factor if len(encoded.documents) else 0):
        # Each unit and pairing has its own generator, so no other unit can change its rows. Keys count on from one
        # pairing to the next: every sequence of a unit has its own.
        generator = random.Random(f"{options.seed} {unit.part} {unit.number} {dupe}")
        first_key = (unit.key << 32) | counts["sequences"]
        made = _spans(tokenizer, arguments, encoded, generator)
        counts["left_out"] += left_out(made, tokenizer.sep_id)
        rows = _rows(tokenizer, arguments, encoded, made, first_key)
        unigrams += np.bincount(rows.input_ids.reshape(-1), minlength=tokenizer.vocab_size)
        if options.mask_unit != "token":
            for batch in row_batches(rows):
                words, long_words = masker.count_words(batch)
                counts["words"] += words
                counts["long_words"] += long_words
        if options.objective == "nsp":
            counts["random_pairs"] += int(np.count_nonzero(rows.next_sentence_labels == RANDOM_SEGMENT))
        lengths += np.bincount(rows.sequence_lengths[rows.sequence_lengths > 0], minlength=len(lengths))
        # Counts above are of the text before masking; predictions are counted from the masks of epoch 0.
        if options.masking == "static":
            rows = mask_rows(rows, masker, options.max_predictions)
            counts["predictions"] += int(rows.masked_counts.sum())  # type: ignore[union-attr]
        else:
            for batch in row_batches(rows):
                counts["predictions"] += int(masker.count(batch, np.zeros(len(batch.input_ids), np.int64)).sum())
        counts["sequences"] += int(np.count_nonzero(rows.sequence_lengths))
        counts["rows"] += len(rows.input_ids)
        counts["tokens"] += int(rows.sequence_lengths.sum())
        shards.append(output_files.write(options.format, directory, f"{UNITS}/{unit.name}-{dupe}", rows))
    unigrams[list(tokenizer.special_ids)] = 0  # so that random tokens are never special ones
    record = UnitRecord(unit.name, unit.text_hash, counts, skipped, shards)
    return write_record(directory, record, unigrams, lengths)


def _spans(tokenizer: Tokenizer, arguments: Arguments, encoded: Encoded, generator: random.Random) -> Spans:
    """Makes one pairing, before noise."""
    options = arguments.options
    # Insertions make sequences longer and deletions shorter, so they are built with another length.
    room = room_for(options.seq_len, options.delete_rate, options.insert_rate, segment_count(options.objective))
    probability, separator = arguments.short_seq_prob, tokenizer.sep_id
    return spans(options.objective, encoded, room, options.pack, probability, separator, generator)


def _rows(tokenizer: Tokenizer, arguments: Arguments, encoded: Encoded, made: Spans, first_key: int) -> Rows:
    """Makes rows from one pairing, before masking."""
    options = arguments.options
    seq_len, most = options.seq_len, options.pack
    rates, moves = (options.delete_rate, options.insert_rate), (options.permute_sentences, options.rotate_documents)
    keys = first_key + np.arange(len(made.sequences), dtype=np.uint64)
    if any(moves):
        made = rearrange(made, keys, borders(options.objective, encoded), options.seed, *moves)
    if any(rates):
        ordinary = np.ones(tokenizer.vocab_size, bool)
        ordinary[list(tokenizer.special_ids)] = False
        made = corrupt(made, keys, options.seed, *rates, seq_len, ordinary)
    packed = pack(sequence_lengths(made.sequences, made.segments), made.late, seq_len, most)
    return fill_rows(made, keys, packed, seq_len, most, tokenizer)


# Cached, so that the tokenizer's own cache of words stays warm between units. The key has the folder, because threads
# that run different jobs must not share a tokenizer, and the hash, because a later job may reuse a folder.
@functools.lru_cache(maxsize=1)
def _tokenizer(directory: Path, content_hash: str) -> Tokenizer:
    return tokenizers.load(directory / "tokenizer")
