"""Held-out rows in a pretraining report.

`unigram_baseline` is the level to compare metrics with; `predict_masked_tokens` and `masked_token_table` show the
model's predictions for masked tokens.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bert_jax.data.example import Batch
from bert_jax.data.loader import EVALUATION_SEED, DatasetLoader
from bert_jax.data.manifest import read_unigram_counts
from bert_jax.data.shards import open_dataset
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import layers
from bert_jax.model.bert import abstract_params, bind
from bert_jax.model.heads.config import Heads
from bert_jax.model.outputs import masked_logits
from bert_jax.model.runtime import Runtime
from bert_jax.reporting.document import Bar, Markup, percent
from bert_jax.reporting.page import bar_list, text
from bert_jax.tokenization.vocabulary import Vocabulary
from bert_jax.tokenization.wordpiece import SPECIAL_TOKENS

MASK = "[MASK]"
MOST_LIKELY = 5  # predictions shown
CONTEXT = 24  # tokens shown on each side of the masked one

_NO_SPACE_BEFORE = set(",.;:!?)]}%”’…'—–-")
_NO_SPACE_AFTER = set("([{“‘$£’'—–-")


@dataclass(frozen=True)
class UnigramBaseline:
    """Metrics for a model that knows only the training rows' token frequencies, with evaluation's masks."""

    token: str  # the most frequent token of the training rows
    accuracy: float  # of always predicting it
    loss: float  # nats per masked token, by the training frequencies with add-one smoothing
    next_sentence_accuracy: float | None  # of always predicting the more frequent label; None without labels
    predictions: int  # number of masked tokens


def unigram_baseline(
    shards: str | os.PathLike[str], max_rows: int = 0, train: str | os.PathLike[str] = ""
) -> UnigramBaseline:
    """Evaluates the baseline on held-out rows.

    Args:
        shards: a folder from build-examples, whose eval part is used.
        max_rows: how many rows to use, from the first; 0: all.
        train: the shards whose training rows are counted; empty: the same shards.

    Raises:
        UserError: if the shards cannot be opened or have no held-out part.
    """
    dataset = open_dataset(shards, "eval")
    vocabulary = dataset.vocabulary()
    counted = open_dataset(train, "train") if train else dataset
    counts = read_unigram_counts(counted.directory, counted.manifest).astype(np.float64)
    # Special tokens are never masked, so the baseline does not predict them. All others count once more, so that those
    # without a training row have a finite loss.
    ordinary = np.ones(vocabulary.vocab_size, bool)
    ordinary[list(vocabulary.special_ids)] = False
    counts = np.where(ordinary, counts + 1, 0.0)
    # Special tokens get the logarithm of 0; the sum of the loss below leaves them out.
    with np.errstate(divide="ignore"):
        log_shares = np.log(counts / counts.sum())
    top = int(counts.argmax())

    loader = DatasetLoader(dataset, vocabulary, seed=EVALUATION_SEED)
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


class MaskedToken(NamedTuple):
    """One masked token: the text around it in the model's input, its label, and the most likely predictions."""

    before: str
    after: str
    label: str
    label_probability: float
    predictions: tuple[tuple[str, float], ...]  # tokens with their probabilities

    @property
    def rank(self) -> int | None:
        """The label's index in the predictions; None if it is not among them."""
        tokens = [token for token, _ in self.predictions]
        return tokens.index(self.label) if self.label in tokens else None


def predict_masked_tokens(checkpoint: str | PurePath, shards: str | Path, count: int) -> list[MaskedToken]:
    """Predicts one masked position in each of `count` held-out rows.

    Uses evaluation's masks. Nothing is selected by its result: a fixed seed selects the rows, and in a row it is the
    middle masked position whose label is a word (the middle predicted position if no label is one).

    Raises:
        UserError: the checkpoint or the shards cannot be opened, or do not belong together.
    """
    loaded = open_checkpoint(checkpoint)
    vocabulary = loaded.vocabulary
    dataset = open_dataset(shards, "eval")
    rows = np.arange(min(count, dataset.rows))
    # `rows` permutes the part by the seed, so these rows are a sample of all. Masks depend on the seed, the epoch (0)
    # and the sequence, so they are those of the evaluation.
    batch = DatasetLoader(dataset, vocabulary, seed=EVALUATION_SEED).rows(rows)
    chosen = choose_masked_positions(batch, vocabulary)
    positions, labels = batch.masked_positions[rows, chosen].tolist(), batch.masked_ids[rows, chosen].tolist()
    masked_tokens = []
    for ids, position, label, probabilities in zip(
        batch.input_ids, positions, labels, _probabilities(loaded, batch, np.array(positions)), strict=True
    ):
        length = int((ids != vocabulary.pad_id).sum())
        # The context does not include [CLS] and the last [SEP].
        first, last = max(1, position - CONTEXT), min(length - 1, position + 1 + CONTEXT)
        before, after = _surfaces(vocabulary, ids[first:position]), _surfaces(vocabulary, ids[position + 1 : last])
        top = np.argsort(-probabilities, kind="stable")[:MOST_LIKELY]
        *predicted, label_text = _surfaces(vocabulary, np.append(top, label))
        masked_tokens.append(
            MaskedToken(
                before=("… " if first > 1 else "") + join_tokens(before),
                after=join_tokens(after) + (" …" if last < length - 1 else ""),
                label=label_text,
                label_probability=float(probabilities[label]),
                predictions=tuple(zip(predicted, probabilities[top].tolist(), strict=True)),
            )
        )
    return masked_tokens


