"""`import bert_jax`: its public names, and models that are loaded, used, fine-tuned and saved from Python."""

import ast
import dataclasses
import datetime
import decimal
import errno
import fnmatch
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from extensions.parameter_norms import ParameterNorms
from huggingface_hub.errors import OfflineModeIsEnabled
from random_checkpoints import odd_config, random_checkpoint
from store_emulators import HubHandler, serving

import bert_jax
from bert_jax import api
from bert_jax.config import AutoTaskConfig, FinetuneConfig, TaggingConfig, TaskConfig, load
from bert_jax.errors import UserError
from bert_jax.interop import export
from bert_jax.interop.export import export_loaded
from bert_jax.model.heads.config import Heads
from bert_jax.tasks import finetuning, in_memory, registry
from bert_jax.tasks.embedder import embed
from bert_jax.tasks.fill_mask import fill_mask
from bert_jax.tasks.prediction import predict

ROWS = [{"review": f"a {word} cat sat .", "stars": stars} for word, stars in (("good", "five"), ("bad", "one"))] * 4
TEXTS = [row["review"] for row in ROWS]
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Hugging Face folder of a masked language model with random parameters."""
    folder = tmp_path_factory.mktemp("model") / "tiny-model"
    heads = Heads(mlm=True, next_sentence=True, pooler=True)
    export_loaded(random_checkpoint(tmp_path_factory.mktemp("words"), odd_config(layers=2), heads), folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> bert_jax.Model:
    return bert_jax.load(folder)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> bert_jax.Model:
    """A fine-tuned model with random parameters."""
    task = {"name": "own", "kind": "classification", "labels": ["one", "five"], "max_length": 16}
    heads = Heads(pooler=True, classes=2)
    return bert_jax.Model(random_checkpoint(tmp_path_factory.mktemp("words"), odd_config(layers=1), heads, task=task))


def test_the_public_names_are_those_that_are_documented():
    documented = set(re.findall(r"^## `bert_jax\.(\w+)", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE))
    assert set(bert_jax.__all__) == documented
    for name in bert_jax.__all__:
        assert callable(getattr(bert_jax, name)) and name in dir(bert_jax), name
    with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
        bert_jax.nonesuch  # noqa: B018 (it raises)


def test_importing_does_not_import_jax_or_numpy():
    code = "import sys, bert_jax; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_no_public_name_is_also_a_module():
    """Importing such a module would replace the function, because it sets the attribute of its package."""
    assert not {path.stem for path in (ROOT / "bert_jax").iterdir()} & set(bert_jax.__all__)


def test_a_model_computes_what_the_commands_compute(model, folder):
    texts = ["the cat sat", ("a dog .", "the mat")]
    found = model.encode(texts, layers="1", pool="max")
    np.testing.assert_array_equal(found, embed(folder, texts, layers="1", pool="max")["embeddings"])
    np.testing.assert_array_equal(found, model.encode(iter(texts), layers=1, pool="max"))
    np.testing.assert_allclose(model.encode("the cat sat", layers="1", pool="max"), found[0], atol=1e-6)
    sentences = ["the [MASK] sat", "a [MASK] [MASK]"]
    assert model.fill_mask(sentences, top=3) == fill_mask(folder, sentences, 3)
    assert model.fill_mask(sentences[0], top=3) == fill_mask(folder, sentences[:1], 3)[0]


def test_truncated_texts_are_counted_and_not_reported_at_each_request(folder, capsys):
    service = bert_jax.load(folder, quiet=True)
    for _ in range(12):
        service.encode(["good " * 30, "good"], max_length=8)
    assert service.truncated == 12
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "1 text was longer than 8 tokens and truncated",
        "10 texts so far were longer than 8 tokens and truncated",
    ]
    service.encode(["good " * 30] * 90, max_length=8, quiet=True)
    assert service.truncated == 102 and capsys.readouterr().err == ""


def test_every_function_that_prints_can_be_quiet():
    functions = [bert_jax.load, bert_jax.finetune, bert_jax.pretrain, bert_jax.train_tokenizer, bert_jax.build_examples]
    functions += [bert_jax.Model.encode, bert_jax.Model.predict, bert_jax.Model.evaluate, bert_jax.Model.save]
    for function in functions:
        assert "quiet" in inspect.signature(function).parameters, function


def test_a_quiet_run_prints_nothing_but_warnings(model, tmp_path, capfd):
    rows = [{"review": f"good {index % 7}", "stars": "ab"[index % 2]} for index in range(40)]
    keys = {"epochs": 1, "batch_size": 8, "task.max_length": 8, "task.dev_share": 0.0}
    tuned = bert_jax.finetune(model, rows, text="review", label="stars", overrides=keys, quiet=True)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("warning: no dev file, and task.dev_share=0")
    assert all(line.startswith("warning: ") for line in lines)
    tuned.predict(["good"] * 3, quiet=True)
    tuned.evaluate(rows, quiet=True)
    assert capfd.readouterr().err == ""


def test_encode_reports_truncated_texts_and_advises_a_call_that_works(model, capsys):
    longer = "the cat sat " * 20
    model.encode([longer, "a dog"], max_length=8)
    assert "1 text was longer than 8 tokens and truncated" in capsys.readouterr().err
    model.encode(["a dog"])
    assert not capsys.readouterr().err
    with pytest.raises(UserError, match="one vector of each text") as refused:
        model.encode([longer], pool="words")
    [code] = re.findall(r"from bert_jax.*", str(refused.value))
    exec(code, {"model": model, "texts": ["the cat sat"]})


def test_the_types_of_a_model_s_methods_are_exact():
    source = ast.parse((ROOT / "bert_jax" / "api.py").read_text())
    returned: dict[str, list[str]] = {"predict": [], "fill_mask": [], "score": []}
    for node in ast.walk(source):
        if isinstance(node, ast.FunctionDef) and [*map(ast.unparse, node.decorator_list)] == ["overload"]:
            returned[node.name].append(ast.unparse(node.returns))
    assert returned == {
        "predict": ["Prediction", "list[Prediction]"],
        "fill_mask": ["Filled", "list[Filled]"],
        "score": ["float", "list[float | PairScore]"],
    }


def test_a_model_is_measured_on_data_in_memory_as_on_a_file(classifier, tmp_path):
    file = tmp_path / "dev.csv"
    file.write_text("review,stars\n" + "".join(f"{row['review']},{row['stars']}\n" for row in ROWS))
    columns = {"text": "review", "label": "stars"}
    found = classifier.evaluate(file, **columns, metrics=("accuracy",))
    assert found["counts"]["data"]["examples"] == len(ROWS) and 0 <= found["accuracy"] <= 1
    assert classifier.evaluate(ROWS, **columns, metrics=("accuracy",)) == found
    assert classifier.evaluate(Frame(), **columns, metrics=("accuracy",)) == found
    correct = [row["stars"] == one["label"] for row, one in zip(ROWS, classifier.predict(TEXTS), strict=True)]
    assert found["accuracy"] == pytest.approx(np.mean(correct))


def test_a_pretrained_model_is_measured_on_shards_and_not_on_rows(model):
    with pytest.raises(UserError, match="was not fine-tuned for a task"):
        model.evaluate(ROWS, text="review", label="stars")
    with pytest.raises(UserError, match="nowhere"):
        model.evaluate("nowhere")


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda model: model.fill_mask("a [MASK]", top=0), r"^top is 0; use 1 to"),
        (lambda model: model.score(["a"], masking="none"), r"^masking is 'none'; choose from original, within"),
        (lambda model: model.encode(["a"], truncate_dim=99), r"^truncate_dim is 99; use 1 to 20 .*of layers last\)"),
        (lambda model: model.encode(["a"], layers="mix"), r"^layers is mix, .* bert-jax features --layers mix"),
        (lambda model: model.encode(["a"], batch_size=0), r"^batch_size is 0\. Use"),
        (lambda model: model.save("folder", format="odd"), r"^unknown format odd;"),
        (
            lambda _: bert_jax.train_tokenizer(input="*.txt", output="words", vocab_size=0),
            r"^vocab_size is 0\. Use a positive number",
        ),
    ],
)
def test_mistakes_name_arguments_and_not_flags(model, call, message):
    with pytest.raises(bert_jax.UserError, match=message):
        call(model)


def test_a_second_call_compiles_and_uploads_nothing(model, classifier, monkeypatch):
    def calls() -> None:
        model.encode(["the cat sat"])
        model.fill_mask("the [MASK] sat")
        classifier.predict(["a dog", "the cat sat"])

    def never(*_: Any) -> None:
        raise AssertionError("a tokenizer was built again")

    def other_numbers() -> None:
        """Of sentences, and of masks in one: 4 and 4, as 3 and 3 are padded to."""
        model.fill_mask(["the [MASK] sat"] * 3 + ["[MASK] [MASK] [MASK] [MASK]"])

    model.fill_mask(["the [MASK] sat", "a [MASK]", "[MASK] [MASK] [MASK]"])
    calls()
    assert model.tokenizer is model.tokenizer
    monkeypatch.setattr("bert_jax.tokenization.tokenizer.Tokenizer.__init__", never)
    uploaded = []
    put = jax.device_put
    monkeypatch.setattr(
        jax, "device_put", lambda value, *rest, **more: uploaded.append(value) or put(value, *rest, **more)
    )
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patched:
        compiled = []
        patched.setattr("logging.Logger.warning", lambda self, message, *rest, **_: compiled.append(message % rest))
        calls()
        other_numbers()
    assert not [line for line in compiled if "ompil" in line]
    assert sum(np.size(leaf) for leaf in jax.tree.leaves(uploaded)) < 1000  # batches, and no parameters


def test_a_model_says_what_it_is_and_its_parts_are_reachable(model, folder):
    where = re.escape(str(folder))
    assert re.fullmatch(rf"Model\(2 layers of 20, [\d,]+ parameters, 131 tokens, from {where}\)", repr(model))
    assert jax.tree.leaves(model.params)[0].dtype == np.float32
    ids = model.tokenizer.encode("the cat sat")
    row = jnp.array([[model.tokenizer.cls_id, *ids, model.tokenizer.sep_id]], jnp.int32)
    ones, positions = jnp.ones_like(row), jnp.arange(row.size, dtype=jnp.int32)[None]
    batch = SimpleNamespace(input_ids=row, segment_ids=0 * ones, sequence_ids=ones, positions=positions)

    @jax.jit
    def mean(params: Any) -> jax.Array:
        return model.module(params).encode(batch).last.mean(axis=1)

    np.testing.assert_allclose(mean(model.params)[0], model.encode("the cat sat", pool="mean"), atol=1e-5)
    gradient = jax.grad(lambda params: mean(params).sum())(model.params)
    assert jax.tree.structure(gradient) == jax.tree.structure(model.params)


def test_a_model_takes_the_parameters_of_a_loop(model, tmp_path):
    doubled = jax.tree.map(lambda leaf: jnp.asarray(leaf) * 2, model.params)
    changed = model.with_params(doubled)
    assert not np.allclose(changed.encode("the cat"), model.encode("the cat"))
    changed.save(tmp_path / "saved", "orbax")
    np.testing.assert_allclose(
        bert_jax.load(tmp_path / "saved").encode("the cat"), changed.encode("the cat"), atol=1e-6
    )
    assert "from" not in repr(changed)
    table = model.params["embeddings"]["token"]["table"]
    with pytest.raises(UserError, match=r"params lacks embeddings/"):
        model.with_params({name: part for name, part in model.params.items() if name != "embeddings"})
    with pytest.raises(UserError, match=r"embeddings/token/table has shape \(255, 20\), but in this model \(256, 20\)"):
        model.with_params({**model.params, "embeddings": {**model.params["embeddings"], "token": {"table": table[1:]}}})


@pytest.mark.slow
def test_the_training_loop_of_the_page_lowers_its_loss(model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # where the page saves the model
    page = (ROOT / "docs" / "python.md").read_text().replace("(texts, length=32)", "(texts, length=16)")
    [code] = re.findall(r"^    import jax, .*?(?=^\S)", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"model": model}
    exec(textwrap.dedent(code), names)
    batches = [names["rows"]([text]) for text in ("the cat sat", "a cat was sitting")]
    assert names["value"] < jax.jit(names["loss"])(model.params, *batches)


class Frame:
    """What bert_jax uses of a pandas DataFrame."""

    columns = ("review", "stars")

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def to_dict(self, kind: str) -> list[dict[str, Any]]:
        assert kind == "records"
        return [dict(row) for row in ROWS]


class Polars:
    """What bert_jax uses of a DataFrame of polars, whose to_dict gives columns."""

    columns = Frame.columns

    def to_dict(self, *, as_series: bool = True) -> dict[str, Any]:
        raise AssertionError("these are no rows")

    def to_dicts(self) -> list[dict[str, Any]]:
        return [dict(row) for row in ROWS]


class Lazy:
    """What bert_jax uses of a LazyFrame of polars."""

    def collect(self) -> Polars:
        return Polars()


class Tensor:
    """What bert_jax uses of a tensor of PyTorch."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def tolist(self) -> Any:
        return self.value


