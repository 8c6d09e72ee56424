"""The functions of `import bert_jax`: load a model and use it, fine-tune it on data in memory, pretrain one.

    import bert_jax

    model = bert_jax.load("runs/stars")
    model.encode(["A good book.", "A bad one."])
    model.predict(["A good book."])

`bert_jax/__init__.py` imports this module when one of its names is used, so `import bert_jax` does not wait for jax.
Read `Model` first, then the functions below it. tasks/in_memory.py writes data and models in memory to files that a run
can read.
"""

import dataclasses
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import ml_collections
import numpy as np
from jaxtyping import Float32

from bert_jax import config as config_lib
from bert_jax.config import FinetuneConfig, MeshConfig, ModelConfig, PretrainConfig
from bert_jax.config.options import from_keywords
from bert_jax.errors import UserError, naming_arguments
from bert_jax.interop import export
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.interop.sentence_transformers import refuse_unknown_pooling
from bert_jax.model import layers
from bert_jax.model.bert import Bert, bind
from bert_jax.model.heads.config import VECTOR_POOLINGS
from bert_jax.model.runtime import Runtime
from bert_jax.pretraining import pretrain as run_pretraining
from bert_jax.progress import is_watched, print_note, quietly
from bert_jax.storage.files import IN_MEMORY, as_typed
from bert_jax.storage.location import PREFIX, absolute, location, model_address
from bert_jax.tasks import evaluation, fill_mask, prediction, scoring
from bert_jax.tasks.embedder import TOKEN_POOLS, Embedder, EncodeOptions, checked_texts, vector_settings
from bert_jax.tasks.evaluation import EvaluateOptions
from bert_jax.tasks.fill_mask import Filled
from bert_jax.tasks.finetuning import finetune as run_finetuning
from bert_jax.tasks.in_memory import Table, checkpoint_path, data_file, measured_file, refuse_store
from bert_jax.tasks.inference import shared_tokenizer
from bert_jax.tasks.prediction import Prediction
from bert_jax.tasks.scoring import PairScore
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.train.compilation import enable_compilation_cache
from bert_jax.train.hooks import Hook


