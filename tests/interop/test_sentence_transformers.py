"""Folders, losses and metrics of sentence-transformers equal those of that library (make_golden_sentences.py)."""

import dataclasses
import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from families import FAMILIES
from golden import REFRESH, TOLERANCE, read_arrays
from random_checkpoints import odd_config, random_checkpoint

from bert_jax import api
from bert_jax.api import Model
from bert_jax.errors import UserError
from bert_jax.interop import export as bert_jax_export
from bert_jax.interop import huggingface, huggingface_export
from bert_jax.interop.export import export
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.interop.sentence_transformers import MODES
from bert_jax.model.heads.config import Heads
from bert_jax.model.runtime import ALONE
from bert_jax.tasks.embedder import embed
from bert_jax.tasks.evaluation import evaluate
from bert_jax.tasks.kinds.embedding import (
    EmbeddingRows,
    EmbeddingTask,
    TextGroup,
    TextVectors,
    contrastive_sums,
    cosent_sum,
    truncations,
)
from bert_jax.tasks.prediction import predict
from bert_jax.tasks.retrieval import Nearest, rank_metrics
from bert_jax.tasks.rows import Split

COLUMNS = {"text": "text", "text_pair": "text_pair", "label": "label"}
FOLDERS = ("cls", "mean", "max", "last")


@pytest.fixture(scope="module")
def arrays():
    return read_arrays("sentences")


@pytest.fixture
def folder(tmp_path, arrays):
    """Returns a function that writes a folder of the reference."""

    def write(name):
        start = f"files/{name}/"
        for key in (key for key in arrays if key.startswith(start)):
            path = tmp_path / name / key.removeprefix(start)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(arrays[key]), encoding="utf-8")
        weights = {key.removeprefix("weights/"): value for key, value in arrays.items() if key.startswith("weights/")}
        safetensors.numpy.save_file(weights, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        return tmp_path / name

    return write


def texts_of(arrays):
    return [(text,) for text in json.loads(str(arrays["texts"]))]


def assert_vectors(got, wanted):
    np.testing.assert_allclose(got["embeddings"], wanted, atol=TOLERANCE, err_msg=REFRESH)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_gives_the_vectors_of_the_library(folder, arrays, name):
    loaded = open_checkpoint(folder(name))
    assert_vectors(embed(loaded, texts_of(arrays)), arrays[f"vectors/{name}"])
    for role in ("query", "document"):
        if loaded.task["query_prompt"]:
            assert_vectors(embed(loaded, texts_of(arrays), prompt_name=role), arrays[f"{role}/{name}"])


@pytest.mark.parametrize("name", ["cls", *(pytest.param(name, marks=pytest.mark.slow) for name in FOLDERS[1:])])
def test_the_settings_survive_every_format_of_export(folder, arrays, tmp_path, name):
    loaded = open_checkpoint(folder(name))
    export(folder(name), tmp_path / "again", "sentence_transformers")
    bert_jax_export.write(loaded, tmp_path / "orbax")
    huggingface_export.write(loaded, tmp_path / "hf")
    for path in ("again", "orbax", "hf"):
        read = open_checkpoint(tmp_path / path)
        assert {key: read.task[key] for key in loaded.task} == loaded.task
        assert_vectors(embed(read, texts_of(arrays)), arrays[f"vectors/{name}"])


def test_files_of_sentence_transformers_come_before_the_task_in_config_json(folder, tmp_path):
    """The library keeps the fields of config.json that it does not know when it saves a model that it trained."""
    huggingface_export.write(open_checkpoint(folder("mean")), tmp_path / "hf")
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert values["bert_jax_task"]["pooling"] == "mean"
    values["bert_jax_task"] |= {"name": "stsb", "columns": {"text": "first"}}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(values))
    for name in ("modules.json", "1_Pooling"):
        (tmp_path / "hf" / name).rename(tmp_path / "hf" / f"old_{name}")
        (folder("cls") / name).rename(tmp_path / "hf" / name)
    read = open_checkpoint(tmp_path / "hf").task
    assert (read["pooling"], read["name"], read["columns"]) == ("cls", "stsb", {"text": "first"})


