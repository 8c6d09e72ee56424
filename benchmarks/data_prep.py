"""Raw text to next-sentence rows: how fast, how much memory and disk, and how that grows. One JSON line a claim.

    python -m benchmarks.data_prep --peer_python ENV/bin/python --peer_script bert/create_pretraining_data.py
    python -m benchmarks.data_prep --scaling

Text is Wikipedia's from BERT_JAX_DATA (pretrain/wiki_en_*.txt.xz), or --text. The first command prints

  data_prep_nsp_encoder   tokens of the text a second of our whole command, start to end with the files written, against
                          the bare Hugging Face encoder (benchmarks/data_prep_peer.py) on as many threads
  data_prep_nsp_google    the same against create_pretraining_data.py of google-research/bert, once, under
                          tensorflow.compat.v1 in a patched copy, with dupe_factor 1; its text is cut to one sentence a
                          line beforehand, as it wants it; left out without --peer_python

and takes some four minutes on two cores, three of them the second peer's. The second command prepares 50, 200 and
300 MB of Wikipedia, books and talk (always in the same mixture) and prints

  data_prep_memory        the highest peak of memory, summed over all processes (pages they share count in each)
  data_prep_disk          bytes of shards a token of the rows
  data_prep_exponent      of the time, as a power of the text's size, for one worker and for --workers; in its settings
                          also without the seconds that a job on a single page takes, mostly imports of each process
  data_prep_workers       how many times as fast --workers processes are as one, on the longest of the texts; beside it
                          as many jobs of one worker side by side, which share nothing: what the machine's cores give
  data_prep_workers_stored  the same on the first files of --text as they are stored (.xz)

Ours and the peers are held to --workers cores. Nothing else should run on the machine.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from benchmarks.common import REPOSITORY, ProcessTree, emit, shared_data
from benchmarks.corpus import write_mixture, write_sentences
from bert_jax.data.shards import read_manifest
from data_prep import readers

WIKIPEDIA = "pretrain/wiki_en_*.txt.xz"
MIXTURE = f"{WIKIPEDIA},pretrain/books_en_*.txt.xz,pretrain/talk_en.txt.xz"
SCALING_MB = (50.0, 200.0, 300.0)
PAGE_MB = 0.02
MB = 1e6


class Watched(NamedTuple):
    """What a run takes of the machine, by samples, which take a share of the processors themselves."""

    cpu_seconds: float  # of all processes: what a busy machine changes least
    peak_bytes: int
    processes: int

    def told(self) -> dict[str, Any]:
        return {
            "cpu_seconds": round(self.cpu_seconds, 2),
            "peak_mb": round(self.peak_bytes / MB),
            "processes": self.processes,
        }


class Prepared(NamedTuple):
    """A run of ours, timed and not watched, and what it wrote."""

    seconds: float
    counts: Mapping[str, Any]  # of the manifest
    shard_bytes: int

    @property
    def speed(self) -> float:
        """Tokens of the text a second."""
        return self.counts["source_tokens"] / self.seconds

    def told(self) -> dict[str, Any]:
        return {
            "seconds": round(self.seconds, 2),
            "tokens": self.counts["source_tokens"],
            "rows": self.counts["rows"],
            "output_mb": round(self.shard_bytes / MB, 2),
            "bytes_a_token": round(self.shard_bytes / self.counts["tokens"], 3),
        }


def timed(commands: Sequence[Sequence[str]], folder: Path) -> float:
    """Seconds until commands, begun at once, have all ended. Raises CalledProcessError, with what they said."""
    started = time.monotonic()
    with _running(commands, folder) as processes:
        for process in processes:
            process.wait()
        return time.monotonic() - started


def watched(command: Sequence[str], folder: Path) -> tuple[float, Watched]:
    """Runs a command to its end and samples it; also says how many seconds it took beside that."""
    started = time.monotonic()
    with _running([command], folder) as (process,), ProcessTree(process.pid) as tree:
        process.wait()
        seconds = time.monotonic() - started
    return seconds, Watched(tree.cpu_seconds, tree.peak_bytes, tree.peak_processes)


@contextlib.contextmanager
def _running(commands: Sequence[Sequence[str]], folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Commands side by side; none outlives the block, and each must have ended well."""
    with (folder / "log.txt").open("w+") as log:
        processes = [subprocess.Popen(one, cwd=folder, stdout=log, stderr=log, env=variables()) for one in commands]
        try:
            yield processes
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
        for process in processes:
            if process.returncode:
                log.seek(0)
                raise subprocess.CalledProcessError(process.returncode, process.args, log.read()[-2000:])


