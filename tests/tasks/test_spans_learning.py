"""A model learns nested spans and relations; the threshold of dev is stored and used."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from bert_jax.config import EvalConfig, FinetuneConfig, ModelOptions, OptimizerConfig, TaskConfig
from bert_jax.tasks.evaluation import evaluate
from bert_jax.tasks.finetuning import finetune
from bert_jax.tasks.prediction import predict
from bert_jax.tokenization import tokenizer as tokenizer_lib
from bert_jax.tokenization.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_device")]


@pytest.fixture
def letters(tmp_path: Path) -> Tokenizer:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh()[]"]) + "\n")
    return tokenizer_lib.load(path, lowercase=True)


def bracketed(draw: np.random.Generator) -> dict:
    """A sentence in which ( ... ) is a GROUP and [ x ] in it an ITEM, which belongs to every group of the sentence."""
    words, spans = [], []
    for _ in range(draw.integers(1, 3)):
        words += draw.choice(list("abcd"), draw.integers(0, 2)).tolist()
        start = len(words)
        words += ["(", *draw.choice(list("abcd"), 1), "[", str(draw.choice(list("efgh"))), "]", ")"]
        spans += [
            {"start": start, "end": start + 6, "label": "GROUP"},
            {"start": start + 2, "end": start + 5, "label": "ITEM"},
        ]
    relations = [
        {"head": head, "tail": tail, "label": "part"}
        for head, tail in itertools.product(range(1, len(spans), 2), range(0, len(spans), 2))
    ]
    return {"tokens": words, "spans": spans, "relations": relations}


def test_a_model_learns_nested_spans_and_their_relations(tmp_path: Path, letters: Tokenizer) -> None:
    draw = np.random.default_rng(0)
    for name, count in (("train", 400), ("dev", 60), ("test", 60)):
        lines = (json.dumps(bracketed(draw)) + "\n" for _ in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "dev", "test")}
    config = FinetuneConfig(
        model=ModelOptions(layers=1, width=32, heads=2, feed_forward=64, max_positions=32),
        task=TaskConfig(kind="span_pairs", max_length=32, **files),
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=10),
        batch_size=32,
        epochs=8.0,
        eval=EvalConfig(every_steps=1000),  # at the end only
    )
    result = finetune(config, tmp_path / "run", letters)
    found = {name: metric["mean"] for name, metric in result["metrics"].items()}
    assert found["test_f1"] > 0.95 and found["test_relation_f1"] > 0.9, found
    stored = json.loads((tmp_path / "run" / "config.json").read_text())["task"]
    assert stored["threshold"] == pytest.approx(found["threshold"]) and stored["max_span"] == 6
    again = evaluate(tmp_path / "run", tmp_path / "test.jsonl")
    assert again["f1"] == pytest.approx(found["test_f1"]) and "threshold" not in again
    (told,) = predict(tmp_path / "run", [{"tokens": ["b", "(", "a", "[", "e", "]", ")"]}])
    assert [(span["type"], span["words"]) for span in told["spans"]] == [("GROUP", [1, 7]), ("ITEM", [3, 6])]
    assert [relation["type"] for relation in told["relations"]] == ["part"]
