"""The lengths to which training batches are padded: the cheapest of all choices, and few where compiling costs much."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.config import ModelOptions
from bert_jax.model import sizes
from bert_jax.model.runtime import Runtime
from bert_jax.tasks.batches import SHAPES, best_lengths, price


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=30).map(np.array),
    max_length=st.sampled_from([100, 104, 77]),
    shapes=st.integers(1, 4),
    passes=st.floats(0.1, 9),
    each=st.sampled_from([0, 0, 5, 60, 400]),
)
def test_no_other_choice_of_lengths_costs_less(
    lengths: np.ndarray, max_length: int, shapes: int, passes: float, each: int
) -> None:
    lengths = np.minimum(lengths, max_length)
    found = best_lengths(lengths, max_length, shapes, passes=passes, price=float(each))

    def cost(chosen: tuple[int, ...]) -> float:
        return passes * sum(min(size for size in chosen if size >= length) for length in lengths) + each * len(chosen)

    sizes = sorted({min(-(-int(length) // 8) * 8, max_length) for length in lengths})
    every = ((*some, sizes[-1]) for count in range(shapes) for some in itertools.combinations(sizes[:-1], count))
    assert sorted(set(found)) == list(found) and set(found) <= set(sizes) and len(found) <= shapes
    assert cost(found) == pytest.approx(min(map(cost, every)))


def test_a_short_run_of_a_small_model_has_few_lengths_and_a_long_one_many() -> None:
    lengths = np.random.default_rng(0).gamma(4, 8, 4000).astype(int) + 3

    def price_of(preset: str, platform: str) -> float:
        return price(sizes.model_config(ModelOptions(preset=preset), 30522), Runtime(), platform)

    mini, base, on_gpu = price_of("mini", "cpu"), price_of("base", "cpu"), price_of("base", "gpu")
    assert 50_000 < mini < 200_000 and 4_000 < base < 8_000

    def count(each: float, epochs: float) -> int:
        return len(best_lengths(lengths, 128, passes=float(epochs), price=each))

    assert count(base, 3) == SHAPES and count(mini, 3) < SHAPES and count(mini, 100) == SHAPES
    assert count(on_gpu, 3) == 1 and count(on_gpu, 1000) > 3
