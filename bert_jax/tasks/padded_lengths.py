"""Chooses the lengths to which training batches of a task are padded. Each is one compiled program."""

import numpy as np
from jaxtyping import Int64

from bert_jax.config import ModelConfig
from bert_jax.model import paths
from bert_jax.model.bert import abstract_params
from bert_jax.model.heads import Heads
from bert_jax.model.runtime import Runtime

SHAPES, STEP = 6, 8  # at most so many lengths, each a multiple of STEP or the maximum of the task

# What one more program costs. Measured with jax 0.10 on two cores of an AMD EPYC with AVX2, in float32: the step of a
# BERT of 6 layers of 384 compiles in 8.3 s, tracing included, or in 5.4 s with its layers in a scan, and trains 4,100
# positions a second. An accelerator is assumed to reach a third of the peak of an A100.
# On TPUs, a layer of BERT-Large takes 20 s (491 s for 24 of them).
_SECONDS, _SECONDS_A_LAYER, _SECONDS_A_LAYER_ON_TPUS = 4.8, 0.58, 20.0
_CPU_SPEED, _ACCELERATOR_SPEED = 2.6e11, 1e14  # FLOPs a second in matmuls


def best_lengths(
    lengths: Int64[np.ndarray, "N"], max_length: int, shapes: int = SHAPES, *, passes: float = 1.0, price: float = 0.0
) -> tuple[int, ...]:
    """At most `shapes` lengths, ascending, with which `passes` epochs of rows of these lengths cost least.

    The cost is the number of padded positions of all epochs, and `price` positions for each length. The result is
    exact, by dynamic programming over the histogram: the best lengths for the rows up to some length end with it, and
    the others are the best ones, one fewer, for the rows up to some shorter length.
    """
    rounded = np.minimum(-(-lengths // STEP) * STEP, max_length)
    sizes, counts = np.unique(rounded, return_counts=True)
    before = np.concatenate([[0], np.cumsum(counts)])
    positions = np.concatenate([[0.0], np.full(len(sizes), np.inf)])  # of the first i sizes, by the lengths so far
    cuts: list[np.ndarray] = []  # where the last length begins
    totals = []
    for number in range(1, min(shapes, len(sizes)) + 1):
        costs = positions + (before[:, None] - before) * np.concatenate([[0], sizes])[:, None]
        costs[np.triu_indices(len(positions))] = np.inf
        cuts.append(costs.argmin(axis=1))
        positions = costs.min(axis=1)
        totals.append(passes * positions[-1] + price * number)
    end, chosen = len(sizes), []
    for cut in reversed(cuts[: int(np.argmin(totals)) + 1]):
        chosen.append(int(sizes[end - 1]))
        end = int(cut[end])
    return tuple(reversed(chosen))


def price(model: ModelConfig, runtime: Runtime, platform: str) -> float:
    """How many positions a model trains, about, in the time that compiling its step for one more length takes.

    platform   as jax.default_backend() names it. The price does not depend on the machine otherwise, so that a run
               resumes with the same lengths on another one of the same kind.
    """
    compiled = model.layers if runtime.unrolled(model.layers) else 1
    matrices = paths.flatten(abstract_params(model, Heads())["encoder"]).values()
    times = model.layers if model.shared_layers == "all" else 1
    flops = 6 * times * sum(leaf.size for leaf in matrices)
    speed = _CPU_SPEED if platform == "cpu" else _ACCELERATOR_SPEED
    seconds_a_layer = _SECONDS_A_LAYER_ON_TPUS if platform == "tpu" else _SECONDS_A_LAYER
    return (_SECONDS + seconds_a_layer * compiled) * speed / flops
