"""Predicts the masked words of sentences, or generates text by filling masks."""

import functools
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from bert_jax import ancestral_sampling, command
from bert_jax.command import UserError
from bert_jax.config import MeshConfig, ModelConfig
from bert_jax.interop import checkpoint_average
from bert_jax.interop.discriminator import part_of
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model.bert import bind
from bert_jax.model.head_outputs import masked_logits
from bert_jax.model.heads import Heads
from bert_jax.model.runtime import Runtime
from bert_jax.tasks.device_params import device_params
from bert_jax.tasks.example import TaskBatch, TokenRows
from bert_jax.tasks.loaded_tokenizer import tokenizer_of
from bert_jax.tasks.texts import checked_strings
from bert_jax.tokenizer import Tokenizer
from bert_jax.train import partitioning
from bert_jax.train.compilation_cache import enable_compilation_cache

MASK = "[MASK]"
BATCH_SIZE = 32
# The generators of models that hold one, so that their parameters are copied to the devices once.
_GENERATORS: "weakref.WeakKeyDictionary[LoadedModel, LoadedModel]" = weakref.WeakKeyDictionary()
LENGTH_MULTIPLE = 32  # rows are padded to a multiple of this length, so that few programs are compiled

DESCRIPTION = """Predicts the masked words of sentences, with the probability of each prediction.

  bert-jax fill-mask --checkpoint CHECKPOINT "Paris is the [MASK] of France." "He [MASK] a [MASK] of tea."

CHECKPOINT is a workdir of bert-jax pretrain, a step in it, an export, a Hugging Face folder, or hf:NAME; it must have
a masked language model head. Each [MASK] (or the vocabulary's own mask token, such as <mask>) stands for one token of
the vocabulary. Several masks in a sentence are predicted independently, not jointly.

  bert-jax fill-mask --checkpoint CHECKPOINT --generate 40 "The old man"

With --generate N, N new tokens follow each sentence, or form a text if no sentence is given. They begin as masks, which
are replaced by samples in several steps (Sahoo et al. 2024, "Simple and Effective Masked Diffusion Language Models").
This is meant for models trained with config.objective=diffusion; other masked models rarely generate coherent text.
Masks in a sentence are filled too."""


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
    """Returns each prompt followed by new_tokens sampled tokens, as readable text (ancestral_sampling.unmask).

    steps is the number of denoising steps; None means new_tokens. The same arguments give the same texts. Masks in a
    prompt are filled too. Raises UserError for new_tokens below 1, and as fill_mask and ancestral_sampling.unmask do.
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
    filled = ancestral_sampling.unmask(loaded, texts, steps=steps, seed=seed, temperature=temperature)
    return [words.decode(ids[words.begin : len(ids) - words.end]) for ids in filled]


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


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("bert-jax fill-mask", DESCRIPTION)
    parser.add_argument("--checkpoint", required=True, help="the model that predicts")
    parser.add_argument("--top", type=int, metavar="N", help="predictions shown per mask (default: 5)")
    parser.add_argument("sentences", nargs="*", metavar="SENTENCE", help=f"a sentence with at least one {MASK}")
    sampling = parser.add_argument_group("generation, for models trained with config.objective=diffusion")
    sampling.add_argument("--generate", type=int, metavar="N", help="generate N tokens after each sentence")
    sampling.add_argument("--steps", type=int, metavar="T", help="denoising steps (default: N)")
    sampling.add_argument("--seed", type=int, metavar="N", help="of the samples (default: 0)")
    sampling.add_argument("--temperature", type=float, metavar="T", help="divides the logits (default: 1)")
    checkpoint_average.add_argument(parser)
    options = parser.parse_args(arguments)
    enable_compilation_cache()
    given = {name: getattr(options, name) for name in ("steps", "seed", "temperature")}
    given = {name: value for name, value in given.items() if value is not None}
    if options.generate is not None:
        if options.top is not None:
            parser.error("--top is of predictions for masks; omit it with --generate")
        texts = generate(
            options.checkpoint,
            options.generate,
            options.sentences or [""],
            average=options.average,
            **given,
        )
        print("\n\n".join(texts))
        return
    if given:
        parser.error(f"--{next(iter(given))} is an option of generation; add --generate N")
    if not options.sentences:
        parser.error(f"give at least one sentence with {MASK}, or --generate N")
    shown = {} if options.top is None else {"top": options.top}
    filled = fill_mask(options.checkpoint, options.sentences, average=options.average, **shown)
    print("\n\n".join(map(_render, filled)))


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
    rows = TokenRows(
        input_ids=np.concatenate(encoded),
        offsets=np.cumsum([0, *map(len, encoded)], dtype=np.int64),
        first_lengths=np.array([len(ids) for ids in encoded], np.int32),
        pad_id=words.pad_id,
        truncated=0,
    )
    length = min(-(-int(rows.lengths.max()) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, loaded.model.max_positions)
    indices = np.full(_power_of_two(len(encoded)), -1)  # -1: a filler
    indices[: len(encoded)] = np.arange(len(encoded))
    batch = rows.batch(indices, length)
    where = [np.flatnonzero(ids == words.mask_id) for ids in encoded]
    positions = np.zeros((len(indices), _power_of_two(max(map(len, where)))), np.int32)
    for row, masked in enumerate(where):
        positions[row, : len(masked)] = masked
    params = device_params(loaded, partitioning.make_mesh(MeshConfig()), loaded.params)
    sizes = words.vocab_size, top
    probabilities, tokens = jax.device_get(_predict(loaded.model, loaded.heads, sizes, params, batch, positions))
    filled = []
    for row, (sentence, masked) in enumerate(zip(sentences, where, strict=True)):
        masks = range(len(masked))
        predictions = [_predictions(words.tokens(tokens[row, mask]), probabilities[row, mask]) for mask in masks]
        filled.append(Filled(sentence, predictions))
    return filled


def _power_of_two(count: int) -> int:
    """The least power of two that is not below a count: few sizes need few programs."""
    return 1 << (count - 1).bit_length()


def _predictions(tokens: Sequence[str], probabilities: np.ndarray) -> list[Prediction]:
    return [Prediction(token, float(value)) for token, value in zip(tokens, probabilities, strict=True)]


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


def _render(filled: Filled) -> str:
    """Returns lines for the terminal: the sentence, then the predictions for each mask."""
    lines = [filled.sentence]
    for number, predictions in enumerate(filled.masks, start=1):
        if len(filled.masks) > 1:
            lines.append(f"  mask {number} of {len(filled.masks)}")
        width = max(len(prediction.token) for prediction in predictions)
        lines += [f"  {prediction.token:<{width}}  {100 * prediction.probability:6.2f}%" for prediction in predictions]
    return "\n".join(lines)
