"""Tests --import FILE, which every command takes: extensions work from the command line alone, and so do their keys."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_finetuning
from extensions import rare_words
from tiny_runs import RECIPE, TINY

from bert_jax import extensions
from bert_jax.commands import main as commands_main
from bert_jax.commands.main import MODULES
from bert_jax.config import MaskingConfig
from bert_jax.data.loader import DatasetLoader
from bert_jax.data.masking.choices import MASKINGS, Candidates, highest_words
from bert_jax.data.masking.rule import WordBoundaries
from bert_jax.data.shards import open_dataset
from bert_jax.errors import UserError
from bert_jax.train.metrics import read_metrics

start, reviews = tiny_finetuning.start, tiny_finetuning.reviews  # fixtures
ROOT = Path(__file__).parent
OWN = """
from dataclasses import dataclass

import optax

from bert_jax.config import ClassificationConfig, OptimizerConfig
from bert_jax.config.options import option
from bert_jax.tasks.kinds.classification import ClassificationTask, ClassObjective
from bert_jax.tasks.registry import KINDS
from bert_jax.train.objectives import Term
from bert_jax.train.optim import OPTIMIZERS


@dataclass(frozen=True)
class FocalConfig(ClassificationConfig, kind="focal"):
    gamma: float = option(2.0, "a focusing exponent")


@dataclass(frozen=True)
class FocalObjective(ClassObjective):
    gamma: float = 0.0

    def terms_of(self, model, outputs, batch):
        terms = super().loss_terms(model, outputs, batch)
        return {"task": Term(terms["task"].loss * (1 + self.gamma), terms["task"].metrics)}


@dataclass(frozen=True)
class FocalTask(ClassificationTask):
    kind = "focal"
    gamma: float = 2.0

    def objective(self):
        return FocalObjective(len(self.labels), self.pooling, gamma=self.gamma)


KINDS["focal"] = FocalTask


@dataclass(frozen=True)
class Momentum(OptimizerConfig, kind="momentum"):
    nesterov: bool = option(False, "looks ahead")


