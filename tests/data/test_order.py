"""The orders of rows: a shuffle of every size that looks random, and windows of blocks, by brute force."""

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bert_jax.data import order
from bert_jax.data.order import Window, WindowOrder, WindowSizes, common_lanes, window_sizes
from bert_jax.errors import UserError

FALSE_ALARM = 1e-6  # chance that a statistical test here fails on its fixed keys though the program is sound


def test_every_size_is_permuted():
    for size in [*range(1, 301), 1023, 4096, 65_537, 1_000_003]:
        image = order.permute(np.arange(size), size, size * 7)
        np.testing.assert_array_equal(np.sort(image), np.arange(size), err_msg=f"not a bijection of size {size}")


def test_points_depend_on_no_other_point():
    whole = order.permute(np.arange(1000), 1000, 3)
    some = np.array([[5, 999], [5, 0]])
    np.testing.assert_array_equal(order.permute(some, 1000, 3), whole[some])


def test_huge_sizes_stay_in_range():
    for size in (2**40 + 1, 2**62):
        image = order.permute(np.array([0, 1, size - 1]), size, 1)
        assert len(set(image.tolist())) == 3 and image.min() >= 0 and image.max() < size


@pytest.mark.parametrize("size", [97, 1000])
def test_neighbors_are_sent_anywhere(size):
    """Chi-square over 20 000 keys, false-alarm rate 1e-6: where a point goes, and how far off its neighbour."""
    keys = np.repeat(np.arange(20_000, dtype=np.uint64), 2)
    image = order.permute(np.tile(np.array([10, 11]), 20_000), size, keys).reshape(-1, 2)
    goes_to = np.bincount(image[:, 0], minlength=size)
    apart = np.bincount((image[:, 1] - image[:, 0]) % size, minlength=size)[1:]
    assert stats.chisquare(goes_to).pvalue > FALSE_ALARM
    assert stats.chisquare(apart).pvalue > FALSE_ALARM


def test_a_shuffle_has_no_trend():
    """Spearman's rank correlation of index and image, false-alarm rate 1e-6 each."""
    for key in range(5):
        image = order.permute(np.arange(10_000), 10_000, key)
        assert stats.spearmanr(np.arange(10_000), image).pvalue > FALSE_ALARM
        assert stats.spearmanr(image[1:], image[:-1]).pvalue > FALSE_ALARM


def test_what_cannot_be_permuted_is_refused():
    for size in (0, -1, 2**63):
        with pytest.raises(ValueError, match="size"):
            order.permute(np.arange(0), size, 1)
    for index in (-1, 10):
        with pytest.raises(ValueError, match=r"must be in \[0, 10\)"):
            order.permute(np.array([index]), 10, 1)


def test_hashes_stay_what_they_were():
    """SplitMix64's first outputs from seed 0, as the reference implementation gives them (Vigna, splitmix64.c)."""
    counters = order.GAMMA * np.arange(1, 4, dtype=np.uint64)
    assert order.mix(counters).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert order.hash_text("") == int.from_bytes(bytes.fromhex("e3b0c44298fc1c14"), "little")
    np.testing.assert_array_equal(order.combine(1, -1), order.combine(1, 2**64 - 1))
    np.testing.assert_array_equal(order.combine(1, np.array([5, 6]))[1], order.combine(1, 6)[0])


def test_below_is_even():
    """Chi-square, false-alarm rate 1e-6."""
    words = order.combine(np.arange(100_000)).astype(np.uint32)
    assert stats.chisquare(np.bincount(order.bounded(words, 100), minlength=100)).pvalue > FALSE_ALARM