def variables() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(REPOSITORY), "TF_CPP_MIN_LOG_LEVEL": "3"}


def prepare(text: Path | str, arguments: argparse.Namespace, workers: int, folder: Path) -> Prepared:
    """Runs our command on a text; what it writes is looked at and removed."""
    output = folder / "ours"
    seconds = timed([our_command(text, output, arguments, workers)], folder)
    manifest = read_manifest(output)
    shutil.rmtree(output)
    return Prepared(seconds, manifest["counts"], sum(shard["bytes"] for shard in manifest["shards"]))


def watch(text: Path | str, arguments: argparse.Namespace, workers: int, folder: Path) -> Watched:
    """Our command on a text, for its memory and the processors' time."""
    output = folder / "ours"
    _, found = watched(our_command(text, output, arguments, workers), folder)
    shutil.rmtree(output)
    return found


def our_command(text: Path | str, output: Path, arguments: argparse.Namespace, workers: int) -> list[str]:
    return [
        *(sys.executable, "-m", "data_prep.build_examples", "--objective=nsp", f"--masking={arguments.masking}"),
        *(f"--input={text}", f"--tokenizer={arguments.vocabulary}", f"--output={output}"),
        *(f"--seq_len={arguments.seq_len}", f"--workers={workers}"),
    ]


def encoder_speed(text: Path, vocabulary: Path, threads: int) -> float:
    """Tokens a second of the bare encoder, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.data_prep_peer", str(text), str(vocabulary)]
    environment = variables() | {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=REPOSITORY)
    result = json.loads(told.stdout)
    return result["tokens"] / result["seconds"]


def google_command(python: Path, script: Path, folder: Path, text: Path, vocabulary: Path, seq_len: int) -> list[str]:
    """Writes a copy of the peer's script that runs under TensorFlow 2, and says how to run it."""
    copies = folder / "peer"
    copies.mkdir()
    for name in (script.name, "tokenization.py"):
        source = (script.parent / name).read_text(encoding="utf-8")
        patched = source.replace("import tensorflow as tf", "import tensorflow.compat.v1 as tf")
        (copies / name).write_text(patched, encoding="utf-8")
    return [
        *(str(python), str(copies / script.name), "--dupe_factor=1", "--do_lower_case=True"),
        *(f"--input_file={text}", f"--output_file={folder / 'peer.tfrecord'}", f"--vocab_file={vocabulary}"),
        *(f"--max_seq_length={seq_len}", f"--max_predictions_per_seq={round(0.15 * seq_len)}"),
    ]


def google_versions(python: Path) -> dict[str, str]:
    code = "import tensorflow, platform; print(tensorflow.__version__, platform.python_version())"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, env=variables())
    tensorflow, own_python = found.stdout.split()
    return {"peer tensorflow": tensorflow, "peer python": own_python}


