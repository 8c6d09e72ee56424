"""The statistics and tables of benchmarks.speedrun, and a short form of the whole benchmark."""

import json
import lzma
import math
import re
import shutil
import statistics

import numpy as np
import pytest
from conftest import SAMPLE
from scipy import stats
from tiny_runs import TINY, environment

from benchmarks import speedrun, speedrun_page
from bert_jax.errors import UserError
from bert_jax.interop import huggingface_export
from bert_jax.interop.open_checkpoint import open_checkpoint

OURS, THEIRS = [0.8, 0.82, 0.79, 0.85, 0.8], [0.7, 0.71, 0.69, 0.73, 0.7]


def test_the_standard_error_is_scipys_and_a_difference_has_that_of_two_independent_means():
    assert speedrun_page.standard_error(OURS) == pytest.approx(stats.sem(OURS))
    found, two_errors = speedrun_page.difference(OURS, THEIRS)
    assert found == pytest.approx(np.mean(OURS) - np.mean(THEIRS))
    # Welch's t statistic is the difference in units of its standard error.
    assert 2 * found / two_errors == pytest.approx(stats.ttest_ind(OURS, THEIRS, equal_var=False).statistic)
    assert math.isnan(speedrun_page.standard_error([0.5]))


def scored(**metrics):
    return {"metrics": {name: {"values": values} for name, values in metrics.items()}, "shown": [*metrics]}


def test_the_score_of_a_seed_is_the_mean_of_its_metrics_and_an_undefined_one_is_zero():
    result = scored(pearson=[0.5, None, float("nan")], spearman=[0.7, 0.2, None])
    assert speedrun_page.seed_values(result) == pytest.approx([0.6, 0.1, 0.0])


def test_the_mean_of_glue_needs_all_five_tasks_and_is_that_of_each_seed():
    values = {task: [0.1 * number, 0.2 * number] for number, task in enumerate(speedrun_page.GLUE)}
    assert speedrun_page.glue_mean(values | {"ewt": [0.9, 0.9]})["GLUE mean"] == pytest.approx([0.2, 0.4])
    assert speedrun_page.glue_mean({name: seeds for name, seeds in values.items() if name != "rte"}) == {}
    assert speedrun_page.glue_mean(values | {"rte": [0.5]}) == {}


def test_the_time_to_a_target_is_that_of_the_first_evaluation_at_or_below_it():
    lines = [
        {"step": 10, "budget_fraction": 0.1, "mlm_loss": 1.0},
        {"step": 20, "budget_fraction": 0.2, "eval_mlm_loss": 5.0},
        {"step": 30, "budget_fraction": 0.45, "eval_mlm_loss": 4.0},
        {"step": 40, "budget_fraction": 0.6, "eval_mlm_loss": 3.0},
    ]
    assert speedrun_page.minutes_to_target(lines, 4.0, 120.0) == 54.0
    assert speedrun_page.minutes_to_target(lines, 2.9, 120.0) is None


def test_the_table_states_means_errors_and_leads():
    def system(values, loss):
        tasks = {"rte": scored(accuracy=values)}
        return {"tasks": tasks, "values": {"rte": values}, "held_out": {"mlm_loss": loss}}

    header, rows = speedrun_page.table({"systems": {"trained": system(OURS, 3.5), "peer": system(THEIRS, 4.25)}})
    assert header == ["task", "metric", "speedrun", "transformers", "difference"]
    two_errors = 200 * math.hypot(statistics.stdev(OURS), statistics.stdev(THEIRS)) / math.sqrt(5)
    assert rows == [
        ["rte", "accuracy", "81.2 ± 1.1", "70.6 ± 0.7", f"+10.6 (± {two_errors:.1f})"],
        ["held-out text", "masked-token loss, nats", "3.500", "4.250", "-0.750"],
    ]


def test_scores_with_other_settings_have_a_column_without_a_lead(tmp_path):
    values = {"rte": scored(accuracy=OURS), "mrpc": scored(accuracy=THEIRS)}
    trained = {"tasks": values, "values": {"rte": OURS, "mrpc": THEIRS}, "held_out": {"mlm_loss": 3.5}}
    published = scored(accuracy=[0.9, 0.91], f1=[0.8, 0.8])
    (tmp_path / "rte.json").write_text(json.dumps(published))  # also has a metric that the table does not show
    results = speedrun_page.with_minilm({"training": {}, "systems": {"trained": trained}}, tmp_path)
    assert results["systems"]["minilm"]["values"] == {"rte": [0.9, 0.91]}
    header, rows = speedrun_page.table(results)
    assert header == ["task", "metric", "speedrun", "all-MiniLM-L6-v2"]
    assert [row[0::3] for row in rows] == [["mrpc", "-"], ["rte", "90.5 ± 0.5"], ["held-out text", "-"]]
    for task in speedrun_page.GLUE:
        (tmp_path / f"{task}.json").write_text(json.dumps(published))
        values[task] = scored(accuracy=OURS)
    means = speedrun_page.with_minilm(results, tmp_path)["systems"]["minilm"]["values"]["GLUE mean"]
    assert means == pytest.approx([0.905])  # one value: tasks may have different numbers of seeds
    assert speedrun_page.with_minilm({"systems": {}}, tmp_path) == {"systems": {}}


