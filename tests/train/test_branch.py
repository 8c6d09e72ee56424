"""A run that begins at a checkpoint of another run, with its optimizer state."""

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from streamed_outputs import DyingLoader, Killed
from tiny_runs import RECIPE, TINY
from tiny_runs import untimed_log as log

from bert_jax import pretraining
from bert_jax.commands import pretrain
from bert_jax.config import PretrainConfig
from bert_jax.data.shards import open_dataset
from bert_jax.errors import Stopped, UserError
from bert_jax.train import loop
from bert_jax.train.metrics import METRICS_FILE
from bert_jax.train.orbax_io import read_meta
from bert_jax.train.run import TOKENS_BEFORE
from bert_jax.train.workdir import RECORD, open_branch, saved_steps

SETTINGS = (
    "--config.steps=6",
    "--config.batch_size=16",
    "--config.log_every=3",
    "--config.checkpoint.every_steps=2",
    "--config.checkpoint.keep=0",
    "--config.optimizer.schedule=constant",
    "--config.optimizer.learning_rate=1e-3",
    "--config.optimizer.schedule.warmup_steps=0",
    "--config.optimizer.ema_decay=0.9",
    "--config.eval.max_rows=8",
)
pytestmark = pytest.mark.usefixtures("one_device")


def train(shards: Path, workdir: Path, *overrides: str) -> dict:
    flags = [f"--config={RECIPE}", f"--workdir={workdir}", f"--config.data.train={shards}", *TINY, *SETTINGS]
    pretrain.main([*flags, *overrides])
    return json.loads((workdir / "result.json").read_text()) | {"seconds": 0}


@pytest.fixture
def trunk(shards_dir, tmp_path):
    train(shards_dir, tmp_path / "trunk")
    return tmp_path / "trunk"


def tensors(workdir: Path, step: int) -> dict:
    """The shape, dtype and fingerprint of parameters, optimizer state and average."""
    found = read_meta(workdir / "checkpoints" / str(step))["tensors"]
    assert set(found) == {"params", "optimizer", "average"}
    return found


def branched(workdir: Path, step: int) -> dict:
    return read_meta(workdir / "checkpoints" / str(step))["meta"]["provenance"][RECORD]


DECAY = (
    "--config.steps=8",
    "--config.optimizer.schedule=wsd",
    "--config.optimizer.schedule.decay_share=0.5",
    "--config.data.mask_rate=0.05",
)


