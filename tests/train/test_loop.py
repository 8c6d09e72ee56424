"""Law 4: stopping costs nothing."""

import contextlib
import dataclasses
import gzip
import json
import os
import re
import signal
import time
from datetime import datetime, timedelta
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from streamed_outputs import Killed
from tiny_runs import untimed_log

from bert_jax.config import AdamW, CheckpointConfig, EvalConfig, LinearSchedule, ModelOptions, Muon, TrainConfig
from bert_jax.data.loader import DatasetLoader
from bert_jax.data.phases import PhasedLoader
from bert_jax.data.shards import open_dataset
from bert_jax.errors import Stopped, UserError
from bert_jax.model import layers
from bert_jax.storage import hold
from bert_jax.train import loop, metrics, sharding
from bert_jax.train.checkpoint import Checkpoints
from bert_jax.train.describe import optimizer_warnings
from bert_jax.train.evaluation import evaluate_batches
from bert_jax.train.hooks import Hook, Interruption, Log, Point, Recorder, Save, stopped
from bert_jax.train.metrics import FOLDER, ProgressLine, read_segments
from bert_jax.train.objectives import MaskedLMObjective
from bert_jax.train.orbax_io import AVERAGE, PARAMS
from bert_jax.train.prepare import OpenWorkdir
from bert_jax.train.run import RESULT_FILE, Run
from bert_jax.train.step import TrainState
from bert_jax.train.workdir import latest_step, read_params

# What a hook that reads no state is called with.
STATE = TrainState(jnp.zeros((), jnp.int32), {}, (), None, jnp.zeros((), jnp.int32))
CONFIG = TrainConfig(
    steps=6,
    batch_size=8,
    log_every=2,
    optimizer=AdamW(learning_rate=1e-3, schedule=LinearSchedule(warmup_steps=2, from_start=True)),
    checkpoint=CheckpointConfig(every_steps=2, keep=3),
)
AVERAGED = dataclasses.replace(CONFIG, optimizer=dataclasses.replace(CONFIG.optimizer, ema_decay=0.9))


class Interrupted:
    """A source that calls `act` when a step's batch is asked for."""

    def __init__(self, source, step, act):
        self.source, self.step, self.act = source, step, act
        self.fingerprints, self.changes, self.rows_at = source.fingerprints, source.changes, source.rows_at

    def batch(self, step, rows=None):
        if step == self.step:
            self.act()
        return self.source.batch(step, rows)


def kill():
    raise Killed


@pytest.fixture(scope="module")
def dataset(shards_dir):
    return open_dataset(shards_dir, "train")


@pytest.fixture
def run(dataset, tiny_config, tmp_path):
    tokenizer = dataset.vocabulary()
    held_out = DatasetLoader(open_dataset(dataset.directory, "eval"), tokenizer, seed=0)

    def make(name: str, config: TrainConfig = CONFIG, **changes: object) -> Run:
        loader = PhasedLoader.single(dataset, tokenizer, batch_size=config.batch_size, seed=config.seed)
        made = Run(
            config=config,
            model=dataclasses.replace(tiny_config, vocab_size=tokenizer.vocab_size),
            objective=MaskedLMObjective(),
            source=loader,
            workdir=tmp_path / name,
            tokenizer=tokenizer,
            kind="pretraining",
            evaluators=[
                lambda plan, mesh, params, _: evaluate_batches(
                    plan, mesh, params, {"": held_out.evaluation_batches(8, 16, sharding.local_rows(8, mesh))}, 8
                )
            ],
        )
        return dataclasses.replace(made, **changes)

    return make


def assert_same_item(one: Path, other: Path, item: str) -> None:
    first, second = read_params(one, item=item), read_params(other, item=item)
    assert first.keys() == second.keys()
    for path, value in first.items():
        np.testing.assert_array_equal(value, second[path], err_msg=path)


def assert_same_run(one: Path, other: Path) -> None:
    """The last checkpoints are equal bit for bit, and so are the logs but for the clock."""
    assert_same_item(one, other, PARAMS)
    assert untimed_log(one) == untimed_log(other)


