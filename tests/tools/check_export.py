"""Loads an exported folder with transformers and compares its outputs with those of bert_jax.

Run with a Python that has torch and transformers (see make_golden.py):

    python tests/tools/check_export.py FOLDER OUTPUTS.npz [FOLDER OUTPUTS.npz ...]

OUTPUTS.npz holds input_ids, attention_mask and, for a model with segments, segment_ids, i64[B,T]; the outputs of
bert_jax for them by the names below; and a text. For a multiple-choice model the rows are the choices of one question.
Prints one JSON line per folder: architecture; missing, unexpected and mismatched tensor names; differences (the largest
absolute ones, at real tokens); and tokens (of the text in the .npz, by AutoTokenizer).
"""

import json
import sys

import numpy as np
import torch
import transformers

# Names in bert_jax and in transformers; the first pair that both have is compared.
OUTPUTS = (
    ("pooled", "pooler_output"),
    ("vocabulary_logits", "prediction_logits"),
    ("vocabulary_logits", "logits"),
    ("next_sentence_logits", "seq_relationship_logits"),
    ("next_sentence_logits", "logits"),
    ("class_logits", "logits"),
    ("choice_logits", "logits"),
    ("tag_logits", "logits"),
    ("start_logits", "start_logits"),
    ("end_logits", "end_logits"),
)
BY_TOKEN = ("hidden_", "vocabulary_logits", "tag_logits", "start_logits", "end_logits")


def check(folder: str, outputs: str) -> None:
    with np.load(outputs) as file:
        expected = dict(file)
    with open(f"{folder}/config.json", encoding="utf-8") as file:
        architecture = json.load(file)["architectures"][0]
    reference = getattr(transformers, architecture)
    # A narrower dtype of the file is widened, so that outputs are float32.
    model, loading = reference.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    real = expected["attention_mask"] == 1
    inputs = {"input_ids": expected["input_ids"], "attention_mask": expected["attention_mask"]}
    if "segment_ids" in expected:
        inputs["token_type_ids"] = expected["segment_ids"]
    if "choice_logits" in expected:
        inputs = {name: value[None] for name, value in inputs.items()}
    with torch.no_grad():
        tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
        model_outputs = model.eval()(**tensors, output_hidden_states=True)
    found = {f"hidden_{depth}": state for depth, state in enumerate(model_outputs.hidden_states)}
    for own_name, name in OUTPUTS:
        if own_name in expected and own_name not in found and getattr(model_outputs, name, None) is not None:
            found[own_name] = getattr(model_outputs, name)
    differences = {}
    for name, value in found.items():
        difference = np.abs(value.numpy().reshape(expected[name].shape) - expected[name])
        differences[name] = float((difference[real] if name.startswith(BY_TOKEN) else difference).max())
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(str(expected["text"]))["input_ids"]
    report = {
        "architecture": architecture,
        "missing": sorted(loading["missing_keys"]),
        "unexpected": sorted(loading["unexpected_keys"]),
        "mismatched": sorted(map(str, loading["mismatched_keys"])),
        "differences": differences,
        "tokens": tokens,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for pair in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        check(*pair)
