"""The functions of `import bert_jax`: load a model and use it, fine-tune it on data in memory, pretrain one.

    import bert_jax

    model = bert_jax.load("runs/stars")
    model.encode(["A good book.", "A bad one."])
    model.predict(["A good book."])

`bert_jax/__init__.py` imports this module when one of its names is used, so `import bert_jax` does not wait for jax.
Read `Model` first. The functions above it turn data and models in memory into the files that a run reads.
"""

import dataclasses
import datetime
import decimal
import enum
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack, overload

import ml_collections
import numpy as np
from jaxtyping import Float32

from bert_jax import config as config_lib
from bert_jax.config import FinetuneConfig, ModelConfig, PretrainConfig, TaskConfig
from bert_jax.errors import UserError, naming_arguments
from bert_jax.interop import export
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import layers
from bert_jax.model.bert import Bert, bind
from bert_jax.model.runtime import Runtime
from bert_jax.pretraining import pretrain as run_pretraining
from bert_jax.progress import is_watched
from bert_jax.storage.files import IN_MEMORY, as_typed, write_atomic
from bert_jax.storage.hub import PREFIX, model_address
from bert_jax.storage.location import absolute, location, location_address, store_of
from bert_jax.tasks import evaluation, fill_mask, prediction
from bert_jax.tasks.embedder import TEXT_POOLS, Embedder, checked_texts, is_iterable, report_truncated, settings_of
from bert_jax.tasks.evaluation import EvaluateOptions
from bert_jax.tasks.fill_mask import Filled
from bert_jax.tasks.finetuning import finetune as run_finetuning
from bert_jax.tasks.inference import tokenizer_of
from bert_jax.tasks.kinds.choice import CHOICES
from bert_jax.tasks.kinds.question_data import QUESTION_COLUMNS
from bert_jax.tasks.prediction import Prediction, PredictOptions
from bert_jax.tasks.reading.tables import Columns, is_unicode
from bert_jax.tasks.registry import task_of
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.train.compilation import enable_compilation_cache
from bert_jax.train.hooks import Hook
from bert_jax.train.workdir import CHECKPOINTS
from data_prep.build_options import BuildKeywords, TokenizerKeywords

# Data and models in memory, as the files that a run reads: what `bert_jax.finetune` takes.


# A file, rows, a pandas or polars DataFrame (also a lazy one), datasets.Dataset, a pyarrow.Table.
Table = str | Path | Iterable[Mapping[str, Any]] | Any
SETS = "multilabel"  # the kind of task whose label may be a set
# The kinds whose columns are all named (empty: classification or choice), and what others read where none are named.
OF_NAMED_COLUMNS = ("", "classification", "regression", "embedding", SETS)
DEFAULT_COLUMNS = ("tokens", "labels", "spans", "relations", *QUESTION_COLUMNS, "is_impossible", CHOICES)


def checkpoint_path(loaded: LoadedModel, scratch: Path) -> str:
    """The path of a model's checkpoint, or hf:NAME; one whose folder is gone, and an average, are written to `scratch`.

    Only an origin with the prefix hf: is of the Hub, so that no model of the Hub replaces a folder.
    """
    if loaded.origin.startswith(PREFIX) and not loaded.average:
        return loaded.origin
    folder = location(loaded.origin) if loaded.origin and not loaded.average else None
    if folder and (folder / CHECKPOINTS).is_dir():
        folder = folder / CHECKPOINTS / str(loaded.step)  # the run may have saved other steps since
    if folder and folder.exists():
        return str(folder)
    export.export_loaded(loaded, scratch, "orbax")
    return str(scratch)


def refuse_store(workdir: str | Path, tables: Iterable[Table]) -> None:
    """Raises UserError for a workdir in a store and data in memory, which are kept as files next to a workdir."""
    address = location_address(workdir)
    if store_of(address) and not all(isinstance(table, str | Path) for table in tables):
        raise UserError(
            f"workdir is {address}, but data in memory can only be kept next to a workdir on disk. Write the data to "
            "files and give their paths, or use a workdir on disk"
        )