def test_a_killed_run_resumes_exactly(run):
    whole = loop.fit(run("whole", AVERAGED))
    assert whole.evaluation["ema_loss"] != whole.evaluation["loss"]
    killed = run("killed", AVERAGED)
    with pytest.raises(Killed):
        loop.fit(dataclasses.replace(killed, source=Interrupted(killed.source, 5, kill)))
    assert latest_step(killed.workdir) in (2, 4)
    record = killed.workdir / "run.json"
    starts = json.loads(record.read_text())["starts"]
    starts[0]["time"] = (datetime.fromisoformat(starts[0]["time"]) - timedelta(hours=1)).isoformat()
    record.write_text(json.dumps({"starts": starts}))  # as if the run had waited for an hour
    again = loop.fit(killed)
    one, other = (metrics.read_metrics(run(name).workdir) for name in ("whole", "killed"))
    assert 0 < other[-1]["goodput"] < 0.02 and other[-1]["goodput"] < one[-1]["goodput"] < 1
    assert all(line["checkpoint_seconds"] > 0 for line in one if "checkpoint_seconds" in line)
    assert any("checkpoint_seconds" in line for line in one)
    assert (again.step, again.tokens, again.evaluation) == (whole.step, whole.tokens, whole.evaluation)
    assert_same_run(run("whole").workdir, killed.workdir)
    assert_same_item(run("whole").workdir, killed.workdir, AVERAGE)


@pytest.mark.slow
def test_muon_s_moments_are_restored_and_a_resumed_run_may_add_an_average(run):
    config = dataclasses.replace(CONFIG, optimizer=Muon(1e-3, LinearSchedule(warmup_steps=2, from_start=True)))
    loop.fit(run("whole", config))
    killed = run("killed", config)
    with pytest.raises(Killed):
        loop.fit(dataclasses.replace(killed, source=Interrupted(killed.source, 5, kill)))
    averaged = dataclasses.replace(config.optimizer, ema_decay=0.9)
    again = dataclasses.replace(config, optimizer=averaged, allow_changes=("optimizer.ema_decay",))
    evaluation = loop.fit(run("killed", again)).evaluation
    assert_same_item(run("whole").workdir, killed.workdir, PARAMS)
    assert evaluation["ema_loss"] != evaluation["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "cause"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")])
def test_a_signal_saves_and_the_run_resumes(run, foreground, number, cause):
    loop.fit(run("whole"))
    stopped = run("stopped")
    stop = Interrupted(stopped.source, 3, lambda: os.kill(os.getpid(), number))
    before = signal.getsignal(number)
    with pytest.raises(Stopped, match=f"{cause}: saved step .* run the same command to resume"):
        loop.fit(dataclasses.replace(stopped, source=stop))
    assert signal.getsignal(number) is before
    assert latest_step(stopped.workdir) is not None
    loop.fit(stopped)
    assert_same_run(run("whole").workdir, stopped.workdir)


@pytest.mark.slow
def test_sigterm_interrupts_an_evaluation_which_is_repeated_on_resume(run):
    config = dataclasses.replace(CONFIG, eval=EvalConfig(every_steps=2))
    whole, stopped = run("whole", config), run("stopped", config)
    loop.fit(whole)
    [evaluate] = stopped.evaluators

    def endless(plan, mesh, params, step):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        return evaluate(plan, mesh, params, step)

    began = time.monotonic()
    with pytest.raises(Stopped, match="saved step 4"):
        loop.fit(dataclasses.replace(stopped, evaluators=[endless]))
    assert time.monotonic() - began < 60
    with pytest.raises(Stopped, match="saved step 4"):
        loop.fit(dataclasses.replace(stopped, evaluators=[endless]))  # and again where it begins
    loop.fit(stopped)
    assert_same_run(whole.workdir, stopped.workdir)


@pytest.mark.slow
def test_a_run_with_a_budget_is_repeated_from_its_log(run):
    clocked = dataclasses.replace(CONFIG, steps=0, budget_minutes=1 / 60, checkpoint=CheckpointConfig(keep=1))
    result = loop.fit(run("clocked", clocked))
    log = run("clocked").workdir / metrics.METRICS_FILE
    lines = metrics.read_metrics(log.parent)
    assert lines[-1]["budget_fraction"] == 1.0
    assert all("loss" in line for line in lines)
    replayed = dataclasses.replace(clocked, budget_minutes=99.0, budget_replay=str(log))
    assert loop.fit(run("replayed", replayed)).step == result.step
    first, second = read_params(log.parent), read_params(run("replayed").workdir)
    for path, value in first.items():
        np.testing.assert_array_equal(value, second[path], err_msg=path)