class Model:
    """A model with its tokenizer; `load` opens one.

    Attributes:
        loaded: The parameters in host memory, by path, and everything else in the checkpoint. They are copied to the
            devices once.
        result: The content of result.json, if `finetune` returned this model.
        truncated: The number of texts that encode and predict have truncated so far.
    """

    def __init__(self, loaded: LoadedModel, result: Mapping[str, Any] | None = None) -> None:
        self.loaded, self.result = loaded, dict(result or {})
        self.truncated = 0

    def _count_truncated(self, count: int, limit: int) -> None:
        """Adds to `truncated`, and logs the number when it is the first, and when it has another digit."""
        before, self.truncated = self.truncated, self.truncated + count
        if count and (not before or len(str(self.truncated)) > len(str(before))):
            were = "1 text was" if self.truncated == 1 else f"{self.truncated:,} texts so far were"
            print_note(f"{were} longer than {limit} tokens and truncated")

    @property
    def config(self) -> ModelConfig:
        """The architecture."""
        return self.loaded.model

    @property
    def params(self) -> dict[str, Any]:
        """The parameters: float32 NumPy arrays in a dictionary nested by module."""
        return layers.unflatten(dict(self.loaded.params))

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return shared_tokenizer(self.loaded)

    def module(self, params: Mapping[str, Any] | None = None, runtime: Runtime | None = None) -> Bert:
        """Returns the Flax module, for your own code under jit and grad.

        `module.encode(batch)` returns hidden states, and `module.head(NAME)` a head (model/bert.py).

        Args:
            params: Parameters nested as in `params`; by default, the model's own.
        """
        return bind(self.config, self.loaded.heads, dict(params or self.params), runtime or Runtime())

    def with_params(self, params: Mapping[str, Any]) -> "Model":
        """Returns this model with other parameters, e.g. trained by your own loop.

        Raises:
            UserError: `params` has other modules or shapes than `self.params`.
        """
        flat = {path: np.asarray(value, np.float32) for path, value in layers.flatten(params).items()}
        before = self.loaded.params
        if other := sorted(before.keys() ^ flat.keys()):
            verb = "lacks" if other[0] in before else "has"
            raise UserError(f"params {verb} {other[0]}, unlike this model. Give what model.params has")
        for path, value in flat.items():
            if value.shape != before[path].shape:
                raise UserError(f"params: {path} has shape {value.shape}, but in this model {before[path].shape}")
        # Facts about the file that the model came from are not true of these parameters.
        unknown: dict[str, Any] = {"step": 0, "dtype": "float32", "origin": "", "average": ""}
        unknown |= {"training": {}, "metrics": {}, "starts": ()}
        return Model(dataclasses.replace(self.loaded, params=flat, **unknown))

    @naming_arguments()
    def encode(self, texts: str | Iterable[Any], *, quiet: bool = False, **options: Any) -> Float32[np.ndarray, "..."]:
        """Returns a vector [W] of a text, or the vectors [N, W] of several; a tuple is a pair of texts.

        By default, the settings are those of a sentence-transformers folder, otherwise the mean of the last layer.
        Truncated texts are counted in `truncated`; lines at the first, the 10th, the 100th ... report their number.

            model.encode(["A good book.", "A bad one."], pool="cls", normalize=True)

        Args:
            quiet: Whether to show only warnings.
            options: layers, pool, normalize, prompt, prompt_name, max_length, truncate_dim, batch_size and
                compute_dtype, as flags of `bert-jax embed --help`. tasks.embedder.EncodeOptions has types and defaults.

        Raises:
            UserError: As `bert_jax.tasks.embedder.embed` does, and if `pool` gives several vectors for a text.
        """
        given = from_keywords(EncodeOptions, options)
        settings = vector_settings(self.loaded, given)
        if settings.pool in TOKEN_POOLS:
            raise UserError(
                f"pool is {settings.pool!r}, but encode returns one vector of each text. Use one of "
                f"{', '.join(VECTOR_POOLINGS)}, or from bert_jax.tasks.embedder import embed; embed(model.loaded, "
                f"texts, pool={settings.pool!r})"
            )
        several = [texts] if isinstance(texts, str) else checked_texts(texts)
        embedder = Embedder(self.loaded, settings, batch_size=given.batch_size, compute_dtype=given.compute_dtype)
        with quietly(quiet):
            vectors = embedder.arrays(several)["embeddings"]
            self._count_truncated(embedder.truncated, settings.max_length)
        return vectors[0] if isinstance(texts, str) else vectors

    # A str is an Iterable[str], too; the first overload that fits counts.
    @overload
    def fill_mask(self, sentences: str, *, top: int = 5) -> Filled: ...  # type: ignore[overload-overlap]

    @overload
    def fill_mask(self, sentences: Iterable[str], *, top: int = 5) -> list[Filled]: ...

    @naming_arguments()
    def fill_mask(self, sentences: str | Iterable[str], *, top: int = 5) -> Filled | list[Filled]:
        """Returns the `top` most probable tokens at each [MASK] of a sentence, or of several.

        Raises:
            UserError: As `bert_jax.tasks.fill_mask.fill_mask` does.
        """
        several = [sentences] if isinstance(sentences, str) else sentences
        filled = fill_mask.fill_mask(self.loaded, several, top)
        return filled[0] if isinstance(sentences, str) else filled

    @overload
    def score(self, texts: str, *, masking: str = "original", quiet: bool = False) -> float: ...

    @overload
    def score(
        self, texts: Iterable[Any], *, masking: str = "original", quiet: bool = False
    ) -> list[float | PairScore]: ...

    @naming_arguments()
    def score(
        self, texts: str | Iterable[Any], *, masking: str = "original", quiet: bool = False
    ) -> float | PairScore | list[float | PairScore]:
        """Returns the pseudo-log-likelihood of a text, or those of several; a tuple is a pair of texts.

        A pair gives both scores, and `preferred`: the index of the text with the higher score.

            model.score([("The cats sleep.", "The cats sleeps.")])

        Args:
            masking: original, or within_word_l2r (`bert-jax score --help`).
            quiet: Whether to show only warnings.

        Raises:
            UserError: As `bert_jax.tasks.scoring.score` does.
        """
        with quietly(quiet):
            scores = scoring.score(self.loaded, [texts] if isinstance(texts, str) else texts, masking)
        return scores[0] if isinstance(texts, str) else scores

    @overload
    def predict(
        self, inputs: str, *, columns: Mapping[str, str] | None = None, quiet: bool | None = None, **options: Any
    ) -> Prediction: ...

    @overload
    def predict(
        self,
        inputs: Iterable[Any] | Path,
        *,
        columns: Mapping[str, str] | None = None,
        quiet: bool | None = None,
        **options: Any,
    ) -> list[Prediction]: ...

    @naming_arguments()
    def predict(
        self,
        inputs: str | Iterable[Any] | Path,
        *,
        columns: Mapping[str, str] | None = None,
        quiet: bool | None = None,
        **options: Any,
    ) -> Prediction | list[Prediction]:
        """Returns the prediction for a text, or those for several texts or objects, or for a file, in order.

        A prediction is a dictionary; `bert-jax predict --help` lists its fields by kind of task.

        Args:
            columns: Names the columns of text and text_pair in objects or a file, if they are not those of training.
            quiet: Whether to show only warnings; by default, a terminal or notebook shows progress. Truncated texts
                are counted as for encode.
            options: form, words, all_scores, on_error, batch_size, max_length, compute_dtype and null_threshold, as
                flags of `bert-jax predict --help`. tasks.prediction.PredictOptions has types and defaults.

        Raises:
            UserError: As `bert_jax.tasks.prediction.predict` does.
        """
        several = [inputs] if isinstance(inputs, str) else inputs
        count = self._count_truncated
        with quietly(bool(quiet)):
            predictions = prediction.predict(
                self.loaded, several, columns=columns, quiet=quiet, on_truncated=count, **options
            )
        return predictions[0] if isinstance(inputs, str) else predictions

    @naming_arguments()
    def evaluate(
        self, data: Table, *, mesh: MeshConfig | None = None, quiet: bool = False, **options: Any
    ) -> dict[str, Any]:
        """Returns the metrics of a fine-tuned model on labelled data, of a pretrained one on shards, or of retrieval.

            model.evaluate(rows, text="review", label="stars", metrics=["macro_f1"])

        Args:
            data: What `finetune` takes as dev, shards, or a folder in BEIR's layout (`bert-jax evaluate --help`).
            mesh: The number of devices on each mesh axis; by default, rows are sharded over all devices.
            quiet: Whether to show only warnings.
            options: batch_size, compute_dtype, max_rows, pseudo_perplexity, any_part, max_length, truncate_dim,
                skip_self, metrics, positive, null_threshold, label_map, text, text_pair and label, as flags of
                `bert-jax evaluate --help`. tasks.evaluation.EvaluateOptions has types and defaults.

        Raises:
            UserError: As `bert_jax.tasks.evaluation.evaluate` does, and `finetune` for data in memory.
        """
        # The columns decide how data in memory is written to a file; evaluate reads the other options.
        columns = from_keywords(EvaluateOptions, options).columns
        with tempfile.TemporaryDirectory(prefix=IN_MEMORY) as temporary, quietly(quiet):
            file = measured_file(data, Path(temporary) / "data.jsonl", self.loaded, columns)
            return evaluation.evaluate(self.loaded, file, mesh=mesh, **options)

    @naming_arguments()
    def save(
        self,
        folder: str | Path,
        format: str = "hf",
        dtype: str = "",
        language: str = "",
        license: str = "",
        shape: str = "",
        *,
        quiet: bool = False,
    ) -> None:
        """Writes the model to a new folder.

        Args:
            quiet: Whether to show only warnings.
            format: hf, sentence_transformers, orbax, stablehlo or onnx; `bert-jax export --help` describes them.
            dtype: float32, bfloat16 or int8, if the format has a choice.
            language: The languages of the model, for its card, such as tr or tr,en.
            license: The license, for its card, such as apache-2.0.
            shape: For stablehlo: the only batch size and length of the programs, such as 8x128; empty for any.

        Raises:
            UserError: The folder exists, or the format cannot hold the model.
        """
        described = export.with_card(self.loaded, language, license)
        with quietly(quiet):
            export.export_loaded(described, folder, format, dtype=dtype, shape=shape)

    def __repr__(self) -> str:
        config, loaded = self.config, self.loaded
        count = sum(value.size for value in loaded.params.values())
        size = f"{count / 1e6:,.1f} M" if count >= 1e6 else f"{count:,}"
        parts = [f"{config.layers} layers of {config.width}, {size} parameters"]
        parts += [f"{loaded.vocabulary.vocab_size:,} tokens"]
        if loaded.task:
            parts += [f"fine-tuned on {loaded.task['name']} ({loaded.task['kind']})"]
        if loaded.origin:
            parts += [f"from {as_typed(loaded.origin)}"]
        return f"Model({', '.join(parts)})"