OPTIMIZERS["momentum"] = lambda config, params: (optax.trace(0.9, nesterov=config.nesterov),)
"""


def command(*arguments: object) -> str:
    """Runs bert-jax in a process of its own and returns what it prints."""
    line = [sys.executable, "-m", "bert_jax", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=400, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_model_of_an_extension_is_used_from_the_command_line(start, reviews, tmp_path):
    own = tmp_path / "focal.py"
    own.write_text(OWN)
    files = ["--train", reviews["train"], "--dev", reviews["dev"], "--text", "review", "--label", "stars"]
    keys = ["--config.task=focal", "--config.task.gamma=1", "--config.optimizer=momentum"]
    keys += ["--config.optimizer.nesterov=True", "--max_length=32", "--epochs=1"]
    run = tmp_path / "run"
    command("finetune", "--import", own, *files, "--model", start, "--output", run, *keys)
    config = json.loads((run / "config.json").read_text())
    assert config["task"]["kind"] == "focal" and config["task"]["gamma"] == 1.0
    assert config["training"]["optimizer"]["kind"] == "momentum" and config["training"]["optimizer"]["nesterov"]
    measured = json.loads(command("evaluate", f"--import={own}", "--checkpoint", run, "--data", reviews["dev"]))
    result = json.loads((run / "result.json").read_text())
    assert measured["accuracy"] == result["metrics"]["accuracy"]["mean"]
    (tmp_path / "texts.txt").write_text("the house was good\n")
    out = command("predict", "--import", own, "--checkpoint", run, "--input", tmp_path / "texts.txt")
    assert json.loads(out)["label"] in ("yes", "no")
    command("report", "--import", own, run)
    page = (run / "report.html").read_text()
    assert "Confusion matrix" in page and "gamma" in page
    assert "task.gamma" in command("keys", "--import", own, "gamma")
    failed = [sys.executable, "-m", "bert_jax", "predict", "--checkpoint", str(run), "--input", "-"]
    done = subprocess.run(failed, capture_output=True, text=True, input="a\n", timeout=400, cwd=ROOT.parent)
    assert done.returncode == 2 and "--import FILE" in done.stderr


@pytest.mark.parametrize("name", MODULES)
def test_every_command_takes_the_flag(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        commands_main.main([name, "--help"])
    assert "--import FILE" in capsys.readouterr().out
    with pytest.raises(UserError, match="no such Python file"):
        commands_main.main([name, f"--import={tmp_path / 'absent.py'}"])


def test_a_file_is_imported_once_and_its_errors_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "counted_extension.py").write_text("import helper_of_extension\nhelper_of_extension.runs.append(1)\n")
    (tmp_path / "helper_of_extension.py").write_text("runs = []\n")
    for _ in range(2):
        extensions.import_file(tmp_path / "counted_extension.py")
    assert sys.modules["helper_of_extension"].runs == [1]
    for name, text, line, error in (
        ("wrong_name", "import math\n\nmath.nothing\n", 3, "AttributeError"),
        ("wrong_syntax", "\n(\n", 2, "SyntaxError"),
        ("wrong_import", "import no_such_module_here\n", 1, "ModuleNotFoundError"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
        with pytest.raises(UserError, match=rf"{name}\.py line {line}: {error}"):
            extensions.import_file(tmp_path / f"{name}.py")
        assert name not in sys.modules
    (tmp_path / "json.py").write_text("")
    with pytest.raises(UserError, match=r"a module json is imported already\. Rename the file"):
        extensions.import_file(tmp_path / "json.py")


def candidates(starts, inside, budget: int, seed: int = 0) -> Candidates:
    starts, inside = np.array(starts, bool), np.array(inside, bool)
    random = np.random.default_rng(seed).random(starts.shape)
    ids = np.arange(starts.size, dtype=np.int32).reshape(starts.shape)
    return Candidates(ids, WordBoundaries(starts, inside), np.full(len(starts), budget), random)


def test_whole_words_are_chosen_by_their_scores():
    draw = np.random.default_rng(1)
    starts = draw.random((40, 30)) < 0.5
    inside = ~starts & (draw.random((40, 30)) < 0.7)
    inside &= np.roll(starts | inside, 1, axis=1)
    inside[:, 0] = False
    for _ in range(30):  # a piece follows a word or a piece
        inside[:, 1:] &= (starts | inside)[:, :-1]
    given = candidates(starts, inside, 6)
    chosen = highest_words(given, given.random)
    for row in range(40):  # by brute force
        words = []
        for position in np.flatnonzero(starts[row]):
            end = position + 1
            while end < 30 and inside[row, end]:
                end += 1
            words.append((-given.random[row, position], list(range(position, end))))
        expected, left = [], 6
        for _, word in sorted(words):
            if len(word) <= left:
                expected += word
                left -= len(word)
        if not expected and words:
            expected = sorted(words)[0][1][:6]
        assert np.flatnonzero(chosen[row]).tolist() == sorted(expected)


class Wrong(MaskingConfig):
    kind = "wrong"  # of the table alone, so that no other test sees it


def test_a_rule_changes_training_masks_alone_and_every_epoch_has_its_own(shards_dir):
    dataset = open_dataset(shards_dir, "train")
    vocabulary = dataset.vocabulary()
    own = rare_words.RareWords(gamma=1.0)
    loaders = [DatasetLoader(dataset, vocabulary, seed=3, masking=masking) for masking in (None, own, own)]
    rows = np.arange(64)
    usual, rare, again = (loader.rows(rows) for loader in loaders)
    np.testing.assert_array_equal(rare.masked_positions, again.masked_positions)
    assert (usual.masked_positions != rare.masked_positions).any()
    # One row at a time, in another order, and in another epoch.
    alone = loaders[1].rows(rows[7:8])
    np.testing.assert_array_equal(alone.input_ids[0], rare.input_ids[7])
    assert (loaders[1].rows(rows + dataset.rows).masked_positions != rare.masked_positions).any()
    # As many predictions of rarer tokens.
    counts = dataset.unigram_counts()
    assert rare.masked_weights.sum() == pytest.approx(usual.masked_weights.sum(), rel=0.05)
    frequency = [np.log(counts[batch.masked_ids[batch.masked_weights > 0]] + 1.0).mean() for batch in (usual, rare)]
    assert frequency[1] < frequency[0] - 0.5
    # Held-out masks stay those of the shards.
    held_out = open_dataset(shards_dir, "eval")
    loaders = [DatasetLoader(held_out, vocabulary, seed=3, masking=masking) for masking in (None, own)]
    batches = [next(loader.evaluation_batches(8)) for loader in loaders]
    for name, first, second in zip(batches[0]._fields, *batches, strict=True):
        np.testing.assert_array_equal(first, second, err_msg=name)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda given: np.ones_like(given.words.starts), "chose a special token or padding"),
        (lambda given: given.words.starts | given.words.inside, "chose more positions than the budget"),
        (lambda given: given.random, r"returned float64\[.*, not bool"),
    ],
)
def test_a_rule_that_is_wrong_is_named(shards_dir, monkeypatch, rule, message):
    monkeypatch.setitem(MASKINGS, "wrong", lambda options, dataset, vocabulary: rule)
    dataset = open_dataset(shards_dir, "train")
    loader = DatasetLoader(dataset, dataset.vocabulary(), seed=0, masking=Wrong())
    with pytest.raises(UserError, match=rf"config\.data\.masking=wrong {message}"):
        loader.rows(np.arange(4))


FIXED = [({"kind": "static"}, "are static"), ({"unit": "infill"}, "infill spans")]


@pytest.mark.parametrize(("changes", "fixed"), FIXED)
def test_a_rule_is_refused_with_masks_that_are_fixed(shards_dir, changes, fixed):
    dataset = open_dataset(shards_dir, "train")
    masking = {**dataset.manifest["masking"], **changes}
    changed = type(dataset)(dataset.directory, "train", {**dataset.manifest, "masking": masking})
    with pytest.raises(UserError, match=rf"data\.masking is rare_words, but the masks of .* {fixed}"):
        DatasetLoader(changed, dataset.vocabulary(), seed=0, masking=rare_words.RareWords())


@pytest.mark.slow
def test_a_rule_pretrains_from_the_command_line_and_resumes(shards_dir, tmp_path):
    own = ["--import", ROOT / "extensions" / "rare_words.py", "--config.data.masking=rare_words"]
    line = [f"--config={RECIPE}", f"--config.data.train={shards_dir}", *TINY, "--config.batch_size=16"]
    line += ["--config.log_every=1", "--config.optimizer.schedule=constant", *own, "--config.data.masking.gamma=1"]
    command("pretrain", *line, f"--workdir={tmp_path / 'whole'}", "--config.steps=4")
    for steps in (2, 4):
        command("pretrain", *line, f"--workdir={tmp_path / 'resumed'}", f"--config.steps={steps}")
    losses = [[line["loss"] for line in read_metrics(tmp_path / name)] for name in ("whole", "resumed")]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    start = json.loads((tmp_path / "whole" / "run.json").read_text())["starts"][0]
    assert start["configuration"]["resolved"]["data.masking.gamma"] == 1.0 and "--import" in start["command"]
