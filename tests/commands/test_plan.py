"""Tests of plans, the hours that follow from them, and the errors of the command; nothing is compiled."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import pytest
from random_checkpoints import odd_config, random_checkpoint
from streamed_outputs import served

from bert_jax.commands import plan
from bert_jax.config import AdamW, DistillConfig, MeshConfig, ModelOptions, PretrainConfig, PretrainDataConfig
from bert_jax.data.phases import PhasedLoader
from bert_jax.data.schedules import mask_rates
from bert_jax.data.shards import open_dataset
from bert_jax.errors import UserError
from bert_jax.interop import export
from bert_jax.lineage import LSTM
from bert_jax.planning.compile import AbstractStep, Memory, RowSpec, bytes_per_device, with_architecture
from bert_jax.planning.estimate import Estimate, StepTime, document, notes, run_length
from bert_jax.planning.program import Collective, Flops, count_flops
from bert_jax.planning.topology import CHIPS, GIB, GPUS, Topology
from bert_jax.reporting import page as pages
from bert_jax.reporting.document import print_document
from bert_jax.train import sharding
from bert_jax.train.metric_accumulator import training_flops

ROOT = Path(__file__).parent.parent.parent
CONFIG = PretrainConfig(model=ModelOptions(preset="tiny", layer_loop="scan"), batch_size=64)
ROOMY = Memory(parameters=1 * GIB, optimizer=2 * GIB, activations=2 * GIB, available=16 * GIB)
FULL = dataclasses.replace(ROOMY, activations=30 * GIB)


@pytest.fixture(scope="module")
def step():
    """A step over the 8 CPU devices of the tests, treated as chips."""
    topology = Topology("v5e:2x4", CHIPS["v5e"], tuple(jax.devices()), (2, 4))
    return AbstractStep.of(CONFIG, topology, RowSpec.of(CONFIG, 64, None))


@pytest.mark.parametrize("rates", [{}, {"mask_rate": 0.4}, {"mask_schedule": {0: 0.3, 5: 0.4, 9: 0.1}}])
def test_rows_have_the_predictions_of_the_highest_mask_rate(shards_dir, rates):
    """Compares with the batches that the loader makes."""
    dataset = open_dataset(shards_dir, "train")
    read = mask_rates(rates.get("mask_rate"), rates.get("mask_schedule", {})) if rates else None
    batch = PhasedLoader.single(dataset, dataset.vocabulary(), batch_size=2, seed=0, rates=read).batch(0)

    def predictions(**data) -> int:
        return RowSpec.of(PretrainConfig(data=PretrainDataConfig(**data, **rates)), None, None).predictions

    assert predictions(train=str(shards_dir)) == batch.masked_positions.shape[-1]
    assert predictions() == {0: 77, 1: 205}[len(rates)]  # of 512 positions, 15% or 40%


def make_estimate(step, memory, **changes):
    """A step of 6 ms, of which Pallas kernels and exposed collectives take one each."""
    time = StepTime("cycles", {"compiler's cycles": 4e-3, "Pallas kernels": 1e-3, "exposed collectives": 1e-3})
    reduced = [Collective("all-reduce", 8, 7.0, 4e6, 1e6)]
    made = Estimate(step, memory, Flops(2e12, 1e11), 2e12, time, reduced, ["einsum"])
    made = made if memory.fits else dataclasses.replace(made, time=None, collectives=[])
    return dataclasses.replace(made, **changes)


def test_the_traced_step_has_the_work_of_the_model_and_the_options_of_training(step, monkeypatch):
    asked = []
    monkeypatch.setattr(sharding, "options", lambda mesh, given, overlap: asked.append((mesh, dict(given), overlap)))
    rows, model = step.rows, step.model
    read = step.plan.objective.last_positions(step.batch())
    wanted = training_flops(model, CONFIG.batch_size, rows.seq_len, rows.predictions, read=read)
    # Position and segment look-ups are matmuls.
    assert wanted < count_flops(step.traced().jaxpr).total < 1.2 * wanted
    assert asked == [(step.mesh, {}, True)]


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


# Steps of 100 ms with 64 rows of 64 positions, 4,096 tokens.
@pytest.mark.parametrize(
    ("changes", "steps", "rows"),
    [
        ({"steps": 36_000}, 36_000, 64 * 36_000),
        ({"steps": 0, "tokens": 4096e3}, 1000, 64_000),
        ({"steps": 0, "tokens": 4096e3 + 1}, 1001, 64_064),
        ({"steps": 0, "budget_minutes": 60.0}, 36_000, 64 * 36_000),
        ({"steps": 100, "budget_minutes": 60.0}, 100, 6400),
        ({"steps": 200, "batch_schedule": {0: 32, 100: 64}}, 200, 100 * 32 + 100 * 64),
        ({"steps": 1000, "data": PretrainDataConfig(train="short", phases={900: "long"})}, 900, 57_600),
        ({"steps": 0}, None, None),
    ],
    ids=["steps", "tokens", "one more", "minutes", "less than the budget", "schedule", "phases", "no end"],
)
def test_the_run_is_as_long_as_the_configuration_says(step, changes, steps, rows):
    found = run_length(dataclasses.replace(CONFIG, **changes), step.rows, 0.1)
    assert (found.steps, found.rows) == (steps, rows)
    assert found.hours == (None if rows is None else pytest.approx(rows / 64 * 0.1 / 3600))


def test_tokens_of_a_run_are_counted_without_padding(step):
    half = dataclasses.replace(step.rows, filled=0.5)
    assert run_length(dataclasses.replace(CONFIG, steps=0, tokens=4096e3), half, 0.1).steps == 2000


@pytest.mark.parametrize(
    ("name", "chip", "sides", "slices", "mesh", "hosts", "share"),
    [
        ("v5e:2x4", "v5e", (2, 4), 1, MeshConfig(), 1, 1),  # one machine of eight chips
        ("v4:2x2x2", "v4", (2, 2, 2), 1, MeshConfig(), 2, 1 / 2),
        ("h100:2x4", "h100", (), 4, MeshConfig(), 4, 1 / 4),
        ("h100:2x4", "h100", (), 4, MeshConfig(tensor=2), 4, 1 / 4),
        ("v4:2x2x2", "v4", (2, 2, 2), 1, MeshConfig(tensor=8), 2, 1),  # all devices need all rows
    ],
)
def test_a_host_delivers_the_rows_of_its_devices(step, name, chip, sides, slices, mesh, hosts, share):
    topology = Topology(name, {**CHIPS, **GPUS}[chip], tuple(jax.devices()), sides, slices)
    options = dataclasses.replace(CONFIG.model, heads=8)
    found = AbstractStep.of(dataclasses.replace(CONFIG, mesh=mesh, model=options), topology, step.rows)
    made = make_estimate(found, ROOMY)
    assert topology.hosts == hosts
    assert made.host_tokens_per_second == pytest.approx(64 * 64 / 6e-3 * share)


def printed(estimate, capsys):
    print_document(document(estimate))
    return " ".join(capsys.readouterr().out.split())  # long notes are wrapped


def test_text_page_and_json_of_a_plan_agree(step, capsys):
    longer = AbstractStep.of(dataclasses.replace(CONFIG, steps=6_000_000), step.topology, step.rows)
    made = make_estimate(longer, ROOMY)
    text, page, values = printed(made, capsys), pages.render(document(made)), json.loads(json.dumps(made.as_json()))
    mfu = 2e12 / (6e-3 * 197e12 * 8)
    for shown in ("6.00 ms", f"{mfu:.1%}", "10.0", "80.0", "6,000,000", "24,576,000,000", "682,667", "Pallas kernels"):
        assert shown in text and shown in page
    for said in (
        "cycle estimates for all instructions",
        "25.0% of the peak; without them a step takes 5.00 ms",
    ):
        assert said in text and said in page
    wanted = "topology devices fits memory_bytes flops collectives step_seconds mfu hours notes"
    assert not set(wanted.split()) - values.keys()
    assert values["memory_bytes"]["total"] == 5 * GIB and values["mfu"] == pytest.approx(mfu)
    assert values["step_seconds"] == pytest.approx(sum(values["step_seconds_by_part"].values()))
    assert values["step_seconds_without_pallas"] == pytest.approx(5e-3)
    assert (values["hours"], values["device_hours"]) == (pytest.approx(10), pytest.approx(80))
    assert values["tokens"] == 6_000_000 * 64 * 64 and values["real_tokens"] is None
    assert values["input_tokens_per_second_per_host"] == pytest.approx(64 * 64 / 6e-3)


def test_a_roofline_is_called_one_with_the_bound_below_it(step, capsys):
    gpu = Topology("h100:8", GPUS["h100"], tuple(jax.devices()), memory_fraction=0.75)
    time = StepTime("roofline", {"arithmetic": 2e-3, "memory traffic": 3e-3}, at_least=3e-3)
    made = make_estimate(AbstractStep.of(CONFIG, gpu, step.rows), ROOMY, time=time)
    text = printed(made, capsys)
    assert "Time of a step, by a roofline" in text and "takes less than 3.00 ms" in text
    assert "jax gives a program 75% of a GPU's" in text
    assert made.as_json()["step_seconds_basis"] == "roofline" and made.as_json()["step_seconds_at_least"] == 3e-3


def test_tokens_without_padding_are_those_of_the_manifest(step, shards_dir, capsys):
    counts = open_dataset(shards_dir, "train").manifest["parts"]["train"]
    rows = RowSpec.of(PretrainConfig(data=PretrainDataConfig(train=str(shards_dir))), None, None)
    made = make_estimate(dataclasses.replace(step, rows=rows), ROOMY)
    positions = 64 * rows.seq_len / 6e-3
    real = positions * counts["tokens"] / (counts["rows"] * rows.seq_len)
    values = made.as_json()
    assert values["tokens_per_second"] == pytest.approx(positions) and 0 < real < positions
    assert values["real_tokens_per_second"] == pytest.approx(real)
    assert f"{positions:,.0f}, {real:,.0f} without padding" in printed(made, capsys)
    assert "without padding" not in printed(make_estimate(step, ROOMY), capsys)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch_schedule": {0: 64, 100: 128}}, "hours scale with the rows of each step"),
        ({"data": PretrainDataConfig(train="a", phases={9: "b"})}, "count the first phase only"),
    ],
)
def test_what_a_plan_leaves_out_is_noted(step, changes, said):
    changed = dataclasses.replace(step, config=dataclasses.replace(CONFIG, **changes))
    assert not any(said in note for note in notes(make_estimate(step, FULL)))
    assert any(said in note for note in notes(make_estimate(changed, FULL)))


def test_a_step_that_does_not_fit_has_no_time(step, capsys):
    made = make_estimate(step, FULL)
    assert made.as_json()["mfu"] is None and made.as_json()["fits"] is False
    assert any("use more --config.microbatches" in note for note in notes(made))
    for shown in (printed(made, capsys), pages.render(document(made))):
        assert (
            "does not fit: 33.00 GiB of 16.00 GiB per device, 17.00 GiB too much" in shown
            and "Time of a step" not in shown
        )


@pytest.mark.parametrize(
    ("recipe", "arguments", "message"),
    [
        ("bert_tiny", ["--topology", "v9:2x2"], "unknown topology 'v9:2x2'"),
        ("bert_tiny", ["--topology", "v4-7"], "sizes of v4 count TensorCores, 2 per chip: 2, 8, 16"),
        ("bert_tiny", ["--topology=v5e:2x2", "--config.batch_sise=3"], "did you mean"),
        ("bert_tiny", ["--topology=v5e:2x2", "--json", "nowhere/plan.json"], "nowhere does not exist; create the"),
        ("bert_tiny", ["--topology=v5e:2x2", "--seq_len=0"], "--seq_len is 0. Use a finite number of at least 1"),
        ("own", ["--topology=v5e:2x2"], "is a fine-tuning recipe"),
        ("continued", ["--topology=v5e:2x2"], "init_from is not set"),
    ],
)
def test_mistakes_are_reported_before_anything_is_compiled(recipe, arguments, message):
    with pytest.raises(UserError, match=message):
        plan.main(["--config", str(ROOT / f"configs/{recipe}.py"), *arguments])


def test_only_data_spans_hosts(step):
    hosts = Topology("h100:4x2", GPUS["h100"], tuple(jax.devices()), (), 2)
    with pytest.raises(UserError, match=r"mesh.data=1 does not divide over 2 slices"):
        AbstractStep.of(dataclasses.replace(CONFIG, mesh=MeshConfig(fsdp=8)), hosts, step.rows)


def test_a_plan_of_the_architecture_of_a_checkpoint(step, tmp_path):
    """The recipe `continued` and branches take it from there, with the parts that the recipe sets itself."""
    loaded = random_checkpoint(tmp_path / "words", odd_config(gated=True, positions="rotary", heads=5))
    export.write(loaded, tmp_path / "start")
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


@pytest.mark.parametrize(
    ("changes", "length", "message"),
    [
        ({}, 1024, "the rows of the shards have 1024 positions, .* use --config.model.max_positions=1024"),
        (
            {"model": ModelOptions(preset="lstm_medium", encoder=LSTM(bptt=35))},
            20,
            "model.encoder.bptt is 35, longer than the rows of the shards, 20",
        ),
        ({"optimizer": AdamW(rates={".*": 0.0})}, 64, r"optimizer.rates is \{'\.\*': 0.*\}, which trains no parameter"),
        ({"distill": DistillConfig(teacher="runs/teacher")}, 64, "a plan does not count a teacher's work"),
    ],
    ids=["positions", "bptt", "rates", "teacher"],
)
def test_what_training_refuses_is_refused(step, changes, length, message):
    config = dataclasses.replace(CONFIG, **changes)
    with pytest.raises(UserError, match=message):
        AbstractStep.of(config, step.topology, RowSpec.of(config, length, None))


def test_a_vocabulary_of_another_size_than_that_of_the_shards_is_refused(shards_dir):
    config = dataclasses.replace(CONFIG, data=PretrainDataConfig(train=str(shards_dir)))
    with pytest.raises(UserError, match=r"--vocab_size is 9, but .* has 1000 tokens in the vocabulary; omit"):
        RowSpec.of(config, None, 9)


@pytest.mark.parametrize("keys", [{}, {"cache_bytes": 1e6}])
def test_a_plan_of_shards_in_a_store_reads_only_their_manifest(shards_dir, tmp_path, monkeypatch, keys):
    """With the keys of a pretraining run, which copies or streams the rows."""
    served(tmp_path / "books", monkeypatch)
    (tmp_path / "books").mkdir()
    for name in ("manifest.json", "shards.arrow"):
        shutil.copy(shards_dir / name, tmp_path / "books")
    keys |= {"cache_dir": str(tmp_path / "cache")}

    def rows(seq_len: int | None = None, **data: str) -> RowSpec:
        return RowSpec.of(PretrainConfig(data=PretrainDataConfig(**data, **keys)), seq_len, None)

    wanted = RowSpec.of(PretrainConfig(data=PretrainDataConfig(train=str(shards_dir))), None, None)
    for spec in ({"train": "gs://bucket/books"}, {"train": "gs://bucket/books/train"}):
        assert rows(**spec) == wanted
    assert not (tmp_path / "cache").exists()
    with pytest.raises(UserError, match=r"but gs://bucket/books has \d+ positions in a row; omit --seq_len"):
        rows(9, train="gs://bucket/books")
    with pytest.raises(UserError, match=r"names the same rows twice, as a and b \(gs://bucket/books\)"):
        rows(mixture={"a": ("gs://bucket/books", 1.0), "b": ("gs://bucket/books", 1.0)})
    with pytest.raises(UserError, match=r"^gs://bucket/none/manifest\.json does not exist"):
        rows(train="gs://bucket/none")