def speed(arguments: argparse.Namespace, folder: Path) -> None:
    """The claims against peers, on the same text."""
    text = folder / "text.txt"
    size = write_mixture(readers.expand(arguments.text), arguments.megabytes, text)
    ours: list[Prepared] = []
    encoder: list[float] = []
    for _ in range(arguments.repeats):  # in turns, so that a change of the machine's mood meets both
        ours.append(prepare(text, arguments, arguments.workers, folder))
        encoder.append(encoder_speed(text, arguments.vocabulary, arguments.workers))
    value = statistics.median(one.speed for one in ours)
    settings = {
        "text": arguments.text.replace(f"{shared_data()}/", ""),
        "text_mb": round(size / MB, 2),
        "seq_len": arguments.seq_len,
        "masking": arguments.masking,
        "workers": arguments.workers,
        "runs": [one.told() for one in ours],
        "watched": watch(text, arguments, arguments.workers, folder).told(),
    }
    peer = "tokenizers encode_batch_fast, no files written"
    told = settings | {"peer_runs": [round(one) for one in encoder], "load_average": load_average()}
    emit("data_prep_nsp_encoder", value, "tokens/s", peer, statistics.median(encoder), told)
    if arguments.peer_python and arguments.peer_script:
        cut = folder / "sentences.txt"
        sentences = write_sentences(text, cut)
        versions = google_versions(arguments.peer_python)
        script, vocabulary = arguments.peer_script.absolute(), arguments.vocabulary
        command = google_command(arguments.peer_python.absolute(), script, folder, cut, vocabulary, arguments.seq_len)
        # One process of two cores: what samples it is in nobody's way.
        seconds, found = watched(command, folder)
        told = settings | {
            "sentences": sentences,
            "peer_seconds": round(seconds, 2),
            "peer_watched": found.told(),
            "load_average": load_average(),
        }
        google = "google-research/bert create_pretraining_data.py"
        tokens = ours[0].counts["source_tokens"]
        emit("data_prep_nsp_google", value, "tokens/s", google, tokens / seconds, told, versions)


def scaling(arguments: argparse.Namespace, folder: Path) -> None:
    """The claims on growth: memory, disk and time over three sizes, each with one worker and with all of them."""
    paths = readers.expand(arguments.text)
    texts = [folder / f"text_{number}.txt" for number in range(len(arguments.sizes))]
    sizes = [write_mixture(paths, megabytes, text) for megabytes, text in zip(arguments.sizes, texts, strict=True)]
    apart: list[float] = []
    best = fastest(
        list(map(str, texts)), arguments, folder, lambda: apart.append(side_by_side(texts[-1], arguments, folder))
    )
    taken = {workers: [watch(text, arguments, workers, folder) for text in texts] for workers in best}
    settings = {"seq_len": arguments.seq_len, "masking": arguments.masking, "repeats": arguments.repeats}
    runs = zip(sizes, best[arguments.workers], taken[arguments.workers], strict=True)
    table = [{"text_mb": round(size / MB, 1)} | one.told() | found.told() for size, one, found in runs]
    memory = max(found.peak_bytes for found in taken[arguments.workers]) / MB
    told = settings | {"workers": arguments.workers}
    emit("data_prep_memory", memory, "MB", None, None, told | {"runs": table}, lower_is_better=True)
    names = [f"{size / MB:.0f} MB" for size in sizes]
    disk = [one.shard_bytes / one.counts["tokens"] for one in best[arguments.workers]]
    each = {name: round(one, 3) for name, one in zip(names, disk, strict=True)}
    emit("data_prep_disk", max(disk), "bytes/token", None, None, told | each, lower_is_better=True)

    write_mixture(paths, PAGE_MB, texts[0])
    starts = {workers: one.seconds for workers, (one,) in fastest([str(texts[0])], arguments, folder).items()}
    for workers, prepared in best.items():
        seconds = np.array([one.seconds for one in prepared])
        told = settings | {
            "workers": workers,
            "seconds": {name: round(one, 2) for name, one in zip(names, seconds.tolist(), strict=True)},
            "cpu_seconds": {name: round(one.cpu_seconds, 2) for name, one in zip(names, taken[workers], strict=True)},
            "start_seconds": round(starts[workers], 2),
            "exponent_without_start": round(exponent(sizes, seconds - starts[workers]), 4),
            "load_average": load_average(),
        }
        emit("data_prep_exponent", exponent(sizes, seconds), "power of the size", None, None, told)

    pairs = zip(names, best[1], best[arguments.workers], strict=True)
    ratios = {name: round(one.seconds / many.seconds, 3) for name, one, many in pairs}
    told = settings | {"workers": arguments.workers, "by_size": ratios, "load_average": load_average()}
    of_cores = arguments.workers * best[1][-1].seconds / min(apart)
    emit("data_prep_workers", ratios[names[-1]], "times", "separate jobs at once", of_cores, told)
    stored = paths[: arguments.workers_files]
    found = fastest([",".join(map(str, stored))], arguments, folder)
    by_workers = {workers: round(one.seconds, 2) for workers, (one,) in found.items()}
    told = settings | {"files": [path.name for path in stored], "seconds_by_workers": by_workers}
    ratio = by_workers[1] / by_workers[arguments.workers]
    emit("data_prep_workers_stored", ratio, "times", None, None, told | {"load_average": load_average()})