def changed(path, **values):
    """The folder with other values in its settings."""
    settings = path / "config_sentence_transformers.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | values))
    return path


def test_the_similarity_of_a_folder_is_kept(folder, tmp_path):
    for similarity in ("cosine", "dot"):
        path = folder("cls") if similarity == "cosine" else changed(folder("cls"), similarity_fn_name="dot")
        export(path, tmp_path / similarity, "sentence_transformers")
        written = json.loads((tmp_path / similarity / "config_sentence_transformers.json").read_text())
        assert written["similarity_fn_name"] == similarity


def test_vectors_are_cut_behind_the_modules_of_a_folder(folder, arrays, tmp_path):
    """As the library does: the first values of the whole vectors, which it does not normalize again unless asked."""
    path, texts = changed(folder("cls"), truncate_dim=5), texts_of(arrays)
    loaded, whole = open_checkpoint(path), arrays["vectors/cls"]
    assert_vectors(embed(loaded, texts), whole[:, :5])
    assert_vectors(embed(loaded, texts, truncate_dim=3), whole[:, :3])
    assert_vectors(embed(loaded, texts, normalize=True), unit(whole[:, :5]))
    assert_vectors(embed(loaded, texts, pool="cls", max_length=9, normalize=True), whole)
    np.testing.assert_allclose(Model(loaded).encode(texts), whole[:, :5], atol=TOLERANCE)
    pairs = [{"text": "x", "text_pair": text} for (text,) in texts if text != "x"]
    cut = embed(loaded, ["query: x", *(f"passage: {pair['text_pair']}" for pair in pairs)], normalize=True)[
        "embeddings"
    ]
    scores = [found["score"] for found in predict(loaded, pairs)]
    np.testing.assert_allclose(scores, cut[1:] @ cut[0], atol=1e-5)
    export(path, tmp_path / "again", "sentence_transformers")
    assert json.loads((tmp_path / "again" / "config_sentence_transformers.json").read_text())["truncate_dim"] == 5
    assert_vectors(embed(tmp_path / "again", texts), whole[:, :5])
    for options, message in (
        ({"truncate_dim": 13}, "use 1 to 12"),
        ({"truncate_dim": 5, "pool": "none"}, "for vectors"),
    ):
        with pytest.raises(UserError, match=message):
            embed(loaded, texts, **options)
    with pytest.raises(UserError, match=r"truncate_dim is 'all'; expected a number of dimensions"):
        open_checkpoint(changed(path, truncate_dim="all"))


@pytest.fixture
def search(tmp_path, arrays):
    """A BEIR folder of the reference's texts, in which each text is its own answer; next to it pairs with scores."""
    texts = [text.replace("\n", " ").strip() for (text,) in texts_of(arrays)]
    (tmp_path / "search" / "qrels").mkdir(parents=True)
    for name, mark in (("corpus", "d"), ("queries", "q")):
        rows = [json.dumps({"_id": f"{mark}{number}", "text": text}) + "\n" for number, text in enumerate(texts)]
        (tmp_path / "search" / f"{name}.jsonl").write_text("".join(rows))
    judgments = "".join(f"q{number}\td{number}\t1\n" for number in range(len(texts)))
    (tmp_path / "search" / "qrels" / "test.tsv").write_text(judgments)
    names = ("text", "text_pair", "label")
    rows = [json.dumps(dict(zip(names, (text, texts[row - 1], row), strict=True))) for row, text in enumerate(texts)]
    (tmp_path / "sts.jsonl").write_text("\n".join(rows))
    return tmp_path / "search"


def pairs_of(search):
    return [tuple(json.loads(line).values()) for line in (search.parent / "sts.jsonl").read_text().splitlines()]


