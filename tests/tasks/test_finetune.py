"""Fine-tuning end to end on real sentences, and what it refuses."""

import dataclasses
import gc
import json
import re
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import tiny_finetuning
from tiny_finetuning import config_of, write_nli
from tiny_runs import ROOT

from bert_jax import config as config_lib
from bert_jax.commands import finetune as commands_finetune
from bert_jax.config import (
    AdamW,
    AutoTaskConfig,
    CheckpointConfig,
    EvalConfig,
    FinetuneConfig,
    LinearSchedule,
    ModelOptions,
    QuestionConfig,
    RegressionConfig,
    TrainConfig,
)
from bert_jax.config.model import LoraConfig
from bert_jax.errors import Stopped, UserError
from bert_jax.interop.export import export
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import lora as lora_lib
from bert_jax.model.heads.config import Heads
from bert_jax.tasks import measurement, named, registry, trials
from bert_jax.tasks import runs as prepared_runs
from bert_jax.tasks.finetuning import finetune
from bert_jax.tasks.trials import Trial
from bert_jax.tokenization import tokenizer as tokenizer_lib
from bert_jax.train import loop, metrics
from bert_jax.train.orbax_io import AVERAGE, PARAMS, read_meta
from bert_jax.train.run import Result, Run
from bert_jax.train.workdir import latest_step, read_params

start, reviews = tiny_finetuning.start, tiny_finetuning.reviews  # fixtures