@pytest.mark.slow
def test_a_run_at_the_end_of_its_budget_compiles_and_loads_nothing(run, monkeypatch):
    def unexpected(*_):
        raise AssertionError("a finished run has no later batches")

    clocked = dataclasses.replace(CONFIG, steps=0, budget_minutes=1e-4)
    result = loop.fit(run("done", clocked))
    again, read = run("done", clocked), []
    batch = again.source.batch
    monkeypatch.setattr(loop, "later_batch_shapes", unexpected)
    monkeypatch.setattr(again.source, "batch", lambda step, rows=None: read.append(rows) or batch(step, rows))
    assert loop.fit(again).step == result.step
    assert set(map(str, read)) <= {str(slice(0, 1))}  # the row that tells the length of batches


@pytest.mark.slow
def test_a_run_whose_budget_was_extended_is_repeated_from_its_log(run):
    short = dataclasses.replace(CONFIG, budget_minutes=1e-4, checkpoint=CheckpointConfig(keep=1))
    ended = loop.fit(run("clocked", short))
    workdir, longer = run("clocked").workdir, dataclasses.replace(short, budget_minutes=99.0)
    result = loop.fit(run("clocked", longer))
    assert ended.step < result.step == CONFIG.steps
    fractions = {line["step"]: line["budget_fraction"] for line in metrics.read_metrics(workdir)}
    assert fractions[ended.step] == pytest.approx(ended.step / result.step) and fractions[result.step] == 1.0
    replay = dataclasses.replace(longer, budget_replay=str(workdir / metrics.METRICS_FILE))
    assert loop.fit(run("replayed", replay)).step == result.step
    assert_same_item(workdir, run("replayed").workdir, PARAMS)


@pytest.mark.slow
def test_the_first_command_ends_the_log_of_a_run_whose_extension_was_killed(run):
    short = dataclasses.replace(CONFIG, budget_minutes=1e-4, checkpoint=CheckpointConfig())

    def train(config: TrainConfig, step: int = -1) -> None:
        found = run("first", config)
        loop.fit(dataclasses.replace(found, source=Interrupted(found.source, step, kill)))

    def fractions() -> dict[int, float]:
        return {line["step"]: line["budget_fraction"] for line in metrics.read_metrics(run("first").workdir)}

    train(short)
    ended, last = fractions(), latest_step(run("first").workdir)
    assert ended[last] == 1.0
    with pytest.raises(Killed):
        train(dataclasses.replace(short, budget_minutes=99.0), last + 1)
    assert fractions()[last] < 1.0
    train(short)
    assert fractions() == ended


@pytest.mark.slow
def test_a_finished_run_is_left_as_it_is(run):
    first = loop.fit(run("done"))
    again = loop.fit(run("done"))
    assert (again.step, again.evaluation) == (first.step, first.evaluation)


@pytest.mark.slow
def test_a_refused_run_changes_nothing_and_an_allowed_one_resumes(run, capsys):
    loop.fit(run("taken"))
    before = (run("taken").workdir / "config.json").read_bytes()
    other = dataclasses.replace(CONFIG, batch_size=16, seed=1, steps=7)
    with pytest.raises(
        UserError, match=r"step 6 of .*taken belongs to another run: batch_size: 8 -> 16; seed: 0 -> 1\. "
    ) as no:
        loop.fit(run("taken", other))
    assert "--config.allow_changes=batch_size,seed" in str(no.value)
    given = {"embeddings/norm/bias": np.ones(32, np.float32)}
    with pytest.raises(UserError, match="init_from: none -> fingerprint "):
        loop.fit(run("taken", initial_params=given))
    deeper = dataclasses.replace(run("taken").model, layers=3)
    with pytest.raises(UserError, match=r"another run: model\.layers: 2 -> 3"):
        loop.fit(run("taken", model=deeper))
    assert (run("taken").workdir / "config.json").read_bytes() == before
    (run("taken").workdir / "config.json").unlink()  # the checkpoint itself says whose it is
    with pytest.raises(UserError, match="belongs to another run: batch_size: 8 -> 16"):
        loop.fit(run("taken", other))
    capsys.readouterr()
    assert loop.fit(run("taken", dataclasses.replace(other, allow_changes=("batch_size", "seed")))).step == 7
    said = " ".join(capsys.readouterr().err.split())
    assert "resuming from step 6" in said
    for line in ("batch_size: 8 -> 16", "seed: 0 -> 1", "steps: 6 -> 7"):
        assert f"changed from here on: {line}" in said
    assert "from here on, batches are those of a run that had this configuration from its first step" in said


