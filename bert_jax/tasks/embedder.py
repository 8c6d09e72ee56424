"""Vectors of texts, of their tokens or of their words, computed by one model.

Read `encode`, which turns texts into rows, then `Embedder`, then `embed`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from bert_jax.config.options import Checked, at_least, from_keywords, option
from bert_jax.errors import UserError
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.interop.sentence_transformers import KIND
from bert_jax.model.outputs import MIX, LayerSelection
from bert_jax.model.runtime import COMPUTE_DTYPES
from bert_jax.progress import Reporter, is_watched, print_note
from bert_jax.tasks.batches import Batches, bucketed_batches, sorted_batches
from bert_jax.tasks.inference import LayerVectors, tokenizer_of
from bert_jax.tasks.kinds.embedding import EmbeddingTask
from bert_jax.tasks.reading.inputs import Texts
from bert_jax.tasks.registry import from_json
from bert_jax.tasks.rows import Pieces, TokenRows, encode_pieces, spans
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.train import sharding


@dataclass(frozen=True, eq=False)
class EncodedTexts:
    """The rows of R texts, and the word of each token."""

    rows: TokenRows
    words: Int64[np.ndarray, "N"]  # of each token, the number of its word, counted over all texts; -1 for none
    word_offsets: Int64[np.ndarray, "K"]  # K = R + 1: text r has the words word_offsets[r]:word_offsets[r + 1]


def encode(
    texts: Sequence[str | Texts], tokenizer: Tokenizer, max_length: int, by_word: bool, prompt: str = ""
) -> EncodedTexts:
    """[CLS] a [SEP], or [CLS] a [SEP] b [SEP] for a tuple of two texts; a text over max_length loses its end.

    The prompt is put before the first one. There are Tokenizer.pair_separators of [SEP] between two texts. With
    by_word, the words (separated by white space) are encoded separately, so that the word of each token is known;
    otherwise a whole text counts as one word.
    """
    parts: list[Texts] = [(text,) if isinstance(text, str) else text for text in texts]
    parts = [(prompt + first, *second) for first, *second in parts] if prompt else parts
    units = [[tokenizer.as_in_text(part.split()) if by_word else [part] for part in found] for found in parts]
    paired = np.array([len(found) > 1 for found in parts])
    both = [found[0] for found in units], [found[1] if len(found) > 1 else [] for found in units]
    counts = np.array([list(map(len, side)) for side in both], np.int64)  # of the words of first and second texts
    word_offsets = np.cumsum([0, *counts.sum(axis=0)], dtype=np.int64)
    pieces: list[Pieces] = []
    words = []  # of each piece, the number of its word
    for side, starts, sizes in zip(both, (word_offsets[:-1], word_offsets[:-1] + counts[0]), counts, strict=True):
        ids, bounds = tokenizer.of_tasks.encode_many([unit for units_of_text in side for unit in units_of_text])
        pieces.append((ids, bounds[np.cumsum([0, *sizes])]))
        words.append(np.repeat(spans(starts, sizes), np.diff(bounds)))
    encoded, cut, places = encode_pieces(pieces[0], pieces[1], paired, tokenizer, max_length)
    rows = TokenRows(
        input_ids=encoded.input_ids,
        offsets=encoded.offsets,
        first_lengths=encoded.first_lengths,
        pad_id=tokenizer.pad_id,
        truncated=int(cut.sum()),
    )
    return EncodedTexts(rows, np.concatenate([*words, [-1]])[places], word_offsets)


def checked_texts(texts: Iterable[Any]) -> list[Texts]:
    """The texts of a caller.

    Raises UserError for what refuse_other_inputs refuses, and for an item that is neither a string nor a pair.
    """
    refuse_other_inputs(texts)
    found = []
    for number, text in enumerate(texts, 1):
        parts = (text,) if isinstance(text, str) else text
        pair = isinstance(parts, tuple | list) and len(parts) in (1, 2)
        if not pair or not all(isinstance(part, str) for part in parts):
            raise UserError(f"text {number} is {text!r:.60}; expected a string, or a tuple of two strings")
        found.append(tuple(parts))
    return found


def checked_strings(texts: Iterable[Any]) -> list[str]:
    """The texts of a caller, none of which is a pair. Raises UserError as checked_texts does."""
    refuse_other_inputs(texts)
    found = list(texts)
    for number, text in enumerate(found, 1):
        if not isinstance(text, str):
            raise UserError(f"text {number} is {text!r:.60}; expected a string")
    return found


def refuse_other_inputs(texts: Any) -> None:
    """Raises UserError for a single text, for what is no list of anything, and for a dictionary and a DataFrame, whose
    items are the names of columns."""
    if isinstance(texts, str) or not is_iterable(texts):
        what = "the text " if isinstance(texts, str) else ""
        raise UserError(f"texts is {what}{texts!r:.40}; expected a list of texts")
    if isinstance(texts, Mapping):
        raise UserError(f"the data is one object with the keys {', '.join(map(str, texts))}; expected a list of inputs")
    if hasattr(texts, "to_dict") and hasattr(texts, "columns"):
        raise UserError(
            f"the data is a table with the columns {', '.join(map(str, texts.columns))}; expected texts. Give a column "
            "of it, such as table['text']"
        )


def is_iterable(value: Any) -> bool:
    """Whether a value can be iterated over, also by its indices alone. An array without axes cannot."""
    try:
        iter(value)
    except TypeError:
        return False
    return True


Arrays = dict[str, np.ndarray]
TEXT_POOLS = ("cls", "mean", "max", "last")  # one vector of each text
POOLS = ("none", *TEXT_POOLS, "words")
SHORTEST = 5  # tokens: the special tokens of a pair and a piece of each text


@dataclass(frozen=True)
class VectorSettings:
    """How vectors are made of texts. max_length counts special tokens; prompt is put before each text.

    normalize, truncate_dim and cut_first are those of LayerVectors.
    """

    pool: str
    normalize: bool
    prompt: str
    max_length: int
    layers: str = "last"
    truncate_dim: int = 0
    cut_first: bool = False


@dataclass(frozen=True, kw_only=True)
class EncodeOptions(Checked):
    """How vectors are made: of Model.encode and `bert-jax embed`, which describes them."""

    layers: str | int = option("last", "see above", metavar="NAME")
    pool: str = option(
        "",
        "none, cls, mean, max, last or words, see above; default: the checkpoint's, or mean",
        aliases=["pooling"],
        choices=("", *POOLS),
    )
    normalize: bool | None = option(
        None, "give vectors of texts length 1, or --no-normalize; default: as the checkpoint says"
    )
    prompt: str | None = option(None, "put before each text; default: as the checkpoint says", metavar="TEXT")
    prompt_name: str = option("", "use this prompt of the checkpoint", metavar="NAME")
    max_length: int = option(0, "truncate to N tokens; default: the model's limit", metavar="N")
    truncate_dim: int = option(0, "keep the first N dimensions; default: as the checkpoint says", metavar="N")
    batch_size: int = option(32, "texts per batch", metavar="N", valid=at_least(1))
    compute_dtype: str = option("float32", "of the model", choices=(*COMPUTE_DTYPES, "auto"))


def settings_of(loaded: LoadedModel, options: EncodeOptions) -> VectorSettings:
    """The settings of a model's own embedding task, of which those that are given are replaced.

    With pool the task's other settings, except for its named prompts, are not used. A model without such a task has the
    mean of the tokens. With normalize given, vectors have length 1 in the end; otherwise they are normalized before
    they are cut, as sentence-transformers does it. Raises UserError for a choice that does not fit the model.
    """
    layers, pool, truncate_dim = str(options.layers), options.pool, options.truncate_dim
    normalize, prompt, prompt_name = options.normalize, options.prompt, options.prompt_name
    width = LayerSelection.parse(layers, loaded.model.layers).width(loaded.model.width)
    if not 0 <= truncate_dim <= width:
        raise UserError(f"--truncate_dim is {truncate_dim}; use 1 to {width} (the width of --layers {layers})")
    own = _own_task(loaded, pool)
    if prompt is not None and prompt_name:
        raise UserError("--prompt and --prompt_name are both given; use one of them")
    if prompt_name:
        prompts = own.named_prompts() if own else {}
        if prompt_name not in prompts:
            raise UserError(
                f"--prompt_name is {prompt_name!r}, but the checkpoint's prompts are: {', '.join(prompts) or 'none'}. "
                "Use --prompt TEXT for another one"
            )
        prompt = prompts[prompt_name]
    limit = loaded.model.max_positions
    cut_first = bool(normalize)
    if own and not pool:
        normalize = own.normalize if normalize is None else normalize
        prompt = own.prompt if prompt is None else prompt
        limit, truncate_dim = min(own.max_length, limit), truncate_dim or own.truncate_dim
    settings = VectorSettings(
        own.pooling if own and not pool else pool or "mean",
        bool(normalize),
        prompt or "",
        options.max_length or limit,
        layers,
        truncate_dim,
        cut_first,
    )
    _check(loaded, settings)
    return settings


class Embedder:
    """A model that returns vectors. Raises UserError for layers that the model does not have."""

    def __init__(
        self, loaded: LoadedModel, settings: VectorSettings, *, batch_size: int = 32, compute_dtype: str = "float32"
    ) -> None:
        self.settings = settings
        own = _own_task(loaded, settings.pool)
        # By the role of a text in retrieval.
        self.prompts = {"query": own.query_prompt if own else "", "document": own.document_prompt if own else ""}
        self.truncated = 0  # texts that were truncated so far
        self._batch_size = batch_size
        self._tokenizer = tokenizer_of(loaded)
        self._model = LayerVectors(
            loaded,
            [settings.layers],
            pool=settings.pool,
            normalize=settings.normalize,
            truncate_dim=settings.truncate_dim,
            cut_first=settings.cut_first,
            compute_dtype=compute_dtype,
        )
        self.width = self._model.widths[settings.layers]

    def vectors(self, texts: Sequence[str | Texts], prompt: str | None = None) -> Float32[np.ndarray, "N W"]:
        """One vector of each of a window of texts; prompt replaces that of the settings.

        Batches have one size, so that few programs serve many windows.
        """
        encoded = self._encode(texts, self.settings.prompt if prompt is None else prompt)
        size = sharding.whole_rows(self._batch_size, self._model.mesh)
        return self._run(encoded, sorted_batches(encoded.rows, size, self.settings.max_length), quiet=True)

    def arrays(self, texts: Sequence[str | Texts]) -> Arrays:
        """`embeddings` and, by the pool, `offsets` and `input_ids` (see `bert-jax embed --help`)."""
        pool = self.settings.pool
        if not len(texts):
            none: Arrays = {"embeddings": np.zeros((0, self.width), np.float32)}
            if pool not in TEXT_POOLS:
                none["offsets"] = np.zeros(1, np.int64)
            return none | ({"input_ids": np.zeros(0, np.int32)} if pool == "none" else {})
        encoded = self._encode(texts, self.settings.prompt)
        batches = bucketed_batches(encoded.rows, self._batch_size, self._model.mesh.size, self.settings.max_length)
        embeddings = self._run(encoded, batches, quiet=not is_watched())
        if pool == "none":
            return {"embeddings": embeddings, "offsets": encoded.rows.offsets, "input_ids": encoded.rows.input_ids}
        if pool == "words":
            if empty := int(np.isnan(embeddings[:, 0]).sum()):
                print_note(f"{empty} of {len(embeddings)} words have no pieces; their rows are NaN")
            return {"embeddings": embeddings, "offsets": encoded.word_offsets}
        return {"embeddings": embeddings}

    def _encode(self, texts: Sequence[str | Texts], prompt: str) -> EncodedTexts:
        by_word = self.settings.pool == "words"
        encoded = encode(texts, self._tokenizer, self.settings.max_length, by_word, prompt)
        self.truncated += encoded.rows.truncated
        return encoded

    def _run(self, encoded: EncodedTexts, batches: Batches, quiet: bool) -> Float32[np.ndarray, "rows W"]:
        rows = encoded.rows
        sizes = {"none": len(rows.input_ids), "words": int(encoded.word_offsets[-1])}
        embeddings = np.full((sizes.get(self.settings.pool, rows.count), self.width), np.nan, np.float32)
        with Reporter("embedding", rows.count, ["texts"], quiet=quiet) as progress:
            for indices, (vectors,) in self._model.run(batches):
                _store(embeddings, vectors, encoded, indices[indices >= 0], self.settings.pool)
                progress.advance(int((indices >= 0).sum()), int((indices >= 0).sum()))
        return embeddings


def _own_task(loaded: LoadedModel, pool: str) -> EmbeddingTask | None:
    values: Mapping[str, object] = loaded.task or {}
    if values.get("kind") != KIND:
        return None
    # A pooling that bert_jax does not know does not matter where another one is given.
    task = from_json({**values, "pooling": "mean"} if pool else values)
    assert isinstance(task, EmbeddingTask)
    return task


def _check(loaded: LoadedModel, settings: VectorSettings) -> None:
    limit, pool = loaded.model.max_positions, settings.pool
    if not SHORTEST <= settings.max_length <= limit:
        raise UserError(
            f"--max_length is {settings.max_length}; use {SHORTEST} to {limit} (the model's positions), or 0 for the "
            "maximum"
        )
    if settings.layers == MIX:
        raise UserError(
            "--layers is mix, whose weights are learned together with a head. Use bert-jax features --layers "
            "mix, or another name of layers"
        )
    if pool == "cls" and loaded.model.causal:
        raise UserError("--pool is cls, but in a causal model the first token sees only itself. Use mean, max or none")
    if pool == "cls" and not loaded.vocabulary.adds_special_tokens:
        raise UserError(f"--pool is cls, but {loaded.origin or 'the checkpoint'} adds no [CLS] to a text. Use mean")
    if pool not in TEXT_POOLS and (settings.normalize or settings.prompt or settings.truncate_dim):
        raise UserError(
            f"--normalize, --truncate_dim and prompts are for vectors of texts, but --pool is {pool}. Omit them"
        )


def _store(
    embeddings: Float32[np.ndarray, "rows W"],
    vectors: np.ndarray,
    encoded: EncodedTexts,
    indices: np.ndarray,
    pool: str,
) -> None:
    """Copies the vectors of a batch, whose first texts are `indices`, to their rows of embeddings."""
    if pool in TEXT_POOLS:
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


def report_truncated(model: Embedder, texts: int) -> None:
    """Prints how many of the texts that a model has encoded were truncated, if any were."""
    if model.truncated:
        print_note(f"{model.truncated} of {texts} texts are longer than {model.settings.max_length} tokens; truncated")


def embed(
    checkpoint: str | Path | LoadedModel, texts: Iterable[Any], *, average: str = "", **options: Any
) -> dict[str, np.ndarray]:
    """Returns the vectors of texts: `embeddings` and, depending on pool, `offsets` and `input_ids` (see `--help`).

    A text is a string, whose tabs are white space, or a pair of strings. options are those of EncodeOptions. Without
    pool, the settings are those of the model (VectorSettings). average applies to a checkpoint given by its path, as in
    open_checkpoint. Raises UserError for an unknown layer or pool, for one that
    the model does not have, and for a max_length beyond the model's positions. A pool of cls is also refused where no
    [CLS] stands for the whole text: in causal models, whose first token attends to itself alone, and for vocabularies
    that add no special tokens, whose first token is a piece of the text.
    """
    given = from_keywords(EncodeOptions, options)
    several = checked_texts(texts)
    loaded = checkpoint if isinstance(checkpoint, LoadedModel) else open_checkpoint(checkpoint, average)
    model = Embedder(loaded, settings_of(loaded, given), batch_size=given.batch_size, compute_dtype=given.compute_dtype)
    arrays = model.arrays(several)
    report_truncated(model, len(several))
    return arrays
