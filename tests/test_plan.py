"""Tests of plans, their advice, and the errors of the command; only the slow test runs the TPU compiler."""

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from random_checkpoints import odd_config, random_checkpoint
from streamed_outputs import served

from bert_jax import plan
from bert_jax.command import UserError
from bert_jax.config import (
    DistillConfig,
    MeshConfig,
    ModelOptions,
    OptimizerConfig,
    PretrainConfig,
    PretrainDataConfig,
)
from bert_jax.data.loader import PretrainingLoader
from bert_jax.data.masking import rate_schedule
from bert_jax.data.shards import open_dataset
from bert_jax.interop import bert_jax_export
from bert_jax.planning.abstract_step import AbstractStep, RowSpec
from bert_jax.planning.advice import advise
from bert_jax.planning.architecture import with_architecture
from bert_jax.planning.collectives import Collective
from bert_jax.planning.compiled import Compiled
from bert_jax.planning.contents import document
from bert_jax.planning.estimate import Estimate, notes_for
from bert_jax.planning.flops import Flops, count_flops
from bert_jax.planning.memory import GIB, Memory, bytes_per_device
from bert_jax.planning.roofline import Roofline
from bert_jax.planning.step_time import StepTime
from bert_jax.planning.tpu_chips import CHIPS
from bert_jax.planning.tpu_topology import TpuTopology
from bert_jax.reporting import page as pages
from bert_jax.reporting.terminal import print_document
from bert_jax.train import compiler
from bert_jax.train.metrics import training_flops

ROOT = Path(__file__).parents[1]
CONFIG = PretrainConfig(model=ModelOptions(preset="tiny", layer_loop="scan"), batch_size=64)
ROOMY = Memory(parameters=1 * GIB, optimizer=2 * GIB, activations=2 * GIB, available=16 * GIB)
FULL = dataclasses.replace(ROOMY, activations=30 * GIB)


@pytest.fixture(scope="module")
def step():
    """A step over the 8 CPU devices of the tests, treated as chips."""
    topology = TpuTopology("v5e:2x4", CHIPS["v5e"], tuple(jax.devices()), (2, 4))
    return AbstractStep.of(CONFIG, topology, RowSpec.of(CONFIG, 64, None))


@pytest.mark.parametrize("rates", [{}, {"mask_rate": 0.4}, {"mask_schedule": "0:0.3,5:0.4,9:0.1"}])
def test_rows_have_the_predictions_of_the_highest_mask_rate(shards_dir, rates):
    """Compares with the batches that the loader makes."""
    dataset = open_dataset(shards_dir, "train")
    read = rate_schedule(rates.get("mask_schedule", ""), rates.get("mask_rate")) if rates else None
    batch = PretrainingLoader(dataset, dataset.vocabulary(), batch_size=2, seed=0, rates=read).batch(0)

    def predictions(**data) -> int:
        return RowSpec.of(PretrainConfig(data=PretrainDataConfig(**data, **rates)), None, None).predictions

    assert predictions(train=str(shards_dir)) == batch.masked_positions.shape[-1]
    assert predictions() == {0: 77, 1: 205}[len(rates)]  # of 512 positions, 15% or 40%


def make_estimate(step, memory, **changes):
    time = None if not memory.fits else StepTime({"products": 3e-3, "copies": 1e-3}, 1e-3, 1e-3, 0)
    collectives = [] if time is None else [Collective("all-reduce", 8, 7.0, 4e6, 1e6)]
    least = None if time is None else Roofline(arithmetic=1.27e-3, memory=2e-3, traffic=1.638e9)
    made = Estimate(step, memory, Flops(2e12, 1e11), 2e12, time, least, collectives, ["einsum"], ["a note"], [])
    return dataclasses.replace(made, **changes)


def test_the_traced_step_has_the_work_of_the_model_and_the_options_of_training(step, monkeypatch):
    asked = []
    monkeypatch.setattr(compiler, "options", lambda mesh, overlap: asked.append((mesh, overlap)))
    rows, model = step.rows, step.model
    wanted = training_flops(model, CONFIG.batch_size, rows.seq_len, rows.predictions)
    # The last layer is computed only at the predicted positions; position and segment look-ups are matmuls.
    assert 0.6 * wanted < count_flops(step.traced().jaxpr).total < 1.2 * wanted
    assert asked == [(step.mesh, True)]