def data_file(table: Table, path: Path, task: TaskConfig) -> str:
    """The file of a table for a task. Data in memory is written to `path` as JSON lines; a datasets.Dataset as Parquet,
    next to `path`, because its classes are numbers, and have names and an order only there.

    A value that JSON does not have is written as its text in Python, in columns that the task does not read. Raises
    UserError for one that it reads, for data that are no rows, and for a column whose name is no text.
    """
    if isinstance(table, str | Path):
        return str(table)
    if isinstance(getattr(table, "features", None), Mapping) and hasattr(table, "to_parquet"):  # datasets.Dataset
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet = str(path.with_suffix(".parquet"))
        table.to_parquet(parquet)
        return parquet
    rows = _rows(table)
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise UserError(
            f"the data is {type(table).__name__} without rows that are dictionaries. Give a file, a list of "
            "dictionaries, a DataFrame, a pyarrow.Table or a datasets.Dataset"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (_line(f"row {number} of the data", row, task) for number, row in enumerate(rows, 1))
    write_atomic(path, (f"{line}\n".encode() for line in lines))  # a refused row leaves the file of an earlier run
    return str(path)


def measured_file(table: Table, path: Path, loaded: LoadedModel, columns: Columns) -> str:
    """The file of a table that a fine-tuned model is measured on; `columns` are those that it was not fine-tuned with.

    Raises UserError as data_file does, and for data in memory of a model that was not fine-tuned.
    """
    if isinstance(table, str | Path):
        return str(table)
    task = task_of(loaded)
    used = columns.filled(task.columns)
    config = TaskConfig(kind=task.kind, text=used.text, text_pair=used.text_pair, label=used.label)
    return data_file(table, path, dataclasses.replace(config, marks=",".join(used.marks)))


def _line(where: str, row: Mapping[Any, Any], task: TaskConfig) -> str:
    labels = _names(task.label)
    read = labels | _names(task.text, task.text_pair, task.marks, task.choices, task.negatives)
    read.update([] if task.kind else [CHOICES], [] if task.kind in OF_NAMED_COLUMNS else DEFAULT_COLUMNS)
    values = {}
    for name, value in row.items():
        if not isinstance(name, str | int):
            raise UserError(
                f"{where} has the column {name!r:.60}, whose name is no text. Rename the columns of the table"
            )
        try:
            values[name] = _plain(value, sets=task.kind == SETS and str(name) in labels)
        except ValueError as error:
            if str(name) in read:
                raise UserError(f"{where}: column {name!r} holds {value!r:.60}; {error}") from None
            values[name] = str(value)
    line = json.dumps(values, ensure_ascii=False)
    if not is_unicode(line):
        raise UserError(
            f"{where} has half of a surrogate pair, which is no character: {line!r:.80}. Correct the text, or omit "
            "the row"
        )
    return line


def _rows(table: Any) -> list[Any]:
    """The rows of a DataFrame, or the items of any other table; none of what is no table."""
    # Of the type, as columns of pandas are attributes of the DataFrame.
    if hasattr(type(table), "collect"):  # a LazyFrame of polars
        table = table.collect()
    if hasattr(type(table), "to_pylist"):  # pyarrow
        return list(table.to_pylist())
    if hasattr(table, "columns") and hasattr(table, "to_dicts"):  # polars
        return list(table.to_dicts())
    if hasattr(table, "columns") and hasattr(table, "to_dict"):  # pandas
        return list(table.to_dict("records"))
    return list(table) if is_iterable(table) else []


def _names(*columns: str) -> set[str]:
    """The names in keys that each name one column, or several separated by commas."""
    return {name.strip() for names in columns for name in names.split(",")} - {""}


def _plain(value: Any, sets: bool = False) -> Any:
    """A value as JSON has it: what is missing as null, bytes and dates as texts, arrays as lists, and with `sets` also
    a set as one. Raises ValueError, which says what is expected, for other values."""
    if getattr(getattr(value, "dtype", None), "kind", "") == "M":  # dates of NumPy, which tolist makes numbers
        value = value.astype(str)
    for method in ("tolist", "item"):  # of NumPy, JAX and PyTorch
        if hasattr(value, method) and type(found := getattr(value, method)()) is not type(value):
            return _plain(found, sets)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str | int) for key in value):
            raise ValueError("expected keys that are texts")
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, set | frozenset):
        if not sets:
            raise ValueError("a set has no order, so give a list")
        return sorted(map(_plain, value), key=str)
    missing = isinstance(value, float | decimal.Decimal) and value != value
    if value is None or missing or type(value).__name__ in ("NAType", "NaTType"):  # of pandas
        return None
    if isinstance(value, bytes | bytearray):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise ValueError("the bytes are not UTF-8, so give a text") from None
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, datetime.date | datetime.time | decimal.Decimal | enum.Enum):
        return str(value)
    raise ValueError("expected a text, a number, true or false, or a list or dictionary of these")


