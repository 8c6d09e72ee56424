"""The differences that are allowed between a run and the checkpoint that it resumes from."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from bert_jax.config import (
    AdamW,
    CheckpointConfig,
    DistillConfig,
    EvalConfig,
    FinetuneConfig,
    LinearSchedule,
    MaskedLM,
    MeshConfig,
    ModelConfig,
    ModelOptions,
    PretrainConfig,
    PretrainDataConfig,
    WSDSchedule,
)
from bert_jax.data.mixture import Mixture
from bert_jax.data.phases import Phase, PhasedLoader
from bert_jax.data.schedules import StepSchedule
from bert_jax.data.shards import open_dataset
from bert_jax.errors import UserError
from bert_jax.model.heads.config import Heads
from bert_jax.train import workdir
from bert_jax.train.clock import TokenLength
from bert_jax.train.objectives import MaskedLMObjective
from bert_jax.train.run import TOKENS_BEFORE, Run
from bert_jax.train.workdir import (
    WorkdirConfig,
    check_provenance,
    latest_step,
    provenance,
    read_config,
    read_params,
    runtime_choices,
    write_config,
    write_params,
)

TEACHER = {"teacher/embeddings/norm/bias": np.ones(32, np.float32)}


@pytest.fixture
def make(shards_dir, tiny_config):
    dataset = open_dataset(shards_dir, "train")
    tokenizer = dataset.vocabulary()

    def make(config: PretrainConfig | None = None, starts: tuple[int, ...] = (), **changes: object) -> Run:
        config = config or PretrainConfig()
        phases = [Phase(first, Mixture.single(dataset)) for first in (0, *starts)]
        batches = StepSchedule.constant(config.batch_size)
        run = Run(
            config=config,
            model=tiny_config,
            objective=MaskedLMObjective(),
            source=PhasedLoader(phases, tokenizer, batches=batches, seed=config.seed),
            workdir=Path("run"),
            tokenizer=tokenizer,
            kind="pretraining",
        )
        return dataclasses.replace(run, **changes)

    return make


def told(there: dict, here: Run) -> list[str]:
    return check_provenance(here, provenance(here), there, "step 5 of run")


def refusal(there: dict, here: Run) -> str:
    with pytest.raises(UserError) as caught:
        told(there, here)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_same_run_has_no_differences(make):
    assert told(provenance(make()), make()) == []


@pytest.mark.parametrize(
    "free",
    [
        {"log_every": 7, "profile": (1, 2), "allow_changes": ("all",), "on_nonfinite": "skip", "skip_at_most": 3},
        {"checkpoint": CheckpointConfig(every_steps=3), "mesh": MeshConfig(2, 2, 2)},
        {"eval": EvalConfig(every_steps=3, batch_size=8, max_rows=7), "mesh": MeshConfig(shard_optimizer=True)},
        {"model": ModelOptions(layer_loop="scan", remat="layer", attention="einsum")},
        {"compute_dtype": "float32"},  # what auto is here
    ],
)
def test_settings_that_change_no_number_are_free(make, free):
    assert told(provenance(make()), make(PretrainConfig(**free))) == []


def test_model_fields_without_effect_may_change(make, tiny_config):
    def shaped(**fields: float) -> Run:
        return make(model=dataclasses.replace(tiny_config, **fields))

    assert told(provenance(shaped(global_every=3, rotary_base=160.0)), make()) == []
    assert "model.position_offset: 2 -> 0" in refusal(provenance(shaped(position_offset=2)), make())
    windowed = refusal(provenance(shaped(window=4, global_every=3)), make())
    assert "model.global_every: 3 -> 1; model.window: 4 -> 0" in windowed


def test_the_precision_in_which_devices_sum_gradients_is_compared(make):
    rounded = make(PretrainConfig(mesh=MeshConfig(reduce_dtype="bfloat16")))
    assert "mesh.reduce_dtype: auto -> bfloat16. " in refusal(provenance(make()), rounded)
    exact = make(PretrainConfig(mesh=MeshConfig(reduce_dtype="float32")))
    assert told(provenance(make()), exact) == told(provenance(exact), make()) == []  # what auto is here
    allowed = make(PretrainConfig(mesh=MeshConfig(reduce_dtype="bfloat16"), allow_changes=("mesh.reduce_dtype",)))
    assert told(provenance(make()), allowed) == ["changed from here on: mesh.reduce_dtype: auto -> bfloat16"]
    dropped = make(PretrainConfig(mesh=MeshConfig(fsdp=2)))
    assert "mesh.reduce_dtype: bfloat16 -> auto. " in refusal(provenance(rounded), dropped)


@pytest.mark.parametrize("mesh", [MeshConfig(data=1, fsdp=8), MeshConfig(shard_optimizer=True)])
def test_a_mesh_that_sums_gradients_in_another_precision_is_reported(make, mesh):
    before, after = (PretrainConfig(compute_dtype="bfloat16", mesh=each) for each in (MeshConfig(), mesh))
    said = "changed from here on: mesh.reduce_dtype.effective: bfloat16 -> float32"
    assert told(provenance(make(before)), make(after)) == [said]
    given = dataclasses.replace(after, mesh=dataclasses.replace(mesh, reduce_dtype="float32"))
    assert "mesh.reduce_dtype: auto -> float32. " in refusal(provenance(make(before)), make(given))
    several = [dataclasses.replace(each, microbatches=2) for each in (before, after)]
    assert told(provenance(make(several[0])), make(several[1])) == []  # float32 on both


@pytest.mark.usefixtures("one_device")
def test_one_device_sums_gradients_with_no_other(make):
    there = provenance(make())
    assert told(there, make(PretrainConfig(mesh=MeshConfig(reduce_dtype="bfloat16")))) == []


def test_the_rows_of_an_evaluation_are_compared_where_it_selects_a_checkpoint(make):
    def measured(max_rows: int, allowed: tuple[str, ...] = ()) -> Run:
        best, rows = CheckpointConfig(best="eval_loss"), EvalConfig(every_steps=5, max_rows=max_rows)
        return make(PretrainConfig(checkpoint=best, eval=rows, allow_changes=allowed))

    assert "eval.max_rows: 8 -> 16" in refusal(provenance(measured(8)), measured(16))
    changed, compared = told(provenance(measured(8)), measured(16, ("eval",)))
    assert changed.endswith("eval.max_rows: 8 -> 16") and "scores until here are of other held-out rows" in compared


def test_a_branch_chooses_the_rows_that_choose_its_checkpoint(make):
    trunk = make(PretrainConfig(eval=EvalConfig(every_steps=5)))
    best = CheckpointConfig(best="eval_loss")
    tail = make(PretrainConfig(checkpoint=best, eval=EvalConfig(every_steps=5, max_rows=64)))
    lines = check_provenance(tail, provenance(tail), provenance(trunk), "step 5 of trunk", workdir.MAY_CHANGE)
    assert lines == ["changed from here on: eval.max_rows: 0 -> 64"]


def test_processes_are_compared_by_how_they_compute_the_model_too(make):
    run = make(PretrainConfig(model=ModelOptions(remat="layer")))
    choices = runtime_choices(run)
    assert choices == {
        "model.attention": "auto",
        "model.layer_loop": "auto",
        "model.logits_at_once": 0,
        "model.remat": "layer",
    }
    assert not choices.keys() & provenance(run)["configuration"].keys()


def test_the_end_may_change_and_is_reported(make):
    longer = make(PretrainConfig(steps=2_000_000, budget_minutes=60.0))
    assert told(provenance(make()), longer) == [
        "changed from here on: budget_minutes: 0.0 -> 60.0",
        "changed from here on: steps: 1000000 -> 2000000",
    ]


def test_a_warmup_derived_from_the_steps_changes_with_them_in_fine_tuning(make):
    before, after = (
        PretrainConfig(steps=n, optimizer=AdamW(schedule=LinearSchedule(warmup_steps=n // 10))) for n in (100, 200)
    )
    assert "optimizer.schedule.warmup_steps: 10 -> 20" in refusal(provenance(make(before)), make(after))
    assert told(provenance(make(before)), make(after, kind="finetuning")) == [
        "changed from here on: optimizer.schedule.warmup_steps: 10 -> 20",
        "changed from here on: steps: 100 -> 200",
    ]


def test_batches_of_similar_length_depend_on_the_end_of_the_run_which_is_reported(make):
    now_those = "from here on, batches are those of a run that had this configuration from its first step"
    for pool, said in ((1, False), (8, True)):
        before, after = (FinetuneConfig(steps=steps, length_pool=pool) for steps in (100, 200))
        lines = told(provenance(make(before, kind="finetuning")), make(after, kind="finetuning"))
        assert (now_those in lines) == said
    other = FinetuneConfig(steps=100, length_pool=1, allow_changes=("length_pool",))
    before = FinetuneConfig(steps=100, length_pool=8)
    assert now_those in told(provenance(make(before, kind="finetuning")), make(other, kind="finetuning"))


def test_each_difference_is_listed_with_the_flag_that_allows_it(make):
    optimizer = AdamW(learning_rate=1e-3, beta2=0.98)
    wider = dataclasses.replace(make().model, width=64)
    other = make(PretrainConfig(seed=1, optimizer=optimizer), model=wider)
    said = refusal(provenance(make()), other)
    assert said.startswith("step 5 of run belongs to another run: ")
    listed = (
        "model.width: 32 -> 64; optimizer.beta2: 0.999 -> 0.98; optimizer.learning_rate: 0.0001 -> 0.001; seed: 0 -> 1."
    )
    assert listed in said
    assert said.endswith("--config.allow_changes=model.width,optimizer.beta2,optimizer.learning_rate,seed")


def test_allowed_differences_are_reported_and_others_refused(make):
    optimizer = AdamW(learning_rate=1e-3, beta2=0.98)
    there = provenance(make())
    partly = make(PretrainConfig(seed=1, optimizer=optimizer, allow_changes=("optimizer",)))
    assert "another run: seed: 0 -> 1. " in refusal(there, partly)
    wholly = make(PretrainConfig(seed=1, optimizer=optimizer, allow_changes=("optimizer", "seed")))
    assert told(there, wholly)[:2] == [
        "changed from here on: optimizer.beta2: 0.999 -> 0.98",
        "changed from here on: optimizer.learning_rate: 0.0001 -> 0.001",
    ]
    assert told(there, make(PretrainConfig(seed=1, allow_changes=("all",)))) == [
        "changed from here on: seed: 0 -> 1",
        "from here on, batches are those of a run that had this configuration from its first step",
    ]


@pytest.mark.parametrize(
    ("config", "changes", "said"),
    [
        (
            {"allow_changes": ("optimizer.learning_rat",)},
            {},
            "not a key of a checkpoint; did you mean optimizer.learning_rate?",
        ),
        ({}, {"initial_params": TEACHER}, "init_from: none -> fingerprint "),
    ],
)
def test_other_initial_parameters_and_names_that_are_no_key_are_refused(make, config, changes, said):
    assert said in refusal(provenance(make()), make(PretrainConfig(**config), **changes))


def test_data_are_identified_by_content_and_not_by_path(make, shards_dir):
    moved = PretrainConfig(data=dataclasses.replace(PretrainConfig().data, train="elsewhere"))
    assert told(provenance(make()), make(moved)) == []
    taught = [make(PretrainConfig(distill=DistillConfig(teacher=path)), constants=TEACHER) for path in ("a", "b")]
    assert told(provenance(taught[0]), taught[1]) == []
    other = make(taught[1].config, constants={path: value + 1 for path, value in TEACHER.items()})
    assert "distill.teacher: fingerprint " in refusal(provenance(taught[0]), other)
    phases = [Phase(0, Mixture.single(open_dataset(shards_dir, "eval")))]
    held_out = PhasedLoader(phases, make().tokenizer, batches=StepSchedule.constant(8), seed=0)
    said = refusal(provenance(make()), make(source=held_out))
    assert "another run: data.train: fingerprint " in said and said.endswith("allow_changes=data.train")


def test_held_out_data_are_compared_too_if_a_checkpoint_has_any(make):
    before, other = {"data.eval": "1" * 64}, {"data.eval": "2" * 64}
    said = refusal(provenance(make(held_out=before)), make(held_out=other))
    assert "another run: data.eval: fingerprint 1111" in said and said.endswith("allow_changes=data.eval")
    assert told(provenance(make()), make(held_out=other)) == []  # nothing was held out
    allowed = make(PretrainConfig(allow_changes=("data.eval",)), held_out=other)
    [line] = told(provenance(make(held_out=before)), allowed)  # and nothing of batches
    assert line.startswith("changed from here on: data.eval: ")


def test_the_size_of_a_batch_is_free_with_a_schedule(make):
    def scheduled(batch_size: int, schedule: dict[int, int]) -> Run:
        return make(PretrainConfig(batch_size=batch_size, batch_schedule=schedule))

    assert told(provenance(scheduled(8, {0: 16})), scheduled(16, {0: 16})) == []
    assert "batch_schedule: {0: 16} -> {0: 8}. " in refusal(provenance(scheduled(8, {0: 16})), scheduled(16, {0: 8}))
    assert "batch_schedule: none -> {0: 16}; batch_size: 8 -> 16" in refusal(
        provenance(make(PretrainConfig(batch_size=8))), scheduled(16, {0: 16})
    )


def test_phases_are_reported_by_their_steps(make):
    said = refusal(provenance(make(starts=(90,))), make(starts=(80,)))
    assert "data.phases.80: none -> fingerprint " in said and "data.phases.90: fingerprint " in said
    allowed = make(PretrainConfig(allow_changes=("data.phases",)), starts=(80,))
    assert len(told(provenance(make(starts=(90,))), allowed)) == 3


def test_the_shares_of_a_mixture_are_compared_and_named_by_their_source(make):
    there = provenance(make(shares={"data.mixture.wiki": 0.5, "data.mixture.books": 0.5}))
    other = {"shares": {"data.mixture.wiki": 0.6, "data.mixture.books": 0.4}}
    shares = "data.mixture.books.share: 0.5 -> 0.4; data.mixture.wiki.share: 0.5 -> 0.6. "
    assert shares in refusal(there, make(**other))
    lines = told(there, make(PretrainConfig(allow_changes=("data.mixture",)), **other))
    assert "from here on, batches are those" in lines[-1]


def test_other_versions_are_reported_and_not_refused(make):
    there = provenance(make())
    names = {"python", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "bert_jax", "device"}
    assert names == set(there["versions"])
    jax_version = there["versions"]["jax"]
    there["versions"]["jax"] = "0.9.9"
    assert told(there, make()) == [f"different versions from here on: jax 0.9.9 -> {jax_version}"]


def test_a_checkpoint_that_does_not_say_its_run_is_refused(make):
    with pytest.raises(UserError, match=r"does not record which run made it.*--config\.init_from"):
        check_provenance(make(), provenance(make()), None, "step 5 of run")


def test_a_run_that_resumes_with_other_batches_counts_on(make):
    def counting(config: PretrainConfig, step: int = 0, before: tuple[Run, dict] | None = None) -> tuple[Run, dict]:
        """The run that resumes from a step of the one before, and the provenance that its checkpoints record."""
        run = make(dataclasses.replace(config, steps=0, tokens=1e6))
        count = run.source.tokens_before
        run = dataclasses.replace(run, tokens_before=count, length=TokenLength(1e6, count))
        meta = {}
        if before is not None:
            meta = {"step": step, "provenance": before[1], TOKENS_BEFORE: before[0].tokens_before(step)}
        made_by = provenance(run)
        return workdir.counting_on(run, made_by, meta), made_by

    small, large = PretrainConfig(batch_size=16), PretrainConfig(batch_size=32)
    first = counting(small)
    a_step = first[0].tokens_before(1)
    second = counting(large, 10, first)
    assert [second[0].tokens_before(step) / a_step for step in (10, 12)] == pytest.approx([10, 14])
    assert second[0].length.share(12) == pytest.approx(14 * a_step / 1e6)
    third = counting(large, 12, second)  # also when it is resumed again
    assert third[0].tokens_before(15) == second[0].tokens_before(15) and third[1] == second[1]
    fourth = counting(small, 15, third)
    assert fourth[0].tokens_before(16) / a_step == pytest.approx(10 + 2 * 5 + 1)
    assert [run.counted_from for run, _ in (first, second, third, fourth)] == [0, 10, 10, 15]

    for same in (small, dataclasses.replace(small, batch_schedule={0: 16, 10: 32})):  # in the steps before it
        run, made_by = counting(same, 10, first)
        assert run.tokens_before(10) == first[0].tokens_before(10) and workdir.COUNTED not in made_by


def test_a_branch_may_change_what_a_phase_sets_and_nothing_else(make):
    phase = PretrainConfig(
        steps=7,
        batch_size=8,
        objective=MaskedLM(),
        data=PretrainDataConfig(mask_schedule={0: 0.3, 5: 0.1}, mask_shape="linear"),
        optimizer=AdamW(learning_rate=3e-4, schedule=WSDSchedule(decay_share=0.5, final_share=0.1)),
    )
    trunk, decay = make(), make(phase, starts=(5,))
    lines = check_provenance(decay, provenance(decay), provenance(trunk), "step 5 of trunk", workdir.MAY_CHANGE)
    assert {line.split(": ")[1] for line in lines if line.startswith("changed from here on")} == {
        *("batch_size", "data.mask_schedule", "data.mask_shape", "data.phases.5", "objective", "steps"),
        *("optimizer.learning_rate", "optimizer.schedule", "optimizer.schedule.final_share"),
    }
    assert lines[-1].startswith("from here on, batches are those of a run that had this configuration")
    refused = refusal(provenance(trunk), decay)  # when a run resumes, only its end may change
    assert "data.phases.5" in refused and "objective: auto -> mlm" in refused
    for other in ({"seed": 1}, {"optimizer": AdamW(weight_decay=0.1)}, {"microbatches": 2}):
        changed = make(PretrainConfig(**other))
        with pytest.raises(UserError, match="belongs to another run"):
            check_provenance(changed, provenance(changed), provenance(trunk), "step 5", workdir.MAY_CHANGE)


# A workdir records what it holds; parameters are written and read on their own, completely or not at all.


def test_config_is_written_whole_and_read_back(tmp_path):
    model = ModelConfig(vocab_size=100, layers=2, width=8, heads=2, feed_forward=16)
    config = WorkdirConfig(model, Heads(mlm=True, next_sentence=True, pooler=True), training={"steps": 3})
    write_config(tmp_path / "new", config)
    assert read_config(tmp_path / "new") == config
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["config.json"]


def test_a_missing_damaged_or_unrelated_config_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not a workdir"):
        read_config(tmp_path)
    for text, message in (("{", "not valid JSON"), ('{"model_type": "bert"}', "is not from a workdir of bert_jax")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=message):
            read_config(tmp_path)


def test_params_are_read_without_the_optimizer_and_written_without_one(tmp_path):
    flat = {"a/kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.ones(3, np.float32)}
    write_params(tmp_path, 5, flat)
    assert latest_step(tmp_path) == 5
    read = read_params(tmp_path)
    assert set(read) == set(flat) and all(isinstance(value, np.ndarray) for value in read.values())
    for name, value in flat.items():
        np.testing.assert_array_equal(read[name], value)


def test_a_tensor_other_than_the_one_saved_is_found(tmp_path):
    for name, value in (("one", 1.0), ("other", 2.0)):
        write_params(tmp_path / name, 1, {"kernel": np.full(4, value, np.float32)})
    params = tmp_path / "one" / "checkpoints" / "1" / "params"
    shutil.rmtree(params)
    shutil.copytree(tmp_path / "other" / "checkpoints" / "1" / "params", params)
    with pytest.raises(UserError, match=r"damaged.*params/kernel does not have the content"):
        read_params(tmp_path / "one")


def test_a_folder_without_checkpoints_and_a_missing_step_are_refused(tmp_path):
    with pytest.raises(UserError, match="no checkpoint in"):
        read_params(tmp_path)
    write_params(tmp_path, 5, {"kernel": np.ones(3, np.float32)})
    with pytest.raises(UserError, match="no checkpoint of step 4 in"):
        read_params(tmp_path, 4)