def test_retrieval_is_measured_by_the_similarity_of_a_folder(folder, arrays, search, capsys):
    """By dot products, a longer vector of another text is nearer; other similarities are reported."""
    path, texts = folder("mean"), [text.strip() for (text,) in texts_of(arrays)]
    vectors = embed(path, texts)["embeddings"]
    products = vectors @ vectors.T
    ranks = (products > np.diagonal(products)[:, None]).sum(axis=1) + 1
    assert ranks.max() > 1
    assert evaluate(path, search)["mrr@10"] == 1
    assert evaluate(changed(path, similarity_fn_name="dot"), search)["mrr@10"] == pytest.approx((1 / ranks).mean())
    assert "similarity" not in capsys.readouterr().err
    assert evaluate(changed(path, similarity_fn_name="euclidean"), search)["mrr@10"] == 1
    assert "by cosines, but the checkpoint's similarity is 'euclidean'" in capsys.readouterr().err
    evaluate(path, search.parent / "sts.jsonl", **COLUMNS)
    assert "pairs are measured by cosines, but the checkpoint's similarity is 'euclidean'" in capsys.readouterr().err


def test_metrics_are_of_vectors_that_are_cut(folder, search):
    path = folder("mean")
    assert evaluate(path, search, truncate_dim=1)["mrr@10"] < 1  # all cosines are 1 or -1
    pairs = pairs_of(search)
    sides = [unit(embed(path, [pair[side] for pair in pairs], truncate_dim=2)["embeddings"]) for side in (0, 1)]
    scored = evaluate(changed(path, truncate_dim=2), search.parent / "sts.jsonl", **COLUMNS)
    wanted = np.corrcoef((sides[0] * sides[1]).sum(axis=1), [score for _, _, score in pairs])[0, 1]
    assert scored["pearson"] == pytest.approx(wanted, abs=1e-5)
    with pytest.raises(UserError, match=r"task\.truncate_dim has 13, but the vectors have 12 dimensions"):
        evaluate(path, search.parent / "sts.jsonl", **COLUMNS, truncate_dim=13)


@pytest.mark.parametrize(
    ("prompts", "document"),
    [
        ({"query": "query: ", "document": "", "passage": "passage: "}, ""),
        ({"query": "query: ", "document": None, "passage": "passage: "}, ""),
        ({"corpus": "the ", "passage": "passage: "}, ""),
        ({"document": "the ", "passage": "passage: "}, "the "),
    ],
)
def test_only_the_prompt_called_document_is_that_of_documents(folder, tmp_path, prompts, document):
    """encode_document of sentence-transformers 6.2 does the same: a model always has this prompt, empty by default."""
    path = changed(folder("cls"), prompts=prompts)
    export(path, tmp_path / "again", "sentence_transformers")
    for read in (path, tmp_path / "again"):
        task = open_checkpoint(read).task
        assert task["document_prompt"] == document
        assert dict(task["prompts"]).items() >= {name: text or "" for name, text in prompts.items()}.items()
    written = json.loads((tmp_path / "again" / "config_sentence_transformers.json").read_text())["prompts"]
    assert written.get("document", "") == document


def test_retrieval_reports_a_prompt_of_documents_that_is_not_used(folder, search, capsys):
    for prompts, reported in (({"corpus": "the "}, True), ({"document": "the ", "corpus": "the "}, False)):
        evaluate(changed(folder("mean"), prompts=prompts), search)
        assert ("the checkpoint's prompt 'corpus'" in capsys.readouterr().err) == reported


def test_predict_uses_the_default_prompt_of_a_folder_without_prompts_of_roles(folder, arrays):
    path = changed(folder("max"), prompts={"other": "the "})
    vectors = unit(embed(path, ["cat", "dog"])["embeddings"])
    [found] = predict(path, [{"text": "cat", "text_pair": "dog"}])
    assert found["score"] == pytest.approx(float(vectors[0] @ vectors[1]), abs=1e-5)


