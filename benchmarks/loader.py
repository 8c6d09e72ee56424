"""The speed of making batches: permutation, gather, dynamic masking and every field of Batch, on one core.

    python -m benchmarks.loader [--input GLOB] [--tokenizer DIR_OR_VOCAB] [--peer_python PYTHON]
    python -m benchmarks.loader --shards 1000 40000

Prints one JSON line: real tokens (without padding) per second of processor time, which other load on the machine
affects less than wall time, with whole-word masking at T=128. The settings give the same at T=512, with spans at both
lengths, and in batches of 16 rows, and the seconds from opening a folder of 10,000 shards to its first batch (hard
links to the real shards; median of 5, with the pages in memory). Both programs run in one thread. The peer is torch's
DataLoader with transformers' DataCollatorForLanguageModeling on the same rows: one core, no worker process, lists in
memory and token masking, which is its fastest mode. (The settings give its whole-word masking, which never replaces by
random tokens.) It runs in PYTHON, an interpreter with torch and transformers; without --peer_python there is no peer.
--input defaults to the text in data_prep/sample, --tokenizer to a vocabulary trained on it.

--shards measures random rows of outputs that have so many shards of the default size, and the seconds to open each
output. The shards are hard links to REAL_SHARDS files, so all of their pages are in memory.
"""

import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from bert_jax import command_line, errors
from bert_jax.data import shards
from bert_jax.data.manifest import MANIFEST, SHARD_TABLE, ShardTable, read_manifest, read_shard_table
from bert_jax.data.masking.rule import MaskingRule
from bert_jax.data.phases import PhasedLoader
from bert_jax.storage.files import write_atomic, write_json
from data_prep import build, joining, output_files, vocabulary
from data_prep.build_options import BuildOptions
from data_prep.vocabulary import TokenizerOptions

BATCH_SIZE = 256  # the global batch of BERT's recipes (Devlin et al. 2019, appendix A.2)
SMALL_BATCH = 16
MANY_SHARDS = 10_000
REAL_SHARDS = 4  # their links must stay below the 65,000 that a file may have on ext4
LENGTHS = (128, 512)
REPEATS = 5
SECONDS = 1.0  # per repeat
SAMPLE = str(common.REPOSITORY / "data_prep" / "sample" / "books" / "*.txt.xz")
SAMPLE_VOCABULARY = 8000
PEER = Path(__file__).with_name("loader_peer.py")


