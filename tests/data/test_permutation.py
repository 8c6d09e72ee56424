"""The shuffle: a bijection of every size, and no worse than random where it can be counted."""

import numpy as np
import pytest
from scipy import stats

from bert_jax.data import order

FALSE_ALARM = 1e-6  # chance that a statistical test here fails on its fixed keys though the program is sound


def test_every_size_is_permuted():
    for size in [*range(1, 301), 1023, 4096, 65_537, 1_000_003]:
        image = order.permute(np.arange(size), size, size * 7)
        np.testing.assert_array_equal(np.sort(image), np.arange(size), err_msg=f"not a bijection of size {size}")


def test_points_depend_on_no_other_point():
    whole = order.permute(np.arange(1000), 1000, 3)
    some = np.array([[5, 999], [5, 0]])
    np.testing.assert_array_equal(order.permute(some, 1000, 3), whole[some])


def test_a_key_for_each_point():
    keys = np.array([3, 4, 3, 4], np.uint64)
    points = np.array([10, 10, 11, 11])
    mixed = order.permute(points, 1000, keys)
    for key in (3, 4):
        np.testing.assert_array_equal(mixed[keys == key], order.permute(points[keys == key], 1000, key))


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


def test_a_size_for_each_point():
    sizes = np.array([97, 1000, 97, 1, 1000])
    points = np.array([10, 10, 96, 0, 999])
    mixed = order.permute(points, sizes, 3)
    for size in (1, 97, 1000):
        some = sizes == size
        np.testing.assert_array_equal(mixed[some], order.permute(points[some], size, 3))
    with pytest.raises(ValueError, match=r"must be in \[0, 1000\)"):
        order.permute(np.array([97, 97]), np.array([1000, 97]), 3)