def test_keys_and_sizes_may_differ_from_point_to_point():
    points, sizes = np.array([10, 10, 96, 0, 999]), np.array([97, 1000, 97, 1, 1000])
    keys = np.array([3, 4, 3, 4, 3], np.uint64)
    for own_sizes, own_keys in ((sizes, np.full(5, 3, np.uint64)), (np.full(5, 1000), keys), (sizes, keys)):
        mixed = order.permute(points, own_sizes, own_keys)
        for point in range(5):
            [alone] = order.permute(points[[point]], int(own_sizes[point]), int(own_keys[point]))
            assert mixed[point] == alone
    with pytest.raises(ValueError, match=r"must be in \[0, 1000\)"):
        order.permute(np.array([97, 97]), np.array([1000, 97]), 3)


GOLDEN_SIZES = WindowSizes(lanes=64, window_rows=580, block_rows=36)
GOLDEN_ROWS = [99860, 11249, 61967, 78065, 20697, 27884, 51684, 66184, 66709]
GOLDEN_HASH = "eb816c0ac3871ffb"


@st.composite
def orders(draw) -> WindowOrder:
    """Any order of at most 200 rows, with sizes that no configuration would choose, too."""
    lanes = draw(st.integers(1, 12))
    rows = draw(st.integers(lanes, 200))
    sizes = WindowSizes(lanes, draw(st.integers(2, 40)), draw(st.integers(1, min(rows, 30))))
    return WindowOrder(rows, sizes, draw(st.integers(0, 5)), "rows")


def windows(order: WindowOrder, lane: int, end: int) -> list[Window]:
    """The windows of the numbers lane, lane + L, lane + 2L, ... below `end`, each found from the one before it."""
    found = [order.window(lane)]
    while found[-1].next < end:
        found.append(order.window(found[-1].next))
    return found


def rows_of(window: Window) -> list[int]:
    pairs = zip(window.begins.tolist(), window.counts.tolist(), strict=True)
    return [row for begin, count in pairs for row in range(begin, begin + count)]


@settings(max_examples=25)
@given(orders())
def test_every_epoch_reads_each_row_once(order):
    for epoch in (0, 1, 7):
        numbers = np.arange(epoch * order.rows, (epoch + 1) * order.rows)
        assert sorted(order.row_numbers(numbers).tolist()) == list(range(order.rows))


@settings(max_examples=25)
@given(orders())
def test_a_row_has_the_same_number_whatever_else_is_asked_for(order):
    numbers = np.arange(2 * order.rows)
    whole = order.row_numbers(numbers)
    some = np.random.default_rng(0).permutation(numbers)[:50]
    np.testing.assert_array_equal(order.row_numbers(some), whole[some])
    for number in some[:3].tolist():
        assert order.row_numbers(np.array([number])) == whole[number]


@settings(max_examples=15)
@given(orders())
def test_windows_hold_the_rows_that_their_numbers_read(order):
    """By going through the windows of every lane for two epochs, from each to the next."""
    lanes, end = order.sizes.lanes, 2 * order.rows
    for lane in range(lanes):
        number = lane
        for window in windows(order, lane, end):
            assert window.first == number and window.rows <= order.sizes.window_rows
            held = rows_of(window)
            assert len(held) == window.rows
            numbers = number + lanes * np.arange(window.rows)
            first, place = order.locate(numbers)
            assert (first == window.first).all()
            assert sorted(place.tolist()) == list(range(window.rows))
            np.testing.assert_array_equal(np.array(held)[place], order.row_numbers(numbers))
            number = window.next
            assert number == window.first + lanes * window.rows


@settings(max_examples=25)
@given(orders())
def test_a_window_has_a_lane_of_one_epoch_and_no_short_neighbors(order):
    """After epoch 0, no window of a lane is shorter than a quarter of the longest, unless all of the lane is one."""
    lanes, rows = order.sizes.lanes, order.rows
    for lane in range(lanes):
        for begin in (0, rows):
            found = windows(order, begin + lane, begin + rows)
            sizes = [window.rows for window in found]
            assert sum(sizes) == len(range(lane, rows, lanes))
        assert len(sizes) == 1 or min(sizes) >= max(sizes) // 4


