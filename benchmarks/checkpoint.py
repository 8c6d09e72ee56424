"""The cost of saving: the time of steps with a checkpoint every 50 steps, compared with steps without one.

    python -m benchmarks.checkpoint [--preset mini] [--pairs 10]

One run of the trainer saves every 100 steps and logs every 50. Of two consecutive intervals of 50 steps, the first
contains a save, from copying the state to its last byte on disk, and the second contains none. The value is the share
of extra time in the first, over the sums of all pairs. The first save of a process is not measured: it compiles the
program that computes fingerprints, which takes a second or two once. Prints one JSON line.
"""

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import common, loader
from bert_jax import command, pretraining
from bert_jax import config as config_lib
from bert_jax.train.compilation_cache import enable_compilation_cache
from bert_jax.train.host_memory import keep_freed_memory
from bert_jax.train.metrics import read_metrics
from data_prep import build_examples, train_tokenizer
from data_prep.build_options import BuildOptions
from data_prep.train_tokenizer import TokenizerOptions

RECIPE = common.REPOSITORY / "configs" / "bert_tiny.py"
VOCAB_SIZE = 30522  # of bert-base-uncased
INTERVAL = 50  # steps
SEQ_LEN = 128


def measure(preset: str, rows: int, pairs: int, input: str) -> dict[str, Any]:
    """Builds shards, trains, prints the JSON line and returns it."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        train_tokenizer.train(TokenizerOptions(input, work / "vocabulary", vocab_size=VOCAB_SIZE, lowercase=True))
        build_examples.build(BuildOptions(input, work / "vocabulary", work / "shards", SEQ_LEN, workers=1))
        overrides = {
            "data.train": work / "shards",
            "model.preset": preset,
            "batch_size": rows,
            "steps": 2 * INTERVAL * (pairs + 2) + 1,  # the end also saves, and is not measured
            "log_every": INTERVAL,
            "checkpoint.every_steps": 2 * INTERVAL,
            "checkpoint.every_minutes": 0.0,
            "checkpoint.keep": 1,
        }
        flags = [f"--config.{name}={value}" for name, value in overrides.items()]
        pretraining.pretrain(config_lib.read_flags(str(RECIPE), flags), work / "run")
        times = {line["step"]: line["time"] for line in read_metrics(work / "run")}
        saved = sum(file.stat().st_size for file in (work / "run" / "checkpoints").rglob("*") if file.is_file())
    starts = [2 * INTERVAL * pair for pair in range(2, pairs + 2)]
    with_save = [times[start + INTERVAL] - times[start] for start in starts]
    without = [times[start + 2 * INTERVAL] - times[start + INTERVAL] for start in starts]
    return common.emit(
        f"checkpoint every {INTERVAL} steps, {preset}, CPU",
        sum(with_save) / sum(without) - 1,
        "share of time",
        None,
        None,
        {
            "batch_size": rows,
            "seq_len": SEQ_LEN,
            "pairs": pairs,
            "checkpoint_mb": round(saved / 1e6, 1),
            "seconds_with": [round(value, 2) for value in with_save],
            "seconds_without": [round(value, 2) for value in without],
            "median_of_pairs": round(statistics.median(a / b - 1 for a, b in zip(with_save, without, strict=True)), 4),
        },
        lower_is_better=True,
    )


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("python -m benchmarks.checkpoint", __doc__ or "")
    parser.add_argument("--preset", default="mini", help="model size (default: mini)")
    parser.add_argument("--batch_size", type=int, default=16, help="rows (default: 16)")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of intervals (default: 10)")
    parser.add_argument(
        "--input", default=loader.SAMPLE, help="text to build the rows from (default: data_prep/sample)"
    )
    flags = parser.parse_args(arguments)
    keep_freed_memory()
    enable_compilation_cache()
    measure(flags.preset, flags.batch_size, flags.pairs, flags.input)


if __name__ == "__main__":
    command.run(main)