class Dataset:
    """What bert_jax uses of a datasets.Dataset, whose classes are numbers with names in the schema of its files."""

    features: Mapping[str, Any] = {"review": SimpleNamespace(), "stars": SimpleNamespace(names=["five", "one"])}

    def to_parquet(self, path: str) -> None:
        rows = [{"review": row["review"], "stars": ["five", "one"].index(row["stars"])} for row in ROWS]
        features = {"stars": {"names": ["five", "one"], "_type": "ClassLabel"}}
        described = {"huggingface": json.dumps({"info": {"features": features}})}
        pq.write_table(pa.Table.from_pylist(rows).replace_schema_metadata(described), path)


def test_finetune_starts_from_the_step_or_the_average_that_a_model_holds(tmp_path):
    loaded = random_checkpoint(tmp_path / "words", odd_config(layers=1))
    export.write(loaded, tmp_path / "run")
    [step] = (tmp_path / "run" / "checkpoints").iterdir()
    opened = bert_jax.load(tmp_path / "run")
    assert in_memory.checkpoint_path(opened.loaded, tmp_path / "unused") == str(step)
    changed = {path: value + 1 for path, value in opened.loaded.params.items()}
    average = bert_jax.Model(dataclasses.replace(opened.loaded, params=changed, average="ema"))
    other = bert_jax.Model(dataclasses.replace(opened.loaded, params=changed, step=opened.loaded.step + 1))  # is gone
    for name, model in (("average", average), ("other", other)):
        written = in_memory.checkpoint_path(model.loaded, tmp_path / name)
        assert written == str(tmp_path / name)
        for path, value in bert_jax.load(written).loaded.params.items():
            np.testing.assert_array_equal(value, changed[path], err_msg=path)


