"""Each objective of pretraining learns, by the commands, on the text that comes with the code.

Learning is a held-out loss at least 0.15 nats under the entropy of what is predicted there: under what the best guess
without any context reaches, though it knew the held-out frequencies.

What goes on from what takes a tiny model longer to see in novels than a test may take. For pairs the same text is
therefore written in three kinds of letters, small ones, capitals and Cyrillic: a document in one of them (whether B
goes on from A), or from the first kind to the last (which of the two is first).
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from bert_jax.data.loader import EVALUATION_SEED, PretrainingLoader
from bert_jax.data.shards import open_dataset
from bert_jax.train import metrics
from bert_jax.train.objectives.causal_lm import unmasked
from data_prep import readers, train_tokenizer
from data_prep.build_examples import build
from data_prep.build_options import BuildOptions
from data_prep.sentences import document_sentences
from data_prep.train_tokenizer import TokenizerOptions

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
BOOKS = str(ROOT / "data_prep" / "sample" / "books" / "*.txt.xz")
NATS = 0.15
ROWS = 2000  # of the held-out ones


class Case(NamedTuple):
    """An objective: how its shards are built, what the recipe sets, and the terms that must learn."""

    shards: dict[str, Any]
    terms: tuple[str, ...] = ("mlm",)
    overrides: tuple[str, ...] = ()
    steps: int = 500


SINGLE = {"objective": "single"}
CASES = {
    "tokens": Case(SINGLE),
    "words": Case(SINGLE | {"mask_unit": "word"}),
    "n-grams": Case(SINGLE | {"mask_unit": "ngram"}),
    "spans": Case(SINGLE | {"mask_unit": "span"}),
    "span boundaries": Case(SINGLE | {"mask_unit": "span"}, ("mlm", "sbo"), ("--config.span_boundary=true",), 900),
    "tokens out of order": Case(SINGLE | {"reorder_rate": 0.15}),
    "tokens deleted": Case(SINGLE | {"delete_rate": 0.1}),
    "tokens inserted": Case(SINGLE | {"insert_rate": 0.1}),
    "next tokens": Case(SINGLE, ("lm",), ("--config.model.causal=true",)),
}


PAIRED = {
    "next sentences": Case({"objective": "nsp"}, ("mlm", "nsp")),
    "order of sentences": Case({"objective": "sop"}, ("mlm", "nsp")),
}

LATIN = "abcdefghijklmnopqrstuvwxyz"
CYRILLIC = str.maketrans(LATIN, "".join(chr(ord("\N{CYRILLIC SMALL LETTER A}") + place) for place in range(len(LATIN))))
LETTERS: tuple[Callable[[str], str], ...] = (str.lower, str.upper, lambda text: text.lower().translate(CYRILLIC))


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """Of the books, and small, so that a token is seen often."""
    directory = tmp_path_factory.mktemp("learning") / "vocabulary"
    train_tokenizer.train(TokenizerOptions(BOOKS, directory, vocab_size=1500, lowercase=True))
    return directory


@pytest.mark.parametrize("name", CASES)
def test_an_objective_learns_from_the_bundled_text(name, vocabulary, tmp_path):
    case = CASES[name]
    build(BuildOptions(BOOKS, vocabulary, tmp_path / "shards", 64, eval_fraction=0.08, workers=1, **case.shards))
    check_learns(case, tmp_path)


@pytest.mark.parametrize("name", PAIRED)
def test_what_goes_on_from_what_is_learnt(name, tmp_path):
    case = PAIRED[name]
    paths = readers.expand(BOOKS)
    sentences = [one for path in paths for text in readers.documents(path) for one in document_sentences(text)]
    sentences = [one for one in sentences if 6 <= len(one.split()) <= 16]
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(documents(sentences, case.shards["objective"])), encoding="utf-8")
    train_tokenizer.train(TokenizerOptions(text, tmp_path / "vocabulary", vocab_size=1500))
    vocabulary = tmp_path / "vocabulary"
    build(
        BuildOptions(
            str(text),
            vocabulary,
            tmp_path / "shards",
            64,
            eval_fraction=0.08,
            short_seq_prob=0.0,
            dupe_factor=3,
            workers=1,
            **case.shards,
        )
    )
    check_learns(case, tmp_path)


def documents(sentences: list[str], objective: str) -> Iterator[str]:
    """Sixteen sentences each in one kind of letters, or two in each kind, by what the objective asks."""
    size = 16 if objective == "nsp" else 2 * len(LETTERS)
    for number, first in enumerate(range(0, len(sentences), size)):
        kinds = [number % len(LETTERS)] * size if objective == "nsp" else [place // 2 for place in range(size)]
        yield "\n".join(LETTERS[kind](one) for kind, one in zip(kinds, sentences[first:], strict=False))


def check_learns(case: Case, folder: Path) -> None:
    """Trains on folder/shards and compares each term's held-out loss with the entropy of what it predicts."""
    held_out = train(folder, *case.overrides, f"--config.steps={case.steps}")
    for term in case.terms:
        loss, entropy = held_out[f"eval_{term}_loss"], truth_entropy(folder / "shards", term)
        print(f"{term}: held-out loss {loss:.3f}, entropy {entropy:.3f}, {held_out['seconds']} s")
        assert loss < entropy - NATS, f"{term} reached {loss:.3f} nats, the entropy is {entropy:.3f}"


def train(folder: Path, *overrides: str) -> dict[str, float]:
    """The last line of metrics and the seconds of a run of the tiny recipe, in a process with a single device."""
    arguments = [
        "--config=configs/bert_tiny.py",
        f"--workdir={folder / 'run'}",
        f"--config.data.train={folder / 'shards'}",
        "--config.batch_size=32",
        "--config.model.dropout=0.0",
        "--config.model.initializer_range=0.08",  # 1/sqrt(D): BERT's 0.02 is for wider models, and learns later here
        "--config.optimizer.learning_rate=2e-3",
        "--config.optimizer.warmup_steps=50",
        f"--config.eval.max_rows={ROWS}",
        *overrides,
    ]
    environment = dict(os.environ, XLA_FLAGS="")
    command = [sys.executable, "-m", "bert_jax.pretrain", *arguments]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return metrics.read_metrics(folder / "run")[-1] | {"seconds": json.loads(ended.stdout)["seconds"]}


def truth_entropy(shards: Path, term: str) -> float:
    """Of what a term predicts in the held-out rows, in nats."""
    dataset = open_dataset(shards, "eval")
    loader = PretrainingLoader(dataset, dataset.vocabulary(), batch_size=1, seed=EVALUATION_SEED)
    truths = []
    for batch in loader.evaluation_batches(256, ROWS):
        if term == "nsp":
            truths.append(batch.next_sentence_label[batch.next_sentence_weight > 0])
        elif term == "lm":
            same = (batch.sequence_ids[:, 1:] == batch.sequence_ids[:, :-1]) & (batch.sequence_ids[:, 1:] > 0)
            truths.append(np.asarray(unmasked(batch))[:, 1:][same])
        else:
            truths.append(batch.masked_ids[batch.masked_weights > 0])
    counts = np.bincount(np.concatenate(truths))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
