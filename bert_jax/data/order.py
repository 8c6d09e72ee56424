"""Orders rows by counter-based hashes, keyed permutations without a table, and windows of blocks (laws 1 and 2)."""

import hashlib
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Int64, Integer, UInt32, UInt64
from bert_jax.errors import UserError

# Counter-based hashing: randomness as a pure function of numbers, without generator state.
#
# `mix` is the finalizer of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators",
# OOPSLA; constants of David Stafford's variant 13), vectorized by numpy. All arithmetic is modulo 2**64.

GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd: SplitMix64's increment
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


def mix(values: UInt64[np.ndarray, "*shape"]) -> UInt64[np.ndarray, "*shape"]:
    """A bijection of 64-bit numbers. Every input bit flips every output bit about half of the time."""
    mixed = values ^ (values >> _SHIFT_1)
    mixed *= _MULTIPLIER_1
    mixed ^= mixed >> _SHIFT_2
    mixed *= _MULTIPLIER_2
    mixed ^= mixed >> _SHIFT_3
    return mixed


def combine(*parts: int | Integer[np.ndarray, "..."]) -> UInt64[np.ndarray, "..."]:
    """Hashes several numbers, in order, to 64 bits; arrays broadcast. The result has at least one dimension.

    A Python integer counts modulo 2**64, an array of signed numbers by its two's complement.
    """
    state = np.zeros(1, np.uint64)
    for part in parts:
        array = part if isinstance(part, np.ndarray) else np.array(int(part) % 2**64, np.uint64)
        state = mix((state + GAMMA) ^ np.atleast_1d(array).astype(np.uint64))
    return state


