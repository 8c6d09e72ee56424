"""Computes the vectors of texts, words or tokens, and writes them to a NumPy file or to a folder of shards."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bert_jax.config.options import at_least, check, option, parse, values
from bert_jax.errors import UserError
from bert_jax.interop.open_checkpoint import CheckpointOptions
from bert_jax.model.outputs import LAYERS
from bert_jax.storage.files import format_of_ending, refuse_existing
from bert_jax.tasks import vector_files
from bert_jax.tasks.embedder import EncodeOptions, embed
from bert_jax.tasks.reading.inputs import STREAM_FORMS, read_texts
from bert_jax.train.compilation import enable_compilation_cache

DESCRIPTION = f"""Computes the vectors of texts and writes them to a NumPy file, or to a folder of shards.

  bert-jax embed --checkpoint CHECKPOINT --input texts.txt --output vectors.npz --layers last --pool mean
  bert-jax embed --checkpoint CHECKPOINT --input texts.jsonl --output vectors --format npy --dtype float16

--input   a UTF-8 file, plain or compressed, whose name decides the form (or --form): .jsonl and .ndjson (an object on
          each line), .parquet (NAME-00000-of-00003.parquet: all three files) and .csv have fields or columns, which
          --text and --text_pair name, or number from 0 in a table without a header. Any other file has a text on each
          line; a tab separates the two texts of a pair, which becomes [CLS] a [SEP] b [SEP].
--layers  {", ".join(LAYERS)}, or a number: 0 for the
          embeddings, 1 for the first layer. Sums do not include the embeddings; the last layer of concat_last_4 comes
          last. If a model has a final norm (ModernBERT, GPT-2), only the last layer is normalized, as in transformers.
--pool    none   the vector of every token, with [CLS] and [SEP]
          cls    the vector of [CLS], without the pooler; not for causal models or vocabularies without [CLS]
          mean   the mean over all tokens of the text, as in sentence-transformers; max: the maximum
          last   the vector of the last token, which is [SEP] if the vocabulary adds it
          words  the mean over the pieces of each word, as white space separates them. A word without pieces (cut
                 off, or only control characters) has a row of NaN, so that rows and words stay aligned.

Without --pool, a sentence-transformers folder, or a model that was fine-tuned for vectors (the recipe embedding), is
used as its files say: pooling, normalization, truncate_dim, default prompt and maximum length. With --pool, vectors are
not normalized or cut and have no prompt unless a flag asks for it. Cut vectors keep their values or, with --normalize,
have length 1. The longer text of a pair is truncated first. The number of truncated texts is printed.
FILE.npz: `embeddings` [rows, width] in the order of the input; with --pool none or words `offsets` i64[texts+1] (text
i has the rows offsets[i]:offsets[i+1]); with none `input_ids` i32[rows]. FILE.parquet: the columns row,
embedding and text (text_pair), with one vector per text. All vectors are in memory. --format npy, parquet: a folder of
shards, with _manifest.json, for one vector per text (Parquet: columns row and embedding). The same command resumes it.
"""
OUTPUT = "output"
ENDINGS = {".npz": "npz", ".parquet": "parquet", "": "npz"}  # of --output


@dataclass(frozen=True, kw_only=True)
class Options(EncodeOptions, CheckpointOptions):
    input: Path = option(help="the texts", metavar="FILE")
    output: Path = option(help="the file or folder; must not exist yet", metavar="PATH")
    form: str = option("auto", "of the input", aliases=["input_format"], choices=STREAM_FORMS)
    text: str = option("", "field or column of the text; default: text", metavar="NAME")
    text_pair: str = option("", "the same for the second text of a pair", metavar="NAME")
    format: str = option(
        "",
        "npz, or npy and parquet in shards; default: by the ending of --output",
        choices=("", "npz", *vector_files.FORMATS),
        section=OUTPUT,
    )
    dtype: str = option("float32", "of the vectors", choices=vector_files.DTYPES, section=OUTPUT)
    shard_size: int | None = option(
        None, "texts per shard of npy and parquet; default 65536", metavar="N", valid=at_least(1), section=OUTPUT
    )

    def __post_init__(self) -> None:
        check(self)
        if self.shard_size and self.format in ("", "npz"):
            written = f"--format {self.format} writes" if self.format else f"{self.output} is"
            raise UserError(f"--shard_size is for output in shards (--format npy), but {written} one file; omit it")

    @property
    def file_format(self) -> str:
        """The format of a single file; empty for shards."""
        if self.format:
            return "npz" if self.format == "npz" else ""
        return format_of_ending(self.output, ENDINGS)


def main(arguments: Sequence[str]) -> None:
    options = parse("bert-jax embed", DESCRIPTION, Options, arguments)
    enable_compilation_cache()
    reading = {"form": options.form, "text": options.text, "text_pair": options.text_pair}
    computing = {**values(options, EncodeOptions), "average": options.average}
    file_format = options.file_format
    if not file_format:
        manifest = vector_files.embed_file(
            options.checkpoint,
            options.input,
            options.output,
            format=options.format,
            dtype=options.dtype,
            shard_size=options.shard_size or 65536,
            **reading,
            **computing,
        )
        size = f"{manifest['dtype']}[{manifest['count']}, {manifest['width']}]"
        print(f"{options.output}: embeddings {size} in {len(manifest['shards'])} shards")
        return
    # All files are checked before the model is opened, which takes seconds.
    refuse_existing(options.output)
    vector_files.input_files(options.input, options.form)
    texts = read_texts(options.input, *reading.values())
    arrays = embed(options.checkpoint, texts, **computing)
    arrays["embeddings"] = vector_files.converted(arrays["embeddings"], options.dtype, "--dtype")
    if file_format == "parquet":
        vector_files.write_table(arrays, texts, options.output)
    else:
        vector_files.write_arrays(arrays, options.output)
    shapes = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in arrays.items())
    print(f"{options.output}: {shapes}")
