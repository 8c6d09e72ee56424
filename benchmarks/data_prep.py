"""Measures data preparation from raw text to next-sentence rows: speed, memory, disk space and how they scale.

    python -m benchmarks.data_prep --peer_python ENV/bin/python --peer_script bert/create_pretraining_data.py
    python -m benchmarks.data_prep --scaling

Each result is one JSON line. The text is Wikipedia from BERT_JAX_DATA (pretrain/wiki_en_*.txt.xz), or --text. The first
command prints

  data_prep_nsp_encoder   tokens of the text per second of the whole command, from start to written files, compared with
                          the bare Hugging Face encoder (benchmarks/data_prep_peer.py) on as many threads
  data_prep_nsp_google    the same compared with create_pretraining_data.py of google-research/bert, run once under
                          tensorflow.compat.v1 in a patched copy, with dupe_factor 1, on the text split to one sentence
                          per line, as that program needs; omitted without --peer_python

and takes about four minutes on two cores, three of which are the second peer's. The second command prepares 50, 200 and
300 MB of Wikipedia, books and talk (always in the same mixture) and prints

  data_prep_memory        the highest peak of memory, summed over all processes (shared pages count in each)
  data_prep_disk          bytes of shards per token of the rows
  data_prep_exponent      the exponent of time as a power of the text's size, for one worker and for --workers
  data_prep_workers       the speed-up of --workers processes over one, on the longest text; the peer is as many jobs of
                          one worker at the same time, which share nothing and show what the machine's cores give

Runs take turns over all texts, and results are compared within a turn. Values are medians over turns, which the
settings list. bert_jax and the peers are restricted to --workers cores. Run nothing else on the machine.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.common import REPOSITORY, emit, shared_data
from benchmarks.corpus import write_mixture, write_sentences
from benchmarks.data_prep_runs import (
    MB,
    Prepared,
    bert_jax_command,
    hold_to_cores,
    load_average,
    prepare,
    timed,
    variables,
    watch,
    watched,
)
from data_prep.readers import corpus as readers

WIKIPEDIA = "pretrain/wiki_en_*.txt.xz"
MIXTURE = f"{WIKIPEDIA},pretrain/books_en_*.txt.xz,pretrain/talk_en.txt.xz"
SCALING_MB = (50.0, 200.0, 300.0)
# By number of workers: for each text, its runs in one turn over all texts.
Turn = dict[int, list[list[Prepared]]]


def encoder_speed(text: Path, vocabulary: Path, threads: int) -> float:
    """Measures the tokens per second of the encoder alone, in another process."""
    command = [sys.executable, "-m", "benchmarks.data_prep_peer", str(text), str(vocabulary)]
    environment = variables() | {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=REPOSITORY)
    result = json.loads(ended.stdout)
    return result["tokens"] / result["seconds"]


def google_command(python: Path, script: Path, folder: Path, text: Path, vocabulary: Path, seq_len: int) -> list[str]:
    """Writes a copy of the peer's script that runs under TensorFlow 2, and returns the command that runs it."""
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
    """Compares the speed with the peers, on the same text."""
    text = folder / "text.txt"
    size = write_mixture(readers.expand(arguments.text), arguments.megabytes, text)
    ours: list[Prepared] = []
    encoder: list[float] = []
    for _ in range(arguments.repeats):  # in turns, so that a change in the machine's load affects both
        ours.append(prepare(text, arguments, arguments.workers, folder))
        encoder.append(encoder_speed(text, arguments.vocabulary, arguments.workers))
    value = statistics.median(one.speed for one in ours)
    settings = {
        "text": arguments.text.replace(f"{shared_data()}/", ""),
        "text_mb": round(size / MB, 2),
        "seq_len": arguments.seq_len,
        "masking": arguments.masking,
        "workers": arguments.workers,
        "runs": [one.as_dict() for one in ours],
        "watched": watch(text, arguments, arguments.workers, folder).as_dict(),
    }
    peer = "tokenizers encode_batch_fast, no files written"
    details = settings | {"peer_runs": [round(one) for one in encoder], "load_average": load_average()}
    emit("data_prep_nsp_encoder", value, "tokens/s", peer, statistics.median(encoder), details)
    if arguments.peer_python and arguments.peer_script:
        cut = folder / "sentences.txt"
        sentences = write_sentences(text, cut)
        versions = google_versions(arguments.peer_python)
        script, vocabulary = arguments.peer_script.absolute(), arguments.vocabulary
        command = google_command(arguments.peer_python.absolute(), script, folder, cut, vocabulary, arguments.seq_len)
        # The peer is one process, so sampling it on the other core does not slow it down.
        seconds, found = watched(command, folder)
        details = settings | {
            "sentences": sentences,
            "peer_seconds": round(seconds, 2),
            "peer_watched": found.as_dict(),
            "load_average": load_average(),
        }
        google = "google-research/bert create_pretraining_data.py"
        tokens = ours[0].counts["source_tokens"]
        emit("data_prep_nsp_google", value, "tokens/s", google, tokens / seconds, details, versions)


