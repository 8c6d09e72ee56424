"""Computes vectors of texts, one for each token, word or text, from any layer."""

import io
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from bert_jax import command
from bert_jax.command import UserError
from bert_jax.interop import checkpoint_average
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model.layer_selection import LAYERS, MIX
from bert_jax.progress import Reporter, print_note
from bert_jax.storage.local import refuse_existing, write_atomic
from bert_jax.tasks import texts as texts_lib
from bert_jax.tasks.example import spans
from bert_jax.tasks.layer_vectors import LayerVectors
from bert_jax.tasks.length_batches import bucketed_batches
from bert_jax.tasks.texts import EncodedTexts, Text
from bert_jax.tokenizer import Tokenizer

Arrays = dict[str, np.ndarray]
POOLS = ("none", "cls", "mean", "max", "words")

DESCRIPTION = f"""Computes the vectors of texts and writes them to a NumPy file.

  python -m bert_jax.embed --checkpoint CHECKPOINT --input texts.txt --output vectors.npz --layers last --pool mean

--input   a UTF-8 file with one text per line, plain, .gz or .xz; a tab separates the two texts of a pair, which is
          encoded as [CLS] a [SEP] b [SEP]; an imported GPT-2 has no special tokens around texts, as in transformers.
--layers  {", ".join(LAYERS)}, or a number:
          0 for the embeddings, 1 for the first layer, and so on. The sums do not include the embeddings.
          concat_last_4 is four times as wide; the last layer comes last. In models with a final norm (ModernBERT,
          GPT-2), only the last layer's vectors are normalized, as in transformers.
--pool    none   the vector of every token, including [CLS] and [SEP]; also writes `offsets` and `input_ids`
          cls    the vector of [CLS] from the layer, without the pooler; not for causal models, whose first token
                 attends only to itself, and not for vocabularies that add no [CLS]
          mean   the mean over the tokens of the text, including [CLS] and [SEP], as in sentence-transformers
          max    the maximum of each dimension over the same tokens
          words  the mean over the pieces of each word (words are separated by white space; in a pair, those of the
                 first text come first); also writes `offsets`. A word without pieces, because it was truncated or
                 holds only control characters, has a row of NaN, so that rows and words stay aligned.

--output  holds `embeddings` f32[rows, width] in the order of the input; `offsets` i64[texts+1], where text i has the
          rows offsets[i]:offsets[i+1]; and `input_ids` i32[rows].

Texts longer than --max_length are truncated at the end, the longer text of a pair first. The number of truncated texts
is printed."""


def embed(
    checkpoint: str | Path | LoadedModel,
    texts: Sequence[Text],
    *,
    layers: str = "last",
    pool: str = "mean",
    batch_size: int = 32,
    max_length: int = 0,
    compute_dtype: str = "float32",
    average: str = "",
) -> dict[str, np.ndarray]:
    """Returns the vectors of texts: `embeddings` and, depending on pool, `offsets` and `input_ids` (see `--help`).

    A text is a string, whose tabs are white space, or a pair of strings. A max_length of 0 is the maximum of the
    model. average applies to a checkpoint given by its path, as in open_checkpoint. Raises UserError for an unknown
    layer or pool, for one that the model does not have, and for a max_length beyond the model's positions. A pool of
    cls is also refused where no [CLS] stands for the whole text: in causal models, whose first token attends to
    itself alone, and for vocabularies that add no special tokens, whose first token is a piece of the text.
    """
    if pool not in POOLS:
        raise UserError(f"unknown --pool {pool!r}; choose from {', '.join(POOLS)}")
    if batch_size < 1:
        raise UserError(f"--batch_size is {batch_size}; use 1 or more")
    loaded = checkpoint if isinstance(checkpoint, LoadedModel) else open_checkpoint(checkpoint, average)
    limit = loaded.model.max_positions
    if max_length and not 5 <= max_length <= limit:
        raise UserError(f"--max_length is {max_length}; use 5 to {limit} (the model's positions), or 0 for the maximum")
    if layers == MIX:
        raise UserError(
            "--layers is mix, whose weights are learned together with a head. Use python -m bert_jax.features --layers "
            "mix, or another name of layers"
        )
    if pool == "cls" and loaded.model.causal:
        raise UserError("--pool is cls, but in a causal model the first token sees only itself. Use mean, max or none")
    if pool == "cls" and not loaded.vocabulary.adds_special_tokens:
        raise UserError(f"--pool is cls, but {loaded.origin or 'the checkpoint'} adds no [CLS] to a text. Use mean")
    model = LayerVectors(loaded, [layers], pool=pool, compute_dtype=compute_dtype)
    encoded = texts_lib.encode(texts, Tokenizer(loaded.vocabulary.spec), max_length or limit, by_word=pool == "words")
    if encoded.rows.truncated:
        print_note(
            f"{encoded.rows.truncated} of {len(texts)} texts are longer than {max_length or limit} tokens; truncated"
        )
    return _run(loaded, encoded, model, pool, batch_size, model.widths[layers])


