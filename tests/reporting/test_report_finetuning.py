"""The reports of fine-tuned runs: metrics equal other libraries' or a count by hand, and missing files are reported."""

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_checkpoints import WORDS
from report_pages import finetuned_workdir
from seqeval.metrics import classification_report

from bert_jax.commands.report import main as report_main
from bert_jax.reporting import mistakes
from bert_jax.reporting import runs as curves
from bert_jax.reporting.finetuning import error_sections, predict_dev, question_word
from bert_jax.reporting.mistakes import compare_spans, confusion_table, truncate
from bert_jax.reporting.report import report
from bert_jax.tasks.rows import Span
from bert_jax.tasks.tag_schemes import entities
from bert_jax.train import workdir as workdir_lib


def test_the_most_frequent_confusions_are_listed_first() -> None:
    counts = np.random.default_rng(0).integers(0, 30, (5, 5))
    names = list("abcde")
    listed = mistakes.most_confused(counts, names, 3)
    assert [count for *_, count, _ in listed] == sorted((counts * (1 - np.eye(5, dtype=int))).ravel())[:-4:-1]
    assert listed[0][2] == counts[names.index(listed[0][0]), names.index(listed[0][1])]


def test_the_calibration_error_is_that_of_its_definition() -> None:
    draw = np.random.default_rng(1)
    confidence, right = draw.uniform(0.3, 1, 400), draw.random(400) < 0.6
    found = mistakes.calibrate(confidence, right)
    error = 0.0
    for bin in range(mistakes.BINS):
        inside = (confidence > bin / mistakes.BINS) & (confidence <= (bin + 1) / mistakes.BINS)
        assert found.counts[bin] == inside.sum()
        if inside.any():
            error += inside.sum() / 400 * abs(right[inside].mean() - confidence[inside].mean())
    assert found.error == pytest.approx(error)
    sure = mistakes.calibrate(np.ones(8), np.array([True] * 6 + [False] * 2))
    assert sure.error == pytest.approx(0.25) and sure.counts[-1] == 8
    assert "nan" not in mistakes.reliability(sure) and "25.0%" in mistakes.reliability(sure)


TAGS = st.lists(st.sampled_from(["O", "B-X", "I-X", "B-Y", "I-Y"]), min_size=1, max_size=12)


@given(st.lists(st.tuples(TAGS, TAGS), min_size=1, max_size=5))
def test_correct_and_true_entities_are_counted_as_by_seqeval(pairs: list[tuple[list[str], list[str]]]) -> None:
    sentences = [(true[: len(guess)], guess[: len(true)]) for true, guess in pairs]
    judged = [one for true, guess in sentences for one in compare_spans(entities(true), entities(guess))]
    true = Counter(span.label for outcome, span in judged if outcome != mistakes.SPURIOUS)
    correct = Counter(span.label for outcome, span in judged if outcome == mistakes.CORRECT)
    if not true:
        return
    wanted = classification_report(*zip(*sentences, strict=True), output_dict=True, zero_division=0)
    for name, count in true.items():
        assert count == wanted[name]["support"]
        assert correct[name] / count == pytest.approx(wanted[name]["recall"])
    guessed = [span for _, guess in sentences for span in entities(guess)]
    assert len(judged) - true.total() <= len(guessed)


def test_each_kind_of_span_error() -> None:
    truth = [Span("P", 0, 2), Span("P", 4, 6), Span("L", 8, 9), Span("L", 11, 13), Span("O", 20, 21)]
    guess = [Span("P", 0, 2), Span("P", 5, 6), Span("P", 8, 9), Span("P", 12, 14), Span("L", 30, 31)]
    outcomes = [outcome for outcome, _ in compare_spans(truth, guess)]
    assert outcomes == ["correct", "wrong border", "wrong type", "wrong type and border", "missed", "spurious"]


