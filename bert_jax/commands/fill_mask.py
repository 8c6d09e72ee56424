"""Predicts the masked words of sentences, or generates text by masked diffusion."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bert_jax.config.options import option, parse
from bert_jax.errors import UserError
from bert_jax.interop.open_checkpoint import CheckpointOptions
from bert_jax.tasks.fill_mask import MASK, Filled, fill_mask, generate
from bert_jax.train.compilation import enable_compilation_cache

DESCRIPTION = """Predicts the masked words of sentences, with the probability of each prediction.

  bert-jax fill-mask --checkpoint CHECKPOINT "Paris is the [MASK] of France." "He [MASK] a [MASK] of tea."

CHECKPOINT must have a masked language model head. A [MASK] (or the vocabulary's own mask token, such as <mask>) stands
for one token. Several masks in a sentence are predicted independently, not jointly.

  bert-jax fill-mask --checkpoint CHECKPOINT --generate 40 "The old man"

With --generate N, N new tokens follow each sentence, or form a text if no sentence is given. They begin as masks, which
are replaced by samples in several steps (Sahoo et al. 2024, "Simple and Effective Masked Diffusion Language Models").
This is meant for models trained with config.objective=diffusion; other masked models rarely generate coherent text.
Masks in a sentence are filled too."""


GENERATION = "generation, for models trained with config.objective=diffusion"


@dataclass(frozen=True, kw_only=True)
class Options(CheckpointOptions):
    """The command's flags. None means that a flag is not given, and leaves the default to the function."""

    sentences: tuple[str, ...] = option((), f"sentences with at least one {MASK}", metavar="SENTENCE", positional="*")
    top: int | None = option(None, "predictions shown per mask; default 5", metavar="N")
    generate: int | None = option(None, "generate N tokens after each sentence", metavar="N", section=GENERATION)
    steps: int | None = option(None, "denoising steps; default N", metavar="T", section=GENERATION)
    seed: int | None = option(None, "of the samples; default 0", metavar="N", section=GENERATION)
    temperature: float | None = option(None, "divides the logits; default 1", metavar="T", section=GENERATION)

    def __post_init__(self) -> None:
        if self.generate is not None and self.top is not None:
            raise UserError("--top is for predictions of masks; omit it with --generate")
        if self.generate is None and self.sampling:
            raise UserError(f"--{next(iter(self.sampling))} is an option of generation; add --generate N")
        if self.generate is None and not self.sentences:
            raise UserError(f"give at least one sentence with {MASK}, or --generate N")

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling options on the command line."""
        options = {"steps": self.steps, "seed": self.seed, "temperature": self.temperature}
        return {name: value for name, value in options.items() if value is not None}


def main(arguments: Sequence[str]) -> None:
    options = parse("bert-jax fill-mask", DESCRIPTION, Options, arguments)
    enable_compilation_cache()
    if options.generate is not None:
        prompts = options.sentences or ("",)
        texts = generate(options.checkpoint, options.generate, prompts, average=options.average, **options.sampling)
    else:
        top = {} if options.top is None else {"top": options.top}
        filled = fill_mask(options.checkpoint, options.sentences, average=options.average, **top)
        texts = [_render(sentence) for sentence in filled]
    print("\n\n".join(texts))


def _render(filled: Filled) -> str:
    """Returns the lines that a terminal shows: the sentence, then the predictions for each mask."""
    lines = [filled.sentence]
    for number, predictions in enumerate(filled.masks, start=1):
        if len(filled.masks) > 1:
            lines.append(f"  mask {number} of {len(filled.masks)}")
        # Probabilities stand in one column, whatever the lengths of the tokens.
        width = max(len(prediction.token) for prediction in predictions)
        lines += [f"  {prediction.token:<{width}}  {100 * prediction.probability:6.2f}%" for prediction in predictions]
    return "\n".join(lines)
