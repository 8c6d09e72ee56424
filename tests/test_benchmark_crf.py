"""The comparison of a CRF with independent tags, on a few sentences and a tiny model."""

import dataclasses

import numpy as np
import pytest
import test_finetune

from benchmarks import crf
from bert_jax.config import TaskConfig
from bert_jax.tasks.example import Sentence

start = test_finetune.start  # a fixture


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_crf_learns_transitions_at_its_own_rate_and_predicts_no_invalid_tags(start, tmp_path):
    draw = np.random.default_rng(0)
    sentences = []
    for _ in range(64):
        tags = [tag for _ in range(3) for tag in [("O",), ("B-X", "I-X"), ("B-Y",)][draw.integers(3)]]
        words = tuple(
            ["the", "house", "a", "man", "her", "letter", "the", "sea", "that", "day"][draw.integers(10)] for _ in tags
        )
        sentences.append(Sentence(words, tuple(tags), tuple(range(len(tags)))))
    paths = {split: str(crf.write_sentences(sentences, tmp_path / f"{split}.conll")) for split in ("train", "dev")}
    config = test_finetune.config_of(start, TaskConfig(kind="tagging", text="0", label="1", **paths), epochs=2.0)
    found = {}
    for name, options in crf.systems(crf.TAGS, [1.0, 100.0]):
        task = dataclasses.replace(config.task, **options)
        found[name] = crf.measure(dataclasses.replace(config, task=task), tmp_path / name)
    assert list(found) == ["independent", "crf_rate_1", "crf_rate_100"]
    assert found["crf_rate_1"]["invalid_tags"] == found["crf_rate_100"]["invalid_tags"] == [0]
    assert found["independent"]["largest_transition"] == [None]
    slow, fast = (found[f"crf_rate_{rate}"]["largest_transition"][0] for rate in (1, 100))
    assert slow > 0 and fast > 5 * slow