def test_the_page_names_the_machines_and_commits_of_the_runs_and_explains_its_errors():
    def origin(commit):
        return {"machine": {"processor": "chip", "cores": 2}, "commit": commit}

    task = scored(accuracy=OURS) | {"command": "python -m tune"} | origin("b" * 40 + "+changes")
    run = {"seconds": 60, "step": 1, "tokens": 2, "origin": origin("a" * 40)}
    trained = {"tasks": {"rte": task}, "values": {"rte": OURS}, "held_out": None}
    text = speedrun_page.markdown({"training": {"trained": run}, "systems": {"trained": trained}})
    assert "- machine: chip, 2 cores\n" in text
    assert "trained once more" not in text
    assert f"- commit: {'a' * 12}; {'b' * 12}+changes\n" in text
    assert "standard error" in text and "    python -m tune\n" in text


def test_results_of_another_day_are_kept_and_those_of_other_settings_refused(tmp_path):
    settings, published = {"seeds": 5, "tokens": 100}, tmp_path / speedrun_page.RESULTS_FILE

    def system(loss, **tasks):
        return {"held_out": {"loss": loss}, "tasks": tasks, "values": {}}

    rte, mrpc = (scored(accuracy=OURS) | {"shown": ["accuracy"]} for _ in range(2))
    first = {"settings": settings, "training": {"trained": {"step": 1}}}
    first["systems"] = {"trained": system(1.0, rte=rte), "random": system(9.0, rte=rte), "peer": system(2.0, rte=rte)}
    second = {"settings": settings, "training": {"peer": {"steps": 2}}}
    second["systems"] = {"random": system(9.0, mrpc=mrpc), "peer": system(3.0, mrpc=mrpc)}
    assert speedrun_page.with_published(first, tmp_path) == first
    published.write_text(json.dumps(first))
    both = speedrun_page.with_published(second, tmp_path)
    assert both["training"] == first["training"] | second["training"]
    tasks = {name: list(one["tasks"]) for name, one in both["systems"].items()}
    assert tasks == {"trained": ["rte"], "random": ["rte", "mrpc"], "peer": ["mrpc"]}  # the peer was trained again
    assert both["systems"]["random"]["values"]["mrpc"] == OURS
    with pytest.raises(UserError, match=r"results\.json holds results of .*'tokens': 100.*Delete it to start"):
        speedrun_page.with_published(second | {"settings": {"seeds": 5, "tokens": 99}}, tmp_path)


def test_a_replay_keeps_the_tasks_of_the_training_that_it_repeats_and_not_those_of_another_replay(tmp_path):
    published = tmp_path / speedrun_page.RESULTS_FILE

    def publish(loss, **more):
        tasks = {name: scored(accuracy=OURS) | {"shown": ["accuracy"]} for name in more.pop("tasks")}
        trained = {"held_out": {"loss": loss}, "tasks": tasks, "values": {}, **more}
        found = {"settings": {}, "training": {}, "systems": {"trained": trained}}
        merged = speedrun_page.with_published(found, tmp_path)
        published.write_text(json.dumps(merged))
        system = merged["systems"]["trained"]
        return list(system["tasks"]), system.get("replayed")

    assert publish(1.0, tasks=["rte", "ewt"]) == (["rte", "ewt"], None)
    assert publish(1.1, tasks=["rte"], replayed=["rte"]) == (["rte", "ewt"], ["rte"])
    assert publish(1.1, tasks=["mrpc"], replayed=["mrpc"]) == (["rte", "ewt", "mrpc"], ["rte", "mrpc"])
    assert publish(1.2, tasks=["rte"], replayed=["rte"]) == (["ewt", "rte"], ["rte"])


