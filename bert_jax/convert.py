"""Turns a folder of others, Hugging Face's or Google's, into a checkpoint of ours."""

from collections.abc import Sequence
from pathlib import Path

from bert_jax import command
from bert_jax.interop import bert_jax_format, huggingface, original_bert
from bert_jax.interop.families import FAMILIES
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import describe
from bert_jax.storage.local import atomic_folder

DESCRIPTION = f"""Turns a model in Hugging Face layout into a checkpoint of bert_jax: config.json, tokenizer/ and
checkpoints/0, weights only. Every tensor keeps its value; the token table is padded to a multiple of 128 rows.
Families: {", ".join(family.title for family in FAMILIES.values())}.

  python -m bert_jax.convert --input bert-base-uncased --output checkpoints/bert-base-uncased

--input is a folder in Hugging Face layout, with config.json, model.safetensors (or its parts and their index) and
tokenizer.json or vocab.txt. Pickles (pytorch_model.bin) are refused, since reading one can run code; the message says
how to convert one.

Or it is one as Google published BERT, with bert_config.json, bert_model.ckpt.index, bert_model.ckpt.data-00000-of-00001
and vocab.txt, or the prefix of a checkpoint beside them (DIR/model.ckpt-1000). TensorFlow is not needed.

The other commands also take a Hugging Face folder as it is."""


def convert(input_directory: str | Path, output: str | Path) -> LoadedModel:
    """Converts a folder of Hugging Face's or Google's; the output folder appears whole or not at all.

    Raises UserError when the output exists, and for all that `huggingface.read` or `original_bert.read` refuses.
    """
    with atomic_folder(output) as unfinished:
        read = original_bert.read if original_bert.is_original(Path(input_directory)) else huggingface.read
        loaded = read(input_directory)
        bert_jax_format.write(loaded, unfinished)
    return loaded


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("bert_jax.convert", DESCRIPTION)
    parser.add_argument("--input", required=True, metavar="DIR", help="the folder of Hugging Face or Google")
    parser.add_argument("--output", required=True, metavar="DIR", help="the folder to make; it must not exist")
    options = parser.parse_args(arguments)
    loaded = convert(options.input, options.output)
    print(f"{options.output}: {describe(loaded)}")


if __name__ == "__main__":
    command.run(main)
