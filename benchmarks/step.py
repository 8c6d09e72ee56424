"""One training step on this machine's CPU, beside transformers' BertForPreTraining: tokens a second.

    python -m benchmarks.step --size mini --peer_python ENV/bin/python

A step is the trainer's own: forward, backward, clipping, AdamW, in float32 with dropout 0.1, on full rows of random
ids. The peer has the same sizes, dropout, optimizer and clipping. The two take turns, and the medians are compared.
"""

import contextlib
import functools
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common
from bert_jax import command
from bert_jax.config import ModelConfig, ModelOptions, OptimizerConfig
from bert_jax.data.example import Batch, max_predictions
from bert_jax.model import sizes
from bert_jax.model.bert import abstract_params, init_params
from bert_jax.model.runtime import Runtime
from bert_jax.train import optim, steps
from bert_jax.train.host_memory import keep_freed_memory
from bert_jax.train.losses import PretrainingObjective

PEER = "transformers BertForPreTraining, torch, float32"
VOCAB_SIZE = 30522  # bert-base-uncased
SIZES = ("tiny", "mini", "small", "medium", "base", "large")  # the presets that the peer has too
MASK_RATE = 0.15

Turn = Callable[[int], list[float]]  # runs that many steps, gives the seconds of each


def random_batch(config: ModelConfig, batch_size: int, seq_len: int) -> Batch:
    """Full rows of random ids, both segments, 15% of the slots masked."""
    rng = np.random.default_rng(0)
    predictions = max_predictions(seq_len, 1, MASK_RATE)
    shape = (batch_size, seq_len)
    ids = rng.integers(1000, config.vocab_size, shape, dtype=np.int32)
    slots = np.broadcast_to(np.arange(seq_len, dtype=np.int32), shape)
    masked = np.sort(rng.permuted(slots, axis=1)[:, :predictions], axis=1)
    batch = Batch(
        input_ids=ids,
        segment_ids=(slots >= seq_len // 2).astype(np.int32),
        sequence_ids=np.ones_like(ids),
        positions=slots,
        masked_positions=masked,
        masked_ids=np.take_along_axis(ids, masked, axis=1),
        masked_weights=np.ones(masked.shape, np.float32),
        cls_positions=np.zeros((batch_size, 1), np.int32),
        next_sentence_label=rng.integers(0, 2, (batch_size, 1), dtype=np.int32),
        next_sentence_weight=np.ones((batch_size, 1), np.float32),
    )
    return jax.tree.map(jnp.asarray, batch)


def our_turn(config: ModelConfig, runtime: Runtime, batch: Batch) -> Turn:
    """The train step as the trainer jits it, with its state donated from step to step."""
    objective, optimizer_config = PretrainingObjective(), OptimizerConfig()
    optimizer = optim.build(optimizer_config, abstract_params(config, objective.heads))
    plan = steps.Plan(config, runtime, objective, optimizer_config, optimizer)
    key, fraction = jax.random.key(0), jnp.float32(0)
    params = jax.jit(functools.partial(init_params, config, objective.heads))(key)
    state = jax.jit(functools.partial(steps.initial_state, plan))(params)
    train_step = jax.jit(functools.partial(steps.train_step, plan), donate_argnums=0)

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


@contextlib.contextmanager
def peer_turn(
    python: Path, config: ModelConfig, batch_size: int, seq_len: int
) -> Iterator[tuple[Turn, dict[str, Any]]]:
    """The peer in a process of its own that waits while it is not its turn, and its versions."""
    values = {
        "layers": config.layers,
        "width": config.width,
        "heads": config.heads,
        "vocab_size": config.vocab_size,
        "batch_size": batch_size,
        "seq_len": seq_len,
    }
    script = Path(__file__).with_name("step_peer.py")
    line = [str(python), str(script), *(f"--{name}={value}" for name, value in values.items())]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout

        def answer() -> Any:
            assert process.stdout
            if text := process.stdout.readline():
                return json.loads(text)
            raise command.UserError(f"the peer under {python} stopped; its own message is above")

        def run(count: int) -> list[float]:
            assert process.stdin
            print(count, file=process.stdin, flush=True)
            return answer()

        yield run, answer()
        process.stdin.close()


def alternate(turns: Sequence[Turn], rounds: int, count: int, warmup: int) -> list[list[float]]:
    """Seconds of every step of each, `rounds` turns of `count` steps, after `warmup` steps of each."""
    seconds: list[list[float]] = [[] for _ in turns]
    for turn in turns:
        turn(warmup)
    for _ in range(rounds):
        for turn, found in zip(turns, seconds, strict=True):
            found += turn(count)
    return seconds


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("benchmarks.step", __doc__ or "")
    add = parser.add_argument
    add("--size", choices=SIZES, default="mini", help="model size (default: mini)")
    add("--batch_size", type=int, default=16, help="rows (default: 16)")
    add("--seq_len", type=int, default=128, help="slots a row (default: 128)")
    add("--rounds", type=int, default=4, help="turns of each side (default: 4)")
    add("--steps", type=int, default=5, help="steps a turn (default: 5)")
    add("--warmup", type=int, default=2, help="steps of each side before the first turn (default: 2)")
    add("--layer_loop", default="auto", help="scan, unrolled or auto (default: auto)")
    add("--peer_python", type=Path, help="a Python with torch and transformers; without it the peer is left out")
    parser.add_switch("keep_memory", help="keep freed memory, as training does (default: on)")
    flags = parser.parse_args(arguments)
    kept = flags.keep_memory is not False and keep_freed_memory()
    options = ModelOptions(preset=flags.size)
    config = sizes.model_config(options, VOCAB_SIZE)
    runtime = Runtime(layer_loop=flags.layer_loop)
    tokens = flags.batch_size * flags.seq_len
    turns = [our_turn(config, runtime, random_batch(config, flags.batch_size, flags.seq_len))]
    versions: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        if flags.peer_python:
            peer = peer_turn(flags.peer_python, config, flags.batch_size, flags.seq_len)
            turn, found = stack.enter_context(peer)
            turns.append(turn)
            versions = {name: str(value) for name, value in found.items()}
        seconds = alternate(turns, flags.rounds, flags.steps, flags.warmup)
    medians = [statistics.median(found) for found in seconds]
    common.emit(
        f"training step, {flags.size}, CPU, float32",
        tokens / medians[0],
        "tokens/s",
        peer=PEER if flags.peer_python else None,
        peer_value=tokens / medians[1] if flags.peer_python else None,
        settings={
            "batch_size": flags.batch_size,
            "seq_len": flags.seq_len,
            "vocab_size": VOCAB_SIZE,
            "dropout": config.dropout,
            "optimizer": "adamw, clip 1.0",
            "layer_loop": flags.layer_loop,
            "keep_memory": kept,
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "rounds": flags.rounds,
            "steps": flags.steps,
            "seconds": [[round(value, 4) for value in sorted(found)] for found in seconds],
        },
        peer_versions=versions,
    )


if __name__ == "__main__":
    command.run(main)
