"""Phases of shards and batch schedules: no row is lost or read twice, however often a run stops and resumes."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from streamed_outputs import assert_equal_after_kills, assert_rows_equal, edited, joined, picked
from tiny_runs import RECIPE, ROOT, TINY, environment

from bert_jax.commands import pretrain
from bert_jax.config import CheckpointConfig, MeshConfig, PretrainConfig, PretrainDataConfig
from bert_jax.data.example import Batch
from bert_jax.data.mixture import Mixture
from bert_jax.data.phases import Phase, PhasedLoader, open_held_out, open_phases
from bert_jax.data.schedules import batch_schedule
from bert_jax.data.shards import open_dataset
from bert_jax.errors import UserError
from bert_jax.train import metrics, sharding
from bert_jax.train.compilation import later_batch_shapes
from data_prep.build import build
from data_prep.build_options import BuildOptions

SCHEDULE = batch_schedule({0: 3, 4: 24, 11: 15}, 0)  # enough rows that epochs end within the test
STARTS = (0, 6, 13, 19)  # train, eval, train, eval
STEPS = 26


@pytest.fixture(scope="module")
def phased(shards_dir):
    """Makes a new loader of two data sets that alternate, with batches of several sizes."""

    def make() -> PhasedLoader:
        parts = [open_dataset(shards_dir, part) for part in ("train", "eval")]
        phases = [Phase(first, Mixture.single(parts[number % 2])) for number, first in enumerate(STARTS)]
        return PhasedLoader(phases, parts[0].vocabulary(), batches=SCHEDULE, seed=3)

    return make


def test_each_data_set_is_read_in_order_across_batch_sizes_and_phases(phased, shards_dir):
    """Compares with one batch of all rows, and so the order and the masks of each epoch."""
    loader = phased()
    assert loader.changes == (0, 4, 6, 11, 13, 19)
    read: dict[int, list[Batch]] = {0: [], 1: []}
    for step in range(STEPS):
        batch = loader.batch(step)
        assert len(batch.input_ids) == loader.rows_at(step) == SCHEDULE.at(step)
        read[loader.phase(step) % 2].append(batch)
    for number, part in enumerate(("train", "eval")):
        dataset = open_dataset(shards_dir, part)
        rows = sum(len(batch.input_ids) for batch in read[number])
        assert part == "train" or rows > dataset.rows, "no epoch ends within the test"
        whole = PhasedLoader.single(dataset, dataset.vocabulary(), batch_size=rows, seed=3).batch(0)
        assert_rows_equal(joined(read[number]), whole)


def test_a_restart_at_any_step_reads_the_same_batches(phased):
    whole = phased()
    batches = [whole.batch(step) for step in range(STEPS)]
    for start in (0, 3, 5, 6, 12, 18, 25):
        again = phased()
        for step in range(start, min(start + 4, STEPS)):
            assert_rows_equal(again.batch(step), batches[step])
            assert_rows_equal(again.batch(step, slice(1, 3)), picked(batches[step], slice(1, 3)))


def test_the_shapes_of_later_batches_are_known_from_any_step(shards_dir):
    dataset = open_dataset(shards_dir, "train")
    batches = batch_schedule({0: 8, 4: 16, 9: 8, 20: 24}, 0)
    phases = [Phase(first, Mixture.single(dataset)) for first in (0, 6)]
    source = PhasedLoader(phases, dataset.vocabulary(), batches=batches, seed=3)
    mesh = sharding.make_mesh(MeshConfig())

    def shapes(first: int, end: int = 0) -> dict[int, tuple[int, ...]]:
        return {step: b.input_ids.shape for step, b in later_batch_shapes(source, first, end, mesh).items()}

    assert shapes(0) == {4: (16, 64), 20: (24, 64)}
    assert shapes(5) == {9: (8, 64), 20: (24, 64)}
    assert shapes(5, end=20) == {9: (8, 64)} and shapes(30) == shapes(4, end=9) == {}
    real = sharding.place(source.batch(4), 16, mesh)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), real) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), later_batch_shapes(source, 0, 9, mesh)[4]
    ), "another program would be compiled"


@pytest.mark.parametrize(
    ("changes", "overrides", "said"),
    [
        (
            {"tokenizer": {"hash": "0" * 64}},
            [],
            r"data\.phases\.9 \(.*\) has tokenizer 0{12}, but .* the same --tokenizer",
        ),
        ({"objective": "single"}, [], "has sequences without labels, but .* has labelled pairs"),
        ({"seq_len": 128}, ["--config.model.max_positions=64"], "--config.model.max_positions=128"),
        ({}, ["--config.data.phases=9"], "config.data.phases is 9. Give a value of type dict"),
        ({}, ["--config.data.phases={9: '/nowhere'}"], "/nowhere"),
        ({}, ["--config.data.phases={9: ' '}"], r"data\.phases\.9 is empty\. Name a folder"),
        ({}, ["--config.data.phases={9: {}}"], r"data\.phases\.9 has no sources"),
        (
            {},
            ["--config.batch_schedule={0: 16, 5: 20}"],
            r"batch_schedule 20 does not.*: 24 in --config\.batch_schedule",
        ),
        ({}, ["--config.batch_schedule={5: 16}"], "Its steps must begin at 0"),
        ({}, ["--config.objective=mlm", "--config.objective.span_boundary=true"], "--mask_unit span"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(shards_dir, tmp_path, changes, overrides, said):
    other = edited(shards_dir, tmp_path / "other", **changes)
    overrides = [f"--config.data.phases={{9: '{other}'}}", *overrides]
    flags = [f"--config={RECIPE}", f"--workdir={tmp_path / 'run'}", f"--config.data.train={shards_dir}"]
    with pytest.raises(UserError, match=said) as caught:
        pretrain.main([*flags, *overrides, "--config.batch_size=16"])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_the_other_part_of_shards_is_refused_unless_it_is_meant(shards_dir, monkeypatch):
    held_out, train = f"{shards_dir}/eval", f"{shards_dir}/train"
    for keys, key in (
        ({"train": held_out}, "data.train"),
        ({"train": f"{held_out}//"}, "data.train"),
        ({"train": f"{held_out}/../eval/."}, "data.train"),
        ({"train": "eval"}, "data.train"),
        ({"mixture": {"books": train, "news": held_out}}, "data.mixture.news"),
        ({"train": train, "phases": {9: held_out}}, "data.phases.9"),
        ({"train": train, "phases": {9: {"news": (held_out, 1.0)}}}, "data.phases.9.news"),
        ({"train": str(shards_dir), "eval": train}, "data.eval"),
        ({"train": str(shards_dir), "eval": f"{train}/"}, "data.eval"),
    ):
        monkeypatch.chdir(shards_dir)
        for any_part in (False, True):
            data = PretrainDataConfig(**keys, any_part=any_part)
            try:
                phases = open_phases(data)
                open_held_out(PretrainConfig(data=data), phases)
                assert any_part
            except UserError as error:
                assert str(error).startswith(f"{key} is ") and "--config.data.any_part=true" in str(error)
    data = PretrainDataConfig(train=train, eval=held_out)  # the parts that are meant
    assert open_held_out(PretrainConfig(data=data), open_phases(data))[0][0].dataset.part == "eval"


def test_the_best_checkpoint_is_refused_where_a_phase_has_nothing_to_measure_it_by(shards_dir, tmp_path):
    parts = json.loads((shards_dir / "manifest.json").read_text())["parts"]
    other = edited(shards_dir, tmp_path / "other", parts={"eval": parts["eval"] | {"rows": 0}})
    flags = [f"--config={RECIPE}", f"--workdir={tmp_path / 'run'}", f"--config.data.train={shards_dir}"]
    flags += ["--config.checkpoint.best=eval_loss", "--config.eval.every_steps=3"]
    with pytest.raises(UserError, match=r"data\.phases\.9 \(.*\) has no held-out part .* by --config\.data\.eval"):
        pretrain.main([*flags, f"--config.data.phases={{9: '{other}'}}"])
    other = edited(shards_dir, tmp_path / "another")
    with pytest.raises(UserError, match=r"of the whole run, but phases have different held-out rows"):
        pretrain.main([*flags, f"--config.data.phases={{9: '{other}'}}"])
    assert not (tmp_path / "run").exists()
    data = PretrainDataConfig(train=str(shards_dir), phases={9: str(other)}, eval=str(shards_dir))
    config = PretrainConfig(data=data, checkpoint=CheckpointConfig(best="eval_loss"))
    assert len(open_held_out(config, open_phases(data))) == 2


# Slow: training.


@pytest.fixture(scope="module")
def short_dir(sample_text, vocab_dir, tmp_path_factory):
    """Shards of half the length of shards_dir's."""
    directory = tmp_path_factory.mktemp("short") / "shards"
    build(BuildOptions(str(sample_text), vocab_dir, directory, 32, objective="nsp", eval_fraction=0.25, workers=1))
    return directory


