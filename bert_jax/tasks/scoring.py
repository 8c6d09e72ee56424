"""Scores sentences by a masked language model: the pseudo-log-likelihood, and the preferred sentence of a pair.

Read `score` first. Each scored token needs a forward pass in which it is masked, so the work is in making these passes
cheap: rows of similar length share a batch, a row that several sentences need is computed once, and the last layer and
the vocabulary are computed at the one position that is read.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
from jaxtyping import Array, Bool, Float, Float64, Int32, Int64

from bert_jax.config import MeshConfig, ModelConfig
from bert_jax.errors import UserError, flag
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model.bert import bind
from bert_jax.model.heads.config import Heads
from bert_jax.model.outputs import vocabulary_logits
from bert_jax.model.runtime import Runtime
from bert_jax.progress import WARNING, Reporter, print_note
from bert_jax.tasks.batches import best_lengths, padded_length, price
from bert_jax.tasks.embedder import checked_texts
from bert_jax.tasks.fill_mask import masked_model
from bert_jax.tasks.inference import device_params, run_batches, shared_tokenizer
from bert_jax.tasks.rows import TaskBatch, encode_pieces
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.train import sharding

ORIGINAL, WITHIN_WORD = "original", "within_word_l2r"
MASKINGS = (ORIGINAL, WITHIN_WORD)

FEWEST = 16  # rows of a batch
BATCH_POSITIONS = 4096  # of a batch, whatever its length
WINDOW_POSITIONS = 1 << 22  # of masked rows that exist at a time, among which equal ones are looked for
TARGETS = 4  # tokens that one row scores; sentences that differ in a word need another token at the same mask
LENGTHS = 32  # to which rows are padded, at most


class Scores(NamedTuple):
    """The scores of N texts."""

    values: Float64[np.ndarray, "N"]  # sums of natural log-probabilities
    tokens: Int64[np.ndarray, "N"]  # how many tokens were scored


class PairScore(NamedTuple):
    """The scores of a pair of texts, and which of them is preferred: 0, 1, or None if both scores are equal."""

    first: float
    second: float
    preferred: int | None


def score(
    checkpoint: str | Path | LoadedModel,
    texts: Iterable[str | tuple[str, ...]],
    masking: str = ORIGINAL,
    *,
    average: str = "",
) -> list[float | PairScore]:
    """Returns the pseudo-log-likelihoods of texts (Salazar et al. 2020, section 2.3), and the preferred ones of pairs.

    A score is the sum over a text's tokens of log P(token | all others), where special tokens are not scored. The two
    texts of a pair are scored separately.

    Args:
        masking: `original` masks each token alone. `within_word_l2r` also masks the tokens that follow it in its word,
            so that a word of several tokens does not give itself away (Kauf and Ivanova 2023).
        average: The average in a checkpoint that is given by its path, as in open_checkpoint.

    Raises:
        UserError: As score_texts, or an item is neither a string nor a pair.
    """
    items = checked_texts(texts)
    flat = [text for item in items for text in item]
    owners = [number for number, item in enumerate(items, 1) for _ in item]
    values = score_texts(checkpoint, flat, masking, average=average, name=lambda index: f"text {owners[index]}")[0]
    remaining = iter(values.tolist())
    scores = [tuple(next(remaining) for _ in item) for item in items]
    return [PairScore(*parts, preferred(*parts)) if len(parts) == 2 else parts[0] for parts in scores]


def preferred(first: float, second: float) -> int | None:
    """Returns the index of the higher score, None if neither is higher."""
    return 0 if first > second else 1 if second > first else None  # None for NaN, too


def score_texts(
    checkpoint: str | Path | LoadedModel,
    texts: Sequence[str],
    masking: str = ORIGINAL,
    *,
    average: str = "",
    name: Callable[[int], str],
) -> Scores:
    """Scores texts as `score`; equal texts are scored once. Shows the progress.

    Args:
        name: Names the text with an index in messages.

    Raises:
        UserError: The masking is unknown, the checkpoint has no masked language model, or a text has no token to score
            or exceeds the positions.
    """
    if masking not in MASKINGS:
        raise UserError(f"{flag('masking')} is {masking!r}; choose from {', '.join(MASKINGS)}")
    loaded = masked_model(checkpoint, "scoring texts", average)
    if not len(texts):
        return Scores(np.zeros(0), np.zeros(0, np.int64))
    distinct: dict[str, int] = {}
    members = np.array([distinct.setdefault(text, len(distinct)) for text in texts], np.int64)
    sentences = encode(list(distinct), shared_tokenizer(loaded), masking)
    counts, limit = sentences.counts, loaded.model.max_positions
    for index, member in enumerate(members):
        if not counts[member]:
            raise UserError(f"{name(index)} is empty: it has no token to score. Write a text in it, or remove it")
        if (length := sentences.lengths[member]) > limit:
            raise UserError(f"{name(index)} has {length} tokens, but the model {limit} positions. Shorten or remove it")
    sums = _sums(loaded, sentences)
    if undefined := int((~np.isfinite(sums[members])).sum()):
        print_note(f"{WARNING}{undefined:,} of {len(texts):,} scores are not finite; use an earlier checkpoint")
    return Scores(sums[members], counts[members])


class Sentences(NamedTuple):
    """S encoded texts, whose N tokens are concatenated without padding."""

    input_ids: Int32[np.ndarray, "N"]
    offsets: Int64[np.ndarray, "S+1"]
    is_scored: Bool[np.ndarray, "N"]
    mask_ends: Int64[np.ndarray, "N"]  # the token after the last one that is masked while this one is predicted
    mask_id: int
    pad_id: int

    @property
    def lengths(self) -> Int64[np.ndarray, "S"]:
        return np.diff(self.offsets)

    @property
    def counts(self) -> Int64[np.ndarray, "S"]:
        """How many tokens of each text are scored."""
        return np.diff(np.concatenate([[0], np.cumsum(self.is_scored)])[self.offsets])


def encode(texts: Sequence[str], tokenizer: Tokenizer, masking: str) -> Sentences:
    """Encodes texts with their special tokens, as predict and embed do, and finds what is scored and masked."""
    ids, boundaries, words = tokenizer.of_tasks.encode_words_many(texts)
    nothing = ids[:0], np.zeros(len(boundaries), np.int64)
    paired, unlimited = np.zeros(len(texts), bool), 1 << 40
    encoded, _, places = encode_pieces((ids, boundaries), nothing, paired, tokenizer, unlimited)
    roles = tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id  # which a text may also hold as text
    ends = np.arange(1, len(places) + 1)
    if masking == WITHIN_WORD:
        # A word ends where the next token has another one. Special tokens, at both ends of a text, have none.
        words = np.where(places >= 0, words[places], -1) if len(words) else places
        last = np.flatnonzero(np.diff(words, append=-2))
        ends = last[np.searchsorted(last, np.arange(len(words)))] + 1
    is_scored = (places >= 0) & ~np.isin(encoded.input_ids, roles)
    return Sentences(encoded.input_ids, encoded.offsets, is_scored, ends, tokenizer.mask_id, tokenizer.pad_id)


def _sums(loaded: LoadedModel, sentences: Sentences) -> Float64[np.ndarray, "S"]:
    """Returns the sum of the log-probabilities of each text's scored tokens."""
    counts, mesh = sentences.counts, sharding.make_mesh(MeshConfig())
    sums = np.zeros(len(counts))
    # A scan over layers compiles fast, and padded lengths are compiled separately.
    runtime, params = Runtime(layer_loop="scan"), device_params(loaded, mesh, loaded.params)
    compute = functools.partial(_log_probabilities, loaded.model, loaded.heads, runtime, params)
    with Reporter("scoring", int(counts.sum()), ("tokens",)) as progress:
        # A forward pass costs a third of a training step, and its program compiles in half of the time.
        compiling = price(loaded.model, runtime, jax.default_backend()) / 2
        lengths = np.repeat(sentences.lengths, counts)
        chosen = best_lengths(lengths, loaded.model.max_positions, LENGTHS, passes=1 / 3, price=compiling, step=1)
        if len(chosen) == 1:  # few rows: a program that other calls use, too
            chosen = (padded_length(chosen[0], loaded.model.max_positions),)
        for window, length, batch_size in _windows(sentences, chosen):
            rows = masked_rows(sentences, window, length)
            # How many of the scored tokens each row serves.
            uses = np.bincount(rows.row, minlength=len(rows.lengths))
            values = np.zeros(rows.targets.shape)
            size = sharding.whole_rows(batch_size, mesh)
            for indices, computed in run_batches(compute, rows.batches(size), mesh):
                real = indices >= 0
                values[indices[real]] = computed[real]
                progress.advance(done := int(uses[indices[real]].sum()), done)
            owners = np.repeat(np.arange(len(window)), counts[window])
            sums[window] = np.bincount(owners, values[rows.row, rows.slot], len(window))
    return sums


