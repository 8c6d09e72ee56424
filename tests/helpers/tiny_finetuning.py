"""Fixtures for fine-tuning: a small start, a vocabulary of letters, tables of reviews and the files of GLUE."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from bert_jax.config import AdamW, FinetuneConfig, LinearSchedule, ModelConfig, TaskConfig
from bert_jax.interop import export as bert_jax_export
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model import layers
from bert_jax.model.bert import abstract_params
from bert_jax.model.heads.config import Heads
from bert_jax.tokenization import tokenizer as tokenizer_lib
from bert_jax.tokenization.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, vocab_dir: Path, tiny_config: ModelConfig) -> Path:
    """A workdir as pretraining leaves it, with untrained parameters."""
    tokenizer = tokenizer_lib.load(vocab_dir)
    model = dataclasses.replace(tiny_config, vocab_size=tokenizer.vocab_size, dropout=0.0, attention_dropout=0.0)
    heads = Heads(mlm=True, next_sentence=True, pooler=True)
    draw = np.random.default_rng(0)  # by numpy: initialising by jax takes longer than a test
    params = {}
    for path, leaf in layers.flatten(abstract_params(model, heads)).items():
        params[path] = draw.normal(0, 0.02, leaf.shape).astype(np.float32)
        if path.endswith(("norm/scale", "norm/bias")):
            params[path] = np.full(leaf.shape, path.endswith("scale"), np.float32)
    folder = tmp_path_factory.mktemp("start") / "pretrained"
    bert_jax_export.write(LoadedModel(model, heads, params, tokenizer), folder)
    return folder


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The letters of the alphabet and a question mark, at the beginning of a word and within it."""
    alphabet = "abcdefghijklmnopqrstuvwxyz?"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    path = tmp_path_factory.mktemp("letters") / "vocab.txt"
    path.write_text("\n".join([*special, *alphabet, *(f"##{letter}" for letter in alphabet)]) + "\n")
    return tokenizer_lib.load(path, lowercase=True)


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A table whose label is whether the text contains "good"; it also has a score, and a test file has neither."""
    folder = tmp_path_factory.mktemp("reviews")
    draw = np.random.default_rng(0)
    words = ["the house", "a man", "her letter", "the sea", "that day"]
    for split, count in (("train", 96), ("dev", 24), ("test", 8)):
        lines = ["review\tpair\tstars\tscore"[: None if split != "test" else 11]]
        for _ in range(count):
            good = bool(draw.integers(2))
            text = f"{draw.choice(words)} was {'good' if good else 'dark'}\t{draw.choice(words)}"
            lines.append(text if split == "test" else f"{text}\t{'yes' if good else 'no'}\t{1.5 + 2 * good}")
        (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {split: str(folder / f"{split}.tsv") for split in ("train", "dev", "test")}


def config_of(start: Path, task: TaskConfig, **changes: object) -> FinetuneConfig:
    built = FinetuneConfig(
        task=dataclasses.replace(task, max_length=32),
        optimizer=AdamW(learning_rate=5e-3, schedule=LinearSchedule(warmup_steps=-1)),
        batch_size=16,
        epochs=1.0,
        length_pool=1,  # good is shorter than dark: batches of like length would be batches of one label
        log_every=5,
        init_from=str(start),
    )
    return dataclasses.replace(built, **changes)


def write_nli(folder: Path) -> None:
    """MNLI, its diagnostic set and RTE in the layouts of GLUE, a few lines each."""
    draw = np.random.default_rng(0)
    words = ["the house", "a man", "her letter", "the sea", "that day"]
    splits = {"train": 48, "dev_matched": 12, "dev_mismatched": 12, "test_matched": 5, "test_mismatched": 6}
    for name, count in splits.items():
        lines = ["index\tsentence1\tsentence2" + ("" if name.startswith("test") else "\tgold_label")]
        for index in range(count):
            fields = [str(index), f"{draw.choice(words)} was dark", str(draw.choice(words))]
            if not name.startswith("test"):
                fields.append(("entailment", "neutral", "contradiction")[index % 3])
            lines.append("\t".join(fields))
        (folder / "MNLI").mkdir(parents=True, exist_ok=True)
        (folder / "MNLI" / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    (folder / "diagnostic").mkdir()
    pairs = ["the sea was dark\tthe sea\tentailment", "a man\tthat day\tneutral", "a man\ta house\tcontradiction"]
    (folder / "diagnostic" / "diagnostic-full.tsv").write_text("\n".join(["Premise\tHypothesis\tLabel", *pairs]) + "\n")
    (folder / "RTE").mkdir()
    for name in ("train", "dev"):
        lines = [f"{n}\tthe sea was dark\ta man\t{'not_' * (n % 2)}entailment" for n in range(8)]
        text = "\n".join(["index\tsentence1\tsentence2\tlabel", *lines]) + "\n"
        (folder / "RTE" / f"{name}.tsv").write_text(text)
