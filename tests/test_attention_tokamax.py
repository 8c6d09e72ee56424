"""tokamax's attention by its plain implementation, on a CPU; test_compiled_steps.py compiles the kernels themselves."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from test_attention_kernels import HIGHEST, assert_equals_einsum, rows

from bert_jax.model.ops import attention_tokamax
from bert_jax.model.ops.attention_einsum import einsum_attention
from bert_jax.model.placement import Placement
from bert_jax.model.token_positions import key_ranges, token_positions, visible_keys

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not attention_tokamax.is_installed(), reason="needs the extra tokamax"),
]
attend = functools.partial(attention_tokamax.tokamax_attention, placement=Placement(), implementation="xla")


@pytest.fixture(autouse=True)
def ranks_are_promoted():
    """As without conftest.py: tokamax's plain implementation needs it."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize(("slots", "window", "causal"), [(12, 0, False), (128, 0, False), (150, 20, True)])
def test_values_and_gradients_are_those_of_einsum(slots, window, causal):
    def kernel(query, key, value, sequence_ids, visible):
        places = token_positions(sequence_ids, sequence_ids)
        return attend(query, key, value, *key_ranges(places, places, window=window, causal=causal))

    assert_equals_einsum(kernel, *rows(slots), window, causal)


def test_some_queries_get_what_all_of_them_would():
    """The last layer of pretraining computes the masked positions only."""
    heads, sequence_ids = rows(9)
    places = token_positions(sequence_ids, sequence_ids)
    some = places.at(jnp.asarray([[0, 4, 5], [8, 1, 1]]))
    query = jnp.take_along_axis(heads[0], some.in_row[:, :, None, None], axis=1)
    got = attend(query, *heads[1:], *key_ranges(some, places))
    options = {"dropout_rate": 0.0, "seeds": None, "precision": HIGHEST}
    wanted, _ = einsum_attention(query, *heads[1:], visible_keys(some, places), **options)
    np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_the_flags_of_a_command_are_not_taken_for_those_of_tokamax(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bert-jax", "pretrain", "--config=bert_tiny"])
    flags.FLAGS.unparse_flags()
    heads, sequence_ids = rows(9)
    places = token_positions(sequence_ids, sequence_ids)
    assert attend(*heads, *key_ranges(places, places)).shape == heads[0].shape
