"""The comparison of span vectors, on a few sentences and a tiny model."""

import json

import numpy as np
import pytest
import test_finetune

from benchmarks import spans

start = test_finetune.start  # a fixture


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_each_vector_is_measured_on_the_same_sentences(start, tmp_path, monkeypatch, capsys):
    draw = np.random.default_rng(0)
    folder = tmp_path / "data" / "conll2003"
    folder.mkdir(parents=True)
    for name in ("train", "testa", "testb"):
        lines = [f"{draw.choice(['the', 'house', 'a', 'man'])} X X {tag}" for tag in ("O", "B-PER", "I-PER")]
        (folder / f"eng.{name}").write_text("\n\n".join("\n".join(lines) for _ in range(24)) + "\n")
    monkeypatch.setenv("BERT_JAX_DATA", str(tmp_path / "data"))
    line = [f"--checkpoint={start}", f"--workdir={tmp_path / 'runs'}", "--vectors=endpoints,content"]
    spans.main([*line, "--seeds=1", "--sentences=16", "--epochs=1", "--max_length=32"])
    found = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [one["name"] for one in found] == ["spans/endpoints", "spans/content"]
    assert all(0 <= one["results"][name]["mean"] <= 1 for one in found for name in ("f1", "test_f1"))
    kept = (tmp_path / "runs" / "data" / "train.conll").read_text().split("\n\n")
    assert len([block for block in kept if block.strip()]) == 16
