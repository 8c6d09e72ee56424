"""A model card tells of the run what its workdir records, and names no folder of the machine that trained it."""

import dataclasses
import json

import huggingface_hub
import pytest
from huggingface_hub import ModelCard
from random_checkpoints import odd_config, random_checkpoint

from bert_jax.config import PretrainDataConfig
from bert_jax.data.manifest import read_manifest
from bert_jax.data.phases import open_phases, source_name, summarize
from bert_jax.interop import export
from bert_jax.interop.families.bert import BERT
from bert_jax.interop.model_card import TRANSFORMERS, render
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model.heads.config import Heads
from bert_jax.storage.files import IN_MEMORY
from bert_jax.train.workdir import write_params

THRESHOLDS = ("threshold/good", "threshold", "best_f1_thresh")


def card_of(tmp_path, result, heads=None, **known) -> str:
    """The card of an exported workdir, whose run had these records and this result.json."""
    loaded = random_checkpoint(tmp_path / "vocabulary", odd_config(), heads or Heads(mlm=True), **known)
    export.write(loaded, tmp_path / "workdir")
    (tmp_path / "workdir" / "result.json").write_text(json.dumps(result))
    export.export(tmp_path / "workdir", tmp_path / "out")
    return (tmp_path / "out" / "README.md").read_text()


def source(name, **changes):
    known = {"name": name, "from_step": 0, "share": 1.0, "documents": 1234, "tokens": 56789, "rows": 10}
    known |= {"held_out_documents": 0, "seq_len": 16, "objective": "nsp", "input_files": 1, "input": [f"{name}.txt"]}
    return known | {"masking": {"kind": "dynamic", "unit": "word", "rate": 0.15}, "input_bytes": 5} | changes


@pytest.mark.parametrize("mixed", [False, True])
def test_a_summary_has_the_counts_of_the_manifest_and_no_folder(shards_dir, mixed):
    spec = {"mixture": {"books": (str(shards_dir), 1.0)}} if mixed else {"train": str(shards_dir)}
    (one,) = summarize(open_phases(PretrainDataConfig(**spec)))
    manifest = read_manifest(shards_dir)
    assert (one["name"], one["share"], one["from_step"]) == ("books" if mixed else shards_dir.name, 1, 0)
    for name in ("documents", "tokens", "rows"):
        assert one[name] == manifest["parts"]["train"][name] > 0
    assert one["held_out_documents"] == manifest["parts"]["eval"]["documents"] > 0
    assert one["masking"] == {"kind": "dynamic", "unit": "word", "rate": 0.15}
    assert one["input"] == ["text.txt"] and "/" not in json.dumps(one)


def test_the_card_of_a_pretrained_model_has_its_data_its_effort_and_its_limits(tmp_path):
    data = (
        source("wiki", share=0.75, held_out_documents=3),
        source("code", share=0.25, from_step=100, input_files=30, input=["a", "b"]),
    )
    training = {
        "init_from": "/home/me/first",
        "data": {"mixture": {"wiki": ("/data/wiki", 3), "code": ("/data/code", 1)}},
        "seed": 7,
    }
    training["objective"] = {"kind": "auto"}
    result = {"step": 1200, "seconds": 3723.4, "tokens": 5000000, "eval_mlm_loss": 3.25, "eval_nsp_accuracy": None}
    result["eval_wiki/mlm_loss"] = 2.5
    card = card_of(tmp_path, result, training=training, data=data)
    assert "| wiki | 75.0% | 1,234 | 56,789 | 16 | nsp | dynamic, 15%, unit word |" in card
    assert "| code, from step 100 | 25.0% |" in card and "- code: `a`, `b` and 28 more files." in card
    assert "| init_from | first |" in card and "| seed | 7 |" in card and "objective | auto" not in card
    for row in ("| steps taken | 1,200 |", "| tokens seen | 5,000,000 |", "| time of training | 1:02:03 |"):
        assert row in card
    assert "| eval_mlm_loss | 3.2500 |" in card and "| eval_wiki/mlm_loss | 2.5000 |" in card
    assert "nsp_accuracy" not in card
    assert (
        "rows of up to 16 tokens. It accepts 24" in card and "capital letters" in card and "Held-out documents" in card
    )
    assert "/home" not in card and "/data" not in card


