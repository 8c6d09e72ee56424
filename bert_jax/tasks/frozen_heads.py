"""Small heads over frozen vectors of words: a linear layer, or a two-layer BiLSTM."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, Int32, Int64

from bert_jax.command import UserError
from bert_jax.tasks.example import spans
from bert_jax.tasks.frozen_vectors import WordVectors
from bert_jax.train.losses import classification_sums

HEADS = ("linear", "bilstm")
POOL = 16  # batches; the sentences of a pool are sorted by length, which reduces padding
SHORTEST = 8  # words; a batch is padded to this length times a power of two


@dataclass(frozen=True)
class HeadOptions:
    """The head and its training: Adam with the default rates of Kingma and Ba 2015, and early stopping on dev.

    Raises UserError for an unknown head and for a number out of range.
    """

    head: str = "bilstm"
    hidden: int = 256  # units in each direction of each layer; Devlin et al. 2019, section 5.3, use 768
    batch_size: int = 32  # sentences
    learning_rate: float = 1e-3
    epochs: int = 30  # at most
    patience: int = 4  # epochs without a better dev metric before it stops

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise UserError(f"unknown --head {self.head!r}; choose from: {', '.join(HEADS)}")
        for name in ("hidden", "batch_size", "epochs", "patience"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} is {getattr(self, name)}; use 1 or more")
        if not self.learning_rate > 0:
            raise UserError(f"--learning_rate is {self.learning_rate}; use a number above 0, such as 1e-3")


class Linear(nnx.Module):
    """A dense layer over each word's vector."""

    def __init__(self, width: int, classes: int, rngs: nnx.Rngs) -> None:
        self.output = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, vectors: Float[Array, "B K F"], lengths: Int[Array, "B"]) -> Float[Array, "B K C"]:
        return self.output(vectors)


class BiLSTM(nnx.Module):
    """Two layers of LSTMs in both directions over a sentence's words, and a dense layer (Devlin et al. 2019,
    section 5.3)."""

    def __init__(self, width: int, hidden: int, classes: int, rngs: nnx.Rngs) -> None:
        def direction(inputs: int) -> nnx.RNN:
            return nnx.RNN(nnx.OptimizedLSTMCell(inputs, hidden, rngs=rngs), rngs=rngs)

        self.forward = nnx.List([direction(inputs) for inputs in (width, 2 * hidden)])
        self.backward = nnx.List([direction(inputs) for inputs in (width, 2 * hidden)])
        self.output = nnx.Linear(2 * hidden, classes, rngs=rngs)
        self.hidden = hidden

    def __call__(self, vectors: Float[Array, "B K F"], lengths: Int[Array, "B"]) -> Float[Array, "B K C"]:
        start = jnp.zeros((vectors.shape[0], self.hidden))
        for forward, backward in zip(self.forward, self.backward, strict=True):
            ahead = forward(vectors, initial_carry=(start, start), seq_lengths=lengths)
            behind = backward(vectors, initial_carry=(start, start), seq_lengths=lengths, reverse=True, keep_order=True)
            vectors = jnp.concatenate([ahead, behind], axis=-1)
        return self.output(vectors)


class Trained(NamedTuple):
    """A head at the epoch of its best dev score: the predicted tag of each word by split, and that epoch, from 1."""

    predictions: dict[str, Int32[np.ndarray, "W"]]
    epoch: int


def train_head(
    splits: dict[str, WordVectors],
    classes: int,
    options: HeadOptions,
    seed: int,
    score: Callable[[Int32[np.ndarray, "W"]], float],
) -> Trained:
    """Trains a head on `train` until the score of its predictions on `dev` stops improving.

    The predictions of the result are those of all splits except train. The same seed and vectors give the same head.
    """
    train = splits["train"]
    width = train.vectors.shape[1]
    graph, params, *rest = nnx.split(_module(options, width, classes, nnx.Rngs(seed)), nnx.Param, ...)
    optimizer = _optimizer(options)
    state = optimizer.init(params)
    best, best_score, best_epoch = params, -np.inf, 0
    for epoch in range(1, options.epochs + 1):
        generator = np.random.default_rng((seed, epoch))
        for batch in _training_batches(train, options.batch_size, generator):
            params, state = _step(options, graph, params, rest, state, batch)
        found = score(_predict_split(graph, params, rest, splits["dev"], options.batch_size))
        if found > best_score:
            best, best_score, best_epoch = params, found, epoch
        if epoch - best_epoch >= options.patience:
            break
    others = {name: split for name, split in splits.items() if name != "train"}
    predictions = {name: _predict_split(graph, best, rest, split, options.batch_size) for name, split in others.items()}
    return Trained(predictions, best_epoch)


