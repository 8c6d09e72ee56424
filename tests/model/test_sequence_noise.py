"""What objectives sample does not depend on the row of a sequence: packed rows train and evaluate like padded ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from families import BERT, random_params
from tiny_batches import lay, random_sequence

from bert_jax.model.dropout import content_seeds, derived_seeds, numbered_seeds, sequence_numbers, uniform
from bert_jax.model.runtime import Runtime
from bert_jax.train.objectives import DiffusionObjective, ReplacedTokensObjective, means

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
