"""Tokens per second of a training step on one device, compared with the same step in torch.

    python -m benchmarks.step --size mini --peer_python PYTHON
    python -m benchmarks.step --size base --seq_len 512 --batch_size 64 --attention_dropout 0 --peer_python PYTHON

The step is the trainer's: forward, backward, clipping and AdamW, on full rows of random ids. It runs in float32 on a
CPU; on an accelerator, in bfloat16 with float32 parameters (the peers by autocast, with torch's fused attention).

The peers are transformers' BertForPreTraining with the same sizes, dropout, optimizer, clipping and number of masked
positions. bert_jax computes the last layer's queries and feed-forward part, and the heads, only at the masked positions
and [CLS]. transformers computes them at all positions, which is more work for the same loss. So there are several
peers, with a JSON line each. Peers with equal work come first:

equal   transformers' parameters and layers, with the last layer and the heads at those positions, too
head    transformers' model, which gathers the masked positions before the vocabulary head, as users may do easily
full    transformers' model as it is

and equal_compiled, head_compiled and full_compiled: the same under torch.compile, which needs a C++ compiler on a CPU.

A peer takes turns with bert_jax in its own process, which ends before the next peer starts. Their medians are compared.
On an accelerator, a line also gives the model FLOPs utilization and the peak of device memory.
"""

import argparse
import functools
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common
from benchmarks.turns import Turn, alternate, leave_gpu_memory, peer_turn
from bert_jax import command_line
from bert_jax.config import AdamW, ModelConfig, ModelOptions
from bert_jax.data.example import Batch, max_predictions
from bert_jax.host import keep_freed_memory
from bert_jax.model import sizes
from bert_jax.model.attention import layer
from bert_jax.model.bert import abstract_params, init_params
from bert_jax.model.runtime import Runtime
from bert_jax.train import metric_accumulator, optim
from bert_jax.train import step as step_lib
from bert_jax.train.objectives import MaskedLMObjective

VOCAB_SIZE = 30522  # bert-base-uncased
SIZES = ("tiny", "mini", "small", "medium", "base", "large")  # the presets that the peer supports
MASK_RATE = 0.15
# Descriptions of the peers, in the order in which they are measured: equal work first.
WORK = {
    "equal": "last layer and heads at the masked positions and [CLS] as here",
    "head": "vocabulary head at the masked positions as here, last layer at all",
    "full": "as it is, vocabulary head at all positions",
}
PEERS = {
    work + suffix: f"transformers BertForPreTraining, {where}{compiled}"
    for work, where in WORK.items()
    for suffix, compiled in (("", ""), ("_compiled", ", torch.compile"))
}


