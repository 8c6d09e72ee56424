"""What random models answer from Python on the devices of this process; `python model_answers.py MODELS` prints it."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from random_checkpoints import PRETRAINING, odd_config, random_checkpoint

import bert_jax
from bert_jax.interop import export
from bert_jax.model.heads.config import Heads

CLASSES = {"name": "moods", "kind": "classification", "labels": ["glad", "sad", "so so"], "max_length": 16}
TEXTS = ["the cat sat", "a dog", "un want able river on the mat . the dog", "mat"]
ROWS = [{"text": text, "label": label} for text, label in zip(TEXTS, ["sad", "glad", "glad", "so so"], strict=True)]


def write_models(folder: Path) -> None:
    """Writes a masked language model to folder/lm and a classifier to folder/moods."""
    language_model = random_checkpoint(folder / "vocabulary", odd_config(), PRETRAINING, origin="a language model")
    export.write(language_model, folder / "lm")
    heads = Heads(pooler=True, classes=3)
    classifier = random_checkpoint(folder / "words", odd_config(), heads, task=CLASSES, origin="a classifier")
    export.write(classifier, folder / "moods")


def answers(models: Path) -> dict[str, Any]:
    """Vectors, masked tokens, predictions, metrics and the outputs of StableHLO programs that are exported here."""
    language_model, classifier = bert_jax.load(models / "lm"), bert_jax.load(models / "moods")
    rows = {
        "input_ids": np.array([[2, 5, 6, 7, 3], [2, 8, 3, 0, 0]], np.int32),
        "attention_mask": np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.int32),
        "segment_ids": np.zeros((2, 5), np.int32),
    }
    with tempfile.TemporaryDirectory() as scratch:
        classifier.save(Path(scratch) / "programs", format="stablehlo")
        program = jax.export.deserialize(bytearray((Path(scratch) / "programs" / "predictions.stablehlo").read_bytes()))
        outputs = jax.jit(program.call)(dict(classifier.loaded.params), rows)
    return {
        "vectors": language_model.encode(TEXTS).tolist(),
        "filled": [filled.masks for filled in language_model.fill_mask([f"{text} [MASK]" for text in TEXTS])],
        "predictions": classifier.predict(TEXTS, all_scores=True, compute_dtype="float32"),
        "metrics": classifier.evaluate(ROWS, text="text", label="label", compute_dtype="float32"),
        "programs": {name: np.asarray(value).tolist() for name, value in outputs.items()},
    }


if __name__ == "__main__":
    print(json.dumps(answers(Path(sys.argv[1]))))