@pytest.mark.slow
def test_an_unchanged_branch_is_the_run_that_went_on(shards_dir, trunk, tmp_path):
    before = sorted(path.relative_to(trunk) for path in trunk.rglob("*"))
    (tmp_path / "same").mkdir()  # as a run leaves it that ended before its first checkpoint
    (tmp_path / "same" / "metrics.jsonl").write_text('{"step": 3, "loss": 1.0}\n')
    # A recipe's init_layers are those of a run that begins, whose parameters a branch takes over.
    flags = f"--config.branch_from={trunk}/checkpoints/4", "--config.init_layers=(0,)"
    result = train(shards_dir, tmp_path / "same", *flags)
    assert result == json.loads((trunk / "result.json").read_text()) | {"seconds": 0}
    assert tensors(tmp_path / "same", 6) == tensors(trunk, 6)
    assert log(tmp_path / "same") == [line for line in log(trunk) if line["step"] > 4]
    assert branched(tmp_path / "same", 6)["changes"] == []
    assert sorted(path.relative_to(trunk) for path in trunk.rglob("*")) == before, "the trunk was changed"

    shutil.rmtree(trunk / "checkpoints" / "4")
    with pytest.raises(UserError, match=r"has checkpoints of a run that did not begin there"):
        train(shards_dir, trunk, f"--config.branch_from={trunk}/checkpoints/2")
    with pytest.raises(UserError, match=r"was branched from another checkpoint \(of step 4\) than .*/2\."):
        train(shards_dir, tmp_path / "same", f"--config.branch_from={trunk}/checkpoints/2")
    for flags, said in (
        (["/4"], r"no checkpoint .*/4; the steps there are 2, 6\. Keep more .*keep_every"),
        (["/2", "--config.optimizer.beta2=0.9", "--config.seed=1"], r"optimizer\.beta2: 0\.999 -> 0\.9; seed: 0 -> 1"),
        (["/2", "--config.model.layers=2"], r"model\.layers: 1 -> 2"),
        (["/../../trunk"], r"names no step\. Use WORKDIR/checkpoints/STEP; its steps are 2, 6$"),
        (["/..", "--config.model.preset=checkpoint"], r"names no step\. Use WORKDIR/checkpoints/STEP"),
    ):
        with pytest.raises(UserError, match=said) as caught:
            train(shards_dir, tmp_path / "new", f"--config.branch_from={trunk}/checkpoints{flags[0]}", *flags[1:])
        assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_decay_from_a_checkpoint_reports_its_changes_and_resumes_exactly(
    shards_dir, trunk, tmp_path, monkeypatch, capsys
):
    decay = (*DECAY, f"--config.branch_from={trunk}/checkpoints/4")
    capsys.readouterr()
    whole = train(shards_dir, tmp_path / "decay", *decay)
    printed = " ".join(capsys.readouterr().err.split())
    assert f"branching from {trunk}/checkpoints/4 into" in printed
    changes = branched(tmp_path / "decay", 8)["changes"]
    assert [line.split(": ")[1] for line in changes if line.startswith("changed")] == [
        "data.mask_rate",
        "optimizer.schedule",
        "steps",
    ]
    assert all(line in printed for line in changes)
    rates = {line["step"]: line["learning_rate"] for line in log(tmp_path / "decay")}
    assert set(rates) == {6, 8}
    for step, rate in rates.items():  # logged after the step before it, whose rate it is
        np.testing.assert_allclose(rate, 1e-3 * (1 - np.sqrt((step - 1 - 4) / 4)), rtol=1e-5)

    with monkeypatch.context() as patched:
        patched.setattr(pretraining, "PhasedLoader", DyingLoader)
        patched.setattr(DyingLoader, "end", 7)
        with pytest.raises(Killed):
            train(shards_dir, tmp_path / "killed", *decay)
    shutil.rmtree(trunk / "checkpoints" / "4")  # a trunk keeps only its newest checkpoints; the branch needs none
    assert train(shards_dir, tmp_path / "killed", *decay) == whole
    assert tensors(tmp_path / "killed", 8) == tensors(tmp_path / "decay", 8)
    assert log(tmp_path / "killed") == log(tmp_path / "decay")
    assert branched(tmp_path / "killed", 8) == branched(tmp_path / "decay", 8)


@pytest.mark.slow
def test_a_branch_with_other_batches_counts_on_from_the_tokens_of_its_trunk(shards_dir, trunk, tmp_path, monkeypatch):
    """Batches of twice as many rows, of which the trunk's four steps would have read all the tokens of the branch."""
    read = read_meta(trunk / "checkpoints" / "4")["meta"][TOKENS_BEFORE]
    a_step = read / 4 * 2
    decay = 2.5 * a_step  # which three steps read
    flags = (
        *("--config.steps=0", f"--config.tokens={read + decay}", "--config.batch_size=32"),
        *("--config.optimizer.schedule=wsd", f"--config.optimizer.schedule.decay_tokens={decay}"),
        f"--config.branch_from={trunk}/checkpoints/4",
    )
    whole = train(shards_dir, tmp_path / "whole", *flags)
    assert whole["step"] == 7
    rates = {line["step"]: line["learning_rate"] for line in log(tmp_path / "whole")}
    assert set(rates) == {6, 7}
    for step, rate in rates.items():  # logged after the step before it, whose rate it is
        np.testing.assert_allclose(rate, 1e-3 * (1 - np.sqrt((step - 1 - 4) * a_step / decay)), rtol=1e-5)
    ended = read_meta(tmp_path / "whole" / "checkpoints" / "7")["meta"]
    assert ended[TOKENS_BEFORE] == pytest.approx(read + 3 * a_step)

    with monkeypatch.context() as patched:
        patched.setattr(pretraining, "PhasedLoader", DyingLoader)
        patched.setattr(DyingLoader, "end", 6)
        with pytest.raises(Killed):
            train(shards_dir, tmp_path / "killed", *flags)
    assert saved_steps(tmp_path / "killed") == [6]
    shutil.rmtree(trunk / "checkpoints" / "4")
    assert train(shards_dir, tmp_path / "killed", *flags) == whole
    assert tensors(tmp_path / "killed", 7) == tensors(tmp_path / "whole", 7)
    assert log(tmp_path / "killed") == log(tmp_path / "whole")