def test_the_windows_of_the_first_epoch_grow_from_one_block():
    order, lanes = WindowOrder(100_000, WindowSizes(4, 1000, 20), 3, "rows"), 4
    for lane in range(lanes):
        sizes = [window.rows for window in windows(order, lane, 100_000)]
        block = 20 * (lanes + lane) // (2 * lanes)
        assert sizes[0] == block and len(order.window(lane).begins) <= 2
        assert all(size <= 4 * before for before, size in itertools.pairwise(sizes))
        assert max(sizes) > 900 and sum(sizes[:3]) < 8 * 20


def test_windows_consist_of_blocks_and_blocks_of_consecutive_rows():
    order = WindowOrder(10_000, WindowSizes(4, 500, 20), 3, "rows")
    for window in windows(order, 2, 10_000):
        whole = window.counts == 20
        assert whole.sum() >= len(window.counts) - 4  # its ends, and where the shifted order ends, cut a block
        assert (window.begins[whole] % 20 == 0).all()
    first = [order.window(number).begins[1] for number in range(4)]
    assert len({begin // 2500 for begin in first}) > 1, "lanes read neighboring blocks"


def test_epochs_seeds_and_data_sets_have_orders_of_their_own():
    numbers, sizes = np.arange(1000), WindowSizes(5, 40, 5)
    base = WindowOrder(1000, sizes, 0, "rows")
    others = [
        WindowOrder(1000, sizes, 1, "rows").row_numbers(numbers),
        WindowOrder(1000, sizes, 0, "other rows").row_numbers(numbers),
        base.row_numbers(numbers + 1000),
    ]
    for other in others:
        assert (other == base.row_numbers(numbers)).mean() < 0.02


def test_the_order_is_that_of_earlier_versions():
    """A run must resume with the batches that it had. Another order needs another key of the configuration."""
    sizes = window_sizes(100_000, common_lanes([64]), 269, 2e7, "wiki")
    assert sizes == GOLDEN_SIZES
    numbers = np.concatenate([np.arange(100_000), 250_000 + np.arange(9)])
    order = WindowOrder(100_000, sizes, 7, "rows").row_numbers(numbers)
    assert order[-9:].tolist() == GOLDEN_ROWS
    assert hashlib.sha256(order.tobytes()).hexdigest()[:16] == GOLDEN_HASH


def test_lanes_divide_all_batch_sizes():
    assert common_lanes([256]) == 256 and common_lanes([4096]) == 256 and common_lanes([48]) == 48
    assert common_lanes([256, 384]) == 128 and common_lanes([6, 35]) == 1 and common_lanes([262]) == 131
    assert common_lanes([2 * 257]) == 2


@pytest.mark.parametrize("lanes", [1, 64, 256])
@pytest.mark.parametrize("window_bytes", [1e8, 8e9])
@pytest.mark.parametrize("rows", [10**4, 10**6, 10**10])
def test_windows_take_the_memory_that_they_may(rows, window_bytes, lanes):
    sizes = window_sizes(rows, lanes, 269, window_bytes, "wiki")
    held = order.WINDOWS_HELD * lanes * sizes.window_rows * 269
    assert held <= window_bytes
    assert sizes.window_rows == -(-rows // lanes) or held > window_bytes - 2 * lanes * 269
    assert sizes.window_rows // sizes.block_rows >= 16
    assert sizes.block_rows == 1 or rows // lanes // sizes.block_rows >= 16
    assert sizes.block_rows * 269 <= 1 << 18


def test_what_cannot_be_shuffled_is_refused():
    with pytest.raises(UserError, match="wiki has 100 rows, but batches of this size are streamed in 256 lanes") as few:
        window_sizes(100, 256, 269, 1e9, "wiki")
    assert "\n" not in str(few.value)
    assert window_sizes(10**9, 256, 269, 1e6, "wiki").window_rows == order.LEAST_WINDOW_ROWS
