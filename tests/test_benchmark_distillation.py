"""The comparison of students with their teacher: its command lines, its figures, and a short run of it."""

import json
from pathlib import Path

import pytest
from random_checkpoints import random_checkpoint

from benchmarks import distillation
from bert_jax import config as config_lib
from bert_jax.config import FinetuneConfig, ModelConfig
from bert_jax.interop import bert_jax_export
from bert_jax.interop.open_checkpoint import open_checkpoint

TINY = ModelConfig(vocab_size=131, layers=4, width=16, heads=2, feed_forward=16, max_positions=128)


def config_of(method: str, runs: Path) -> FinetuneConfig:
    length = {"seeds": 5, "steps": 0, "epochs": 5.0, "rate": 2e-4}
    _, _, recipe, _, *overrides = distillation.arguments_of("stsb", method, "base", runs, layers=6, **length)
    return config_lib.load(FinetuneConfig, config_lib.read_flags(recipe.removeprefix("--config="), overrides))


def test_students_have_every_second_layer_and_differ_in_the_teacher_alone(tmp_path):
    teacher, student, alone = (config_of(method, tmp_path) for method in distillation.METHODS)
    assert teacher.init_layers == () and teacher.seeds == (0,) and not teacher.distill.teacher
    assert student.init_layers == alone.init_layers == (1, 3, 5)
    assert student.seeds == alone.seeds == (5,)
    assert student.optimizer.learning_rate == alone.optimizer.learning_rate == 2e-4 > teacher.optimizer.learning_rate
    assert student.distill.teacher == student.init_from == str(tmp_path / "stsb-teacher")
    assert not alone.distill.teacher and alone.init_from == teacher.init_from


def test_the_share_that_students_keep_is_of_the_teachers_score():
    def result(values: list[float]) -> dict:
        spread = {"mean": sum(values) / len(values), "std": 0.01, "values": values}
        return {"seeds": list(range(len(values))), "metrics": {"f1": spread}}

    results = {"teacher": result([0.8]), "student": result([0.76, 0.78]), "alone": result([0.7, 0.7])}
    found = distillation.compare(results, "f1")
    assert found["student"] == {"mean": 77.0, "std": 1.0, "seeds": 2}
    assert (found["student_keeps"], found["alone_keeps"]) == (96.2, 87.5) and found["reaches_target"]
    assert not distillation.compare(results | {"student": result([0.75])}, "f1")["reaches_target"]
    assert distillation.table_of({"mrpc": found}).row_count == 3


@pytest.mark.slow
@pytest.mark.usefixtures("bert_jax_data", "one_device_processes")
def test_a_short_run_trains_teacher_and_students_and_prints_what_they_keep(tmp_path: Path, capsys):
    bert_jax_export.write(random_checkpoint(tmp_path / "words", TINY), tmp_path / "start")
    options = {"model": tmp_path / "start", "runs": tmp_path / "runs", "tasks": "mrpc", "seeds": 1, "steps": 2}
    distillation.main([f"--{key}={value}" for key, value in options.items()])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["mrpc"]
    assert (found["teacher"]["seeds"], found["student"]["seeds"], found["alone"]["seeds"]) == (1, 1, 1)
    assert open_checkpoint(tmp_path / "runs" / "mrpc-student").model.layers == 2
