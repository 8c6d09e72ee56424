"""The peer of benchmarks/step.py: a training step of transformers' BertForPreTraining, on the GPU if there is one.

benchmarks/step.py starts it under a Python that has torch and transformers, which are imported only when they are
used. It reads a number of steps from each line of its input and answers with a JSON list of their seconds, so that the
two programs take turns on one machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def main() -> None:
    import torch
    import transformers

    parser = argparse.ArgumentParser()
    for name in ("layers", "width", "heads", "vocab_size", "batch_size", "seq_len"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("dropout", "attention_dropout"):
        parser.add_argument(f"--{name}", type=float, required=True)
    parser.add_argument("--compute_dtype", choices=("float32", "bfloat16"), required=True)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=arguments.vocab_size,
        hidden_size=arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        intermediate_size=4 * arguments.width,
        hidden_dropout_prob=arguments.dropout,
        attention_probs_dropout_prob=arguments.attention_dropout,
        attn_implementation="sdpa",
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.BertForPreTraining(config).train().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    inputs = {name: value.to(device) for name, value in random_inputs(arguments).items()}
    half = arguments.compute_dtype == "bfloat16"

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=half):
            loss = model(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()

    versions = {"peer torch": torch.__version__, "peer transformers": transformers.__version__}
    print(json.dumps(versions | {"peer device": device, "peer threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        print(json.dumps(seconds), flush=True)


def random_inputs(arguments: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Random rows without padding; 15% of the positions have a label."""
    import torch

    ids = torch.randint(1000, arguments.vocab_size, (arguments.batch_size, arguments.seq_len))
    segments = torch.zeros_like(ids)
    segments[:, arguments.seq_len // 2 :] = 1
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": segments,
        "labels": torch.where(torch.rand(ids.shape) < 0.15, ids, -100),
        "next_sentence_label": torch.randint(0, 2, (arguments.batch_size,)),
    }


if __name__ == "__main__":
    main()
