"""Loads an exported folder with transformers and compares its outputs with ours.

Run with a Python that has torch and transformers (see make_golden.py):

    python tests/tools/check_export.py FOLDER OUTPUTS.npz [FOLDER OUTPUTS.npz ...]

OUTPUTS.npz holds input_ids, segment_ids, attention_mask i64[B,T] and, by the names below, what bert_jax gave for them.
Prints one JSON line for each: architecture, missing, unexpected, mismatched (tensor names), differences (largest
absolute, at real tokens), tokens (of the text in the .npz, by AutoTokenizer).
"""

import json
import sys

import numpy as np
import torch
import transformers


def check(folder: str, outputs: str) -> None:
    with np.load(outputs) as file:
        ours = dict(file)
    with open(f"{folder}/config.json", encoding="utf-8") as file:
        architecture = json.load(file)["architectures"][0]
    model, loading = getattr(transformers, architecture).from_pretrained(folder, output_loading_info=True)
    real = ours["attention_mask"] == 1
    with torch.no_grad():
        theirs = model.eval()(
            input_ids=torch.from_numpy(ours["input_ids"]),
            token_type_ids=torch.from_numpy(ours["segment_ids"]),
            attention_mask=torch.from_numpy(ours["attention_mask"]),
            output_hidden_states=True,
        )
    found = {f"hidden_{depth}": state for depth, state in enumerate(theirs.hidden_states)}
    for mine, name in (
        ("pooled", "pooler_output"),
        ("mlm_logits", "prediction_logits"),
        ("mlm_logits", "logits"),
        ("next_sentence_logits", "seq_relationship_logits"),
        ("next_sentence_logits", "logits"),
        ("class_logits", "logits"),
        ("tag_logits", "logits"),
    ):
        if mine in ours and mine not in found and getattr(theirs, name, None) is not None:
            found[mine] = getattr(theirs, name)
    by_token = {name for name in found if name.startswith("hidden_") or name in ("mlm_logits", "tag_logits")}
    differences = {}
    for name, value in found.items():
        difference = np.abs(value.numpy() - ours[name])
        differences[name] = float((difference[real] if name in by_token else difference).max())
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