def choose_masked_positions(batch: Batch, tokenizer: Vocabulary) -> Int[np.ndarray, "B"]:
    """Chooses each row's prediction to show: the middle one whose label is a word or begins one."""
    chosen = []
    for ids, positions, labels, weights in zip(
        batch.input_ids, batch.masked_positions, batch.masked_ids, batch.masked_weights, strict=True
    ):
        real = [index for index in range(len(positions)) if weights[index] > 0]
        words = _surfaces(tokenizer, labels)
        masked = [index for index in real if ids[positions[index]] == tokenizer.mask_id and words[index].isalpha()]
        candidates = masked or real or [0]
        chosen.append(candidates[len(candidates) // 2])
    return np.array(chosen, np.int64)


def _probabilities(loaded: LoadedModel, batch: Batch, positions: Int[np.ndarray, "B"]) -> Float[np.ndarray, "B V"]:
    """Returns the model's distribution over the vocabulary at one position per row."""
    # Only the encoder and the head for masked tokens.
    heads = Heads(mlm=True)
    wanted = layers.flatten(abstract_params(loaded.model, heads))
    params = layers.unflatten({path: loaded.params[path] for path in wanted})

    @jax.jit
    def softmax(params: dict, batch: Batch, at: Int[Array, "B 1"]) -> Float[Array, "B V"]:
        model = bind(loaded.model, heads, params, Runtime())
        logits = masked_logits(model, model.encode(batch).last, at)[:, 0].astype(jnp.float32)
        return jax.nn.softmax(logits[:, : loaded.vocabulary.vocab_size])  # the table may have more rows

    return np.asarray(softmax(params, batch, positions[:, None].astype(np.int32)))


def join_tokens(tokens: Sequence[str]) -> str:
    """Joins tokens to a line: pieces to words, and punctuation to the words it belongs to."""
    line = ""
    for token in tokens:
        if token.startswith("##"):
            line += token[2:]
        elif not line or token in _NO_SPACE_BEFORE or (line[-1] in _NO_SPACE_AFTER and token not in SPECIAL_TOKENS):
            line += token
        else:
            line += f" {token}"
    return line


def _surfaces(tokenizer: Vocabulary, ids: Int[np.ndarray, "n"]) -> list[str]:
    """Writes any vocabulary's tokens as WordPiece does: "##" inside of words, [MASK] and [SEP]."""
    names = {tokenizer.mask_id: MASK, tokenizer.sep_id: "[SEP]"}
    surfaces = zip(ids.tolist(), tokenizer.surfaces(ids), strict=True)
    return [names.get(index, ("##" if tokenizer.continuation[index] else "") + surface) for index, surface in surfaces]


def masked_token_table(masked_tokens: Sequence[MaskedToken]) -> Markup:
    """Returns the sentences with the masked token marked, the label, and the predictions with their probabilities."""
    rows = ""
    for token in masked_tokens:
        bars = bar_list(
            Bar(f"{name} ✓" if name == token.label else name, share, percent(share), name == token.label)
            for name, share in token.predictions
        )
        if token.rank is None:
            bars += f'<div class="missed">the label has {percent(token.label_probability)}</div>'
        before, after = text(token.before), text(token.after)
        # Other masked tokens, and the border between the segments, are set back.
        for special in (MASK, "[SEP]"):
            grey = f'<span class="mask">{special}</span>'
            before, after = before.replace(special, grey), after.replace(special, grey)
        sentence = f"{before} <mark>{MASK}</mark> {after}"
        rows += (
            f'<tr><td class="sentence">{sentence}</td><td class="label">{text(token.label)}</td><td>{bars}</td></tr>'
        )
    head = "<tr><th>what the model sees</th><th>label</th><th>the five most likely tokens</th></tr>"
    return Markup(f'<table class="masked-tokens"><thead>{head}</thead><tbody>{rows}</tbody></table>')
