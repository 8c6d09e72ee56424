"""Computes the vectors of texts, words or tokens, and writes them to a NumPy file or to a folder of shards."""

from collections.abc import Sequence
from pathlib import Path

from bert_jax import command_line
from bert_jax.errors import UserError
from bert_jax.interop.open_checkpoint import add_average_flag
from bert_jax.model.outputs import LAYERS
from bert_jax.storage.files import refuse_existing
from bert_jax.tasks import vector_files
from bert_jax.tasks.embedder import embed
from bert_jax.tasks.reading.inputs import STREAM_FORMS, read_texts
from bert_jax.train.compilation import enable_compilation_cache

FORMATS = ("npz", *vector_files.FORMATS)

DESCRIPTION = f"""Computes the vectors of texts and writes them to a NumPy file, or to a folder of shards.

  bert-jax embed --checkpoint CHECKPOINT --input texts.txt --output vectors.npz --layers last --pool mean
  bert-jax embed --checkpoint CHECKPOINT --input texts.jsonl --output vectors --format npy --dtype float16

--input   a UTF-8 file, plain or compressed. The name decides the form (or --form):
          .jsonl, .ndjson  one object per line; --text and --text_pair name the fields of its texts; --form jsonl for a
                           .json file
          .parquet         --text and --text_pair name columns; NAME-00000-of-00003.parquet stands for all three files
          .csv             the same, in a header line, or numbers from 0 for a table without one; --form tsv for tabs
          any other        one text per line; a tab separates the two texts of a pair
          A pair is encoded as [CLS] a [SEP] b [SEP]; an imported GPT-2 has no special tokens around texts, as in
          transformers.
--layers  {", ".join(LAYERS)}, or a number:
          0 for the embeddings, 1 for the first layer, and so on. The sums do not include the embeddings.
          concat_last_4 is four times as wide; the last layer comes last. In models with a final norm (ModernBERT,
          GPT-2), only the last layer's vectors are normalized, as in transformers.
--pool    none   the vector of every token, including [CLS] and [SEP]; also writes `offsets` and `input_ids`
          cls    the vector of [CLS] from the layer, without the pooler; not for causal models, whose first token
                 attends only to itself, and not for vocabularies that add no [CLS]
          mean   the mean over the tokens of the text, including [CLS] and [SEP], as in sentence-transformers
          max    the maximum of each dimension over the same tokens
          last   the vector of the last token, which is [SEP] where the vocabulary adds it
          words  the mean over the pieces of each word (words are separated by white space; in a pair, those of the
                 first text come first); also writes `offsets`. A word without pieces, because it was truncated or
                 holds only control characters, has a row of NaN, so that rows and words stay aligned.

Without --pool, a sentence-transformers folder, or a model that was fine-tuned for vectors (the recipe embedding), is
used as its files say: pooling, normalization, truncate_dim, default prompt and maximum length. Any other model has the
mean. With --pool, vectors are neither normalized nor cut and have no prompt unless --normalize, --truncate_dim,
--prompt or --prompt_name asks for it. Vectors that are cut keep their values; with --normalize, they have length 1.

--output, --format npz (default): a file with `embeddings` [rows, width] in the order of the input; `offsets`
i64[texts+1], where text i has the rows offsets[i]:offsets[i+1]; and `input_ids` i32[rows]. All texts and vectors are in
memory.
--format npy or parquet: a folder of shards of --shard_size texts, with _manifest.json, for any number of texts. Memory
is that of one shard. An interrupted command resumes if it is run again. Parquet has the columns row and embedding.
For pools of one vector per text.

Texts longer than --max_length are truncated at the end, the longer text of a pair first. The number of truncated texts
is printed."""


def _parser() -> command_line.Parser:
    parser = command_line.Parser("bert-jax embed", DESCRIPTION)
    parser.add_argument(
        "--checkpoint",
        required=True,
        help="a workdir, a step in it, an export, a Hugging Face folder, or hf:NAME",
    )
    parser.add_argument("--input", required=True, metavar="FILE", help="the texts")
    parser.add_argument("--output", required=True, metavar="PATH", help="the file or folder; must not exist yet")
    parser.add_argument("--format", default="npz", help=f"see above: {', '.join(FORMATS)} (default: npz)")
    parser.add_argument("--dtype", default="float32", help="of the output: float32 (default) or float16")
    shard = "texts per shard of npy and parquet (default: 65536)"
    parser.add_argument("--shard_size", type=int, metavar="N", help=shard)
    meaning = f"of the input: {', '.join(STREAM_FORMS)} (default: auto)"
    parser.add_argument("--form", "--input_format", default="auto", help=meaning)
    parser.add_argument("--text", default="", metavar="NAME", help="field or column of the text (default: text)")
    parser.add_argument("--text_pair", default="", metavar="NAME", help="that of the second text of a pair")
    parser.add_argument("--layers", default="last", metavar="NAME", help="see above (default: last)")
    parser.add_argument("--pool", "--pooling", default="", help="see above (default: the checkpoint's own, or mean)")
    normalize = "give vectors of texts length 1, or --no-normalize to leave it (default: as the checkpoint says)"
    parser.add_switch("normalize", help=normalize)
    parser.add_argument("--prompt", metavar="TEXT", help="put before each text (default: as the checkpoint says)")
    parser.add_argument("--prompt_name", default="", metavar="NAME", help="use this prompt of the checkpoint")
    parser.add_argument("--batch_size", type=int, default=32, metavar="N", help="texts per batch (default: 32)")
    parser.add_argument(
        "--max_length", type=int, default=0, metavar="N", help="truncate to N tokens (default: the model's limit)"
    )
    cut = "only the first N dimensions (default: as the checkpoint says)"
    parser.add_argument("--truncate_dim", type=int, default=0, metavar="N", help=cut)
    parser.add_argument("--compute_dtype", default="float32", help="float32, bfloat16 or auto (default: float32)")
    add_average_flag(parser)
    return parser


def main(arguments: Sequence[str]) -> None:
    options = vars(_parser().parse_args(arguments))
    enable_compilation_cache()
    checkpoint, source, output = options.pop("checkpoint"), Path(options.pop("input")), Path(options.pop("output"))
    if options["format"] not in FORMATS:
        raise UserError(f"unknown --format {options['format']!r}; choose from {', '.join(FORMATS)}")
    if options["shard_size"] is None:
        del options["shard_size"]
    elif options["format"] == "npz":
        raise UserError("--shard_size is of output in shards, but --format npz writes one file; omit it")
    if options["format"] != "npz":
        manifest = vector_files.embed_file(checkpoint, source, output, **options)
        size = f"{manifest['dtype']}[{manifest['count']}, {manifest['width']}]"
        print(f"{output}: embeddings {size} in {len(manifest['shards'])} shards")
        return
    refuse_existing(output)
    del options["format"]
    vector_files.input_files(source, options["form"])
    texts = read_texts(source, options.pop("form"), options.pop("text"), options.pop("text_pair"))
    dtype = options.pop("dtype")
    if dtype not in vector_files.DTYPES:
        raise UserError(f"unknown --dtype {dtype!r}; choose from {', '.join(vector_files.DTYPES)}")
    arrays = embed(checkpoint, texts, **options)
    arrays["embeddings"] = vector_files.converted(arrays["embeddings"], dtype, "--dtype")
    vector_files.write_arrays(arrays, output)
    print(f"{output}: " + ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in arrays.items()))
