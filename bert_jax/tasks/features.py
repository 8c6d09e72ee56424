"""Compares the layers of a frozen model on a tagging task by training a small head on each.

`features` is the job. Before it come the vectors of words, and the heads with their training.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, Int32, Int64

from bert_jax import config as config_lib
from bert_jax.config import FinetuneConfig
from bert_jax.config.options import POSITIVE, Valid, at_least, check, option
from bert_jax.config.training import SEEDS
from bert_jax.errors import UserError
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model.heads.basic import LayerMix
from bert_jax.model.outputs import LAYERS, MIX
from bert_jax.progress import Reporter, print_note
from bert_jax.storage.files import naming, naming_temporary
from bert_jax.tasks import held_out, measurement, registry, trials
from bert_jax.tasks.batches import sorted_batches
from bert_jax.tasks.inference import Finish, LayerVectors
from bert_jax.tasks.kinds.tagging import TagRows
from bert_jax.tasks.metrics import TAGGING_METRICS, compute_metrics
from bert_jax.tasks.rows import spans
from bert_jax.tasks.task import Task
from bert_jax.tasks.vector_files import check_range
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.train import sharding
from bert_jax.train.losses import classification_sums

BATCH_SIZE = 32  # rows per batch of the frozen model


class WordBatch(NamedTuple):
    """B sentences, padded to K words."""

    vectors: Any  # [B,K,F]
    labels: Any  # i32[B,K]
    lengths: Any  # i32[B]; 0: a filler


@dataclass(frozen=True, eq=False)
class WordVectors:
    """The words of a split, which has K - 1 sentences."""

    vectors: Float[np.ndarray, "W F"]  # at the words' first pieces; memory-mapped
    labels: Int32[np.ndarray, "W"]  # tags
    sentence_offsets: Int64[np.ndarray, "K"]  # in the words

    @property
    def lengths(self) -> Int64[np.ndarray, "R"]:
        return np.diff(self.sentence_offsets)

    def words(self, sentences: Int64[np.ndarray, "R"]) -> Int64[np.ndarray, "N"]:
        """Returns the numbers of all words in these sentences."""
        return spans(self.sentence_offsets[sentences], self.lengths[sentences])

    def batch(self, sentences: Int64[np.ndarray, "R"], size: int, length: int) -> WordBatch:
        """Pads these sentences to `length` words, and adds fillers up to `size` sentences."""
        lengths = np.pad(self.lengths[sentences], (0, size - len(sentences))).astype(np.int32)
        # [B, K]: the places of words, in the order in which `words` lists them.
        inside = np.arange(length) < lengths[:, None]
        vectors = np.zeros((size, length, self.vectors.shape[1]), self.vectors.dtype)
        labels = np.zeros((size, length), np.int32)
        words = self.words(sentences)
        vectors[inside], labels[inside] = self.vectors[words], self.labels[words]
        return WordBatch(vectors, labels, lengths)


def word_vectors(
    model: LayerVectors, splits: Mapping[str, TagRows], folder: Path, max_length: int, quiet: bool = True
) -> dict[str, dict[str, WordVectors]]:
    """Computes the vectors by layer name and split, and stores them in files in a folder.

    Raises:
        UserError: The dtype of the model's vectors cannot represent a value.
    """
    size = sharding.whole_rows(BATCH_SIZE, model.mesh)
    by_layer: dict[str, dict[str, WordVectors]] = {name: {} for name in model.widths}
    # One pass of the model serves all layers.
    with Reporter("vectors of words", sum(rows.count for rows in splits.values()), ["rows"], quiet) as progress:
        for split, rows in splits.items():
            for number, (name, width) in enumerate(model.widths.items()):
                file = np.lib.format.open_memmap(
                    folder / f"{split}-{number}.npy", mode="w+", dtype=model.dtype, shape=(len(rows.word_rows), width)
                )
                by_layer[name][split] = WordVectors(file, rows.labels[rows.word_starts], rows.sentence_offsets)
            for indices, states in model.run(sorted_batches(rows, size, max_length)):
                indices = indices[indices >= 0]
                # Words are in the order of their rows, so those of a row are the range from `first` to `end`.
                first, end = (np.searchsorted(rows.word_rows, indices, side) for side in ("left", "right"))
                words = spans(first, end - first)
                places = np.repeat(np.arange(len(indices)), end - first), rows.word_slots[words]
                # The states come in the order of model.widths, as by_layer does.
                for name, hidden in zip(by_layer, states, strict=True):
                    check_range(np.isfinite(hidden[places]), model.dtype, "--feature_dtype", f"--layers {name}: ")
                    by_layer[name][split].vectors[words] = hidden[places]
                progress.advance(len(indices), len(indices))
    return by_layer


HEADS = ("linear", "bilstm")
POOL = 16  # batches; the sentences of a pool are sorted by length, which reduces padding
SHORTEST = 8  # words; a batch is padded to this length times a power of two


@dataclass(frozen=True)
class HeadOptions:
    """The head and its training: Adam with the default rates of Kingma and Ba 2015, and early stopping on dev."""

    head: str = option("bilstm", "bilstm or linear", choices=HEADS)
    # Devlin et al. 2019, section 5.3, use 768.
    hidden: int = option(256, "units of the BiLSTM in each direction", metavar="N", valid=at_least(1))
    batch_size: int = option(32, "sentences per batch", metavar="N", valid=at_least(1))
    learning_rate: float = option(1e-3, "of Adam", valid=POSITIVE)
    epochs: int = option(30, "maximum number of epochs", metavar="N", valid=at_least(1))
    patience: int = option(
        4,
        "epochs without a better dev metric before training stops",
        metavar="N",
        aliases=["early_stop"],
        valid=at_least(1),
    )

    def __post_init__(self) -> None:
        check(self)


class Head(nnx.Module):
    """A dense layer over words' vectors, after two layers of a BiLSTM if options.head is bilstm (Devlin et al. 2019).

    Args:
        mixed: The number of layers that the vectors concatenate and the head mixes; 0: it reads the vectors.
    """

    def __init__(self, options: HeadOptions, width: int, classes: int, rngs: nnx.Rngs, mixed: int = 0) -> None:
        self.hidden = options.hidden
        self.mix = LayerMix(mixed) if mixed else None
        # The vectors hold the mixed layers side by side.
        width //= mixed or 1
        # The second layer reads both directions of the first one.
        inputs = (width, 2 * self.hidden) if options.head == "bilstm" else ()

        def direction(inputs: int) -> nnx.RNN:
            return nnx.RNN(nnx.OptimizedLSTMCell(inputs, self.hidden, rngs=rngs), rngs=rngs)

        self.forward = nnx.List([direction(size) for size in inputs])
        self.backward = nnx.List([direction(size) for size in inputs])
        self.output = nnx.Linear(2 * self.hidden if inputs else width, classes, rngs=rngs)

    def __call__(self, batch: WordBatch) -> Float[Array, "B K C"]:
        vectors = batch.vectors.astype(jnp.float32)
        if self.mix is not None:
            vectors = self.mix(jnp.stack(jnp.split(vectors, self.mix.scores.size, axis=-1)))
        start = jnp.zeros((vectors.shape[0], self.hidden))
        run = {"initial_carry": (start, start), "seq_lengths": batch.lengths}
        for forward, backward in zip(self.forward, self.backward, strict=True):
            # keep_order: the backward states are returned in the order of the words.
            both = forward(vectors, **run), backward(vectors, **run, reverse=True, keep_order=True)
            vectors = jnp.concatenate(both, axis=-1)
        return self.output(vectors)


class Mix(NamedTuple):
    """The learned mix of a head."""

    weights: list[float]  # of the embeddings and the layers
    gamma: float  # the factor of their sum


class Trained(NamedTuple):
    """A head at the epoch of its best dev score."""

    predictions: dict[str, Int32[np.ndarray, "W"]]  # tags by split
    epoch: int  # from 1
    mix: Mix | None = None


def train_head(
    splits: dict[str, WordVectors],
    classes: int,
    options: HeadOptions,
    seed: int,
    score: Callable[[Int32[np.ndarray, "W"]], float],
    mixed: int = 0,
) -> Trained:
    """Trains a head on `train` until the score of its predictions on `dev` stops improving.

    The result has predictions for all splits except train. The same seed and vectors give the same head.
    """
    train = splits["train"]
    module = Head(options, train.vectors.shape[1], classes, nnx.Rngs(seed), mixed)
    graph, params, *rest = nnx.split(module, nnx.Param, ...)
    optimizer = _optimizer(options)
    state = optimizer.init(params)
    best, best_score, best_epoch = params, -np.inf, 0
    # jax arrays are immutable, so `best` keeps the parameters of its epoch without a copy.
    for epoch in range(1, options.epochs + 1):
        # All sentences once, in random order. Within a pool, sentences of similar length share a batch.
        generator, size = np.random.default_rng((seed, epoch)), options.batch_size
        order = generator.permutation(len(train.lengths))
        pools = [order[start : start + POOL * size] for start in range(0, len(order), POOL * size)]
        parts = [part for pool in pools for part in _sorted_parts(train, pool, size)]
        # In random order, because the batches of a pool are sorted by length.
        for number in generator.permutation(len(parts)):
            params, state = _step(options, graph, params, rest, state, _padded(train, parts[number], size))
        dev_score = score(_predict_split(graph, params, rest, splits["dev"], size))
        if dev_score > best_score:
            best, best_score, best_epoch = params, dev_score, epoch
        if epoch - best_epoch >= options.patience:
            break
    others = {name: split for name, split in splits.items() if name != "train"}
    predictions = {name: _predict_split(graph, best, rest, split, options.batch_size) for name, split in others.items()}
    learned = nnx.merge(graph, best, *rest).mix
    mix = None if learned is None else Mix(learned.weights().tolist(), float(learned.gamma[...][0]))
    return Trained(predictions, best_epoch, mix)


def _optimizer(options: HeadOptions) -> optax.GradientTransformation:
    # Made from the options wherever it is needed. As a static argument of _step, every new optimizer would compile it
    # again.
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(options.learning_rate))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _step(options: HeadOptions, graph: Any, params: Any, rest: Any, state: Any, batch: WordBatch) -> tuple[Any, Any]:
    def loss(params: Any) -> Float[Array, ""]:
        logits = nnx.merge(graph, params, *rest)(batch)
        # Padding and fillers weigh nothing, and the mean is over the words of the batch.
        weights = (jnp.arange(logits.shape[1])[None] < batch.lengths[:, None]).astype(jnp.float32)
        return classification_sums(logits, batch.labels, weights)[0] / jnp.maximum(weights.sum(), 1)

    updates, state = _optimizer(options).update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state


@functools.partial(jax.jit, static_argnums=0)
def _predict(graph: Any, params: Any, rest: Any, batch: WordBatch) -> Int[Array, "B K"]:
    return nnx.merge(graph, params, *rest)(batch).argmax(axis=-1).astype(jnp.int32)


def _predict_split(graph: Any, params: Any, rest: Any, split: WordVectors, size: int) -> Int32[np.ndarray, "W"]:
    tags = np.zeros(len(split.labels), np.int32)
    for sentences in _sorted_parts(split, np.arange(len(split.lengths)), size):
        predicted = np.asarray(_predict(graph, params, rest, _padded(split, sentences, size)))[: len(sentences)]
        inside = np.arange(predicted.shape[1]) < split.lengths[sentences][:, None]
        tags[split.words(sentences)] = predicted[inside]
    return tags


def _sorted_parts(split: WordVectors, sentences: Int64[np.ndarray, "R"], size: int) -> list[Int64[np.ndarray, "..."]]:
    """Sorts sentences by length, and splits them into parts of `size`."""
    ordered = sentences[np.argsort(split.lengths[sentences], kind="stable")]
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def _padded(split: WordVectors, sentences: Int64[np.ndarray, "R"], size: int) -> WordBatch:
    # A power of two, because each length is compiled separately.
    longest = int(split.lengths[sentences].max())
    return split.batch(sentences, size, max(SHORTEST, 1 << (longest - 1).bit_length()))


def _seed_numbers(seeds: int | tuple[int, ...]) -> tuple[int, ...]:
    return seeds if isinstance(seeds, tuple) else tuple(range(seeds))


def _are_seeds(seeds: int | tuple[int, ...]) -> bool:
    numbers = _seed_numbers(seeds)
    return bool(numbers) and len({*numbers}) == len(numbers) and all(0 <= seed < SEEDS for seed in numbers)


@dataclass(frozen=True)
class FeatureOptions(HeadOptions):
    """Which layers are compared, and how their heads are trained."""

    layers: str = option("all", "see above", metavar="NAME,...")
    seeds: int | tuple[int, ...] = option(
        3,
        "heads trained per layer, or several different seeds, such as 0,7,9",
        metavar="N|SEED,...",
        valid=Valid(
            _are_seeds,
            f"a number of seeds of at least 1, or several different seeds from 0 to {SEEDS - 1}, such as 0,7,9",
        ),
    )
    max_sentences: int = option(
        0, "use the first N of each file; 0: all", metavar="N", aliases=["max_rows"], valid=at_least(0)
    )
    feature_dtype: str = option(
        "float16", "of the stored vectors: float16 or float32", aliases=["dtype"], choices=("float16", "float32")
    )
    compute_dtype: str = option("float32", "of the model: float32, bfloat16 or auto")
    scratch: str = option("", "folder for the vectors; default: the system's", metavar="DIR")


def features(
    checkpoint: str | Path | LoadedModel,
    config: FinetuneConfig | ml_collections.ConfigDict,
    options: FeatureOptions | None = None,
    *,
    average: str = "",
    quiet: bool = True,
) -> dict[str, Any]:
    """Trains heads on layers of a frozen model, and returns the content of --output.

    Returns:
        `task, head, seeds, counts, layers`. By layer name, layers holds `width`, `epochs` by seed, and by split (dev,
        and test if it has labels) the metrics' `mean`, `std` (sample standard deviation; None for one seed) and
        `values`. `mix` also has `weights` (of embeddings and layers) and `gamma`, the factor of their sum, by seed.

    Raises:
        UserError: The task is no tagging task or has no dev file, or the model does not have a layer.
    """
    if isinstance(config, ml_collections.ConfigDict):
        config = config_lib.load(FinetuneConfig, config)
    options = options or FeatureOptions()
    loaded = checkpoint if isinstance(checkpoint, LoadedModel) else open_checkpoint(checkpoint, average)
    task, splits = _encode(loaded, config, options.max_sentences, quiet)
    names = [name.strip() for name in options.layers.split(",") if name.strip()]
    if names == ["all"]:
        names = [name for name in LAYERS if loaded.model.layers >= 4 or not name.endswith("_last_4")]
    if not names:
        raise UserError(
            f"--layers is {options.layers!r}; use all, or a comma-separated list of {', '.join(LAYERS)}, {MIX}"
        )
    names, seeds = list(dict.fromkeys(names)), _seed_numbers(options.seeds)
    model = LayerVectors(loaded, names, Finish(dtype=options.feature_dtype), options.compute_dtype)
    words = sum(len(rows.word_rows) for rows in splits.values())
    size = words * sum(model.widths.values()) * np.dtype(model.dtype).itemsize
    # All vectors are stored on disk, so that the encoder runs once: every seed and epoch reads them again.
    with tempfile.TemporaryDirectory(dir=options.scratch or None, prefix="bert_jax-features-") as folder:
        print_note(f"storing {size / 1e6:,.0f} MB of vectors ({model.dtype}) in {folder} until the end", quiet)
        with naming(options.scratch) if options.scratch else naming_temporary():
            vectors = word_vectors(model, splits, Path(folder), task.max_length, quiet)
        results: dict[str, Any] = {}
        with Reporter("heads", len(vectors) * len(seeds), ["heads"], quiet) as progress:
            for name, layer_vectors in vectors.items():
                # The embeddings count as a layer of the mix.
                runs, mixed = [], loaded.model.layers + 1 if name == MIX else 0
                for seed in seeds:
                    runs.append(_train(task, splits, layer_vectors, options, seed, mixed))
                    progress.advance(1, 1)
                width = model.widths[name] // (mixed or 1)
                results[name] = {"width": width, "epochs": [head.epoch for head, _ in runs]}
                if mixed:
                    mixes = [head.mix for head, _ in runs if head.mix]
                    results[name] |= {"weights": [mix.weights for mix in mixes], "gamma": [mix.gamma for mix in mixes]}
                for split in runs[0][1]:
                    results[name][split] = trials.summary([metrics[split] for _, metrics in runs])
    return {
        "task": task.name,
        "head": {item.name: getattr(options, item.name) for item in fields(HeadOptions)},
        "seeds": list(seeds),
        "counts": {name: measurement.counts(rows, task, loaded.vocabulary) for name, rows in splits.items()},
        "layers": results,
    }


def _encode(
    loaded: LoadedModel, config: FinetuneConfig, max_sentences: int, quiet: bool
) -> tuple[Task, dict[str, TagRows]]:
    """Reads the task, which its training file completes, and encodes the first sentences of its labelled splits."""
    task, files = registry.resolve(config.task)
    if task.kind != "tagging":
        raise UserError(f"config.task.kind is {task.kind!r}; use a tagging task, such as those of the recipe tagging")
    task.check_model(loaded.model)
    splits = {name: registry.read(task, path, label_required=name != "test") for name, path in files.items()}
    # From all rows, so that the held-out ones have no unknown label.
    complete = task.complete(splits["train"])
    if "dev" not in files:
        splits["train"], dev, line = held_out.split(task, splits["train"], config.task.dev_share)
        print_note(line, quiet)
        if dev is None:
            raise UserError(
                "the task has no dev file, which decides when training stops; set one with --config.task.dev=FILE"
            )
        splits["dev"] = dev
    task = complete
    tokenizer = Tokenizer(loaded.vocabulary.spec)
    rows = {}
    for name, split in splits.items():
        if split.labelled:
            part = dataclasses.replace(split, items=split.items[: max_sentences or None])
            rows[name] = cast(TagRows, task.encode(part, tokenizer))
    return task, rows


def _train(
    task: Task,
    splits: Mapping[str, TagRows],
    vectors: dict[str, WordVectors],
    options: HeadOptions,
    seed: int,
    mixed: int = 0,
) -> tuple[Trained, dict[str, dict[str, float]]]:
    """Trains a head with a seed; returns it with the metrics of its predictions by split."""

    def by_sentence(ids: np.ndarray, rows: TagRows) -> list[list[str]]:
        tags = [task.labels[number] for number in ids]
        return [tags[start:stop] for start, stop in pairwise(rows.sentence_offsets)]

    def measured(split: str, predictions: np.ndarray) -> dict[str, float]:
        labels, predicted = (by_sentence(ids, splits[split]) for ids in (vectors[split].labels, predictions))
        return compute_metrics(TAGGING_METRICS, task.metrics, labels, predicted)

    def score(predictions: np.ndarray) -> float:
        # The first metric decides, as in fine-tuning.
        return measured("dev", predictions)[task.metrics[0]]

    trained = train_head(vectors, len(task.labels), options, seed, score, mixed)
    return trained, {split: measured(split, predictions) for split, predictions in trained.predictions.items()}
