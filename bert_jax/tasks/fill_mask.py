"""Predicts the masked words of sentences, or generates text by filling masks step by step."""

import functools
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from bert_jax.config import MeshConfig, ModelConfig
from bert_jax.errors import UserError
from bert_jax.interop.loaded_model import LoadedModel, select_part
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import layers
from bert_jax.model.bert import bind
from bert_jax.model.dropout import SEED_WORDS, gumbel, uniform
from bert_jax.model.heads.config import Heads
from bert_jax.model.outputs import masked_logits, vocabulary_logits
from bert_jax.model.runtime import Runtime
from bert_jax.tasks.embedder import checked_texts
from bert_jax.tasks.inference import device_params, shared_tokenizer
from bert_jax.tasks.rows import TaskBatch, TokenRows
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.train import sharding

SAMPLING_BATCH_SIZE = 8  # the logits of all positions exist at the same time
LENGTH_MULTIPLE = 32  # rows are padded to a multiple of this length, so that few programs are compiled


def unmask(
    loaded: LoadedModel, texts: Sequence[Int[np.ndarray, "..."]], *, steps: int, seed: int, temperature: float = 1.0
) -> list[Int[np.ndarray, "..."]]:
    """Replaces all masks by samples, step by step (Sahoo et al. 2024, section 3.5 and appendix B).

    The rate of masks falls linearly from 1 to 0: in the step from rate t to s, a mask is replaced with probability
    (t - s) / t, independently of the others. Special tokens are never sampled. A sample depends on the seed, the
    text and its index alone.

    Args:
        texts: Ids with [CLS], [SEP] and masks; ids other than masks stay as they are.
        temperature: Divides the logits.

    Raises:
        UserError: There are fewer than 1 steps, the temperature is not above 0, or a text exceeds the positions.
    """
    if steps < 1 or not temperature > 0:
        raise UserError(f"--steps is {steps} and --temperature is {temperature}; use 1 or more, and a number above 0")
    longest = max(map(len, texts), default=0)
    if longest > loaded.model.max_positions:
        raise UserError(
            f"a text of {longest} tokens, with those to generate, does not fit the model's "
            f"{loaded.model.max_positions} positions; use a smaller --generate or a shorter prompt"
        )
    # Special tokens would end or split the text.
    allowed = np.ones(loaded.model.vocab_size, bool)
    allowed[list(loaded.vocabulary.special_ids)] = False
    # The embedding table may have more rows than there are tokens.
    allowed[loaded.vocabulary.vocab_size :] = False
    penalty = np.where(allowed, 0, -np.inf).astype(np.float32)
    params, key = layers.unflatten(loaded.params), jax.random.key(seed)
    unmasked: list[np.ndarray] = []
    for start in range(0, len(texts), SAMPLING_BATCH_SIZE):
        part = texts[start : start + SAMPLING_BATCH_SIZE]
        numbers = np.arange(start, start + len(part))
        batch = _batch(loaded, part)
        # As arrays, so that other values need no new compilation.
        settings = (jnp.int32(steps), jnp.float32(temperature), jnp.int32(loaded.vocabulary.mask_id))
        ids = jax.device_get(_run(loaded.model, loaded.heads, params, batch, penalty, key, numbers, settings))
        unmasked += [row[: len(text)] for row, text in zip(ids, part, strict=True)]
    return unmasked


