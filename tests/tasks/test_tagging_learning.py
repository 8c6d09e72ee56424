"""Taggers with a chain, and with tags on all pieces, learn end to end from a file of IOBES tags."""

from pathlib import Path

import numpy as np
import pytest

from bert_jax.config import EvalConfig, FinetuneConfig, ModelOptions, OptimizerConfig, TaskConfig
from bert_jax.tasks.evaluation import evaluate
from bert_jax.tasks.finetuning import finetune
from bert_jax.tasks.prediction import predict
from bert_jax.tokenization import tokenizer as tokenizer_lib

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_device")]


# By the first letter of a word; its second piece says nothing.
TAGS = {"a": "O", "c": "O"} | {
    letter: f"{mark}-{kind}"
    for kind in "DG"
    for mark, letter in zip("BIES", "defghijk"[4 * (kind == "G") :], strict=False)
}


def written(path: Path, draw: np.random.Generator, sentences: int) -> Path:
    """Sentences of entities of one to three words, with words outside between them."""
    letters = {tag: letter for letter, tag in TAGS.items()}
    lines = []
    for _ in range(sentences):
        for _ in range(draw.integers(1, 4)):
            lines += ["al O"] * draw.integers(1, 3)
            kind, length = str(draw.choice(["D", "G"])), int(draw.integers(1, 4))
            tags = [f"{mark}-{kind}" for mark in ("S" if length == 1 else "B" + "I" * (length - 2) + "E")]
            lines += [f"{letters[tag]}{draw.choice(['l', 'm'])} {tag}" for tag in tags]
        lines += ["c O", ""]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("options", [{"crf": True}, {"label_subwords": "all", "decode": "mean"}], ids=["crf", "mean"])
def test_a_tagger_learns_entities_in_the_scheme_of_its_file(tmp_path: Path, options: dict) -> None:
    vocabulary = tmp_path / "vocab.txt"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary.write_text("\n".join([*special, *TAGS, "##l", "##m"]) + "\n")
    draw = np.random.default_rng(0)
    files = {
        name: str(written(tmp_path / f"{name}.conll", draw, count)) for name, count in (("train", 300), ("dev", 50))
    }
    config = FinetuneConfig(
        model=ModelOptions(layers=1, width=32, heads=2, feed_forward=64, max_positions=48),
        task=TaskConfig(kind="tagging", max_length=48, **files, **options),
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=5),
        batch_size=32,
        epochs=8.0,
        eval=EvalConfig(every_steps=1000),  # at the end only
    )
    result = finetune(config, tmp_path / "run", tokenizer_lib.load(vocabulary, lowercase=True))
    assert result["metrics"]["f1"]["mean"] > 0.95
    assert result["counts"]["dev"]["irregular_tags"] == 0
    again = evaluate(tmp_path / "run", files["dev"])
    assert again["f1"] == pytest.approx(result["metrics"]["f1"]["mean"])
    (told,) = predict(tmp_path / "run", [{"tokens": ["al", "dm", "fl", "al", "km", "c"]}])
    assert told["tags"] == ["O", "B-D", "E-D", "O", "S-G", "O"]
    assert [entity["words"] for entity in told["entities"]] == [[1, 3], [4, 5]]
    assert all(1 / 9 < score <= 1.0001 for score in told["tag_scores"])  # the best of nine tags
