"""The work of one data-preparation task: turns the text of a unit into shards of rows."""

import functools
import random
from pathlib import Path

import numpy as np

from bert_jax import tokenizer as tokenizers
from bert_jax.data.example import Rows
from bert_jax.data.masking import Masker
from bert_jax.tokenizer import Tokenizer
from data_prep import formats
from data_prep.corruption import corrupt, room_for
from data_prep.encoding import encode
from data_prep.fill import count_predictions, count_words, fill_rows, mask_rows
from data_prep.job import Arguments
from data_prep.objectives import RANDOM_SEGMENT, Encoded, borders, segments_of, spans, usable
from data_prep.packing import pack
from data_prep.rearrangement import rearrange
from data_prep.split_for_packing import sequence_lengths
from data_prep.token_cache import TokenCache
from data_prep.unit_records import UnitRecord, write_record
from data_prep.units import Unit


def build_unit(arguments: Arguments, cache: TokenCache | None, directory: Path, unit: Unit) -> UnitRecord:
    """Writes a unit's shards, one for each of the dupe_factor pairings, and then its record.

    Any process may build any unit: the result is a function of the arguments and the unit. `directory` is the job's
    folder; a token cache saves the tokenizer's work and changes nothing else.
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
        "one_sentence": int(np.count_nonzero(np.diff(encoded.documents, axis=1) == 1)),
    }
    unigrams = np.zeros(tokenizer.vocab_size, np.int64)
    lengths = np.zeros(options.seq_len + 1, np.int64)
    shards = []
    for dupe in range(options.dupe_factor if len(encoded.documents) else 0):
        generator = random.Random(f"{options.seed} {unit.part} {unit.number} {dupe}")
        first_key = (unit.key << 32) | counts["sequences"]
        rows = _rows(tokenizer, arguments, encoded, first_key, generator)
        unigrams += np.bincount(rows.input_ids.reshape(-1), minlength=tokenizer.vocab_size)
        if options.mask_unit != "token":
            words, long_words = count_words(rows, masker)
            counts["words"] += words
            counts["long_words"] += long_words
        if options.objective == "nsp":
            counts["random_pairs"] += int(np.count_nonzero(rows.next_sentence_labels == RANDOM_SEGMENT))
        lengths += np.bincount(rows.sequence_lengths[rows.sequence_lengths > 0], minlength=len(lengths))
        if options.masking == "static":
            rows = mask_rows(rows, masker, options.max_predictions)
            counts["predictions"] += int(rows.masked_counts.sum())  # type: ignore[union-attr]
        else:
            counts["predictions"] += count_predictions(rows, masker)
        counts["sequences"] += int(np.count_nonzero(rows.sequence_lengths))
        counts["rows"] += len(rows.input_ids)
        counts["tokens"] += int(rows.sequence_lengths.sum())
        stem = f"{unit.part}/shard-{unit.number * options.dupe_factor + dupe:05d}"
        shards.append(formats.write(options.format, directory, stem, rows))
    unigrams[list(tokenizer.special_ids)] = 0
    record = UnitRecord(unit.name, unit.text_hash, counts, skipped, shards)
    return write_record(directory, record, unigrams, lengths)


def _rows(
    tokenizer: Tokenizer,
    arguments: Arguments,
    encoded: Encoded,
    first_key: int,
    generator: random.Random,
) -> Rows:
    """One pairing of a unit's documents, as rows before masking."""
    options = arguments.options
    seq_len, most = options.seq_len, options.pack
    rates = options.delete_rate, options.insert_rate
    made_for = room_for(seq_len, *rates, segments_of(options.objective))
    found = spans(options.objective, encoded, made_for, most, arguments.short_seq_prob, tokenizer.sep_id, generator)
    keys = first_key + np.arange(len(found.sequences), dtype=np.uint64)
    moves = options.permute_sentences, options.rotate_documents
    if any(moves):
        found = rearrange(found, borders(options.objective, encoded), keys, options.seed, *moves)
    if any(rates):
        ordinary = np.ones(tokenizer.vocab_size, bool)
        ordinary[list(tokenizer.special_ids)] = False
        found = corrupt(found, keys, options.seed, *rates, seq_len, ordinary)
    packed = pack(sequence_lengths(found.sequences, found.segments), found.late, seq_len, most)
    return fill_rows(found, keys, packed, seq_len, most, tokenizer)


# One for each process, so that its cache of words stays warm between units. By folder, because two threads that each
# run a job must not share a tokenizer; and by hash, because a later job may use the folder of an earlier one.
@functools.lru_cache(maxsize=1)
def _tokenizer(directory: Path, content_hash: str) -> Tokenizer:
    return tokenizers.load(directory / "tokenizer")
