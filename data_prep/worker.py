"""What one task of data preparation does: a unit's text to shards of rows."""

import functools
import random
from pathlib import Path

import numpy as np

from bert_jax import tokenizer as tokenizers
from bert_jax.data.example import Rows
from bert_jax.data.masking import Masker
from bert_jax.data.shards import write_shard
from bert_jax.tokenizer import Tokenizer
from data_prep.fill import count_predictions, fill_rows, mask_rows
from data_prep.job import Arguments, Record, write_record
from data_prep.objectives import Encoded, spans, usable
from data_prep.packing import pack
from data_prep.recut import sequence_lengths
from data_prep.sentences import document_sentences
from data_prep.units import Unit


def build_unit(directory: Path, arguments: Arguments, unit: Unit) -> Record:
    """Writes a unit's shards, one for each of the dupe_factor pairings, and then its record.

    Any process may do any unit: the result is a function of the arguments and the unit. `directory` is the job's.
    """
    tokenizer = _tokenizer(directory / "tokenizer")
    masker = Masker(tokenizer, arguments.rule, arguments.seed)
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
    encoded, skipped = usable(arguments.objective, encoded)
    counts["used"] = len(encoded.documents)
    unigrams = np.zeros(tokenizer.vocab_size, np.int64)
    shards = []
    for dupe in range(arguments.dupe_factor if len(encoded.documents) else 0):
        generator = random.Random(f"{arguments.seed} {unit.part} {unit.number} {dupe}")
        first_key = (unit.key << 32) | counts["sequences"]
        rows = _rows(tokenizer, arguments, encoded, first_key, generator)
        unigrams += np.bincount(rows.input_ids.reshape(-1), minlength=tokenizer.vocab_size)
        if arguments.masking == "static":
            rows = mask_rows(rows, masker, arguments.max_predictions)
            counts["predictions"] += int(rows.masked_counts.sum())  # type: ignore[union-attr]
        else:
            counts["predictions"] += count_predictions(rows, masker)
        counts["sequences"] += int(np.count_nonzero(rows.sequence_lengths))
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
    borders = before[np.concatenate([[0], np.cumsum(counts)])]
    documents = np.stack([borders[:-1], borders[1:]], axis=1)
    documents = documents[documents[:, 0] < documents[:, 1]]
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
    seq_len, most = arguments.seq_len, arguments.pack
    found = spans(arguments.objective, encoded, seq_len, most, arguments.short_seq_prob, tokenizer.sep_id, generator)
    keys = first_key + np.arange(len(found.sequences), dtype=np.uint64)
    packed = pack(sequence_lengths(found.sequences, found.segments), seq_len, most)
    return fill_rows(found, keys, packed, seq_len, most, tokenizer)


@functools.lru_cache(maxsize=1)
def _tokenizer(path: Path) -> Tokenizer:
    """One a process, so that its cache of words lives as long."""
    return tokenizers.load(path)
