"""The page that compares several runs."""

import json
from pathlib import Path

import pytest
from report_pages import Page, make_workdir, metric_line

from bert_jax.commands import report as commands_report
from bert_jax.errors import UserError
from bert_jax.reporting import report
from bert_jax.reporting.runs import short_names

TASK = {"name": "sst2", "kind": "classification"}


def training(rate: float, rows: int = 32) -> dict:
    return {"optimizer": {"learning_rate": rate, "kind": "adamw"}, "batch_size": rows, "seed": 0}


def words(*workdirs: Path, output: Path) -> str:
    return " ".join(Page(report.compare(workdirs, output).read_text(encoding="utf-8")).words.split())


def test_runs_are_side_by_side_and_only_what_differs_is_listed(tmp_path):
    result = {"step": 200, "seconds": 75.0, "tokens": 4321000, "eval_mlm_loss": 6.0, "eval_mlm_accuracy": 0.1818}
    first = make_workdir(tmp_path / "a", training(1e-3), result=result)
    second = make_workdir(tmp_path / "b", training(5e-4))
    (second / "metrics.jsonl").write_text(json.dumps(metric_line(100)) + "\n", encoding="utf-8")
    text = report.compare([first, second], tmp_path / "compared.html").read_text(encoding="utf-8")
    page = Page(text)
    shown = " ".join(page.words.split())
    assert "Comparison of 2 runs" in shown and "Not finished, shown so far: b." in shown
    for cells in (
        ("Steps", "200", "100"),
        ("Tokens seen", "4.321M", "-"),
        ("Training time", "1:15", "-"),
        ("mlm_accuracy", "0.1818", "0.0909"),
        ("mlm_loss", "6.0000", "7.1000"),
    ):
        assert f"<tr><td>{cells[0]}</td>" + "".join(f'<td class="number">{cell}</td>' for cell in cells[1:]) in text
    different = '<td>optimizer.learning_rate</td><td class="words">0.001</td><td class="words">0.0005</td>'
    assert different in text
    assert "batch_size" not in shown and "adamw" not in shown
    assert text.count('<g class="series-0">') >= 3  # the curves of a
    assert text.count('<circle class="series-1"') == text.count("last: a")  # b has one point in each chart


def test_a_run_keeps_its_colour_in_charts_where_another_has_no_curve(tmp_path):
    runs = [make_workdir(tmp_path / name, training(1e-3)) for name in "abc"]
    (runs[0] / "metrics.jsonl").write_text('{"step": 10, "loss": 2.0}\n{"step": 20, "loss": 1.5}\n', encoding="utf-8")
    text = report.compare(runs, tmp_path / "compared.html").read_text(encoding="utf-8")
    rates = next(figure for figure in text.split("<figure")[1:] if "Learning rate" in figure)
    assert 'class="series-0"' not in rates and 'class="series-1"' in rates and 'class="series-2"' in rates
    assert "All keys are equal." in Page(text).words


def test_a_key_of_the_task_and_one_of_its_configuration_are_told_apart(tmp_path):
    def run(name: str, length: int) -> Path:
        settings = training(1e-3) | {"task": {"max_length": length - 1}}
        task = {**TASK, "max_length": length}
        return make_workdir(tmp_path / name, settings, kind="finetuning", task=task, result={"metrics": {}})

    text = report.compare([run("a", 16), run("b", 32)], tmp_path / "page.html").read_text(encoding="utf-8")
    for key, one, two in (("task.max_length", 16, 32), ("config.task.max_length", 15, 31)):
        assert f'<td>{key}</td><td class="words">{one}</td><td class="words">{two}</td>' in text


def test_fine_tunings_are_compared_by_the_mean_and_deviation_of_their_seeds(tmp_path):
    thresholds = ("threshold", "threshold/good", "best_f1_thresh")
    decided = {name: {"mean": 0.625, "std": None, "values": [0.625]} for name in thresholds}

    def run(name: str, metric: dict) -> Path:
        result = {"metrics": {"accuracy": metric, **decided}}
        return make_workdir(tmp_path / name, training(1e-3), kind="finetuning", task=TASK, result=result)

    one = run("one", {"mean": 0.9, "std": None, "values": [0.9]})
    five = run("five", {"mean": 0.875, "std": 0.0125, "values": [0.8625, 0.8875]})
    shown = words(one, five, output=tmp_path / "compared.html")
    assert "Fine-tuning on sst2" in shown and "0.9000" in shown and "0.8750 ± 0.0125" in shown
    assert "0.6250" not in shown  # a threshold is no score


def test_names_are_the_shortest_that_differ():
    assert short_names(["runs/a", "runs/b"]) == ["a", "b"]
    assert short_names(["x/a/seed-0", "x/b/seed-0", "gs://bucket/c"]) == ["a/seed-0", "b/seed-0", "bucket/c"]


def test_what_cannot_be_compared_is_refused_in_one_line(tmp_path):
    run = make_workdir(tmp_path / "a", training(1e-3))
    tuned = make_workdir(tmp_path / "t", training(1e-3), kind="finetuning", task=TASK)
    page = str(tmp_path / "page.html")
    for arguments, message in (
        ([run, tuned, "--output", page], r"a is pretraining and .*t is fine-tuning on sst2; compare runs of one kind"),
        ([run, run, "--output", page], "is named twice; name different runs"),
        ([run, tmp_path / "none", "--output", page], "no workdir at"),
        ([run] * 9 + ["--output", page], "9 runs; a comparison has 2 to 8"),
        ([run, tuned], "several runs are compared on a page of their own; name it: --output compared.html"),
        ([run, "--output", page], "--output is for a comparison of several runs"),
        ([run, tuned, "--output", str(tmp_path / "no" / "page.html")], "Create it, or choose another file"),
    ):
        with pytest.raises(UserError, match=message) as refused:
            commands_report.main([str(argument) for argument in arguments])
        assert "\n" not in str(refused.value)
    assert not (tmp_path / "page.html").exists()