def load(source: str | Path, *, average: str = "", quiet: bool = False) -> Model:
    """Opens a workdir, a step in it, an export, a Hugging Face folder, or a model of the Hugging Face Hub by its name.

    A path that exists is never looked up on the Hub. Files of the Hub are kept in its cache, and HF_HOME, HF_ENDPOINT,
    HF_TOKEN and HF_HUB_OFFLINE have their usual meaning.

    Args:
        average: The average of a workdir's parameters to read: ema or last:K (`bert-jax embed --help`).
        quiet: Whether to show only warnings.

    Raises:
        UserError: There is no such checkpoint, `open_checkpoint` cannot open it, or bert_jax lacks the pooling of its
            vectors.
    """
    enable_compilation_cache()
    address = str(model_address(source))
    with quietly(quiet):
        loaded = open_checkpoint(address, average, average_key="average")
        refuse_unknown_pooling(address, loaded.task)
    # The origin stays valid when the program changes its folder, and a path is never taken for a name on the Hub.
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
    quiet: bool = False,
) -> Model:
    """Fine-tunes a model on a table and returns it; `result` of the returned model has the metrics on dev.

        bert_jax.finetune(model, train=rows, dev=rows, text="review", label="stars", overrides={"epochs": 5})

    Args:
        train, dev: A file that `bert-jax finetune --config own` reads, a list of dictionaries, a pandas or polars
            DataFrame, a pyarrow.Table, or a datasets.Dataset.
        text, text_pair, label: The names of its columns; multilabel may have several labels.
        kind: classification, regression, multilabel, tagging, ... (bert-jax recipes own); by default, the file decides.
        workdir: Keeps the run, which the same call then resumes, and data in memory in WORKDIR-data next to it; by
            default, a temporary folder.
        overrides: Configuration keys and their values, such as {"optimizer.learning_rate": 3e-5},
            {"optimizer": {"learning_rate": 3e-5}} or {"task.labels": ["bad", "good"]}.
        quiet: Whether to show only warnings.

    Raises:
        UserError: As `bert_jax.tasks.finetuning.finetune` does; data in memory has no rows, a column of the task has
            values of types that files lack, or the workdir is in a store.
    """
    enable_compilation_cache()
    tables = {name: data for name, data in (("train", train), ("dev", dev)) if data is not None}
    refuse_store(workdir or "", tables.values())
    with tempfile.TemporaryDirectory(prefix=IN_MEMORY) as temporary:
        scratch = Path(temporary)
        folder = location(workdir or scratch / "run")
        columns = {"text": text, "text_pair": text_pair, "label": label, "kind": kind}
        given = {name: value for name, value in columns.items() if not isinstance(value, str | None) or value}
        keys: dict[str, Any] = {f"task.{name}": value for name, value in given.items()}
        if isinstance(model, Model):
            keys["init_from"] = checkpoint_path(model.loaded, scratch / "start")
        else:
            keys["init_from"] = str(model_address(model))
        # The task's configuration says which columns are read, so it comes before the files are written.
        config = config_lib.from_values(FinetuneConfig, "own", keys, overrides or {})
        # Next to the run, because a workdir must hold nothing else.
        kept = Path(f"{folder}-data")
        files: dict[str, Any] = {
            name: data_file(data, kept / f"{name}.jsonl", config.task) for name, data in tables.items()
        }
        config = dataclasses.replace(config, task=dataclasses.replace(config.task, **files))
        with quietly(quiet):
            result = run_finetuning(config, folder, recipe="own")
            # The temporary folder is about to be removed, so no path of it is kept.
            loaded = load(workdir).loaded if workdir else dataclasses.replace(open_checkpoint(folder), origin="")
        return Model(loaded, result)


