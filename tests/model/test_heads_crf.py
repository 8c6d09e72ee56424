"""The linear-chain CRF against every path, one by one."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp

from bert_jax.config import ModelConfig
from bert_jax.model.heads.structured import CRF, allowed_by, recognize_scheme
from bert_jax.model.runtime import Runtime
from bert_jax.tasks.task import chain_sums

CONFIG = ModelConfig(vocab_size=50, layers=1, width=4, heads=1, feed_forward=4)
TAGS, SLOTS = 3, 7
DRAW = np.random.default_rng(0)
LOGITS = DRAW.normal(0, 2, (5, SLOTS, TAGS)).astype(np.float32)
TRUTH = DRAW.integers(0, TAGS, (5, SLOTS)).astype(np.int32)
# One sequence; one with gaps; two sequences and padding; two of which one has no tag; none.
TAGGED = np.array([[1] * 7, [0, 1, 0, 0, 1, 1, 0], [1, 1, 0, 1, 1, 1, 0], [0, 0, 0, 1, 0, 0, 0], [0] * 7], bool)
SEQUENCES = np.array([[1] * 7, [1] * 7, [1, 1, 1, 2, 2, 2, 0], [1, 1, 2, 2, 2, 0, 0], [0] * 7], np.int32)


def new_chain() -> CRF:
    return CRF(CONFIG, TAGS, runtime=Runtime(), key=jax.random.key(0))


@functools.cache
def chain() -> CRF:
    made = new_chain()
    for number, part in enumerate((made.transitions, made.start, made.end)):
        part[...] = jax.random.normal(jax.random.key(number), part[...].shape)
    return made


def chains_of(row: int) -> list[np.ndarray]:
    """The tagged positions of each sequence of a row."""
    found = [np.flatnonzero(TAGGED[row] & (SEQUENCES[row] == number)) for number in (1, 2)]
    return [slots for slots in found if slots.size]


def score_by_hand(row: int, slots: np.ndarray, path: tuple[int, ...]) -> float:
    transitions, start, end = (np.asarray(part[...], np.float64) for part in parts())
    total = start[path[0]] + end[path[-1]] + sum(LOGITS[row, slot, tag] for slot, tag in zip(slots, path, strict=True))
    return total + sum(transitions[pair] for pair in itertools.pairwise(path))


def parts() -> tuple:
    return chain().transitions, chain().start, chain().end


def all_scores(row: int, slots: np.ndarray) -> dict[tuple[int, ...], float]:
    return {path: score_by_hand(row, slots, path) for path in itertools.product(range(TAGS), repeat=len(slots))}


@pytest.mark.parametrize("row", range(5))
def test_the_score_is_that_of_the_path_and_the_partition_that_of_all_paths(row: int) -> None:
    score = sum(score_by_hand(row, slots, tuple(TRUTH[row, slots])) for slots in chains_of(row))
    partition = sum(logsumexp(list(all_scores(row, slots).values())) for slots in chains_of(row))
    np.testing.assert_allclose(figures()["score"][row], score, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(figures()["log_partition"][row], partition, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("row", range(5))
def test_the_decoded_path_is_the_best_of_all(row: int) -> None:
    wanted, best = np.zeros(SLOTS, int), 0.0
    for slots in chains_of(row):
        scores = all_scores(row, slots)
        wanted[slots] = max(scores, key=scores.__getitem__)
        best += max(scores.values())
    np.testing.assert_array_equal(figures()["path"][row], wanted)
    np.testing.assert_allclose(figures()["best"][row], best, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("row", range(5))
def test_the_gradient_of_the_partition_is_the_probability_of_each_tag(row: int) -> None:
    wanted = np.zeros((SLOTS, TAGS))
    for slots in chains_of(row):
        scores = all_scores(row, slots)
        total = logsumexp(list(scores.values()))
        for path, score in scores.items():
            wanted[slots, path] += np.exp(score - total)
    np.testing.assert_allclose(figures()["marginals"][row], wanted, atol=1e-5)


def test_the_loss_is_minus_the_log_likelihood_and_counts_right_tags_of_the_best_path() -> None:
    loss, correct = figures()["sums"]
    np.testing.assert_allclose(loss, (figures()["log_partition"] - figures()["score"]).sum(), rtol=1e-5)
    assert correct == ((figures()["path"] == TRUTH) & TAGGED).sum()


SCHEMES = {
    ("O", "B-X", "I-X", "B-Y", "I-Y"): r"(O |B-X (I-X )*|B-Y (I-Y )*)*",
    ("I-X", "E-X", "O", "S-X", "B-X", "B-Y", "I-Y", "E-Y", "S-Y"): r"(O |S-X |S-Y |B-X (I-X )*E-X |B-Y (I-Y )*E-Y )*",
    ("O", "B", "I"): r"(O |B (I )*)*",
    ("O", "I-X", "I-Y"): r"(O |I-X |I-Y )*",  # IOB1, here and below
    ("O", "B-X", "I-X", "I-Y"): r"(O |I-Y |I-X ((B-X |I-X )*))*",
}


@pytest.mark.parametrize("labels", SCHEMES)
def test_a_scheme_allows_the_sequences_of_its_grammar(labels: tuple[str, ...]) -> None:
    scheme = recognize_scheme(labels)
    assert scheme is not None
    for length in (1, 2, 3):
        for path in itertools.product(range(len(labels)), repeat=length):
            inner = [scheme.pairs[tag][following] for tag, following in itertools.pairwise(path)]
            steps = [scheme.first[path[0]], *inner, scheme.last[path[-1]]]
            written = "".join(f"{labels[tag]} " for tag in path)
            assert all(steps) == bool(re.fullmatch(SCHEMES[labels], written)), written
    assert recognize_scheme(("NOUN", "VERB")) is None


@pytest.mark.parametrize("whole", [(True, True), (False, True), (True, False)])
def test_with_a_scheme_loss_marginals_and_path_are_those_of_the_allowed_paths(whole: tuple[bool, bool]) -> None:
    """For IOB2, where the row begins and ends with its sentence or within it."""
    labels, length = ("O", "B-X", "I-X"), 4
    made, draw = chain(), np.random.default_rng(1)
    logits = draw.normal(0, 2, (1, length, 3)).astype(np.float32)
    logits[0, :, 2] += 3  # I-X wherever it may be
    transitions, start, end = (np.asarray(part[...], np.float64) for part in parts())
    scores = {}
    for path in itertools.product(range(3), repeat=length):
        written = "".join(f"{labels[tag]} " for tag in path)
        if re.fullmatch("(O |B-X (I-X )*)*" if whole[0] else "(I-X )*(O |B-X (I-X )*)*", written):
            moves = sum(transitions[pair] for pair in itertools.pairwise(path))
            scores[path] = start[path[0]] + moves + end[path[-1]] + logits[0, range(length), path].sum()
    tagged, sequences = jnp.ones((1, length), bool), jnp.ones((1, length), jnp.int32)
    allowed = allowed_by(recognize_scheme(labels), jnp.array([whole]))
    total = logsumexp(list(scores.values()))
    gold = draw.choice(len(scores))
    truth = jnp.array([list(scores)[gold]], jnp.int32)
    loss, _ = chain_sums(made, jnp.asarray(logits), truth, tagged.astype(jnp.float32), sequences, allowed)
    assert float(loss) == pytest.approx(total - list(scores.values())[gold], abs=1e-4)
    path, best = made.decode(jnp.asarray(logits), tagged, sequences, allowed)
    assert tuple(np.asarray(path)[0]) == max(scores, key=scores.__getitem__)
    assert float(best[0]) == pytest.approx(max(scores.values()), abs=1e-4)
    marginals = jax.grad(lambda at: made.log_partition(at, tagged, sequences, allowed).sum())(jnp.asarray(logits))
    wanted = np.zeros((length, 3))
    for one, score in scores.items():
        wanted[range(length), one] += np.exp(score - total)
    np.testing.assert_allclose(marginals[0], wanted, atol=1e-5)


@pytest.mark.parametrize("labels", [labels for labels in SCHEMES if len(labels) > 3])
def test_no_sequence_outside_its_scheme_is_decoded(labels: tuple[str, ...]) -> None:
    """300 rows of random logits, transitions, lengths and gaps."""
    draw = np.random.default_rng(3)
    tags, rows, slots = len(labels), 300, 9
    made = CRF(CONFIG, tags, runtime=Runtime(), key=jax.random.key(0))
    for part in (made.transitions, made.start, made.end):
        part[...] = jnp.asarray(draw.normal(0, 5, part[...].shape), jnp.float32)
    tagged = draw.random((rows, slots)) < 0.7
    sequences = jnp.ones((rows, slots), jnp.int32)
    logits = jnp.asarray(draw.normal(0, 10, (rows, slots, tags)), jnp.float32)
    path, _ = made.decode(logits, jnp.asarray(tagged), sequences, allowed_by(recognize_scheme(labels)))
    paths = zip(np.asarray(path), tagged, strict=True)
    written = ["".join(f"{labels[tag]} " for tag in one[there]) for one, there in paths]
    assert all(re.fullmatch(SCHEMES[labels], one) for one in written)
    free, _ = made.decode(logits, jnp.asarray(tagged), sequences)
    assert (np.asarray(free) != np.asarray(path))[tagged].any()


def test_a_new_chain_decodes_independent_tags() -> None:
    np.testing.assert_array_equal(figures()["first_path"], np.where(TAGGED, LOGITS.argmax(-1), 0))


@functools.cache
def figures() -> dict:
    """Everything at once: one compilation."""

    @jax.jit
    def compute(logits: jax.Array) -> dict:
        made, tagged, sequences = chain(), jnp.asarray(TAGGED), jnp.asarray(SEQUENCES)
        path, best = made.decode(logits, tagged, sequences)
        return {
            "score": made.score(logits, jnp.asarray(TRUTH), tagged, sequences),
            "log_partition": made.log_partition(logits, tagged, sequences),
            "marginals": jax.grad(lambda logits: made.log_partition(logits, tagged, sequences).sum())(logits),
            "path": path,
            "first_path": new_chain().decode(logits, tagged, sequences)[0],
            "best": best,
            "sums": chain_sums(made, logits, jnp.asarray(TRUTH), tagged.astype(jnp.float32), sequences),
        }

    return jax.tree.map(np.asarray, compute(jnp.asarray(LOGITS)))
