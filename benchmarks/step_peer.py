"""The peers of benchmarks/step.py: a training step of BERT in torch, on the GPU if there is one.

All are transformers' BertForPreTraining with the same loss. They differ in the positions at which they compute:

--work=equal   the last layer's queries and feed-forward part, and the heads, at the masked positions and [CLS] only, as
               bert_jax does
--work=head    the vocabulary head at the masked positions, and the last layer at all positions
--work=full    the model as it is, which computes logits and their gradient at all positions

--compiled passes the forward and the backward pass through torch.compile.

benchmarks/step.py starts it under a Python with torch and transformers, which are imported only when they are used. It
reads numbers of steps, one per line, and answers with a JSON list of their seconds, so that the two programs take turns
on one machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import transformers

UNMASKED = -100  # the label of positions that transformers leaves out of the loss


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("layers", "width", "heads", "vocab_size", "batch_size", "seq_len", "predictions"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("dropout", "attention_dropout"):
        parser.add_argument(f"--{name}", type=float, required=True)
    parser.add_argument("--compute_dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--work", choices=("equal", "head", "full"), required=True)
    parser.add_argument("--compiled", action="store_true")
    return parser.parse_args(arguments)


def main() -> None:
    import torch
    import transformers

    arguments = parse()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(arguments).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    inputs = {name: value.to(device) for name, value in random_inputs(arguments).items()}
    compute_loss = loss_of(model, arguments.work)
    if arguments.compiled:
        compute_loss = torch.compile(compute_loss)
    half = arguments.compute_dtype == "bfloat16"

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=half):
            loss = compute_loss(**inputs)
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


def make_model(arguments: argparse.Namespace) -> transformers.BertForPreTraining:
    """A model of these sizes with random parameters, in training mode, with torch's fused attention."""
    import transformers

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
    return transformers.BertForPreTraining(config).train()


def random_inputs(arguments: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Rows of random ids without padding, with two segments and `predictions` masked positions each, in order."""
    import torch

    ids = torch.randint(1000, arguments.vocab_size, (arguments.batch_size, arguments.seq_len))
    segments = torch.zeros_like(ids)
    segments[:, arguments.seq_len // 2 :] = 1
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": segments,
        "masked_positions": torch.rand(ids.shape).topk(arguments.predictions).indices.sort().values,
        "next_sentence_label": torch.randint(0, 2, (arguments.batch_size,)),
    }


def loss_of(model: transformers.BertForPreTraining, work: str) -> Callable[..., torch.Tensor]:
    """The loss of `random_inputs`: the mean over masked positions plus the mean over next-sentence labels."""
    import torch

    def loss_at(
        masked: torch.Tensor,
        pooled: torch.Tensor,
        input_ids: torch.Tensor,
        masked_positions: torch.Tensor,
        next_sentence_label: torch.Tensor,
    ) -> torch.Tensor:
        vocabulary_logits, next_sentence_logits = model.cls(masked, pooled)
        labels = input_ids.gather(1, masked_positions)
        masked_loss = torch.nn.functional.cross_entropy(vocabulary_logits.flatten(0, 1), labels.flatten())
        return masked_loss + torch.nn.functional.cross_entropy(next_sentence_logits, next_sentence_label)

    def equal_work(
        input_ids: torch.Tensor, masked_positions: torch.Tensor, token_type_ids: torch.Tensor, **others: torch.Tensor
    ) -> torch.Tensor:
        hidden = model.bert.embeddings(input_ids=input_ids, token_type_ids=token_type_ids)
        *layers, last = model.bert.encoder.layer
        for layer in layers:
            hidden = layer(hidden)  # rows have no padding, so no attention mask either
        with_cls = torch.nn.functional.pad(masked_positions, (1, 0))
        hidden = layer_at(last, hidden, with_cls)
        pooled = model.bert.pooler(hidden)  # of the first of them, [CLS]
        return loss_at(hidden[:, 1:], pooled, input_ids, masked_positions, others["next_sentence_label"])

    def head_work(
        input_ids: torch.Tensor,
        masked_positions: torch.Tensor,
        next_sentence_label: torch.Tensor,
        **others: torch.Tensor,
    ) -> torch.Tensor:
        encoded = model.bert(input_ids=input_ids, **others)
        masked = rows_at(encoded.last_hidden_state, masked_positions)
        return loss_at(masked, encoded.pooler_output, input_ids, masked_positions, next_sentence_label)

    def full_work(input_ids: torch.Tensor, masked_positions: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        labels = torch.full_like(input_ids, UNMASKED)
        labels = labels.scatter(1, masked_positions, input_ids.gather(1, masked_positions))
        return model(input_ids=input_ids, labels=labels, **others).loss

    losses: dict[str, Callable[..., torch.Tensor]] = {"equal": equal_work, "head": head_work, "full": full_work}
    return losses[work]


def layer_at(
    layer: transformers.models.bert.modeling_bert.BertLayer, hidden: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """A layer's output at some positions alone [rows, positions], of hidden states at all positions of full rows."""
    import torch

    attention = layer.attention.self

    def by_head(values: torch.Tensor) -> torch.Tensor:
        return values.unflatten(-1, (-1, attention.attention_head_size)).transpose(1, 2)

    residual = rows_at(hidden, positions)
    attended = torch.nn.functional.scaled_dot_product_attention(
        by_head(attention.query(residual)),
        by_head(attention.key(hidden)),
        by_head(attention.value(hidden)),
        dropout_p=attention.dropout.p,
    )
    return layer.feed_forward_chunk(layer.attention.output(attended.transpose(1, 2).flatten(2), residual))


def rows_at(hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Hidden states [rows, length, width] at positions [rows, positions]."""
    return hidden.gather(1, positions[:, :, None].expand(-1, -1, hidden.shape[2]))


if __name__ == "__main__":
    main()