def write_arrays(arrays: dict[str, np.ndarray], path: Path) -> None:
    """Writes a .npz file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    write_atomic(path, content.getbuffer())


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("bert_jax.embed", DESCRIPTION)
    parser.add_argument(
        "--checkpoint", required=True, help="a workdir, a step in it, an export, or a Hugging Face folder"
    )
    parser.add_argument("--input", required=True, metavar="FILE", help="the texts")
    parser.add_argument("--output", required=True, metavar="FILE.npz", help="the file to write; must not exist yet")
    parser.add_argument("--layers", default="last", metavar="NAME", help="see above (default: last)")
    parser.add_argument("--pool", default="mean", help="see above (default: mean)")
    parser.add_argument("--batch_size", type=int, default=32, metavar="N", help="texts per batch (default: 32)")
    parser.add_argument(
        "--max_length", type=int, default=0, metavar="N", help="truncate to N tokens (default: the model's limit)"
    )
    parser.add_argument("--compute_dtype", default="float32", help="float32 or bfloat16 (default: float32)")
    checkpoint_average.add_argument(parser)
    options = vars(parser.parse_args(arguments))
    checkpoint, source, output = options.pop("checkpoint"), options.pop("input"), Path(options.pop("output"))
    refuse_existing(output)
    arrays = embed(checkpoint, texts_lib.read_texts(source), **options)
    write_arrays(arrays, output)
    print(f"{output}: " + ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in arrays.items()))


def _run(
    loaded: LoadedModel, encoded: EncodedTexts, model: LayerVectors, pool: str, batch_size: int, width: int
) -> Arrays:
    rows = encoded.rows
    sizes = {"none": len(rows.input_ids), "words": int(encoded.word_offsets[-1])}
    embeddings = np.full((sizes.get(pool, rows.count), width), np.nan, np.float32)
    batches = bucketed_batches(rows, batch_size, model.mesh.size, loaded.model.max_positions)
    with Reporter("embedding", rows.count, ["texts"], quiet=not sys.stderr.isatty()) as progress:
        for indices, (vectors,) in model.run(batches):
            _store(embeddings, vectors, encoded, indices[indices >= 0], pool)
            progress.advance(int((indices >= 0).sum()), int((indices >= 0).sum()))
    if pool == "none":
        return {"embeddings": embeddings, "offsets": rows.offsets, "input_ids": rows.input_ids}
    if pool == "words":
        if empty := int(np.isnan(embeddings[:, 0]).sum()):
            print_note(f"{empty} of {len(embeddings)} words have no pieces; their rows are NaN")
        return {"embeddings": embeddings, "offsets": encoded.word_offsets}
    return {"embeddings": embeddings}


def _store(
    embeddings: Float32[np.ndarray, "rows W"],
    vectors: np.ndarray,
    encoded: EncodedTexts,
    indices: np.ndarray,
    pool: str,
) -> None:
    """Copies the vectors of a batch, whose first texts are `indices`, to their rows of embeddings."""
    if pool in ("cls", "mean", "max"):
        embeddings[indices] = vectors[: len(indices)]
        return
    lengths = encoded.rows.lengths[indices]
    tokens = spans(encoded.rows.offsets[indices], lengths)
    of_tokens = vectors[: len(indices)][np.arange(vectors.shape[1]) < lengths[:, None]]
    if pool == "none":
        embeddings[tokens] = of_tokens
        return
    words = encoded.words[tokens]
    pieces, words = of_tokens[words >= 0], words[words >= 0]
    if len(words):
        first = np.flatnonzero(np.diff(words, prepend=-1))
        counts = np.diff(first, append=len(words))
        embeddings[words[first]] = np.add.reduceat(pieces, first, axis=0) / counts[:, None]


if __name__ == "__main__":
    command.run(main)