def flags_of(short: Path, workdir: Path, *overrides: str) -> list[str]:
    return [f"--config={RECIPE}", f"--workdir={workdir}", f"--config.data.train={short}", *TINY, *overrides]


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_run_killed_in_a_phase_and_in_an_epoch_ends_bit_equal(short_dir, shards_dir, tmp_path, monkeypatch, capsys):
    def train(name: str) -> dict:
        phases, ramp = f"--config.data.phases={{6: '{shards_dir}'}}", "--config.batch_schedule={0: 8, 4: 16}"
        pace = [
            f"--config.{key}" for key in ("steps=16", "log_every=1", "checkpoint.every_steps=3", "eval.every_steps=4")
        ]
        pretrain.main(flags_of(short_dir, tmp_path / name, phases, ramp, *pace))
        return json.loads((tmp_path / name / "result.json").read_text())

    assert_equal_after_kills(train, (5, 11), tmp_path, monkeypatch)
    printed = " ".join(capsys.readouterr().err.split())
    for step, rows, length in ((4, 16, 32), (6, 16, 64)):
        assert f"from step {step}: batches of {rows} rows of {length} positions" in printed
        assert f"compiling for step {step}: batches of {rows} rows of {length} positions" in printed
    logs = [metrics.read_metrics(tmp_path / name) for name in ("whole", "killed")]
    one, other = ([{k: v for k, v in line.items() if k not in metrics.TIMED} for line in log] for log in logs)
    assert one == other


