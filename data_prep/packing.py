"""Which sequences share a row: best-fit over a histogram of lengths (Krell et al. 2021, arXiv:2107.02027).

Sequences are taken from the longest to the shortest, and each goes where it leaves the least room. Sequences of one
length are alike, so whole groups of rows are filled at once: the work grows with the number of different lengths,
and only sorting with the number of sequences.

Where a row holds few sequences at most, the shortest would come to rows of their own that they cannot fill. Those that
are cut to fill rooms (split_for_packing.py) come last for this reason: each row keeps a place for one.
"""

from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Bool, Int64

# So many rows, each with sequences of these lengths.
Group = tuple[int, tuple[int, ...]]


class Packed(NamedTuple):
    """Where the Q sequences lie in R rows, row by row and in each from its first slot on.

    Rows are in the order of their first sequences, and the sequences of a row in their own order.
    """

    order: Int64[np.ndarray, "Q"]  # the sequences, as numbers in the order they came in
    rows: Int64[np.ndarray, "Q"]  # of each of them: ascending
    places: Int64[np.ndarray, "Q"]  # 0, 1, ... within a row
    slots: Int64[np.ndarray, "Q"]  # its first slot within the row


def pack(lengths: Int64[np.ndarray, "Q"], late: Bool[np.ndarray, "Q"], seq_len: int, most: int) -> Packed:
    """Packs sequences of so many slots into rows of seq_len, at most `most` of them to a row; the late ones last.

    Raises ValueError for a length outside 1..seq_len.
    """
    if lengths.size and not 1 <= lengths.min() <= lengths.max() <= seq_len:
        raise ValueError(f"sequences of {lengths.min()} to {lengths.max()} slots; a row has {seq_len}")
    if most == 1:
        return _in_order(np.arange(lengths.size), lengths)
    groups = _first_groups(lengths[~late], seq_len, most)
    groups = _add(groups, np.bincount(lengths[late]).tolist(), seq_len, most)
    return _in_order(_rows_of(lengths, groups), lengths)


def rooms(lengths: Int64[np.ndarray, "Q"], seq_len: int, most: int) -> list[int]:
    """The slots that `pack` leaves in each row for late sequences, in no order; none in a row that has no place."""
    groups = _first_groups(lengths, seq_len, most)
    return [seq_len - sum(held) for count, held in groups if len(held) < most for _ in range(count)]


def _first_groups(lengths: Int64[np.ndarray, "Q"], seq_len: int, most: int) -> list[Group]:
    # Of two places none is kept free: what is left of most documents would fill a row alone.
    return _add([], np.bincount(lengths).tolist(), seq_len, most - 1 if most > 2 else most)


def _add(begun: list[Group], counts: list[int], seq_len: int, most: int) -> list[Group]:
    """How many rows hold which lengths, once counts[n] sequences of n slots are added to those that are begun."""
    closed: list[Group] = []
    opened: list[list[Group]] = [[] for _ in range(seq_len + 1)]  # by the room that is left
    rooms = 0  # bit r: some rows have r slots left, and a place

    def put(group: Group) -> None:
        nonlocal rooms
        room = seq_len - sum(group[1])
        if room and len(group[1]) < most:
            opened[room].append(group)
            rooms |= 1 << room
        else:
            closed.append(group)

    for group in begun:
        put(group)
    for length in range(len(counts) - 1, 0, -1):
        left = counts[length]
        while left:
            fitting = rooms >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                count, held = opened[room].pop()
                rooms ^= (not opened[room]) << room
            else:
                room, count, held = seq_len, left, ()
            each = min(most - len(held), room // length, left)
            filled = min(count, left // each)
            if held and count > filled:
                put((count - filled, held))
            put((filled, held + (length,) * each))
            left -= filled * each
    return closed + [group for groups in opened for group in groups]


def _rows_of(lengths: Int64[np.ndarray, "Q"], groups: list[Group]) -> Int64[np.ndarray, "Q"]:
    """A row for each sequence, by the groups' lengths: those of a length are taken in their order."""
    by_length = np.argsort(lengths, kind="stable")
    following = np.searchsorted(lengths[by_length], np.arange(lengths.max(initial=0) + 1)).tolist()
    rows = np.empty(lengths.size, np.int64)
    begin = 0
    for count, held in groups:
        for length in held:
            first = following[length]
            rows[by_length[first : first + count]] = np.arange(begin, begin + count)
            following[length] = first + count
        begin += count
    return rows


def _in_order(rows: Int64[np.ndarray, "Q"], lengths: Int64[np.ndarray, "Q"]) -> Packed:
    """Numbers the rows by their first sequences, and lays each row's sequences out."""
    _, firsts, rows = np.unique(rows, return_index=True, return_inverse=True)
    rank = np.empty(firsts.size, np.int64)
    rank[np.argsort(firsts)] = np.arange(firsts.size)
    rows = rank[rows]
    order = np.argsort(rows, kind="stable")
    rows, lengths = rows[order], lengths[order]
    begins = np.searchsorted(rows, rows)  # of the row each is in
    before = np.cumsum(lengths) - lengths
    return Packed(order, rows, np.arange(rows.size) - begins, before - before[begins])
