"""Tests the pretraining command from recipe to result.json, and its error messages."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_runs import TINY, arguments

from bert_jax import config, pretraining
from bert_jax.commands import evaluate, finetune, pretrain
from bert_jax.config import ModelConfig, PretrainConfig
from bert_jax.data.loader import DatasetLoader
from bert_jax.data.shards import open_dataset
from bert_jax.errors import UserError
from bert_jax.model import sizes
from bert_jax.model.bert import abstract_params, bind, init_params
from bert_jax.model.runtime import Runtime
from bert_jax.reporting import report
from bert_jax.train import loop, metrics, prepare
from bert_jax.train.objectives import CausalLMObjective, MaskedLMObjective, means, pretraining_objective
from bert_jax.train.objectives.pretraining import ShardTraits
from bert_jax.train.workdir import read_config, read_params
from data_prep.build import build
from data_prep.build_options import BuildOptions

ROOT = Path(__file__).parent.parent.parent
RECIPE = str(ROOT / "configs" / "bert_tiny.py")


def measured_in(workdir: Path) -> set[str]:
    """Returns the names of the evaluated metrics, without their prefix."""
    names = {name for line in metrics.read_metrics(workdir) for name in line}
    return {name.removeprefix("eval_") for name in names if name.startswith("eval_")}


@pytest.fixture(scope="module")
def trained(shards_dir, tmp_path_factory):
    """Returns a workdir after four steps of the tiny recipe."""
    workdir = tmp_path_factory.mktemp("pretrained") / "run"
    pretrain.main(arguments(shards_dir, workdir))
    return workdir


@pytest.mark.slow
def test_sentence_order_of_packed_pairs_is_trained_from_labels(sample_text, vocab_dir, tmp_path):
    build(
        BuildOptions(
            sample_text, vocab_dir, tmp_path / "shards", 64, objective="sop", pack=3, eval_fraction=0.25, workers=1
        )
    )
    pretrain.main(arguments(tmp_path / "shards", tmp_path / "run"))
    assert json.loads((tmp_path / "run" / "result.json").read_text())["eval_nsp_accuracy"] is not None
    assert all(line["nsp_loss"] > 0 for line in metrics.read_metrics(tmp_path / "run"))


def test_run_writes_result_metrics_and_config(trained, shards_dir):
    result = json.loads((trained / "result.json").read_text())
    assert list(result) == [
        "step", "seconds", "tokens", "eval_loss", "eval_mlm_loss", "eval_mlm_accuracy", "eval_nsp_accuracy",
    ]  # fmt: skip
    assert result["step"] == 4
    assert result["tokens"] > 0
    lines = metrics.read_metrics(trained)
    assert [line["step"] for line in lines] == [2, 4]
    for name in (
        "time", "loss", "mlm_loss", "mlm_accuracy", "nsp_accuracy", "learning_rate", "tokens_per_second", "mfu",
        "data_wait_share", "step_seconds", "padding_share", "peak_memory_gb", "goodput",
    ):  # fmt: skip
        assert name in lines[0], name
    assert lines[-1]["eval_mlm_loss"] == pytest.approx(result["eval_mlm_loss"], rel=1e-6)
    assert measured_in(trained) == set(MaskedLMObjective().metric_names)
    assert list(trained.glob("tensorboard/events.*"))
    config = read_config(trained)
    assert config.training["batch_size"] == 16 and config.data[0]["name"] == shards_dir.name


def test_evaluate_command_reproduces_the_run_s_evaluation(trained, shards_dir, capsys):
    result = json.loads((trained / "result.json").read_text())
    evaluate.main([f"--checkpoint={trained}", f"--data={shards_dir}", "--batch_size=8"])
    measured = json.loads(capsys.readouterr().out)
    for name in ("loss", "mlm_loss", "mlm_accuracy", "nsp_accuracy"):
        assert measured[name] == pytest.approx(result[f"eval_{name}"], rel=1e-5)


@pytest.mark.parametrize(
    ("overrides", "rows"),
    [
        (["batch_size=64", "microbatches=4"], 16),
        (["batch_schedule={0: 128, 5: 64}", "microbatches=2"], 32),
        (["batch_size=64", "microbatches=4", "eval.batch_size=48"], 48),
        (["batch_size=64"], 64),
    ],
)
def test_a_held_out_batch_has_the_rows_of_one_microbatch(shards_dir, tmp_path, monkeypatch, overrides, rows):
    found = []

    def evaluate_batches(plan, mesh, params, sources, size):
        found.append(size)
        return {}

    def fit(run, hooks):
        mesh = prepare.make_mesh(run)
        with jax.set_mesh(mesh):
            run.evaluators[0](prepare.make_plan(run), mesh, {}, 0)
        raise UserError("no training here")

    monkeypatch.setattr(loop, "fit", fit)
    monkeypatch.setattr(pretraining, "evaluate_batches", evaluate_batches)
    flags = arguments(shards_dir, tmp_path / "run", *(f"--config.{override}" for override in overrides))
    with pytest.raises(UserError, match="no training here"):
        pretrain.main(flags)
    assert found == [rows]


@pytest.mark.parametrize("flag", ["text", "text_pair", "label"])
def test_columns_of_a_task_are_refused_for_shards(trained, shards_dir, flag):
    with pytest.raises(UserError, match=f"--{flag} is 'x', but the checkpoint has no task; omit it"):
        evaluate.main([f"--checkpoint={trained}", f"--data={shards_dir}", f"--{flag}=x"])


def test_evaluate_measures_training_rows_only_if_they_are_meant(trained, shards_dir, capsys):
    flags = [f"--checkpoint={trained}", f"--data={shards_dir}/train", "--max_rows=8"]
    with pytest.raises(UserError, match=r"/train has rows for training\. .* add --any_part if"):
        evaluate.main(flags)
    evaluate.main([*flags, "--any_part"])
    assert '"mlm_loss"' in capsys.readouterr().out


def test_evaluate_rejects_an_impossible_mesh_by_its_own_flag(trained, shards_dir):
    flags = [f"--checkpoint={trained}", f"--data={shards_dir}"]
    for mesh, message in (
        (["--mesh.tensor=3"], r"use --mesh\.data=-1, and fsdp and tensor whose product divides 8"),
        (["--mesh.tensor=4"], r"attention heads do not divide over mesh\.tensor=4; use --mesh\.tensor=2"),
    ):
        with pytest.raises(UserError, match=message):
            evaluate.main([*flags, *mesh])


@pytest.mark.slow
def test_mask_schedule_of_a_span_run_cannot_change_on_resume(sample_text, vocab_dir, tmp_path):
    shards = tmp_path / "shards"
    build(
        BuildOptions(
            str(sample_text),
            vocab_dir,
            shards,
            64,
            mask_unit="span",
            random_tokens="unigram",
            eval_fraction=0.25,
            workers=1,
        )
    )
    schedule = "--config.data.mask_schedule={0: 0.3, 2: 0.1}"
    pretrain.main(arguments(shards, tmp_path / "run", schedule, "--config.microbatches=2"))
    assert json.loads((tmp_path / "run" / "result.json").read_text())["eval_mlm_loss"] > 0
    for other, message in (
        (
            "--config.data.mask_schedule={0: 0.3, 3: 0.1}",
            r"data\.mask_schedule: {0: 0\.3, 2: 0\.1} -> {0: 0\.3, 3: 0\.1}",
        ),
        (
            "--config.data.mask_rate=0.3",
            r"data\.mask_rate: none -> 0\.3; data\.mask_schedule: {0: 0\.3, 2: 0\.1} -> none",
        ),
    ):
        with pytest.raises(UserError, match=message):
            pretrain.main(arguments(shards, tmp_path / "run", other, "--config.microbatches=2", "--config.steps=5"))


@pytest.mark.slow
def test_causal_model_is_trained_and_evaluated_on_next_tokens(shards_dir, tmp_path, capsys):
    pretrain.main(arguments(shards_dir, tmp_path / "run", "--config.model.causal=true", "--config.model.layers=1"))
    result = json.loads(capsys.readouterr().out)
    assert result["eval_lm_loss"] == result["eval_loss"] and result["eval_mlm_loss"] is None
    assert all(line["lm_loss"] > 0 for line in metrics.read_metrics(tmp_path / "run"))
    assert measured_in(tmp_path / "run") == set(CausalLMObjective().metric_names)
    evaluate.main([f"--checkpoint={tmp_path / 'run'}", f"--data={shards_dir}"])
    measured = json.loads(capsys.readouterr().out)
    assert measured["lm_loss"] == pytest.approx(result["eval_lm_loss"], rel=1e-5)
    assert 1 < measured["perplexity"] < measured["word_perplexity"]
    page = report.report(tmp_path / "run")
    assert "Next-token accuracy, held out" in page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_ablation_recipes_ignore_the_labels_of_pairs(shards_dir):
    """On a batch of labelled pairs, the loss without next sentences is the loss of masked tokens alone."""
    dataset = open_dataset(shards_dir, "eval")
    traits = ShardTraits.of(dataset, dataset.vocabulary())
    objectives = []
    for name in ("bert_base.py", "ablation.py:no_nsp", "ablation.py:ltr"):
        recipe = config.from_flags(PretrainConfig, f"{ROOT}/configs/{name}")
        model = sizes.model_config(recipe.model, vocab_size=1000)
        objectives.append(pretraining_objective(recipe, model, [traits]))
    full, no_nsp, left_to_right = objectives
    assert traits.labelled and full == MaskedLMObjective()
    assert left_to_right == CausalLMObjective()
    tiny = ModelConfig(vocab_size=1000, layers=1, width=16, heads=2, feed_forward=24, max_positions=64)
    params = init_params(tiny, full.heads, jax.random.key(0))
    [batch] = DatasetLoader(dataset, dataset.vocabulary(), seed=0).evaluation_batches(8, 8)
    batch = jax.tree.map(jax.numpy.asarray, batch)
    measured = []
    for objective in (full, no_nsp):
        own = {module: params[module] for module in abstract_params(tiny, objective.heads)}
        model = bind(tiny, objective.heads, own, Runtime())
        found = means(objective.apply(model, batch, None), objective.counts(batch))
        measured.append({name: float(value) for name, value in found.items()})
    both, alone = measured
    assert both["nsp_loss"] > 0 and np.isnan(alone["nsp_loss"])
    assert alone["loss"] == alone["mlm_loss"] == pytest.approx(both["mlm_loss"], rel=1e-6)
    assert set(abstract_params(tiny, no_nsp.heads)) == {"embeddings", "encoder", "mlm_head"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pooling"), [("no_nsp", "cls"), ("ltr", "mean")])
def test_an_ablation_is_pretrained_on_labelled_pairs_evaluated_and_fine_tuned(
    shards_dir, tmp_path, capsys, name, pooling
):
    recipe = f"--config={ROOT}/configs/ablation.py:{name}"
    run = tmp_path / "run"
    pretrain.main([*arguments(shards_dir, run, *TINY)[1:], recipe])
    objective = CausalLMObjective() if name == "ltr" else MaskedLMObjective(next_sentence=False)
    assert measured_in(run) == set(objective.metric_names)
    capsys.readouterr()
    evaluate.main([f"--checkpoint={run}", f"--data={shards_dir}"])
    assert "nsp_loss" not in json.loads(capsys.readouterr().out)
    (tmp_path / "train.tsv").write_text("text\tlabel\n" + "good\t1\nbad\t0\n" * 8)
    place = [f"--workdir={tmp_path / 'tuned'}", f"--config={ROOT}/configs/own.py", f"--config.init_from={run}"]
    task = [f"--config.task.{key}={tmp_path / 'train.tsv'}" for key in ("train", "dev")]
    task += ["--config.task.text=text", "--config.task.label=label", f"--config.task.pooling={pooling}"]
    finetune.main([*place, *task, "--config.batch_size=8", "--config.epochs=1"])
    tuned = read_config(tmp_path / "tuned")
    assert tuned.model == read_config(run).model and tuned.model.causal is (name == "ltr")
    assert tuned.heads.pooling == pooling and tuned.heads.classes == 2


@pytest.mark.slow
def test_span_boundary_term_is_trained_with_masked_tokens(sample_text, vocab_dir, tmp_path, capsys):
    build(
        BuildOptions(
            str(sample_text), vocab_dir, tmp_path / "shards", 64, mask_unit="span", eval_fraction=0.25, workers=1
        )
    )
    pretrain.main(
        arguments(
            tmp_path / "shards", tmp_path / "run", "--config.objective=mlm", "--config.objective.span_boundary=true"
        )
    )
    result = json.loads(capsys.readouterr().out)
    terms = [result[f"eval_{term}_loss"] for term in ("mlm", "sbo")]
    assert all(terms) and result["eval_loss"] > sum(terms)
    assert measured_in(tmp_path / "run") == set(MaskedLMObjective(span_boundary=True).metric_names)
    evaluate.main([f"--checkpoint={tmp_path / 'run'}", f"--data={tmp_path / 'shards'}"])
    assert json.loads(capsys.readouterr().out)["sbo_loss"] == pytest.approx(result["eval_sbo_loss"], rel=1e-5)


def test_static_masks_reject_a_mask_rate(sample_text, vocab_dir, tmp_path):
    shards = tmp_path / "shards"
    build(BuildOptions(str(sample_text), vocab_dir, shards, 64, masking="static", workers=1))
    with pytest.raises(UserError, match=r"Leave out data\.mask_rate and .*data\.mask_rate=none") as caught:
        pretrain.main(arguments(shards, tmp_path / "run", "--config.data.mask_rate=0.3"))
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("held_out", "overrides", "message"),
    [
        ("infill", ["model.causal=true"], "causal needs every token of a text, but batches of .*/infill lack"),
        ("infill", ["objective=replaced_tokens"], "replaced_tokens needs every token of a text, but .*/infill lack"),
        (
            "span",
            ["objective=mlm", "objective.span_boundary=true"],
            "span_boundary needs masked spans, but .*/shards masks by word",
        ),
        (
            "infill",
            ["checkpoint.best=eval_nsp_accuracy", "eval.every_steps=2"],
            "eval_nsp_accuracy.* choose from eval_loss, eval_mlm_loss, eval_mlm_accuracy$",
        ),
    ],
)
def test_held_out_shards_must_fit_the_objective(unlabelled, shards_dir, tmp_path, held_out, overrides, message):
    train, evaluated = (unlabelled[held_out], shards_dir) if held_out == "span" else (shards_dir, unlabelled[held_out])
    flags = [f"--config.{override}" for override in (*overrides, f"data.eval={evaluated}")]
    with pytest.raises(UserError, match=message):
        pretrain.main(arguments(train, tmp_path / "run", *flags))
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def unlabelled(sample_text, vocab_dir, tmp_path_factory):
    """Shards of single sequences by their unit of masking."""
    folder = tmp_path_factory.mktemp("unlabelled")
    for unit in ("infill", "span"):
        split = (1.0, 0.0, 0.0) if unit == "infill" else (0.8, 0.1, 0.1)
        options = {"objective": "full_sentences", "mask_unit": unit, "mask_split": split, "eval_fraction": 0.25}
        build(BuildOptions(str(sample_text), vocab_dir, folder / unit, 64, workers=1, **options))
    return {unit: folder / unit for unit in ("infill", "span")}


@pytest.mark.slow
def test_init_from_loads_all_parameters(trained, shards_dir, tmp_path):
    overrides = (f"--config.init_from={trained}", "--config.optimizer.learning_rate=0.0", "--config.steps=1")
    pretrain.main(arguments(shards_dir, tmp_path / "on", *overrides))
    before, after = read_params(trained), read_params(tmp_path / "on")
    for path, value in before.items():
        np.testing.assert_array_equal(after[path], value, err_msg=path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--config.data.train="], r"data\.train is not set; set --config\.data\.train=DIR"),
        (["--config.model.preset=checkpoint"], r"init_from is not set; set --config\.init_from=CHECKPOINT"),
        (["--config.data.train=/nowhere/shards"], "/nowhere/shards"),
        (["--config.data.mask_rate=0.2", "--config.data.mask_schedule={0: 0.3}"], "both set; set only one of them"),
        (["--config.data.mask_rate=1.5"], "mask rate 1.5"),
        (["--config.data.mask_schedule={9: 0.3}"], "Its steps must begin at 0"),
        (["--config.model.preset=huge"], "preset"),
        (["--config.model.max_positions=32"], "model supports only 32; use --config.model.max_positions=64"),
        (["--config.batch_size=12"], "batch_size=16"),
        (["--config.steps=0"], "budget_minutes"),
        (["--config.compute_dtype=float16"], "compute_dtype"),
        (["--config.optimizer=sgd"], "adamw"),
        (["--config.no_such_key=1"], "no_such_key"),
        (["--config.init_from=/nowhere/checkpoint"], "/nowhere/checkpoint"),
        (["--config.model.norm=before"], "unknown model.norm 'before'; choose from post, pre"),
        (["--config.objective=next"], "unknown config.objective 'next'; choose from auto, "),
        (["--config.objective=causal"], r"is bidirectional and sees its answers. .*model\.causal=true"),
        (["--config.objective=mlm", "--config.model.causal=true"], r"sees only earlier tokens. .*model\.causal=false"),
        (
            ["--config.objective=mlm", "--config.objective.span_boundary=true"],
            r"needs masked spans, but .* masks by word; .*--mask_unit span",
        ),
        (
            ["--config.data.mask_rate=0.3", "--config.model.causal=true"],
            r"none of them is masked; leave out data\.mask_rate.* \(--config\.data\.mask_rate=none unsets",
        ),
        (["--config.objective.generator_size=0.5"], r"objective=auto does not have it\. Set .*=replaced_tokens"),
        (["--config.objective=causal", "--config.objective.z_loss=-1"], r"objective\.z_loss is -1\.0\. Use a finite"),
        (
            ["--config.objective=replaced_tokens", "--config.objective.generator_size=0"],
            r"objective\.generator_size is 0\.0\. Use a share above 0",
        ),
        (["--config.optimizer.momentum=0.9"], r"optimizer=adamw does not have it\. Set --config\.optimizer=muon"),
        (["--config.optimizer.schedule.decay_share=0.2"], r"schedule=linear does not have it\. Set .*schedule=wsd"),
        (["--config.optimizer.schedule=steps"], "unknown config.optimizer.schedule 'steps'; choose from constant"),
        (
            ["--config.checkpoint.every_minutes=-1"],
            r"config\.checkpoint\.every_minutes is -1\.0\. Use a finite number of at least 0",
        ),
        (["--config.eval.max_rows=-100"], r"config\.eval\.max_rows is -100\. Use a finite number of at least 0"),
    ],
)
def test_invalid_option_gives_one_line_and_writes_nothing(shards_dir, tmp_path, overrides, message):
    with pytest.raises(UserError, match=message) as caught:
        pretrain.main(arguments(shards_dir, tmp_path / "run", *overrides))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_checkpoint_of_another_architecture_is_rejected(trained, shards_dir, tmp_path):
    overrides = (f"--config.init_from={trained}", "--config.model.preset=mini")
    with pytest.raises(UserError, match="another architecture: layers is 2, but the configuration has 4"):
        pretrain.main(arguments(shards_dir, tmp_path / "run", *overrides))


@pytest.mark.slow
def test_preset_checkpoint_takes_the_architecture_of_init_from(trained, shards_dir, tmp_path):
    overrides = (f"--config.init_from={trained}", "--config.model.preset=checkpoint", "--config.steps=1")
    pretrain.main(arguments(shards_dir, tmp_path / "run", *overrides))
    assert read_config(tmp_path / "run").model == read_config(trained).model


@pytest.mark.slow
def test_longer_context_continues_with_larger_rotary_base(shards_dir, tmp_path):
    short = tmp_path / "short"
    rotary = ("--config.model.layers=1", "--config.model.positions=rotary", "--config.steps=1")
    pretrain.main(arguments(shards_dir, short, *rotary, "--config.model.max_positions=64"))
    stretched = ("--config.model.max_positions=128", "--config.model.rotary_base=160000")
    overrides = (f"--config.init_from={short}", "--config.model.preset=checkpoint", "--config.steps=1", *stretched)
    pretrain.main(arguments(shards_dir, tmp_path / "long", *overrides))
    there = read_config(tmp_path / "long").model
    assert (there.max_positions, there.rotary_base, there.layers) == (128, 160_000.0, 1)
    with pytest.raises(UserError, match="norm is post, but the configuration has pre"):
        pretrain.main(arguments(shards_dir, tmp_path / "other", *overrides, "--config.model.norm=pre"))


def test_shards_with_another_tokenizer_are_rejected(shards_dir, tmp_path):
    from data_prep import vocabulary
    from data_prep.vocabulary import TokenizerOptions

    copy = tmp_path / "shards"
    shutil.copytree(shards_dir, copy)
    shutil.rmtree(copy / "tokenizer")
    text = tmp_path / "text.txt"
    text.write_text("quite another text of very few words indeed\n\nand words again\n" * 3)
    vocabulary.train(TokenizerOptions(text, copy / "tokenizer", vocab_size=60, lowercase=True))
    with pytest.raises(UserError, match="tokenizer"):
        pretrain.main(arguments(copy, tmp_path / "run"))
