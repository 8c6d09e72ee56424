"""Vectors of texts, tokens or words, computed by one model.

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
from bert_jax.interop.sentence_transformers import KIND, refuse_unknown_pooling
from bert_jax.model.heads.config import VECTOR_POOLINGS, pool_parts
from bert_jax.model.outputs import MIX, LayerSelection
from bert_jax.model.runtime import COMPUTE_DTYPES
from bert_jax.progress import Reporter, is_watched, print_note
from bert_jax.tasks.batches import Batches, bucketed_batches, sorted_batches
from bert_jax.tasks.inference import Finish, LayerVectors, shared_tokenizer
from bert_jax.tasks.kinds.embedding import EmbeddingTask
from bert_jax.tasks.reading.inputs import Texts
from bert_jax.tasks.registry import from_json
from bert_jax.tasks.rows import Pieces, TokenRows, encode_pieces, spans
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.train import sharding


@dataclass(frozen=True, eq=False)
class EncodedTexts:
    """The rows of R texts, and the words to which their tokens belong."""

    rows: TokenRows
    words: Int64[np.ndarray, "N"]  # a token's word, numbered over all texts; -1 for none
    word_offsets: Int64[np.ndarray, "K"]  # K = R + 1: text r has the words word_offsets[r]:word_offsets[r + 1]


def encode(
    texts: Sequence[str | Texts], tokenizer: Tokenizer, max_length: int, by_word: bool, prompt: str = ""
) -> EncodedTexts:
    """Encodes texts as [CLS] a [SEP], and pairs as [CLS] a [SEP] b [SEP]. A text over max_length loses its end.

    Args:
        by_word: Whether to encode words (separated by white space) separately, so that tokens are known by word;
            otherwise a whole text counts as one word.
        prompt: A text that is put before the first text.
    """
    parts: list[Texts] = [(text,) if isinstance(text, str) else text for text in texts]
    parts = [(prompt + first, *second) for first, *second in parts] if prompt else parts
    # Units are what the tokenizer encodes: words, or whole texts.
    units = [[tokenizer.as_in_text(part.split()) if by_word else [part] for part in text] for text in parts]
    paired = np.array([len(text) > 1 for text in parts])
    both = [text[0] for text in units], [text[1] if len(text) > 1 else [] for text in units]
    counts = np.array([list(map(len, side)) for side in both], np.int64)  # [2, R]: units in first and second texts
    word_offsets = np.cumsum([0, *counts.sum(axis=0)], dtype=np.int64)
    pieces: list[Pieces] = []
    words = []  # by side, the words to which the pieces belong
    # A pair's words are numbered one after another: the second text's follow the first text's.
    for side, starts, sizes in zip(both, (word_offsets[:-1], word_offsets[:-1] + counts[0]), counts, strict=True):
        ids, bounds = tokenizer.of_tasks.encode_many([unit for text in side for unit in text])
        # The offsets of units become offsets of texts.
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
    # A place of -1, which is a special token, selects the last element: no word.
    return EncodedTexts(rows, np.concatenate([*words, [-1]])[places], word_offsets)


def checked_texts(texts: Iterable[Any], pairs: bool = True) -> list[Texts]:
    """Lists a caller's texts as tuples with one string or, with `pairs`, one or two.

    Raises:
        UserError: These are no list of inputs (refuse_other_inputs), or an item is neither a string nor a pair.
    """
    refuse_other_inputs(texts)
    checked = []
    for number, text in enumerate(texts, 1):
        parts = (text,) if isinstance(text, str) else text
        valid = isinstance(text, str) or (pairs and isinstance(text, tuple | list) and len(text) in (1, 2))
        if not valid or not all(isinstance(part, str) for part in parts):
            expected = "a string, or a tuple of two strings" if pairs else "a string"
            raise UserError(f"text {number} is {text!r:.60}; expected {expected}")
        checked.append(tuple(parts))
    return checked


def refuse_other_inputs(texts: Any) -> None:
    """Refuses a single text and other values that are no list of inputs.

    Raises:
        UserError: The value cannot be iterated over, or it is a text, a dictionary or a DataFrame, whose items are
            characters and names of columns.
    """
    # Iterating over these would give names of keys or columns, or characters.
    if isinstance(texts, Mapping):
        received = f"the data is one object with the keys {', '.join(map(str, texts))}"
    elif hasattr(texts, "to_dict") and hasattr(texts, "columns"):
        received = f"the data is a table with the columns {', '.join(map(str, texts.columns))}"
    elif isinstance(texts, str) or not is_iterable(texts):
        received = f"texts is {'the text ' if isinstance(texts, str) else ''}{texts!r:.40}"
    else:
        return
    raise UserError(f"{received}; expected a list of texts, such as one column of a table")


def is_iterable(value: Any) -> bool:
    """Whether a value can be iterated over, also by its indices alone. An array without axes cannot."""
    try:
        iter(value)
    except TypeError:
        return False
    return True


Arrays = dict[str, np.ndarray]
TOKEN_POOLS = ("none", "words")  # other pools give one vector of each text
POOLS = ("none", *VECTOR_POOLINGS, "words")
SHORTEST = 5  # tokens: the special tokens of a pair and a piece of each text


@dataclass(frozen=True)
class VectorSettings:
    """How texts become vectors. For normalize, truncate_dim and cut_first see inference.Finish."""

    pool: str
    normalize: bool
    prompt: str  # put before single texts, and before the first texts of pairs
    max_length: int  # with special tokens
    layers: str = "last"
    truncate_dim: int = 0
    cut_first: bool = False


@dataclass(frozen=True, kw_only=True)
class EncodeOptions(Checked):
    """How vectors are made: of Model.encode and `bert-jax embed`, which describes them."""

    layers: str | int = option("last", "see above", metavar="NAME")
    pool: str = option(
        "",
        "none, cls, mean, max, last, mean_sqrt_len_tokens, weightedmean or words, see above; default: the "
        "checkpoint's, or mean",
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


def vector_settings(loaded: LoadedModel, options: EncodeOptions) -> VectorSettings:
    """Takes the settings of a model's own embedding task, except for the given ones.

    With a pool, only the named prompts of the task are used. By default, a model without such a task has the mean of
    the tokens. With normalize, vectors have length 1 after they are cut; otherwise they are normalized before, as in
    sentence-transformers.

    Raises:
        UserError: A choice does not fit the model.
    """
    layers, pool, truncate_dim = str(options.layers), options.pool, options.truncate_dim
    normalize, prompt, prompt_name = options.normalize, options.prompt, options.prompt_name
    task = _own_task(loaded, pool)
    parts = pool_parts(pool or (task.pooling if task else "mean"))
    width = LayerSelection.parse(layers, loaded.model.layers).width(loaded.model.width) * len(parts)
    prompts = task.named_prompts() if task else {}
    positions = loaded.model.max_positions
    refusals: dict[str, object] = {
        f"--truncate_dim is {truncate_dim}; use 1 to {width} (the width of --layers {layers})": (
            not 0 <= truncate_dim <= width
        ),
        "--prompt and --prompt_name are both given; use one of them": prompt is not None and prompt_name,
        f"--prompt_name is {prompt_name!r}, but the checkpoint's prompts are: {', '.join(prompts) or 'none'}. Use "
        "--prompt TEXT for another one": prompt_name and prompt_name not in prompts,
    }
    # A pool that is given makes other vectors than the task, so that its settings do not fit.
    own = None if pool else task
    cut_first = bool(normalize)
    if own and normalize is None:
        normalize = own.normalize
    if prompt is None:
        prompt = prompts.get(prompt_name) if prompt_name else own.prompt if own else ""
    # A folder in Hugging Face format may state more tokens than the model has positions.
    limit = min(own.max_length, positions) if own else positions
    truncate_dim = truncate_dim or (own.truncate_dim if own else 0)
    pool = pool or (own.pooling if own else "mean")
    max_length = options.max_length or limit
    settings = VectorSettings(pool, bool(normalize), prompt or "", max_length, layers, truncate_dim, cut_first)
    refusals |= _misfits(loaded, settings)
    if message := next((message for message, refused in refusals.items() if refused), ""):
        raise UserError(message)
    return settings


def _misfits(loaded: LoadedModel, settings: VectorSettings) -> dict[str, object]:
    """Returns the messages for settings that do not fit a model, and whether they apply."""
    pool, positions = settings.pool, loaded.model.max_positions
    return {
        f"unknown --pool {pool!r}; choose from {', '.join(POOLS)}": (
            pool not in POOLS and not all(part in VECTOR_POOLINGS for part in pool_parts(pool))
        ),
        f"--max_length is {settings.max_length}; use {SHORTEST} to {positions} (the model's positions), or 0 for the "
        "maximum": not SHORTEST <= settings.max_length <= positions,
        "--layers is mix, whose weights are learned together with a head. Use bert-jax features --layers mix, or "
        "another name of layers": settings.layers == MIX,
        "--pool is cls, but in a causal model the first token sees only itself. Use mean, max or none": (
            "cls" in pool_parts(pool) and loaded.model.causal
        ),
        f"--pool is cls, but {loaded.origin or 'the checkpoint'} adds no [CLS] to a text. Use mean": (
            "cls" in pool_parts(pool) and not loaded.vocabulary.adds_special_tokens
        ),
        f"--normalize, --truncate_dim and prompts are for vectors of texts, but --pool is {pool}. Omit them": (
            pool in TOKEN_POOLS and (settings.normalize or settings.prompt or settings.truncate_dim)
        ),
    }


class Embedder:
    """A model that returns vectors. Construct it with the settings of vector_settings, which checks them."""

    def __init__(
        self, loaded: LoadedModel, settings: VectorSettings, *, batch_size: int = 32, compute_dtype: str = "float32"
    ) -> None:
        self.settings = settings
        own = _own_task(loaded, settings.pool)
        # By the role of a text in retrieval.
        self.prompts = {"query": own.query_prompt if own else "", "document": own.document_prompt if own else ""}
        self.truncated = 0  # texts that were truncated so far
        self._batch_size = batch_size
        self._tokenizer = shared_tokenizer(loaded)
        finish = Finish(settings.pool, settings.normalize, settings.truncate_dim, settings.cut_first)
        self._model = LayerVectors(loaded, [settings.layers], finish, compute_dtype)
        self.width = self._model.widths[settings.layers]

    def vectors(self, texts: Sequence[str | Texts], prompt: str | None = None) -> Float32[np.ndarray, "N W"]:
        """Computes one vector per text in a window. By default, the prompt is in the settings."""
        encoded = self._encode(texts, self.settings.prompt if prompt is None else prompt)
        # Batches have one size, so that few programs serve many windows.
        size = sharding.whole_rows(self._batch_size, self._model.mesh)
        return self._run(encoded, sorted_batches(encoded.rows, size, self.settings.max_length), quiet=True)

    def arrays(self, texts: Sequence[str | Texts]) -> Arrays:
        """Computes `embeddings` and, by the pool, `offsets` and `input_ids` (see `bert-jax embed --help`)."""
        if len(texts):
            encoded = self._encode(texts, self.settings.prompt)
            # All texts are known here, so the batch sizes follow them.
            batches = bucketed_batches(encoded.rows, self._batch_size, self._model.mesh.size, self.settings.max_length)
            embeddings = self._run(encoded, batches, quiet=not is_watched())
            rows, word_offsets = encoded.rows, encoded.word_offsets
            arrays = {"embeddings": embeddings, "offsets": rows.offsets, "input_ids": rows.input_ids}
        else:
            # Without texts, the arrays have no rows, but the usual types and widths.
            word_offsets = np.zeros(1, np.int64)
            arrays = {"embeddings": np.zeros((0, self.width), np.float32), "offsets": word_offsets}
            arrays["input_ids"] = np.zeros(0, np.int32)
        if self.settings.pool == "none":
            return arrays
        if self.settings.pool == "words":
            if empty := int(np.isnan(arrays["embeddings"][:, 0]).sum()):
                print_note(f"{empty} of {len(arrays['embeddings'])} words have no pieces; their rows are NaN")
            return {"embeddings": arrays["embeddings"], "offsets": word_offsets}
        return {"embeddings": arrays["embeddings"]}

    def _encode(self, texts: Sequence[str | Texts], prompt: str) -> EncodedTexts:
        # Only this pool needs to know the words of tokens.
        by_word = self.settings.pool == "words"
        encoded = encode(texts, self._tokenizer, self.settings.max_length, by_word, prompt)
        self.truncated += encoded.rows.truncated
        return encoded

    def _run(self, encoded: EncodedTexts, batches: Batches, quiet: bool) -> Float32[np.ndarray, "rows W"]:
        rows = encoded.rows
        sizes = {"none": len(rows.input_ids), "words": int(encoded.word_offsets[-1])}
        # NaN stays for words without pieces.
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
    if not pool:
        refuse_unknown_pooling(loaded.origin, values)
    # A pooling that bert_jax does not know does not matter if another one is given.
    task = from_json({**values, "pooling": "mean"} if pool else values)
    assert isinstance(task, EmbeddingTask)
    return task


def _store(
    embeddings: Float32[np.ndarray, "rows W"],
    vectors: np.ndarray,
    encoded: EncodedTexts,
    indices: np.ndarray,
    pool: str,
) -> None:
    """Copies a batch's vectors to their rows in embeddings; `indices` are its texts."""
    vectors = vectors[: len(indices)]  # without fillers
    if pool not in TOKEN_POOLS:
        embeddings[indices] = vectors
        return
    lengths = encoded.rows.lengths[indices]
    tokens = spans(encoded.rows.offsets[indices], lengths)
    token_vectors = vectors[np.arange(vectors.shape[1]) < lengths[:, None]]  # without padding
    if pool == "none":
        embeddings[tokens] = token_vectors
        return
    words = encoded.words[tokens]
    pieces, words = token_vectors[words >= 0], words[words >= 0]
    if len(words):
        # The pieces of a word are adjacent, so its mean is the sum between two starts by their number.
        first = np.flatnonzero(np.diff(words, prepend=-1))
        counts = np.diff(first, append=len(words))
        embeddings[words[first]] = np.add.reduceat(pieces, first, axis=0) / counts[:, None]