@pytest.mark.slow
def test_a_step_under_shard_map_has_the_work_of_one_without(step):
    """Whether all axes are mapped, or data and fsdp alone, while the compiler partitions over tensor."""
    compiled, *mapped = (
        AbstractStep.of(dataclasses.replace(CONFIG, mesh=mesh), step.topology, step.rows)
        for mesh in (MeshConfig(), MeshConfig(fsdp=4), MeshConfig(data=2, fsdp=2, tensor=2))
    )
    wanted = count_flops(compiled.traced().jaxpr).total
    assert [count_flops(each.traced().jaxpr).total for each in mapped] == [wanted, wanted]


def test_bytes_per_device_count_its_shards(step):
    state = step.state()
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert bytes_per_device(state) == whole  # a data-parallel mesh replicates the state
    assert bytes_per_device(step.batch().input_ids) == 64 * 64 * 4 // 8


@pytest.mark.slow
def test_advice_for_a_step_that_does_not_fit_gives_the_excess_and_remedies(step):
    lines = advise(make_estimate(step, FULL))
    assert lines[0].startswith("17.00 GiB a device too much")
    assert [line.split(":")[0] for line in lines if "mesh" in line] == [
        "--config.mesh.shard_optimizer=True",
        "--config.mesh.fsdp=8",
    ]
    assert all("still" in line for line in lines if "mesh" in line)
    fuller = advise(make_estimate(step, dataclasses.replace(FULL, activations=200 * GIB)))
    for changes, last in ((lines, "matmuls"), (fuller, "layer")):
        assert [line.split(":")[0] for line in changes if "remat" in line][-1] == f"--config.model.remat={last}"
    little = advise(make_estimate(step, dataclasses.replace(ROOMY, activations=round(13.4 * GIB))))
    assert [line.split(":")[0] for line in little if "remat" in line][-1] == "--config.model.remat=matmuls"
    # 8 rows per device take 29 GiB, next to 4 GiB that do not depend on the batch: 3 rows fit, so 4 microbatches of 2.
    assert "--config.microbatches=4: 2 rows a device at a time" in lines
    assert "--config.batch_size=24: 3 rows a device instead of 8" in lines


@pytest.mark.parametrize(
    ("slices", "mesh", "change"),
    [
        (1, MeshConfig(), "--config.mesh.fsdp=8"),
        (2, MeshConfig(), "--config.mesh.fsdp=4"),
        (2, MeshConfig(data=4, tensor=2), "--config.mesh.data=-1 --config.mesh.fsdp=4 --config.mesh.tensor=1"),
    ],
)
def test_advised_meshes_span_no_slices_and_keep_the_other_keys(step, slices, mesh, change):
    config = dataclasses.replace(CONFIG, mesh=mesh, model=dataclasses.replace(CONFIG.model, remat="layer"))
    topology = dataclasses.replace(step.topology, slices=slices)
    lines = advise(make_estimate(AbstractStep.of(config, topology, step.rows), FULL))
    advised = [line.split(":")[0] for line in lines if "mesh" in line]
    assert advised == ["--config.mesh.shard_optimizer=True", change]