def scaling(arguments: argparse.Namespace, folder: Path) -> None:
    """Measures memory, disk and time for texts of three sizes, with one worker and with all workers."""
    paths = readers.expand(arguments.text)
    texts = [folder / f"text_{number}.txt" for number in range(len(arguments.sizes))]
    sizes = [write_mixture(paths, megabytes, text) for megabytes, text in zip(arguments.sizes, texts, strict=True)]
    turns, apart = in_turns(texts, sizes, arguments, folder)
    middle = {
        workers: [median([run for one in turns for run in one[workers][place]]) for place in range(len(texts))]
        for workers in turns[0]
    }
    taken = {workers: [watch(text, arguments, workers, folder) for text in texts] for workers in middle}
    settings = {"seq_len": arguments.seq_len, "masking": arguments.masking, "repeats": arguments.repeats}
    runs = zip(sizes, middle[arguments.workers], taken[arguments.workers], strict=True)
    table = [{"text_mb": round(size / MB, 1)} | one.as_dict() | found.as_dict() for size, one, found in runs]
    memory = max(found.peak_bytes for found in taken[arguments.workers]) / MB
    details = settings | {"workers": arguments.workers}
    emit("data_prep_memory", memory, "MB", None, None, details | {"runs": table}, lower_is_better=True)
    names = [f"{size / MB:.0f} MB" for size in sizes]
    disk = [one.shard_bytes / one.counts["tokens"] for one in middle[arguments.workers]]
    by_size = {name: round(one, 3) for name, one in zip(names, disk, strict=True)}
    emit("data_prep_disk", max(disk), "bytes/token", None, None, details | by_size, lower_is_better=True)

    for workers, prepared in middle.items():
        seconds = np.array([one.seconds for one in prepared])
        by_turn = [exponent(sizes, [median(runs).seconds for runs in one[workers]]) for one in turns]
        details = settings | {
            "workers": workers,
            "by_turn": by_turn,
            "seconds": {name: round(one, 2) for name, one in zip(names, seconds.tolist(), strict=True)},
            "cpu_seconds": {name: round(one.cpu_seconds, 2) for name, one in zip(names, taken[workers], strict=True)},
            "of_all_turns": exponent(sizes, seconds.tolist()),
            "load_average": load_average(),
        }
        emit("data_prep_exponent", statistics.median(by_turn), "power of the size", None, None, details)

    ratios = {name: [ratio(one, place, arguments.workers) for one in turns] for place, name in enumerate(names)}
    details = settings | {"workers": arguments.workers, "by_turn": ratios, "load_average": load_average()}
    pairs = zip(turns, apart, strict=True)
    of_cores = statistics.median(arguments.workers * median(one[1][-1]).seconds / separate for one, separate in pairs)
    emit("data_prep_workers", statistics.median(ratios[names[-1]]), "times", "separate jobs at once", of_cores, details)


def in_turns(
    texts: Sequence[Path], sizes: Sequence[int], arguments: argparse.Namespace, folder: Path
) -> tuple[list[Turn], list[float]]:
    """Runs turns over all texts, and after every turn separate simultaneous jobs on the last text.

    Returns:
        The runs of all turns, and the seconds of the separate jobs.
    """
    turns: list[Turn] = []
    apart: list[float] = []
    for _ in range(arguments.repeats):
        turn: Turn = {workers: [[] for _ in texts] for workers in sorted({1, arguments.workers})}
        for place in order(sizes):
            for workers, runs in turn.items():
                runs[place].append(prepare(texts[place], arguments, workers, folder))
        turns.append(turn)
        apart.append(side_by_side(texts[-1], arguments, folder))
    return turns, apart


def order(sizes: Sequence[int]) -> list[int]:
    """The order of texts in a turn. Shorter texts run several times: a short run sees one state of the machine."""
    counts = [max(1, round(max(sizes) / size / 2)) for size in sizes]
    spread = [((number + 0.5) / count, place) for place, count in enumerate(counts) for number in range(count)]
    return [place for _, place in sorted(spread)]


def median(runs: Sequence[Prepared]) -> Prepared:
    """The runs of one text as one run with their median time."""
    return runs[0]._replace(seconds=statistics.median(one.seconds for one in runs))


def ratio(turn: Turn, place: int, workers: int) -> float:
    """The speed-up of `workers` workers over one worker, on a text in a turn."""
    return round(median(turn[1][place]).seconds / median(turn[workers][place]).seconds, 3)


def side_by_side(text: Path, arguments: argparse.Namespace, folder: Path) -> float:
    """Starts one job per worker on the same text, with one worker each; returns the seconds until all have ended."""
    outputs = [folder / f"apart_{number}" for number in range(arguments.workers)]
    seconds = timed([bert_jax_command(text, output, arguments, 1) for output in outputs], folder)
    for output in outputs:
        shutil.rmtree(output)
    return seconds


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """k of the power law seconds = c * size**k, by least squares on the logarithms."""
    return round(float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0]), 4)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.data_prep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    data = shared_data()
    add = parser.add_argument
    add(
        "--scaling",
        action="store_true",
        help="measure memory, disk and time over three sizes, and workers; default: compare with peers",
    )
    add("--text", help="files or globs, separated by commas; default: from BERT_JAX_DATA")
    add("--vocabulary", default=data and data / "vocab" / "bert-base-uncased.txt", type=Path, help="a vocab.txt")
    add("--megabytes", type=float, default=50.0, help="MB of text for the peers; default 50")
    add("--sizes", type=float, nargs="+", default=SCALING_MB, help="MB of text for --scaling; default 50 200 300")
    add("--seq_len", type=int, default=128)
    add("--masking", choices=["static", "dynamic"], help="default static, as in the peer; dynamic for --scaling")
    add("--workers", type=int, default=2, help="processes, threads of the encoder, and cores; default 2")
    add("--repeats", type=int, help="runs of each program; default 3")
    add("--peer_python", type=Path, help="a Python with TensorFlow; without it that peer is omitted")
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
