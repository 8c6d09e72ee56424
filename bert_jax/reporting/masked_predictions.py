"""What a pretrained model guesses for masked words of held-out text."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bert_jax.data.example import Batch
from bert_jax.data.loader import EVALUATION_SEED, PretrainingLoader
from bert_jax.data.shards import open_dataset
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import paths
from bert_jax.model.bert import abstract_params, bind
from bert_jax.model.head_outputs import masked_logits
from bert_jax.model.heads import Heads
from bert_jax.model.runtime import Runtime
from bert_jax.reporting.blanks import BLANK, Blank, Guess, readable
from bert_jax.tokenizer import Tokenizer

GUESSES = 5
CONTEXT = 24  # tokens shown on either side of the blank


def predict_masked_tokens(checkpoint: str | Path, shards: str | Path, count: int) -> list[Blank]:
    """The model's top guesses for one blank in each of `count` held-out rows, with the masks of held-out evaluation.

    The rows are drawn by a fixed seed, and of each row the middle one of its blanks whose truth is a word (any
    masked token where there is none): nothing is picked by its result. Raises UserError when the checkpoint or the
    shards cannot be opened, or do not belong together.
    """
    loaded = open_checkpoint(checkpoint)
    dataset = open_dataset(shards, "eval")
    rows = min(count, dataset.rows)
    batch = PretrainingLoader(dataset, loaded.tokenizer, batch_size=rows, seed=EVALUATION_SEED).batch(0)
    slots = choose_masked_positions(batch, loaded.tokenizer)
    positions = batch.masked_positions[np.arange(rows), slots]
    truths = batch.masked_ids[np.arange(rows), slots]
    probabilities = _probabilities(loaded, batch, positions)
    return [
        _blank(loaded.tokenizer, ids, position, truth, chances)
        for ids, position, truth, chances in zip(
            batch.input_ids, positions.tolist(), truths.tolist(), probabilities, strict=True
        )
    ]


def choose_masked_positions(batch: Batch, tokenizer: Tokenizer) -> Int[np.ndarray, "B"]:
    """Which prediction of each row to show: the middle one of those whose truth is a word or its beginning."""
    chosen = []
    for ids, positions, truths, weights in zip(
        batch.input_ids, batch.masked_positions, batch.masked_ids, batch.masked_weights, strict=True
    ):
        real = [slot for slot in range(len(positions)) if weights[slot] > 0]
        words = _pieces(tokenizer, truths)
        blanks = [slot for slot in real if ids[positions[slot]] == tokenizer.mask_id and words[slot].isalpha()]
        candidates = blanks or real or [0]
        chosen.append(candidates[len(candidates) // 2])
    return np.array(chosen, np.int64)


def _probabilities(loaded: LoadedModel, batch: Batch, positions: Int[np.ndarray, "B"]) -> Float[np.ndarray, "B V"]:
    """The model's distribution over the vocabulary at one position of each row."""
    heads = Heads(mlm=True)
    wanted = paths.flatten(abstract_params(loaded.model, heads))
    params = paths.unflatten({path: loaded.params[path] for path in wanted})

    @jax.jit
    def softmax(params: dict, batch: Batch, at: Int[Array, "B 1"]) -> Float[Array, "B V"]:
        model = bind(loaded.model, heads, params, Runtime())
        return jax.nn.softmax(masked_logits(model, model.encode(batch).last, at)[:, 0].astype(jnp.float32))

    return np.asarray(softmax(params, batch, positions[:, None].astype(np.int32)))


def _blank(
    tokenizer: Tokenizer, ids: Int[np.ndarray, "T"], position: int, truth: int, chances: Float[np.ndarray, "V"]
) -> Blank:
    length = int((ids != tokenizer.pad_id).sum())
    first, last = max(1, position - CONTEXT), min(length - 1, position + 1 + CONTEXT)  # without [CLS], last [SEP]
    before, after = _pieces(tokenizer, ids[first:position]), _pieces(tokenizer, ids[position + 1 : last])
    top = np.argsort(-chances, kind="stable")[:GUESSES]
    names = _pieces(tokenizer, np.array([*top.tolist(), truth]))
    return Blank(
        before=("… " if first > 1 else "") + readable(before),
        after=readable(after) + (" …" if last < length - 1 else ""),
        truth=names[-1],
        truth_probability=float(chances[truth]),
        guesses=tuple(Guess(name, float(chances[token])) for name, token in zip(names, top.tolist(), strict=False)),
    )


def _pieces(tokenizer: Tokenizer, ids: Int[np.ndarray, "n"]) -> list[str]:
    """Tokens of any kind as WordPiece writes them: "##" inside of words; [MASK] and [SEP] for tokens of that part."""
    names = {tokenizer.mask_id: BLANK, tokenizer.sep_id: "[SEP]"}
    surfaces = zip(ids.tolist(), tokenizer.surfaces(ids), strict=True)
    return [names.get(index, ("##" if tokenizer.continuation[index] else "") + surface) for index, surface in surfaces]
