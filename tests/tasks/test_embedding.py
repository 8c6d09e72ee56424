"""Vectors of texts: the losses by brute force, on any mesh, from every kind of file, and a model that learns."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow
import pyarrow.parquet as pq
import pytest
from random_checkpoints import odd_config, random_checkpoint
from tiny_steps import DEFAULT

from bert_jax.config import AdamW, EmbeddingConfig, FinetuneConfig, MeshConfig
from bert_jax.errors import UserError
from bert_jax.interop import export as bert_jax_export
from bert_jax.interop import huggingface_export
from bert_jax.interop.export import export
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import bert, layers
from bert_jax.model.heads.config import Heads
from bert_jax.model.runtime import ALONE, Runtime
from bert_jax.tasks import finetuning, registry
from bert_jax.tasks.embedder import embed
from bert_jax.tasks.evaluation import evaluate
from bert_jax.tasks.finetuning import finetune
from bert_jax.tasks.kinds.embedding import EmbeddingTask, GroupLabels, TextVectors, contrastive_sums, cosent_sum
from bert_jax.tasks.prediction import predict
from bert_jax.tasks.reading.inputs import InputRecord
from bert_jax.tasks.reading.tables import Columns
from bert_jax.tasks.registry import from_json
from bert_jax.tasks.rows import SideBySideBatch
from bert_jax.tasks.runs import prepare
from bert_jax.tokenization import tokenizer as tokenizer_lib
from bert_jax.train import optim as optim_lib
from bert_jax.train import sharding
from bert_jax.train import step as step_lib

PAIRS = [
    ("the cat sat", "a cat on the mat", "the river"),
    ("a dog", "the dog sat", ""),
    ("river", "the river", "a mat"),
]


def given(rows: int = 5, texts: int = 4, absent: tuple[tuple[int, int], ...] = ((1, 3), (2, 2))) -> TextVectors:
    draw = np.random.default_rng(3)
    present = np.ones((rows, texts), bool)
    for place in absent:
        present[place] = False
    present[-1] = False  # a filler
    weights = np.ones(rows, np.float32)
    weights[-1] = 0
    vectors = draw.normal(size=(rows, texts, 6)).astype(np.float32) * present[..., None]
    return TextVectors(
        jnp.asarray(vectors), jnp.asarray(present), jnp.asarray(weights), jnp.arange(rows), distinct(rows, texts)
    )


def distinct(rows: int, texts: int) -> jax.Array:
    """Numbers of texts that all differ."""
    return jnp.arange(rows * texts).reshape(rows, texts) + 1


def cosine(left: np.ndarray, right: np.ndarray) -> float:
    return float(left @ right / np.linalg.norm(left) / np.linalg.norm(right))


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_contrastive_loss_is_that_of_a_loop_over_rows_and_candidates(symmetric):
    own = given()
    vectors, present = np.asarray(own.vectors, np.float64), np.asarray(own.present)
    rows = [row for row in range(5) if own.weights[row]]
    loss = right = 0.0
    for row in rows:
        scores = {
            (other, text): 7.0 * cosine(vectors[row, 0], vectors[other, text])
            for other in rows
            for text in (1, 2, 3)
            if present[other, text]
        }
        forward = np.log(sum(np.exp(score) for score in scores.values())) - scores[row, 1]
        anchors = [7.0 * cosine(vectors[row, 1], vectors[other, 0]) for other in rows]
        backward = np.log(np.exp(anchors).sum()) - scores[row, 1]
        loss += (forward + backward) / 2 if symmetric else forward
        right += scores[row, 1] == max(scores.values())
    found = contrastive_sums(own, ALONE, 7.0, symmetric)
    assert float(found[0]) == pytest.approx(loss, rel=1e-5) and float(found[1]) == right


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_row_that_is_in_a_batch_twice_is_no_candidate_of_itself(symmetric):
    own = given(texts=3, absent=((1, 2),))
    twice = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), own)
    _, right = contrastive_sums(own, ALONE, 7.0, symmetric)
    units = np.asarray(own.vectors) / np.maximum(np.linalg.norm(own.vectors, axis=-1, keepdims=True), 1e-9)
    scores = 7.0 * np.einsum("bd,rsd->brs", units[:4, 0], units[:4, 1:])
    kept = np.asarray(own.present[:4, 1:]) * (2 - np.eye(4))[..., None]  # how often each is a candidate
    forward = np.log((np.exp(scores) * kept).sum(axis=(1, 2))) - scores[range(4), range(4), 0]
    anchors = 7.0 * units[:4, 1] @ units[:4, 0].T
    backward = np.log((np.exp(anchors) * (2 - np.eye(4))).sum(axis=1)) - np.diagonal(anchors)
    wanted = 2 * (forward + symmetric * backward).sum() / (1 + symmetric)
    found = contrastive_sums(twice, ALONE, 7.0, symmetric)
    assert float(found[0]) == pytest.approx(wanted, rel=1e-5) and float(found[1]) == 2 * float(right)
    apart = contrastive_sums(twice._replace(numbers=jnp.arange(10)), ALONE, 7.0, symmetric)
    assert float(apart[0]) > float(found[0]) and float(apart[1]) == 0


@pytest.mark.parametrize("symmetric", [False, True])
def test_texts_that_are_right_are_no_negatives(symmetric):
    # By hand: anchor a has the positives p and q, anchor b has q, anchor c has r; then hard negatives.
    texts = [["a", "p", "x"], ["a", "q", "p"], ["b", "q", "a"], ["c", "r", "b"]]
    numbers = {text: number for number, text in enumerate("abcpqrx")}
    own = given(texts=3, absent=())
    vectors = np.asarray(own.vectors, np.float64)
    own = own._replace(texts=jnp.array([[numbers[text] for text in row] for row in [*texts, texts[0]]]))
    right_of = {"a": "apq", "b": "bq", "c": "cr"}
    anchors_of = {"p": "pa", "q": "qab", "r": "rc"}
    loss = 0.0
    for row, (anchor, positive, _) in enumerate(texts):
        scores = {
            (other, place): 7.0 * cosine(vectors[row, 0], vectors[other, place])
            for other in range(4)
            for place in (1, 2)
            if (other, place) == (row, 1) or texts[other][place] not in right_of[anchor]
        }
        forward = np.log(sum(map(np.exp, scores.values()))) - scores[row, 1]
        back = {
            other: 7.0 * cosine(vectors[row, 1], vectors[other, 0])
            for other in range(4)
            if other == row or texts[other][0] not in anchors_of[positive]
        }
        backward = np.log(sum(map(np.exp, back.values()))) - back[row]
        loss += (forward + backward) / 2 if symmetric else forward
    assert float(contrastive_sums(own, ALONE, 7.0, symmetric)[0]) == pytest.approx(loss, rel=1e-5)


def test_all_right_answers_of_a_query_count(tmp_path, words):
    pairs = [("cat", "a cat"), ("cat ", "cats"), ("cat", "dogs"), ("dog", "the dog"), ("dog", "dogs")]
    task = dataclasses.replace(TASK, negatives=(), loss="contrastive")
    split = task.read(written(tmp_path, "f.jsonl", ("a", "b"), pairs), task.columns, True)
    rows = task.encode(split, words)
    assert rows.texts.tolist() == [[1, 2], [1, 3], [1, 4], [5, 6], [5, 4]]
    angles = {"cat": 0.0, "a cat": 2.0, "cats": 0.5, "dogs": 1.4, "dog": 1.5, "the dog": 2.2}

    def measured() -> dict[str, float]:
        turned = [[angles[text.strip()] for text in pair] for pair in pairs]
        return task.measure(rows, list(np.stack([np.cos(turned), np.sin(turned)], axis=-1).astype(np.float32)))

    assert measured() == {"mrr": 1.0, "accuracy": 1.0}
    angles |= {"dogs": 0.4, "a cat": 1.45}  # "a cat" is nearest to dog
    assert measured() == {"mrr": 0.75, "accuracy": 0.5}
    assert "5 of 5 pairs repeat a text of another pair" in task.describe(rows, training=True).remarks[0]


@pytest.mark.parametrize("value", [1.0, np.nan])
def test_vectors_that_are_all_the_same_or_no_numbers_find_nothing(tmp_path, words, value):
    own = given(absent=())
    own = own._replace(vectors=jnp.full_like(own.vectors, value))
    assert float(contrastive_sums(own, ALONE, 7.0, False)[1]) == 0
    task = dataclasses.replace(TASK, loss="contrastive")
    rows = task.encode(task.read(written(tmp_path, "f.tsv", ("a", "b", "c"), PAIRS), task.columns, True), words)
    found = task.measure(rows, list(np.full((3, 3, 4), value, np.float32)))
    assert found["accuracy"] == 0 and found["mrr"] <= 1 / 2.5 + 1e-9  # 4 candidates


def test_cosent_is_that_of_a_loop_over_pairs_of_rows():
    own = given(texts=2, absent=())
    own = own._replace(weights=jnp.array([1.0, 1, 0, 1, 1]))
    targets = np.array([0.2, 0.9, 0.0, 0.2, 0.5], np.float32)
    vectors = np.random.default_rng(4).normal(size=(5, 2, 6))
    own = own._replace(vectors=jnp.asarray(vectors, jnp.float32))
    scores = [5.0 * cosine(*row) for row in vectors]
    known = [0, 1, 3, 4]
    total = sum(np.exp(scores[i] - scores[j]) for i in known for j in known if targets[i] < targets[j])
    found = cosent_sum(own, jnp.asarray(targets), ALONE, 5.0)
    assert float(found) == pytest.approx(4 * np.log(1 + total), rel=1e-5)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tokenizer_lib.Tokenizer:
    folder = tmp_path_factory.mktemp("words")
    return tokenizer_lib.Tokenizer(random_checkpoint(folder, odd_config()).vocabulary.spec)


def written(folder: Path, name: str, header: tuple[str, ...], rows: list[tuple]) -> Path:
    """A file in the format that its name says."""
    path = folder / name
    if name.endswith(".parquet"):
        pq.write_table(pyarrow.Table.from_pylist([dict(zip(header, row, strict=True)) for row in rows]), path)
    elif name.endswith(".jsonl"):
        path.write_text("".join(json.dumps(dict(zip(header, row, strict=True))) + "\n" for row in rows))
    else:
        mark = "," if name.endswith(".csv") else "\t"
        path.write_text("".join(mark.join(map(str, row)) + "\n" for row in [header, *rows]))
    return path


TASK = EmbeddingTask("own", columns=Columns("a", "b"), negatives=("c",), query_prompt="the ", document_prompt="a ")


@pytest.mark.parametrize("name", ["f.tsv", "f.csv", "f.jsonl", "f.parquet"])
def test_groups_of_every_format_become_rows_with_prompts(tmp_path, words, name):
    split = TASK.read(written(tmp_path, name, ("a", "b", "c"), PAIRS), TASK.columns, True)
    assert [item.texts for item in split.items] == PAIRS and split.labelled
    rows = TASK.complete(split).encode(split, words)
    batch = rows.batch(np.array([1, 0, -1]), 12)
    texts = [words.decode(row[row > 0]) for row in batch.input_ids.reshape(9, 12)]
    assert texts[:2] == ["[CLS] the a dog [SEP]", "[CLS] a the dog sat [SEP]"]
    assert texts[2] == "" and texts[5] == "[CLS] a the river [SEP]" and texts[6:] == ["", "", ""]
    assert batch.labels.present.tolist() == [[True, True, False], [True] * 3, [False] * 3]
    assert batch.label_weights.tolist() == [1, 1, 0]


def test_a_list_of_negatives_may_have_any_length(tmp_path, words):
    rows = [("the cat", "a cat", ["the river", "a mat"]), ("a dog", "the dog", []), ("the", "a", ["river"])]
    split = TASK.read(written(tmp_path, "f.jsonl", ("a", "b", "c"), rows), TASK.columns, True)
    assert [len(item.texts) for item in split.items] == [4, 2, 3]
    assert TASK.encode(split, words).part_lengths.astype(bool).sum() == 9


@pytest.mark.parametrize(
    ("changes", "rows", "message"),
    [
        ({"loss": "triplet"}, PAIRS, "unknown task.loss 'triplet'; choose from contrastive, cosent"),
        ({"scale": 0.0}, PAIRS, "task.scale is 0.0. Use a number above 0"),
        ({"pooling": "attention_dot"}, PAIRS, "unknown task.pooling 'attention_dot'; choose from cls, mean, max, last"),
        ({"dimensions": (8, 0)}, PAIRS, "task.dimensions is"),
        ({"loss": "cosent", "negatives": ()}, PAIRS, "task.loss is cosent, but .* has no scores"),
        ({"loss": "cosent"}, PAIRS, "task.symmetric and task.negatives are for task.loss=contrastive"),
        ({"columns": Columns("a", "")}, PAIRS, "task.text_pair is not set"),
        ({"columns": Columns("a", "b", "c")}, PAIRS, "f.tsv line 2: 'the river' is not a score"),
        ({"columns": Columns("a", "b", "c")}, [("x", "y", "1"), ("x", "y", "")], "line 3: '' is not a score"),
        ({}, [("the cat", " ", "")], "f.tsv line 2 has an empty text"),
    ],
)
def test_a_wrong_option_or_file_is_refused(tmp_path, changes, rows, message):
    path = written(tmp_path, "f.tsv", ("a", "b", "c"), rows)
    with pytest.raises(UserError, match=message):
        task = dataclasses.replace(TASK, **changes)
        task.complete(task.read(path, task.columns, True))


MODEL = odd_config(width=32, heads=4, feed_forward=48, layers=2, dropout=0.0, attention_dropout=0.0)
LOSSES = {"contrastive": {"negatives": ("c",), "symmetric": True, "dimensions": (32, 8)}, "cosent": {}}


@functools.cache
def gradients_of(loss: str, mesh: tuple[int, int] | None, mesh_config: MeshConfig = DEFAULT) -> tuple:
    """Loss and gradients of a batch of 16 groups, on a mesh (data, fsdp) or on one device."""
    draw = np.random.default_rng(0)
    # A scale of 20 would amplify rounding, which differs by processor, to more than 1e-6.
    task = EmbeddingTask("own", loss=loss, scale=5.0, **LOSSES[loss])
    objective, texts = task.objective(), 3 if loss == "contrastive" else 2
    length = 8
    real = np.arange(length) < draw.integers(3, length + 1, (16, texts))[..., None]
    numbers = np.arange(1, texts + 1)[None, :, None]
    weights = np.ones(16, np.float32)
    weights[5] = 0
    numbers_of_rows = np.array([*range(12), 3, 4, 0, 3], np.int32)  # some are in the batch twice, on other devices, too
    # Rows 1 and 2 have the same positive, rows 6 and 9 the same anchor.
    numbers_of_texts = np.arange(16 * texts, dtype=np.int32).reshape(16, texts)[numbers_of_rows]
    numbers_of_texts[2, 1], numbers_of_texts[9, 0] = numbers_of_texts[1, 1], numbers_of_texts[6, 0]
    values = (draw.integers(5, 100, real.shape), 0, numbers, np.arange(length))
    batch = SideBySideBatch(
        *(np.where(real, value, 0).reshape(16, -1).astype(np.int32) for value in values),
        labels=GroupLabels(
            draw.integers(0, 4, 16).astype(np.float32), np.ones((16, texts), bool), numbers_of_rows, numbers_of_texts
        ),
        label_weights=weights,
    )
    abstract = bert.abstract_params(MODEL, objective.heads)
    params = jax.tree.map(lambda leaf: draw.normal(0, 0.2, leaf.shape).astype(np.float32), abstract)
    placement = sharding.OnMesh() if mesh else ALONE
    config = AdamW(learning_rate=1e-3)
    plan = step_lib.Plan(
        model=MODEL,
        runtime=Runtime(layer_loop="scan", placement=placement),
        objective=objective,
        optimizer_config=config,
        optimizer=optim_lib.build(config, params),
        mesh_config=mesh_config,
    )
    accumulate = jax.jit(step_lib.accumulate, static_argnums=0)
    counts = objective.counts(jax.tree.map(jnp.asarray, batch))
    if mesh is None:
        return jax.device_get(accumulate(plan, params, jax.tree.map(jnp.asarray, batch), counts, jax.random.key(0)))
    devices = sharding.make_mesh(MeshConfig(data=mesh[0], fsdp=mesh[1]), jax.devices()[: mesh[0] * mesh[1]])
    with jax.set_mesh(devices):
        spread = jax.device_put(params, sharding.shardings(devices, params))
        placed = sharding.place(batch, 16, devices)
        return jax.device_get(accumulate(plan, spread, placed, counts, jax.random.key(0)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "mesh", "mesh_config"),
    [
        ("contrastive", (2, 4), DEFAULT),  # each device gathers the vectors of the others
        ("contrastive", (8, 1), DEFAULT),  # the compiler shards the loss
        ("cosent", (2, 4), DEFAULT),
        ("contrastive", (2, 1), DEFAULT),
        ("contrastive", (8, 1), MeshConfig(reduce_dtype="float32")),
        ("cosent", (8, 1), DEFAULT),
    ],
)
def test_negatives_are_those_of_the_whole_mesh(loss, mesh, mesh_config):
    gradients, terms = gradients_of(loss, mesh, mesh_config)
    alone, wanted = gradients_of(loss, None)
    jax.tree.map(lambda found, value: np.testing.assert_allclose(found, value, rtol=1e-6), terms, wanted)
    largest = max(abs(leaf).max() for leaf in jax.tree.leaves(alone))
    assert largest > 1e-3
    for path, leaf in layers.flatten(alone).items():
        np.testing.assert_allclose(layers.flatten(gradients)[path], leaf, atol=1e-6 * max(largest, 1), err_msg=path)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    config = odd_config(vocab_size=60, width=24, layers=1, max_positions=16, dropout=0.0, attention_dropout=0.0)
    loaded = random_checkpoint(folder / "words", config, Heads(pooler=True))
    params = {path: 0.2 * value for path, value in loaded.params.items()}
    params |= {path: np.full_like(value, path.endswith("scale")) for path, value in params.items() if "norm" in path}
    huggingface_export.write(dataclasses.replace(loaded, params=params), folder / "hf")
    return folder / "hf"


def synonyms(folder: Path) -> dict[str, str]:
    """Pairs that share a topic: word i means the same as word i + 20; and the same as a BEIR folder and as STS."""
    draw = np.random.default_rng(1)
    topics = draw.integers(18, 38, (160, 2))
    rows = [(f"word{a} word{b}", f"word{b + 20} word{a + 20}") for a, b in topics]
    files = {
        "train": str(written(folder, "train.tsv", ("a", "b"), rows[:128])),
        "dev": str(written(folder, "dev.jsonl", ("a", "b"), rows[128:])),
    }
    scored = [(*rows[i], 5) for i in range(10)] + [(rows[i][0], rows[i + 1][1], 0) for i in range(10)]
    files["sts"] = str(written(folder, "sts.csv", ("a", "b", "score"), scored))
    search = folder / "search"
    (search / "qrels").mkdir(parents=True)
    documents = dict.fromkeys(text for _, text in rows[128:])
    names = {text: f"d{number}" for number, text in enumerate(documents)}
    written(search, "corpus.jsonl", ("_id", "title", "text"), [(name, "", text) for text, name in names.items()])
    queries = {text: f"q{number}" for number, (text, _) in enumerate(rows[128:])}
    written(search, "queries.jsonl", ("_id", "text"), [(name, text) for text, name in queries.items()])
    found = [f"{queries[a]}\t{names[b]}\t1" for a, b in rows[128:]]
    (search / "qrels" / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *found]) + "\n")
    files["search"] = str(search)
    return files


@pytest.mark.slow
def test_a_model_learns_which_texts_belong_together_and_keeps_its_settings(tmp_path, start, one_device):
    files = synonyms(tmp_path)
    data = {name: files[name] for name in ("train", "dev")}
    config = FinetuneConfig(
        init_from=str(start),
        task=EmbeddingConfig(text="a", text_pair="b", max_length=8, query_prompt="the ", symmetric=True, **data),
        optimizer=AdamW(learning_rate=1e-2),
        batch_size=32,
        epochs=60.0,
        length_pool=1,
    )
    untrained = evaluate(start, files["search"])["mrr@10"]
    result = finetune(config, tmp_path / "run")
    learned = result["metrics"]["mrr"]["mean"]
    assert untrained < 0.5 < learned and set(result["metrics"]) == {"mrr", "accuracy", "task_loss"}
    found = evaluate(tmp_path / "run", files["search"])
    assert found["mrr@10"] == pytest.approx(learned, abs=0.02)  # dev has equal documents only once, too
    assert found["ndcg@10"] > untrained and found["counts"]["queries"] == 31
    scored = evaluate(tmp_path / "run", files["sts"], text="a", text_pair="b", label="score")
    assert set(scored) == {"spearman", "pearson", "task_loss", "counts"} and scored["spearman"] > 0.5
    export(tmp_path / "run", tmp_path / "out", "sentence_transformers")
    for texts, prompt in ((["word20", "word21 word22"], ""), (["word20"], "query")):
        vectors = [embed(tmp_path / name, texts, prompt_name=prompt)["embeddings"] for name in ("run", "out")]
        np.testing.assert_allclose(*vectors, atol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(vectors[0], axis=1), 1, rtol=1e-5)
    pair = embed(tmp_path / "run", ["the word20"])["embeddings"] @ embed(tmp_path / "run", ["word40"])["embeddings"].T
    score = predict(tmp_path / "run", [{"text": "word20", "text_pair": "word40"}])[0]["score"]
    assert score == pytest.approx(float(pair[0, 0]), abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"microbatches": 2}, "microbatches is 2, but this loss compares all rows of a batch"),
        ({"train_layers": "head"}, r"train_layers is head, which trains no parameter of this model\. Use all"),
    ],
)
def test_what_a_loss_over_vectors_cannot_do_is_refused(tmp_path, start, one_device, changes, message):
    task = EmbeddingConfig(train=synonyms(tmp_path)["train"], text="a", text_pair="b", max_length=8)
    with pytest.raises(UserError, match=message):
        finetune(FinetuneConfig(init_from=str(start), task=task, batch_size=32, **changes), tmp_path / "run")


def test_training_continues_with_the_settings_of_a_folder(tmp_path, start):
    task = {"name": "own", "kind": "embedding", "labels": [], "max_length": 16, "pooling": "cls", "normalize": False}
    task |= {"prompt": "x", "query_prompt": "query: ", "prompts": [["query", "query: "], ["other", "x"]]}
    loaded = dataclasses.replace(open_checkpoint(start), task=task | {"truncate_dim": 5})
    huggingface_export.write_sentence_transformer(loaded, tmp_path / "folder")
    own = open_checkpoint(tmp_path / "folder").task
    options = EmbeddingConfig(train=synonyms(tmp_path)["train"], text="a", text_pair="b")

    def continued(**changes: object) -> EmbeddingTask:
        config = dataclasses.replace(options, **changes)
        return registry.resolve(config)[0].continuing(from_json(own), config)

    kept = continued(document_prompt="d: ")
    assert (kept.pooling, kept.normalize, kept.prompt, kept.truncate_dim) == ("cls", False, "x", 5)
    assert kept.named_prompts() == {"query": "query: ", "document": "d: ", "other": "x"}
    given = continued(pooling="max", normalize=True, prompt="none", query_prompt="search: ", truncate_dim=24)
    assert (given.pooling, given.normalize, given.prompt, given.truncate_dim) == ("max", True, "", 24)
    assert given.named_prompts()["query"] == "search: "
    assert continued(query_prompt="none").named_prompts() == {"other": "x"}

    config = FinetuneConfig(init_from=str(tmp_path / "folder"), task=dataclasses.replace(options, max_length=8))
    lines: list[str] = []
    _, data, _ = prepare(config, tmp_path / "run", report=lines.append)
    assert data.task.normalize is False
    said = "task.pooling='cls', task.prompt='x', task.query_prompt='query: ', task.truncate_dim=5, task.normalize=False"
    assert f"as in {config.init_from}: {said}" in lines
    swept = dataclasses.replace(config, sweep={"task.normalize": (True, False), "task.query_prompt": ("none", "a: ")})
    found = [prepare(one.config, tmp_path / "run")[1].task for one in finetuning.sweep_settings(swept)]
    assert [one.normalize for one in found] == [True, True, False, False]
    assert [one.query_prompt for one in found] == ["", "a: ", "", "a: "]


def test_a_pooling_of_the_configuration_replaces_one_that_is_unknown(tmp_path, start):
    task = {"name": "own", "kind": "embedding", "labels": [], "max_length": 8, "pooling": "mean, Dense"}
    bert_jax_export.write(dataclasses.replace(open_checkpoint(start), task=task), tmp_path / "folder")
    options = EmbeddingConfig(train=synonyms(tmp_path)["train"], text="a", text_pair="b", max_length=8)
    config = FinetuneConfig(init_from=str(tmp_path / "folder"), task=options, batch_size=32, epochs=1.0)
    with pytest.raises(UserError, match=r"unknown task\.pooling 'mean, Dense'"):
        prepare(config, tmp_path / "run")
    chosen = dataclasses.replace(config, task=dataclasses.replace(options, pooling="max"))
    _, data, _ = prepare(chosen, tmp_path / "run")
    assert data.task.pooling == "max"


def test_dev_pairs_without_a_score_are_refused_where_the_metrics_need_one(tmp_path):
    path = written(tmp_path, "dev.tsv", ("a", "b"), [("the", "cat")])
    task = EmbeddingTask("own", columns=Columns("a", "b", "score")).with_metrics()
    with pytest.raises(UserError, match=r"has no scores .*cannot be measured by spearman, pearson"):
        task.metric_names(task.read(path, task.columns, True))


def test_files_without_hard_negatives_have_pairs_and_a_training_file_needs_some(tmp_path, words):
    for name in ("f.tsv", "f.jsonl"):
        split = TASK.read(written(tmp_path, name, ("a", "b"), [pair[:2] for pair in PAIRS]), TASK.columns, True)
        rows = dataclasses.replace(TASK, loss="contrastive").encode(split, words)
        assert rows.part_lengths.astype(bool).sum(axis=1).tolist() == [2, 2, 2]
        with pytest.raises(UserError, match=rf"{name} has no hard negatives: no column 'c' \(task\.negatives\)"):
            TASK.complete(split)


def test_a_column_of_negatives_among_others_must_be_there(tmp_path):
    task = dataclasses.replace(TASK, negatives=("c", "d"))
    with pytest.raises(UserError, match=r"f\.tsv has no column 'd', but others of task.negatives"):
        task.read(written(tmp_path, "f.tsv", ("a", "b", "c"), PAIRS), task.columns, True)


def test_a_prompt_that_the_pairs_of_a_file_do_not_have_is_reported(tmp_path, words):
    scored = written(tmp_path, "s.tsv", ("a", "b", "s"), [("cat", "dog", 1.0)])
    pairs = written(tmp_path, "p.tsv", ("a", "b"), [("cat", "dog")])

    def remarks(path: Path, **prompts: str) -> list[str]:
        task = EmbeddingTask("own", columns=Columns("a", "b", "s" if path == scored else ""), **prompts)
        return task.describe(task.encode(task.read(path, task.columns, True), words)).remarks

    [said] = remarks(pairs, prompt="the ", query_prompt="a ")
    assert "its pairs are read without task.prompt ('the '), which is for single texts and pairs with a score" in said
    assert [one.split("without ")[1][:17] for one in remarks(scored, query_prompt="a ")] == ["task.query_prompt"]
    assert remarks(scored, prompt="the ") == remarks(pairs, prompt="a ", query_prompt="a ") == []


def test_inputs_of_a_model_of_scores_have_the_prompt_of_its_file(tmp_path, words):
    task = EmbeddingTask("own", columns=Columns("a", "b", "s"), prompt="the ", query_prompt="a ", loss="cosent")
    read = task.read(written(tmp_path, "f.tsv", ("a", "b", "s"), [("cat", "dog", 1.0)]), task.columns, True)
    given = task.parse(Path("x"), [InputRecord(1, {"a": "cat", "b": "dog"})])
    ids = [task.encode(split, words).input_ids.tolist() for split in (read, given)]
    assert ids[0] == ids[1] and words.decode(ids[0]).startswith("[CLS] the cat")


def test_metrics_of_vectors_are_those_asked_for(tmp_path, words):
    with pytest.raises(UserError, match="foo"):
        dataclasses.replace(TASK, metrics=("foo",))
    task = dataclasses.replace(TASK, metrics=("mrr",), loss="contrastive")
    rows = task.encode(task.read(written(tmp_path, "f.tsv", ("a", "b", "c"), PAIRS), task.columns, True), words)
    vectors = np.random.default_rng(0).normal(size=(3, 3, 8)).astype(np.float32)
    assert set(task.measure(rows, list(vectors))) == {"mrr"}
    assert set(dataclasses.replace(task, metrics=("spearman",)).measure(rows, list(vectors))) == {"mrr", "accuracy"}
