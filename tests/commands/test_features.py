"""Features of a frozen model: the vectors that embed gives, heads that learn from them, and the table."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_checkpoints import odd_config, random_checkpoint
from rich.console import Console

from bert_jax.commands import features as commands_features
from bert_jax.commands.features import main, result_table
from bert_jax.config import AutoTaskConfig, FinetuneConfig
from bert_jax.errors import UserError
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model import outputs
from bert_jax.model.heads.config import Heads
from bert_jax.tasks import registry
from bert_jax.tasks.embedder import embed
from bert_jax.tasks.features import FeatureOptions, HeadOptions, WordVectors, features, train_head, word_vectors
from bert_jax.tasks.inference import Finish, LayerVectors
from bert_jax.tasks.kinds.tagging import TagRows
from bert_jax.tokenization.tokenizer import Tokenizer

WORDS = {"the": "O", "a": "O", "cat": "B-X", "dog": "B-X", "river": "B-Y", "sat": "O", "on": "O", "mat": "B-X"}
LINEAR = FeatureOptions(head="linear", epochs=4, batch_size=8, learning_rate=1e-2)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return random_checkpoint(tmp_path_factory.mktemp("vocabulary"), odd_config(layers=4), Heads(pooler=True))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> FinetuneConfig:
    """Sentences whose tags follow from the word."""
    folder, draw = tmp_path_factory.mktemp("tags"), np.random.default_rng(0)
    for split, count in (("train", 60), ("dev", 12), ("test", 12)):
        sentences = [draw.choice(list(WORDS), draw.integers(2, 9)) for _ in range(count)]
        text = "\n\n".join("\n".join(f"{word}\t{WORDS[word]}" for word in sentence) for sentence in sentences)
        (folder / f"{split}.conll").write_text(text + "\n")
    files = {split: str(folder / f"{split}.conll") for split in ("train", "dev", "test")}
    return FinetuneConfig(task=AutoTaskConfig(**files, max_length=24))


def encoded(loaded: LoadedModel, config: FinetuneConfig) -> tuple[dict[str, TagRows], list[str]]:
    task, files = registry.resolve(config.task)
    read = {split: registry.read(task, path) for split, path in files.items()}
    task = task.complete(read["train"])
    rows = {split: task.encode(one, Tokenizer(loaded.vocabulary.spec)) for split, one in read.items()}
    return rows, [" ".join(sentence.words) for sentence in read["train"].items]  # type: ignore[return-value]


def test_the_vector_of_a_word_is_that_of_its_first_piece(
    loaded: LoadedModel, config: FinetuneConfig, tmp_path: Path
) -> None:
    rows, texts = encoded(loaded, config)
    names = ["embeddings", "concat_last_4", "2"]
    found = word_vectors(LayerVectors(loaded, names, Finish()), {"train": rows["train"]}, tmp_path, max_length=24)
    for name in names:
        whole = embed(loaded, texts, layers=name, pool="none")["embeddings"]
        got = found[name]["train"]
        np.testing.assert_allclose(got.vectors, whole[rows["train"].word_starts], atol=2e-5)
        np.testing.assert_array_equal(got.labels, rows["train"].labels[rows["train"].word_starts])


def dataset(sentences: int, seed: int, before: bool) -> WordVectors:
    """Vectors of two dimensions whose sign is the tag, their own or that of the word before (of the first: 0)."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 12, sentences)
    vectors = draw.normal(size=(sizes.sum(), 2)).astype(np.float16)
    labels = (vectors[:, 0] > 0).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    if before:
        labels = np.roll(labels, 1)
        labels[offsets[:-1]] = 0
    return WordVectors(vectors, labels, offsets)


def accuracy(options: HeadOptions, before: bool, seed: int = 0) -> tuple[float, np.ndarray]:
    splits = {"train": dataset(200, 1, before), "dev": dataset(30, 2, before), "test": dataset(30, 3, before)}
    trained = train_head(splits, 2, options, seed, lambda guess: float((guess == splits["dev"].labels).mean()))
    assert 1 <= trained.epoch <= options.epochs and set(trained.predictions) == {"dev", "test"}
    return float((trained.predictions["test"] == splits["test"].labels).mean()), trained.predictions["dev"]