def measure(input: str, tokenizer: str, peer_python: str) -> dict[str, Any]:
    """Builds the shards, runs both programs, prints the JSON line and returns it."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        vocabulary = Path(tokenizer) if tokenizer else _train(input, work / "vocabulary")
        built = {length: _build(input, vocabulary, work / str(length), length) for length in LENGTHS}
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # the peer inherits it
        ours = {length: _our_rate(directory) for length, directory in built.items()}
        spans = {length: _our_rate(directory, "span") for length, directory in built.items()}
        small = {unit: _our_rate(built[LENGTHS[0]], unit, SMALL_BATCH) for unit in ("word", "span")}
        first_batch = _first_batch_seconds(built[LENGTHS[0]], work / "many")
        peers = {length: _peer_rates(directory, peer_python) for length, directory in built.items() if peer_python}
    first, second = LENGTHS
    settings: dict[str, Any] = {
        "batch_size": BATCH_SIZE,
        "seq_len": first,
        "masking": "dynamic, whole words (span: spans), rate 0.15",
        "input": "data_prep/sample" if input == SAMPLE else Path(input).name,
        "repeats": f"median of {REPEATS} x {SECONDS:g} s",
        f"value_at_{second}": round(ours[second]),
        **{f"span_at_{length}": round(rate) for length, rate in spans.items()},
        **{f"{unit}_of_{SMALL_BATCH}_rows_at_{first}": round(rate) for unit, rate in small.items()},
        f"first_batch_seconds_of_{MANY_SHARDS}_shards": round(first_batch, 3),
    }
    for length, rates in peers.items():
        settings |= {f"peer_{unit}_at_{length}": round(rates[unit]) for unit in ("token", "word")}
    return common.emit(
        "loader",
        ours[first],
        "real tokens/s of one core's time",
        "torch DataLoader + transformers DataCollatorForLanguageModeling" if peers else None,
        peers[first]["token"] if peers else None,
        settings,
        peers[first]["versions"] if peers else None,
    )


def _train(input: str, directory: Path) -> Path:
    vocabulary.train(
        TokenizerOptions(input, directory, vocab_size=SAMPLE_VOCABULARY, lowercase=True, strip_accents=True)
    )
    return directory


def _build(input: str, tokenizer: Path, directory: Path, seq_len: int) -> Path:
    build.build(BuildOptions(input, tokenizer, directory, seq_len, mask_unit="word", workers=1))
    return directory


def _our_rate(directory: Path, unit: str = "word", batch_size: int = BATCH_SIZE) -> float:
    dataset = shards.open_dataset(directory, "train")
    dataset.masking = MaskingRule(unit)
    loader = PhasedLoader.single(dataset, dataset.vocabulary(), batch_size=batch_size, seed=0)
    rates, step = [], 0
    for repeat in range(REPEATS + 1):
        tokens, began = 0, time.process_time()
        while (seconds := time.process_time() - began) < SECONDS:
            tokens += int(np.count_nonzero(loader.batch(step).sequence_ids))
            step += 1
        if repeat:  # the first repeat maps the shards and fills the caches
            rates.append(tokens / seconds)
    return statistics.median(rates)


def many_shards(directory: Path, many: Path, count: int = MANY_SHARDS) -> Path:
    """Creates a folder of `count` training shards, hard links to those of `directory`, without held-out rows."""
    manifest = read_manifest(directory)
    real = read_shard_table(directory, manifest).part("train")
    links = real.select(np.arange(count) % len(real))
    table = dataclasses.replace(links, names=np.array([f"train/shard-{i:05d}.arrow" for i in range(count)]))
    (many / "train").mkdir(parents=True)
    for old, new in zip(links.names, table.names, strict=True):
        os.link(directory / old, many / new)
    return _seal(directory, many, manifest, table)


def _seal(directory: Path, output: Path, manifest: dict[str, Any], table: ShardTable) -> Path:
    """Writes the table and the manifest of an output that has the rows and the tokenizer of `directory`."""
    content = table.encode()
    manifest["parts"]["train"]["rows"], manifest["parts"]["eval"]["rows"] = int(table.rows.sum()), 0
    manifest["shards"] = table.summary(content)
    write_atomic(output / SHARD_TABLE, content)
    write_json(output / MANIFEST, manifest)
    shutil.copytree(directory / "tokenizer", output / "tokenizer")
    return output


def _first_batch_seconds(directory: Path, many: Path) -> float:
    """The median seconds to open a folder of MANY_SHARDS shards and to make one batch."""
    many_shards(directory, many)
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        dataset = shards.open_dataset(many, "train")
        PhasedLoader.single(dataset, dataset.vocabulary(), batch_size=BATCH_SIZE, seed=0).batch(0)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def measure_shards(input: str, tokenizer: str, counts: Sequence[int]) -> dict[str, Any]:
    """Measures random rows from so many shards of the default size, prints the JSON line and returns it."""
    rates, seconds = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        vocabulary = Path(tokenizer) if tokenizer else _train(input, work / "vocabulary")
        real = _full_shards(_build(input, vocabulary, work / "built", LENGTHS[0]), work / "real")
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        for count in counts:
            many = many_shards(real, work / str(count), count)
            began = time.perf_counter()
            shards.open_dataset(many, "train")
            seconds[str(count)] = round(time.perf_counter() - began, 3)
            rates[str(count)] = round(_our_rate(many))
            shutil.rmtree(many)
    settings: dict[str, Any] = {
        "batch_size": BATCH_SIZE,
        "seq_len": LENGTHS[0],
        "masking": "dynamic, whole words, rate 0.15",
        "shards": rates,
        "seconds_to_open": seconds,
        "megabytes_of_a_shard": round(joining.TARGET_BYTES / 1e6, 1),
        "repeats": f"median of {REPEATS} x {SECONDS:g} s",
    }
    return common.emit(
        "loader of many shards", rates[str(counts[-1])], "real tokens/s of one core's time", None, None, settings, None
    )


def _full_shards(directory: Path, output: Path) -> Path:
    """Writes REAL_SHARDS shards of the default size with random rows of another output."""
    dataset, generator = shards.open_dataset(directory, "train"), np.random.default_rng(0)
    row_bytes = sum(column.nbytes for column in dataset.gather(np.zeros(1, np.int64)) if column is not None)
    count = joining.TARGET_BYTES // row_bytes
    (output / "train").mkdir(parents=True)
    entries = []
    for number in range(REAL_SHARDS):
        rows = dataset.gather(generator.integers(0, dataset.rows, count))
        entries.append(output_files.write("arrow", output, f"train/shard-{number:05d}", rows))
    return _seal(directory, output, read_manifest(directory), ShardTable.of_entries(entries))


def _peer_rates(directory: Path, python: str) -> dict[str, Any]:
    """The rates of the peer by masking unit, and its versions."""
    dataset = shards.open_dataset(directory, "train")
    rows = dataset.gather(np.arange(dataset.rows))
    file = directory / "rows.npz"
    np.savez(
        file,
        input_ids=rows.input_ids,
        lengths=rows.sequence_lengths[:, 0],
        first_lengths=rows.first_segment_lengths[:, 0],
        labels=rows.next_sentence_labels[:, 0],
        continuation=dataset.vocabulary().continuation,
    )
    arguments = [python, str(PEER), str(file), str(directory / "tokenizer"), str(BATCH_SIZE), str(REPEATS)]
    ran = subprocess.run(
        arguments, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if ran.returncode:
        raise errors.UserError(f"--peer_python {python}: {ran.stderr.strip().splitlines()[-1]}")
    return json.loads(ran.stdout.splitlines()[-1])


def main(arguments: Sequence[str]) -> None:
    parser = command_line.Parser("python -m benchmarks.loader", __doc__)
    parser.add_argument("--input", default=SAMPLE, help="text to build the rows from (default: data_prep/sample)")
    parser.add_argument("--tokenizer", default="", help="the tokenizer (default: one trained on the text)")
    parser.add_argument("--peer_python", default="", help="an interpreter with torch and transformers (default: none)")
    parser.add_argument(
        "--shards", type=int, nargs="+", default=[], metavar="N", help="measure outputs of so many shards instead"
    )
    options = parser.parse_args(arguments)
    if options.shards:
        measure_shards(options.input, options.tokenizer, options.shards)
        return
    measure(options.input, options.tokenizer, options.peer_python)


if __name__ == "__main__":
    command_line.run(main)
