"""What the report of a pretraining run shows of held-out rows.

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


class Prediction(NamedTuple):
    token: str
    probability: float


@dataclass(frozen=True)
class MaskedToken:
    """One masked token: the text around it as the model sees it, its label, and the most likely predictions."""

    before: str
    after: str
    label: str
    label_probability: float
    predictions: tuple[Prediction, ...]

    @property
    def rank(self) -> int | None:
        """The place of the label among the predictions, 0 for the first; None if it is not among them."""
        tokens = [prediction.token for prediction in self.predictions]
        return tokens.index(self.label) if self.label in tokens else None


def predict_masked_tokens(checkpoint: str | PurePath, shards: str | Path, count: int) -> list[MaskedToken]:
    """Returns the most likely tokens for one masked position in each of `count` held-out rows.

    The masks are those of the evaluation. A fixed seed selects the rows. In each row it is the middle one of the
    masked positions whose label is a word (any predicted position if there is none), so that nothing is selected by
    its result. Raises UserError if the checkpoint or the shards cannot be opened, or do not belong together.
    """
    loaded = open_checkpoint(checkpoint)
    dataset = open_dataset(shards, "eval")
    rows = min(count, dataset.rows)
    batch = DatasetLoader(dataset, loaded.vocabulary, seed=EVALUATION_SEED).rows(np.arange(rows))
    chosen = choose_masked_positions(batch, loaded.vocabulary)
    positions = batch.masked_positions[np.arange(rows), chosen]
    labels = batch.masked_ids[np.arange(rows), chosen]
    probabilities = _probabilities(loaded, batch, positions)
    return [
        _masked_token(loaded.vocabulary, ids, position, label, row)
        for ids, position, label, row in zip(
            batch.input_ids, positions.tolist(), labels.tolist(), probabilities, strict=True
        )
    ]


def choose_masked_positions(batch: Batch, tokenizer: Vocabulary) -> Int[np.ndarray, "B"]:
    """Returns the prediction of each row to show: the middle one of those whose label is a word or its beginning."""
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


def masked_token_table(masked_tokens: Sequence[MaskedToken]) -> Markup:
    """Returns the sentences with the masked token marked, the label, and the predictions with their probabilities."""
    rows = "".join(
        f'<tr><td class="sentence">{_context(token.before)} <mark>{MASK}</mark> {_context(token.after)}</td>'
        f'<td class="label">{text(token.label)}</td><td>{_bars(token)}</td></tr>'
        for token in masked_tokens
    )
    head = "<tr><th>what the model sees</th><th>label</th><th>the five most likely tokens</th></tr>"
    return Markup(f'<table class="masked-tokens"><thead>{head}</thead><tbody>{rows}</tbody></table>')


def join_tokens(tokens: Sequence[str]) -> str:
    """Returns tokens as a line of text: pieces are joined to words, and punctuation to the words it belongs to."""
    line = ""
    for token in tokens:
        if token.startswith("##"):
            line += token[2:]
        elif not line or token in _NO_SPACE_BEFORE or (line[-1] in _NO_SPACE_AFTER and token not in SPECIAL_TOKENS):
            line += token
        else:
            line += f" {token}"
    return line


def _probabilities(loaded: LoadedModel, batch: Batch, positions: Int[np.ndarray, "B"]) -> Float[np.ndarray, "B V"]:
    """Returns the model's distribution over the vocabulary at one position of each row."""
    heads = Heads(mlm=True)
    wanted = layers.flatten(abstract_params(loaded.model, heads))
    params = layers.unflatten({path: loaded.params[path] for path in wanted})

    @jax.jit
    def softmax(params: dict, batch: Batch, at: Int[Array, "B 1"]) -> Float[Array, "B V"]:
        model = bind(loaded.model, heads, params, Runtime())
        logits = masked_logits(model, model.encode(batch).last, at)[:, 0].astype(jnp.float32)
        return jax.nn.softmax(logits[:, : loaded.vocabulary.vocab_size])  # the table may have more rows

    return np.asarray(softmax(params, batch, positions[:, None].astype(np.int32)))


def _masked_token(
    tokenizer: Vocabulary, ids: Int[np.ndarray, "T"], position: int, label: int, probabilities: Float[np.ndarray, "V"]
) -> MaskedToken:
    length = int((ids != tokenizer.pad_id).sum())
    first, last = max(1, position - CONTEXT), min(length - 1, position + 1 + CONTEXT)  # without [CLS] and last [SEP]
    before, after = _surfaces(tokenizer, ids[first:position]), _surfaces(tokenizer, ids[position + 1 : last])
    top = np.argsort(-probabilities, kind="stable")[:MOST_LIKELY]
    names = _surfaces(tokenizer, np.array([*top.tolist(), label]))
    return MaskedToken(
        before=("… " if first > 1 else "") + join_tokens(before),
        after=join_tokens(after) + (" …" if last < length - 1 else ""),
        label=names[-1],
        label_probability=float(probabilities[label]),
        predictions=tuple(
            Prediction(name, float(probabilities[token])) for name, token in zip(names, top.tolist(), strict=False)
        ),
    )


def _surfaces(tokenizer: Vocabulary, ids: Int[np.ndarray, "n"]) -> list[str]:
    """Returns tokens of any vocabulary as WordPiece writes them: "##" inside of words.

    [MASK] and [SEP] have these names.
    """
    names = {tokenizer.mask_id: MASK, tokenizer.sep_id: "[SEP]"}
    surfaces = zip(ids.tolist(), tokenizer.surfaces(ids), strict=True)
    return [names.get(index, ("##" if tokenizer.continuation[index] else "") + surface) for index, surface in surfaces]


def _context(words: str) -> str:
    """Returns text in which the other masked tokens, and the border between the segments, are set back."""
    escaped = text(words)
    for token in (MASK, "[SEP]"):
        escaped = escaped.replace(token, f'<span class="mask">{token}</span>')
    return escaped


def _bars(masked_token: MaskedToken) -> str:
    bars = bar_list(
        Bar(f"{token} ✓" if token == masked_token.label else token, share, percent(share), token == masked_token.label)
        for token, share in masked_token.predictions
    )
    if masked_token.rank is not None:
        return bars
    return bars + f'<div class="missed">the label has {percent(masked_token.label_probability)}</div>'