@pytest.mark.slow
@pytest.mark.parametrize("left", ["another", "a part of one"])
def test_a_workdir_that_never_had_a_checkpoint_takes_the_next_run_s_tokenizer(run, tmp_path, left):
    from bert_jax.tokenization import tokenizer
    from data_prep import vocabulary
    from data_prep.vocabulary import TokenizerOptions

    text = tmp_path / "text.txt"
    text.write_text("a few words of another text\n\nand again a few words\n" * 3)
    begun = run("begun")
    vocabulary.train(TokenizerOptions(text, begun.workdir / "tokenizer", vocab_size=60, lowercase=True))
    if left == "a part of one":
        for file in (begun.workdir / "tokenizer").iterdir():
            file.write_bytes(b"")
    loop.fit(begun)
    assert tokenizer.load(begun.workdir / "tokenizer").content_hash == begun.tokenizer.content_hash


@pytest.mark.slow
def test_a_resumed_run_is_no_longer_finished(run):
    loop.fit(run("done"))
    result = run("done").workdir / RESULT_FILE
    result.write_text("{}")
    loop.fit(run("done"))
    assert result.exists()
    longer = run("done", dataclasses.replace(CONFIG, steps=20))
    with pytest.raises(Killed):
        loop.fit(dataclasses.replace(longer, source=Interrupted(longer.source, 12, kill)))
    assert not result.exists()


@pytest.mark.slow
def test_a_failed_evaluation_loses_nothing(run):
    def broken(plan, mesh, params, steps_done):
        raise OSError("the held-out shards are gone")

    config = dataclasses.replace(CONFIG, checkpoint=CheckpointConfig(every_steps=0, every_minutes=0.0))
    failing = run("failing", config, evaluators=[broken])
    with pytest.raises(OSError, match="gone"):
        loop.fit(failing)
    assert latest_step(failing.workdir) == CONFIG.steps
    mended = loop.fit(dataclasses.replace(failing, evaluators=run("failing").evaluators))
    assert metrics.read_metrics(failing.workdir)[-1]["eval_loss"] == pytest.approx(mended.evaluation["loss"])


@pytest.mark.slow
def test_parameters_that_are_not_finite_are_never_saved(run):
    optimizer = AdamW(learning_rate=1e20, schedule=LinearSchedule(warmup_steps=1, from_start=True), clip_norm=0.0)
    bad = dataclasses.replace(CONFIG, steps=40, log_every=40, optimizer=optimizer)
    with pytest.raises(UserError, match="the loss is"):
        loop.fit(run("bad", bad))
    assert latest_step(run("bad").workdir) is None


class Spoilt(Interrupted):
    """A source whose batches of some steps have a weight that is not a number."""

    def __init__(self, source, *spoilt):
        super().__init__(source, -1, kill)
        self.spoilt = spoilt

    def batch(self, step, rows=None):
        batch = super().batch(step, rows)
        if step not in self.spoilt:
            return batch
        return batch._replace(masked_weights=np.full_like(batch.masked_weights, np.nan))


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_last_checkpoint(run):
    bad = run("bad")
    spoilt = dataclasses.replace(bad, source=Spoilt(bad.source, 3, 4))
    with pytest.raises(UserError, match=r"the loss is nan and .* at step 4; the last checkpoint is step 2 in"):
        loop.fit(spoilt)
    assert latest_step(bad.workdir) == 2


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_not_saved_where_an_evaluation_was_to_follow(run):
    bad = run("bad", dataclasses.replace(CONFIG, eval=EvalConfig(every_steps=3)))
    with pytest.raises(UserError, match=r"at step 3; the last checkpoint is step 2 in"):
        loop.fit(dataclasses.replace(bad, source=Spoilt(bad.source, 2)))
    assert latest_step(bad.workdir) == 2