@pytest.fixture(scope="module")
def treebank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The first sentences of each part of the bundled treebank, as CoNLL-U."""
    folder = tmp_path_factory.mktemp("treebank")
    task, files = registry.resolve(AutoTaskConfig(name="ewt"))
    for split, count in (("train", 480), ("dev", 60), ("test", 60)):
        lines = []
        for sentence in registry.read(task, files[split]).items[:count]:
            pairs = zip(sentence.words, sentence.tags or (), strict=True)
            lines += ["\t".join([str(n), word, "_", tag, *"______"]) for n, (word, tag) in enumerate(pairs, 1)]
            lines.append("")
        (folder / f"{split}.conllu").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {split: str(folder / f"{split}.conllu") for split in ("train", "dev", "test")}


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_tagging_learns_and_the_workdir_is_a_checkpoint_of_its_task(start, treebank, tmp_path):
    config = config_of(start, AutoTaskConfig(name="ewt", **treebank), eval=EvalConfig(every_steps=20))
    workdir = tmp_path / "ewt"
    result = finetune(config, workdir)
    assert json.loads((workdir / "result.json").read_text()) == result
    assert (result["task"], result["seeds"]) == ("ewt", [0])
    # A fifth of the words are of the most frequent tag; an epoch of a random model passes that on each seed tried.
    accuracy = result["metrics"]["accuracy"]
    assert accuracy["mean"] > 0.3 and result["metrics"]["test_accuracy"]["mean"] > 0.3
    assert accuracy["std"] is None and accuracy["values"] == [accuracy["mean"]]
    assert result["counts"]["train"]["examples"] == 480 and result["counts"]["test"]["words"] > 300
    evaluated = [line["step"] for line in metrics.read_metrics(workdir) if "eval_accuracy" in line]
    assert evaluated[0] == 20 and evaluated[-1] == latest_step(workdir)

    loaded = open_checkpoint(workdir)
    assert loaded.heads == Heads(tags=17) and registry.restore_task(loaded).labels[0] == "ADJ"
    assert measurement.evaluate(loaded, treebank["dev"]).metrics["accuracy"] == pytest.approx(accuracy["mean"])
    assert finetune(config, workdir) == result  # nothing is left to do, and nothing changes


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_several_seeds_are_summarized_and_the_workdir_opens_as_the_best(start, reviews, tmp_path, capsys, monkeypatch):
    task = AutoTaskConfig(**reviews, text="review", text_pair="pair", label="stars")
    config = config_of(start, task, epochs=5.0, seeds=(0, 1))
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, ema_decay=0.9))
    workdir = tmp_path / "own"
    fit = loop.fit
    with monkeypatch.context() as patch:  # SIGTERM while a seed's last checkpoint is written
        patch.setattr(loop, "fit", lambda run: dataclasses.replace(fit(run), stopped_by="SIGTERM"))
        with pytest.raises(Stopped, match="seed-0 is complete, later seeds are not"):
            finetune(config, workdir)
    assert not (workdir / "seed-1").exists()
    result = finetune(config, workdir)
    accuracy = result["metrics"]["accuracy"]
    assert accuracy["mean"] == pytest.approx(np.mean(accuracy["values"])) and accuracy["mean"] > 0.8
    assert accuracy["std"] == pytest.approx(np.std(accuracy["values"], ddof=1))
    assert list(result["counts"]) == ["train", "dev"]
    assert "test.tsv has no labels" in capsys.readouterr().err

    best = int(np.argmax(accuracy["values"]))
    for item in (PARAMS, AVERAGE):
        one, other = (read_params(run, item=item) for run in (workdir, workdir / f"seed-{best}"))
        assert all((one[path] == other[path]).all() for path in other)
    assert result["metrics"]["ema_accuracy"]["mean"] > 0.7
    written = json.loads((workdir / "config.json").read_text())
    assert written["kind"] == "finetuning" and written["heads"]["classes"] == 2
    assert written["task"]["name"] == "own" and written["task"]["labels"] == ["no", "yes"]
    found = measurement.evaluate(open_checkpoint(workdir), Path(reviews["dev"]).parent)
    assert found.metrics["accuracy"] == pytest.approx(max(accuracy["values"]))
    assert finetune(config, workdir) == result
    assert json.loads((workdir / "seed-1" / "result.json").read_text())["seeds"] == [1]
    with monkeypatch.context() as patch:
        patch.setattr(loop, "fit", lambda run: dataclasses.replace(fit(run), stopped_by="SIGTERM"))
        with pytest.raises(Stopped, match="seed-2 is complete"):
            finetune(dataclasses.replace(config, seeds=(2, 3)), workdir)
    assert not (workdir / "result.json").exists()  # of seeds 0 and 1, whose own are still so
    assert (workdir / "seed-1" / "result.json").exists()


def test_the_parameters_of_a_finished_seed_are_freed_before_the_next_one_trains(start, reviews, tmp_path, monkeypatch):
    class Params(dict):  # which, unlike a dict, may have weak references
        pass

    finished: list[weakref.ref[Params]] = []

    def fit(run: Run) -> Result:
        gc.collect()
        assert not any(params() for params in finished)
        params = Params(kernel=np.ones(3))
        finished.append(weakref.ref(params))
        return Result(step=1, seconds=0.0, tokens=0, evaluation={}, params=params, kept=1)

    monkeypatch.setattr(loop, "fit", fit)
    task = AutoTaskConfig(train=reviews["train"], text="review", label="stars")
    config = config_of(start, task, steps=1, seeds=3)
    _, data, runs = prepared_runs.prepare(config, tmp_path / "run")
    trials.train(data.task, data.rows, runs)
    assert len(finished) == 3


@pytest.mark.slow
def test_a_regression_is_measured_by_correlations(start, reviews, tmp_path):
    files = {split: reviews[split] for split in ("train", "dev")}
    task = RegressionConfig(**files, text="review", label="score", pooling="attention_additive")
    result = finetune(config_of(start, task, epochs=6.0), tmp_path / "own")
    assert result["metrics"]["pearson"]["mean"] > 0.5
    loaded = open_checkpoint(tmp_path / "own")
    assert loaded.heads == Heads(pooling="attention_additive", pooler=True, classes=1)
    found = measurement.evaluate(loaded, reviews["dev"], TrainConfig(batch_size=16)).metrics
    assert found["pearson"] == pytest.approx(result["metrics"]["pearson"]["mean"])
    assert {"pearson", "spearman", "task_loss"} == set(result["metrics"])


@pytest.mark.slow
def test_training_the_head_alone_leaves_the_rest_bit_for_bit(start, reviews, tmp_path):
    task = AutoTaskConfig(train=reviews["train"], text="review", label="stars", dev_share=0.0)
    result = finetune(config_of(start, task, steps=2, train_layers="head"), tmp_path / "head")
    assert result["metrics"] == {}
    before, after = open_checkpoint(start).params, read_params(tmp_path / "head")
    same = {path for path in after if path in before and (after[path] == before[path]).all()}
    assert set(after) - same == {"classifier/dense/kernel", "classifier/dense/bias"}


@pytest.mark.slow
def test_gradual_unfreezing_resumes_bit_for_bit_in_every_stage(start, reviews, tmp_path):
    """Four stages of two steps each: the head, two layers, the embeddings; a run resumes from each of its steps."""
    task = AutoTaskConfig(train=reviews["train"], text="review", label="stars", dev_share=0.0)
    checkpoint = CheckpointConfig(every_steps=1, every_minutes=0.0, keep=0)
    config = config_of(start, task, steps=7, train_layers="gradual:0.25", checkpoint=checkpoint)
    assert trials.unfreeze_every(config, 96) == 2
    finetune(config, tmp_path / "whole")
    for step in (1, 2, 3, 6):  # in each stage, and at the boundary of two
        folder = tmp_path / f"from-{step}"
        shutil.copytree(tmp_path / "whole", folder)
        for later in range(step + 1, 8):
            shutil.rmtree(folder / "checkpoints" / str(later))
        finetune(config, folder)
        for item in ("params", "optimizer"):
            tensors = read_meta(folder / "checkpoints" / "7")["tensors"][item]
            assert tensors == read_meta(tmp_path / "whole" / "checkpoints" / "7")["tensors"][item]
    first, last = (set(read_meta(tmp_path / "whole" / "checkpoints" / step)["tensors"]["optimizer"]) for step in "17")
    assert first == last


@pytest.mark.parametrize(
    ("epochs", "changes", "message"),
    [
        ("gradual", {"epochs": 1.0}, r"leaves 2 of 2 layers and the embeddings .*=gradual:0\.16 trains all"),
        ("gradual", {"epochs": 3.0}, r"leaves the embeddings as they are in 18 steps; .*=gradual:0\.83 trains all"),
        ("gradual:0.16", {"epochs": 1.0}, ""),
        ("gradual:0.83", {"epochs": 3.0}, ""),
        ("gradual", {"steps": 3}, "leaves 2 of 2 layers and the embeddings .*; use more steps"),
        ("gradual", {"epochs": 1.0, "budget_minutes": 1.0}, ""),
        ("all", {"epochs": 1.0}, ""),
    ],
)
def test_a_run_too_short_for_gradual_unfreezing_says_what_never_trains(
    start, reviews, tmp_path, capsys, epochs, changes, message
):
    """An epoch has 6 steps."""
    task = AutoTaskConfig(train=reviews["train"], text="review", label="stars", dev_share=0.0)
    config = config_of(start, task, train_layers=epochs, **changes)
    prepared_runs.prepare(config, tmp_path / "run")
    found = capsys.readouterr().err
    assert re.search(message, found) if message else "the embeddings as they are" not in found


@pytest.mark.slow
def test_adapters_train_alone_and_the_merged_model_is_the_one_that_was_measured(start, reviews, tmp_path):
    """The checkpoint holds the start bit for bit; every command reads it with the adapters merged."""
    files = {split: reviews[split] for split in ("train", "dev")}
    task = AutoTaskConfig(**files, text="review", label="stars")
    lora = LoraConfig(rank=4, alpha=32.0, dropout=0.1, targets="attention/(query|value)|feed_forward")
    optimizer = AdamW(learning_rate=2e-2, schedule=LinearSchedule(warmup_steps=-1))
    result = finetune(config_of(start, task, epochs=8.0, lora=lora, optimizer=optimizer), tmp_path / "lora")
    assert result["metrics"]["accuracy"]["mean"] > 0.8
    before, after = open_checkpoint(start).params, read_params(tmp_path / "lora")
    adapters = {path for path in after if lora_lib.is_adapter(path)}
    assert len(adapters) == 2 * 4
    same = {path for path in after if path in before and (after[path] == before[path]).all()}
    assert set(after) - same == {"classifier/dense/kernel", "classifier/dense/bias"} | adapters
    steps = latest_step(tmp_path / "lora")
    moments = read_meta(tmp_path / "lora" / "checkpoints" / str(steps))["tensors"]["optimizer"]
    assert {name.removeprefix("1/mu/") for name in moments if "/mu/" in name} == set(after) - same
    merged = open_checkpoint(tmp_path / "lora")
    assert merged.model.lora is None and not any(map(lora_lib.is_adapter, merged.params))
    found = measurement.evaluate(merged, reviews["dev"], TrainConfig(batch_size=16)).metrics
    assert found["accuracy"] == result["metrics"]["accuracy"]["mean"]
    assert found["task_loss"] == pytest.approx(result["metrics"]["task_loss"]["mean"], abs=1e-5)
    export(tmp_path / "lora", tmp_path / "exported")
    exported = open_checkpoint(tmp_path / "exported")
    for path in (path for path in merged.params if path.startswith(("encoder/", "pooler/", "classifier/"))):
        np.testing.assert_array_equal(exported.params[path], merged.params[path], err_msg=path)


@pytest.mark.slow
def test_mnli_is_evaluated_by_split_submitted_and_recorded_as_the_start_of_rte(start, tmp_path, capsys):
    write_nli(tmp_path / "glue")
    task = AutoTaskConfig(name="mnli", data_dir=str(tmp_path))
    result = finetune(config_of(start, task), tmp_path / "mnli")
    submitting = dataclasses.replace(task, submission=str(tmp_path / "leaderboard"))
    assert finetune(config_of(start, submitting), tmp_path / "mnli") == result  # nothing is left to train
    names = set(result["metrics"])
    assert {"accuracy", "dev_mismatched_accuracy", "ax_matthews_correlation"} <= names
    assert not any(name.startswith("test") for name in names) and "ax_accuracy" not in names
    assert result["start"] == {"path": str(start), "task": None}
    assert set(result["counts"]) == {"train", "dev", "dev_mismatched", "ax"}
    found = {path.name: path.read_text().splitlines() for path in (tmp_path / "leaderboard").iterdir()}
    assert {name: len(lines) - 1 for name, lines in found.items()} == {"MNLI-m.tsv": 5, "MNLI-mm.tsv": 6, "AX.tsv": 3}
    loaded = open_checkpoint(tmp_path / "mnli")
    assert set(measurement.evaluate(loaded, tmp_path).metrics) == names
    alone = measurement.evaluate(loaded, tmp_path / "glue/diagnostic/diagnostic-full.tsv").metrics
    assert "matthews_correlation" in alone and "accuracy" not in alone

    capsys.readouterr()
    rte = config_of(tmp_path / "mnli", AutoTaskConfig(name="rte", data_dir=str(tmp_path)), steps=1)
    result = finetune(rte, tmp_path / "rte")
    assert result["start"] == {"path": str(tmp_path / "mnli"), "task": "mnli"}
    said = capsys.readouterr().err
    assert "or specific to its task (mnli: entailment, neutral, contradiction): classifier/" in said


def test_a_tokenizer_much_smaller_than_the_embedding_table_gives_a_warning(start, monkeypatch, capsys):
    loaded = open_checkpoint(start)
    for more, said in ((100, False), (1000, True)):
        model = dataclasses.replace(loaded.model, vocab_size=loaded.vocabulary.vocab_size + more)
        other = dataclasses.replace(loaded, model=model)
        monkeypatch.setattr(prepared_runs, "open_initial", lambda _, other=other: other)
        prepared_runs.open_start(config_of(start, AutoTaskConfig()), None)
        assert ("Check that it belongs to this model" in capsys.readouterr().err) == said


def test_a_submission_folder_for_a_task_without_a_leaderboard_is_refused(start, reviews, tmp_path):
    task = AutoTaskConfig(train=reviews["train"], text="review", label="stars", submission=str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"no leaderboard accepts predictions of train of task own; .*boolq"):
        finetune(config_of(start, task), tmp_path / "work")
    assert not (tmp_path / "work").exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("training", "heads", "untrained"),
    [
        ({"steps": 5}, Heads(mlm=True), True),
        ({"steps": 5}, Heads(mlm=True, pooler=True, next_sentence=True), False),
        ({}, Heads(mlm=True), False),  # another program trained it
        ({"steps": 5}, Heads(pooler=True, classes=2), False),  # fine-tuned
    ],
)
def test_the_first_token_is_untrained_after_masked_tokens_alone(start, training, heads, untrained):
    loaded = dataclasses.replace(open_checkpoint(start), training=training, heads=heads)
    words = tokenizer_lib.load(start / "tokenizer")
    assert prepared_runs.Start(loaded.model, words, loaded).cls_is_untrained == untrained
    assert not prepared_runs.Start(loaded.model, words, None).cls_is_untrained


def test_steps_warmup_and_evaluation_follow_from_rows_and_epochs():
    config = FinetuneConfig(optimizer=AdamW(schedule=LinearSchedule(warmup_steps=-1)), epochs=3.0, batch_size=32)

    given = dataclasses.replace(config, steps=5, optimizer=AdamW(schedule=LinearSchedule(warmup_steps=2)))
    by_clock = dataclasses.replace(config, budget_minutes=1.0)
    for case, steps, warmup, share in ((config, 94, 10, 0.0), (given, 5, 2, 0.0), (by_clock, 0, 0, 0.1)):
        settings = trials.settings(case, Trial(7), named.TASKS["rte"].task, rows=1001, measured=True)
        schedule = settings.optimizer.schedule
        assert (settings.seed, settings.steps, settings.eval.every_steps) == (7, steps, 32)
        assert (schedule.warmup_steps, schedule.warmup_share) == (warmup, share)


@pytest.mark.parametrize(
    ("task", "asked", "rows", "pool"),
    [
        ("rte", 0, 32 * 128, 32),
        ("rte", 0, 32 * 16, 4),  # a quarter of an epoch
        ("rte", 0, 32, 1),
        ("rte", 8, 32 * 128, 8),
        ("conll2003", 0, 32 * 128, 1),  # words count alike in all batches
        ("conll2003", 8, 32 * 128, 8),
    ],
)
def test_rows_are_grouped_by_length_within_a_part_of_an_epoch_and_not_for_words(task, asked, rows, pool):
    config = FinetuneConfig(length_pool=asked)
    assert trials.settings(config, Trial(0), named.TASKS[task].task, rows, measured=True).length_pool == pool


@pytest.mark.parametrize(
    "recipe", ["glue.py:task=rte", "glue.py:mnli", "superglue.py:task=cb", "tagging.py:task=conll2003", "own.py"]
)
def test_a_recipe_is_a_fine_tuning_configuration(recipe):
    flags = ["--config.seeds=(3,4)", "--config.epochs=2"]
    built = config_lib.from_flags(FinetuneConfig, str(ROOT / "configs" / recipe), flags)
    assert (built.seeds, built.epochs, built.optimizer.schedule.warmup_steps) == ((3, 4), 2.0, -1)


@pytest.mark.parametrize("recipe", ["glue.py:task=sst3", "superglue.py:task=wsc", "tagging.py:task=pos"])
def test_a_recipe_names_its_tasks(recipe):
    with pytest.raises(UserError, match=r"unknown task .*; use task=NAME, NAME one of"):
        config_lib.from_flags(FinetuneConfig, str(ROOT / "configs" / recipe))


def test_the_command_names_what_is_missing(tmp_path):
    arguments = ["--config", str(ROOT / "configs/tagging.py:task=ewt"), "--workdir", str(tmp_path / "work")]
    with pytest.raises(UserError, match=r"init_from is not set; .* --config.init_from=CHECKPOINT"):
        commands_finetune.main(arguments)
    assert not (tmp_path / "work").exists()


MISTAKES = {
    "more slots than positions": ({"task": {"max_length": 128}}, "task.max_length is 128.*64 positions.*max_length=64"),
    "a seed twice": ({"seeds": (1, 1)}, "several different seeds"),
    "a seed that stands for another": ({"seeds": (1, 2**32)}, "several different seeds from 0 to 4294967295"),
    "no seed": ({"seeds": ()}, "give the number of seeds, at most 100, such as --config.seeds=5"),
    "a seed for their number": ({"seeds": 1234}, "--config.seed=SEED trains with a single seed"),
    "no rows in a batch": (
        {"batch_size": 0},
        "batch_size is 0. Use at least one row, .* --config.batch_size=",
    ),
    "nothing to do": ({"epochs": 0.0}, "epochs is 0.0"),
    "unknown layers": ({"train_layers": "lowest"}, "train_layers is 'lowest'"),
    "other positions": ({"model": ModelOptions(max_positions=512)}, "max_positions is 512.*has 64"),
    "part of the dev rows": ({"eval": EvalConfig(max_rows=10)}, "eval.max_rows is for pretraining"),
    "no checkpoint": ({"init_from": "/nowhere/start"}, "no checkpoint at /nowhere/start"),
    "a metric that is none": (
        {"checkpoint": CheckpointConfig(best="eval_f2")},
        "'eval_f2', which this run .* choose from eval_acc",
    ),
    "no such column": ({"task": {"text": "body"}}, "no column 'body'; its columns are: review"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_invalid_configuration_is_refused_before_anything_is_written(start, reviews, tmp_path, mistake):
    changes, message = MISTAKES[mistake]
    task = AutoTaskConfig(train=reviews["train"], dev=reviews["dev"], text="review", label="stars")
    config = config_of(start, task)
    for name, value in changes.items():
        value = dataclasses.replace(config.task, **value) if name == "task" else value
        config = dataclasses.replace(config, **{name: value})
    with pytest.raises(UserError, match=message):
        finetune(config, tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_a_dev_label_that_training_lacks_is_refused_with_file_and_line(start, reviews, tmp_path):
    dev = tmp_path / "dev.tsv"
    dev.write_text("review\tstars\nthe sea was good\tyes\nthe sea was there\tmaybe\n")
    task = AutoTaskConfig(train=reviews["train"], dev=str(dev), text="review", label="stars")
    with pytest.raises(UserError, match=r"dev.tsv line 3: unknown label 'maybe'; the task's labels are: 'no', 'yes'"):
        finetune(config_of(start, task), tmp_path / "work")


def test_one_seed_and_several_do_not_share_a_workdir(start, reviews, tmp_path):
    task = AutoTaskConfig(train=reviews["train"], text="review", label="stars")
    for name in ("one", "several/seed-0"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(UserError, match="holds a run of one seed"):
        finetune(config_of(start, task, seeds=(0, 1)), tmp_path / "one")
    with pytest.raises(UserError, match="holds runs of several seeds"):
        finetune(config_of(start, task), tmp_path / "several")


def test_what_a_workdir_opens_as_is_made_again_where_that_was_cut_off(tmp_path, monkeypatch):
    (tmp_path / "seed-0").mkdir()
    (tmp_path / trials.BEST_FILE).write_text('{"run": "seed-0", "step": 6}')
    (tmp_path / "config.json").write_text("{}")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trials, "read_params", killed)
    monkeypatch.setattr(trials, "selected_step", lambda folder: 6 if folder.name == "seed-0" else 7)
    for seed in (1, 0):  # the best was another for a while
        with pytest.raises(KeyboardInterrupt):
            trials.keep_best(tmp_path, Trial(seed, f"seed-{seed}"), averaged=False)


def test_a_pretrained_checkpoint_has_no_task_to_evaluate(start, reviews):
    with pytest.raises(UserError, match="was not fine-tuned for a task"):
        measurement.evaluate(open_checkpoint(start), reviews["dev"])


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """SQuAD's JSON: who was somewhere, in a context of two; one question in three asks for what is not there."""
    folder = tmp_path_factory.mktemp("questions")
    draw = np.random.default_rng(0)
    people, places = ["the man", "her father", "a letter"], ["house", "sea", "river"]
    for split, count in (("train", 48), ("dev", 12)):
        paragraphs = []
        for number in range(count):
            first, second = (str(one) for one in draw.permutation(people)[:2])
            here, there, nowhere = (str(one) for one in draw.permutation(places))
            context = f"{first} was in the {here}, {second} was in the {there}"
            asked = [here, there, nowhere][number % 3]
            answers = [] if asked == nowhere else [first if asked == here else second]
            entry = {
                "id": f"{split} {number}",
                "question": f"was in the {asked}",
                "answers": [{"text": text, "answer_start": context.index(text)} for text in answers],
            }
            paragraphs.append({"context": context, "qas": [entry]})
        content = {"version": "v2.0", "data": [{"title": split, "paragraphs": paragraphs}]}
        (folder / f"{split}.json").write_text(json.dumps(content), encoding="utf-8")
    return {split: str(folder / f"{split}.json") for split in ("train", "dev")}


