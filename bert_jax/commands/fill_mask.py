"""The command fill-mask."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from bert_jax import command_line
from bert_jax.errors import UserError
from bert_jax.interop import open_checkpoint
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.tasks import fill_mask as ancestral_sampling
from bert_jax.tasks.embedder import checked_strings
from bert_jax.tasks.fill_mask import MASK, Filled, _ids, _open, fill_mask
from bert_jax.tasks.inference import tokenizer_of
from bert_jax.train.compilation import enable_compilation_cache

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


def main(arguments: Sequence[str]) -> None:
    parser = command_line.Parser("bert-jax fill-mask", DESCRIPTION)
    parser.add_argument("--checkpoint", required=True, help="the model that predicts")
    parser.add_argument("--top", type=int, metavar="N", help="predictions shown per mask (default: 5)")
    parser.add_argument("sentences", nargs="*", metavar="SENTENCE", help=f"a sentence with at least one {MASK}")
    sampling = parser.add_argument_group("generation, for models trained with config.objective=diffusion")
    sampling.add_argument("--generate", type=int, metavar="N", help="generate N tokens after each sentence")
    sampling.add_argument("--steps", type=int, metavar="T", help="denoising steps (default: N)")
    sampling.add_argument("--seed", type=int, metavar="N", help="of the samples (default: 0)")
    sampling.add_argument("--temperature", type=float, metavar="T", help="divides the logits (default: 1)")
    open_checkpoint.add_argument(parser)
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


def _render(filled: Filled) -> str:
    """Returns lines for the terminal: the sentence, then the predictions for each mask."""
    lines = [filled.sentence]
    for number, predictions in enumerate(filled.masks, start=1):
        if len(filled.masks) > 1:
            lines.append(f"  mask {number} of {len(filled.masks)}")
        width = max(len(prediction.token) for prediction in predictions)
        lines += [f"  {prediction.token:<{width}}  {100 * prediction.probability:6.2f}%" for prediction in predictions]
    return "\n".join(lines)
