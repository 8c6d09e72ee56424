"""Objectives of each kind learn, by the commands, from the text in the repository.

BERT_JAX_LEARNING=all trains all of them, half an hour, and `pytest -s` prints the figures of
benchmarks/results/references.md. Seeds are fixed, so a failure is never chance.
"""

import os

import learning
import pytest

# A phase of next tokens and one of masked tokens, and pairs. The other cases have more steps, or other masks, noise and
# encoders, each of which has tests of its own.
BRIEF = ("tokens after next tokens", "next sentences")


@pytest.mark.slow
@pytest.mark.parametrize("name", learning.CASES if os.environ.get("BERT_JAX_LEARNING") == "all" else BRIEF)
def test_an_objective_learns(name, tmp_path):
    for one in learning.measure(learning.CASES[name], tmp_path):
        print(f"{name}, {one.term}: loss {one.loss:.3f}, entropy {one.entropy:.3f}")
        assert one.enough, f"{one.term} reached {one.loss:.3f} nats, the entropy is {one.entropy:.3f}"


@pytest.mark.parametrize(("loss", "enough"), [(0.5, True), (0.56, False)])
def test_a_loss_is_compared_with_the_entropy_less_a_margin(loss, enough):
    assert learning.Learned("rtd", loss, learning.binary_entropy(0.5)).enough is enough