def test_a_given_pool_or_prompt_replaces_the_settings_of_a_folder(folder, arrays):
    loaded = open_checkpoint(folder("cls"))
    texts = texts_of(arrays)
    raw = embed(loaded, texts, pool="mean", max_length=9)
    assert_vectors(raw, arrays["vectors/mean"])  # the same weights, without normalization
    units = arrays["vectors/mean"] / np.linalg.norm(arrays["vectors/mean"], axis=1, keepdims=True)
    assert_vectors(embed(loaded, texts, pool="mean", max_length=9, normalize=True), units)
    assert_vectors(embed(loaded, texts, prompt="query: "), arrays["query/cls"])
    with pytest.raises(UserError, match="--prompt_name is 'title', but the checkpoint's prompts are: query, document"):
        embed(loaded, texts, prompt_name="title")
    with pytest.raises(UserError, match="are for vectors of texts, but --pool is none"):
        embed(loaded, texts, pool="none", normalize=True)


@pytest.mark.parametrize(
    ("file", "values", "described"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False}, "mean without the prompt"),
        ("modules.json", [{"type": "a.Transformer"}, {"type": "a.Dense"}], "Dense .*modules.json"),
    ],
)
def test_what_cannot_be_computed_is_refused_only_where_it_is_needed(folder, arrays, file, values, described, capsys):
    path = folder("mean")
    (path / file).write_text(json.dumps(values))
    loaded = open_checkpoint(path)
    assert re.search(f"its vectors need {described}.*; the encoder alone is read", capsys.readouterr().err)
    for vectors in (lambda: embed(loaded, texts_of(arrays)), lambda: api.load(path)):
        with pytest.raises(UserError, match=f"its vectors need {described}.*remove modules.json"):
            vectors()
    assert_vectors(embed(loaded, texts_of(arrays), pool="mean", max_length=9), arrays["vectors/mean"])


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize(
    ("modes", "pooling"),
    [
        (["weightedmean"], "weightedmean"),
        (["mean_sqrt_len_tokens"], "mean_sqrt_len_tokens"),
        (["cls", "max", "mean"], "cls + max + mean"),
        (["mean", "cls"], "mean + cls"),
        (["weightedmean", "lasttoken"], "weightedmean + last"),
    ],
)
def test_other_poolings_are_computed_from_the_vectors_of_tokens(folder, arrays, tmp_path, modes, pooling, legacy):
    """These were compared with sentence-transformers 6.2, too, also after an export: they differ by less than 1e-6."""
    path = folder("mean")
    values = {key: mode in modes for key, mode in MODES.items()} if legacy else {"pooling_mode": modes}
    if legacy and modes == ["mean", "cls"]:  # the order of flags is that of the library
        pooling = "cls + mean"
    (path / "1_Pooling" / "config.json").write_text(json.dumps(values | {"include_prompt": True}))
    loaded = open_checkpoint(path)
    assert loaded.task["pooling"] == pooling
    tokens = embed(loaded, texts_of(arrays), pool="none", max_length=9)
    rows = np.split(tokens["embeddings"], tokens["offsets"][1:-1])
    make = {
        "cls": lambda row: row[0],
        "max": lambda row: row.max(axis=0),
        "mean": lambda row: row.mean(axis=0),
        "last": lambda row: row[-1],
        "mean_sqrt_len_tokens": lambda row: row.sum(axis=0) / np.sqrt(len(row)),
        "weightedmean": lambda row: np.average(row, axis=0, weights=np.arange(1, len(row) + 1)),
    }
    wanted = np.array([np.concatenate([make[part](row) for part in pooling.split(" + ")]) for row in rows])
    assert_vectors(embed(loaded, texts_of(arrays), normalize=False, max_length=9), wanted)
    assert embed(loaded, ["a"], truncate_dim=wanted.shape[1])["embeddings"].shape == (1, wanted.shape[1])
    export(path, tmp_path / "again", "sentence_transformers")
    assert open_checkpoint(tmp_path / "again").task == loaded.task


