"""Text to next-sentence rows: our whole job against google-research/bert's script, on the same text in one run.

    python -m benchmarks.data_prep --text TEXT --vocabulary vocab.txt --peer_python ENV/bin/python \\
        --peer_script bert/create_pretraining_data.py

The value is tokens of the text a second of the whole command, start to end, with the files written; the median of
some runs. The peer runs once under tensorflow.compat.v1, in a patched copy, with dupe_factor 1. The text is split to
one sentence a line for both beforehand, as the peer wants it. Memory is the peak, summed over all processes.
"""

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.common import REPOSITORY, PeakMemory, emit, shared_data
from bert_jax import tokenizer as tokenizers
from bert_jax.data.shards import read_manifest
from data_prep import readers
from data_prep.sentences import document_sentences

PEER = "google-research/bert create_pretraining_data.py"


class Timed(NamedTuple):
    seconds: float
    cpu_seconds: float  # of all processes: what a busy machine changes least
    peak_bytes: int
    processes: int


def timed(command: list[str], folder: Path) -> Timed:
    """Runs a command to its end and measures it. Raises CalledProcessError, with what it said, when it fails."""
    with (folder / "log.txt").open("w+") as log:
        started, cpu_before = time.monotonic(), children_cpu()
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment())
        try:
            with PeakMemory(process.pid) as memory:
                status = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
        seconds = time.monotonic() - started
        if status:
            log.seek(0)
            raise subprocess.CalledProcessError(status, command, log.read()[-2000:])
    return Timed(seconds, children_cpu() - cpu_before, memory.peak_bytes, memory.peak_processes)


def children_cpu() -> float:
    """CPU seconds of all child processes that have ended, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(REPOSITORY), "TF_CPP_MIN_LOG_LEVEL": "3"}


def write_sentences(source: str, megabytes: float, target: Path) -> int:
    """Whole documents of some files, one sentence a line, up to so many MB. Returns the sentences."""
    written = sentences = 0
    with target.open("w", encoding="utf-8") as file:
        for path in readers.expand(source):
            for document in readers.documents(path):
                lines = document_sentences(document)
                sentences += len(lines)
                written += file.write("\n".join(lines) + "\n\n")
                if written >= megabytes * 1e6:
                    return sentences
    return sentences


def count_tokens(text: Path, vocabulary: Path) -> int:
    tokenizer = tokenizers.load(vocabulary)
    return sum(len(tokenizer.encode(document)) for document in readers.documents(text))


def our_command(text: Path, vocabulary: Path, output: Path, seq_len: int, workers: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "data_prep.build_examples",
        f"--input={text}",
        f"--tokenizer={vocabulary}",
        f"--output={output}",
        f"--seq_len={seq_len}",
        f"--workers={workers}",
        "--objective=nsp",
        "--masking=static",
    ]


def peer_command(python: Path, script: Path, folder: Path, text: Path, vocabulary: Path, seq_len: int) -> list[str]:
    """Writes a copy of the peer's script that runs under TensorFlow 2, and says how to run it."""
    copies = folder / "peer"
    copies.mkdir()
    for name in (script.name, "tokenization.py"):
        source = (script.parent / name).read_text(encoding="utf-8")
        patched = source.replace("import tensorflow as tf", "import tensorflow.compat.v1 as tf")
        (copies / name).write_text(patched, encoding="utf-8")
    return [
        str(python),
        str(copies / script.name),
        f"--input_file={text}",
        f"--output_file={folder / 'peer.tfrecord'}",
        f"--vocab_file={vocabulary}",
        f"--max_seq_length={seq_len}",
        f"--max_predictions_per_seq={round(0.15 * seq_len)}",
        "--dupe_factor=1",
        "--do_lower_case=True",
    ]


def peer_versions(python: Path) -> dict[str, str]:
    code = "import tensorflow, platform; print(tensorflow.__version__, platform.python_version())"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, env=environment())
    tensorflow, own_python = found.stdout.split()
    return {"peer tensorflow": tensorflow, "peer python": own_python}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.data_prep", description=__doc__.splitlines()[0])
    data = shared_data()
    add = parser.add_argument
    add("--text", default=data and str(data / "pretrain" / "books_en_0.txt.xz"), help="default: in BERT_JAX_DATA")
    add("--vocabulary", default=data and data / "vocab" / "bert-base-uncased.txt", type=Path, help="a vocab.txt")
    add("--megabytes", type=float, default=10.0, help="of text; default 10")
    add("--seq_len", type=int, default=128)
    add("--workers", type=int, default=os.cpu_count() or 1, help="default: one a core")
    add("--repeats", type=int, default=3, help="runs of ours; default 3")
    add("--peer_python", type=Path, help="a Python with TensorFlow; without it the peer is left out")
    add("--peer_script", type=Path, help="create_pretraining_data.py of google-research/bert")
    arguments = parser.parse_args()
    if not arguments.text or not arguments.vocabulary:
        parser.exit(0, "skipped: no --text and --vocabulary, and BERT_JAX_DATA is not set\n")
    return arguments


def main() -> None:
    arguments = parse()
    folder = Path(tempfile.mkdtemp(prefix="bench_data_prep_"))
    try:
        text = folder / "text.txt"
        sentences = write_sentences(arguments.text, arguments.megabytes, text)
        tokens = count_tokens(text, arguments.vocabulary)
        ours = []
        for repeat in range(arguments.repeats):
            output = folder / f"ours_{repeat}"
            vocabulary = arguments.vocabulary.absolute()
            ours.append(timed(our_command(text, vocabulary, output, arguments.seq_len, arguments.workers), folder))
        manifest = read_manifest(output)
        peer = None
        versions: dict[str, str] = {}
        if arguments.peer_python and arguments.peer_script:
            versions = peer_versions(arguments.peer_python)
            script = arguments.peer_script.absolute()
            peer = timed(
                peer_command(arguments.peer_python.absolute(), script, folder, text, vocabulary, arguments.seq_len),
                folder,
            )
        emit(
            name="data_prep_nsp",
            value=tokens / statistics.median(run.seconds for run in ours),
            unit="tokens/s",
            peer=PEER if peer else None,
            peer_value=tokens / peer.seconds if peer else None,
            settings={
                "text": Path(arguments.text).name,
                "text_mb": round(text.stat().st_size / 1e6, 2),
                "sentences": sentences,
                "tokens": tokens,
                "rows": manifest["counts"]["rows"],
                "seq_len": arguments.seq_len,
                "masking": "static",
                "dupe_factor": 1,
                "workers": arguments.workers,
                "seconds": [round(run.seconds, 2) for run in ours],
                "cpu_seconds": [round(run.cpu_seconds, 2) for run in ours],
                "peak_mb": round(max(run.peak_bytes for run in ours) / 1e6),
                "processes": max(run.processes for run in ours),
                "output_mb": round(sum(shard["bytes"] for shard in manifest["shards"]) / 1e6, 2),
                "peer_seconds": round(peer.seconds, 2) if peer else None,
                "peer_cpu_seconds": round(peer.cpu_seconds, 2) if peer else None,
                "peer_peak_mb": round(peer.peak_bytes / 1e6) if peer else None,
                "load_average": [round(load, 2) for load in psutil.getloadavg()],
            },
            peer_versions=versions,
        )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
