"""What one task of data preparation does: a unit's text to shards of rows."""

import functools
import itertools
import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, UInt

from bert_jax import tokenizer as tokenizers
from bert_jax.data.example import Rows
from bert_jax.data.masking import Masker
from bert_jax.data.shards import write_shard
from bert_jax.tokenizer import Tokenizer
from data_prep.fill import count_predictions, fill_rows, mask_rows
from data_prep.job import Arguments, Record, write_record
from data_prep.pairing import full_sentence_spans, next_sentence_pairs
from data_prep.sentences import document_sentences
from data_prep.units import Unit


class Encoded(NamedTuple):
    """A unit's text as ids: only documents and sentences that have any."""

    ids: UInt[np.ndarray, "n"]
    offsets: Int64[np.ndarray, "sentences+1"]  # sentence i is ids[offsets[i]:offsets[i + 1]]
    documents: list[tuple[int, int]]  # the sentences [first, last) of each
    empty: int  # documents without a token


def build_unit(directory: Path, arguments: Arguments, unit: Unit) -> Record:
    """Writes a unit's shards, one for each of the dupe_factor pairings, and then its record.

    Any process may do any unit: the result is a function of the arguments and the unit. `directory` is the job's.
    """
    tokenizer = _tokenizer(directory / "tokenizer")
    masker = Masker(tokenizer, arguments.mask_unit, arguments.mask_rate, arguments.seed)
    encoded = encode(tokenizer, unit)
    counts = {
        "documents": len(unit.documents),
        "sentences": len(encoded.offsets) - 1,
        "source_tokens": len(encoded.ids),
        "sequences": 0,
        "rows": 0,
        "tokens": 0,
        "predictions": 0,
    }
    skipped = {"no_tokens": encoded.empty} if encoded.empty else {}
    if arguments.objective == "nsp" and len(encoded.documents) == 1:
        skipped["no_other_document"] = 1
        encoded = encoded._replace(documents=[])
    unigrams = np.zeros(tokenizer.vocab_size, np.int64)
    shards = []
    for dupe in range(arguments.dupe_factor if encoded.documents else 0):
        generator = random.Random(f"{arguments.seed} {unit.part} {unit.number} {dupe}")
        first_key = (unit.key << 32) | counts["sequences"]
        rows = _rows(tokenizer, arguments, encoded, first_key, generator)
        unigrams += np.bincount(rows.input_ids.reshape(-1), minlength=tokenizer.vocab_size)
        if arguments.masking == "static":
            rows = mask_rows(rows, masker, arguments.max_predictions)
            counts["predictions"] += int(rows.masked_counts.sum())  # type: ignore[union-attr]
        else:
            counts["predictions"] += count_predictions(rows, masker, arguments.max_predictions)
        counts["sequences"] += len(rows.input_ids)
        counts["rows"] += len(rows.input_ids)
        counts["tokens"] += int(rows.sequence_lengths.sum())
        name = f"{unit.part}/shard-{unit.number * arguments.dupe_factor + dupe:05d}.arrow"
        shards.append({"name": name} | write_shard(directory / name, rows)._asdict())
    unigrams[list(tokenizer.special_ids)] = 0
    record = Record(unit.name, unit.text_hash, counts, skipped, shards)
    write_record(directory, record, unigrams)
    return record


def encode(tokenizer: Tokenizer, unit: Unit) -> Encoded:
    """The ids of a unit's sentences, in one call of the tokenizer."""
    sentences: list[str] = []
    counts = []
    for document in unit.documents:
        found = document_sentences(document.decode())
        sentences += found
        counts.append(len(found))
    ids, offsets = tokenizer.encode_many(sentences)
    present = np.diff(offsets) > 0
    # How many sentences with a token lie before each one, and so before each document.
    before = np.concatenate([[0], np.cumsum(present)])
    borders = before[np.concatenate([[0], np.cumsum(counts)])].tolist()
    documents = [(first, last) for first, last in itertools.pairwise(borders) if first < last]
    kept = np.append(offsets[:-1][present], offsets[-1])
    return Encoded(ids, kept, documents, len(unit.documents) - len(documents))


def _rows(
    tokenizer: Tokenizer,
    arguments: Arguments,
    encoded: Encoded,
    first_key: int,
    generator: random.Random,
) -> Rows:
    """One pairing of a unit's documents, as rows before masking."""
    seq_len = arguments.seq_len
    if arguments.objective == "nsp":
        offsets = encoded.offsets.tolist()
        pairs = np.array(
            next_sentence_pairs(offsets, encoded.documents, seq_len, arguments.short_seq_prob, generator), np.int64
        )
        spans, labels = pairs[:, :4].reshape(-1, 2, 2), pairs[:, 4]
        return fill_rows(encoded.ids, spans, labels, first_key, seq_len, tokenizer)
    ids, begins, ends = _stream(encoded, tokenizer.sep_id)
    spans = np.array(full_sentence_spans(begins, ends, seq_len), np.int64)[:, None, :]
    return fill_rows(ids, spans, np.full(len(spans), -1), first_key, seq_len, tokenizer)


def _stream(
    encoded: Encoded, separator: int
) -> tuple[UInt[np.ndarray, "m"], Int64[np.ndarray, "sentences"], Int64[np.ndarray, "sentences"]]:
    """The ids with one separator before each document, and where each sentence then begins and ends."""
    firsts = np.array([first for first, _ in encoded.documents], np.int64)
    ids = np.insert(encoded.ids, encoded.offsets[firsts], separator)
    shift = np.zeros(len(encoded.offsets) - 1, np.int64)
    shift[firsts] = 1
    shift = np.cumsum(shift)
    return ids, encoded.offsets[:-1] + shift, encoded.offsets[1:] + shift


@functools.lru_cache(maxsize=1)
def _tokenizer(path: Path) -> Tokenizer:
    """One a process, so that its cache of words lives as long."""
    return tokenizers.load(path)