def report_truncated(model: Embedder, texts: int) -> None:
    """Prints how many texts a model has truncated, if any."""
    if model.truncated:
        print_note(f"{model.truncated} of {texts} texts are longer than {model.settings.max_length} tokens; truncated")


def embed(
    checkpoint: str | Path | LoadedModel, texts: Iterable[Any], *, average: str = "", **options: Any
) -> dict[str, np.ndarray]:
    """Computes the vectors of texts.

    Args:
        texts: Strings, whose tabs are white space, or pairs of strings.
        average: The average in a checkpoint that is given by its path, as in open_checkpoint.
        options: Those of EncodeOptions; by default, the settings of the model.

    Returns:
        `embeddings` and, depending on pool, `offsets` and `input_ids` (see `bert-jax embed --help`).

    Raises:
        UserError: A layer or pool is unknown or does not fit the model, or max_length exceeds its positions. The pool
            cls does not fit causal models, whose first token attends to itself alone, nor vocabularies without [CLS].
    """
    given = from_keywords(EncodeOptions, options)
    several = checked_texts(texts)
    loaded = checkpoint if isinstance(checkpoint, LoadedModel) else open_checkpoint(checkpoint, average)
    model = Embedder(
        loaded, vector_settings(loaded, given), batch_size=given.batch_size, compute_dtype=given.compute_dtype
    )
    arrays = model.arrays(several)
    report_truncated(model, len(several))
    return arrays