def test_the_origin_of_a_model_is_neither_a_folder_of_that_name_elsewhere_nor_a_model_of_the_hub(
    folder, tmp_path, monkeypatch
):
    def download(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing is looked up on the Hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    shutil.copytree(folder, tmp_path / "org" / "tiny")
    monkeypatch.chdir(tmp_path)
    opened = bert_jax.load("org/tiny")
    assert repr(opened).endswith("from org/tiny)")
    monkeypatch.chdir(tmp_path / "org")
    assert repr(opened).endswith("from tiny)")
    shutil.copytree(folder, tmp_path / "org" / "org" / "tiny")  # another one
    assert in_memory.checkpoint_path(opened.loaded, tmp_path / "unused") == str(tmp_path / "org" / "tiny")
    shutil.rmtree(tmp_path / "org" / "tiny")
    assert in_memory.checkpoint_path(opened.loaded, tmp_path / "written") == str(tmp_path / "written")
    assert (tmp_path / "written").is_dir()


@pytest.mark.parametrize("kept", [False, True])
def test_only_a_run_that_is_kept_is_the_origin_of_its_model(model, tmp_path, monkeypatch, kept):
    def run(config: FinetuneConfig, workdir: Path, **options: object) -> dict[str, Any]:
        assert json.loads(Path(config.task.train).read_text().splitlines()[0]) == ROWS[0]
        export.write(model.loaded, workdir)
        return {"start": config.init_from}

    monkeypatch.setattr(api, "run_finetuning", run)
    monkeypatch.chdir(tmp_path)
    tuned = bert_jax.finetune(model, ROWS, text="review", label="stars", workdir="runs/a" if kept else None)
    assert tuned.result["start"] == model.loaded.origin
    assert tuned.loaded.origin == (str(tmp_path / "runs" / "a") if kept else "")
    assert repr(tuned).endswith(", from runs/a)" if kept else " tokens)")
    assert (tmp_path / "runs" / "a-data" / "train.jsonl").exists() == kept


@pytest.mark.parametrize("workdir", ["gs://bucket/run", Path("gs://bucket/run"), "s3://bucket/run"])
def test_data_in_memory_are_refused_for_a_workdir_in_a_store(model, tmp_path, monkeypatch, workdir):
    monkeypatch.chdir(tmp_path)
    for tables in ((ROWS,), ("train.jsonl", ROWS)):
        with pytest.raises(UserError, match=r"^workdir is \w\w://bucket/run, but data in memory .* Write the data"):
            bert_jax.finetune(model, *tables, text="review", label="stars", workdir=workdir)
    assert not list(tmp_path.iterdir())


class NAType:
    """What pandas has for a missing value."""


def test_rows_with_dates_and_missing_values_are_written_as_json(tmp_path):
    row = {
        "date": datetime.date(2026, 11, 24),
        "dates": np.array(["2026-11-24"], "datetime64[ns]"),
        "missing": NAType(),
        "none": float("nan"),
        "answers": {"text": np.array(["a", "b"]), "start": [np.int64(3)]},
        "tags": np.array([1, 0, -1]),
    }
    expected = {
        "date": "2026-11-24",
        "dates": ["2026-11-24T00:00:00.000000000"],
        "missing": None,
        "none": None,
        "answers": {"text": ["a", "b"], "start": [3]},
    }
    path = Path(in_memory.data_file([row], tmp_path / "rows.jsonl", TaggingConfig()))
    assert json.loads(path.read_text()) == expected | {"tags": [1, 0, -1]}


def written(folder: Path, table: Any, **task: str) -> list[dict[str, Any]]:
    """The rows of the file of a table."""
    path = Path(in_memory.data_file(table, folder / "rows.jsonl", load(TaskConfig, {"kind": "auto"} | task)))
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_values_in_memory_mean_what_those_of_files_do(tmp_path):
    sets = [{"text": "caf\u00e9".encode(), "labels": {"y", "x"}}, {"text": np.bytes_(b"a"), "labels": frozenset()}]
    found = written(tmp_path, sets, kind="multilabel", text="text", label="labels")
    assert found == [{"text": "caf\u00e9", "labels": ["x", "y"]}, {"text": "a", "labels": []}]
    numbers = [Tensor(0), jnp.int32(1), np.float32(0.5), decimal.Decimal("2.5"), True, None]
    found = written(tmp_path, [{"text": "a", "label": one} for one in numbers], text="text", label="label")
    assert [row["label"] for row in found] == [0, 1, 0.5, "2.5", True, None]
    boxed = np.array({"x"}, dtype=object)
    assert written(tmp_path, [{"labels": boxed}], kind="multilabel", label="labels") == [{"labels": ["x"]}]
    words = {"tokens": [b"a", "b"], "labels": Tensor([1, 0])}
    assert written(tmp_path, [words], kind="tagging") == [{"tokens": ["a", "b"], "labels": [1, 0]}]
    for table in (Polars(), Lazy(), pa.Table.from_pylist(ROWS)):
        assert written(tmp_path, table, text="review", label="stars") == ROWS
    unread = {"text": "a", 0: {1}, "image": b"\xff", "more": {("a", "b"): 1}, "labels": 1j}
    assert written(tmp_path, [unread], text="text")[0].keys() == {"text", "0", "image", "more", "labels"}


@pytest.mark.parametrize(
    ("row", "task", "said"),
    [
        ({"stars": object()}, {}, r"row 2 of the data: column 'stars' holds <object .*>; expected a text, a number"),
        ({"stars": {"one"}}, {}, r"column 'stars' holds {'one'}; a set has no order, so give a list"),
        ({"review": b"\xff"}, {}, "column 'review' holds .*; the bytes are not UTF-8"),
        (
            {"wrong": [1, 2j]},
            {"kind": "choice", "choices": ("right", "wrong")},
            r"column 'wrong' holds \[1, 2j\]; expected a text",
        ),
        ({"answers": {"a", "b"}}, {"kind": "question"}, "column 'answers' holds .*; a set has no order"),
        ({"choices": {"a", "b"}}, {"kind": "choice"}, "column 'choices' holds .*; a set has no order"),
        ({("stars", "mean"): 1}, {}, r"row 2 of the data: column names must be strings; got \('stars', 'mean'\)"),
    ],
)
def test_values_that_no_file_has_are_refused_with_their_row(model, row, task, said):
    overrides = {"task": {"text": "review", "label": "stars", **task}}
    with pytest.raises(UserError, match=said) as refused:
        bert_jax.finetune(model, [ROWS[0], ROWS[1] | row], overrides=overrides)
    assert "\n" not in str(refused.value)


def test_classes_of_a_dataset_keep_their_numbers(tmp_path):
    """Those of rows without names, in another file, mean the same classes."""
    task = AutoTaskConfig(text="review", label="stars")
    train = in_memory.data_file(Dataset(), tmp_path / "train.jsonl", task)
    numbers = [{"review": row["review"], "stars": ["five", "one"].index(row["stars"])} for row in ROWS]
    dev = in_memory.data_file(numbers, tmp_path / "dev.jsonl", task)
    resolved, files = registry.resolve(dataclasses.replace(task, train=train, dev=dev))
    resolved = resolved.complete(registry.read(resolved, files["train"]))
    assert resolved.labels == ("five", "one")
    assert [item.label for item in registry.read(resolved, files["dev"]).items] == [row["stars"] for row in ROWS]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a", None], "text 2 is None; expected a string, or a tuple of two strings"),
        ([{"text": "a"}], "text 1 is {'text': 'a'}"),
        ([("a", "b", "c")], r"text 1 is \('a', 'b', 'c'\)"),
        ({"text": "a"}, "one object with the keys text; expected a list of texts"),
        (Frame(), r"a table with the columns review, stars; expected a list of texts, such as one column"),
        (None, "texts is None; expected a list of texts"),
        (np.array("a"), r"texts is array\('a', .*; expected a list of texts"),
    ],
)
def test_what_is_no_text_is_refused(model, texts, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as in a user's program
    with pytest.raises(UserError, match=message):
        model.encode(texts)
    if not isinstance(texts, list):
        with pytest.raises(UserError, match=message):
            model.predict(texts)


def test_no_texts_give_no_vectors(model):
    assert model.encode([]).shape == (0, 20)
    assert embed(model.loaded, [], pool="none")["offsets"].tolist() == [0]


@pytest.mark.slow
def test_data_in_memory_are_fine_tuned_on_as_files_are(model, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    settings = {"steps": 3, "batch_size": 8, "task.max_length": 16, "seed": 5}
    found = [
        bert_jax.finetune(model, data, data, text="review", label="stars", overrides=settings)
        for data in (str(tmp_path / "rows.jsonl"), ROWS, Frame(), Dataset())
    ]
    assert found.pop().loaded.task["labels"] == ["five", "one"]  # of the dataset; others sort them
    for tuned in found[1:]:
        assert tuned.result["metrics"] == found[0].result["metrics"]
        for path, value in found[0].loaded.params.items():
            np.testing.assert_array_equal(tuned.loaded.params[path], value, err_msg=path)
    assert repr(found[0]).endswith("fine-tuned on own (classification))")
    [prediction] = found[0].predict(["a good cat"])
    assert prediction == found[0].predict("a good cat") == predict(found[0].loaded, ["a good cat"])[0]
    assert prediction["label"] in ("one", "five")
    # The temporary run is gone, but its model trains on, is saved and opened.
    again = bert_jax.finetune(
        found[0], ROWS, text="review", label="stars", workdir=tmp_path / "again", overrides=settings
    )
    again.save(tmp_path / "saved")
    assert bert_jax.load(tmp_path / "saved").predict("a good cat")["label"] == again.predict("a good cat")["label"]


@pytest.mark.slow
def test_text_becomes_a_pretrained_model(sample_text, tmp_path):
    tokenizer = bert_jax.train_tokenizer(input=sample_text, output=tmp_path / "words", kind="wordpiece", vocab_size=500)
    manifest = bert_jax.build_examples(
        input=sample_text, tokenizer=tmp_path / "words", output=tmp_path / "shards", seq_len=32, objective="single",
        masking="dynamic", workers=1,
    )  # fmt: skip
    settings = {"steps": 2, "batch_size": 8, "model.layers": 1, "model.width": 16, "model.heads": 2}
    watch = ParameterNorms()
    result = bert_jax.pretrain(
        "bert_tiny", tmp_path / "run", data=tmp_path / "shards", overrides=settings, hooks=[watch]
    )
    assert list(watch.norms) == [2] and watch.norms[2] > 0
    model = bert_jax.load(tmp_path / "run")
    assert result["step"] == 2 and manifest["counts"]["rows"] > 0
    assert model.config.vocab_size == tokenizer.vocab_size and model.config.layers == 1


@pytest.mark.parametrize("name", ["train_tokenizer", "build_examples"])
@pytest.mark.parametrize(("watched", "given", "quiet"), [(True, None, False), (False, None, True), (True, True, True)])
def test_data_preparation_shows_progress_where_somebody_watches(name, watched, given, quiet, monkeypatch):
    function = {"train_tokenizer": "data_prep.vocabulary.train", "build_examples": "data_prep.build.build"}[name]

    def hear(options: Any, quiet: bool) -> None:
        raise InterruptedError(quiet)

    monkeypatch.setattr(function, hear)
    monkeypatch.setattr(api, "is_watched", lambda: watched)
    options = {"input": "text", "output": "out"}
    options |= {"tokenizer": "words", "seq_len": 128} if name == "build_examples" else {"vocab_size": 500}
    with pytest.raises(InterruptedError) as heard:
        getattr(bert_jax, name)(quiet=given, **options)
    assert heard.value.args == (quiet,)


def test_a_name_with_a_comma_is_refused_in_a_list_of_files(tmp_path):
    with pytest.raises(UserError, match=r"input has 'Smith, John\.txt', but commas separate names; write \? in place"):
        bert_jax.build_examples(input=["Smith, John.txt", "b.txt"], tokenizer=tmp_path, output=tmp_path / "out")


def test_a_model_of_the_hub_is_named_by_its_address_where_a_run_begins(model, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(folder))
    starts = []

    def run(config: FinetuneConfig, workdir: Path, **options: object) -> dict[str, Any]:
        starts.append(config.init_from)
        export.write(model.loaded, workdir)
        return {}

    monkeypatch.setattr(api, "run_finetuning", run)
    for start in ("org/tiny", "hf:org/tiny", bert_jax.load("org/tiny"), str(folder)):
        bert_jax.finetune(start, ROWS, text="review", label="stars")
    assert starts == ["hf:org/tiny"] * 3 + [str(folder)]


@pytest.mark.parametrize(
    ("data", "message"),
    [([], "without rows"), ([1, 2], "without rows"), (["text"], "without rows"), (3, "the data is int without rows")],
)
def test_data_that_are_no_rows_are_refused(model, data, message):
    with pytest.raises(UserError, match=message):
        bert_jax.finetune(model, data, text="review", label="stars")


def test_a_full_disk_is_not_taken_for_a_missing_network(monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(UserError, match=r"to the cache of the Hugging Face Hub: No space left on device\. Free some"):
        bert_jax.load("hf:org/tiny")


def test_half_of_a_surrogate_pair_is_refused_with_its_row(model):
    rows = [{"review": "good", "stars": "5"}, {"review": "bad \ud83d", "stars": "1"}]
    with pytest.raises(UserError, match=r"row 2 of the data has half of a surrogate pair"):
        bert_jax.finetune(model, rows, text="review", label="stars")


def test_overrides_of_a_configuration_are_refused(tmp_path):
    from bert_jax.config import PretrainConfig

    with pytest.raises(UserError, match="set them in the configuration"):
        bert_jax.pretrain(PretrainConfig(), tmp_path, overrides={"steps": 1})


@pytest.fixture
def configured(model, monkeypatch) -> Callable[..., FinetuneConfig]:
    """Returns a function that begins to fine-tune on ROWS, and returns the configuration of the run."""
    found: list[FinetuneConfig] = []

    def run(config: FinetuneConfig, workdir: Path, **options: object) -> dict[str, Any]:
        found.append(config)
        export.write(model.loaded, workdir)
        return {}

    monkeypatch.setattr(api, "run_finetuning", run)

    def configure(**given: Any) -> FinetuneConfig:
        bert_jax.finetune(model, ROWS, **given)
        return found.pop()

    return configure


def test_a_group_of_overrides_leaves_its_other_keys_as_the_recipe_has_them(configured, tmp_path, monkeypatch):
    nested = configured(text="review", overrides={"optimizer": {"learning_rate": 1e-3}, "task": {"max_length": 16}})
    dotted = configured(text="review", overrides={"optimizer.learning_rate": 1e-3, "task.max_length": 16})
    for found in (nested, dotted):
        assert (found.task.text, found.task.max_length) == ("review", 16) and found.optimizer == nested.optimizer
        assert (found.optimizer.schedule.warmup_steps, found.optimizer.learning_rate) == (-1, 1e-3)
    started: list[Any] = []
    monkeypatch.setattr(api, "run_pretraining", lambda config, workdir, **options: started.append(config) or {})
    bert_jax.pretrain("bert_tiny", tmp_path, data="shards", overrides={"model": {"dropout": 0.0}})
    [tiny] = started
    assert (tiny.model.preset, tiny.model.dropout, tiny.data.train) == ("tiny", 0.0, "shards")


def test_overrides_are_values_of_python(configured, tmp_path, monkeypatch):
    task = {"labels": ["one", "five"], "metrics": ("f1", "accuracy"), "label_map": {1: "one", 5: "five"}}
    task |= {"class_weights": {"one": 2, "five": 0.5}}
    swept = {"optimizer.learning_rate": [1e-5, 3e-5], "batch_size": np.array([16, 32]), "task.layer_mix": [True, False]}
    found = configured(
        text="review",
        overrides={"task": task, "optimizer": {"rates": {"head": 2, "layers/0/": 0}}, "sweep": swept, "seeds": [1, 2]},
    )
    assert (found.task.class_weights, found.optimizer.rates) == (task["class_weights"], {"head": 2.0, "layers/0/": 0.0})
    assert (found.task.labels, found.task.metrics) == (("one", "five"), ("f1", "accuracy"))
    assert (found.task.label_map, found.seeds) == ({"1": "one", "5": "five"}, (1, 2))
    assert found.sweep["batch_size"] == (16, 32) and len(finetuning.sweep_settings(found)) == 8
    assert (
        configured(text="review", kind="question", overrides={"task.null_threshold": None}).task.null_threshold is None
    )
    assert configured(text="review", label=["good", "long"], kind="multilabel").task.label == ("good", "long")
    assert configured(kind="question").task.text == ""
    started: list[Any] = []
    monkeypatch.setattr(api, "run_pretraining", lambda config, workdir, **options: started.append(config) or {})
    mixture = {"wiki": ("shards/wiki", 0.7), "books": ("shards/books", 0.3)}
    given = mixture | {"wiki": (Path("shards/wiki"), 0.7)}
    bert_jax.pretrain("bert_tiny", tmp_path, overrides={"data.mixture": given, "batch_schedule": {0: 256, 100: 512}})
    assert (started[0].data.mixture, started[0].batch_schedule) == (mixture, {0: 256, 100: 512})


def test_arrays_and_ranges_are_lists(configured):
    overrides = {"task.labels": np.array(["one", "five"]), "seeds": range(3), "epochs": np.float32(0.5)}
    overrides |= {"task.label_map": {np.int64(1): np.str_("one")}, "init_layers": (layer for layer in (1, 3))}
    found = configured(text="review", label=np.array(["good", "long"]), kind="multilabel", overrides=overrides)
    assert (found.task.label, found.task.labels) == (("good", "long"), ("one", "five"))
    assert (found.seeds, found.epochs, found.init_layers) == ((0, 1, 2), 0.5, (1, 3))
    assert found.task.label_map == {"1": "one"}
    for seeds in (np.arange(3), jnp.arange(3), [np.int64(0), np.int64(1), np.int64(2)]):
        assert configured(text="review", overrides={"seeds": seeds}).seeds == (0, 1, 2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"task.labels": {"one"}}, r"config\.task\.labels is {'one'}, a set, which has no order\. Give a list"),
        ({"seeds": frozenset([1])}, r"config\.seeds is frozenset\(\{1\}\), a set"),
        (
            {"task.class_weights": {"one": [1, 2]}},
            r"class_weights is \{'one': \(1, 2\)\}\. Give a value of type str or",
        ),
        ({"epochs": None}, r"config\.epochs is None\. Give a value of type float"),
        ({"epohcs": None}, r"unknown key config\.epohcs; did you mean config\.epochs"),
        ({"task": {"lable": "stars"}}, r"unknown key config\.task\.lable; did you mean config\.task\.label"),
        ({"task": None}, r"config\.task is None, but has keys of its own"),
        ({"epochs": {"a": 1}}, r"config\.epochs is \{'a': 1\}\. Give a value of type float"),
    ],
)
def test_values_that_a_key_cannot_have_are_refused_in_one_line(configured, overrides, message):
    with pytest.raises(UserError, match=message) as refused:
        configured(text="review", overrides=overrides)
    assert "\n" not in str(refused.value)