def hash_text(text: str) -> int:
    """A 64-bit number for a text (the head of its sha256), the same in every process and version."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def bounded(words: UInt32[np.ndarray, "K"], bound: int | Integer[np.ndarray, "K"]) -> Integer[np.ndarray, "K"]:
    """Maps uniform 32-bit words to [0, bound), 0 < bound < 2**31, by multiply and shift (Lemire 2019, ACM TOMACS 29).

    Lemire's rejection step is omitted: probabilities have a relative error of at most bound / 2**32.
    """
    return ((words.astype(np.uint64) * np.asarray(bound, np.uint64)) >> np.uint64(32)).astype(np.int64)


# Keyed permutations: a shuffle of any number of rows without a table, computed row by row.

# Twice the four rounds of Luby and Rackoff (1988). With four rounds, neighbors among 97 rows stay visibly related; with
# six they do not (100 000 keys). For a handful of rows the n! orders are not equally likely even so.
ROUNDS = 8


def permute(
    indices: Int64[np.ndarray, "*shape"],
    size: int | Int64[np.ndarray, "*shape"],
    key: int | UInt64[np.ndarray, "*shape"],
) -> Int64[np.ndarray, "*shape"]:
    """Maps each index by a keyed bijection of [0, size), in O(1) memory for any size.

    `size` and `key` hold one number, or one per index. The bijection is the generalized Feistel network with cycle
    walking (Black and Rogaway 2002, "Ciphers with arbitrary finite domains", sections 3 and 5) over [0, a) x [0, b)
    with a = ceil(sqrt(size)) and b = ceil(size / a), so that hardly any point has to walk. Raises ValueError for an
    index outside [0, size), or a size outside [1, 2**62].
    """
    distinct, inverse = np.unique(np.asarray(size), return_inverse=True)
    for least_or_most in distinct[[0, -1]].tolist() if distinct.size else ():
        if not 1 <= least_or_most <= 2**62:
            raise ValueError(f"size is {least_or_most}, but must be from 1 to 2**62")
    if indices.size and (indices.min() < 0 or (indices >= size).any()):
        raise ValueError(f"indices range from {indices.min()} to {indices.max()}, but must be in [0, {distinct[-1]})")
    points = indices.reshape(-1).astype(np.uint64)
    left_sizes = np.array([math.isqrt(number - 1) + 1 for number in distinct.tolist()], np.uint64)
    sizes = np.stack([left_sizes, -(-distinct // left_sizes.astype(np.int64)).astype(np.uint64)])
    # One column for all points if they share a size, else one for each of them.
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
    halves = list(np.divmod(points, sizes[1]))
    for number in range(ROUNDS):
        changed, fixed = number % 2, 1 - number % 2
        keys = keys + GAMMA
        halves[changed] = (halves[changed] + mix(halves[fixed] ^ keys) % sizes[changed]) % sizes[changed]
    return halves[0] * sizes[1] + halves[1]


# The order in which an epoch's rows are read if they do not fit into memory: blocks of rows, shuffled in windows.
#
# The numbers of an epoch's rows, 0 to R - 1, are dealt to L lanes in turn: number n is row n // L of lane n mod L. The
# data set is divided into blocks of consecutive rows, all of one size. Each epoch puts the blocks in a random order, of
# which lane l reads the part from l/L to (l + 1)/L. Each lane shuffles its rows within windows of a few blocks. All of
# it is computed from (seed, epoch, data set) and the number, so a batch needs no state. A process that only reads some
# lanes reads only their part of the data set.

# Batches depend on all of these numbers.
#
# More lanes let more processes read separate rows; fewer leave each a longer window. Rows of a batch are divided among
# devices in equal parts, so a divisor of the batch size that is at least the number of devices is enough.
MOST_LANES = 256
WINDOWS_HELD = 2  # of a lane: the one that is read, and the next one, which is filled meanwhile
LEAST_BLOCKS = 16  # of a window and of a lane, so that neither is a few contiguous pieces of the text
LEAST_BLOCK_ROWS = 32  # of a window's blocks: a request for less takes as long
# A store sends this much in about the time in which it begins to answer. More memory then holds more blocks instead of
# larger ones, which shuffles better.
MOST_BLOCK_BYTES = 1 << 18

_BLOCKS, _SHIFT, _ROWS = 1, 2, 3  # tags of independent hash streams


class WindowSizes(NamedTuple):
    """How an epoch is divided."""

    lanes: int
    window_rows: int  # the most rows of a window, at least 2
    block_rows: int


class Location(NamedTuple):
    """The places of rows."""

    window: Int64[np.ndarray, "R"]  # a window is identified by the number that reads its first row
    row: Int64[np.ndarray, "R"]  # in the window


class Window(NamedTuple):
    """Some rows of a lane."""

    first: int  # the number that reads the first row; the next row of the lane has a number higher by `lanes`
    rows: int
    next: int  # the number that reads the first row of the window after this one, perhaps in the next epoch
    begins: Int64[np.ndarray, "K"]  # its rows of the data set, as pieces of consecutive rows, in order
    counts: Int64[np.ndarray, "K"]


class _Spans(NamedTuple):
    """Rows and their windows. Rows are counted within their lane and epoch."""

    epoch: Int64[np.ndarray, "R"]
    lane: Int64[np.ndarray, "R"]
    row: Int64[np.ndarray, "R"]
    begin: Int64[np.ndarray, "R"]  # of the window
    end: Int64[np.ndarray, "R"]
    place: Int64[np.ndarray, "R"]  # at which the window begins in the order of blocks


def common_lanes(batch_sizes: Iterable[int]) -> int:
    """The largest number up to MOST_LANES that divides all batch sizes."""
    common = math.gcd(*batch_sizes)
    return max(lanes for lanes in range(1, MOST_LANES + 1) if common % lanes == 0)


def window_sizes(
    rows: int, lanes: int, row_bytes: int, cache_bytes: float, source: str, share: float = 1.0
) -> WindowSizes:
    """Divides a data set so that WINDOWS_HELD windows of all lanes take at most share * cache_bytes.

    Raises UserError, which names the `source`, for fewer rows than lanes, and for windows too small to shuffle rows.
    """
    if rows < lanes:
        raise UserError(
            f"{source} has {rows} rows, fewer than the {lanes} lanes in which batches of this size are streamed. Leave "
            "out data.cache_bytes"
        )
    bytes_per_row = WINDOWS_HELD * lanes * row_bytes  # of a window
    most = max(-(-rows // lanes), 2)  # all rows of a lane
    window_rows = int(min(share * cache_bytes / bytes_per_row, most))
    least = min(LEAST_BLOCKS * LEAST_BLOCK_ROWS, most)
    if window_rows < least:
        raise UserError(
            f"data.cache_bytes={cache_bytes:g} is too small to shuffle {source}: in each of {lanes} lanes, a window "
            f"would hold {window_rows} rows. Use at least --config.data.cache_bytes="
            f"{math.ceil(bytes_per_row * least / share)}"
        )
    block_rows = min(MOST_BLOCK_BYTES // row_bytes, window_rows // LEAST_BLOCKS, rows // (lanes * LEAST_BLOCKS))
    return WindowSizes(lanes, window_rows, max(block_rows, 1))


class WindowOrder:
    """The order of a data set's rows in all epochs. `sizes.lanes` is at most `rows`."""

    def __init__(self, rows: int, sizes: WindowSizes, seed: int, fingerprint: str) -> None:
        self.rows, self.sizes = rows, sizes
        self._seed, self._dataset_word = seed, hash_text(fingerprint)
        self._blocks = rows // sizes.block_rows  # the rows after the last full block keep their place behind it

    def row_numbers(self, numbers: Int64[np.ndarray, "R"]) -> Int64[np.ndarray, "R"]:
        """The data set's rows with these numbers in the concatenated epochs."""
        spans = self._spans(numbers)
        places = spans.place + self._shuffled(spans) + self._shift(spans.epoch)
        return self._in_blocks(places % self.rows, spans.epoch)

    def locate(self, numbers: Int64[np.ndarray, "R"]) -> Location:
        """The windows that hold the rows with these numbers, and the rows' places in them."""
        spans = self._spans(numbers)
        return Location(self._number(spans, spans.begin), self._shuffled(spans))

    def window(self, number: int) -> Window:
        """The window that holds the row with this number."""
        spans = self._spans(np.array([number]))
        size = int(spans.end[0] - spans.begin[0])
        begin = int((spans.place[0] + self._shift(spans.epoch)[0]) % self.rows)
        after = min(begin + size, self.rows)
        # A window that reaches the end of the shifted order continues at its beginning.
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
        """The numbers' windows. All windows of a lane but the first are of equal size.

        The first one has half of window_rows or more, ascending from lane to lane: so lanes do not all come to the ends
        of their windows at the same time.
        """
        lanes, most = self.sizes.lanes, self.sizes.window_rows
        epoch, ordinal = np.divmod(numbers, self.rows)
        index, lane = np.divmod(ordinal, lanes)
        shortest, longer = divmod(self.rows, lanes)
        count = shortest + (lane < longer)
        first = np.where(count <= most, count, np.minimum(most * (lanes + lane) // (2 * lanes), count // 2))
        rest = count - first
        windows = np.maximum(-(-rest // most), 1)
        # Window k of the rest begins at k * rest // windows; this is the last one that does not begin after the row.
        later = np.maximum(index - first, 0)
        window = ((later + 1) * windows - 1) // np.maximum(rest, 1)
        begin = np.where(index < first, 0, first + window * rest // windows)
        end = np.where(index < first, first, first + (window + 1) * rest // windows)
        start = lane * shortest + np.minimum(lane, longer)
        return _Spans(epoch, lane, index, begin, end, start + begin)

    def _shuffled(self, spans: _Spans) -> Int64[np.ndarray, "R"]:
        """Each row's place in its window."""
        keys = combine(self._dataset_word, self._seed, spans.epoch, _ROWS, spans.lane, spans.begin)
        return permute(spans.row - spans.begin, spans.end - spans.begin, keys)

    def _shift(self, epochs: Int64[np.ndarray, "R"]) -> Int64[np.ndarray, "R"]:
        """How far the order of blocks is shifted, so that a lane may begin anywhere in a block, and with any row."""
        words = combine(self._dataset_word, self._seed, epochs, _SHIFT)
        return (words % np.uint64(self.rows)).astype(np.int64)

    def _in_blocks(self, places: Int64[np.ndarray, "R"], epochs: Int64[np.ndarray, "R"]) -> Int64[np.ndarray, "R"]:
        """The rows at these places of an epoch's order of blocks, before it is shifted."""
        block, inside = np.divmod(places, self.sizes.block_rows)
        whole = block < self._blocks
        keys = combine(self._dataset_word, self._seed, epochs, _BLOCKS)
        permuted = permute(np.where(whole, block, 0), self._blocks, keys)
        return np.where(whole, permuted * self.sizes.block_rows + inside, places)

    def _cuts(self, begin: int, end: int) -> Int64[np.ndarray, "C"]:
        """Where blocks begin in [begin, end), with both ends; one border if there are no rows."""
        size = self.sizes.block_rows
        inner = np.arange((begin // size + 1) * size, end, size, dtype=np.int64)
        return np.concatenate([[begin], inner, [end] if end > begin else []]).astype(np.int64)

    def _number(self, spans: _Spans, index: Int64[np.ndarray, "R"]) -> Int64[np.ndarray, "R"]:
        """The number of the lane's row with this index."""
        return spans.epoch * self.rows + index * self.sizes.lanes + spans.lane
