"""Runs with a teacher: they resume bit for bit, leave checkpoints of the student alone, and learn; and refusals."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from random_checkpoints import assert_same_tensors, random_checkpoint
from tiny_runs import arguments

from bert_jax.commands import pretrain
from bert_jax.config import AdamW, DistillConfig, EvalConfig, FinetuneConfig, LinearSchedule, ModelConfig, TaskConfig
from bert_jax.errors import UserError
from bert_jax.interop import export as bert_jax_export
from bert_jax.interop.export import export
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import layers
from bert_jax.model.bert import abstract_params
from bert_jax.model.heads.config import Heads
from bert_jax.tasks.finetuning import finetune
from bert_jax.tasks.kinds.tagging import TaggingTask
from bert_jax.tasks.runs import distilled_task, prepare
from bert_jax.tokenization import tokenizer
from bert_jax.train import metrics
from bert_jax.train.workdir import read_config, read_params

MODEL = ModelConfig(vocab_size=1000, layers=2, width=32, heads=4, feed_forward=48, max_positions=64, dropout=0.0)
PRETRAINED = Heads(mlm=True, next_sentence=True, pooler=True)
SMALL = tuple(f"--config.model.{change}" for change in ("layers=2", "width=32", "heads=4", "feed_forward=48"))
TASK = {"classification": "stars", "regression": "score"}


def checkpoint(folder: Path, vocab_dir: Path, heads: Heads = PRETRAINED, task: Any = None, **changes: Any) -> str:
    """A workdir with small random parameters, and with norms that begin as they do."""
    words = tokenizer.load(vocab_dir)
    model = dataclasses.replace(MODEL, vocab_size=words.vocab_size, attention_dropout=0.0, **changes)
    draw, params = np.random.default_rng(0), {}
    for path, leaf in layers.flatten(abstract_params(model, heads)).items():
        params[path] = draw.normal(0, 0.05, leaf.shape).astype(np.float32)
        if path.endswith(("norm/scale", "norm/bias")):
            params[path] = np.full(leaf.shape, path.endswith("scale"), np.float32)
    bert_jax_export.write(LoadedModel(model, heads, params, words, task=task), folder)
    return str(folder)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, vocab_dir: Path) -> str:
    """Four layers, wider than the student."""
    return checkpoint(tmp_path_factory.mktemp("teacher") / "run", vocab_dir, layers=4, width=48)


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A label that says whether the text has the word good; those of `random` say nothing."""
    folder, draw = tmp_path_factory.mktemp("reviews"), np.random.default_rng(0)
    words = ["the house", "a man", "her letter", "the sea", "that day"]
    for split, count in (("train", 128), ("random", 128), ("dev", 32)):
        lines = ["review\tstars\tscore"]
        for _ in range(count):
            good = bool(draw.integers(2))
            label = bool(draw.integers(2)) if split == "random" else good
            lines.append(
                f"{draw.choice(words)} was {'good' if good else 'dark'}\t{'yes' if label else 'no'}\t{good:d}.5"
            )
        (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {split: str(folder / f"{split}.tsv") for split in ("train", "random", "dev")}


def config_of(start: str, reviews: dict[str, str], kind: str = "classification", **changes: Any) -> FinetuneConfig:
    files = {"train": reviews["train"], "dev": reviews["dev"], "text": "review", "label": TASK.get(kind, "stars")}
    task = TaskConfig.kinds[kind](max_length=32, pooling="mean", **files | changes.pop("task", {}))
    optimizer = AdamW(learning_rate=5e-3, schedule=LinearSchedule(warmup_steps=-1))
    built = FinetuneConfig(task=task, optimizer=optimizer, batch_size=16, epochs=3.0, length_pool=1, init_from=start)
    return dataclasses.replace(built, **changes)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_pretraining_run_resumes_bit_for_bit_and_saves_the_student_alone(shards_dir, teacher, tmp_path):
    flags = ("distill.hidden_weight=1", "distill.layers=uniform", f"distill.teacher={teacher}", "checkpoint.keep=0")
    overrides = (*SMALL, *(f"--config.{flag}" for flag in flags), "--config.checkpoint.every_steps=2")
    pretrain.main(arguments(shards_dir, tmp_path / "run", *overrides))
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "4")
    moved = tmp_path / "moved"
    shutil.copytree(teacher, moved)  # the place of a teacher is not a part of the run
    pretrain.main([*arguments(shards_dir, tmp_path / "again", *overrides), f"--config.distill.teacher={moved}"])
    assert_same_tensors(read_params(tmp_path / "again", 4), read_params(tmp_path / "run", 4))

    lines = metrics.read_metrics(tmp_path / "run")
    assert all(line["soft_loss"] > 0 and line["hidden_loss"] > 0 for line in lines)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert "eval_soft_loss" not in result
    assert result["eval_loss"] == pytest.approx(lines[-1]["eval_mlm_loss"] + lines[-1]["eval_nsp_loss"], rel=1e-6)

    saved = read_params(tmp_path / "run", 4)
    assert not any("teacher" in path for path in saved)
    assert saved["hidden_projection/dense/kernel"].shape == (32, 48)
    assert read_config(tmp_path / "run").heads.hidden_projection == 48
    student = open_checkpoint(tmp_path / "run")
    assert set(saved) - set(student.params) == {"hidden_projection/dense/kernel", "hidden_projection/dense/bias"}
    assert set(student.params) == set(layers.flatten(abstract_params(student.model, student.heads)))
    export(tmp_path / "run", tmp_path / "hf")
    assert_same_tensors(dict(open_checkpoint(tmp_path / "hf").params), dict(student.params))

    other = random_checkpoint(tmp_path / "words", MODEL).params  # other values in the same architecture
    loaded = open_checkpoint(teacher)
    bert_jax_export.write(
        dataclasses.replace(loaded, params={**loaded.params, "mlm_head/bias": other["mlm_head/bias"]}),
        tmp_path / "other",
    )
    with pytest.raises(UserError, match=r"belongs to another run: distill.teacher: fingerprint \w+ -> fingerprint"):
        pretrain.main(
            [*arguments(shards_dir, tmp_path / "run", *overrides), f"--config.distill.teacher={tmp_path}/other"]
        )


