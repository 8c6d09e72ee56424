"""A model learns the positions of answers and their absence; predictions are parts of the context."""

import json
from pathlib import Path

import numpy as np
import pytest

from bert_jax.config import FinetuneConfig, ModelOptions, OptimizerConfig, TaskConfig
from bert_jax.tasks.evaluation import evaluate
from bert_jax.tasks.finetuning import finetune
from bert_jax.tasks.prediction import predict
from bert_jax.tokenization import tokenizer as tokenizer_lib

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_device")]

LETTERS, DIGITS = "abcdef", "123456789"


def asked(draw: np.random.Generator, number: int) -> dict:
    """Letters, and among them the number asked for, of one or two digits; one context of four has none."""
    answer = "".join(draw.choice(list(DIGITS), draw.integers(1, 3)))
    words = draw.choice(list(LETTERS), 7).tolist()
    answers = [answer] if number % 4 else []
    for one in answers:
        words.insert(int(draw.integers(len(words) + 1)), one)
    return {"id": str(number), "question": "n", "context": " ".join(words), "answers": answers}


def test_a_model_learns_answers_and_their_absence(tmp_path: Path) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*LETTERS, "n", *DIGITS, *(f"##{one}" for one in DIGITS)]
    (tmp_path / "vocab.txt").write_text("\n".join([*special, *pieces]))
    tokenizer = tokenizer_lib.load(tmp_path / "vocab.txt", lowercase=True)
    draw = np.random.default_rng(0)
    for name, count in (("train", 1200), ("dev", 100), ("test", 100)):
        lines = (json.dumps(asked(draw, number)) + "\n" for number in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "dev", "test")}
    config = FinetuneConfig(
        model=ModelOptions(layers=2, width=32, heads=4, feed_forward=64, max_positions=24, dropout=0.0),
        # Windows of a context, too: some answers are in the second only.
        task=TaskConfig(kind="question", max_length=12, doc_stride=4, max_query_length=4, **files),
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=10),
        batch_size=64,
        epochs=6.0,
    )
    result = finetune(config, tmp_path / "run", tokenizer)
    found = {name: metric["mean"] for name, metric in result["metrics"].items()}
    counts = result["counts"]["test"]
    assert counts["unanswerable"] == 25 and counts["rows"] > counts["examples"] == 100
    assert found["test_HasAns_f1"] > 0.9 and found["test_NoAns_exact"] > 0.8, found
    again = evaluate(tmp_path / "run", tmp_path / "test.jsonl")
    assert again["f1"] == pytest.approx(found["test_f1"])
    contexts = ("a f c  b 47 c", "25 c d a f", "a e b c")
    told = predict(tmp_path / "run", [{"question": "n", "context": context} for context in contexts])
    assert [one["answer"] for one in told] == ["47", "25", ""]
    assert (told[0]["start"], told[0]["end"]) == (9, 11) and told[2]["start"] is None
    assert told[2]["no_answer_probability"] > 0.5 > told[0]["no_answer_probability"]