DRIVER = """
import hashlib, os, signal, sys
from pathlib import Path
from bert_jax import pretraining
from bert_jax.commands import pretrain

end, log = int(sys.argv[1]), Path(sys.argv[2])

class Logged(pretraining.PhasedLoader):
    def batch(self, step, rows=None):
        batch = super().batch(step, rows)
        if len(batch.input_ids) == self.rows_at(step):  # not the single row that start-up reads
            content = b"".join(field.tobytes() for field in batch if field is not None)
            with log.open("a") as file:
                file.write(f"{step} {hashlib.sha256(content).hexdigest()}\\n")
            if step == end:
                os.kill(os.getpid(), signal.SIGKILL)
        return batch

pretraining.PhasedLoader = Logged
pretrain.main(sys.argv[3:])
"""


@pytest.mark.slow
def test_restarts_on_other_numbers_of_devices_see_the_same_batches_and_losses(short_dir, shards_dir, tmp_path):
    """Killed in each phase; over 100 steps, batches are equal in bytes and losses to 1e-6."""
    steps, overrides = 100, ("--config.checkpoint.every_steps=12", "--config.log_every=1", "--config.eval.max_rows=16")
    phases, ramp = f"--config.data.phases={{30: '{shards_dir}'}}", "--config.batch_schedule={0: 8, 30: 16}"

    def train(name: str, devices: int, end: int = -1) -> None:
        flags = flags_of(short_dir, tmp_path / name, phases, ramp, *overrides, f"--config.steps={steps}")
        command = [sys.executable, "-c", DRIVER, str(end), str(tmp_path / f"{name}.log"), *flags]
        ran = subprocess.run(command, cwd=ROOT, env=environment(devices), capture_output=True, text=True, check=False)
        assert ran.returncode == (0 if end < 0 else -signal.SIGKILL), ran.stderr

    train("whole", 1)
    for devices, end in ((8, 27), (2, 47), (1, -1)):
        train("elastic", devices, end)

    def batches(name: str) -> list[str]:
        return (tmp_path / f"{name}.log").read_text().splitlines()

    whole = dict(line.split() for line in batches("whole"))
    assert len(whole) >= steps and len(batches("elastic")) > steps + 2 * 4, "no batch was read again"
    assert set(batches("elastic")) <= {f"{step} {content}" for step, content in whole.items()} | {
        line for line in batches("elastic") if int(line.split()[0]) >= steps
    }
    one, other = (metrics.read_metrics(tmp_path / name) for name in ("whole", "elastic"))
    assert [line["step"] for line in one] == [line["step"] for line in other] == [*range(1, steps + 1)]
    for name in ("loss", "mlm_loss", "gradient_norm"):
        np.testing.assert_allclose(
            [line[name] for line in other], [line[name] for line in one], rtol=1e-6, err_msg=name
        )
