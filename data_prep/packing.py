"""Assigns sequences to rows: best-fit over a histogram of lengths (Krell et al. 2021, arXiv:2107.02027).

Sequences are placed from the longest to the shortest, where they leave the smallest gap. Sequences of one length are
interchangeable, so whole groups of rows are filled at once: the work grows with the different lengths, and only sorting
grows with the sequences.

If a row may hold only a few sequences, the shortest ones would end up in rows of their own that they cannot fill.
Therefore pieces made to fill gaps (`sequences.fill_gaps`) come last, and each row keeps a place for one.
"""

from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Bool, Int64

# (number of rows, lengths of the sequences in any of them)
Group = tuple[int, tuple[int, ...]]


class Packed(NamedTuple):
    """The positions of Q sequences, row by row, without gaps within a row.

    Rows are ordered by their first sequences, and sequences within a row keep their original order.
    """

    order: Int64[np.ndarray, "Q"]  # indices into the original order
    rows: Int64[np.ndarray, "Q"]  # ascending
    places: Int64[np.ndarray, "Q"]  # the index within the row: 0, 1, ...
    starts: Int64[np.ndarray, "Q"]  # the first position within the row


def pack(lengths: Int64[np.ndarray, "Q"], late: Bool[np.ndarray, "Q"], seq_len: int, most: int) -> Packed:
    """Packs sequences of these lengths into rows of seq_len, at most `most` in a row; the late ones last.

    Raises ValueError for a length outside 1..seq_len.
    """
    if lengths.size and not 1 <= lengths.min() <= lengths.max() <= seq_len:
        raise ValueError(f"sequences of {lengths.min()} to {lengths.max()} tokens do not fit rows of {seq_len}")
    if most == 1:
        return _in_order(np.arange(lengths.size), lengths)
    groups = _first_groups(lengths[~late], seq_len, most)
    groups = _add(groups, np.bincount(lengths[late]).tolist(), seq_len, most)
    return _in_order(_assign_rows(lengths, groups), lengths)


def gaps(lengths: Int64[np.ndarray, "Q"], seq_len: int, most: int) -> list[int]:
    """Lists the gaps that `pack` leaves in rows for late sequences, in any order."""
    groups = _first_groups(lengths, seq_len, most)
    return [seq_len - sum(held) for count, held in groups if len(held) < most for _ in range(count)]


def _first_groups(lengths: Int64[np.ndarray, "Q"], seq_len: int, most: int) -> list[Group]:
    # With two places in a row none is kept free: the remainders of most documents would each fill a row alone.
    return _add([], np.bincount(lengths).tolist(), seq_len, most - 1 if most > 2 else most)


def _add(begun: list[Group], counts: list[int], seq_len: int, most: int) -> list[Group]:
    """Adds counts[n] sequences of each length n, longest first, to the rows already begun.

    An integer has bit r set if some rows have a gap of r tokens and a free place: the smallest gap that is large enough
    is then found by a shift and the lowest set bit, without a search.
    """
    closed: list[Group] = []
    opened: list[list[Group]] = [[] for _ in range(seq_len + 1)]  # by the length of the gap
    open_gaps = 0  # bit r: some rows have a gap of r tokens and a free place

    def put(group: Group) -> None:
        nonlocal open_gaps
        room = seq_len - sum(group[1])
        if room and len(group[1]) < most:
            opened[room].append(group)
            open_gaps |= 1 << room
        else:
            closed.append(group)

    for group in begun:
        put(group)
    for length in range(len(counts) - 1, 0, -1):
        left = counts[length]
        while left:
            fitting = open_gaps >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                count, held = opened[room].pop()
                open_gaps ^= (not opened[room]) << room
            else:
                room, count, held = seq_len, left, ()
            copies = min(most - len(held), room // length, left)  # in a row
            filled = min(count, left // copies)
            if held and count > filled:
                put((count - filled, held))
            put((filled, held + (length,) * copies))
            left -= filled * copies
    return closed + [group for groups in opened for group in groups]


def _assign_rows(lengths: Int64[np.ndarray, "Q"], groups: list[Group]) -> Int64[np.ndarray, "Q"]:
    """Assigns a row to each sequence; sequences of equal length fill the groups in their original order."""
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
    """Numbers the rows by their first sequences, and positions the sequences in each row."""
    _, firsts, rows = np.unique(rows, return_index=True, return_inverse=True)
    rank = np.empty(firsts.size, np.int64)
    rank[np.argsort(firsts)] = np.arange(firsts.size)
    rows = rank[rows]
    order = np.argsort(rows, kind="stable")
    rows, lengths = rows[order], lengths[order]
    begins = np.searchsorted(rows, rows)  # the first index of each one's row
    before = np.cumsum(lengths) - lengths
    return Packed(order, rows, np.arange(rows.size) - begins, before - before[begins])
