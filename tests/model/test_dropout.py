"""Statistics of the dropout masks. Every |z| below is checked against 5: one false alarm in 1.7 million a check.

The keys are fixed, so a test that passes once passes always; the rate says what a change of key or hash risks.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from families import BERT, random_params
from jax.sharding import NamedSharding, PartitionSpec
from tiny_batches import lay, random_sequence

from bert_jax.model.dropout import (
    content_seeds,
    derived_seeds,
    dropout,
    keep_mask,
    numbered_seeds,
    row_seeds,
    sequence_numbers,
    uniform,
)
from bert_jax.model.runtime import Runtime
from bert_jax.train.objectives import DiffusionObjective, ReplacedTokensObjective, means

LIMIT = 5.0


def masks(key: int, shape: tuple[int, ...], rate: float) -> np.ndarray:
    return np.asarray(keep_mask(row_seeds(jax.random.key(key), (), shape[0]), shape, rate))


def z_of_rate(kept: np.ndarray, rate: float) -> float:
    return (kept.mean() - (1 - rate)) / math.sqrt(rate * (1 - rate) / kept.size)


def z_of_correlation(one: np.ndarray, other: np.ndarray, rate: float) -> float:
    """Of the covariance of two masks, whose standard error under independence is rate (1 - rate) / sqrt(n)."""
    product = (one - (1 - rate)) * (other - (1 - rate))
    return product.mean() / (rate * (1 - rate)) * math.sqrt(product.size)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_rate_is_kept_overall_in_every_row_and_in_every_column(rate):
    kept = masks(1, (64, 128, 64), rate)
    assert abs(z_of_rate(kept, rate)) < LIMIT
    for axis in (0, 1, 2):
        for part in np.moveaxis(kept, axis, 0):  # 256 checks: one false alarm in 6 700
            assert abs(z_of_rate(part, rate)) < LIMIT


def test_positions_are_independent_at_every_distance():
    kept = masks(2, (32, 2**15), 0.1).astype(np.float64)
    for distance in [*range(1, 33), 64, 127, 128, 129, 768, 1024, 4096, 2**14]:
        assert abs(z_of_correlation(kept[:, :-distance], kept[:, distance:], 0.1)) < LIMIT


def test_indices_that_differ_in_one_bit_are_independent():
    kept = masks(3, (32, 2**15), 0.1).astype(np.float64)
    index = np.arange(2**15)
    for bit in range(15):
        assert abs(z_of_correlation(kept, kept[:, index ^ (1 << bit)], 0.1)) < LIMIT


def test_blocks_of_sixteen_drop_a_binomial_number():
    dropped = 16 - masks(4, (16, 2**16), 0.1).reshape(-1, 16).sum(-1)
    counts = np.bincount(np.minimum(dropped, 6), minlength=7)
    expected = np.array([math.comb(16, k) * 0.1**k * 0.9 ** (16 - k) for k in range(6)])
    expected = np.append(expected, 1 - expected.sum()) * len(dropped)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 38.3  # the quantile of 6 degrees of freedom that is passed once in a million


def test_rows_sites_and_steps_are_independent():
    seeds = row_seeds(jax.random.key(5), (3, 2), 4).reshape(-1, 2)  # layers, sites, rows
    later = row_seeds(jax.random.fold_in(jax.random.key(5), 1), (3, 2), 4).reshape(-1, 2)
    kept = np.asarray(keep_mask(jnp.concatenate([seeds, later]), (48, 2**14), 0.1)).astype(np.float64)
    centered = (kept - 0.9) / math.sqrt(0.09)
    z = centered @ centered.T / math.sqrt(kept.shape[1])
    assert np.abs(z[~np.eye(48, dtype=bool)]).max() < LIMIT  # 1 128 pairs: one false alarm in 1 500


def test_lines_are_independent_of_their_neighbors_at_every_offset():
    kept = masks(11, (4, 512, 1024), 0.1).astype(np.float64)
    for distance in (1, 2, 3, 64, 128, 511):
        for offset in (0, 1, 2, 7, 128, 512):
            near, far = kept[:, :-distance], np.roll(kept[:, distance:], offset, axis=2)
            assert abs(z_of_correlation(near, far, 0.1)) < LIMIT
    lines = kept[0] - 0.9
    z = (lines @ lines.T)[~np.eye(512, dtype=bool)] / (0.09 * math.sqrt(kept.shape[2]))
    assert np.abs(z).max() < 5.5  # 130,816 pairs: one false alarm in 200
    assert abs(z.std() - 1) < 0.01


def test_the_mask_of_a_line_depends_only_on_its_number_in_the_row():
    seeds = row_seeds(jax.random.key(6), (), 3)
    whole = keep_mask(seeds, (3, 4 * 5, 6), 0.3)
    np.testing.assert_array_equal(keep_mask(seeds, (3, 4, 5, 6), 0.3).reshape(3, 20, 6), whole)
    np.testing.assert_array_equal(keep_mask(seeds, (3, 7, 6), 0.3), whole[:, :7])
    np.testing.assert_array_equal(keep_mask(seeds[1:2], (1, 20, 6), 0.3), whole[1:2])


def test_the_mask_of_positions_does_not_depend_on_the_padded_length():
    seeds = row_seeds(jax.random.key(9), (), 3)
    long = np.asarray(keep_mask(seeds, (3, 4, 48, 48), 0.3, position_axes=2))
    short = np.asarray(keep_mask(seeds, (3, 4, 16, 16), 0.3, position_axes=2))
    np.testing.assert_array_equal(short, long[:, :, :16, :16])
    for first, second in ((long[:, 0], long[:, 1]), (long[:, :, 0], long[:, :, 1]), (long[..., 0], long[..., 1])):
        assert abs(z_of_correlation(first.astype(float), second.astype(float), 0.3)) < LIMIT


def test_a_sharded_array_gets_the_mask_of_the_whole_one():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = jnp.ones((8, 6, 10))
    drop = jax.jit(lambda x, seeds: dropout(x, 0.4, seeds))
    seeds = row_seeds(jax.random.key(7), (), 8)
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", "tensor")))
    np.testing.assert_array_equal(drop(sharded, seeds), drop(x, seeds))


def test_the_mean_is_preserved_and_the_gradient_has_the_same_mask():
    seeds = row_seeds(jax.random.key(8), (), 16)
    x = jnp.full((16, 4096), 2.0)
    dropped, pull = jax.vjp(lambda x: dropout(x, 0.1, seeds), x)
    standard_error = 2 * math.sqrt(0.1 / 0.9 / x.size)
    assert abs(float(dropped.mean()) - 2) < LIMIT * standard_error
    np.testing.assert_array_equal(pull(jnp.full_like(x, 2.0))[0], dropped)
    np.testing.assert_allclose(np.unique(dropped), [0, 2 / 0.9], rtol=1e-6)


def test_nothing_happens_without_seeds_or_at_rate_zero():
    x = jnp.arange(6.0).reshape(2, 3)
    seeds = row_seeds(jax.random.key(9), (), 2)
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, seeds) is x


def test_the_dtype_is_kept():
    seeds = row_seeds(jax.random.key(10), (), 2)
    assert dropout(jnp.ones((2, 8), jnp.bfloat16), 0.1, seeds).dtype == jnp.bfloat16


def test_what_is_kept_is_scaled_exactly_in_bfloat16_too():
    seeds = row_seeds(jax.random.key(12), (), 4)
    x = jnp.linspace(-3, 3, 4 * 64, dtype=jnp.bfloat16).reshape(4, 64)
    wide = dropout(x.astype(jnp.float32), 0.1, seeds)
    np.testing.assert_array_equal(dropout(x, 0.1, seeds), wide.astype(jnp.bfloat16))


SPECIAL = (0, 1, 2, 3, 4)
OBJECTIVES = {
    "diffusion": DiffusionObjective(SPECIAL, mask_id=4),
    "replaced tokens": ReplacedTokensObjective(generator=8),
}
SEQUENCES = [random_sequence(length, BERT.vocab_size, length) for length in (9, 14, 11, 6)]
CONFIG = dataclasses.replace(BERT, layers=1)


def batches():
    """The same sequences in the same order: packed, and each in a row of its own, longer than necessary."""
    first, second, third, fourth = SEQUENCES
    packed = lay([[first, second], [third, fourth]], 24, 5)
    return [jax.tree.map(jnp.asarray, each) for each in (packed, lay([[one] for one in SEQUENCES], 27, 4))]


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_packed_rows_and_microbatches_train_on_what_padded_rows_train_on(objective):
    params, key = random_params(CONFIG, objective.heads), jax.random.key(3)

    @jax.jit
    def sums(corrupted):
        return objective.apply(objective.bind(CONFIG, params, Runtime()), corrupted, key)

    packed, padded = (jax.jit(objective.corrupt)(batch, key) for batch in batches())
    wanted = sums(padded)
    halves = [sums(jax.tree.map(lambda leaf, part=part: leaf[part::2], padded)) for part in (0, 1)]
    for got in (sums(packed), jax.tree.map(jnp.add, *halves)):
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-5), got, wanted)
    other = sums(jax.jit(objective.corrupt)(batches()[1], jax.random.key(4)))
    assert abs(total_loss(other) / total_loss(wanted) - 1) > 1e-3  # another step has other samples


def total_loss(terms) -> float:
    return sum(float(term.loss) for term in terms.values())


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_packed_rows_evaluate_like_padded_rows_in_any_order(objective):
    params = random_params(CONFIG, objective.heads)

    @jax.jit
    def measure(batch):
        return means(objective.apply(objective.bind(CONFIG, params, Runtime()), batch, None), objective.counts(batch))

    packed, padded = batches()
    backwards = jax.tree.map(lambda leaf: leaf[::-1], padded)
    wanted = measure(padded)
    for batch in (packed, backwards):
        jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=2e-5), measure(batch), wanted)


def test_numbers_of_sequences_count_them_in_the_order_of_the_rows():
    packed, padded = batches()
    assert [sorted(set(row)) for row in np.asarray(sequence_numbers(packed.sequence_ids)).tolist()] == [[0, 1], [2, 3]]
    assert np.asarray(sequence_numbers(padded.sequence_ids)).tolist() == [[number] * 27 for number in range(4)]


def test_equal_sequences_have_equal_noise_in_evaluation_only():
    ids = jnp.asarray(np.tile(np.arange(1, 9), (3, 2)), jnp.int32).at[2, 12].set(40)
    sequence_ids = jnp.asarray(np.repeat([[1, 2]], 8, axis=1).repeat(3, axis=0), jnp.int32)
    positions = jnp.asarray(np.tile(np.arange(8), (3, 2)), jnp.int32)
    by_content = np.asarray(content_seeds(ids, sequence_ids, positions)).reshape(6, 8, 2)
    assert (by_content == by_content[:, :1]).all()  # one seed for each sequence
    assert (by_content[:5] == by_content[0]).all() and (by_content[5] != by_content[0]).all()
    by_number = np.asarray(numbered_seeds(jax.random.key(0), sequence_ids)).reshape(6, 8, 2)
    assert len(np.unique(by_number[:, 0], axis=0)) == 6
    moved = np.asarray(content_seeds(ids[:, ::-1], sequence_ids, positions))
    assert (moved.reshape(6, 8, 2)[0] != by_content[0]).all()  # the order of the tokens counts


@pytest.mark.slow
def test_noise_is_uniform_and_independent_between_positions_and_sequences():
    """A Kolmogorov-Smirnov test at 1e-6, and correlations within 5 standard errors: one false alarm in 100,000 keys."""
    rows, length = 128, 512
    columns = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    sequence_ids = jnp.asarray(np.where(columns < 200, 1, 2), jnp.int32)
    positions = jnp.asarray(np.where(columns < 200, columns, columns - 200), jnp.int32)
    ids = jnp.asarray(np.random.default_rng(0).integers(5, 1000, (rows, length)), jnp.int32)
    for seeds in (numbered_seeds(jax.random.key(1), sequence_ids), content_seeds(ids, sequence_ids, positions)):
        noise = np.asarray(uniform(derived_seeds(seeds, positions), (rows, length, 2)), np.float64)
        assert scipy.stats.kstest(noise.ravel(), "uniform").pvalue > 1e-6
        one = (noise[..., 0] - 0.5) * np.sqrt(12)
        pairs = [(one, (noise[..., 1] - 0.5) * np.sqrt(12)), (one[:, :200], one[:, 200:400]), (one[:-1], one[1:])]
        pairs += [(one[:, :-distance], one[:, distance:]) for distance in (1, 2, 64)]
        for left, right in pairs:
            assert abs((left * right).mean()) * np.sqrt(left.size) < 5