@pytest.mark.slow
def test_the_threshold_of_no_answer_is_chosen_on_dev_and_stored_in_the_checkpoint(start, questions, tmp_path):
    task = QuestionConfig(train=questions["train"], dev=questions["dev"], max_length=64)
    config = FinetuneConfig(init_from=str(start), task=task, steps=2, batch_size=8)
    result = finetune(config, tmp_path / "run")
    assert result["counts"]["dev"]["unanswerable"] == 4 and result["counts"]["dev"]["answers_not_found"] == 0
    threshold = result["metrics"]["best_f1_thresh"]["values"][0]
    loaded = open_checkpoint(tmp_path / "run")
    assert registry.restore_task(loaded).null_threshold == threshold and loaded.heads == Heads(question=True)
    found = measurement.evaluate(loaded, questions["dev"], TrainConfig(batch_size=8))
    for name, metric in result["metrics"].items():
        assert found.metrics[name] == pytest.approx(metric["values"][0], abs=1e-6), name
    assert finetune(config, tmp_path / "run") == result  # measured again, not trained
    assert registry.restore_task(open_checkpoint(tmp_path / "run")).null_threshold == threshold
    given = dataclasses.replace(config, task=dataclasses.replace(config.task, null_threshold=0.0))
    assert finetune(given, tmp_path / "run")["metrics"]["NoAns_exact"]["values"] == [1.0]  # nothing is ever answered
    assert registry.restore_task(open_checkpoint(tmp_path / "run")).null_threshold == 0.0
    chosen = dataclasses.replace(given, steps=3, checkpoint=CheckpointConfig(best="eval_f1"))
    with pytest.raises(UserError, match=r"belongs to another run: task.null_threshold: none -> 0.0\. "):
        finetune(chosen, tmp_path / "run")  # its f1 was measured at another one
