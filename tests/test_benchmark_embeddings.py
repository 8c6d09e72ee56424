"""The comparison of sentence embeddings with sentence-transformers: its own side, and its line of results."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from random_checkpoints import odd_config, random_checkpoint

from benchmarks import embed_memory, embeddings, embeddings_peer, turns
from benchmarks.data_prep_runs import Watched
from bert_jax.command import UserError
from bert_jax.interop import huggingface_export
from bert_jax.model.heads import Heads


@pytest.fixture
def flags(tmp_path, monkeypatch):
    """The command line for a tiny folder, and a data folder with pairs in the columns of STS-B."""
    config = odd_config(layers=1, max_positions=128, dropout=0.0, attention_dropout=0.0)
    loaded = random_checkpoint(tmp_path / "words", config, Heads())
    huggingface_export.write_sentence_transformer(loaded, tmp_path / "model")
    folder = tmp_path / "data" / "glue" / "STS-B"
    folder.mkdir(parents=True)
    for split, count in (("train", 64), ("dev", 300)):
        rows = [f"{n}\tthe cat sat on word{n % 90 + 20}\ta dog on the mat\t{n % 6}\n" for n in range(count)]
        (folder / f"{split}.tsv").write_text("index\tsentence1\tsentence2\tscore\n" + "".join(rows))
    monkeypatch.setenv("BERT_JAX_DATA", str(tmp_path / "data"))
    return [f"--model={tmp_path / 'model'}", "--rounds=1", "--steps=1", "--warmup=1", "--length_pool=1"]


@pytest.mark.parametrize("part", ["embed", pytest.param("train", marks=pytest.mark.slow)])
def test_the_line_has_the_ratio_of_the_rates(flags, monkeypatch, capsys, one_device, part):
    lines = []

    @contextlib.contextmanager
    def peer_turn(line, keep_memory):
        parsed = embeddings_peer.parse(line[2:])
        lines.append((parsed, json.loads(parsed.rows.read_text())))
        yield (lambda count: [1.0] * count), {"peer torch": "1"}

    monkeypatch.setattr(embeddings, "peer_turn", peer_turn)
    embeddings.main([*flags, f"--part={part}", "--peer_python=python"])
    found = json.loads(capsys.readouterr().out)
    assert found["peer_value"] == {"embed": embeddings.CHUNK, "train": 32}[part]  # each step takes the peer 1 s
    assert found["ratio"] == pytest.approx(found["value"] / found["peer_value"], rel=1e-3)
    ((peer, rows),) = lines
    assert not peer.rows.exists()  # the pairs are not left behind
    assert (peer.work, peer.batch_size, len(rows["train"]), len(rows["dev"])) == (part, 32, 64, 300)
    assert rows["dev"][7] == ["the cat sat on word27", "a dog on the mat", 1.0]


@pytest.mark.slow
def test_parity_compares_the_means_of_the_seeds(flags, monkeypatch, capsys, one_device):
    class Done:
        returncode, stdout = 0, '{"peer torch": "2.9", "peer threads": 2}\n{"spearman": 0.5}\n{"spearman": 0.7}\n'

    monkeypatch.setattr(turns.subprocess, "run", lambda *_, **__: Done)
    embeddings.main([*flags, "--part=parity", "--seeds=2", "--peer_python=python"])
    found = json.loads(capsys.readouterr().out)
    settings = found["settings"]
    assert found["peer_value"] == 0.6 and len(settings["values"]) == 2
    assert found["versions"]["peer torch"] == "2.9" and found["versions"]["peer threads"] == "2"
    spread = np.var(settings["values"], ddof=1) / 2 + np.var([0.5, 0.7], ddof=1) / 2
    assert settings["two_standard_errors"] == pytest.approx(2 * np.sqrt(spread))


def test_memory_is_that_of_the_command(flags, monkeypatch, capsys, tmp_path):
    started = []

    def watched(line, folder):
        options = dict(option.removeprefix("--").split("=") for option in line[3:])
        texts = Path(options["input"]).read_text().splitlines()
        assert Path(options["checkpoint"], "config.json").exists() and len(set(texts)) == len(texts)
        Path(options["output"]).mkdir()
        started.append(texts)
        return 2.0, Watched(2.0, 10**9 + 10**6 * len(texts), 1)

    monkeypatch.setattr(embed_memory, "watched", watched)
    embed_memory.main([flags[0], "--texts", "300", "100"])
    found = json.loads(capsys.readouterr().out)
    assert [len(texts) for texts in started] == [100, 300]
    assert started[1][:2] == ["the cat sat on word20 0", "a dog on the mat 1"]
    assert found["value"] == 1.3 and found["settings"]["ten_million_gb"] == pytest.approx(10_001)
    assert [run["peak_gb"] for run in found["settings"]["runs"]] == [1.1, 1.3]


def test_the_first_layers_of_a_model_are_stacked(tmp_path):
    loaded = random_checkpoint(tmp_path / "words", odd_config(layers=3), Heads())
    first = embed_memory.first_layers(loaded, 2)
    assert first.model.layers == 2 and embed_memory.first_layers(loaded, 9).model.layers == 3
    for path, value in loaded.params.items():
        np.testing.assert_array_equal(first.params[path], value[:2] if "encoder/layers/" in path else value)


def test_the_data_must_be_named(flags, monkeypatch):
    monkeypatch.delenv("BERT_JAX_DATA")
    with pytest.raises(UserError, match="BERT_JAX_DATA is not set"):
        embeddings.main(flags)
