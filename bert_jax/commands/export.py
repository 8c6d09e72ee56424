"""Exports a checkpoint in the format of other software."""

from collections.abc import Sequence
from dataclasses import dataclass

from bert_jax.config.options import option, parse
from bert_jax.interop.export import FORMATS, export
from bert_jax.interop.huggingface_export import describe
from bert_jax.interop.open_checkpoint import CheckpointOptions

DESCRIPTION = """Exports a checkpoint for use in other software.

  bert-jax export --checkpoint runs/base --format hf --output exported

hf         Hugging Face format: model.safetensors, config.json, tokenizer files, README.md (a model card).
           AutoTokenizer and BertForPreTraining (or the class for the model's heads) open it with
           from_pretrained("exported"). config.json also keeps the task for bert_jax. A model for vectors has the
           files of sentence-transformers, too. The vocabulary's padding rows are removed. An error names parts that
           no family's format can hold (a relative position encoding, a CRF). Of an ELECTRA run, hf,
           stablehlo and onnx write the discriminator, or with --part generator the generator.
orbax      the weights without the optimizer state, in the format of a workdir at step 0: for sharing, for another
           JAX program, or for bert_jax itself.
stablehlo  programs for every platform of JAX, for any batch size and length, that run without bert_jax:
           hidden_states.stablehlo and, if the model has heads, predictions.stablehlo, or for a model of vectors
           text_vectors.stablehlo; with parameters, the tokenizer, programs.json (inputs, outputs, settings of vectors)
           and README.md, which shows how to run one. This is not a checkpoint: keep the workdir.
onnx       programs for any batch size and length, of a model with a Hugging Face format: onnx/model.onnx, and in int8
           onnx/model_quantized.onnx, as transformers.js, optimum and fastembed expect, with transformers' names of
           inputs and outputs; config.json, tokenizer files, README.md. They are compared with the model before they
           are written. Needs the extra onnx (docs/install.md). Not a checkpoint: keep the workdir.
peft       LoRA's adapters and the trained head alone, as peft saves them: adapter_config.json and
           adapter_model.safetensors. They refer to the base model's Hugging Face folder: init_from, or --base DIR.
           The other formats merge adapters into the matrices that they adapt.
sentence_transformers
           the encoder alone in Hugging Face format, with modules.json, pooling, normalization, prompts and maximum
           length, as SentenceTransformer("exported") opens it. A checkpoint that was not fine-tuned for vectors (the
           recipe embedding), or read from such a folder, gets the mean of its tokens.

--dtype bfloat16 halves the parameters of hf, sentence_transformers and stablehlo, whose matmuls then run in bfloat16,
too. With its 8 significant bits, each parameter changes by at most 1 part in 256. For onnx, --dtype float32 or int8
writes one of both programs. The one in int8 has int8 matrices, and activations that onnxruntime rounds for each batch;
README.md has the difference from float32. The default of other formats is float32, or for hf and sentence_transformers
the dtype of the file that a model was read from, if its parameters are the same."""


@dataclass(frozen=True, kw_only=True)
class Options(CheckpointOptions):
    output: str = option(help="the folder to create; it must not exist", metavar="DIR")
    format: str = option("hf", f"see above: {', '.join(FORMATS)}")
    dtype: str = option("", "float32, bfloat16 or int8; see above")
    part: str = option("", "ELECTRA: discriminator or generator; default: discriminator, orbax: both")
    shape: str = option("", "stablehlo: the only batch size and length, such as 8x128; default: any", metavar="BxT")
    language: str = option("", "languages of the model, for its card, such as tr or tr,en", metavar="CODES")
    license: str = option("", "the license, for its card, such as apache-2.0", metavar="NAME")
    base: str = option("", "peft: the Hugging Face folder of the base model", metavar="DIR")


def main(arguments: Sequence[str]) -> None:
    options = parse("bert-jax export", DESCRIPTION, Options, arguments)
    loaded = export(**vars(options))
    print(f"{options.output}: {describe(loaded)}")