@pytest.mark.parametrize(
    ("training", "changes", "masking", "settings"),
    [
        ({"data": {"mask_rate": 0.3, "mask_shape": "steps"}}, {}, "dynamic, 30%, unit word", ["data.mask_rate | 0.3"]),
        (
            {
                "data": {"mask_rate": None, "mask_schedule": {0: 0.3, 9: 0.15}, "mask_shape": "linear"},
                "objective": {"kind": "mlm", "z_loss": 1e-4},
            },
            {},
            "dynamic, rates {0: 0.3, 9: 0.15}, unit word",
            ["data.mask_schedule | {0: 0.3, 9: 0.15}", "data.mask_shape | linear", "objective.z_loss | 0.0001"],
        ),
        ({"objective": {"kind": "diffusion"}}, {}, "random rates", ["objective | diffusion"]),
        ({"objective": {"kind": "auto"}}, {"causal": True, "norm": "pre", "segment_types": 0}, "none", []),
    ],
)
def test_the_card_has_the_masks_of_the_run(tmp_path, training, changes, masking, settings):
    loaded = random_checkpoint(
        tmp_path / "words", odd_config(**changes), Heads(mlm=True), training=training, data=(source("wiki"),)
    )
    card = render(loaded, BERT, "BertForMaskedLM", parameters=1, loading=TRANSFORMERS)
    assert f"| nsp | {masking} |" in card
    assert all(f"| {setting} |" in card for setting in settings) and "mask_shape | steps" not in card


@pytest.mark.parametrize(
    ("decays", "rows"),
    [
        ("", ["weight_decay | 0.01"]),
        ({".*": 0.02}, ["decays | `{'.*': 0.02}`"]),
        ({"^embeddings/|norm": 0.02}, ["weight_decay | 0.01", r"decays | `{'^embeddings/\|norm': 0.02}`"]),
    ],
)
def test_the_card_has_the_weight_decay_that_parameters_had(tmp_path, decays, rows):
    training = {"optimizer": {"kind": "", "weight_decay": 0.01, "decays": decays}}
    loaded = random_checkpoint(tmp_path / "words", odd_config(), Heads(mlm=True), training=training)
    card = render(loaded, BERT, "BertForMaskedLM", parameters=1, loading=TRANSFORMERS)
    assert [line for line in card.split("\n") if "decay" in line] == [f"| optimizer.{row} |" for row in rows]


def test_paths_of_older_runs_and_mixtures_lose_their_folders_and_hub_names_do_not(tmp_path):
    training = {
        "init_from": "hf:org/name",
        "data": {"mixture": {"wiki": ("/data/wiki", 0.5), "code": ("gs://bucket/code", 0.5)}},
    }
    card = card_of(tmp_path, {}, training=training)
    assert (
        "| init_from | hf:org/name |" in card
        and "| data.mixture | {'wiki': ['wiki', 0.5], 'code': ['code', 0.5]} |" in card
    )
    assert "No evaluation of it is known." in card and "## Data" not in card


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/home/me/base", "base"),
        ("/home/me/base/checkpoints/1200", "base, step 1200"),
        ("gs://bucket/base/checkpoints/1200", "base, step 1200"),
        (f"/tmp/{IN_MEMORY}x1y2/start", ""),
    ],
)
def test_the_start_of_a_run_is_a_name_and_a_step_or_was_in_memory(tmp_path, path, shown):
    card = card_of(tmp_path, {}, training={"init_from": path, "seed": 7})
    assert f"| init_from | {shown} |" in card if shown else "init_from" not in card.partition("## How to load")[0]
    assert "| seed | 7 |" in card and "start |" not in card


def test_the_card_of_a_sentence_encoder_shows_how_to_open_it_and_no_scores_of_another_task(tmp_path):
    task = {"name": "own", "kind": "classification", "labels": ["bad", "good"], "max_length": 12}
    heads = Heads(pooler=True, classes=2)
    loaded = random_checkpoint(tmp_path / "vocabulary", odd_config(), heads, task=task, metrics={"accuracy": 0.75})
    export.export_loaded(loaded, tmp_path / "out", "sentence_transformers")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: sentence-transformers\npipeline_tag: sentence-similarity\n" in card
    assert 'SentenceTransformer("PATH").encode([' in card and "AutoTokenizer" not in card
    assert "good" not in card and "0.75" not in card and "## Task" not in card
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["model_max_length"] == 24