@pytest.mark.slow
def test_a_branch_on_other_data_reports_the_epochs_that_it_reads(shards_dir, trunk, tmp_path, capsys):
    mixture = ("--config.data.train=", f"--config.data.mixture={{all: ('{shards_dir}', 1)}}")
    flags = (*mixture, f"--config.branch_from={trunk}/checkpoints/4")
    capsys.readouterr()
    train(shards_dir, tmp_path / "branch", *flags)
    assert "and epochs from step 4 until step 6: all 100.00%" in " ".join(capsys.readouterr().err.split())
    a_step = 16 / open_dataset(shards_dir, "train").rows
    assert [line["epochs/all"] for line in log(tmp_path / "branch")] == pytest.approx([2 * a_step], rel=1e-6)
    train(shards_dir, tmp_path / "branch", *flags, "--config.steps=9")
    assert log(tmp_path / "branch")[-1]["epochs/all"] == pytest.approx(5 * a_step, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("step, stopped", [(4, False), (6, False), (6, True)])
def test_a_branch_from_a_trunk_with_a_budget_is_repeated_from_its_log(shards_dir, tmp_path, monkeypatch, step, stopped):
    """Step 6 is the end of the trunk, and step 4 one that it did not log; a branch may be stopped before its first."""
    budget = "--config.budget_minutes=99"
    decay = (budget, "--config.steps=8", "--config.optimizer.schedule=linear")
    train(shards_dir, tmp_path / "trunk", budget)
    decay = (*decay, f"--config.branch_from={tmp_path / 'trunk'}/checkpoints/{step}")
    if stopped:
        with monkeypatch.context() as patched, pytest.raises(Stopped):
            patched.setattr(loop, "later_batch_shapes", lambda *_: signal.raise_signal(signal.SIGTERM) or {})
            train(shards_dir, tmp_path / "branch", *decay)
        assert saved_steps(tmp_path / "branch") == [step]
    train(shards_dir, tmp_path / "branch", *decay)
    fractions = {line["step"]: line["budget_fraction"] for line in log(tmp_path / "branch")}
    assert fractions == {each: pytest.approx(each / 8) for each in sorted({step, 6, 8})}
    train(shards_dir, tmp_path / "again", *decay, f"--config.budget_replay={tmp_path / 'branch' / METRICS_FILE}")
    assert log(tmp_path / "again") == log(tmp_path / "branch")
    assert tensors(tmp_path / "again", 8) == tensors(tmp_path / "branch", 8)


@pytest.mark.slow
def test_a_branch_that_has_nothing_left_to_train_is_refused(shards_dir, trunk, tmp_path):
    def refused(*flags: str) -> str:
        with pytest.raises(UserError) as caught:
            train(shards_dir, tmp_path / "new", f"--config.branch_from={trunk}/checkpoints/4", *flags)
        assert saved_steps(tmp_path / "new") == [] and "\n" not in str(caught.value)
        return str(caught.value)

    counted = "; lengths count from the beginning of the first run. Set --config."
    assert f"branch_from is at step 4, but steps is 4{counted}steps to more" in refused("--config.steps=4")
    read = read_meta(trunk / "checkpoints" / "4")["meta"][TOKENS_BEFORE]
    used = refused("--config.steps=0", f"--config.tokens={read}", "--config.batch_size=8")
    assert f"at step 4, which has read {read:,.0f} tokens, but tokens is {read:,.0f}{counted}tokens to more" in used
    late = refused("--config.steps=0", "--config.budget_minutes=0.00001")
    assert "minutes of training, but budget_minutes is 1e-05" in late and f"{counted}budget_minutes to more" in late
    assert "tokens is 100; lengths count" in refused("--config.steps=0", "--config.tokens=100")


def test_initial_parameters_exclude_a_branch():
    with pytest.raises(UserError, match="branch_from and init_from are both set"):
        PretrainConfig(branch_from="a/checkpoints/4", init_from="b")


def test_a_checkpoint_in_a_store_that_is_not_supported_is_refused():
    with pytest.raises(
        UserError, match=r"^ftp://host/run/checkpoints/4: runs are kept on disks and in gs:// and s3://, not in ftp://"
    ):
        open_branch("ftp://host/run/checkpoints/4")