class _Batch(NamedTuple):
    vectors: Any  # [B,K,F]
    labels: Any  # i32[B,K]
    lengths: Any  # i32[B]; 0: a filler


def _module(options: HeadOptions, width: int, classes: int, rngs: nnx.Rngs) -> nnx.Module:
    return Linear(width, classes, rngs) if options.head == "linear" else BiLSTM(width, options.hidden, classes, rngs)


def _optimizer(options: HeadOptions) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(options.learning_rate))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _step(options: HeadOptions, graph: Any, params: Any, rest: Any, state: Any, batch: _Batch) -> tuple[Any, Any]:
    def loss(params: Any) -> Float[Array, ""]:
        logits = nnx.merge(graph, params, *rest)(batch.vectors.astype(jnp.float32), batch.lengths)
        weights = _inside(batch).astype(jnp.float32)
        return classification_sums(logits, batch.labels, weights)[0] / jnp.maximum(weights.sum(), 1)

    updates, state = _optimizer(options).update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state


@functools.partial(jax.jit, static_argnums=0)
def _predict(graph: Any, params: Any, rest: Any, batch: _Batch) -> Int[Array, "B K"]:
    logits = nnx.merge(graph, params, *rest)(batch.vectors.astype(jnp.float32), batch.lengths)
    return logits.argmax(axis=-1).astype(jnp.int32)


def _inside(batch: _Batch) -> Any:
    return jnp.arange(batch.labels.shape[1])[None] < batch.lengths[:, None]


def _predict_split(graph: Any, params: Any, rest: Any, split: WordVectors, batch_size: int) -> Int32[np.ndarray, "W"]:
    sizes = np.diff(split.sentence_offsets)
    order = np.argsort(sizes, kind="stable")
    found = np.zeros(len(split.labels), np.int32)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        predicted = np.asarray(_predict(graph, params, rest, _batch(split, chosen, batch_size)))
        inside = np.arange(predicted.shape[1]) < sizes[chosen][:, None]
        found[spans(split.sentence_offsets[chosen], sizes[chosen])] = predicted[: len(chosen)][inside]
    return found


def _training_batches(split: WordVectors, batch_size: int, generator: np.random.Generator) -> Iterator[_Batch]:
    """Every sentence once, in random order. Within a pool, sentences of similar length share a batch."""
    sizes = np.diff(split.sentence_offsets)
    order = generator.permutation(len(sizes))
    pools = [order[start : start + POOL * batch_size] for start in range(0, len(order), POOL * batch_size)]
    by_length = [pool[np.argsort(sizes[pool], kind="stable")] for pool in pools]
    batches = [pool[start : start + batch_size] for pool in by_length for start in range(0, len(pool), batch_size)]
    for number in generator.permutation(len(batches)):
        yield _batch(split, batches[number], batch_size)


def _batch(split: WordVectors, chosen: Int64[np.ndarray, "R"], batch_size: int) -> _Batch:
    """The chosen sentences, padded to one length, and filler rows up to batch_size."""
    sizes = np.diff(split.sentence_offsets)[chosen]
    longest = max(SHORTEST, 1 << (int(sizes.max()) - 1).bit_length())
    vectors = np.zeros((batch_size, longest, split.vectors.shape[1]), split.vectors.dtype)
    labels = np.zeros((batch_size, longest), np.int32)
    inside = np.zeros(labels.shape, bool)
    inside[: len(chosen)] = np.arange(longest) < sizes[:, None]
    words = spans(split.sentence_offsets[chosen], sizes)
    vectors[inside], labels[inside] = split.vectors[words], split.labels[words]
    return _Batch(vectors, labels, np.pad(sizes, (0, batch_size - len(chosen))).astype(np.int32))
