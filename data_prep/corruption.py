"""Token deletions and insertions: noise in addition to masking, applied when sequences are built.

The training text of a masked language model may also be corrupted by deletions and extraneous insertions (Jurafsky
and Martin, Speech and Language Processing, 3rd edition, "Masked Language Models"; token deletion is one of the
noises of BART, Lewis et al. 2020, section 2.2). The model predicts nothing at those positions: it predicts the masked
tokens of a text in which others are missing or do not belong. Masking is independent of this noise: an inserted token
may be masked, and is then predicted.

Counter-based hashing decides what is deleted and inserted, as it decides masks (law 2): the result is a function of
(seed, sequence key) and the position of a token in its sequence.
"""

from collections.abc import Callable

import numpy as np

from bert_jax.array_types import Bool, Int64, UInt64
from bert_jax.data import hashing
from data_prep.objectives import Spans

_STREAM = 101  # of hashes, distinct from the streams of masking
_TOGETHER = 4096  # sequences at a time: bounds the memory of the working arrays and changes no token


def room_for(seq_len: int, delete_rate: float, insert_rate: float, segments: int) -> int:
    """The length to build sequences for, so that after corruption they fit seq_len on average."""
    special = segments + 1
    return special + max(segments, int((seq_len - special) / max(1.0, 1.0 + insert_rate - delete_rate)))


def corrupt(
    spans: Spans,
    keys: UInt64[np.ndarray, "Q"],
    seed: int,
    delete_rate: float,
    insert_rate: float,
    seq_len: int,
    ordinary: Bool[np.ndarray, "V"],
) -> Spans:
    """Deletes each token with probability delete_rate, or inserts a random one after it with probability insert_rate.

    ordinary   whether an id is an ordinary token rather than a special one

    Special tokens stay, and so does the first token of a segment that would lose all of them. Inserted tokens are
    uniform over the ordinary ones. Where insertions would make a sequence longer than seq_len, those with the highest
    hashes are left out. The sum of the rates is at most 1.
    """

    def noise(some: Spans, keys: UInt64[np.ndarray, "Q"]) -> Spans:
        return _corrupt(some, keys, seed, delete_rate, insert_rate, seq_len, ordinary)

    return in_parts(noise, spans, keys)


def in_parts(
    noise: Callable[[Spans, UInt64[np.ndarray, "Q"]], Spans], spans: Spans, keys: UInt64[np.ndarray, "Q"]
) -> Spans:
    """Applies noise that returns new ids to some sequences at a time, and joins the results."""
    parts = []
    for start in range(0, len(keys), _TOGETHER):
        some = slice(start, start + _TOGETHER)
        parts.append(noise(spans._replace(sequences=spans.sequences[some], late=spans.late[some]), keys[some]))
    shift = np.cumsum([0, *(len(part.ids) for part in parts)])[:-1]
    sequences = [part.sequences + [by, by, by, by, 0] for part, by in zip(parts, shift.tolist(), strict=True)]
    return spans._replace(ids=np.concatenate([part.ids for part in parts]), sequences=np.concatenate(sequences))


def _corrupt(
    spans: Spans,
    keys: UInt64[np.ndarray, "Q"],
    seed: int,
    delete_rate: float,
    insert_rate: float,
    seq_len: int,
    ordinary: Bool[np.ndarray, "V"],
) -> Spans:
    segments = spans.segments
    bounds = spans.sequences[:, : 2 * segments].reshape(-1, 2)
    lengths = bounds[:, 1] - bounds[:, 0]
    ends = np.cumsum(lengths)
    begins = ends - lengths  # of each segment, among the tokens of all
    running = np.arange(lengths.sum())
    ids = spans.ids[running + np.repeat(bounds[:, 0] - begins, lengths)]
    first_of_sequence = np.repeat(begins.reshape(-1, segments)[:, 0], segments)
    sequence = np.repeat(np.arange(len(keys)), lengths.reshape(-1, segments).sum(axis=1))

    states = hashing.combine(_STREAM, seed, keys)
    places = (running - np.repeat(first_of_sequence, lengths)).astype(np.uint64)
    words = hashing.mix(states[sequence] + places * hashing.GAMMA)
    case = words >> np.uint64(32)
    delete_below, insert_below = round(delete_rate * 2**32), round((delete_rate + insert_rate) * 2**32)
    deleted = (case < delete_below) & ordinary[ids]
    kept = np.add.reduceat(~deleted, begins)
    deleted[begins[kept == 0]] = False
    inserted = _fitting((case >= delete_below) & (case < insert_below), case, sequence, deleted, seq_len - segments - 1)

    copies = 1 - deleted.astype(np.int64) + inserted
    noisy = np.repeat(ids, copies)
    last = np.cumsum(copies)
    ordinary_ids = np.flatnonzero(ordinary)
    chosen = hashing.bounded(words[inserted].astype(np.uint32), ordinary_ids.size)
    noisy[last[inserted] - 1] = ordinary_ids[chosen]
    new_ends = last[ends - 1]
    new_bounds = np.stack([np.concatenate([[0], new_ends[:-1]]), new_ends], axis=1).reshape(len(keys), -1)
    if segments == 1:
        new_bounds = np.concatenate([new_bounds, new_bounds[:, 1:], new_bounds[:, 1:]], axis=1)
    return spans._replace(ids=noisy, sequences=np.concatenate([new_bounds, spans.sequences[:, 4:]], axis=1))


def _fitting(
    inserted: np.ndarray,
    case: UInt64[np.ndarray, "n"],
    sequence: Int64[np.ndarray, "n"],
    deleted: np.ndarray,
    room: int,
) -> np.ndarray:
    """The insertions for which a sequence has room, lowest hashes first."""
    count = int(sequence[-1]) + 1
    left = room - np.bincount(sequence[~deleted], minlength=count)
    places = np.flatnonzero(inserted)
    places = places[np.lexsort((case[places], sequence[places]))]
    of = sequence[places]
    rank = np.arange(len(of)) - np.searchsorted(of, of)
    fitting = np.zeros(len(inserted), bool)
    fitting[places[rank < left[of]]] = True
    return fitting