def random_batch(config: ModelConfig, batch_size: int, seq_len: int) -> Batch:
    """Full rows of random ids with two segments and 15% of the positions masked."""
    rng = np.random.default_rng(0)
    predictions = max_predictions(seq_len, 1, MASK_RATE)
    shape = (batch_size, seq_len)
    ids = rng.integers(1000, config.vocab_size, shape, dtype=np.int32)
    positions = np.broadcast_to(np.arange(seq_len, dtype=np.int32), shape)
    masked = np.sort(rng.permuted(positions, axis=1)[:, :predictions], axis=1)
    batch = Batch(
        input_ids=ids,
        segment_ids=(positions >= seq_len // 2).astype(np.int32),
        sequence_ids=np.ones_like(ids),
        positions=positions,
        masked_positions=masked,
        masked_ids=np.take_along_axis(ids, masked, axis=1),
        masked_weights=np.ones(masked.shape, np.float32),
        cls_positions=np.zeros((batch_size, 1), np.int32),
        next_sentence_label=rng.integers(0, 2, (batch_size, 1), dtype=np.int32),
        next_sentence_weight=np.ones((batch_size, 1), np.float32),
    )
    return jax.tree.map(jnp.asarray, batch)


def our_turn(config: ModelConfig, runtime: Runtime, batch: Batch) -> Turn:
    """The train step as the trainer compiles it. A step donates its state to the next step."""
    objective, optimizer_config = MaskedLMObjective(), AdamW()
    optimizer = optim.build(optimizer_config, abstract_params(config, objective.heads))
    plan = step_lib.Plan(config, runtime, objective, optimizer_config, optimizer)
    key, fraction = jax.random.key(0), jnp.float32(0)
    params = jax.jit(functools.partial(init_params, config, objective.heads))(key)
    state = jax.jit(functools.partial(step_lib.initial_state, plan))(params)
    train_step = jax.jit(functools.partial(step_lib.train_step, plan), donate_argnums=0)

    def run(count: int) -> list[float]:
        nonlocal state
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            state, _ = train_step(state, batch, fraction, key)
            jax.block_until_ready(state)
            seconds.append(time.perf_counter() - start)
        return seconds

    return run


def peer_line(python: Path, peer: str, config: ModelConfig, compute_dtype: str, batch: Batch) -> list[str]:
    """The command that starts one of PEERS on batches of the same sizes."""
    work, _, compiled = peer.partition("_")
    values = {
        "layers": config.layers,
        "width": config.width,
        "heads": config.heads,
        "vocab_size": config.vocab_size,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "compute_dtype": compute_dtype,
        "batch_size": batch.input_ids.shape[0],
        "seq_len": batch.input_ids.shape[1],
        "predictions": batch.masked_positions.shape[1],
        "work": work,
    }
    script = Path(__file__).with_name("step_peer.py")
    line = [str(python), str(script), *(f"--{name}={value}" for name, value in values.items())]
    return [*line, "--compiled"] if compiled else line


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.Parser("python -m benchmarks.step", __doc__ or "")
    add = parser.add_argument
    add("--size", choices=SIZES, default="mini", help="model size (default: mini)")
    add("--batch_size", type=int, default=16, help="rows (default: 16)")
    add("--seq_len", type=int, default=128, help="positions per row (default: 128)")
    add("--rounds", type=int, default=4, help="turns of each program (default: 4)")
    add("--steps", type=int, default=5, help="steps per turn (default: 5)")
    add("--warmup", type=int, default=2, help="warmup steps of each program (default: 2)")
    add("--layer_loop", default="auto", help="scan, unrolled or auto (default: auto)")
    add("--attention", default="auto", help="a kernel of model.attention, or auto (default: auto)")
    add("--remat", default="none", help="none, attention, matmuls or layer (default: none)")
    add("--dropout", type=float, default=0.1, help="dropout of hidden states (default: 0.1)")
    add("--attention_dropout", type=float, help="attention dropout; cudnn and splash need 0 (default: as --dropout)")
    add("--compute_dtype", help="float32 or bfloat16 (default: float32 on a CPU, else bfloat16)")
    add("--peer_python", type=Path, help="a Python with torch and transformers; without it the peers are omitted")
    add("--peers", nargs="+", choices=PEERS, default=[*PEERS], help="the peers to measure (default: all)")
    parser.add_switch(
        "keep_memory", help="keep freed memory on a CPU, as training does; in both programs (default: on)"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    flags = parse(arguments)
    kept = flags.keep_memory is not False and keep_freed_memory()
    leave_gpu_memory()
    options = ModelOptions(preset=flags.size, dropout=flags.dropout, attention_dropout=flags.attention_dropout)
    config = sizes.model_config(options, VOCAB_SIZE)
    on_cpu = jax.default_backend() == "cpu"
    dtype = flags.compute_dtype or ("float32" if on_cpu else "bfloat16")
    runtime = Runtime(dtype, layer_loop=flags.layer_loop, attention=flags.attention, remat=flags.remat)
    batch = random_batch(config, flags.batch_size, flags.seq_len)
    ours = our_turn(config, runtime, batch)
    tokens = flags.batch_size * flags.seq_len
    for peer in [name for name in PEERS if name in flags.peers] if flags.peer_python else [None]:
        line = peer_line(flags.peer_python, peer, config, dtype, batch) if peer else None
        seconds, versions = in_turns(flags, ours, line, kept)
        rates = [tokens / statistics.median(found) for found in seconds]
        common.emit(
            f"training step, {flags.size}, {'CPU' if on_cpu else jax.devices()[0].device_kind}, {dtype}",
            rates[0],
            "tokens/s",
            peer=f"{PEERS[peer]}, torch, {dtype}" if peer else None,
            peer_value=rates[1] if peer else None,
            settings=settings(flags, config, runtime, kept, batch.masked_positions.shape[1], seconds),
            peer_versions=versions,
        )


def in_turns(
    flags: argparse.Namespace, ours: Turn, line: Sequence[str] | None, kept: bool
) -> tuple[list[list[float]], dict[str, str]]:
    """The seconds of the steps of bert_jax and of the peer that the line starts, and the peer's versions.

    Without a line bert_jax runs alone. With `kept`, the peer keeps freed memory, too.
    """
    if line is None:
        return alternate([ours], flags.rounds, flags.steps, flags.warmup), {}
    with peer_turn(line, kept) as (turn, versions):
        seconds = alternate([ours, turn], flags.rounds, flags.steps, flags.warmup)
    return seconds, {name: str(value) for name, value in versions.items()}


def settings(
    flags: argparse.Namespace,
    config: ModelConfig,
    runtime: Runtime,
    kept: bool,
    predictions: int,
    seconds: Sequence[Sequence[float]],
) -> dict[str, Any]:
    """The settings of the JSON line, including utilization and peak memory, which depend on the device."""
    peak = metric_accumulator.peak_flops()
    read = predictions + 1  # the last layer is computed at the masked positions and at [CLS]
    flops = metric_accumulator.training_flops(config, flags.batch_size, flags.seq_len, predictions, read=read)
    mfu = [round(flops / statistics.median(found) / peak, 4) for found in seconds] if peak else None
    return {
        "batch_size": flags.batch_size,
        "seq_len": flags.seq_len,
        "predictions": predictions,
        "vocab_size": VOCAB_SIZE,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "attention": layer.kernels(config, runtime, flags.seq_len),
        "optimizer": "adamw, clip 1.0",
        "layer_loop": flags.layer_loop,
        "remat": flags.remat,
        "keep_memory": kept,  # in both programs
        "mfu": mfu,
        "peak_memory_gb": round(metric_accumulator.peak_memory_gb(), 3),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "rounds": flags.rounds,
        "steps": flags.steps,
        "seconds": [[round(value, 4) for value in sorted(found)] for found in seconds],
    }


if __name__ == "__main__":
    command_line.run(main)
