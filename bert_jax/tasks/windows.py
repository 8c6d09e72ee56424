"""Windows of long texts: where they begin and end, and which of them answers for what. Pure numpy.

Windows overlap, so that nearly everything has context on both sides in one of them.
"""

import functools
from collections.abc import Callable

import numpy as np
from jaxtyping import Float64, Int32, Int64

# Windows of a text: the first unit (piece or word), the end, and the range of units whose best window it is.
Windows = Int32[np.ndarray, "W 4"]
Context = Callable[
    [Int64[np.ndarray, "K 1"], Int64[np.ndarray, "K N"], Int64[np.ndarray, "K N"]], Float64[np.ndarray, "K N"]
]

UNITS_AT_ONCE = 4096


@functools.lru_cache(maxsize=4096)
def cut_windows(pieces: int, room: int, stride: int) -> Windows:
    """Cuts a context into windows: first piece, end, and the range of pieces whose best window it is.

    A window has `room` pieces, the last one at most as many, and begins min(room, stride) pieces after the one before
    it. A piece's context in a window is the number of pieces on its shorter side, plus a hundredth of the window's
    length; the first window with the most context is the best (run_squad.py, _check_is_max_context). A context without
    pieces has one empty window.
    """
    step = min(stride, room)
    firsts = np.arange(0, max(pieces - room, 0) + step, step)
    ends = np.minimum(firsts + room, pieces)

    def context(place: np.ndarray, first: np.ndarray, end: np.ndarray) -> np.ndarray:
        sides: np.ndarray = np.minimum(place - first, end - 1 - place) + 0.01 * (end - first)
        return sides

    return _with_best(firsts, ends, pieces, context)


def cut_word_windows(sizes: Int64[np.ndarray, "K"], room: int, stride: int) -> Windows:
    """Cuts a sentence into windows between its words: first word, end, and the range of words whose best window it is.

    Windows have as many words as fit in `room` pieces. A window begins with the last word that starts at most `stride`
    pieces after the one before it; but it contains the word that this one lacks, so it may begin later. A word's
    context in a window is the number of pieces between it and the nearer edge of the window. An edge where the
    sentence itself begins or ends does not count, because nothing is missing there. The first window with the most
    context is the best; windows that are the best of no word are left out.

    Args:
        sizes: The words' pieces, 1 to `room` each.
    """
    starts = np.concatenate([[0], np.cumsum(sizes)])
    count, first, firsts, ends = len(sizes), 0, [], []
    while True:
        end = int(np.searchsorted(starts, starts[first] + room, side="right")) - 1
        firsts.append(first)
        ends.append(end)
        if end == count:
            break
        moved = int(np.searchsorted(starts, starts[first] + stride, side="right")) - 1
        # The first word from which the room reaches to the end of the word that is missing here.
        least = int(np.searchsorted(starts, starts[end + 1] - room, side="left"))
        first = min(max(moved, least), end)

    def context(word: np.ndarray, first: np.ndarray, end: np.ndarray) -> np.ndarray:
        left = np.where(first == 0, np.inf, starts[word] - starts[first])
        right = np.where(end == count, np.inf, starts[end] - starts[word + 1])
        return np.minimum(left, right)

    windows = _with_best(np.array(firsts), np.array(ends), count, context)
    return windows[windows[:, 2] < windows[:, 3]]


def _with_best(firsts: Int64[np.ndarray, "W"], ends: Int64[np.ndarray, "W"], units: int, context: Context) -> Windows:
    """Adds the range of units whose best window each is: the first one with the most context.

    Firsts ascend; so do ends, though several last windows may end with the text.
    """
    best = np.zeros(units, np.int64)
    numbers = np.arange(len(firsts))
    # The windows that contain a unit are adjacent, and at most `most`.
    most = int((np.searchsorted(firsts, ends, side="left") - numbers).max())
    # In parts, so that memory grows with the text, not with its square.
    for start in range(0, units, UNITS_AT_ONCE):
        unit = np.arange(start, min(start + UNITS_AT_ONCE, units))[:, None]
        lowest = np.searchsorted(ends, unit, side="right")
        # The last window may occur several times, which changes nothing, because argmax takes the first maximum.
        windows = np.minimum(lowest + np.arange(most), len(firsts) - 1)
        first, end = firsts[windows], ends[windows]
        sides = np.where((unit < first) | (end <= unit), -np.inf, context(unit, first, end))
        best[unit[:, 0]] = np.take_along_axis(windows, sides.argmax(axis=1)[:, None], axis=1)[:, 0]
    # The units whose best window is the same are adjacent.
    best_firsts, best_ends = (np.searchsorted(best, numbers, side=side) for side in ("left", "right"))
    return np.stack([firsts, ends, best_firsts, best_ends], axis=-1).astype(np.int32)
