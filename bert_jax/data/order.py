"""The row order in an epoch (laws 1 and 2): hashes of counters, keyed permutations, and windows of blocks.

Everything here is a pure function of seeds and numbers, so no state has to be saved to resume.
"""

import hashlib
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Int64, Integer, UInt32, UInt64
from bert_jax.data.shard_file import block_rows
from bert_jax.errors import UserError

# Hashes of counters.
#
# `mix` is the finalizer of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators",
# OOPSLA; constants of David Stafford's variant 13). All arithmetic is modulo 2**64.

GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd: SplitMix64's increment
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


def mix(values: UInt64[np.ndarray, "*shape"]) -> UInt64[np.ndarray, "*shape"]:
    """Maps 64-bit numbers one to one. Changing an input bit flips every output bit about half of the time."""
    mixed = values ^ (values >> _SHIFT_1)
    mixed *= _MULTIPLIER_1
    mixed ^= mixed >> _SHIFT_2
    mixed *= _MULTIPLIER_2
    mixed ^= mixed >> _SHIFT_3
    return mixed


def combine(*parts: int | Integer[np.ndarray, "..."]) -> UInt64[np.ndarray, "..."]:
    """Hashes several numbers, in order, to 64 bits. Arrays broadcast; the result has at least one dimension."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        # numpy refuses to convert a negative Python integer, but not an array of negative numbers. Both then hash
        # alike.
        array = part if isinstance(part, np.ndarray) else np.array(int(part) % 2**64, np.uint64)
        state = mix((state + GAMMA) ^ np.atleast_1d(array).astype(np.uint64))
    return state


def hash_text(text: str) -> int:
    """Hashes a text to 64 bits, the same in every process and Python version."""
    # Python's own hash() of a text differs between processes.
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def bounded(words: UInt32[np.ndarray, "K"], bound: int | Integer[np.ndarray, "K"]) -> Integer[np.ndarray, "K"]:
    """Maps uniform 32-bit words to [0, bound), 0 < bound < 2**31, by multiply and shift (Lemire 2019, ACM TOMACS 29).

    Lemire's rejection step is omitted: probabilities have a relative error of at most bound / 2**32.
    """
    return ((words.astype(np.uint64) * np.asarray(bound, np.uint64)) >> np.uint64(32)).astype(np.int64)


# Keyed permutations: they shuffle any number of rows without a table, one row at a time.

# Luby and Rackoff (1988) need four rounds. With four, neighbors among 97 rows stay visibly related; with six they do
# not (100 000 keys). Even with eight, the n! orders of a handful of rows are not equally likely.
ROUNDS = 8


def permute(
    indices: Int64[np.ndarray, "*shape"],
    size: int | Int64[np.ndarray, "*shape"],
    key: int | UInt64[np.ndarray, "*shape"],
) -> Int64[np.ndarray, "*shape"]:
    """Permutes the numbers [0, size) and returns the images of `indices`, in O(1) memory for any size.

    This is a generalized Feistel network with cycle walking (Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains", sections 3 and 5).

    Args:
        size: One size, or one per index.
        key: Chooses the permutation. One key, or one per index.

    Raises:
        ValueError: An index is outside [0, size), or a size outside [1, 2**62].
    """
    distinct, inverse = np.unique(np.asarray(size), return_inverse=True)
    for least_or_most in distinct[[0, -1]].tolist() if distinct.size else ():
        if not 1 <= least_or_most <= 2**62:
            raise ValueError(f"size is {least_or_most}, but must be from 1 to 2**62")
    if indices.size and (indices.min() < 0 or (indices >= size).any()):
        raise ValueError(f"indices range from {indices.min()} to {indices.max()}, but must be in [0, {distinct[-1]})")
    points = indices.reshape(-1).astype(np.uint64)
    # The network permutes the rectangle [0, a) x [0, b), with a = ceil(sqrt(size)) and b = ceil(size / a). It has
    # hardly more points than `size`, so hardly any point has to walk.
    left_sizes = np.array([math.isqrt(number - 1) + 1 for number in distinct.tolist()], np.uint64)
    sizes = np.stack([left_sizes, -(-distinct // left_sizes.astype(np.int64)).astype(np.uint64)])
    # One column for all points if they share a size, else a column per point.
    sizes = sizes if len(distinct) == 1 else sizes[:, inverse.reshape(-1)]
    limits = np.broadcast_to(np.asarray(size).reshape(-1), points.shape).astype(np.uint64)
    keys = np.broadcast_to(combine(key).reshape(-1), points.shape)
    points = _network(points, sizes, keys)
    # Cycle walking: points that left the domain are permuted again until they return.
    outside = np.flatnonzero(points >= limits)
    while outside.size:
        points[outside] = _network(points[outside], sizes if len(distinct) == 1 else sizes[:, outside], keys[outside])
        outside = outside[points[outside] >= limits[outside]]
    return points.astype(np.int64).reshape(indices.shape)


def _network(
    points: UInt64[np.ndarray, "K"], sizes: UInt64[np.ndarray, "2 #K"], keys: UInt64[np.ndarray, "K"]
) -> UInt64[np.ndarray, "K"]:
    """The Feistel rounds. A round adds a hash of one half to the other half, modulo the other half's size."""
    # A new key in each round, from SplitMix64's sequence, makes the rounds independent functions.
    halves = list(np.divmod(points, sizes[1]))
    for number in range(ROUNDS):
        changed, fixed = number % 2, 1 - number % 2
        keys = keys + GAMMA
        halves[changed] = (halves[changed] + mix(halves[fixed] ^ keys) % sizes[changed]) % sizes[changed]
    return halves[0] * sizes[1] + halves[1]


# The order of rows that do not fit into memory: blocks of rows, shuffled in windows.
#
# The numbers of an epoch's R rows, 0 to R - 1, are dealt to L lanes in turn: number n is row n // L of lane n mod L.
# The data set is divided into blocks of consecutive rows. Every epoch puts the blocks in a random order. Lane l reads
# the part of it from l/L to (l + 1)/L, and shuffles its rows within windows of a few blocks. A process that reads only
# some lanes therefore reads only their part of the data set. The first windows of epoch 0 are small and grow, so that
# a run begins soon.
#
# Windows follow from the data set and the batch sizes, not from the number of processes or their memory: these may
# change in a run, and its order of rows may not.

# Changing any of these numbers changes batches.
#
# With more lanes, more processes read separate rows; with fewer, every lane has longer windows. Devices divide the rows
# of a batch equally, so any divisor of the batch size that is at least the number of devices is enough.
MOST_LANES = 256
WINDOWS_HELD = 2  # in each lane: the window that is read, and the next one, which is loading
WINDOW_BYTES = 8e9  # of these windows of all lanes and processes; more shuffles better (docs/scaling.md)
LEAST_BLOCKS = 16  # in a window and in a lane, so that neither consists of a few long pieces of the text
LEAST_WINDOW_ROWS = 512  # for a source with a small share of a mixture

_BLOCKS, _SHIFT, _ROWS = 1, 2, 3  # tags that make hash streams independent


class WindowSizes(NamedTuple):
    """How an epoch is divided."""

    lanes: int
    window_rows: int  # at most; at least 2
    block_rows: int


class Window(NamedTuple):
    """Some rows of a lane. Its rows in the data set are K pieces of consecutive rows, in order."""

    first: int  # the number that reads the first row; the lane's next row has the number first + lanes
    rows: int
    next: int  # `first` of the lane's next window, which may be in the next epoch
    begins: Int64[np.ndarray, "K"]  # first row of each piece
    counts: Int64[np.ndarray, "K"]  # rows in each piece


class _Spans(NamedTuple):
    """Rows with the windows that hold them, counted within their lane and epoch."""

    epoch: Int64[np.ndarray, "R"]
    lane: Int64[np.ndarray, "R"]
    row: Int64[np.ndarray, "R"]
    begin: Int64[np.ndarray, "R"]  # first row of the window
    end: Int64[np.ndarray, "R"]  # row after the window's last one
    place: Int64[np.ndarray, "R"]  # the window's first place in the epoch's order of blocks


def common_lanes(batch_sizes: Iterable[int]) -> int:
    """Returns the largest number up to MOST_LANES that divides all batch sizes."""
    # Lanes that divide every batch size have equally many rows in each batch.
    common = math.gcd(*batch_sizes)
    return max(lanes for lanes in range(1, MOST_LANES + 1) if common % lanes == 0)


def window_sizes(rows: int, lanes: int, row_bytes: int, window_bytes: float, source: str) -> WindowSizes:
    """Divides a data set into lanes, windows and blocks.

    Args:
        window_bytes: The memory for WINDOWS_HELD windows of all lanes, unless they have LEAST_WINDOW_ROWS.
        source: Names the data set in errors.

    Raises:
        UserError: There are fewer rows than lanes.
    """
    if rows < lanes:
        raise UserError(
            f"{source} has {rows} rows, but batches of this size are streamed in {lanes} lanes, which need a row each. "
            "Leave out data.cache_bytes"
        )
    bytes_per_row = WINDOWS_HELD * lanes * row_bytes  # that one more row in every window takes
    whole = max(-(-rows // lanes), 2)  # a window that holds a whole lane
    window_rows = int(min(max(window_bytes / bytes_per_row, LEAST_WINDOW_ROWS), whole))
    # A small data set has small blocks, so that every lane and every window still has LEAST_BLOCKS of them.
    rows_together = min(block_rows(row_bytes), window_rows // LEAST_BLOCKS, rows // (lanes * LEAST_BLOCKS))
    return WindowSizes(lanes, window_rows, max(rows_together, 1))


class WindowOrder:
    """The order of a data set's rows in all epochs, with at least one row per lane.

    Rows are counted as in Dataset.rows_in_blocks, so that blocks are those of the shards.
    """

    def __init__(self, rows: int, sizes: WindowSizes, seed: int, fingerprint: str) -> None:
        self.rows, self.sizes = rows, sizes
        self._seed, self._dataset_word = seed, hash_text(fingerprint)
        # Only full blocks are shuffled. The rows after the last one stay behind it.
        self._blocks = rows // sizes.block_rows
        # The ends of the first windows of a lane, for epoch 0 and for later ones (see _spans). In epoch 0, each is
        # twice as long as the one before it, up to window_rows.
        doublings = max(sizes.window_rows // sizes.block_rows, 1).bit_length()
        growing = np.minimum(sizes.block_rows << np.arange(doublings), sizes.window_rows)
        self._growing = np.stack([np.cumsum(growing), np.full(doublings, sizes.window_rows)])

    def row_numbers(self, numbers: Int64[np.ndarray, "R"]) -> Int64[np.ndarray, "R"]:
        """Returns the rows in the data set that are read at these numbers of the concatenated epochs."""
        spans = self._spans(numbers)
        places = spans.place + self._shuffled(spans) + self._shift(spans.epoch)
        return self._in_blocks(places % self.rows, spans.epoch)

    def locate(self, numbers: Int64[np.ndarray, "R"]) -> tuple[Int64[np.ndarray, "R"], Int64[np.ndarray, "R"]]:
        """Returns `first` of the window that holds each row, and the row's place in this window."""
        spans = self._spans(numbers)
        return self._number(spans, spans.begin), self._shuffled(spans)

    def window(self, number: int) -> Window:
        """Returns the window that holds the row with this number."""
        spans = self._spans(np.array([number]))
        size = int(spans.end[0] - spans.begin[0])
        begin = int((spans.place[0] + self._shift(spans.epoch)[0]) % self.rows)
        # A window that reaches the end of the shifted order continues at its beginning.
        after = min(begin + size, self.rows)
        cuts = [self._cuts(begin, after), self._cuts(0, begin + size - after)]
        starts = np.concatenate([cut[:-1] for cut in cuts])
        epochs = np.broadcast_to(spans.epoch, starts.shape)
        return Window(
            int(self._number(spans, spans.begin)[0]),
            size,
            int(self._number(spans, spans.end)[0]),
            self._in_blocks(starts, epochs),
            np.concatenate([np.diff(cut) for cut in cuts]),
        )

    def _spans(self, numbers: Int64[np.ndarray, "R"]) -> _Spans:
        """Finds the windows of the rows with these numbers."""
        lanes, most = self.sizes.lanes, self.sizes.window_rows
        # number -> epoch and place in it -> lane and row in the lane.
        epoch, place = np.divmod(numbers, self.rows)
        row, lane = np.divmod(place, lanes)
        # If `lanes` does not divide the rows, the first lanes have one more row than the others.
        shortest, longer = divmod(self.rows, lanes)
        count = shortest + (lane < longer)
        # A lane's first windows are shortened, from half of their rows on, growing from lane to lane. So the lanes
        # reach the ends of their windows at different times. They take at most half of the lane, and its other windows
        # share the rest equally. A lane that fits into its first window is one window.
        ends = self._growing[np.minimum(epoch, 1)]
        halves = np.minimum(ends * (lanes + lane[:, None]) // (2 * lanes), count[:, None] // 2)
        ends = np.where(count[:, None] <= ends[:, :1], count[:, None], halves)
        passed = (ends <= row[:, None]).sum(axis=1)
        first = ends[:, -1]
        rest = count - first
        windows = np.maximum(-(-rest // most), 1)
        # Window k of the rest begins at row first + k * rest // windows. `window` is the last k that begins by `row`.
        later = np.maximum(row - first, 0)
        window = ((later + 1) * windows - 1) // np.maximum(rest, 1)
        borders = np.concatenate([np.zeros_like(ends[:, :1]), ends, ends[:, -1:]], axis=1)
        index = np.arange(len(row))
        begin = np.where(row < first, borders[index, passed], first + window * rest // windows)
        end = np.where(row < first, borders[index, passed + 1], first + (window + 1) * rest // windows)
        start = lane * shortest + np.minimum(lane, longer)
        return _Spans(epoch, lane, row, begin, end, start + begin)

    def _shuffled(self, spans: _Spans) -> Int64[np.ndarray, "R"]:
        """Returns every row's place in its window."""
        keys = combine(self._dataset_word, self._seed, spans.epoch, _ROWS, spans.lane, spans.begin)
        return permute(spans.row - spans.begin, spans.end - spans.begin, keys)

    def _shift(self, epochs: Int64[np.ndarray, "R"]) -> Int64[np.ndarray, "R"]:
        """Returns how far an epoch shifts its order of blocks. So a lane may begin with any row of any block."""
        words = combine(self._dataset_word, self._seed, epochs, _SHIFT)
        return (words % np.uint64(self.rows)).astype(np.int64)

    def _in_blocks(self, places: Int64[np.ndarray, "R"], epochs: Int64[np.ndarray, "R"]) -> Int64[np.ndarray, "R"]:
        """Returns the rows at these places in an epoch's block order, before the shift."""
        block, inside = np.divmod(places, self.sizes.block_rows)
        whole = block < self._blocks
        keys = combine(self._dataset_word, self._seed, epochs, _BLOCKS)
        permuted = permute(np.where(whole, block, 0), self._blocks, keys)
        return np.where(whole, permuted * self.sizes.block_rows + inside, places)

    def _cuts(self, begin: int, end: int) -> Int64[np.ndarray, "C"]:
        """Returns `begin`, the borders of blocks after it, and `end`; only `begin` if both are equal."""
        size = self.sizes.block_rows
        inner = np.arange((begin // size + 1) * size, end, size, dtype=np.int64)
        return np.concatenate([[begin], inner, [end] if end > begin else []]).astype(np.int64)

    def _number(self, spans: _Spans, row: Int64[np.ndarray, "R"]) -> Int64[np.ndarray, "R"]:
        """Returns row numbers, given spans and rows in their lanes: the inverse of _spans."""
        return spans.epoch * self.rows + row * self.sizes.lanes + spans.lane
