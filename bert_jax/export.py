"""Writes a checkpoint for use elsewhere: in Hugging Face layout, as an Orbax tree, or as StableHLO programs."""

from collections.abc import Sequence
from pathlib import Path

from bert_jax import command
from bert_jax.command import UserError
from bert_jax.interop import bert_jax_format, checkpoint_average, huggingface, stablehlo
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import describe, open_checkpoint
from bert_jax.storage.local import atomic_folder, refuse_existing

FORMATS = ("hf", "orbax", "stablehlo")

DESCRIPTION = """Writes a checkpoint for use elsewhere.

  python -m bert_jax.export --checkpoint runs/base --format hf --output exported

hf     the layout of Hugging Face: model.safetensors, config.json, tokenizer files, README.md (a model card), so that
       AutoTokenizer and BertForPreTraining (or what the heads are) open it by from_pretrained("exported").
       The rows that pad the vocabulary are cut. What no family's layout holds (a relative position, a CRF) is
       refused by name.
orbax  the weights alone, without the optimizer, in the layout of a workdir at step 0: for sharing, for another
       JAX program, for bert_jax itself.
stablehlo  programs for any platform that JAX knows, which run without bert_jax: hidden_states.stablehlo and, where
       there are heads, predictions.stablehlo, for any batch and length; their parameters, the tokenizer, programs.json
       (inputs and outputs) and README.md, which shows how to run one. float32. It is no checkpoint: keep the workdir.

CHECKPOINT is a workdir, a step in it (runs/base/checkpoints/1000), an export, or a Hugging Face folder."""


def export(checkpoint: str | Path, output: str | Path, format: str = "hf", average: str = "") -> LoadedModel:
    """Exports a checkpoint; the output folder appears whole or not at all. average: as in open_checkpoint.

    Raises UserError for an unknown format, an output that exists, and a checkpoint that cannot be opened.
    """
    if format not in FORMATS:
        raise UserError(f"--format is {format}; there are: {', '.join(FORMATS)}")
    refuse_existing(Path(output))
    loaded = open_checkpoint(checkpoint, average)
    if format == "hf":
        huggingface.write(loaded, output)
    elif format == "stablehlo":
        stablehlo.write(loaded, output)
    else:
        with atomic_folder(output) as unfinished:
            bert_jax_format.write(loaded, unfinished)
    return loaded


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("bert_jax.export", DESCRIPTION)
    parser.add_argument("--checkpoint", required=True, help="what to export")
    parser.add_argument("--format", default="hf", help=f"one of {', '.join(FORMATS)} (default: hf)")
    parser.add_argument("--output", required=True, metavar="DIR", help="the folder to make; it must not exist")
    checkpoint_average.add_argument(parser)
    options = parser.parse_args(arguments)
    loaded = export(options.checkpoint, options.output, options.format, options.average)
    print(f"{options.output}: {describe(loaded)}")


if __name__ == "__main__":
    command.run(main)