def test_the_card_of_a_fine_tuned_model_has_scores_over_seeds_and_numbers_of_examples(tmp_path):
    result = {
        "metrics": {
            "f1": {"mean": 0.8125, "std": 0.015, "values": [0.8, 0.825]},
            "accuracy": {"mean": 0.75, "std": None, "values": [0.75]},
            "pearson": {"mean": None, "std": None, "values": [None]},
            **{name: {"mean": 0.3, "std": None, "values": [0.3]} for name in THRESHOLDS},
        },
        "steps": [100, 100],
        "counts": {"train": {"examples": 5452, "tokens": 63127}, "dev": {"examples": 500, "tokens": 6000}},
        "start": {"path": "/home/me/first", "task": None},
        "best": {"seed": 2, "run": "seed-2", "metric": "f1", "value": 0.825},
    }
    task = {"name": "own", "kind": "classification", "labels": ["bad", "good"]}
    card = card_of(tmp_path, result, heads=Heads(pooler=True, classes=2), task=task, training={"epochs": 3.0})
    assert "| f1 | 0.8125 ± 0.0150 (2 seeds) |" in card and "| accuracy | 0.7500 |" in card and "pearson" not in card
    scores = card.partition("## Evaluation")[2].partition("\n## ")[0]
    no_scores = ("seed", "value", *THRESHOLDS)
    assert "| f1 |" in scores and not any(f"\n| {name} |" in scores for name in no_scores)
    assert "| train | 5,452 | 63,127 |" in card and "| dev | 500 | 6,000 |" in card
    assert "| epochs | 3.0 |" in card and "/home" not in card


@pytest.mark.parametrize(("decode", "strategy"), [("first", "first"), ("mean", "average")])
def test_the_card_of_a_tagger_shows_the_call_for_whole_words_of_long_texts(tmp_path, decode, strategy):
    task = {"name": "own", "kind": "tagging", "labels": ["O", "B-X", "I-X"], "max_length": 12, "decode": decode}
    card = card_of(tmp_path, {}, heads=Heads(tags=3), task=task)
    assert f'pipeline("token-classification", "PATH", aggregation_strategy="{strategy}", stride=5)' in card
    assert "\ntagger.tokenizer.model_max_length = 12\n" in card


def test_an_export_in_bert_jax_format_keeps_the_records(tmp_path):
    loaded = random_checkpoint(tmp_path / "vocabulary", odd_config(), Heads(mlm=True), data=(source("wiki"),))
    export.write(loaded, tmp_path / "workdir")
    export.export(tmp_path / "workdir", tmp_path / "out", format="orbax")
    assert open_checkpoint(tmp_path / "out").data == (source("wiki"),)


def test_only_the_step_that_a_run_results_in_has_its_scores(tmp_path):
    loaded = random_checkpoint(tmp_path / "vocabulary", odd_config(), Heads(mlm=True))
    export.write(loaded, tmp_path / "run")
    write_params(tmp_path / "run", 20, loaded.params)
    (tmp_path / "run" / "result.json").write_text('{"step": 20, "eval_mlm_loss": 3.25}')
    for folder, scores in (("run", {"step": 20, "eval_mlm_loss": 3.25}), ("run/checkpoints/0", {})):
        assert open_checkpoint(tmp_path / folder).metrics == scores
    assert open_checkpoint(tmp_path / "run" / "checkpoints" / "20").metrics


def metadata_of(folder):
    """The card's metadata as huggingface_hub reads and checks them."""
    return ModelCard.load(folder / "README.md").data