@pytest.mark.parametrize("mode", ["cls", "mean", "max", "lasttoken"])
def test_the_settings_of_older_versions_are_read(folder, arrays, mode):
    path = folder("cls")
    keys = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "lasttoken": "lasttoken"}
    values = {f"pooling_mode_{key}": name == mode for name, key in keys.items()}
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 12} | values))
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 7, "do_lower_case": false}')
    task = open_checkpoint(path).task
    assert (task["pooling"], task["max_length"]) == (mode.removesuffix("token"), 7)


def test_a_length_under_an_old_name_is_read_and_a_module_of_dropout_changes_nothing(folder, arrays):
    path = folder("mean")
    modules = json.loads((path / "modules.json").read_text())
    (path / "modules.json").write_text(json.dumps([*modules, {"type": "sentence_transformers.models.Dropout"}]))
    (path / "sentence_bert_config.json").rename(path / "sentence_xlm-roberta_config.json")
    assert_vectors(embed(path, texts_of(arrays)), arrays["vectors/mean"])
    (path / "sentence_xlm-roberta_config.json").write_text('{"max_seq_length": 5, "do_lower_case": false}')
    assert open_checkpoint(path).task["max_length"] == 5


def test_a_folder_whose_class_has_a_head_may_hold_the_encoder_alone(folder, arrays):
    path = folder("mean")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    assert_vectors(embed(path, texts_of(arrays)), arrays["vectors/mean"])
    (path / "modules.json").unlink()
    with pytest.raises(UserError, match="is missing"):
        huggingface.read(path)


@pytest.mark.parametrize(
    ("model", "heads", "exported"),
    [
        (odd_config(), Heads(mlm=True, next_sentence=True, pooler=True), Heads(pooler=True)),
        (FAMILIES["modernbert"], Heads(pooler=True, classes=2), Heads()),  # a family without a pooler
    ],
)
def test_a_model_of_another_kind_is_exported_with_the_mean(tmp_path, model, heads, exported):
    loaded = random_checkpoint(tmp_path / "words", model, heads)
    huggingface_export.write_sentence_transformer(loaded, tmp_path / "out")
    read = open_checkpoint(tmp_path / "out")
    assert (read.heads, read.task["pooling"], read.task["normalize"]) == (exported, "mean", False)
    np.testing.assert_array_equal(embed(read, ["the cat"])["embeddings"], embed(loaded, ["the cat"])["embeddings"])
    unknown = dataclasses.replace(loaded, task={"kind": "embedding", "pooling": "mean, Dense"})
    with pytest.raises(UserError, match="cannot be written: mean, Dense"):
        huggingface_export.write_sentence_transformer(unknown, tmp_path / "other")


def own_vectors(arrays, columns):
    vectors = jnp.asarray(arrays["loss/vectors"][:columns].swapaxes(0, 1))
    count = vectors.shape[0]
    texts = jnp.arange(count * columns).reshape(count, columns)
    return TextVectors(vectors, jnp.ones((count, columns), bool), jnp.ones(count), jnp.arange(count), texts)


@pytest.mark.parametrize(
    ("name", "columns", "scale", "symmetric", "dimensions"),
    [
        ("pairs", 2, 20.0, False, ()),
        ("triplets", 3, 5.0, False, ()),
        ("symmetric", 2, 20.0, True, ()),
        ("matryoshka", 2, 20.0, False, (12, 5, 3)),
    ],
)
def test_contrastive_losses_are_those_of_the_library(arrays, name, columns, scale, symmetric, dimensions):
    parts = truncations(own_vectors(arrays, columns), dimensions)
    total = sum(float(contrastive_sums(part, ALONE, scale, symmetric)[0]) for part in parts)
    assert total / 6 == pytest.approx(float(arrays[f"loss/{name}"]), rel=1e-6), REFRESH