def pretrain(
    config: str | Path | ml_collections.ConfigDict | PretrainConfig,
    workdir: str | Path,
    *,
    data: str | Path = "",
    overrides: Mapping[str, Any] | None = None,
    hooks: Sequence[Hook] = (),
    quiet: bool = False,
) -> dict[str, Any]:
    """Pretrains a model and returns the content of result.json; `load(workdir)` opens it.

        bert_jax.pretrain("bert_tiny", "runs/tiny", data="shards", overrides={"budget_minutes": 5})

    The same call resumes a run that was stopped.

    Args:
        config: A recipe's name, such as "bert_tiny" or "modernbert:base", its file, or a configuration.
        data: The shards (data.train); build_examples makes them.
        overrides: Configuration keys and their values, as for finetune; for a recipe.
        hooks: Called between steps: bert_jax.train.hooks.Hook, see docs/extending.md.
        quiet: Whether to show only warnings.

    Raises:
        UserError: As `bert_jax.pretraining.pretrain` does.
    """
    enable_compilation_cache()
    keys = {"data.train": str(data)} if data else {}
    recipe = str(config) if isinstance(config, str | Path) else ""
    if isinstance(config, str | Path):
        config = config_lib.from_values(PretrainConfig, recipe, keys, overrides or {})
    elif keys or overrides:
        raise UserError("data and overrides change a recipe; set them in the configuration that you pass")
    with quietly(quiet):
        return run_pretraining(config, workdir, hooks=hooks, recipe=recipe)