def test_a_linear_head_learns_from_its_word_alone() -> None:
    options = dataclasses.replace(LINEAR, learning_rate=0.1)
    share, guesses = accuracy(options, before=False)
    assert share > 0.95
    np.testing.assert_array_equal(accuracy(options, before=False)[1], guesses)
    assert accuracy(options, before=True)[0] < 0.75


@pytest.mark.slow
def test_a_bilstm_learns_from_neighboring_words() -> None:
    share, _ = accuracy(HeadOptions(hidden=8, batch_size=16, learning_rate=0.02, epochs=12), before=True)
    assert share > 0.9


@pytest.mark.slow
def test_the_table_has_each_layer_by_seed_next_to_published_scores(loaded: LoadedModel, config: FinetuneConfig) -> None:
    result = features(loaded, config, dataclasses.replace(LINEAR, epochs=1, seeds=(3, 8)))
    assert list(result["layers"]) == list(outputs.LAYERS)
    assert result["layers"]["concat_last_4"]["width"] == 4 * loaded.model.width
    one = result["layers"]["last"]["test"]["f1"]
    assert result["seeds"] == [3, 8] and len(one["values"]) == 2
    assert one["mean"] == pytest.approx(np.mean(one["values"]))
    assert one["std"] == pytest.approx(np.std(one["values"], ddof=1))
    assert json.loads(json.dumps(result)) == result and result["counts"]["train"]["examples"] == 60
    shown = io.StringIO()
    Console(width=120, file=shown).print(result_table(result | {"task": "conll2003"}, "f1"))
    assert "another model's" in shown.getvalue() and "96.1" in shown.getvalue()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"layers": "middle"}, "unknown --layers 'middle'; choose from embeddings"),
        ({"layers": ","}, "--layers is ','; use all, or a comma-separated list of"),
        ({"seeds": 0}, "--seeds is 0. Use a number of seeds of at least 1, or several different"),
        ({"head": "crf"}, "unknown --head 'crf'; choose from linear, bilstm"),
        ({"seeds": (7, 7)}, "--seeds is 7,7. Use"),
        ({"seeds": (7, -1)}, "--seeds is 7,-1. Use"),
        ({"max_sentences": -1}, "--max_sentences is -1"),
        ({"feature_dtype": "int8"}, "unknown --feature_dtype 'int8'; choose from float16, float32"),
    ],
)
def test_what_cannot_be_is_refused(loaded: LoadedModel, config: FinetuneConfig, arguments: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        features(loaded, config, FeatureOptions(**arguments))


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--config.batch_size=8", "has no effect on features, which trains heads only; use --batch_size"),
        ("--config.optimizer.learning_rate=1", "use --learning_rate"),
        ("--config.length_pool=3", r"--config.length_pool has no effect.*the flags of --help set how"),
        ("--length_pool=3", "the flags of --help set how"),
        ("--config.early_stop=3", "use --early_stop"),
        ("--seed=3", r"--config\.seed has no effect"),
    ],
)
def test_keys_without_an_effect_are_refused(argument: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        main(["--checkpoint=c", "--config=tagging:task=ewt", argument])


def test_flags_have_the_names_of_other_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[FinetuneConfig, FeatureOptions]] = []

    def stop(checkpoint: str, config: Any, options: FeatureOptions, **_: Any) -> None:
        given.append((config, options))
        raise UserError("stop")

    monkeypatch.setattr(commands_features, "features", stop)
    line = ["--checkpoint=c", "--config=tagging:task=own"]
    with pytest.raises(UserError, match="stop"):
        main([*line, "--seeds=0,7,9", "--early_stop", "2", "--dtype=float32", "--max_rows=5", "--label=3"])
    [(config, options)] = given
    assert config.task.label == "3" and options.seeds == (0, 7, 9)
    assert (options.patience, options.feature_dtype, options.max_sentences) == (2, "float32", 5)
    for seeds, said in (("1,x", "neither a number nor several"), ("0", "--seeds is 0")):
        with pytest.raises(UserError, match=said):
            main([*line, f"--seeds={seeds}"])


def test_a_head_stops_by_a_dev_file_of_tags(loaded: LoadedModel, config: FinetuneConfig) -> None:
    with pytest.raises(UserError, match="the task has no dev file"):
        features(loaded, dataclasses.replace(config, task=dataclasses.replace(config.task, dev="", dev_share=0.0)))
    with pytest.raises(UserError, match="use a tagging task"):
        features(loaded, FinetuneConfig(task=AutoTaskConfig(train="a.tsv", text="a", label="b")))
