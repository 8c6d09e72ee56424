"""The HTML report: self-contained, escaped, consistent with the log, for finished and for unfinished runs."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from report_pages import Page, make_workdir, metric_line
from tokenizer_kinds import byte_pairs

from bert_jax.commands import report as commands_report
from bert_jax.config import ModelConfig
from bert_jax.data.example import Batch
from bert_jax.data.loader import DatasetLoader
from bert_jax.data.shards import open_dataset
from bert_jax.errors import UserError
from bert_jax.lineage import WITHOUT_ATTENTION, FeedForward
from bert_jax.model import bert, layers
from bert_jax.model.heads.config import Heads
from bert_jax.reporting import report, runs
from bert_jax.reporting.pretraining import choose_masked_positions, join_tokens, predict_masked_tokens, unigram_baseline
from bert_jax.tokenization import tokenizer
from bert_jax.train.workdir import read_config, write_config, write_params


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


def words(run: Path, **data: Any) -> str:
    """The words of a run's report, after a change of the configuration of its data."""
    if data:
        config = read_config(run)
        write_config(run, dataclasses.replace(config, training=config.training | {"data": data}))
    return " ".join(Page(report.report(run).read_text(encoding="utf-8")).words.split())


def test_page_shows_results_curves_predictions_and_configuration_and_needs_no_other_file(pretrained: Path) -> None:
    path = report.report(pretrained)
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert path == pretrained / "report.html"
    for shown in (
        "18.2%",
        "4.321M",
        "Masked tokens: accuracy",
        "Throughput",
        "Predictions for masked",
        "max_positions",
    ):
        assert shown in page.words
    assert "Not finished" not in page.words
    assert page.count("svg") >= 6
    assert sum(attributes.get("class") == "bars" for _, attributes in page.tags) >= 4
    loads = {"link", "img", "iframe", "object", "embed", "base", "use"}
    assert not loads & {tag for tag, _ in page.tags}
    assert not any({"src", "href"} & set(attributes) for _, attributes in page.tags)
    assert "@import" not in text and "url(" not in text


def test_report_of_a_run_names_a_missing_result_and_missing_shards(tmp_path: Path) -> None:
    training = {"data": {"train": str(tmp_path / "gone"), "eval": ""}, "eval": {"max_rows": 0}}
    shown = words(make_workdir(tmp_path / "run", training))
    assert "Not finished" in shown and "up to step 200" in shown
    assert "No table" in shown and str(tmp_path / "gone") in shown
    assert "18.2%" in shown  # the last held-out accuracy of the log, 200 / 1100


def test_report_of_a_mixture_has_a_table_of_its_sources_and_no_baselines_of_one_of_them(pretrained: Path) -> None:
    shards = read_config(pretrained).training["data"]["train"]
    early = {"epochs/wiki": 1.5, "epochs/books": 0.25, "eval_wiki/mlm_accuracy": 0.5, "eval_books/mlm_accuracy": 0.125}
    lines = [metric_line(100) | early, metric_line(110) | {"epochs/wiki": 1.75, "epochs/books": 0.5}]
    (pretrained / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    shown = words(pretrained, train="", eval="", mixture={"wiki": (str(shards), 0.7), "books": ("/gone", 0.3)})
    assert "Sources of the mixture" in shown and "wiki1.7550.0%" in shown and "books0.512.5%" in shown
    assert "held-out rows of wiki" in shown and "unigram baseline" not in shown
    assert not any("wiki" in one.title.lower() for one in runs.charts(lines, {}))


def test_examples_of_a_pretraining_run_are_refused(pretrained: Path) -> None:
    with pytest.raises(UserError, match=r"--examples is for the report of a fine-tuned run"):
        commands_report.main([str(pretrained), "--examples", "5"])


@pytest.mark.parametrize("data", [{"train": "{}/train"}, {"train": "{}", "phases": "100:/gone"}, {"eval": "{}"}])
def test_the_held_out_rows_of_a_report_are_those_of_the_run(pretrained: Path, data: dict[str, str]) -> None:
    shards = read_config(pretrained).training["data"]["train"]
    chosen = {"train": shards, "eval": "", "phases": ""} | {key: value.format(shards) for key, value in data.items()}
    before, after = words(pretrained), words(pretrained, **chosen)
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
    own, others = (
        re.findall(r"unigram baseline: [\d.]+", words(pretrained, train=str(shards_dir), eval=held_out))
        for held_out in ("", str(other))
    )
    assert own and own == others
    gone = words(pretrained, train=str(tmp_path / "gone"), eval=str(other))
    assert "There is no unigram baseline: no " in gone and "The first prediction is correct" in gone
    assert "unigram baseline" not in words(pretrained, mixture={"wiki": (str(shards_dir), 1.0)}, eval=str(other))


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, "transformer"),
        ({"causal": True}, "causal transformer"),
        ({"encoder": FeedForward(), "layers": 1, **WITHOUT_ATTENTION}, "causal feed-forward"),
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
        probabilities = [probability for _, probability in one.predictions]
        assert len(probabilities) == 5 and probabilities == sorted(probabilities, reverse=True)
        assert 0 < sum(probabilities) < 1
        assert one.label and "[PAD]" not in one.before + one.after


def test_a_word_is_shown_rather_than_the_inside_of_one(tmp_path: Path) -> None:
    words = tokenizer.load(byte_pairs(tmp_path, ["Ġ a", "Ġ b"]))
    tokens = ["Ġa", "b", "c"]
    batch = Batch(*[np.zeros((1, 3), np.int32)] * len(Batch._fields))._replace(
        input_ids=np.full((1, 3), words.mask_id),
        masked_positions=np.arange(3)[None],
        masked_ids=np.array([[words.token_id(token) for token in tokens]]),
        masked_weights=np.ones((1, 3), np.float32),
    )
    assert tokens[int(choose_masked_positions(batch, words)[0])] == "Ġa"


def test_unigram_baseline_is_a_count(shards_dir: Path) -> None:
    baseline = unigram_baseline(shards_dir)
    dataset = open_dataset(shards_dir, "eval")
    tokenizer = dataset.vocabulary()
    loader = DatasetLoader(dataset, tokenizer, seed=7)
    truths = np.concatenate([batch.masked_ids[batch.masked_weights > 0] for batch in loader.evaluation_batches(3)])
    assert baseline.predictions == len(truths)
    assert baseline.accuracy == pytest.approx((truths == tokenizer.token_id(baseline.token)).mean())
    counts = np.load(shards_dir / "unigram_counts.npy").astype(float) + 1
    counts[list(tokenizer.special_ids)] = 0
    assert baseline.loss == pytest.approx(-np.log(counts[truths] / counts.sum()).mean())


def test_pieces_are_joined_to_words() -> None:
    assert join_tokens(["don", "'", "t", "go", ",", "un", "##kind", "[MASK]", "!"]) == "don't go, unkind [MASK]!"
    assert join_tokens(["couldn", "'", "[SEP]", "(", "he", ")"]) == "couldn' [SEP] (he)"