def fastest(
    texts: Sequence[str], arguments: argparse.Namespace, folder: Path, in_each_turn: Callable[[], None] = lambda: None
) -> dict[int, list[Prepared]]:
    """Of each text the fastest of --repeats runs by one worker, and by --workers.

    In turns over all of them, so that a machine whose speed changes is as kind to each.
    """
    best: dict[int, list[Prepared]] = {}
    for _ in range(arguments.repeats):
        for workers in sorted({1, arguments.workers}):
            runs = [prepare(text, arguments, workers, folder) for text in texts]
            pairs = zip(best.get(workers, runs), runs, strict=True)
            best[workers] = [min(pair, key=lambda one: one.seconds) for pair in pairs]
        in_each_turn()
    return best


def side_by_side(text: Path, arguments: argparse.Namespace, folder: Path) -> float:
    """Seconds until as many jobs as there are workers, of one worker each, have all ended on the same text."""
    outputs = [folder / f"apart_{number}" for number in range(arguments.workers)]
    seconds = timed([our_command(text, output, arguments, 1) for output in outputs], folder)
    for output in outputs:
        shutil.rmtree(output)
    return seconds


def exponent(sizes: Sequence[int], seconds: Sequence[float] | np.ndarray) -> float:
    """k of the power law seconds = c * size**k, by least squares on the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def load_average() -> list[float]:
    return [round(load, 2) for load in psutil.getloadavg()]


def hold_to_cores(count: int) -> None:
    """Keeps this process, and all that it starts, on so many cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.data_prep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    data = shared_data()
    add = parser.add_argument
    add("--scaling", action="store_true", help="memory, disk and time over three sizes, and workers; default: peers")
    add("--text", help="files or globs parted by commas; default: in BERT_JAX_DATA")
    add("--vocabulary", default=data and data / "vocab" / "bert-base-uncased.txt", type=Path, help="a vocab.txt")
    add("--megabytes", type=float, default=50.0, help="of text against the peers; default 50")
    add("--sizes", type=float, nargs="+", default=SCALING_MB, help="MB of text for --scaling; default 50 200 300")
    add("--workers_files", type=int, default=2, help="of --text as stored, for data_prep_workers_stored; default 2")
    add("--seq_len", type=int, default=128)
    add("--masking", choices=["static", "dynamic"], help="default static, as the peer's; dynamic for --scaling")
    add("--workers", type=int, default=2, help="processes, threads of the encoder, and cores; default 2")
    add("--repeats", type=int, help="runs of each; default 3")
    add("--peer_python", type=Path, help="a Python with TensorFlow; without it that peer is left out")
    add("--peer_script", type=Path, help="create_pretraining_data.py of google-research/bert")
    arguments = parser.parse_args()
    if not arguments.text and data:
        globs = MIXTURE if arguments.scaling else WIKIPEDIA
        arguments.text = ",".join(str(data / part) for part in globs.split(","))
    if not arguments.text or not arguments.vocabulary:
        parser.exit(0, "skipped: no --text and --vocabulary, and BERT_JAX_DATA is not set\n")
    arguments.vocabulary = arguments.vocabulary.absolute()
    arguments.masking = arguments.masking or ("dynamic" if arguments.scaling else "static")
    arguments.repeats = arguments.repeats or 3
    return arguments


def main() -> None:
    arguments = parse()
    hold_to_cores(arguments.workers)
    folder = Path(tempfile.mkdtemp(prefix="bench_data_prep_"))
    try:
        (scaling if arguments.scaling else speed)(arguments, folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
