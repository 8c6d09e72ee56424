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
from bert_jax.interop.loaded_model import LoadedModel, part_of
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import layers
from bert_jax.model.bert import bind
from bert_jax.model.dropout import SEED_WORDS, gumbel, uniform
from bert_jax.model.heads.config import Heads
from bert_jax.model.outputs import masked_logits, vocabulary_logits
from bert_jax.model.runtime import Runtime
from bert_jax.tasks.embedder import checked_strings
from bert_jax.tasks.inference import device_params, tokenizer_of
from bert_jax.tasks.rows import TaskBatch, TokenRows
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.train import sharding

# Generates text with a masked language model: all tokens begin as masks, and are sampled step by step.


SAMPLING_BATCH_SIZE = 8  # the logits of all positions exist at the same time
LENGTH_MULTIPLE = 32  # rows are padded to a multiple of this length, so that few programs are compiled


def unmask(
    loaded: LoadedModel, texts: Sequence[Int[np.ndarray, "..."]], *, steps: int, seed: int, temperature: float = 1.0
) -> list[Int[np.ndarray, "..."]]:
    """Replaces every mask of each text by a sample, in `steps` steps (Sahoo et al. 2024, section 3.5 and appendix B).

    texts are ids with [CLS], [SEP] and masks; ids that are not masks stay as they are. The rate of masks falls
    linearly from 1 to 0: in the step from t to s each mask is replaced with probability (t - s) / t, independently of
    the others, by a sample from the softmax of its logits over `temperature`. Special tokens are never sampled. The
    sample of a text is a function of the seed, its index, and the text alone. Raises UserError for fewer than 1
    steps, a temperature of 0 or less, and a text longer than the model supports.
    """
    if steps < 1:
        raise UserError(f"--steps is {steps}; use 1 or more")
    if not temperature > 0:
        raise UserError(f"--temperature is {temperature}; use a number above 0")
    longest = max(map(len, texts), default=0)
    if longest > loaded.model.max_positions:
        raise UserError(
            f"a text of {longest} tokens, with those to generate, does not fit the model's "
            f"{loaded.model.max_positions} positions; use a smaller --generate or a shorter prompt"
        )
    allowed = np.ones(loaded.model.vocab_size, bool)
    allowed[list(loaded.vocabulary.special_ids)] = False
    allowed[loaded.vocabulary.vocab_size :] = False  # the table may have more rows than there are tokens
    penalty = np.where(allowed, 0, -np.inf).astype(np.float32)
    params, key = layers.unflatten(loaded.params), jax.random.key(seed)
    unmasked: list[np.ndarray] = []
    for start in range(0, len(texts), SAMPLING_BATCH_SIZE):
        part = texts[start : start + SAMPLING_BATCH_SIZE]
        numbers = np.arange(start, start + len(part))
        batch = _batch(loaded, part)
        settings = (jnp.int32(steps), jnp.float32(temperature), jnp.int32(loaded.vocabulary.mask_id))
        ids = jax.device_get(_run(loaded.model, loaded.heads, params, batch, penalty, key, numbers, settings))
        unmasked += [row[: len(text)] for row, text in zip(ids, part, strict=True)]
    return unmasked


