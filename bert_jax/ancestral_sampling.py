"""Generates text with a masked language model: all tokens begin as masks, and are sampled step by step."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from bert_jax.command import UserError
from bert_jax.config import ModelConfig
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model import paths
from bert_jax.model.bert import bind
from bert_jax.model.dropout import SEED_WORDS, gumbel, uniform
from bert_jax.model.head_outputs import vocabulary_logits
from bert_jax.model.heads import Heads
from bert_jax.model.runtime import Runtime
from bert_jax.tasks.example import TaskBatch, TokenRows

BATCH_SIZE = 8  # the logits of all positions exist at the same time
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
    params, key = paths.unflatten(loaded.params), jax.random.key(seed)
    unmasked: list[np.ndarray] = []
    for start in range(0, len(texts), BATCH_SIZE):
        part = texts[start : start + BATCH_SIZE]
        numbers = np.arange(start, start + len(part))
        batch = _batch(loaded, part)
        settings = (jnp.int32(steps), jnp.float32(temperature), jnp.int32(loaded.vocabulary.mask_id))
        ids = jax.device_get(_run(loaded.model, loaded.heads, params, batch, penalty, key, numbers, settings))
        unmasked += [row[: len(text)] for row, text in zip(ids, part, strict=True)]
    return unmasked


def _batch(loaded: LoadedModel, texts: Sequence[np.ndarray]) -> TaskBatch:
    rows = TokenRows(
        input_ids=np.concatenate(texts),
        offsets=np.cumsum([0, *map(len, texts)], dtype=np.int64),
        first_lengths=np.array([len(ids) for ids in texts], np.int32),
        pad_id=loaded.vocabulary.pad_id,
        truncated=0,
    )
    length = min(-(-int(rows.lengths.max()) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, loaded.model.max_positions)
    return rows.batch(np.arange(len(texts)), length)


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
