"""Prints the logits of classifiers with the adapters of folders, as peft loads them.

Run with a Python that has torch, transformers and peft:

    python tests/tools/run_peft.py ADAPTERS INPUTS.json [ADAPTERS INPUTS.json ...]

INPUTS.json holds input_ids, attention_mask and token_type_ids. ADAPTERS names its base model in adapter_config.json.
Prints a JSON list per folder: the logits of each row.
"""

import json
import sys

import peft
import torch


def main(*arguments: str) -> None:
    for folder, inputs in zip(arguments[::2], arguments[1::2], strict=True):
        with open(inputs, encoding="utf-8") as file:
            batch = {name: torch.tensor(rows) for name, rows in json.load(file).items()}
        model = peft.AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=3).eval()
        with torch.no_grad():
            print(json.dumps(model(**batch).logits.tolist()))


if __name__ == "__main__":
    main(*sys.argv[1:])
