"""The HTML report: self-contained, escaped, consistent with the log, for finished and for unfinished runs."""

import dataclasses
import html.parser
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tokenizer_kinds import byte_pairs

from bert_jax.commands import report as commands_report
from bert_jax.config import ModelConfig
from bert_jax.data.example import Batch
from bert_jax.data.loader import PretrainingLoader
from bert_jax.data.shards import open_dataset
from bert_jax.errors import UserError
from bert_jax.lineage import WITHOUT_ATTENTION
from bert_jax.model import bert, layers
from bert_jax.model.heads.config import Heads
from bert_jax.reporting import document, report, runs
from bert_jax.reporting import page as pages
from bert_jax.reporting.document import Document, Section, Settings, Tile
from bert_jax.reporting.pretraining import (
    MaskedToken,
    Prediction,
    choose_masked_positions,
    join_tokens,
    masked_token_table,
    predict_masked_tokens,
    unigram_baseline,
)
from bert_jax.tokenization import tokenizer
from bert_jax.train.workdir import WorkdirConfig, read_config, write_config, write_params

EVIL = "</script><script>alert(1)</script><b title='x\" onload=y'>&"


class Page(html.parser.HTMLParser):
    """The tags of a page, and its words outside of style and script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self._open[-1:]):
            self.words += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def metric_line(step: int) -> dict[str, float | int | None]:
    return {
        "step": step,
        "time": 1000.0 + step,
        "loss": 9.0 - step / 100,
        "mlm_loss": 8.0 - step / 100,
        "mlm_accuracy": step / 1000,
        "nsp_accuracy": 0.5,
        "learning_rate": 1e-3,
        "tokens_per_second": 1234.5,
        "data_wait_share": 0.01,
        "padding_share": 0.02,
        "mfu": None,
    } | ({"eval_mlm_accuracy": step / 1100, "eval_mlm_loss": 8.1 - step / 100} if step % 100 == 0 else {})


def make_workdir(
    workdir: Path, training: dict, *, kind: str = "pretraining", task: dict | None = None, result: dict | None = None
) -> Path:
    """A workdir that logged 20 lines, without checkpoints."""
    model = ModelConfig(vocab_size=1000, layers=2, width=32, heads=4, feed_forward=48, max_positions=64)
    write_config(workdir, WorkdirConfig(model, Heads(mlm=True), kind, training, task))
    lines = [json.dumps(metric_line(step)) for step in range(10, 210, 10)]
    (workdir / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if result is not None:
        (workdir / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return workdir


@pytest.fixture
def pretrained(tmp_path: Path, shards_dir: Path, tiny_config: ModelConfig) -> Path:
    """A finished pretraining workdir: untrained parameters, a log, a result."""
    tokenizer = open_dataset(shards_dir, "eval").vocabulary()
    model = dataclasses.replace(tiny_config, vocab_size=tokenizer.vocab_size)
    heads = Heads(mlm=True, next_sentence=True, pooler=True)
    workdir = tmp_path / "run"
    make_workdir(
        workdir,
        {"data": {"train": str(shards_dir), "eval": ""}, "eval": {"max_rows": 0}, "seed": 0},
        result={"step": 200, "seconds": 12.5, "tokens": 4321000, "eval_mlm_loss": 6.0, "eval_mlm_accuracy": 0.1818},
    )
    params = bert.init_params(model, heads, jax.random.key(0))
    write_params(workdir, 200, {name: np.asarray(leaf) for name, leaf in layers.flatten(params).items()})
    write_config(workdir, dataclasses.replace(read_config(workdir), model=model, heads=heads))
    tokenizer.save(workdir / "tokenizer")
    return workdir


def test_page_shows_results_curves_predictions_and_configuration_and_needs_no_other_file(pretrained: Path) -> None:
    path = report.report(pretrained)
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert path == pretrained / "report.html"
    for words in (
        "18.2%",
        "4.321M",
        "Masked tokens: accuracy",
        "Throughput",
        "Predictions for masked tokens",
        "max_positions",
    ):
        assert words in page.words
    assert "Not finished" not in page.words
    assert page.count("svg") >= 6
    assert sum(attributes.get("class") == "bars" for _, attributes in page.tags) >= 4
    loads = {"link", "img", "iframe", "object", "embed", "base", "use"}
    assert not loads & {tag for tag, _ in page.tags}
    assert not any({"src", "href"} & set(attributes) for _, attributes in page.tags)
    assert "@import" not in text and "url(" not in text


def test_report_of_a_run_names_a_missing_result_and_missing_shards(tmp_path: Path) -> None:
    training = {"data": {"train": str(tmp_path / "gone"), "eval": ""}, "eval": {"max_rows": 0}}
    page = Page(report.report(make_workdir(tmp_path / "run", training)).read_text(encoding="utf-8"))
    assert "Not finished" in page.words and "up to step 200" in page.words
    assert "No table" in page.words and str(tmp_path / "gone") in page.words
    assert "18.2%" in page.words  # the last held-out accuracy of the log, 200 / 1100


def test_report_of_a_mixture_has_a_table_of_its_sources_and_no_baselines_of_one_of_them(pretrained: Path) -> None:
    config = read_config(pretrained)
    shards = config.training["data"]["train"]
    training = config.training | {"data": {"train": "", "eval": "", "mixture": f"wiki={shards}:0.7,books=/gone:0.3"}}
    write_config(pretrained, dataclasses.replace(config, training=training))
    early = {"epochs/wiki": 1.5, "epochs/books": 0.25, "eval_wiki/mlm_accuracy": 0.5, "eval_books/mlm_accuracy": 0.125}
    lines = [metric_line(100) | early, metric_line(110) | {"epochs/wiki": 1.75, "epochs/books": 0.5}]
    (pretrained / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    page = Page(report.report(pretrained).read_text(encoding="utf-8"))
    words = " ".join(page.words.split())
    assert "Sources of the mixture" in words and "wiki1.7550.0%" in words and "books0.512.5%" in words
    assert "held-out rows of wiki" in words and "unigram baseline" not in words
    assert not any("wiki" in one.title.lower() for one in runs.charts(lines, {}))


def test_examples_of_a_pretraining_run_are_refused(pretrained: Path) -> None:
    with pytest.raises(UserError, match=r"--examples is for the report of a fine-tuned run"):
        commands_report.main([str(pretrained), "--examples", "5"])


@pytest.mark.parametrize("data", [{"train": "{}/train"}, {"train": "{}", "phases": "100:/gone"}, {"eval": "{}"}])
def test_the_held_out_rows_of_a_report_are_those_of_the_run(pretrained: Path, data: dict[str, str]) -> None:
    config = read_config(pretrained)
    shards = config.training["data"]["train"]
    chosen = {"train": shards, "eval": "", "phases": ""} | {key: value.format(shards) for key, value in data.items()}
    before = " ".join(Page(report.report(pretrained).read_text(encoding="utf-8")).words.split())
    write_config(pretrained, dataclasses.replace(config, training=config.training | {"data": chosen}))
    after = " ".join(Page(report.report(pretrained).read_text(encoding="utf-8")).words.split())
    table = before.partition("Predictions for masked tokens")[2].partition("Configuration")[0]
    assert "held-out rows" in table and table in after
    assert ("unigram baseline" in after) == ("phases" not in data) and "unigram baseline" in before
    assert "10.0% are random ones and 10.0% are kept" in table


def test_the_unigram_baseline_knows_the_training_rows_of_the_run_and_none_of_data_eval(
    pretrained: Path, shards_dir: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(shards_dir, other)
    np.save(other / "unigram_counts.npy", np.load(other / "unigram_counts.npy")[::-1])
    config = read_config(pretrained)

    def words(**data: str) -> str:
        write_config(pretrained, dataclasses.replace(config, training=config.training | {"data": data}))
        return " ".join(Page(report.report(pretrained).read_text(encoding="utf-8")).words.split())

    own = re.findall(r"unigram baseline: [\d.]+", words(train=str(shards_dir)))
    assert own and own == re.findall(r"unigram baseline: [\d.]+", words(train=str(shards_dir), eval=str(other)))
    gone = words(train=str(tmp_path / "gone"), eval=str(other))
    assert "There is no unigram baseline: no " in gone and "The first prediction is correct" in gone
    assert "unigram baseline" not in words(mixture=f"wiki={shards_dir}:1", eval=str(other))


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, "transformer"),
        ({"causal": True}, "causal transformer"),
        ({"encoder": "feed_forward", "layers": 1, "window": 4, **WITHOUT_ATTENTION}, "causal feed-forward"),
    ],
)
def test_the_first_line_names_the_kind_of_the_encoder(tmp_path: Path, changes: dict[str, Any], shown: str) -> None:
    run = make_workdir(tmp_path / "run", {})
    config = read_config(run)
    write_config(run, dataclasses.replace(config, model=dataclasses.replace(config.model, **changes)))
    words = " ".join(Page(report.report(run).read_text(encoding="utf-8")).words.split())
    assert f"Pretraining: {shown}, {changes.get('layers', 2)} layers x 32, vocabulary 1,000" in words


def test_finetuning_report_shows_each_seed_and_the_files(tmp_path: Path) -> None:
    metrics = {"accuracy": {"mean": 0.875, "std": 0.0125, "values": [0.8661, 0.8839]}}
    result = {"task": "own", "seeds": [3, 4], "metrics": metrics, "counts": {"train": {"examples": 4321}}}
    workdir = make_workdir(
        tmp_path / "run", {"seed": 3}, kind="finetuning", task={"name": "own", "labels": ["bad", "good"]}, result=result
    )
    page = Page(report.report(workdir).read_text(encoding="utf-8"))
    for words in ("Fine-tuning on files of your own", "87.5%", "0.8661", "0.8839", "seed 4", "4,321", "bad, good"):
        assert words in page.words
    assert "Predictions for masked tokens" not in page.words


def test_nothing_from_data_becomes_markup(tmp_path: Path) -> None:
    task = {"name": EVIL, "labels": [EVIL]}
    metrics = {EVIL: {"mean": 0.5, "std": None, "values": [0.5]}}
    result = {"task": EVIL, "seeds": [0], "metrics": metrics, "counts": {EVIL: {EVIL: 1}}}
    workdir = make_workdir(tmp_path / "run", {EVIL: EVIL}, kind="finetuning", task=task, result=result)
    with (workdir / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 300, "time": 2000.0, f"{EVIL}_loss": 1.0, f"eval_{EVIL}": 0.5}) + "\n")
    page = Page(report.report(workdir).read_text(encoding="utf-8"))
    blocks = [masked_token_table([MaskedToken(EVIL, EVIL, EVIL, 0.1, (Prediction(EVIL, 0.9),))])]
    blocks.append(Settings({EVIL: {EVIL: EVIL}}))
    document = Document(EVIL, [Section(EVIL, blocks, EVIL)], [EVIL], EVIL, [Tile(EVIL, EVIL, EVIL)], EVIL, EVIL)
    parts = Page(pages.render(document))
    for found in (page, parts):
        assert not any("alert" in str(attributes) and "aria-label" not in attributes for _, attributes in found.tags)
        assert not any("onload" in attributes for _, attributes in found.tags)
    charts = sum(attributes.get("class") == "chart" for _, attributes in page.tags)
    assert page.count("script") == charts + 1  # the numbers of each chart, and the page's own
    assert parts.count("script") == 1 and parts.count("b") == 1  # the page's own script, and the b of the tile


def test_invalid_workdirs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no workdir at"):
        report.report(tmp_path / "none")
    with pytest.raises(UserError, match="is not a workdir"):
        report.report(tmp_path)
    workdir = make_workdir(tmp_path / "run", {})
    (workdir / "metrics.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="no lines yet"):
        report.report(workdir)


def test_predictions_are_probabilities_of_the_vocabulary_and_the_masks_those_of_evaluation(
    pretrained: Path, shards_dir: Path
) -> None:
    masked_tokens = predict_masked_tokens(pretrained, shards_dir, 6)
    assert masked_tokens == predict_masked_tokens(pretrained, shards_dir, 6)
    assert len(masked_tokens) == 6
    for one in masked_tokens:
        probabilities = [prediction.probability for prediction in one.predictions]
        assert len(probabilities) == 5 and probabilities == sorted(probabilities, reverse=True)
        assert 0 < sum(probabilities) < 1
        assert one.label and "[PAD]" not in one.before + one.after


def test_a_word_is_shown_rather_than_the_inside_of_one(tmp_path: Path) -> None:
    words = tokenizer.load(byte_pairs(tmp_path, ["Ġ a", "Ġ b"]))
    tokens = ["Ġa", "b", "c"]
    batch = Batch(*[np.zeros((1, 3), np.int32)] * len(Batch._fields))._replace(
        input_ids=np.full((1, 3), words.mask_id),
        masked_positions=np.arange(3)[None],
        masked_ids=np.array([[words.id_of(token) for token in tokens]]),
        masked_weights=np.ones((1, 3), np.float32),
    )
    assert tokens[int(choose_masked_positions(batch, words)[0])] == "Ġa"


def test_unigram_baseline_is_a_count(shards_dir: Path) -> None:
    baseline = unigram_baseline(shards_dir)
    dataset = open_dataset(shards_dir, "eval")
    tokenizer = dataset.vocabulary()
    loader = PretrainingLoader(dataset, tokenizer, batch_size=1, seed=7)
    truths = np.concatenate([batch.masked_ids[batch.masked_weights > 0] for batch in loader.evaluation_batches(3)])
    assert baseline.predictions == len(truths)
    assert baseline.accuracy == pytest.approx((truths == tokenizer.id_of(baseline.token)).mean())
    counts = np.load(shards_dir / "unigram_counts.npy").astype(float) + 1
    counts[list(tokenizer.special_ids)] = 0
    assert baseline.loss == pytest.approx(-np.log(counts[truths] / counts.sum()).mean())


def test_curves_keep_the_mean_and_the_last_step_when_thinned() -> None:
    values = np.random.default_rng(0).normal(size=100_000)
    lines = [{"step": step, "loss": float(value)} for step, value in enumerate(values, start=1)]
    (drawn,) = runs.charts(lines, {})
    (series,) = drawn.series
    assert len(series.steps) == runs.MOST_POINTS and series.steps[-1] == 100_000
    assert series.values.mean() == pytest.approx(values.mean(), abs=1e-3)
    assert series.trend is not None and series.trend.std() < series.values.std()


def test_curves_without_noise_are_not_smoothed() -> None:
    lines = [{"step": step, "learning_rate": step / 100, "loss": 1.0} for step in range(100)]
    assert runs.curve(lines, "learning_rate", "x").trend is None
    assert runs.curve(lines, "loss", "x").trend is not None


@pytest.mark.parametrize(("last", "below"), [(0.75, True), (0.65, False)])
def test_the_words_of_a_reference_are_on_the_side_without_the_curve(last: float, below: bool) -> None:
    steps = np.arange(10.0)
    level = document.Reference("one label", 0.7)
    line = document.Series("a", steps, np.full(10, last))
    other = document.Series("b", steps[:2], np.array([0.1, 0.9]))
    both = document.Chart("x", "", (line, other), document.percent, references=(level,))
    drawn = pages.figure(both)
    [at] = re.findall(r'<line class="reference" x1="\d+" x2="\d+" y1="([\d.]+)"', drawn)
    [words] = re.findall(r'<text class="reference" x="\d+" y="([\d.]+)"', drawn)
    assert (float(words) > float(at)) == below


def test_names_of_metrics_are_written_as_usual() -> None:
    assert runs.title_of("macro_f1") == "Macro F1" and runs.title_of("f1") == "F1"


def test_the_sum_of_the_terms_is_plotted_only_for_several_terms() -> None:
    one = [{"step": 1, "loss": 2.0, "mlm_loss": 2.0, "eval_loss": 2.5, "eval_mlm_loss": 2.5}]
    two = [one[0] | {"nsp_loss": 0.7}]
    titles = [[chart.title for chart in runs.charts(lines, {})] for lines in (one, two)]
    assert titles == [["Masked tokens: loss"], ["Masked tokens: loss", "Next sentence: loss", "Loss, all terms"]]


def test_missing_values_and_one_point_draw() -> None:
    lines = [{"step": 1, "loss": None}, {"step": 2, "loss": 3.0, "learning_rate": 0.0}]
    figures = [pages.figure(chart) for chart in runs.charts(lines, {})]
    assert len(figures) == 2
    assert all("nan" not in figure and "inf" not in figure.replace("info", "") for figure in figures)


@pytest.mark.parametrize("highest", [0.643, 0.684, 0.69, 0.71, 1.3, 7.0])
def test_everything_is_plotted_inside_the_axes(highest: float) -> None:
    lines = [{"step": step, "nsp_loss": 0.638 + (highest - 0.638) * step / 7} for step in range(1, 8)]
    (drawn,) = runs.charts(lines, {"nsp_loss": document.Reference("level", 0.66)})
    tags = Page(pages.figure(drawn)).tags
    heights = [float(attributes[name]) for _, attributes in tags for name in ("y1", "y2", "cy") if attributes.get(name)]
    assert len(heights) > 12
    assert min(heights) >= pages.TOP and sorted(set(heights))[-2] <= pages.BASE
    assert max(heights) == pages.BASE + 4  # tick marks


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (5.5, 8.2), (0.0, 3e-4), (-3.0, 17.0), (0.0, 1e6)])
def test_ticks_are_round_few_and_cover_the_range(low: float, high: float) -> None:
    marks = pages.ticks(low, high)
    assert marks[0] <= low + 1e-12 and marks[-1] >= high - 1e-12 * max(1, high)
    assert 3 <= len(marks) <= 9
    np.testing.assert_allclose(np.diff(marks), marks[1] - marks[0])


def test_formats_of_numbers() -> None:
    assert [document.number(value) for value in (0.0, 1234.0, 2_502_000.0, 0.0005, 2.5e-5, 5.6854)] == [
        *("0", "1,234", "2.502M", "0.0005", "2.5e-5", "5.685")
    ]
    assert [document.percent(value) for value in (0.153, 0.0707, 1.0, 0.0)] == ["15.3%", "7.07%", "100.0%", "0.0%"]


def test_pieces_are_joined_to_words() -> None:
    assert join_tokens(["don", "'", "t", "go", ",", "un", "##kind", "[MASK]", "!"]) == "don't go, unkind [MASK]!"
    assert join_tokens(["couldn", "'", "[SEP]", "(", "he", ")"]) == "couldn' [SEP] (he)"
