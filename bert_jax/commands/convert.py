"""Converts a model in Hugging Face or Google format to a bert_jax checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass

from bert_jax.config.options import option, parse
from bert_jax.interop.export import convert
from bert_jax.interop.families import FAMILIES
from bert_jax.interop.huggingface_export import describe

DESCRIPTION = f"""Converts a model in Hugging Face format to a bert_jax checkpoint: config.json, tokenizer/ and
checkpoints/0, without an optimizer state. All tensors keep their values; the token table gets padding to a multiple of
128 rows.
Families: {", ".join(family.title for family in FAMILIES.values())}.

  bert-jax convert --input hf:bert-base-uncased --output checkpoints/bert-base-uncased

--input is a folder in Hugging Face format, with config.json, model.safetensors (or its parts and their index) and
tokenizer.json or vocab.txt, or hf:NAME, a model of the Hugging Face Hub. Pickles (pytorch_model.bin) are refused,
because reading one can run code; the error message explains how to convert one.

--input may also be a folder in Google's original BERT format, with bert_config.json, bert_model.ckpt.index,
bert_model.ckpt.data-00000-of-00001 and vocab.txt, or the prefix of one of its checkpoints (DIR/model.ckpt-1000). Only
this needs TensorFlow, from the extra tensorflow.

The other commands also accept a Hugging Face folder directly."""


@dataclass(frozen=True)
class Options:
    input: str = option(
        help="a folder in Hugging Face or Google format, or hf:NAME", metavar="DIR", aliases=["checkpoint"]
    )
    output: str = option(help="the folder to create; it must not exist", metavar="DIR")


def main(arguments: Sequence[str]) -> None:
    options = parse("bert-jax convert", DESCRIPTION, Options, arguments)
    loaded = convert(options.input, options.output)
    print(f"{options.output}: {describe(loaded)}")