@pytest.mark.slow
def test_a_run_that_stopped_at_a_nonfinite_loss_can_skip_a_limited_number_of_steps(run):
    bad = run("bad")
    spoilt = dataclasses.replace(bad, source=Spoilt(bad.source, 3, 4))
    with pytest.raises(UserError, match="at step 4"):
        loop.fit(spoilt)
    skip = dataclasses.replace(CONFIG, on_nonfinite="skip", skip_at_most=1)
    with pytest.raises(
        UserError, match=r"at step 5; the last checkpoint is step 4 in .* raise --config\.skip_at_most=1"
    ):
        loop.fit(dataclasses.replace(spoilt, config=skip))  # resumed from step 2, skipped step 4 and saved it
    loop.fit(dataclasses.replace(spoilt, config=dataclasses.replace(skip, skip_at_most=2)))
    assert [line["skipped"] for line in metrics.read_metrics(bad.workdir)] == [0, 1, 2]
    assert all(np.isfinite(line["loss"]) for line in metrics.read_metrics(bad.workdir))


@pytest.mark.slow
def test_a_run_that_skips_steps_is_equal_when_it_is_killed_between_them(run):
    skip = dataclasses.replace(CONFIG, on_nonfinite="skip", checkpoint=CheckpointConfig(every_steps=1, keep=0))
    whole, killed = run("whole", skip), run("killed", skip)
    loop.fit(dataclasses.replace(whole, source=Spoilt(whole.source, 2, 4)))
    with pytest.raises(Killed):
        loop.fit(dataclasses.replace(killed, source=Interrupted(Spoilt(killed.source, 2, 4), 5, kill)))
    loop.fit(dataclasses.replace(killed, source=Spoilt(killed.source, 2, 4)))
    assert_same_run(whole.workdir, killed.workdir)
    assert metrics.read_metrics(killed.workdir)[-1]["skipped"] == 2


@pytest.mark.slow
def test_training_starts_from_given_parameters(run, capsys):
    first = loop.fit(run("first"))
    assert "warmup" not in capsys.readouterr().err
    given = {path: np.asarray(value) for path, value in layers.flatten(first.params).items()}
    short = dataclasses.replace(CONFIG, steps=1, optimizer=AdamW(learning_rate=0.0))
    second = loop.fit(run("second", short, initial_params=given))
    assert "optimizer.schedule.warmup_steps is 10000, but the run has 1 steps" in " ".join(
        capsys.readouterr().err.split()
    )
    for path, value in layers.flatten(second.params).items():
        np.testing.assert_array_equal(value, given[path], err_msg=path)


@pytest.mark.slow
def test_a_trace_contains_the_requested_steps(run):
    traced = run("traced", dataclasses.replace(CONFIG, profile=(2, 4)))
    loop.fit(traced)
    (trace,) = (traced.workdir / "profile").glob("plugins/profile/*/*.trace.json.gz")
    (xplane,) = trace.parent.glob("*.xplane.pb")
    assert xplane.stat().st_size > 0
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = {event["args"]["step_num"] for event in events if event.get("name") == "train"}
    assert steps == {"2", "3"}


def test_a_run_warns_of_settings_without_effect_until_it_has_ended(run):
    config = AdamW(schedule=LinearSchedule(warmup_steps=7), weight_decay=0.1, decays={".*": 0.2})
    short = run("short", dataclasses.replace(CONFIG, optimizer=config))
    warmup, decay = optimizer_warnings(short, {})
    assert "optimizer.schedule.warmup_steps is 7, but the run has 6 steps" in warmup
    assert "optimizer.weight_decay=0.1 has no effect" in decay
    assert optimizer_warnings(short, {"step": 5}) == [warmup, decay]
    assert optimizer_warnings(short, {"step": 6}) == optimizer_warnings(run("usual"), {}) == []


def test_a_line_of_progress_leaves_out_what_the_batches_do_not_have(capsys):
    progress = metrics.ProgressLine("pretraining")
    progress.update(3, 0.5, None, {"mlm_loss": 2.5, "nsp_loss": float("nan")})
    said = capsys.readouterr().err
    assert "step 3" in said and "mlm_loss 2.5" in said and "nsp" not in said