def test_runs_share_a_chart_and_many_show_their_range(tmp_path: Path) -> None:
    for run in [f"seed-{seed}" for seed in (0, 2, 10)] + ["rate-5e-05/seed-1", "rate-0.0001/seed-1"]:
        (tmp_path / run).mkdir(parents=True)
        value = 0.1 * len(run)
        lines = [{"step": step, "task_loss": value, "eval_accuracy": value if step == 2 else None} for step in (1, 2)]
        (tmp_path / run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs = curves.read_runs(tmp_path)
    assert list(runs) == ["seed 0", "seed 2", "seed 10", "rate 5e-05, seed 1", "rate 0.0001, seed 1"]
    accuracy, loss = curves.seed_charts({name: runs[name] for name in list(runs)[:3]})
    assert (accuracy.title, loss.title) == ("Accuracy, held out", "Training loss")
    assert [series.name for series in accuracy.series] == ["seed 0", "seed 2", "seed 10"]
    assert accuracy.series[2].values.tolist() == pytest.approx([0.7])
    apart = {f"seed {n}": [{"step": 10 + n, "eval_accuracy": 0.5, "eval_threshold/a": 0.25}] for n in range(5)}
    [drawn] = curves.seed_charts(apart)  # the runs have no step in common, and a threshold is no score
    assert len(drawn.series) == 4
    spanned = curves.seed_charts(runs)[1].series
    assert [series.name for series in spanned] == ["mean of 5 runs", "highest", "lowest"]
    assert [series.values[0] for series in spanned] == pytest.approx([1.08, 1.8, 0.6])


def test_an_error_is_no_percentage() -> None:
    lines = [{"step": step, "task_loss": 1.0, "eval_mse": 2500.0, "eval_pearson": 0.5} for step in (1, 2)]
    both = [*curves.charts(lines, {}), *curves.seed_charts({"seed 0": lines, "seed 1": lines})]
    shown = {chart.title: chart.show(chart.series[0].values[-1]) for chart in both}
    assert shown["Mse"] == shown["Mse, held out"] == "2,500"
    assert shown["Pearson"] == shown["Pearson, held out"] == "50.0%"
    assert {chart.unit for chart in both if "loss" in chart.title.lower()} == {"nats"}


def test_what_is_shown_is_escaped_and_cut() -> None:
    page = confusion_table(np.array([[3, 1], [0, 0]]), ["<a>", "b"])
    assert "<a>" not in page and "&lt;a&gt; predicted as b: 1, 25.0% of 4" in page
    assert truncate("x" * 700).endswith("x…") and len(truncate("x" * 700)) == 600
    points = mistakes.scatter(np.array([1.0, 1.0]), np.array([1.0, 1.0]), ["<b>", "c"])
    assert "<b>" not in points and "nan" not in points


OTHERS = ("regression", "token_regression", "question", "choice", "span_pairs")


def rows_of(kind: str) -> tuple[list[str], str, dict[str, str]]:
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(WORDS[:8], 5)) for _ in range(20)]
    if kind in ("tagging", "token_regression"):
        tags = ["O", "B-X", "I-X", "B-Y"]
        words = [word for text in texts for word in [*text.split(), ""]]
        labels = [draw.choice(tags) if kind == "tagging" else f"{draw.normal():.2f}" for _ in words]
        lines = [f"{word}\t{label}" if word else "" for word, label in zip(words, labels, strict=True)]
        return lines, "dev.conll", {}
    if kind in ("classification", "regression"):
        labels = [f"{draw.normal():.3f}" if kind == "regression" else draw.choice(["<good>", "bad"]) for _ in texts]
        lines = ["review\tstars", *(f"{text}\t{label}" for text, label in zip(texts, labels, strict=True))]
        return lines, "dev.tsv", {"text": "review", "label": "stars"}

    def item(number: int, text: str) -> dict[str, Any]:
        if kind == "question":
            answer = text.split()[1]
            answers = {"text": [answer], "answer_start": [text.index(answer)]}
            question = f"{draw.choice(['what', 'who'])} {text}?"
            return {"id": str(number), "question": question, "context": text, "answers": answers}
        if kind == "choice":
            return {"text": text, "choices": [text[:5], "a <b>"], "label": int(draw.integers(2))}
        spans = [{"start": 0, "end": 3, "label": "<X>"}, {"start": 1, "end": 2, "label": "Y"}]
        return {"tokens": text.split(), "spans": spans, "relations": [{"label": "r", "head": 0, "tail": 1}]}

    columns = {"text": "text", "label": "label"} if kind == "choice" else {}
    return [json.dumps(item(number, text)) for number, text in enumerate(texts)], "dev.jsonl", columns


