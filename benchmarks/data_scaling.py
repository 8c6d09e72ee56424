"""Measures how the parts of a data-preparation job scale: reading by many processes, and text that is added later.

    python -m benchmarks.data_scaling

Each result is one JSON line:

  data_prep_readers  seconds of `build_examples --part all/8` with 8 processes, which read their own files, from an
                     emulated slow source (0.1 MB/s for each open file, so that waiting takes nearly all of the time);
                     the peer is the same command with one process. The shards are compared, and must be equal
  data_prep_append   CPU seconds of adding 10% more text to an output (--part +1, then merge_shards), with one worker;
                     the peer is one job on all of the text
  data_prep_dump     seconds of `build_examples` on a dump of a wiki (the text with links, templates and references
                     around its words) with --workers; the peer is one worker. The shards are compared, too

The first takes 9 minutes, nearly all of them waiting, so other work on the machine matters little; --reader_seconds
changes that. The second takes a few minutes of CPU time. How much faster a job on 300 MB of text is with two workers,
and with which power its time grows with the text, is measured by `python -m benchmarks.data_prep --scaling`. The text
is Wikipedia from BERT_JAX_DATA (pretrain/wiki_en_*.txt.xz), or --text.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import emit, shared_data
from benchmarks.corpus import write_dump, write_mixture
from benchmarks.data_prep import WIKIPEDIA
from benchmarks.data_prep_runs import MB, bert_jax_command, load_average, timed, variables
from benchmarks.slow_source import RATE
from bert_jax.data.manifest import read_manifest
from data_prep import readers

ADDED = 0.1  # of the text that an output has been made from


def slow_readers(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measures --part all/N from a slow source with one process and with N."""
    paths = readers.expand(arguments.text)
    text = folder / "slow"
    text.mkdir()
    sizes = [
        write_mixture(paths, arguments.source_mb_s * arguments.reader_seconds, text / f"{number}.txt")
        for number in range(arguments.readers)
    ]
    seconds: dict[int, float] = {}
    shards: list[Any] = []
    os.environ[RATE] = str(arguments.source_mb_s)
    try:
        for processes in (arguments.readers, 1):
            output = folder / "read"
            command = bert_jax_command(text / "*.txt", output, arguments, processes)
            command[2:4] = ["benchmarks.slow_source"]  # instead of bert_jax build-examples
            seconds[processes] = timed([[*command, f"--part=all/{arguments.readers}"]], folder)
            shards.append(read_manifest(output)["shards"])
            shutil.rmtree(output)
    finally:
        del os.environ[RATE]
    _check_equal(shards)
    details = {
        "readers": arguments.readers,
        "source_mb_s": arguments.source_mb_s,
        "text_mb": round(sum(sizes) / MB, 1),
        "load_average": load_average(),
    }
    peer = "the same with one process"
    return emit("data_prep_readers", seconds[arguments.readers], "s", peer, seconds[1], details, lower_is_better=True)


def append(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measures the CPU time of adding text to an output, and of one job on all of the text."""
    paths = readers.expand(arguments.text)
    first, more = folder / "first.txt", folder / "more.txt"
    sizes = [write_mixture(paths, arguments.append_mb, first), write_mixture(paths, ADDED * arguments.append_mb, more)]
    outputs = {name: folder / name for name in ("base", "added", "both", "rebuilt")}
    base = cpu_seconds(bert_jax_command(first, outputs["base"], arguments, 1))
    added = cpu_seconds([*bert_jax_command(more, outputs["added"], arguments, 1), "--part=+1"])
    inputs = f"--input={outputs['base']},{outputs['added']}"
    merged = cpu_seconds([sys.executable, "-m", "bert_jax", "merge-shards", inputs, f"--output={outputs['both']}"])
    rebuilt = cpu_seconds(bert_jax_command(f"{first},{more}", outputs["rebuilt"], arguments, 1))
    details = {
        "text_mb": [round(size / MB, 1) for size in sizes],
        "base": round(base, 2),
        "added": round(added, 2),
        "merged": round(merged, 2),
        "share_of_a_rebuild": round((added + merged) / rebuilt, 4),
        "load_average": load_average(),
    }
    value = added + merged
    return emit("data_prep_append", value, "CPU s", "one job on all text", rebuilt, details, lower_is_better=True)


def dump(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measures a job on a dump of a wiki with one worker and with several."""
    text = folder / "wiki.xml.bz2"
    size = write_dump(readers.expand(arguments.text), arguments.dump_mb, text)
    seconds: dict[int, float] = {}
    shards: list[Any] = []
    for workers in (1, arguments.workers):
        output = folder / "from_dump"
        seconds[workers] = timed([bert_jax_command(text, output, arguments, workers)], folder)
        shards.append(read_manifest(output)["shards"])
        shutil.rmtree(output)
    _check_equal(shards)
    details = {"workers": arguments.workers, "markup_mb": round(size / MB, 1), "load_average": load_average()}
    value = seconds[arguments.workers]
    return emit("data_prep_dump", value, "s", "the same with one worker", seconds[1], details, lower_is_better=True)


def _check_equal(shards: Sequence[Any]) -> None:
    if any(each != shards[0] for each in shards):
        raise AssertionError("the shards differ between one process and several")


def cpu_seconds(command: Sequence[str]) -> float:
    """The CPU seconds of a command and of all processes that it waited for. Raises CalledProcessError if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, env=variables(), stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


CLAIMS = {"readers": slow_readers, "append": append, "dump": dump}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.data_scaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = shared_data()
    add = parser.add_argument
    add("--claims", nargs="+", choices=CLAIMS, default=list(CLAIMS), help="default: all")
    add("--text", default=data and str(data / WIKIPEDIA), help="files or globs, separated by commas")
    add("--vocabulary", default=data and data / "vocab" / "bert-base-uncased.txt", type=Path, help="a vocab.txt")
    add("--readers", type=int, default=8, help="files and processes; default 8")
    add("--source_mb_s", type=float, default=0.1, help="MB a second of each open file; default 0.1")
    add("--reader_seconds", type=float, default=60.0, help="how long a file takes to arrive; default 60")
    add("--append_mb", type=float, default=300.0, help="MB of the text to which 10%% are added; default 300")
    add("--dump_mb", type=float, default=30.0, help="MB of the markup of the dump; default 30")
    add("--workers", type=int, default=2, help="processes for the dump; default 2")
    add("--seq_len", type=int, default=128)
    add("--masking", choices=["static", "dynamic"], default="dynamic")
    arguments = parser.parse_args()
    if not arguments.text or not arguments.vocabulary:
        parser.exit(0, "skipped: no --text and --vocabulary, and BERT_JAX_DATA is not set\n")
    arguments.vocabulary = arguments.vocabulary.absolute()
    return arguments


def main() -> None:
    arguments = parse()
    folder = Path(tempfile.mkdtemp(prefix="bench_data_scaling_"))
    try:
        for claim in arguments.claims:
            CLAIMS[claim](arguments, folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