def _batch(loaded: LoadedModel, texts: Sequence[np.ndarray], size: int = 0) -> TaskBatch:
    """Makes a batch of encoded texts, with fillers up to `size` rows."""
    rows = TokenRows(
        input_ids=np.concatenate(texts),
        offsets=np.cumsum([0, *map(len, texts)], dtype=np.int64),
        first_lengths=np.array([len(ids) for ids in texts], np.int32),
        pad_id=loaded.vocabulary.pad_id,
        truncated=0,
    )
    length = min(-(-int(rows.lengths.max()) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, loaded.model.max_positions)
    return rows.batch(np.pad(np.arange(len(texts)), (0, max(size - len(texts), 0)), constant_values=-1), length)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(
    config: ModelConfig,
    heads: Heads,
    params: dict[str, Any],
    batch: TaskBatch,
    penalty: Float[Array, "V"],
    key: PRNGKeyArray,
    numbers: Int[Array, "B"],
    settings: tuple[Int[Array, ""], Float[Array, ""], Int[Array, ""]],
) -> Int[Array, "B T"]:
    steps, temperature, mask_id = settings
    model = bind(config, heads, params, Runtime())
    # A key per text, so that a sample does not depend on the other texts in its batch.
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)

    # With different salts, the choice of the masks does not depend on the sampled tokens.
    def row_seeds(step: Int[Array, ""], salt: int) -> Array:
        def seed_words(key: PRNGKeyArray) -> Array:
            key = jax.random.fold_in(jax.random.fold_in(key, step), salt)
            return jax.random.bits(key, (SEED_WORDS,), jnp.uint32)

        return jax.vmap(seed_words)(keys)

    def advance(step: Int[Array, ""], ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
        logits = vocabulary_logits(model, model.encode(batch._replace(input_ids=ids)).last)[..., : config.vocab_size]
        scores = logits / temperature + penalty[None, None]
        # The argmax of logits with Gumbel noise is a sample from their softmax.
        sampled = jnp.argmax(scores + gumbel(row_seeds(step, 0), scores.shape), axis=-1).astype(ids.dtype)
        # The rate falls from (steps - step) / steps by 1 / steps; in the last step every mask is replaced.
        chosen = uniform(row_seeds(step, 1), ids.shape) < 1 / (steps - step)
        return jnp.where((ids == mask_id) & chosen, sampled, ids)

    return jax.lax.fori_loop(0, steps, advance, jnp.asarray(batch.input_ids))


MASK = "[MASK]"
BATCH_SIZE = 32
# The generators of models that hold one, so that their parameters are copied to the devices once.
_GENERATORS: "weakref.WeakKeyDictionary[LoadedModel, LoadedModel]" = weakref.WeakKeyDictionary()


class Prediction(NamedTuple):
    token: str  # as in the vocabulary: "##ing" continues a word, "Ġthe" and "▁the" begin one
    probability: float


class Filled(NamedTuple):
    """A sentence and, by mask, the predictions, most probable first."""

    sentence: str
    masks: list[list[Prediction]]


def fill_mask(
    checkpoint: str | Path | LoadedModel, sentences: Iterable[str], top: int = 5, average: str = ""
) -> list[Filled]:
    """Predicts the most probable tokens at every [MASK], by a float32 softmax over the vocabulary.

    If the model was trained with config.objective=replaced_tokens, its generator predicts.

    Args:
        average: The average in a checkpoint that is given by its path, as in open_checkpoint.

    Raises:
        UserError: The sentences are no list of strings, one has no mask or exceeds the positions, the model predicts
            no masked tokens, or `top` is not from 1 to the vocabulary size.
    """
    sentences = [text for (text,) in checked_texts(sentences, pairs=False)]
    loaded = masked_model(checkpoint, "filling masks", average)
    if not 1 <= top <= loaded.vocabulary.vocab_size:
        raise UserError(f"--top is {top}; use 1 to {loaded.vocabulary.vocab_size} (the vocabulary size)")
    tokenizer = shared_tokenizer(loaded)
    # All sentences are checked before any is predicted.
    encoded = []
    for sentence in sentences:
        encoded.append(ids := _encode(sentence, tokenizer))
        if tokenizer.mask_id not in ids:
            raise UserError(f"no {MASK} in {sentence[:80]!r}. Write {MASK} in place of each word to predict")
        if len(ids) > loaded.model.max_positions:
            raise UserError(
                f"a sentence of {len(ids)} tokens does not fit the model's {loaded.model.max_positions} positions: "
                f"{sentence[:40]!r}... Shorten it"
            )
    filled: list[Filled] = []
    for start in range(0, len(encoded), BATCH_SIZE):
        filled += _fill(loaded, sentences[start : start + BATCH_SIZE], encoded[start : start + BATCH_SIZE], top)
    return filled


def masked_model(checkpoint: str | Path | LoadedModel, use: str, average: str = "") -> LoadedModel:
    """Opens the masked language model in a checkpoint, which may be the generator of replaced_tokens.

    Raises:
        UserError: There is none, which `use` needs.
    """
    loaded = checkpoint if isinstance(checkpoint, LoadedModel) else open_checkpoint(checkpoint, average)
    origin = loaded.origin or "the checkpoint"
    if loaded.heads.generator:
        loaded = _GENERATORS.setdefault(loaded, select_part(loaded, "generator"))
    reasons = {
        "predicts next tokens": loaded.model.causal or loaded.heads.lm,
        "has no masked language model head": not loaded.heads.mlm,
        "has no mask token in its vocabulary": not loaded.vocabulary.has_mask,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), ""):
        raise UserError(f"{use} needs a masked language model, but {origin} {reason}. Use another checkpoint")
    return loaded