def test_cosent_is_that_of_the_library(arrays):
    loss = cosent_sum(own_vectors(arrays, 2), jnp.asarray(arrays["loss/scores"]), ALONE, 20.0)
    assert float(loss) / 6 == pytest.approx(float(arrays["loss/cosent"]), rel=1e-6), REFRESH


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_retrieval_metrics_are_those_of_the_library(arrays):
    names = [f"d{number}" for number in range(150)]
    order = sorted(names)
    numbers = np.array([order.index(name) for name in names])
    nearest = Nearest(unit(arrays["search/queries"]), 100)
    documents = unit(arrays["search/documents"])
    for start in range(0, 150, 64):
        nearest.add(documents[start : start + 64], numbers[start : start + 64])
    hits = {f"q{row}": [order[number] for number in found] for row, found in enumerate(nearest.documents)}
    relevant = {query: set(found) for query, found in json.loads(str(arrays["search/relevant"])).items()}
    wanted = json.loads(str(arrays["search/metrics"]))
    for name, value in rank_metrics(hits, relevant).items():
        assert value == pytest.approx(wanted[f"cosine_{name}"], abs=1e-6), (name, REFRESH)
    assert 0 < wanted["cosine_ndcg@10"] < 1


def test_correlations_of_scored_pairs_are_those_of_the_library(arrays):
    first, second = unit(arrays["pairs/first"]), unit(arrays["pairs/second"])
    items = tuple(TextGroup((f"a{i}", f"b{i}"), score, i + 1) for i, score in enumerate(arrays["pairs/scores"]))
    lengths = np.ones((len(items), 2), np.int64)
    rows = EmbeddingRows(
        input_ids=np.zeros(lengths.size, np.int32),
        offsets=np.arange(len(items) + 1) * 2,
        first_lengths=lengths.astype(np.int32),
        part_lengths=lengths,
        scores=arrays["pairs/scores"].astype(np.float32),
        label_weights=np.ones(len(items), np.float32),
        pad_id=0,
        truncated=0,
        split=Split(Path("pairs.tsv"), items, labelled=True),
    )
    found = EmbeddingTask("own").measure(rows, list(np.stack([first, second], axis=1)))
    wanted = json.loads(str(arrays["pairs/metrics"]))
    assert found["spearman"] == pytest.approx(wanted["spearman_cosine"], abs=1e-6), REFRESH
    assert found["pearson"] == pytest.approx(wanted["pearson_cosine"], abs=1e-6), REFRESH


@pytest.mark.parametrize("format", ["hf", "sentence_transformers"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_for_vectors_has_all_files_of_the_library_and_a_pooler_of_no_effect(tmp_path, format, dtype):
    """BertModel has a pooler in transformers, which would get random values, with a warning."""
    task = {"name": "own", "kind": "embedding", "labels": [], "max_length": 16, "pooling": "mean", "normalize": True}
    loaded = random_checkpoint(tmp_path / "words", odd_config(), Heads(), task=task)
    bert_jax_export.export_loaded(loaded, tmp_path / "out", format, dtype=dtype)
    modules = json.loads((tmp_path / "out" / "modules.json").read_text())
    assert [module["type"].rpartition(".")[2] for module in modules] == ["Transformer", "Pooling", "Normalize"]
    assert 'SentenceTransformer("PATH")' in (tmp_path / "out" / "README.md").read_text()
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "numpy") as file:
        np.testing.assert_array_equal(file.get_tensor("pooler.dense.weight"), np.eye(loaded.model.width))
        assert not file.get_tensor("pooler.dense.bias").any()
    # It is no parameter of the model, so reading leaves it out; a trained one is read.
    again = open_checkpoint(tmp_path / "out")
    assert again.params.keys() == loaded.params.keys() and again.dtype == dtype
    tensors = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    tensors["pooler.dense.weight"] = tensors["pooler.dense.weight"] * 2
    safetensors.numpy.save_file(tensors, tmp_path / "out" / "model.safetensors")
    assert open_checkpoint(tmp_path / "out").heads.pooler
