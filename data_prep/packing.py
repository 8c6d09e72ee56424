"""Assigns sequences to rows: best-fit over a histogram of lengths (Krell et al. 2021, arXiv:2107.02027).

Sequences are placed from the longest to the shortest, where they leave the smallest gap. Sequences of one length are
interchangeable, so whole groups of rows are filled at once: the work grows with the number of different lengths.

If a row may hold only a few sequences, the shortest would end up in rows of their own that they cannot fill. So pieces
made to fill gaps (`sequences.fill_gaps`) come last, and every row keeps a place for one.
"""

from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Bool, Int64

Group = tuple[int, tuple[int, ...]]  # a number of rows, and the lengths of the sequences in each


class Packed(NamedTuple):
    """The positions of Q sequences, row by row, without gaps in a row.

    Rows are ordered by their first sequences. In a row, sequences keep their original order.
    """

    order: Int64[np.ndarray, "Q"]  # indices into the original order
    rows: Int64[np.ndarray, "Q"]  # ascending
    places: Int64[np.ndarray, "Q"]  # the index in the row: 0, 1, ...
    starts: Int64[np.ndarray, "Q"]  # the first position in the row


def pack(lengths: Int64[np.ndarray, "Q"], late: Bool[np.ndarray, "Q"], seq_len: int, most: int) -> Packed:
    """Packs sequences into rows.

    Args:
        lengths: Tokens of each sequence, 1 to seq_len.
        late: The sequences to place last.
        seq_len: Tokens in a row.
        most: Sequences in a row, at most.
    """
    if most == 1:
        return _in_order(np.arange(lengths.size), lengths)
    groups = _first_groups(lengths[~late], seq_len, most)
    groups = _add(groups, np.bincount(lengths[late]).tolist(), seq_len, most)
    return _in_order(_assign_rows(lengths, groups), lengths)


def gaps(lengths: Int64[np.ndarray, "Q"], seq_len: int, most: int) -> list[int]:
    """Lists the gaps that `pack` leaves for late sequences, in any order."""
    groups = _first_groups(lengths, seq_len, most)
    return [seq_len - sum(held) for count, held in groups if len(held) < most for _ in range(count)]


def _first_groups(lengths: Int64[np.ndarray, "Q"], seq_len: int, most: int) -> list[Group]:
    # One place in a row stays free for a late sequence. Not if there are two: most remainders of documents would then
    # have a row to themselves.
    return _add([], np.bincount(lengths).tolist(), seq_len, most - 1 if most > 2 else most)


def _add(begun: list[Group], counts: list[int], seq_len: int, most: int) -> list[Group]:
    """Adds counts[n] sequences of each length n, longest first, to the rows already begun."""
    closed: list[Group] = []
    opened: list[list[Group]] = [[] for _ in range(seq_len + 1)]  # by the length of the gap
    # Bit r is set if some rows have a gap of r tokens and a free place. The smallest gap that is large enough is then
    # found by a shift and the lowest set bit, without a search.
    open_gaps = 0

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
    # following[n] is the index into by_length of the next sequence with n tokens.
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
    begins = np.searchsorted(rows, rows)  # the index of the row's first sequence
    before = np.cumsum(lengths) - lengths
    return Packed(order, rows, np.arange(rows.size) - begins, before - before[begins])