@pytest.fixture
def small_data(tmp_path, monkeypatch):
    """A folder like BERT_JAX_DATA, with two books and two small tasks."""
    data = tmp_path / "data"
    (data / "pretrain").mkdir(parents=True)
    for number, name in enumerate(("irving_rip_van_winkle", "dickens_a_christmas_carol")):
        shutil.copy(SAMPLE / "books" / f"{name}.txt.xz", data / "pretrain" / f"books_en_{number}.txt.xz")
    (data / "ud_english_ewt").mkdir()
    for split, count in (("train", 64), ("dev", 32), ("test", 16)):
        with lzma.open(SAMPLE / "ewt" / f"{split}.conllu.xz", "rt", encoding="utf-8") as file:
            sentences = file.read().split("\n\n")[:count]
        (data / "ud_english_ewt" / f"en_ewt-ud-{split}.conllu").write_text("\n\n".join(sentences) + "\n\n")
    (data / "glue" / "RTE").mkdir(parents=True)
    for split, count in (("train", 64), ("dev", 20)):
        labels = ("entailment", "not_entailment")
        lines = [f"{row}\tA dog ate {row} bones.\tA dog ate.\t{labels[row % 2]}" for row in range(count)]
        header = "index\tsentence1\tsentence2\tlabel"
        (data / "glue" / "RTE" / f"{split}.tsv").write_text("\n".join([header, *lines]) + "\n")
    monkeypatch.setenv("BERT_JAX_DATA", str(data))
    monkeypatch.setenv("XLA_FLAGS", environment(1)["XLA_FLAGS"])
    return data


def command_of(tmp_path, *more):
    """The benchmark with a model of one layer, for 60 steps and two seeds."""
    (tmp_path / "page.md").write_text(speedrun_page.BEGIN + speedrun_page.END)
    folders = [f"--output={tmp_path / 'run'}", f"--results={tmp_path / 'results'}", f"--page={tmp_path / 'page.md'}"]
    training = ["steps=60", "budget_minutes=5", "batch_size=8", "eval.every_steps=20", "log_every=10"]
    overrides = [*TINY, *(f"--config.{one}" for one in training)]
    return [*folders, "--vocab_size=600", "--eval_fraction=0.3", "--seeds=2", "--target=100", *overrides, *more]


@pytest.mark.slow
def test_a_short_speedrun_scores_both_models_and_repeats_nothing(small_data, tmp_path, capsys):
    speedrun.main(command_of(tmp_path, "--tasks=rte,ewt", "--part=data,train,scores,random,peer,page"))
    assert "skipped: peer needs --peer_python" in capsys.readouterr().err
    text = (tmp_path / "results" / "results.json").read_text(encoding="utf-8")
    assert str(tmp_path / "run") not in text
    found = json.loads(text)
    assert set(found["systems"]) == {"trained", "random", "minilm"}
    for system in (found["systems"][name] for name in ("trained", "random")):
        assert {name: len(values) for name, values in system["values"].items()} == {"rte": 2, "ewt": 2}
    trained, random = (found["systems"][name]["held_out"]["mlm_loss"] for name in ("trained", "random"))
    assert abs(random - math.log(600)) < 0.2 and trained < random - 0.3
    assert 0 < found["training"]["target"]["minutes"] < 5
    assert "ModernBERT" in huggingface_export.describe(open_checkpoint(tmp_path / "run" / "trained"))
    assert "| held-out text |" in (tmp_path / "page.md").read_text()
    assert "<svg" in (tmp_path / "results" / "page.html").read_text()

    finished = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*.json")}
    (tmp_path / "run" / "scores" / "random" / "rte.json").unlink()
    speedrun.main(command_of(tmp_path, "--tasks=rte,ewt"))
    again = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*.json")}
    assert {path for path in finished if again[path] != finished[path]} == {
        tmp_path / "run" / "scores" / "random" / "rte.json"
    }

    log = (tmp_path / "results" / "metrics.jsonl").read_bytes()
    replay = command_of(tmp_path, f"--output={tmp_path / 'replay'}", "--tasks=rte")
    speedrun.main([*replay, "--replay", "--part=data,train,page"])
    facts = r"- trained once more by its log: 60 steps, to the loss \S+ instead of \S+ on the first held-out rows"
    assert re.search(rf"{facts}\n", (tmp_path / "page.md").read_text())
    with pytest.raises(UserError, match=r"holds a replay\. Use it with --replay"):
        speedrun.main([*replay, "--part=train"])
    speedrun.main([*replay, "--replay", "--part=train,scores,page"])
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    first, again = results["training"]["trained"], results["training"]["replay"]
    assert first == found["training"]["trained"] and again["step"] == 60
    ours = results["systems"]["trained"]
    assert ours["tasks"]["ewt"] == found["systems"]["trained"]["tasks"]["ewt"] and ours["replayed"] == ["rte"]
    assert again["eval_mlm_loss"] == pytest.approx(first["eval_mlm_loss"], abs=1e-5)
    assert (tmp_path / "results" / "metrics.jsonl").read_bytes() == log
    assert re.search(rf"{facts}; its model is that of rte below\n", (tmp_path / "page.md").read_text())
