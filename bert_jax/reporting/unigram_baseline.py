"""The unigram baseline on held-out shards, with which a pretraining run is compared."""

import os
from dataclasses import dataclass

import numpy as np

from bert_jax.data.loader import EVALUATION_SEED, PretrainingLoader
from bert_jax.data.manifest import read_unigram_counts
from bert_jax.data.shards import open_dataset


@dataclass(frozen=True)
class UnigramBaseline:
    """Metrics of a model that knows only the token frequencies of the training rows, on the masks of evaluation."""

    token: str  # the most frequent token of the training rows
    accuracy: float  # of always predicting it
    loss: float  # nats per masked token, by the training frequencies with add-one smoothing
    next_sentence_accuracy: float | None  # of always predicting the more frequent label; None without labels
    predictions: int  # number of masked tokens


def unigram_baseline(
    shards: str | os.PathLike[str], max_rows: int = 0, train: str | os.PathLike[str] = ""
) -> UnigramBaseline:
    """Evaluates the baseline on the held-out part of shards (the first max_rows rows; 0: all).

    train    the shards whose training rows are counted; empty: the same shards

    Raises UserError if the shards cannot be opened or have no held-out part.
    """
    dataset = open_dataset(shards, "eval")
    vocabulary = dataset.vocabulary()
    counted = open_dataset(train, "train") if train else dataset
    counts = read_unigram_counts(counted.directory, counted.manifest).astype(np.float64)
    ordinary = np.ones(vocabulary.vocab_size, bool)
    ordinary[list(vocabulary.special_ids)] = False
    counts = np.where(ordinary, counts + 1, 0.0)
    with np.errstate(divide="ignore"):
        log_shares = np.log(counts / counts.sum())
    top = int(counts.argmax())

    loader = PretrainingLoader(dataset, vocabulary, batch_size=1, seed=EVALUATION_SEED)
    seen = np.zeros(vocabulary.vocab_size, np.int64)
    labels = np.zeros(2, np.int64)
    for batch in loader.evaluation_batches(256, max_rows):
        seen += np.bincount(batch.masked_ids[batch.masked_weights > 0], minlength=vocabulary.vocab_size)
        labels += np.bincount(batch.next_sentence_label[batch.next_sentence_weight > 0], minlength=2)
    total = int(seen.sum())
    return UnigramBaseline(
        token=vocabulary.tokens([top])[0],
        accuracy=float(seen[top] / total),
        loss=float(-(seen[ordinary] * log_shares[ordinary]).sum() / total),
        next_sentence_accuracy=float(labels.max() / labels.sum()) if labels.sum() else None,
        predictions=total,
    )
