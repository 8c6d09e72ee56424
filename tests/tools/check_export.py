"""Loads an exported folder with transformers and compares its outputs with ours.

Run with a Python that has torch and transformers (see make_golden.py):

    python tests/tools/check_export.py FOLDER OUTPUTS.npz [FOLDER OUTPUTS.npz ...]

OUTPUTS.npz holds input_ids, attention_mask and, of a model with segments, segment_ids, i64[B,T]; by the names below,
what bert_jax gave for them; and a text. Of a model for multiple choice the rows are one question's choices.
Prints one JSON line for each: architecture, missing, unexpected, mismatched (tensor names), differences (largest
absolute, at real tokens), tokens (of the text in the .npz, by AutoTokenizer).
"""

import json
import sys

import numpy as np
import torch
import transformers

# Ours, theirs: the first that both have.
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
        ours = dict(file)
    with open(f"{folder}/config.json", encoding="utf-8") as file:
        architecture = json.load(file)["architectures"][0]
    model, loading = getattr(transformers, architecture).from_pretrained(folder, output_loading_info=True)
    real = ours["attention_mask"] == 1
    inputs = {"input_ids": ours["input_ids"], "attention_mask": ours["attention_mask"]}
    if "segment_ids" in ours:
        inputs["token_type_ids"] = ours["segment_ids"]
    if "choice_logits" in ours:
        inputs = {name: value[None] for name, value in inputs.items()}
    with torch.no_grad():
        tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
        theirs = model.eval()(**tensors, output_hidden_states=True)
    found = {f"hidden_{depth}": state for depth, state in enumerate(theirs.hidden_states)}
    for mine, name in OUTPUTS:
        if mine in ours and mine not in found and getattr(theirs, name, None) is not None:
            found[mine] = getattr(theirs, name)
    differences = {}
    for name, value in found.items():
        difference = np.abs(value.numpy().reshape(ours[name].shape) - ours[name])
        differences[name] = float((difference[real] if name.startswith(BY_TOKEN) else difference).max())
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(str(ours["text"]))["input_ids"]
    said = {
        "architecture": architecture,
        "missing": sorted(loading["missing_keys"]),
        "unexpected": sorted(loading["unexpected_keys"]),
        "mismatched": sorted(map(str, loading["mismatched_keys"])),
        "differences": differences,
        "tokens": tokens,
    }
    print(json.dumps(said))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for pair in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        check(*pair)