@pytest.mark.slow
def test_a_run_on_eight_devices_has_the_losses_of_one(shards_dir, teacher, tmp_path, monkeypatch):
    """Over two steps of two microbatches, with parameters of both models sharded over four devices."""
    flags = (f"distill.teacher={teacher}", "distill.hidden_weight=1", "distill.positions=all", "microbatches=2")
    overrides = (*SMALL, *(f"--config.{flag}" for flag in flags), "--config.steps=2", "--config.log_every=1")
    pretrain.main(arguments(shards_dir, tmp_path / "eight", *overrides, "--config.mesh.fsdp=4"))
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)
    pretrain.main(arguments(shards_dir, tmp_path / "one", *overrides))
    lines = [metrics.read_metrics(tmp_path / name) for name in ("eight", "one")]
    for name in ("loss", "mlm_loss", "soft_loss", "hidden_loss", "gradient_norm"):
        eight, one = ([line[name] for line in each] for each in lines)
        assert len(one) == 2
        np.testing.assert_allclose(eight, one, rtol=2e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_student_learns_from_its_teacher_alone(reviews, vocab_dir, tmp_path):
    """The labels of its training file say nothing; and three seeds in turn have a teacher each."""
    start = checkpoint(tmp_path / "start", vocab_dir)
    taught = finetune(config_of(start, reviews, epochs=8.0), tmp_path / "teacher")
    assert taught["metrics"]["accuracy"]["mean"] == 1.0
    distill = DistillConfig(teacher=str(tmp_path / "teacher"), hard_weight=0.0, hidden_weight=1.0)
    student = {"init_layers": (0,), "distill": distill, "epochs": 8.0, "task": {"train": reviews["random"]}}
    result = finetune(config_of(start, reviews, seeds=2, **student), tmp_path / "student")
    assert result["metrics"]["accuracy"]["values"] == [1.0, 1.0]
    model = open_checkpoint(tmp_path / "student").model
    assert model.layers == 1


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_fine_tuning_with_a_projection_resumes_and_is_measured_without_it(reviews, vocab_dir, tmp_path):
    start, wide = checkpoint(tmp_path / "start", vocab_dir), checkpoint(tmp_path / "wide", vocab_dir, width=48)
    distill = DistillConfig(teacher=wide, soft_weight=0.0, hidden_weight=1.0, layers="uniform", hidden_loss="mse")
    options: dict[str, Any] = {"distill": distill, "eval": EvalConfig(every_steps=8), "early_stop": 9, "epochs": 2.0}
    config = config_of(start, reviews, "regression", **options)
    whole = finetune(config, tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    last = max(int(path.name) for path in (tmp_path / "again" / "checkpoints").iterdir() if path.name.isdecimal())
    shutil.rmtree(tmp_path / "again" / "checkpoints" / str(last))
    again = finetune(config, tmp_path / "again")
    assert again["metrics"] == whole["metrics"]
    assert_same_tensors(read_params(tmp_path / "again"), read_params(tmp_path / "run"))
    assert "hidden_projection" not in " ".join(open_checkpoint(tmp_path / "run").params)


def refused(config: FinetuneConfig, tmp_path: Path, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        prepare(config, tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_teachers_that_cannot_teach_a_task_are_refused(reviews, vocab_dir, teacher, tmp_path):
    start = checkpoint(tmp_path / "start", vocab_dir)

    def with_teacher(path: str, kind: str = "classification", task: Any = None, **changes: Any) -> FinetuneConfig:
        return config_of(start, reviews, kind, distill=DistillConfig(teacher=path, **changes), task=task or {})

    refused(with_teacher(teacher), tmp_path, "is no model of a task, but the task is of kind classification")
    labels = {"name": "own", "kind": "classification", "labels": ["bad", "fair", "good"]}
    three = checkpoint(tmp_path / "three", vocab_dir, Heads(pooler=True, classes=3), labels)
    refused(with_teacher(three), tmp_path, "has the labels bad, fair, good, but the task has no, yes")
    refused(with_teacher(three, "regression"), tmp_path, "a task of kind classification, but the task is of kind regr")
    causal = checkpoint(tmp_path / "causal", vocab_dir, layers=1, causal=True)
    hidden = {"soft_weight": 0.0, "hidden_weight": 1.0}
    refused(with_teacher(causal, **hidden), tmp_path, "is causal, .* Use a teacher that sees the same tokens")
    refused(with_teacher(teacher, positions="all"), tmp_path, "distill.positions is all, which is for pretraining")
    refused(with_teacher(teacher, layers={3: 4}, **hidden), tmp_path, "layer 3 of the student, which has 2")
    short = checkpoint(tmp_path / "short", vocab_dir, max_positions=16)
    refused(with_teacher(short, **hidden), tmp_path, "task.max_length is 32, but distill.teacher=.* has 16 positions")
    random_checkpoint(tmp_path / "words", MODEL)
    bert_jax_export.write(random_checkpoint(tmp_path / "words", MODEL), tmp_path / "foreign")
    refused(with_teacher(str(tmp_path / "foreign")), tmp_path, "has another tokenizer than the student")
    alone = dataclasses.replace(config_of(start, reviews), distill=DistillConfig(temperature=4.0))
    refused(alone, tmp_path, "distill.temperature is 4.0, but distill.teacher is not set")
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_teacher_with_a_crf_has_hidden_states_alone(vocab_dir, tmp_path):
    """The softmax of its emissions is not its prediction."""
    labels = ("B-X", "I-X", "O")
    task = {"name": "own", "kind": "tagging", "labels": list(labels)}
    heads, words = Heads(tags=3, crf=True), tokenizer.load(vocab_dir)
    path = checkpoint(tmp_path / "crf", vocab_dir, heads, task)
    student = open_checkpoint(path).model

    def taught(**changes: Any) -> Any:
        config = FinetuneConfig(distill=DistillConfig(teacher=path, **changes))
        return distilled_task(config, student, TaggingTask("own", labels, max_length=32), words)

    with pytest.raises(
        UserError, match=r"has a CRF, .* or learn from its hidden states alone: .*soft_weight=0"
    ) as caught:
        taught()
    assert "\n" not in str(caught.value)
    assert taught(soft_weight=0.0, hidden_weight=1.0) is not None


def test_labels_of_a_teacher_are_brought_into_the_order_of_the_task(reviews, vocab_dir, tmp_path):
    start = checkpoint(tmp_path / "start", vocab_dir)
    labels = {"name": "own", "kind": "classification", "labels": ["YES", "NO"]}
    swapped = checkpoint(tmp_path / "swapped", vocab_dir, Heads(pooler=True, classes=2), labels)
    config = config_of(start, reviews, distill=DistillConfig(teacher=swapped))
    _, data, runs = prepare(config, tmp_path / "run")
    run = next(iter(runs.values()))
    assert data.task.labels == ("no", "yes")
    bias = open_checkpoint(swapped).params["classifier/dense/bias"]
    np.testing.assert_array_equal(run.constants["teacher/classifier/dense/bias"], bias[::-1])


def test_teachers_that_cannot_teach_pretraining_are_refused(shards_dir, vocab_dir, teacher, tmp_path):
    headless = checkpoint(tmp_path / "headless", vocab_dir, Heads())
    short = checkpoint(tmp_path / "short", vocab_dir, max_positions=32)
    causal = checkpoint(tmp_path / "causal", vocab_dir, Heads(mlm=True), causal=True)
    bert_jax_export.write(random_checkpoint(tmp_path / "words", MODEL), tmp_path / "foreign")
    for path, flags, message in (
        (headless, (), "has no masked-language-model head, so it gives no soft targets"),
        (short, (), "distill.teacher=.* supports only 32 positions, but the rows have 64"),
        (causal, (), "is causal, .* Use a teacher that sees the same tokens"),
        (tmp_path / "foreign", (), "has another tokenizer than the student"),
        (teacher, ("objective=diffusion",), "config.objective is diffusion: pretraining distils masked"),
        (teacher, ("model.logits_at_once=64",), "logits_at_once is 64, but soft targets are of the whole vocabulary"),
        (tmp_path / "nowhere", (), "no checkpoint at"),
    ):
        overrides = (*SMALL, f"--config.distill.teacher={path}", *(f"--config.{flag}" for flag in flags))
        with pytest.raises(UserError, match=message) as caught:
            pretrain.main(arguments(shards_dir, tmp_path / "run", *overrides))
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "run").exists()