def with_recipe(step, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    return AbstractStep.of(config, step.topology, step.rows)


@pytest.mark.parametrize(
    "changes",
    [{"compute_dtype": "float32"}, {"model": ModelOptions(preset="tiny", layer_loop="scan", heads=32)}],
    ids=["float32", "head width 4"],
)
def test_no_advice_names_a_kernel_that_cannot_run(step, changes):
    lines = advise(make_estimate(with_recipe(step, **changes), ROOMY))
    assert not any("attention_dropout=0" in line for line in lines)


def test_recomputation_is_measured_against_the_same_step_without_it(step):
    recomputing = with_recipe(step, model=dataclasses.replace(CONFIG.model, remat="layer"))
    [line] = [line for line in advise(make_estimate(recomputing, ROOMY)) if "remat=none" in line]
    # The backward pass takes twice the FLOPs of the forward pass, which is recomputed except for a few matmuls.
    assert 25 < float(line.split("adds ")[1].split("%")[0]) < 100 / 3
    assert not any("remat" in line for line in advise(make_estimate(step, ROOMY)))


def test_advice_for_a_step_that_fits_names_what_it_wastes(step):
    lines = advise(make_estimate(step, ROOMY))
    assert any("--config.batch_size=512 fits" in line for line in lines)
    assert any("17% of the time is communication" in line for line in lines)
    assert any("attention_dropout=0" in line for line in lines)
    assert any("attention=flash keeps this dropout" in line and "untested" in line for line in lines)
    assert not any(
        "batch_size" in line for line in advise(make_estimate(step, dataclasses.replace(ROOMY, activations=12 * GIB)))
    )


def printed(estimate, capsys):
    print_document(document(estimate))
    return " ".join(capsys.readouterr().out.split())  # long notes are wrapped


def test_text_page_and_json_of_a_plan_agree(step, capsys):
    made = make_estimate(step, ROOMY, advice=["do <this>"])
    text, page, values = printed(made, capsys), pages.render(document(made)), json.loads(json.dumps(made.as_json()))
    mfu = 2e12 / (6e-3 * 197e12 * 8)
    assert f"MFU {mfu:.1%}" in text and "6.00 ms" in text and "a note" in text
    assert f"{mfu:.1%}" in page and "do &lt;this&gt;" in page
    wanted = "topology devices fits memory_bytes flops collectives step_seconds mfu advice"
    assert not set(wanted.split()) - values.keys()
    assert values["memory_bytes"]["total"] == 5 * GIB and values["mfu"] == pytest.approx(mfu)
    assert values["step_seconds"] == pytest.approx(sum(values["step_seconds_by_kind"].values()))
    assert values["step_seconds_without_pallas"] == pytest.approx(5e-3)
    for shown in (text, page):
        assert "at most 63%: arithmetic at the peak takes 1.27 ms, 1.6 GB to and from memory 2.00 ms" in shown
    assert values["mfu_at_most"] == pytest.approx(3 * mfu)


def test_tokens_without_padding_are_those_of_the_manifest(step, shards_dir, capsys):
    counts = open_dataset(shards_dir, "train").manifest["parts"]["train"]
    rows = RowSpec.of(PretrainConfig(data=PretrainDataConfig(train=str(shards_dir))), None, None)
    made = make_estimate(dataclasses.replace(step, rows=rows), ROOMY)
    positions = 64 * rows.seq_len / 6e-3
    real = positions * counts["tokens"] / (counts["rows"] * rows.seq_len)
    values = made.as_json()
    assert values["tokens_per_second"] == pytest.approx(positions) and 0 < real < positions
    assert values["real_tokens_per_second"] == pytest.approx(real)
    assert f"{positions:,.0f} positions per second, {real:,.0f} of them tokens" in printed(made, capsys)
    without = make_estimate(step, ROOMY)
    assert without.as_json()["real_tokens_per_second"] is None and "of them tokens" not in printed(without, capsys)


def test_a_batch_schedule_is_noted(step):
    growing = dataclasses.replace(step, config=dataclasses.replace(CONFIG, batch_schedule="0:64,100:128"))
    compiled = Compiled(None, FULL, Flops())
    assert not any("batch_schedule" in note for note in notes_for(step, compiled, None))
    assert any("batches of 64 rows of 64 positions" in note for note in notes_for(growing, compiled, None))


def test_a_step_that_does_not_fit_has_no_time(step, capsys):
    made = make_estimate(step, FULL)
    assert made.as_json()["mfu"] is None and made.as_json()["fits"] is False
    for shown in (printed(made, capsys), pages.render(document(made))):
        assert "does not fit: 33.00 GiB of 16.00 GiB per device" in shown and "Time of a step" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "v9:2x2"], "unknown topology 'v9:2x2'"),
        (["--topology", "v5e:2x2", "--config.batch_sise=3"], "did you mean"),
        (["--topology", "v5e:2x2", "--json", "nowhere/plan.json"], "nowhere does not exist; create the folder"),
        (["--topology", "v5e:2x2", "--seq_len", "none"], "not a positive integer"),
    ],
)
def test_mistakes_are_reported_before_anything_is_compiled(arguments, message):
    with pytest.raises(UserError, match=message):
        plan.main(["--config", str(ROOT / "configs/bert_tiny.py"), *arguments])


def test_a_fine_tuning_recipe_is_refused():
    with pytest.raises(UserError, match="is a fine-tuning recipe"):
        plan.main(["--config", str(ROOT / "configs/own.py"), "--topology", "v5e:2x2"])


def test_a_recipe_with_a_teacher_is_refused(step):
    config = dataclasses.replace(CONFIG, distill=DistillConfig(teacher="runs/teacher"))
    with pytest.raises(UserError, match="a plan does not count the work of a teacher"):
        AbstractStep.of(config, step.topology, step.rows)