@naming_arguments()
def train_tokenizer(*, quiet: bool | None = None, **options: Any) -> Tokenizer:
    """Trains a vocabulary on text, writes it to a folder, and returns it.

        bert_jax.train_tokenizer(input="books/*.txt", output="tokenizer", kind="bpe", vocab_size=8192)

    Args:
        quiet: Whether to show no progress and no remarks on stderr; by default, a terminal or notebook shows them.
        options: The flags of `bert-jax train-tokenizer --help`: input, output, kind, vocab_size, ...
            data_prep.vocabulary.TokenizerOptions has types and defaults.
    """
    # Imported here, because a program that only uses models needs no data preparation.
    from data_prep.vocabulary import TokenizerOptions, train

    return train(from_keywords(TokenizerOptions, _texts(options)), quiet=not is_watched() if quiet is None else quiet)


@naming_arguments()
def build_examples(*, quiet: bool | None = None, **options: Any) -> dict[str, Any]:
    """Makes shards for pretraining from text, and returns the content of manifest.json.

    In a script, call it under `if __name__ == "__main__"` or with workers=1, as multiprocessing requires.

        bert_jax.build_examples(input="books/*.txt", tokenizer="tokenizer", output="shards", seq_len=128)

    Args:
        quiet: As for train_tokenizer.
        options: The flags of `bert-jax build-examples --help`: input, tokenizer, output, seq_len, ...
            data_prep.build_options.BuildOptions has types and defaults.
    """
    from data_prep.build import build
    from data_prep.build_options import BuildOptions

    return build(from_keywords(BuildOptions, _texts(options)), quiet=not is_watched() if quiet is None else quiet)


def _texts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Converts paths to text, as commands have them, and joins a list of input files by commas."""
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    if isinstance(files := plain.get("input"), list | tuple):
        if with_comma := next((str(file) for file in files if "," in str(file)), ""):
            raise UserError(f"input has {with_comma!r}, but commas separate names; write ? in place of its comma")
        plain["input"] = ",".join(map(str, files))
    return plain