def _windows(sentences: Sentences, padded: Sequence[int]) -> Iterator[tuple[Int64[np.ndarray, "W"], int, int]]:
    """Yields texts that are masked together, with the padded length and the rows of their batches."""
    lengths, counts = sentences.lengths, sentences.counts
    ordered = np.argsort(lengths, kind="stable")
    groups = np.split(ordered, np.searchsorted(lengths[ordered], padded, "right"))
    for members, length in zip(groups, padded, strict=False):
        # A power of two if there are few, because each number of rows is compiled separately.
        few = max(1 << (int(counts[members].sum()) - 1).bit_length(), FEWEST)
        batch_size = min(max(BATCH_POSITIONS // length, 1), few)
        # A window is as many texts as have WINDOW_POSITIONS, at least one.
        numbers = np.cumsum(counts[members]) * length // WINDOW_POSITIONS
        for window in np.split(members, np.flatnonzero(np.diff(numbers)) + 1):
            if len(window):
                yield window, length, batch_size


class MaskedRows(NamedTuple):
    """R different rows with masks, padded to one length, that score Q tokens in order."""

    input_ids: Int32[np.ndarray, "R T"]
    lengths: Int32[np.ndarray, "R"]
    positions: Int32[np.ndarray, "R"]  # of the mask that is predicted
    targets: Int32[np.ndarray, "R K"]  # the tokens that are scored there; 0 if there are fewer than K
    # Of each scored token, its row and its place in the row's targets.
    row: Int64[np.ndarray, "Q"]
    slot: Int64[np.ndarray, "Q"]

    def batches(self, size: int) -> Iterator[tuple[Int64[np.ndarray, "B"], TaskBatch]]:
        """Yields batches with the indices of their rows; -1 is a filler, which repeats row 0."""
        for start in range(0, len(self.lengths), size):
            indices = np.arange(start, start + size)
            indices[indices >= len(self.lengths)] = -1
            rows = np.maximum(indices, 0)
            ids, columns = self.input_ids[rows], np.arange(self.input_ids.shape[1], dtype=np.int32)
            real = columns < self.lengths[rows, None]
            labels = self.positions[rows], self.targets[rows]
            yield (
                indices,
                TaskBatch(
                    input_ids=ids,
                    segment_ids=np.zeros_like(ids),
                    sequence_ids=real.astype(np.int32),
                    positions=np.where(real, columns, 0),
                    labels=labels,
                    label_weights=np.ones(size, np.float32),
                ),
            )


def masked_rows(sentences: Sentences, members: Int64[np.ndarray, "W"], length: int) -> MaskedRows:
    """Masks each scored token of these texts; a row that several tokens need exists once."""
    starts, lengths = sentences.offsets[members], sentences.lengths[members]
    columns = np.arange(length)
    real = columns < lengths[:, None]
    tokens = np.where(real, starts[:, None] + columns, 0)
    owners, positions = np.nonzero(sentences.is_scored[tokens] & real)
    predicted = tokens[owners, positions]
    ids = np.where(real, sentences.input_ids[tokens], sentences.pad_id)[owners]
    ends = sentences.mask_ends[predicted] - starts[owners]
    ids[(columns >= positions[:, None]) & (columns < ends[:, None])] = sentences.mask_id

    # Equal rows by Arrow's hashes of their bytes, which include everything that the model reads.
    keys = np.ascontiguousarray(np.column_stack([ids, lengths[owners], positions]).astype(np.int32))
    row = _numbers(keys)
    # The different targets of a row, in groups of K: each group is one row of the result.
    pairs, pair = np.unique(row * (1 << 32) + sentences.input_ids[predicted], return_inverse=True)
    shared = pairs >> 32
    rank = np.arange(len(pairs)) - np.searchsorted(shared, shared)
    slots = rank % TARGETS
    result = np.cumsum(slots == 0) - 1  # of each pair
    targets = np.zeros((result[-1] + 1, TARGETS), np.int32)
    targets[result, slots] = pairs & 0xFFFFFFFF
    first = np.unique(row, return_index=True)[1][shared[slots == 0]]
    contents = keys[first]
    return MaskedRows(contents[:, :-2], contents[:, -2], contents[:, -1], targets, result[pair], slots[pair])


def _numbers(keys: Int32[np.ndarray, "Q C"]) -> Int64[np.ndarray, "Q"]:
    """Numbers the different rows of a table in the order in which they first occur."""
    binary = pa.binary(keys.shape[1] * keys.itemsize)
    table = pa.Array.from_buffers(binary, len(keys), [None, pa.py_buffer(keys)])
    return np.array(table.dictionary_encode().indices, np.int64)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _log_probabilities(
    config: ModelConfig, heads: Heads, runtime: Runtime, params: dict[str, Any], batch: TaskBatch
) -> Float[Array, "B K"]:
    """Computes log P of K tokens at one position of each row."""
    model = bind(config, heads, params, runtime)
    positions, targets = batch.labels
    logits = vocabulary_logits(model, model.encode_at(batch, positions[:, None]))[:, 0]
    return jnp.take_along_axis(logits, targets, axis=-1) - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