@pytest.mark.parametrize("terminal", ["0", "1"])
def test_evaluations_stay_on_the_screen(capsys, monkeypatch, terminal):
    monkeypatch.setenv("TTY_COMPATIBLE", terminal)
    with metrics.ProgressLine("pretraining") as progress:
        for step in range(1, 7):
            progress.update(step, step / 10, None, {"eval_loss": step / 8}, keep=step % 2 == 0)
    written = capsys.readouterr().err
    kept = [line for line in written.splitlines() if re.search(r"step [246]  eval_loss 0\.", line)]
    assert len([line for line in kept if "ETA" not in line or terminal == "0"]) >= 3


@pytest.mark.slow
def test_a_run_whose_newest_checkpoint_is_damaged_ends_the_same(run, capsys):
    torn = run("torn")
    whole = loop.fit(torn)
    before = read_params(torn.workdir)
    for path in (torn.workdir / "checkpoints" / "6" / "optimizer").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-3])
    again = loop.fit(torn)
    said = capsys.readouterr().err
    assert "checkpoint 6 is damaged" in said and "resuming from step 4" in said
    assert again.evaluation == whole.evaluation
    assert (torn.workdir / "checkpoints" / "damaged" / "6").is_dir()
    for path, value in read_params(torn.workdir).items():
        np.testing.assert_array_equal(value, before[path], err_msg=path)