def test_the_metadata_have_scores_data_and_base_model_as_the_hub_reads_them(tmp_path):
    result = {"metrics": {"f1": {"mean": 0.8125, "std": 0.015, "values": [0.8, 0.825]}, "mcc": {"mean": float("nan")}}}
    training = {
        "init_from": "hf:google-bert/bert-base-cased",
        "task": {
            "train": "hf://datasets/stars/reviews@main/a.csv",
            "dev": "/home/me/dev.csv",
            "columns": {"text": "x"},
        },
    }
    task = {"name": "own", "kind": "classification", "labels": ["bad", "good"]}
    loaded = random_checkpoint(tmp_path / "words", odd_config(), Heads(pooler=True, classes=2), task=task)
    export.write(dataclasses.replace(loaded, training=training), tmp_path / "workdir")
    (tmp_path / "workdir" / "result.json").write_text(json.dumps(result))
    export.export(tmp_path / "workdir", tmp_path / "out", language="tr, en", license="mit")
    data = metadata_of(tmp_path / "out")
    assert (data.language, data.license, data.library_name) == (["tr", "en"], "mit", "transformers")
    assert (data.base_model, data.datasets) == ("google-bert/bert-base-cased", ["stars/reviews"])
    assert (data.pipeline_tag, data.metrics) == ("text-classification", ["f1"])
    [score] = data.eval_results
    assert (score.metric_type, score.metric_value, score.task_type) == ("f1", 0.8125, "text-classification")
    assert (score.dataset_type, score.dataset_name) == ("stars/reviews", "dev.csv")
    # A run that begins with this run, and one that begins with its export, inherit what it did not say itself.
    export.export(tmp_path / "out", tmp_path / "again")
    assert metadata_of(tmp_path / "again").to_dict().items() >= {"license": "mit", "language": ["tr", "en"]}.items()
    for index, start in enumerate(("workdir", "out", "workdir/checkpoints/0")):
        further = dataclasses.replace(loaded, training={"init_from": str(tmp_path / start)})
        export.export_loaded(further, tmp_path / f"further{index}")
        data = metadata_of(tmp_path / f"further{index}")
        assert data.base_model == "google-bert/bert-base-cased" and data.license == ("mit" if start == "out" else None)
        assert not data.datasets and "/" not in str(data.get("model_name"))


def test_a_license_and_a_single_language_are_those_of_the_base_model_s_card_in_the_cache(tmp_path, monkeypatch):
    card = tmp_path / "README.md"
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: str(card))
    loaded = random_checkpoint(tmp_path / "words", odd_config(), Heads(mlm=True), training={"init_from": "hf:a/b"})
    for index, (text, wanted) in enumerate(
        (
            ("---\nlanguage: tr\nlicense: apache-2.0\nbase_model: c/d\n---\nText.", ("tr", "apache-2.0")),
            ("---\nlanguage:\n- tr\n- en\nlicense: other\n---", (None, "other")),
            ("---\n]: [\n---", (None, None)),
            ("No metadata.", (None, None)),
        )
    ):
        card.write_text(text)
        export.export_loaded(loaded, tmp_path / str(index))
        data = metadata_of(tmp_path / str(index))
        assert (data.language, data.license, data.base_model) == (*wanted, "a/b")


def test_files_of_data_sets_of_the_hub_keep_their_name(tmp_path):
    assert (
        source_name("hf://datasets/wikimedia/wikipedia@refs%2Fconvert/tr/0.parquet")
        == "hf:wikimedia/wikipedia/0.parquet"
    )
    assert source_name("/home/me/text.txt") == "text.txt"
    data = (source("wiki", input=["hf:wikimedia/wikipedia/0.parquet"]), source("own"))
    loaded = random_checkpoint(
        tmp_path / "words", odd_config(), Heads(mlm=True), data=data, metrics={"eval_mlm_loss": 2.5}
    )
    export.export_loaded(loaded, tmp_path / "out")
    read = metadata_of(tmp_path / "out")
    assert read.datasets == ["wikimedia/wikipedia"] and read.pipeline_tag == "fill-mask"
    assert [(score.metric_name, score.dataset_name) for score in read.eval_results] == [("eval_mlm_loss", "wiki, own")]


@pytest.mark.parametrize(
    ("format", "library", "tag"),
    [("sentence_transformers", "sentence-transformers", "bert"), ("stablehlo", "jax", "stablehlo")],
)
def test_each_format_names_its_library(tmp_path, format, library, tag):
    loaded = random_checkpoint(tmp_path / "words", odd_config(layers=1), Heads(), card={"license": "mit"})
    shape = "1x4" if format == "stablehlo" else ""
    export.export_loaded(loaded, tmp_path / "out", format, shape=shape)
    data = metadata_of(tmp_path / "out")
    assert (data.library_name, data.license) == (library, "mit") and {tag, "bert_jax"} <= {*data.tags}
