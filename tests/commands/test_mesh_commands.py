"""The commands on a mesh of all axes: what they leave is what a mesh of rows leaves."""

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import RECIPE, ROOT, TINY

from bert_jax.commands import finetune, pretrain
from bert_jax.config import MeshConfig
from bert_jax.tasks.embedder import embed
from bert_jax.tasks.evaluation import evaluate
from bert_jax.train import metrics
from bert_jax.train.workdir import latest_step

SHARDED = "--config.mesh.shard_optimizer=True"
CUBE = ("--config.mesh.fsdp=2", "--config.mesh.tensor=2")


def pretrained(shards: Path, workdir: Path, *overrides: str) -> dict:
    pretrain.main(
        [
            f"--config={RECIPE}",
            f"--workdir={workdir}",
            f"--config.data.train={shards}",
            *TINY,
            "--config.batch_size=16",
            "--config.steps=4",
            "--config.log_every=2",
            *overrides,
        ]
    )
    return json.loads((workdir / "result.json").read_text())


@pytest.fixture(scope="module")
def rows(shards_dir, tmp_path_factory) -> Path:
    """A workdir of a run whose devices have rows each."""
    workdir = tmp_path_factory.mktemp("rows") / "run"
    pretrained(shards_dir, workdir)
    return workdir


@pytest.mark.slow
def test_pretraining_resumes_on_another_mesh_and_every_command_reads_its_checkpoint(rows, shards_dir, tmp_path, capfd):
    averaged = "--config.optimizer.ema_decay=0.9"
    pretrained(shards_dir, tmp_path / "cube", "--config.steps=2", *CUBE, SHARDED, averaged)
    told = capfd.readouterr().err
    assert "'fsdp': 2, 'tensor': 2" in told and "largest replicated tensor" in told
    cube = pretrained(shards_dir, tmp_path / "cube", "--config.mesh.data=1", "--config.mesh.fsdp=8", averaged)
    lines = [metrics.read_metrics(workdir) for workdir in (rows, tmp_path / "cube")]
    np.testing.assert_allclose(*([line["loss"] for line in part] for part in lines), rtol=1e-6)
    wanted = json.loads((rows / "result.json").read_text())["eval_loss"]
    assert cube["eval_loss"] == pytest.approx(wanted, rel=1e-6)
    for mesh in (MeshConfig(), MeshConfig(fsdp=2, tensor=2)):
        again = evaluate(tmp_path / "cube", shards_dir, batch_size=16, mesh=mesh)
        assert again["loss"] == pytest.approx(cube["eval_loss"], rel=1e-6)
    vectors = [embed(workdir, ["a book", "two books"])["embeddings"] for workdir in (rows, tmp_path / "cube")]
    np.testing.assert_allclose(*vectors, atol=1e-3)  # a step of Adam may go either way where a gradient is noise


@pytest.mark.slow
def test_a_run_with_a_sharded_optimizer_resumes_bit_for_bit_and_trains_as_without(rows, shards_dir, tmp_path):
    options = (SHARDED, "--config.mesh.fsdp=2")
    pretrained(shards_dir, tmp_path / "whole", *options)
    for steps in (2, 4):
        pretrained(shards_dir, tmp_path / "stopped", f"--config.steps={steps}", *options)
    lines = [metrics.read_metrics(workdir) for workdir in (tmp_path / "whole", tmp_path / "stopped", rows)]
    whole, stopped, without = ([(line["loss"], line["gradient_norm"]) for line in part] for part in lines)
    assert whole == stopped
    np.testing.assert_allclose(whole, without, rtol=1e-5)


@pytest.mark.slow
def test_finetuning_on_a_mesh_measures_as_on_rows(rows, tmp_path):
    for name, text in (("train", "good\t1\nbad\t0\n" * 8), ("dev", "good\t1\nbad\t0\n")):
        (tmp_path / f"{name}.tsv").write_text("text\tlabel\n" + text)
    found = []
    for name, mesh in (("rows", ()), ("cube", CUBE)):
        finetune.main(
            [
                f"--config={ROOT}/configs/own.py",
                f"--workdir={tmp_path / name}",
                f"--config.init_from={rows}",
                f"--config.task.train={tmp_path / 'train.tsv'}",
                f"--config.task.dev={tmp_path / 'dev.tsv'}",
                "--config.task.text=text",
                "--config.task.label=label",
                "--config.batch_size=8",
                "--config.epochs=1",
                *mesh,
            ]
        )
        found.append(json.loads((tmp_path / name / "result.json").read_text())["metrics"]["task_loss"]["mean"])
        assert latest_step(tmp_path / name) == 2
    assert found[0] == pytest.approx(found[1], rel=1e-5)