def _encode(text: str, words: Tokenizer, new_masks: int = 0) -> np.ndarray:
    begin, end = [words.cls_id] * words.begin, [words.sep_id] * words.end
    # encode_special, because an ordinary encoding reads [MASK] as text. Users write [MASK] for every vocabulary,
    # although some have another text for it, such as <mask>.
    ids = words.encode_special(text.replace(MASK, words.roles.mask_token))
    return np.array([*begin, *ids, *[words.mask_id] * new_masks, *end], np.int32)


def _fill(loaded: LoadedModel, sentences: Sequence[str], encoded: Sequence[np.ndarray], top: int) -> list[Filled]:
    words = loaded.vocabulary
    mask_positions = [np.flatnonzero(ids == words.mask_id) for ids in encoded]
    # Powers of two, because each shape is compiled separately.
    size, most = (1 << (count - 1).bit_length() for count in (len(encoded), max(map(len, mask_positions))))
    batch = _batch(loaded, encoded, size)
    # Places after a row's last mask read position 0, and their predictions are dropped.
    positions = np.zeros((size, most), np.int32)
    for row, masked in enumerate(mask_positions):
        positions[row, : len(masked)] = masked
    params = device_params(loaded, sharding.make_mesh(MeshConfig()), loaded.params)
    sizes = words.vocab_size, top
    probabilities, tokens = jax.device_get(_predict(loaded.model, loaded.heads, sizes, params, batch, positions))
    # The axes are rows, masks of a row (padded to `most`), and the `top` predictions.
    filled = []
    for row, (sentence, masked) in enumerate(zip(sentences, mask_positions, strict=True)):
        predictions = [
            list(map(Prediction, words.tokens(tokens[row, mask]), probabilities[row, mask].tolist()))
            for mask in range(len(masked))
        ]
        filled.append(Filled(sentence, predictions))
    return filled


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _predict(
    config: ModelConfig,
    heads: Heads,
    sizes: tuple[int, int],
    params: dict[str, Any],
    batch: TaskBatch,
    positions: Int[Array, "B M"],
) -> tuple[Float[Array, "B M K"], Int[Array, "B M K"]]:
    model = bind(config, heads, params, Runtime(layer_loop="scan"))  # compiles fast, for each new shape
    vocabulary, top = sizes
    # The embedding table may have more rows than there are tokens.
    logits = masked_logits(model, model.encode(batch).last, positions)[..., :vocabulary]
    values, tokens = jax.lax.top_k(jax.nn.softmax(logits), top)
    return values, tokens


def generate(
    checkpoint: str | Path | LoadedModel,
    new_tokens: int,
    prompts: Iterable[str] = ("",),
    *,
    steps: int | None = None,
    seed: int = 0,
    temperature: float = 1.0,
    average: str = "",
) -> list[str]:
    """Generates text after prompts with a masked language model (see unmask). Masks in a prompt are filled too.

    Args:
        steps: The number of denoising steps; by default new_tokens.
        average: The average in a checkpoint that is given by its path, as in open_checkpoint.

    Returns:
        The prompts, followed by the new tokens, as readable text. The same arguments give the same texts.

    Raises:
        UserError: new_tokens is below 1, or unmask or masked_model raises it.
    """
    prompts = [text for (text,) in checked_texts(prompts, pairs=False)]
    if new_tokens < 1:
        raise UserError(f"--generate is {new_tokens}; use 1 or more tokens")
    loaded = masked_model(checkpoint, "generating text", average)
    words = shared_tokenizer(loaded)
    texts = [_encode(prompt, words, new_tokens) for prompt in prompts]
    steps = new_tokens if steps is None else steps
    filled = unmask(loaded, texts, steps=steps, seed=seed, temperature=temperature)
    return [words.decode(ids[words.begin : len(ids) - words.end]) for ids in filled]