def test_a_text_column_is_required_where_the_command_requires_it(model):
    with pytest.raises(UserError, match=r"task\.text"):
        bert_jax.finetune(model, ROWS, label="stars")


def test_a_model_of_the_hub_with_a_pickle_only_is_refused_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    files = ["config.json", "optimizer.pt", "pytorch_model.bin"]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: files)
    with pytest.raises(UserError, match=r"^hf:org/old holds pytorch_model\.bin, a pickle: .*any code.*save_pretrained"):
        bert_jax.load("org/old")


class ConnectError(Exception):
    """That of httpx, with which the Hub's library connects from its version 1 on: none of the Hub's, and no OSError."""


@pytest.mark.parametrize("raised", [ConnectError("no route"), OfflineModeIsEnabled("off")])
def test_a_model_of_which_only_the_tokenizer_is_in_the_cache_is_explained_without_a_network(
    tmp_path, monkeypatch, raised
):
    def unreachable(*_: Any, **__: Any) -> list[str]:
        raise raised

    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", unreachable)
    said = r"^the cache has the tokenizer of org/tiny but no weights, and the Hugging Face Hub cannot be reached "
    with pytest.raises(UserError, match=said + r"\((no route|off)\)\. Download .*hf download org/tiny --local-dir DIR"):
        bert_jax.load("org/tiny")


