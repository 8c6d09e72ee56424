"""Predicts the masked words of sentences, or generates text by masked diffusion."""

from collections.abc import Sequence

from bert_jax import command_line
from bert_jax.interop.open_checkpoint import add_average_flag
from bert_jax.tasks.fill_mask import MASK, Filled, fill_mask, generate
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
    add_average_flag(parser)
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