BEST = {
    "checkpoint": CheckpointConfig(best="eval_loss"),
    "optimizer": dataclasses.replace(CONFIG.optimizer, ema_decay=0.9),
}


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ({"batch_size": 12}, {}, "batch_size=16"),
        ({"model": ModelOptions(attention="splash")}, {}, "attention=splash cannot run"),
        (BEST, {}, r"the run evaluates only at its end. Set --config\.eval\.every_steps"),
        (BEST, {"evaluators": []}, "needs a held-out part"),
        (
            BEST | {"eval": EvalConfig(every_steps=2)},
            {"measured": ("mlm_loss",)},
            "'eval_loss', which this run does not measure; choose from eval_mlm_loss, eval_ema_mlm_loss",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(run, config, changes, message):
    wrong = run("wrong", dataclasses.replace(CONFIG, **config), **changes)
    with pytest.raises(UserError, match=message):
        loop.fit(wrong)
    assert not wrong.workdir.exists()


def test_a_workdir_that_another_run_holds_is_refused_and_left_alone(run, monkeypatch):
    monkeypatch.setattr(hold, "TIMES", hold.Times(ending=0.0))
    other = hold.Hold(run("taken").workdir, print)
    with pytest.raises(hold.Held, match=rf"taken is held by another run: process {os.getpid()} on .*, since .* UTC"):
        loop.fit(run("taken"))
    assert os.listdir(run("taken").workdir) == [hold.HOLDER_FILE]
    other.release()


@pytest.mark.slow
def test_a_run_that_another_one_has_replaced_writes_nothing_more(run):
    replaced = run("replaced", dataclasses.replace(CONFIG, eval=EvalConfig(every_steps=4)))
    [evaluate] = replaced.evaluators
    lines = []

    def replacing(plan, mesh, params, step):
        lines.extend(metrics.read_metrics(replaced.workdir))
        record = hold.Record.of_this_process()
        (replaced.workdir / hold.HOLDER_FILE).write_bytes(record.encoded())
        return evaluate(plan, mesh, params, step)

    with pytest.raises(hold.NoLongerHeld, match="replaced was taken over by process"):
        loop.fit(dataclasses.replace(replaced, evaluators=[replacing]))
    assert metrics.read_metrics(replaced.workdir) == lines and [line["step"] for line in lines] == [2]
    assert latest_step(replaced.workdir) in (None, 2)
    assert (replaced.workdir / hold.HOLDER_FILE).exists()


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_run_that_stopped_by_another_metric_continues(run):
    """Nothing improves without a learning rate, so each metric stops the run at its first evaluation or the next."""

    def by(metric: str) -> Run:
        config = dataclasses.replace(
            CONFIG,
            optimizer=dataclasses.replace(CONFIG.optimizer, learning_rate=0.0),
            checkpoint=dataclasses.replace(CONFIG.checkpoint, best=metric),
            eval=EvalConfig(every_steps=2),
        )
        return run("stopped", config, early_stop=1)

    assert loop.fit(by("eval_loss")).step == 4
    assert loop.fit(by("eval_loss")).step == 4
    assert loop.fit(by("eval_mlm_accuracy")).step == 6


@pytest.mark.parametrize(("error", "written"), [(hold.NoLongerHeld, []), (UserError, [1])])
def test_a_run_that_another_one_has_replaced_writes_no_last_lines_into_a_store(run, tmp_path, error, written):
    """Lines are written once a minute there; those that are left are written at any other end of the run."""
    stored = run("stored", workdir=epath.Path(tmp_path / "stored"))  # on disk, by the interface of a store
    for folder in (FOLDER, "tensorboard"):  # a store has no folders to make
        (tmp_path / "stored" / folder).mkdir(parents=True)
    checks = iter([None, error("this run has stopped and wrote nothing more")])

    def check_held() -> None:
        if (failure := next(checks)) is not None:
            raise failure

    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        opened = OpenWorkdir(checkpoints, {}, [], check_held)
        recorder = Recorder(stored, opened, {}, Interruption(), ProgressLine("stored"))
        with pytest.raises(error), recorder:
            Log(recorder)(Point(1, STATE, 0.0, done=False))
            Log(recorder)(Point(2, STATE, 0.0, done=False))
    assert [json.loads(line)["step"] for line in read_segments(stored.workdir)] == written


def test_steps_to_keep_are_saved_whatever_else_is(run, tmp_path):
    config = dataclasses.replace(CONFIG, checkpoint=CheckpointConfig(every_steps=10, every_minutes=0.0, keep_every=4))
    (tmp_path / "new").mkdir()
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        opened = OpenWorkdir(checkpoints, {}, [], lambda: None)
        with Recorder(run("new", config), opened, {}, Interruption(), ProgressLine("new")) as recorder:
            points = [Point(step, STATE, 0.0, done=False, line={}) for step in range(1, 13)]
            assert [point.step for point in points if Save(recorder).due(point)] == [4, 8, 10, 12]


@pytest.mark.usefixtures("one_device")
def test_a_hook_is_called_at_its_period_and_at_the_end_and_sees_what_was_measured(run):
    class Watch(Hook):
        every = 2

        def __init__(self):
            self.seen, self.during_steps, self.closed = [], [], 0

        def __call__(self, point):
            saved = latest_step(run("watched").workdir)
            self.seen.append((point.step, point.done, int(point.state.step), sorted(point.evaluation), saved))
            assert point.line is not None and point.line["loss"] > 0

        @contextlib.contextmanager
        def during(self, step):
            self.during_steps.append(step)
            yield

        def close(self):
            self.closed += 1

    watch = Watch()
    config = dataclasses.replace(CONFIG, steps=5, log_every=1, checkpoint=CheckpointConfig(every_steps=2))
    loop.fit(run("watched", config), [watch])
    expected = [(2, False, 2), (4, False, 4), (5, True, 5)]
    assert [(step, done, of_state) for step, done, of_state, _, _ in watch.seen] == expected
    assert watch.seen[0][3] == [] and "loss" in watch.seen[2][3]
    assert watch.during_steps == [0, 1, 2, 3, 4] and watch.closed == 1
    again = Watch()
    loop.fit(run("watched", config), [again])  # which has ended: nothing happens between its steps
    assert not again.seen and again.closed == 1


@pytest.fixture
def foreground():
    """Makes the process notice Ctrl-C even if it runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_ctrl_c_quits_and_a_job_in_the_background_ignores_it(foreground, capsys):
    with Interruption() as interruption:
        assert not interruption.at_step_end()
        signal.raise_signal(signal.SIGINT)
        assert interruption.at_step_end() and interruption.cause == "Ctrl-C"
        assert "Press it again to quit without saving" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGINT)
        assert not interruption.at_step_end()


def test_a_signal_names_the_workdir_that_was_saved(tmp_path):
    said = f"SIGTERM: saved step 3 in {tmp_path}; run the same command to resume"
    assert str(stopped(3, tmp_path, "SIGTERM")) == said