def test_the_files_of_a_checkpoint_are_all_that_its_formats_have(tmp_path, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda _, allow_patterns: asked.extend(allow_patterns))
    with pytest.raises(TypeError):  # it returns no folder
        bert_jax.load("org/tiny")
    adapter = ("adapter_config.json", "adapter_model.safetensors", "task.json")
    for name in (*adapter, "config.json", "model.safetensors", "modules.json", "1_Pooling/config.json"):
        assert any(fnmatch.fnmatch(name, pattern) for pattern in asked), name


def test_an_average_that_a_checkpoint_lacks_is_named_as_python_has_it(folder):
    with pytest.raises(UserError, match=r"holds a single set of weights, not a workdir\. Omit average$"):
        bert_jax.load(folder, average="ema")


class Hub(HubHandler):
    """The parts of the Hub's HTTP API by which huggingface_hub downloads a model."""

    folder: Path
    asked: list[str]
    commit = "1" * 40

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        if path.startswith("/api/models/org/tiny/tree/"):
            files = [*self.folder.iterdir()]
            entries = [{"type": "file", "oid": "0", "size": one.stat().st_size, "path": one.name} for one in files]
            self.answer(json.dumps([*entries, {**entries[0], "path": "pytorch_model.bin"}]).encode())
        elif re.match(r"/api/models/org/tiny(/|$)", path):
            files = [{"rfilename": one.name} for one in [*self.folder.iterdir(), Path("pytorch_model.bin")]]
            about = {"id": "org/tiny", "sha": self.commit, "private": False, "gated": False, "disabled": False}
            self.answer(json.dumps({**about, "tags": [], "downloads": 0, "likes": 0, "siblings": files}).encode())
        elif match := re.fullmatch(rf"/org/tiny/resolve/(?:main|{self.commit})/(.+)", path):
            content = (self.folder / match[1]).read_bytes()
            self.answer(content, ETag=f'"{match[1]}"', X_Repo_Commit=self.commit)
        else:
            self.missing("RepoNotFound")

    do_HEAD = do_GET


