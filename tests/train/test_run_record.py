"""Tests run.json: what each start of a run records, and where it is shown."""

import json
import subprocess
from pathlib import Path

import pytest
from tiny_runs import TINY, arguments

from bert_jax.commands import pretrain
from bert_jax.interop.export import export
from bert_jax.reporting import report
from bert_jax.train import run_record


@pytest.fixture(scope="module")
def resumed(shards_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, resumed for two more with another interval of the log."""
    workdir = tmp_path_factory.mktemp("recorded") / "run"
    pretrain.main(arguments(shards_dir, workdir))
    pretrain.main([*arguments(shards_dir, workdir), "--config.steps=6", "--config.log_every=1"])
    return workdir


def test_every_start_is_recorded(resumed: Path, shards_dir: Path):
    first, second = json.loads((resumed / "run.json").read_text())["starts"]
    assert (first["step"], second["step"]) == (0, 4)
    for start in (first, second):
        assert start["command"] and start["host"] and start["processes"] == 1
        assert start["time"].endswith("+00:00") and start["devices"].startswith("8 x ")
        assert {"python", "bert_jax", "jax", "jaxlib", "flax", "optax"} <= start["versions"].keys()
    assert first["differences"] == [] and "changed from here on: steps: 4 -> 6" in second["differences"]
    configuration = second["configuration"]
    assert configuration["recipe"].endswith("bert_tiny.py")
    assert configuration["given"]["data.train"] == str(shards_dir)
    assert configuration["resolved"]["compute_dtype"] == "float32"  # of auto on a CPU
    assert configuration["changed"]["steps"] == 6 and configuration["changed"]["log_every"] == 1
    assert "optimizer.beta1" not in configuration["changed"]


def test_report_and_model_card_show_the_start(resumed: Path, tmp_path: Path):
    page = report.report(resumed).read_text(encoding="utf-8")
    starts = json.loads((resumed / "run.json").read_text())["starts"]
    assert all(start["time"] in page for start in starts) and starts[0]["host"] in page
    export(resumed, tmp_path / "exported", "hf")
    card = (tmp_path / "exported" / "README.md").read_text(encoding="utf-8")
    assert "| recipe | bert_tiny.py |" in card and f"bert_jax {starts[0]['versions']['bert_jax']}" in card
    assert starts[0]["host"] not in card and str(resumed) not in card


def test_a_damaged_record_stops_no_run(tmp_path: Path):
    (tmp_path / "run.json").write_text("{")
    assert run_record.read_starts(tmp_path) == []


def test_the_commit_is_that_of_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True, text=True
        ).stdout

    package = tmp_path / "bert_jax"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setattr(run_record.bert_jax, "__file__", str(package / "__init__.py"))
    assert run_record.commit() == ""
    git("init", "-q")
    assert run_record.commit() == ""  # not a file of this checkout
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a", "commit", "-q", "-m", "first")
    head = git("rev-parse", "HEAD").strip()
    assert run_record.commit() == head
    (package / "__init__.py").write_text("1")
    assert run_record.commit() == f"{head}+changes"


def test_the_command_line_is_written_as_it_is_typed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_record.sys, "argv", ["/venv/bin/bert-jax", "pretrain", "--config.batch_schedule={0: 2}"])
    assert run_record.command() == "bert-jax pretrain '--config.batch_schedule={0: 2}'"
    monkeypatch.setattr(run_record.sys, "argv", ["/src/bert_jax/__main__.py", "finetune"])
    assert run_record.command() == "python -m bert_jax finetune"


def test_a_start_warns_about_small_batches_and_about_many_rows(shards_dir: Path, tmp_path: Path, capsys):
    recipe = tmp_path / "short.py"
    recipe.write_text(
        "from bert_jax.config import recipe_module\n\n\ndef get_config():\n"
        "    config = recipe_module('bert_tiny').get_config()\n"
        "    config.steps, config.batch_size = 1, 16\n    return config\n"
    )
    pretrain.main([f"--config={recipe}", *arguments(shards_dir, tmp_path / "run", *TINY)[1:]])  # 4 steps of 16 rows
    printed = capsys.readouterr().err
    assert "positions for each of 8 devices" in printed
    assert "4 times as many rows as the recipe short. For as many, set --config.steps=1" in printed
