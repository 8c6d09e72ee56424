"""benchmarks.lineage: what its table shows, that the systems have matched sizes, and that a killed command resumes."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks import common, lineage, lineage_page, lineage_parts, lineage_systems
from benchmarks.lineage_systems import SYSTEMS, Settings
from bert_jax import vocabulary
from bert_jax.command import UserError
from bert_jax.data.shards import open_dataset
from bert_jax.planning.compile import RowSpec
from bert_jax.shapes import padded_vocabulary
from bert_jax.train.metrics import training_flops

ROOT = Path(__file__).parent.parent
FLOPS_OF = ("lstm", "roberta", "spanbert", "diffusion")


def score(*values: float) -> dict[str, object]:
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {"mean": float(np.mean(values)), "std": deviation, "values": list(values)}


def pretrained(**losses: list[float]) -> dict[str, object]:
    return {
        "parameters": {"all": 1_234_567, "token_table": 1_000_000},
        "tokens": 2_500_000,
        "flops": 1.25e13,
        "model": {"layers": 2},
        "curve": {"minutes": [0.1, 0.2, 0.3], **losses},
        "machine": {"cores": 2, "processor": "<chip>"},
        "commit": "0123456789abcdef+changes",
    }


DATA = {
    "settings": {"budget_minutes": 0.3, "seeds": 2, "vocab_size": 1000, "length": 32},
    "shards": {"single": {"counts": {"tokens": 3_000_000}, "rows": {"train": 20_000, "eval": 100}}},
    "systems": {  # in another order than the table's
        "diffusion": {
            "pretraining": pretrained(mdm_loss=[7.0, 6.5, 6.0]),
            "held_out": {"metrics": {"mdm_perplexity": 400.0}},
        },
        "bilm": {
            "pretraining": pretrained(forward_lm_loss=[6.0, 5.0, 4.5], backward_lm_loss=[6.1, 5.1, 4.6]),
            "held_out": {"metrics": {"forward_lm_perplexity": 90.04, "backward_lm_perplexity": 88.0}},
        },
        "bert": {
            "pretraining": pretrained(mlm_loss=[6.5, 6.0, 5.5]),
            "held_out": {"metrics": {"mlm_loss": 5.5}, "pseudo": {"pseudo_perplexity": 250.25}},
            "rte": {"metrics": {"accuracy": score(0.5, 0.6)}},
            "cola": {"metrics": {"matthews_correlation": {"mean": None, "std": None, "values": [None]}}},
            "conll2003": {"layers": {"last": {"dev": {"f1": score(0.625)}, "test": {"f1": score(0.1)}}}},
        },
        "gpt": {"held_out": {"metrics": {"perplexity": 1234.5}}},
    },
}


def test_the_table_has_a_row_for_each_system_and_a_dash_where_nothing_is_measured() -> None:
    table = lineage_page.rows(DATA)
    assert all(len(row) == len(lineage_page.HEADER) for row in table)
    found = {row[0]: dict(zip(lineage_page.HEADER, row, strict=True)) for row in table}
    assert list(found) == ["biLM (ELMo)", "GPT-2-style", "BERT", "Masked diffusion"]
    bert = found["BERT"]
    assert [bert[name] for name in lineage_page.HEADER[1:4]] == ["1.23", "2.50", "0.0125"]
    assert (bert["perplexity"], bert["pseudo-perplexity"]) == ("-", "250.2")
    assert (bert["RTE"], bert["CoNLL F1"], bert["CoLA"], bert["SST-2"]) == ("55.0 ± 7.1", "62.5", "-", "-")
    assert found["biLM (ELMo)"]["perplexity"] == "90.0 / 88.0"
    assert found["Masked diffusion"]["perplexity"] == "≤ 400.0"
    assert (found["GPT-2-style"]["perplexity"], found["GPT-2-style"]["tokens, M"]) == ("1,234.5", "-")


def test_the_page_has_the_table_and_a_curve_for_each_loss() -> None:
    charts = {chart.title: chart for chart in lineage_page.charts(DATA)}
    assert [series.name for series in charts[lineage_systems.BOTH].series] == ["forward", "backward"]
    np.testing.assert_array_equal(charts[lineage_systems.MASKED].series[0].values, [6.5, 6.0, 5.5])
    page = lineage_page.page(DATA, "DIR")
    assert page.count("<polyline") == 4
    assert "model of BERT (Devlin et al. 2019)" in page
    assert "<td>Masked diffusion</td>" in page and "55.0 ± 7.1" in page and "&lt;chip&gt;" in page


def test_a_chart_has_no_more_systems_than_the_page_has_colours() -> None:
    charts = [system.chart for system in SYSTEMS for _ in system.losses]
    assert max(map(charts.count, charts)) <= 4


def test_the_table_replaces_what_is_between_the_markers(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(f"before\n{lineage_page.BEGIN}old\n{lineage_page.END}after\n")
    lineage.main([f"--data={_written(tmp_path)}", f"--page={document}"])
    text = document.read_text()
    assert text.startswith("before\n<!--") and text.endswith("-->\nafter\n") and "old" not in text
    assert "| BERT | 1.23 |" in text and "Commit: 0123456789ab+changes." in text
    document.write_text("no markers")
    with pytest.raises(UserError, match=r"page.md lacks the lines <!-- lineage"):
        lineage_page.write_table(DATA, document)


def _written(folder: Path) -> Path:
    (folder / "data.json").write_text(json.dumps(DATA))
    return folder / "data.json"


@pytest.mark.slow
def test_every_system_has_as_many_parameters_as_bert(vocab_dir: Path, tmp_path: Path) -> None:
    """Within 5%, with a vocabulary of the default size."""
    words = (vocab_dir / "vocab.txt").read_text().splitlines()
    words += [f"##more{number}" for number in range(Settings().vocab_size - len(words))]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    vocab = vocabulary.load(tmp_path)
    counts = {system.name: lineage_systems.sized(system, Settings(), vocab).parameters["all"] for system in SYSTEMS}
    assert vocab.vocab_size == 8192
    assert all(abs(count / counts["bert"] - 1) < 0.05 for count in counts.values()), counts


@pytest.mark.slow
def test_flops_count_every_head_and_only_the_positions_that_are_computed(vocab_dir: Path) -> None:
    vocab, settings = vocabulary.load(vocab_dir), Settings()
    rows = RowSpec(settings.length, 1, 20, vocab.vocab_size, labelled=False)
    sizes = {name: lineage_systems.sized(lineage_systems.named(name), settings, vocab) for name in FLOPS_OF}
    counted = {name: size.step_flops(rows) for name, size in sizes.items()}
    batch, length, width = settings.batch_size, settings.length, settings.width
    for name in ("lstm", "diffusion"):  # all positions in all layers, as the formula counts
        formula = training_flops(sizes[name].model, batch, length, length)
        assert counted[name] == pytest.approx(formula, rel=0.05), name
    formula = training_flops(sizes["roberta"].model, batch, length, 20)
    # At the other positions, the last layer has no attention, outputs and feed-forward. The program looks positions up
    # by matmuls, which the formula does not count.
    unused = 3 * batch * (length - 20) * (20 * width**2 + 4 * length * width)
    assert counted["roberta"] == pytest.approx(formula - unused, rel=0.08)
    joined = 2 * width + 200  # both sides of the span, and the offset in it
    boundaries = 3 * batch * 20 * 2 * width * (joined + width + padded_vocabulary(vocab.vocab_size))
    assert counted["spanbert"] > counted["roberta"] + boundaries


def test_the_share_of_the_start_is_what_precedes_the_first_step() -> None:
    """Steps of a hundredth of the budget each, the first of which begins after a fifth of it."""
    lines = [{"step": step, "budget_fraction": 0.2 + step / 100} for step in (1, 40, 80)]
    assert lineage_parts.start_share(lines) == pytest.approx(0.2, abs=1e-3)
    assert lineage_parts.start_share(lines[:1]) is None


@pytest.mark.parametrize("count", [1, 3, 10_000])
def test_evenly_spaced_rows_are_those_of_the_whole_set(shards_dir: Path, count: int) -> None:
    dataset = open_dataset(shards_dir, "eval")
    rows = lineage_parts.EvenlySpaced(dataset, count)
    chosen = [index * dataset.rows // min(count, dataset.rows) for index in range(min(count, dataset.rows))]
    assert rows.rows == len(chosen) and rows.tokenizer_hash == dataset.tokenizer_hash
    wanted = dataset.gather(np.array(chosen))
    for name, field in rows.gather(np.arange(rows.rows))._asdict().items():
        np.testing.assert_array_equal(field, getattr(wanted, name))


def test_an_unknown_name_and_a_folder_of_other_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--only: unknown 'bart'; choose from feed_forward, rnn"):
        lineage.main([f"--output={tmp_path}", "--only=bert,bart"])
    common.keep_settings(tmp_path, dataclasses.asdict(Settings(seeds=2)))
    common.keep_settings(tmp_path, dataclasses.asdict(Settings(seeds=2)))
    assert lineage_parts.read_settings(tmp_path) == Settings(seeds=2)
    with pytest.raises(UserError, match=r"results of --seeds 2 \(now 3\); use the same, or another --output"):
        common.keep_settings(tmp_path, dataclasses.asdict(Settings(seeds=3)))


def test_shards_that_hold_out_other_documents_are_refused(tmp_path: Path) -> None:
    def hold_out(name: str, documents: int) -> None:
        part = {"documents": documents, "sentences": 10 * documents, "source_tokens": 100 * documents}
        (tmp_path / "shards" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "shards" / name / "manifest.json").write_text(json.dumps({"parts": {"eval": part}}))

    hold_out("single", 3)
    hold_out("sop", 3)
    lineage.check_held_out(tmp_path)
    hold_out("nsp", 0)
    with pytest.raises(UserError, match="nsp holds out 0 documents, and single 3: all systems need the same"):
        lineage.check_held_out(tmp_path)


def test_a_run_of_steps_has_no_clock() -> None:
    config = lineage_systems.PretrainConfig()
    timed, counted = (
        lineage_systems.trained_in(config, Path("shards"), Settings(budget_minutes=5.0, steps=steps))
        for steps in (0, 1000)
    )
    assert (timed.steps, timed.budget_minutes) == (0, 5.0)
    assert (counted.steps, counted.budget_minutes, counted.log_every) == (1000, 0.0, 10)


TINY = "--eval_fraction=0.1 --vocab_size=1000 --length=32 --layers=1 --width=32 --batch_size=8"


@pytest.mark.slow
@pytest.mark.usefixtures("one_device_processes")
def test_a_killed_command_resumes_and_keeps_what_is_finished(corpus: Path, tmp_path: Path) -> None:
    """A system and one task, killed after the first part; its process ends with it."""
    pairs = [f"{index}\tIt is {index}.\tIt is {index % 5}.\t{'not_' * (index % 2)}entailment" for index in range(48)]
    (tmp_path / "data" / "RTE").mkdir(parents=True)
    for name, lines in (("train", pairs[:32]), ("dev", pairs[32:])):
        text = "\n".join(["index\tsentence1\tsentence2\tlabel", *lines])
        (tmp_path / "data" / "RTE" / f"{name}.tsv").write_text(text + "\n")
    folder = tmp_path / "out"
    line = [sys.executable, "-m", "benchmarks.lineage", f"--output={folder}", f"--text={corpus}"]
    line += ["--budget_minutes=0.03", "--only=bert", "--tasks=rte", *TINY.split()]
    line += ["--seeds=2", "--epochs=1", "--pseudo_rows=2"]
    environment = os.environ | {"BERT_JAX_DATA": str(tmp_path / "data"), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(line, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        said = next((text for text in process.stderr if text.startswith("[1/")), "the command ended")
        assert re.fullmatch(r"\[1/3\] bert: pretraining in \d+:\d\d, ETA \d+:\d\d\n", said)
        children = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGKILL)
    assert not psutil.wait_procs(children, timeout=10)[1]
    finished = folder / "parts" / "bert" / "pretraining.json"
    before = finished.stat()
    again = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "[1/2]" in again.stderr and "[2/2]" in again.stderr and "bert: pretraining" not in again.stderr
    assert (finished.stat().st_ino, finished.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    data = json.loads((folder / "lineage.json").read_text())
    bert = data["systems"]["bert"]
    assert bert["pretraining"]["steps"] >= 1 and bert["pretraining"]["tokens"] > 0
    assert bert["held_out"]["pseudo"]["pseudo_perplexity"] > 1
    assert len(bert["rte"]["metrics"]["accuracy"]["values"]) == 2
    assert str(tmp_path) not in json.dumps(bert["rte"])
    assert "<td>BERT</td>" in (folder / "index.html").read_text()
    changed = subprocess.run([*line, "--epochs=2"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert changed.returncode == 2 and "results of --epochs 1.0 (now 2.0)" in changed.stderr