@pytest.fixture
def asked() -> list[str]:
    """The paths that the Hub was asked for."""
    return []


@pytest.fixture
def endpoint(folder: Path, asked: list[str]) -> Iterator[str]:
    with serving(type("Handler", (Hub,), {"folder": folder, "asked": asked})) as address:
        yield address


LOAD = """
import sys, bert_jax
from bert_jax.errors import UserError
from bert_jax.interop.open_checkpoint import open_checkpoint
for name in sys.argv[1:]:
    try:
        print(bert_jax.load(name))
        assert name.startswith("/") or open_checkpoint(name).origin == "hf:" + name.removeprefix("hf:")
    except UserError as error:
        print(error)
"""


TOKENIZERS = """
import sys
from bert_jax.tokenization import vocabulary
from bert_jax.errors import UserError
assert vocabulary.load("hf:org/tiny").vocab_size == vocabulary.load("org/tiny").vocab_size
print(vocabulary.load("hf:org/tiny").vocab_size)
try:
    vocabulary.load("hf:org/nonesuch")
except UserError as error:
    print(error)
"""


def test_a_tokenizer_of_the_hub_is_downloaded_without_weights(endpoint, asked, tmp_path):
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}
    run = subprocess.run(
        [sys.executable, "-c", TOKENIZERS], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    size, missing = run.stdout.splitlines()
    assert size == "131" and missing.startswith(
        "no tokenizer at org/nonesuch, and no model of that name on the Hugging"
    )
    downloaded = {path.rpartition("/")[2] for path in asked if "/resolve/" in path}
    assert {"tokenizer.json", "config.json"} <= downloaded and "model.safetensors" not in downloaded


@pytest.mark.slow
def test_models_of_the_hub_are_downloaded_once_and_explained_without_a_network(endpoint, folder, tmp_path):
    def load(*names: str, **settings: str) -> list[str]:
        environment = os.environ | {
            "HF_HOME": str(tmp_path),
            "HF_ENDPOINT": endpoint,
            "HF_HUB_OFFLINE": "0",
            **settings,
        }
        command = [sys.executable, "-c", LOAD, *names]
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        return run.stdout.splitlines()

    found, missing = load("org/tiny", "org/nonesuch")
    assert found.endswith("tokens, from hf:org/tiny)")
    assert missing.startswith("no checkpoint at org/nonesuch, and no model of that name on the Hugging Face Hub.")
    cached, unknown = load("org/tiny", "org/other", HF_HUB_OFFLINE="1")
    assert cached == found
    assert "cannot be reached" in unknown and "hf download org/other --local-dir DIR" in unknown
    assert not list(tmp_path.rglob("pytorch_model.bin"))
    named, wrong = load("hf:org/tiny", "hf:org/tiny/more", HF_HUB_OFFLINE="1")
    assert named == found
    assert wrong.endswith("is not the name of a model on the Hugging Face Hub. Use hf:NAME or hf:ORG/NAME")
    [local] = load(str(folder), HF_ENDPOINT="http://127.0.0.1:9")
    assert local.startswith("Model(2 layers")