def _batch(loaded: LoadedModel, texts: Sequence[np.ndarray], size: int = 0) -> TaskBatch:
    """The rows of encoded texts, with fillers up to `size` rows."""
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
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)

    def seeds_of(step: Int[Array, ""], salt: int) -> Array:
        return jax.vmap(
            lambda one: jax.random.bits(
                jax.random.fold_in(jax.random.fold_in(one, step), salt), (SEED_WORDS,), jnp.uint32
            )
        )(keys)

    def advance(step: Int[Array, ""], ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
        logits = vocabulary_logits(model, model.encode(batch._replace(input_ids=ids)).last)[..., : config.vocab_size]
        scores = logits / temperature + penalty[None, None]
        sampled = jnp.argmax(scores + gumbel(seeds_of(step, 0), scores.shape), axis=-1).astype(ids.dtype)
        # The rate falls from (steps - step) / steps by 1 / steps; in the last step every mask is replaced.
        chosen = uniform(seeds_of(step, 1), ids.shape) < 1 / (steps - step)
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
    """A sentence and the predictions for each of its masks, most probable first."""

    sentence: str
    masks: list[list[Prediction]]


def fill_mask(
    checkpoint: str | Path | LoadedModel, sentences: Iterable[str], top: int = 5, average: str = ""
) -> list[Filled]:
    """Returns the most probable tokens at each [MASK] of each sentence, by a float32 softmax over the vocabulary.

    average applies to a checkpoint given by its path, as in open_checkpoint. Of a model trained with
    config.objective=replaced_tokens, the generator predicts. Raises UserError for sentences that are no list of
    strings, for one without a mask or longer than the model, for a checkpoint of a causal model or without a masked
    language model head, and for a top outside 1 to the vocabulary size.
    """
    sentences = checked_strings(sentences)
    loaded = _open(checkpoint, average)
    if not 1 <= top <= loaded.vocabulary.vocab_size:
        raise UserError(f"--top is {top}; use 1 to {loaded.vocabulary.vocab_size} (the vocabulary size)")
    tokenizer = tokenizer_of(loaded)
    encoded = [_encode(sentence, tokenizer, loaded.model.max_positions) for sentence in sentences]
    filled: list[Filled] = []
    for start in range(0, len(encoded), BATCH_SIZE):
        filled += _fill(loaded, sentences[start : start + BATCH_SIZE], encoded[start : start + BATCH_SIZE], top)
    return filled


def _open(checkpoint: str | Path | LoadedModel, average: str) -> LoadedModel:
    """Returns the masked language model of a checkpoint. Raises UserError where it has none."""
    loaded = checkpoint if isinstance(checkpoint, LoadedModel) else open_checkpoint(checkpoint, average)
    origin = loaded.origin or "the checkpoint"
    if loaded.heads.generator:
        loaded = _GENERATORS.setdefault(loaded, part_of(loaded, "generator"))
    if loaded.model.causal:
        raise UserError(f"{origin} is a causal model, which predicts next tokens, not masked ones. Use an encoder")
    if loaded.heads.lm:
        raise UserError(
            f"{origin} predicts next and previous tokens, not masked ones. Use an encoder trained with "
            "config.objective=mlm"
        )
    if not loaded.heads.mlm:
        raise UserError(
            f"{origin} has no masked language model head; use a pretraining checkpoint instead of a fine-tuned one"
        )
    if not loaded.vocabulary.has_mask:
        raise UserError(f"the vocabulary of {origin} has no mask token; use a model that was trained with one")
    return loaded


def _ids(text: str, words: Tokenizer) -> np.ndarray:
    return words.encode_special(text.replace(MASK, words.roles.mask_token))


def _encode(sentence: str, words: Tokenizer, max_positions: int) -> np.ndarray:
    begin, end = [words.cls_id] * words.begin, [words.sep_id] * words.end
    ids = np.array([*begin, *_ids(sentence, words), *end], np.int32)
    if words.mask_id not in ids:
        raise UserError(f"no {MASK} in {sentence[:80]!r}. Write {MASK} in place of each word to predict")
    if len(ids) > max_positions:
        raise UserError(
            f"a sentence of {len(ids)} tokens does not fit the model's {max_positions} positions: "
            f"{sentence[:40]!r}... Shorten it"
        )
    return ids


def _fill(loaded: LoadedModel, sentences: Sequence[str], encoded: Sequence[np.ndarray], top: int) -> list[Filled]:
    words = loaded.vocabulary
    size = _power_of_two(len(encoded))
    batch = _batch(loaded, encoded, size)
    where = [np.flatnonzero(ids == words.mask_id) for ids in encoded]
    positions = np.zeros((size, _power_of_two(max(map(len, where)))), np.int32)
    for row, masked in enumerate(where):
        positions[row, : len(masked)] = masked
    params = device_params(loaded, sharding.make_mesh(MeshConfig()), loaded.params)
    sizes = words.vocab_size, top
    probabilities, tokens = jax.device_get(_predict(loaded.model, loaded.heads, sizes, params, batch, positions))
    filled = []
    for row, (sentence, masked) in enumerate(zip(sentences, where, strict=True)):
        masks = range(len(masked))
        predictions = [
            [
                Prediction(token, float(value))
                for token, value in zip(words.tokens(tokens[row, mask]), probabilities[row, mask], strict=True)
            ]
            for mask in masks
        ]
        filled.append(Filled(sentence, predictions))
    return filled


def _power_of_two(count: int) -> int:
    """The least power of two that is not below a count: few sizes need few programs."""
    return 1 << (count - 1).bit_length()


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
    vocabulary, top = sizes  # the table may have more rows than there are tokens
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
    """Returns each prompt followed by new_tokens sampled tokens, as readable text (unmask).

    steps is the number of denoising steps; None means new_tokens. The same arguments give the same texts. Masks in a
    prompt are filled too. Raises UserError for new_tokens below 1, and as fill_mask and unmask do.
    """
    prompts = checked_strings(prompts)
    if new_tokens < 1:
        raise UserError(f"--generate is {new_tokens}; use 1 or more tokens")
    loaded = _open(checkpoint, average)
    words = tokenizer_of(loaded)
    new = [words.mask_id] * new_tokens
    begin, end = [words.cls_id] * words.begin, [words.sep_id] * words.end
    texts = [np.array([*begin, *_ids(prompt, words), *new, *end], np.int32) for prompt in prompts]
    steps = new_tokens if steps is None else steps
    filled = unmask(loaded, texts, steps=steps, seed=seed, temperature=temperature)
    return [words.decode(ids[words.begin : len(ids) - words.end]) for ids in filled]
