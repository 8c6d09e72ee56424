"""The scores of fine-tuning: their command lines, their tables, and the split of SQuAD's dev file by article."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scores
from bert_jax import config as config_lib
from bert_jax.config import FinetuneConfig
from bert_jax.errors import UserError
from bert_jax.tasks.kinds.question_data import read_squad


def article(title: str) -> dict[str, Any]:
    answer = {"text": title, "answer_start": 3}
    question = {"id": f"id of {title}", "question": "What?", "answers": [answer]}
    return {"title": title, "paragraphs": [{"context": f"It {title}.", "qas": [question]}]}


@pytest.mark.parametrize("score", scores.SCORES, ids=lambda score: score.name)
def test_each_command_is_a_configuration(score, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BERT_JAX_DATA", str(tmp_path))
    _, name, _, recipe, _, workdir, *overrides = scores.arguments_of(score.line, tmp_path / "model", tmp_path)
    config = config_lib.from_flags(FinetuneConfig, recipe, overrides)
    assert (name, workdir) == ("finetune", str(tmp_path / score.name))
    assert config.init_from == str(tmp_path / "model")
    assert "$" not in f"{config.task.train}{config.task.dev}{config.task.data_dir}"


def test_articles_are_split_by_the_hash_of_their_title(tmp_path: Path):
    titles = [f"title {number}" for number in range(60)]
    source = tmp_path / "dev.json"
    source.write_text(json.dumps({"version": "1.1", "data": [article(title) for title in titles]}), encoding="utf-8")
    scores.main(["--split_squad", str(source), str(tmp_path / "parts")])
    found = {part: read_squad(tmp_path / "parts" / f"{part}.json", True).items for part in ("train", "dev")}
    expected = [title for title in titles if int.from_bytes(hashlib.sha256(title.encode()).digest()) % 5 == 0]
    assert [one.context[3:-1] for one in found["dev"]] == expected and 0 < len(expected) < 30
    assert [one.context[3:-1] for one in found["train"]] == [title for title in titles if title not in expected]
    source.write_text(json.dumps({"version": "1.1", "data": [article(expected[0])]}), encoding="utf-8")
    with pytest.raises(UserError, match="train would have no article of 1"):
        scores.split_squad(source, tmp_path / "none")


@pytest.mark.slow
def test_parts_of_squad_are_those_that_the_table_names(bert_jax_data: Path, tmp_path: Path):
    source = bert_jax_data / "squad" / "dev-v1.1.json.xz"
    scores.split_squad(source, tmp_path)
    contents = {part: json.loads((tmp_path / f"{part}.json").read_text(encoding="utf-8")) for part in ("train", "dev")}
    assert {part: len(content["data"]) for part, content in contents.items()} == {"train": 35, "dev": 13}
    train, dev = (read_squad(tmp_path / f"{part}.json", True).items for part in ("train", "dev"))
    assert (len(train), len(dev)) == (8076, 2494)
    assert not {one.context for one in train} & {one.context for one in dev}
    assert {*train, *dev} == set(read_squad(source, True).items)


def test_published_scores_stand_next_to_the_task_that_they_are_of():
    by_name = {score.name: score for score in scores.SCORES}
    metric = {"mean": 0.5, "std": 0.01, "values": [0.49, 0.51]}
    metrics = dict.fromkeys(("f1", "test_f1", "exact_match"), metric)
    found = [
        (by_name[name], {"task": task, "metrics": metrics, "command": f"run {name}"})
        for name, task in (("conll2003", "conll2003"), ("squad1_by_article", "own"))
    ]
    lines = scores.page_of(found).splitlines()
    assert lines[2] == "| conll2003 | f1 | 50.0 ± 1.0 | 49.0, 51.0 | 50.0 ± 1.0 | 96.4 | 92.4 |  |"
    article_lines = [line for line in lines if line.startswith("| squad1_by_article")]
    assert len(article_lines) == 2 and all("| - | - | trained on 35 articles" in line for line in article_lines)
    (source,) = (line for line in lines if line.startswith("- "))
    assert source.startswith("- conll2003: BERT-Base, cased") and "table 7" in source
    prepare = f"    python {by_name['squad1_by_article'].prepare}"
    assert lines[-3:] == ["    run conll2003", prepare, "    run squad1_by_article"]


def config_of(table: str, method: str, runs: Path, data: tuple[str, ...] = ()) -> FinetuneConfig:
    found = scores.COMPARISONS[table]
    task = next(iter(found.metrics))
    _, _, _, recipe, workdir, *overrides = scores.fine_tuning_of(found, task, method, runs / "base", runs, 6, data)
    assert workdir == f"--workdir={runs / f'{task}-{method}'}"
    return config_lib.from_flags(FinetuneConfig, recipe.removeprefix("--config="), overrides)


@pytest.mark.parametrize("table", scores.COMPARISONS)
def test_the_methods_of_a_table_have_the_same_seeds_epochs_and_task(table: str, tmp_path: Path):
    found = scores.COMPARISONS[table]
    configs = {method: config_of(table, method, tmp_path) for method in found.methods}
    assert len({(one.task.name, one.task.kind, one.batch_size) for one in configs.values()}) == 1
    assert {one.epochs for one in configs.values()} == {found.epochs}
    assert {name: one.seeds for name, one in configs.items() if name != scores.TEACHER} == {
        name: found.seeds for name in configs if name != scores.TEACHER
    }


def test_adapters_and_students_are_those_that_the_tables_name(tmp_path: Path):
    matrices = {
        method: len(config_of("lora", method, tmp_path).lora.matrices) for method in ("full", "lora", "lora_all")
    }
    ranks = {method: config_of("lora", method, tmp_path).lora.rank for method in matrices}
    assert (matrices, ranks) == ({"full": 6, "lora": 2, "lora_all": 6}, {"full": 0, "lora": 8, "lora_all": 8})
    teacher, student, alone = (config_of("distillation", name, tmp_path) for name in ("teacher", "student", "alone"))
    assert teacher.init_layers == () and teacher.seeds == 1 and not teacher.distill.teacher
    assert student.init_layers == alone.init_layers == (1, 3, 5)
    assert student.optimizer.learning_rate == alone.optimizer.learning_rate == 2e-4 > teacher.optimizer.learning_rate
    assert student.distill.teacher == student.init_from == str(tmp_path / "mrpc-teacher")
    assert not alone.distill.teacher and alone.init_from == teacher.init_from