# The functions of `import bert_jax`: load a model and use it, fine-tune it on data in memory, pretrain one.
#
#     import bert_jax
#
#     model = bert_jax.load("runs/stars")
#     model.encode(["A good book.", "A bad one."])
#     model.predict(["A good book."])
#
# `bert_jax/__init__.py` imports this module when one of its names is used, so `import bert_jax` does not wait for jax.


class Model:
    """A model and its tokenizer, with parameters that are copied to the devices once. `load` opens one.

    loaded   the parameters in host memory, by path, and all that the checkpoint says of them
    result   of a model that `finetune` returns: the content of result.json
    """

    def __init__(self, loaded: LoadedModel, result: Mapping[str, Any] | None = None) -> None:
        self.loaded, self.result = loaded, dict(result or {})

    @property
    def config(self) -> ModelConfig:
        """The architecture."""
        return self.loaded.model

    @property
    def params(self) -> dict[str, Any]:
        """The parameters, float32 arrays of NumPy in a dictionary nested by module."""
        return layers.unflatten(dict(self.loaded.params))

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the checkpoint."""
        return tokenizer_of(self.loaded)

    def module(self, params: Mapping[str, Any] | None = None, runtime: Runtime | None = None) -> Bert:
        """The Flax module with these parameters (by default its own), for code of yours under jit and grad.

        `module.encode(batch)` returns hidden states, and `module.head(NAME)` a head (model/bert.py).
        """
        return bind(self.config, self.loaded.heads, dict(params or self.params), runtime or Runtime())

    def with_params(self, params: Mapping[str, Any]) -> "Model":
        """Returns this model with other parameters, nested as in `params`: those that a loop of yours has trained.

        Raises UserError for other modules, or shapes.
        """
        flat = {path: np.asarray(value, np.float32) for path, value in layers.flatten(params).items()}
        before = self.loaded.params
        if other := sorted(before.keys() ^ flat.keys()):
            what = "lacks" if other[0] in before else "has"
            raise UserError(f"params {what} {other[0]}, unlike this model. Give what model.params has")
        for path, value in flat.items():
            if value.shape != before[path].shape:
                raise UserError(f"params: {path} has shape {value.shape}, but in this model {before[path].shape}")
        # What is known of the file that the model came from is not known of these.
        unknown = dataclasses.replace(
            self.loaded, step=0, dtype="float32", origin="", average="", training={}, metrics={}
        )
        return Model(dataclasses.replace(unknown, params=flat))

    @naming_arguments()
    def encode(
        self,
        texts: str | Iterable[Any],
        *,
        layers: str | int = "last",
        pool: str = "",
        normalize: bool | None = None,
        prompt: str | None = None,
        prompt_name: str = "",
        max_length: int = 0,
        truncate_dim: int = 0,
        batch_size: int = 32,
        compute_dtype: str = "float32",
    ) -> Float32[np.ndarray, "..."]:
        """Returns a vector [W] of a text, or the vectors [N, W] of several; a tuple is a pair of texts.

        The settings are those of `bert-jax embed --help`; by default those of a sentence-transformers folder, otherwise
        the mean of the last layer. The number of truncated texts is printed. Raises UserError as
        `bert_jax.commands.embed.embed` does, and for a pool of more than one vector of each text.
        """
        found = settings_of(
            self.loaded,
            layers=layers,
            pool=pool,
            normalize=normalize,
            prompt=prompt,
            prompt_name=prompt_name,
            max_length=max_length,
            truncate_dim=truncate_dim,
        )
        if found.pool not in TEXT_POOLS:
            raise UserError(
                f"pool is {found.pool!r}, but encode returns one vector of each text. Use {', '.join(TEXT_POOLS)}, or "
                f"from bert_jax.commands.embed import embed; embed(model.loaded, texts, pool={found.pool!r})"
            )
        several = [texts] if isinstance(texts, str) else checked_texts(texts)
        embedder = Embedder(self.loaded, found, batch_size=batch_size, compute_dtype=compute_dtype)
        vectors = embedder.arrays(several)["embeddings"]
        report_truncated(embedder, len(several))
        return vectors[0] if isinstance(texts, str) else vectors

    @overload  # a str is an Iterable[str], too; the first one that fits counts
    def fill_mask(self, sentences: str, *, top: int = 5) -> Filled: ...  # type: ignore[overload-overlap]

    @overload
    def fill_mask(self, sentences: Iterable[str], *, top: int = 5) -> list[Filled]: ...

    @naming_arguments()
    def fill_mask(self, sentences: str | Iterable[str], *, top: int = 5) -> Filled | list[Filled]:
        """Returns the `top` most probable tokens at each [MASK]: fill_mask.Filled of a sentence, or a list of them.

        Raises UserError as `bert_jax.tasks.fill_mask.fill_mask` does.
        """
        several = [sentences] if isinstance(sentences, str) else sentences
        filled = fill_mask.fill_mask(self.loaded, several, top)
        return filled[0] if isinstance(sentences, str) else filled

    @overload
    def predict(self, inputs: str, **options: Unpack[PredictOptions]) -> Prediction: ...

    @overload
    def predict(self, inputs: Iterable[Any] | Path, **options: Unpack[PredictOptions]) -> list[Prediction]: ...

    @naming_arguments()
    def predict(
        self, inputs: str | Iterable[Any] | Path, **options: Unpack[PredictOptions]
    ) -> Prediction | list[Prediction]:
        """Returns the prediction of a text, or those of several texts or objects, or of a file, in order.

        A prediction is a dictionary; `bert-jax predict --help` lists its fields by kind of task. The options (form,
        words, all_scores, on_error, batch_size, max_length, compute_dtype, columns, null_threshold) are those
        of `bert_jax.tasks.prediction.predict`, which says what is refused.
        """
        several = [inputs] if isinstance(inputs, str) else inputs
        found = prediction.predict(self.loaded, several, **options)
        return found[0] if isinstance(inputs, str) else found

    @naming_arguments()
    def evaluate(
        self,
        data: Table,
        *,
        text: str = "",
        text_pair: str = "",
        label: str = "",
        **options: Unpack[EvaluateOptions],
    ) -> dict[str, Any]:
        """Returns the metrics of a fine-tuned model on labelled data, of a pretrained one on shards, or of retrieval.

        data         what `finetune` takes as dev, shards, or a folder in BEIR's layout (`bert-jax evaluate --help`)
        text, text_pair, label   the names of its columns, if they are not those of fine-tuning

        The options (batch_size, compute_dtype, max_rows, metrics, positive, label_map, max_length, truncate_dim,
        null_threshold, skip_self, mesh, pseudo_perplexity) are those of `bert_jax.tasks.evaluation.evaluate`, which
        says what is refused; so are data in memory as by `finetune`.
        """
        columns = Columns(text, text_pair, label)
        with tempfile.TemporaryDirectory(prefix=IN_MEMORY) as temporary:
            file = measured_file(data, Path(temporary) / "data.jsonl", self.loaded, columns)
            given = columns if columns != Columns() else None
            return evaluation.evaluate(self.loaded, file, columns=given, **options)

    @naming_arguments()
    def save(self, folder: str | Path, format: str = "hf", dtype: str = "") -> None:
        """Writes the model to a new folder: hf, sentence_transformers, orbax, stablehlo or onnx (`export --help`).

        dtype    float32, bfloat16 or int8, by format; see there

        Raises UserError for a folder that exists, and for a model that the format cannot hold.
        """
        export.export_loaded(self.loaded, folder, format, dtype=dtype)

    def __repr__(self) -> str:
        config, loaded = self.config, self.loaded
        count = sum(value.size for value in loaded.params.values())
        size = f"{count / 1e6:,.1f} M" if count >= 1e6 else f"{count:,}"
        name = f"{config.layers} layers of {config.width}, {size} parameters"
        task = f", fine-tuned on {loaded.task['name']} ({loaded.task['kind']})" if loaded.task else ""
        where = f", from {as_typed(loaded.origin)}" if loaded.origin else ""
        return f"Model({name}, {loaded.vocabulary.vocab_size:,} tokens{task}{where})"


def load(source: str | Path, *, average: str = "") -> Model:
    """Opens a workdir, a step in it, an export, a Hugging Face folder, or a model of the Hugging Face Hub by its name.

    A path that exists is never looked up on the Hub. Files of the Hub are kept in its cache, and HF_HOME, HF_ENDPOINT,
    HF_TOKEN and HF_HUB_OFFLINE have their usual meaning. average: see open_checkpoint. Raises UserError where there is
    no such checkpoint, and as open_checkpoint does.
    """
    enable_compilation_cache()
    address = str(model_address(source))
    loaded = open_checkpoint(address, average, average_key="average")
    # An origin means the same in any folder that the program changes to, and a path is never that of a Hub's model.
    origin = address if address.startswith(PREFIX) else str(absolute(location(loaded.origin)))
    return Model(dataclasses.replace(loaded, origin=origin))


def finetune(
    model: Model | str | Path,
    train: Table,
    dev: Table | None = None,
    *,
    text: str = "",
    label: str | Iterable[str] = "",
    text_pair: str = "",
    kind: str = "",
    workdir: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Model:
    """Fine-tunes a model on a table and returns it; `result` of the returned model has the metrics on dev.

    train, dev   a file that `bert-jax finetune --config own` reads, a list of dictionaries, a pandas or polars
                 DataFrame, a pyarrow.Table, or a datasets.Dataset
    text, text_pair, label   the names of its columns, of which some kinds need none; multilabel may have several labels
    kind         classification, regression, multilabel, tagging, ... (bert-jax recipes own); empty: by the file
    workdir      keeps the run, which the same call then resumes; None: a temporary folder
    overrides    configuration keys and their values, such as {"epochs": 5, "optimizer.learning_rate": 3e-5},
                 {"optimizer": {"learning_rate": 3e-5}} or {"task.labels": ["bad", "good"]}

    Raises UserError as `bert_jax.tasks.finetuning.finetune` does, for data in memory that are no rows or have values of
    other types than files in the columns of the task, and for data in memory with a workdir in a store. A workdir gets
    a neighbour, WORKDIR-data, with the data that is in memory.
    """
    enable_compilation_cache()
    refuse_store(workdir or "", [train, *([] if dev is None else [dev])])
    with tempfile.TemporaryDirectory(prefix=IN_MEMORY) as temporary:
        scratch = Path(temporary)
        folder = location(workdir or scratch / "run")
        kept = Path(f"{folder}-data")  # next to the run, because a workdir must be its own
        tables = {name: data for name, data in (("train", train), ("dev", dev)) if data is not None}
        columns = {"text": text, "text_pair": text_pair, "label": label, "kind": kind}
        given = {name: value for name, value in columns.items() if not isinstance(value, str | None) or value}
        keys: dict[str, Any] = {f"task.{name}": value for name, value in given.items()}
        keys["init_from"] = _path_of(model, scratch / "start")
        config = config_lib.load(FinetuneConfig, config_lib.read_values("own", keys, overrides or {}))
        files: dict[str, Any] = {
            name: data_file(data, kept / f"{name}.jsonl", config.task) for name, data in tables.items()
        }
        config = dataclasses.replace(config, task=dataclasses.replace(config.task, **files))
        result = run_finetuning(config, folder)
        # A temporary folder is about to be removed, so no path of it is kept.
        loaded = load(workdir).loaded if workdir else dataclasses.replace(open_checkpoint(folder), origin="")
        return Model(loaded, result)


def pretrain(
    config: str | Path | ml_collections.ConfigDict | PretrainConfig,
    workdir: str | Path,
    *,
    data: str | Path = "",
    overrides: Mapping[str, Any] | None = None,
    hooks: Sequence[Hook] = (),
) -> dict[str, Any]:
    """Pretrains a model and returns the content of result.json; `load(workdir)` opens it.

    config      a recipe by its name, such as "bert_tiny" or "modernbert:base", its file, or a configuration
    data        the shards (data.train); build_examples makes them
    overrides   configuration keys and their values, such as {"budget_minutes": 5}, as for finetune; for a recipe
    hooks       what else happens between steps: bert_jax.train.hooks.Hook, see docs/extending.md

    The same call resumes a run that was stopped. Raises UserError as `bert_jax.pretraining.pretrain` does.
    """
    enable_compilation_cache()
    keys = {"data.train": str(data)} if data else {}
    if isinstance(config, str | Path):
        config = config_lib.read_values(str(config), keys, overrides or {})
    elif keys or overrides:
        raise UserError("data and overrides change a recipe; set them in the configuration that you pass")
    return run_pretraining(config, workdir, hooks=hooks)


@naming_arguments()
def train_tokenizer(*, quiet: bool | None = None, **options: Unpack[TokenizerKeywords]) -> Tokenizer:
    """Trains a vocabulary on text, writes it to a folder, and returns it.

    quiet     whether to show no progress and no remarks on stderr; by default they are shown in terminals and notebooks
    options   input, output, kind, vocab_size, ...: the flags of `bert-jax train-tokenizer --help`, whose types and
              defaults are those of data_prep.vocabulary.TokenizerOptions
    """
    from data_prep.flags import from_keywords
    from data_prep.vocabulary import TokenizerOptions, train

    return train(from_keywords(TokenizerOptions, _texts(options)), quiet=not is_watched() if quiet is None else quiet)


@naming_arguments()
def build_examples(*, quiet: bool | None = None, **options: Unpack[BuildKeywords]) -> dict[str, Any]:
    """Makes shards for pretraining from text, and returns the content of manifest.json.

    quiet     as for train_tokenizer
    options   input, tokenizer, output, seq_len, objective, ...: the flags of `bert-jax build-examples --help`, whose
              types and defaults are those of data_prep.build_options.BuildOptions

    In a script, call it under `if __name__ == "__main__"` or with workers=1, as multiprocessing requires.
    """
    from data_prep.build import build
    from data_prep.build_options import BuildOptions
    from data_prep.flags import from_keywords

    return build(from_keywords(BuildOptions, _texts(options)), quiet=not is_watched() if quiet is None else quiet)


def _texts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as commands have them: paths as text, those of a list of files with commas between them."""
    found = dict(options)
    for name, value in options.items():
        if isinstance(value, Path):
            found[name] = str(value)
        elif name == "input" and isinstance(value, list | tuple):
            if with_comma := next((str(one) for one in value if "," in str(one)), ""):
                raise UserError(f"input has {with_comma!r}, but commas separate names; write ? in place of its comma")
            found[name] = ",".join(map(str, value))
        elif isinstance(value, list):
            found[name] = tuple(value)
    return found


def _path_of(model: Model | str | Path, scratch: Path) -> str:
    return checkpoint_path(model.loaded, scratch) if isinstance(model, Model) else str(model_address(model))