def by_hand(loss_of: str, found: Any) -> list[float]:
    """The loss of each item from its prediction."""
    if loss_of == "regression":
        return [(told["score"] - label) ** 2 for told, label in zip(found.predictions, found.rows.labels, strict=True)]
    names = found.task.labels
    truth = [names[label] for label in found.rows.labels]
    return [-math.log(told["scores"][label]) for told, label in zip(found.predictions, truth, strict=True)]


@pytest.mark.parametrize(
    "kind",
    ["classification", "tagging", *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)],
)
def test_the_page_of_each_kind(kind: str, tmp_path: Path) -> None:
    lines, name, columns = rows_of(kind)
    run = finetuned_workdir(tmp_path, kind, lines, name, **columns)
    config = workdir_lib.read_config(run)
    found = predict_dev(run, config, most=12)
    assert (found.total, len(found.items), len(found.losses)) == (20, 12, 12)
    if kind in ("classification", "regression"):
        assert found.losses == pytest.approx(by_hand(kind, found), rel=1e-4)
    worst = found.worst(3)
    assert sorted(found.losses)[:-4:-1] == [found.losses[item] for item in worst]

    written = report(run).read_text(encoding="utf-8")
    wanted = {
        "classification": ["Confusion matrix", "expected calibration error", "&lt;good&gt;"],
        "regression": ["Labels and predictions", "mean absolute error"],
        "token_regression": ["Labels and predictions", "mean absolute error"],
        "question": ["Scores by question word", "exact match"],
        "span_pairs": ["Entities", "Relations", "&lt;X&gt;"],
        "choice": ["Calibration", "a &lt;b&gt;"],
        "tagging": ["Entities", "Confusion of tags", "spurious", "words wrong"],
    }[kind]
    for said in [*wanted, "Examples with the highest loss", "all 20 examples of"]:
        assert said in written, said
    assert ("squared error" in written) == ("nats" not in written) == kind.endswith("regression")
    shown = re.sub(r"<style>.*?</style>|<script>.*?</script>", "", written, flags=re.S)
    assert "<good>" not in written and not re.search(r"\bnan\b", shown)

    if kind == "classification":
        report_main([str(run), "--examples", "7"])
        assert "7 evenly spaced examples of the 20 of" in Path(run / "report.html").read_text(encoding="utf-8")

    (tmp_path / name).unlink()
    (section,) = error_sections(run, config, 100)
    assert "Not shown" in section.note and name in section.note
    assert "Not shown" in report(run).read_text(encoding="utf-8")


def test_a_figure_names_the_split_that_it_was_measured_on(tmp_path: Path) -> None:
    lines, name, columns = rows_of("classification")
    run = finetuned_workdir(tmp_path, "classification", lines, name, **columns)
    measured = {"accuracy": 0.5, "dev_mismatched_accuracy": 0.25, "ax_matthews_correlation": 0.125, "test_f1": 0.75}
    thresholds = {"threshold/good": 0.0625, "threshold": 0.03125}
    metrics = {key: {"mean": value, "std": None, "values": [value]} for key, value in (measured | thresholds).items()}
    counts = {split: {"examples": 1} for split in ("train", "dev", "dev_mismatched", "ax", "test")}
    result = {"task": "mnli", "seeds": [0], "metrics": metrics, "counts": counts}
    (run / "result.json").write_text(json.dumps(result))
    written = report(run).read_text(encoding="utf-8")
    for title in ("Accuracy, dev", "Accuracy, dev mismatched", "Matthews correlation, ax", "F1, test"):
        assert f">{title}<" in written, title
    assert "Threshold" not in written


def test_question_words() -> None:
    asked = {"In what year?": "what", "How many are there?": "how many", "Somewhat who's": "who", "Name it.": "other"}
    assert {question: question_word(question) for question in asked} == asked
