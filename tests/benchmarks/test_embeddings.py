"""The comparison of sentence embeddings with sentence-transformers: its own side, and its line of results."""

import contextlib
import json

import numpy as np
import pytest
from random_checkpoints import odd_config, random_checkpoint

from benchmarks import embeddings, embeddings_peer, turns
from bert_jax.interop import huggingface_export
from bert_jax.model.heads.config import Heads


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


def test_vectors_of_programs_are_compared_by_cosines():
    first = {"float32": np.eye(3, dtype=np.float32) * 5, "int8": np.eye(3, dtype=np.float32)}
    turned = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 0]], np.float32)  # cosines 1, 0.71 and 0
    second = {"float32": turned, "int8": turned[[2, 1, 0]]}  # cosines 0, 0.71 and 0
    vectors = {name: (first[name], second[name]) for name in first}
    found = embeddings.compared_programs(vectors, [5.0, 3.0, 1.0])
    assert found["spearman"]["float32"] == 1.0 and found["spearman"]["int8"] < 1
    cosines = [1, 1, 1, 0, 1, 0]  # of the six vectors of both programs
    assert found["cosine_mean"] == pytest.approx(np.mean(cosines), abs=1e-4) and found["cosine_least"] == 0