def test_a_plan_of_the_architecture_of_a_checkpoint(step, tmp_path):
    """The recipe `continued` and branches take it from there, with the parts that the recipe sets itself."""
    loaded = random_checkpoint(tmp_path / "words", odd_config(gated=True, positions="rotary", heads=5))
    bert_jax_export.write(loaded, tmp_path / "start")
    options = ModelOptions(preset="checkpoint", dropout=0.0, remat="layer")
    for origin in ({"init_from": str(tmp_path / "start")}, {"branch_from": str(tmp_path / "start/checkpoints/0")}):
        given = PretrainConfig(model=options, batch_size=64, **origin)
        config, vocab_size = with_architecture(given, None)
        made = AbstractStep.of(config, step.topology, RowSpec.of(config, None, vocab_size))
        assert made.model == dataclasses.replace(loaded.model, dropout=0.0, attention_dropout=0.0)
        assert made.rows.seq_len == loaded.model.max_positions and made.plan.runtime.remat == "layer"
        with pytest.raises(UserError, match=r"--vocab_size is 99, but the model of .*start.* has 131 tokens; omit"):
            with_architecture(given, 99)
    assert with_architecture(CONFIG, 99) == (CONFIG, 99)
    with pytest.raises(UserError, match="init_from is not set"):
        plan.main(["--config", str(ROOT / "configs/continued.py"), "--topology", "v5e:2x2"])


@pytest.mark.parametrize(
    ("changes", "length", "message"),
    [
        ({}, 1024, "the rows of the shards have 1024 positions, .* use --config.model.max_positions=1024"),
        (
            {"model": ModelOptions(preset="lstm_medium", bptt=35)},
            20,
            "model.bptt is 35, longer than the rows of the shards, 20",
        ),
        ({"optimizer": OptimizerConfig(rates=".*=0")}, 64, "optimizer.rates is '.*=0', which trains no parameter"),
    ],
    ids=["positions", "bptt", "rates"],
)
def test_what_training_refuses_is_refused(step, changes, length, message):
    config = dataclasses.replace(CONFIG, **changes)
    with pytest.raises(UserError, match=message):
        AbstractStep.of(config, step.topology, RowSpec.of(config, length, None))


def test_a_vocabulary_of_another_size_than_that_of_the_shards_is_refused(shards_dir):
    config = dataclasses.replace(CONFIG, data=PretrainDataConfig(train=str(shards_dir)))
    with pytest.raises(UserError, match=r"--vocab_size is 9, but the vocabulary of .* has 1000 tokens; omit"):
        RowSpec.of(config, None, 9)


@pytest.mark.parametrize("keys", [{}, {"cache_bytes": 1e6}])
def test_a_plan_of_shards_in_a_store_reads_only_their_manifest(shards_dir, tmp_path, monkeypatch, keys):
    """With the keys of a pretraining run, which copies or streams the rows."""
    served(tmp_path / "books", monkeypatch)
    (tmp_path / "books").mkdir()
    shutil.copy(shards_dir / "manifest.json", tmp_path / "books")
    keys |= {"cache_dir": str(tmp_path / "cache")}

    def rows(seq_len: int | None = None, **data: str) -> RowSpec:
        return RowSpec.of(PretrainConfig(data=PretrainDataConfig(**data, **keys)), seq_len, None)

    wanted = RowSpec.of(PretrainConfig(data=PretrainDataConfig(train=str(shards_dir))), None, None)
    for spec in ({"train": "gs://bucket/books"}, {"train": "gs://bucket/books/train"}):
        assert rows(**spec) == wanted
    assert not (tmp_path / "cache").exists()
    with pytest.raises(UserError, match=r"but the rows of gs://bucket/books have \d+ positions; omit --seq_len"):
        rows(9, train="gs://bucket/books")
    with pytest.raises(UserError, match=r"names the same rows twice, as a and b \(gs://bucket/books\)"):
        rows(mixture="a=gs://bucket/books:1,b=gs://bucket/books:1")
    with pytest.raises(UserError, match=r"^gs://bucket/none/manifest\.json does not exist"):
        rows(train="gs://bucket/none")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (extra tpu)")
def test_a_real_plan(tmp_path):
    file = tmp_path / "plan.json"
    line = [sys.executable, "-m", "bert_jax", "plan", "--config", "configs/bert_tiny.py", "--topology", "v5e:2x2"]
    line += ["--seq_len", "128", "--config.model.layer_loop=scan", "--json", str(file)]
    subprocess.run(line, cwd=ROOT, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    values = json.loads(file.read_text(encoding="utf-8"))
    assert values["fits"] and values["devices"] == 4
    assert 0 < values["mfu"] < 1 and values["mfu"] < values["mfu_at_most"]
    # Part of the all-reduce of the token table's gradient overlaps with computation (train/compiler.py).
    assert any(one["kind"] == "all-reduce" and one["overlapped_bytes"] > 0 for one in values["collectives"])
