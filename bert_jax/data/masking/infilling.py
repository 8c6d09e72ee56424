"""Text infilling: each span of words is replaced by one position (Lewis et al. 2020, BART, section 2.2)."""

from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Int32, Int64, Integer
from bert_jax.data.example import Rows
from bert_jax.data.masking.run_selection import Runs
from bert_jax.data.masking.sequences import Sequences


class Shortened(NamedTuple):
    """Rows after infilling. The positions that become free are padding."""

    input_ids: Int32[np.ndarray, "R T"]
    sequence_lengths: Integer[np.ndarray, "R S"]
    first_segment_lengths: Integer[np.ndarray, "R S"]
    places: Int64[np.ndarray, "Q W"]  # for each position that stays, its new flat index among the R*T positions


def shorten(
    rows: Rows,
    input_ids: Int32[np.ndarray, "R T"],
    sequences: Sequences,
    runs: Runs,
    pad_id: int,
    mask_id: int,
) -> Shortened:
    """Removes all positions of each run but the first, and inserts a mask where a run is empty.

    input_ids   those of the rows, with the first position of each run already replaced

    At most as many masks are inserted in a sequence as positions are removed from it, so no sequence becomes longer and
    packing changes nothing.
    """
    columns = np.arange(runs.chosen.shape[1])
    stays = (columns < sequences.lengths[:, None]) & (~runs.chosen | runs.firsts)
    removed = sequences.lengths - np.count_nonzero(stays, axis=1)
    inserts = runs.empty & (np.cumsum(runs.empty, axis=1) <= removed[:, None])
    widths = stays.astype(np.int64) + inserts
    ends = np.cumsum(widths, axis=1)
    first_lengths = (widths * (columns < sequences.first_lengths[:, None])).sum(axis=1)

    present = np.flatnonzero(rows.sequence_lengths)
    filled = np.flatnonzero(sequences.lengths)  # the same sequences among Q
    lengths, firsts = np.zeros((2, *rows.sequence_lengths.shape), rows.sequence_lengths.dtype)
    lengths.reshape(-1)[present] = ends[filled, -1]
    firsts.reshape(-1)[present] = first_lengths[filled]
    in_row = np.cumsum(lengths, axis=1, dtype=np.int64) - lengths
    starts = sequences.rows * input_ids.shape[1]
    starts[filled] += in_row.reshape(-1)[present]

    places = starts[:, None] + ends - 1
    ids = np.full_like(input_ids, pad_id)
    sequence, position = np.nonzero(stays)
    ids.reshape(-1)[places[stays]] = input_ids.reshape(-1)[sequences.offsets[sequence] + position]
    ids.reshape(-1)[places[inserts] - 1] = mask_id
    return Shortened(ids, lengths, firsts, places)
