"""How data preparation scales: time, memory and disk with the text, speed with the workers (benchmarks.data_prep)."""

import argparse
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.common import emit
from benchmarks.corpus import write_mixture
from benchmarks.data_prep_runs import MB, Prepared, bert_jax_command, load_average, prepare, timed, watch
from data_prep import readers

PAGE_MB = 0.02
# By number of workers: for each text, its runs in one turn over all texts.
Turn = dict[int, list[list[Prepared]]]


def scaling(arguments: argparse.Namespace, folder: Path) -> None:
    """Measures memory, disk and time over three sizes, each with one worker and with all workers."""
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
    each = {name: round(one, 3) for name, one in zip(names, disk, strict=True)}
    emit("data_prep_disk", max(disk), "bytes/token", None, None, details | each, lower_is_better=True)

    write_mixture(paths, PAGE_MB, texts[0])
    starts = by_workers(str(texts[0]), arguments, folder)
    for workers, prepared in middle.items():
        seconds = np.array([one.seconds for one in prepared])
        by_turn = [exponent(sizes, [median(runs).seconds for runs in one[workers]]) for one in turns]
        details = settings | {
            "workers": workers,
            "by_turn": by_turn,
            "seconds": {name: round(one, 2) for name, one in zip(names, seconds.tolist(), strict=True)},
            "cpu_seconds": {name: round(one.cpu_seconds, 2) for name, one in zip(names, taken[workers], strict=True)},
            "of_all_turns": exponent(sizes, seconds.tolist()),
            "start_seconds": round(starts[workers], 2),
            "exponent_without_start": exponent(sizes, (seconds - starts[workers]).tolist()),
            "load_average": load_average(),
        }
        emit("data_prep_exponent", statistics.median(by_turn), "power of the size", None, None, details)

    ratios = {name: [ratio(one, place, arguments.workers) for one in turns] for place, name in enumerate(names)}
    details = settings | {"workers": arguments.workers, "by_turn": ratios, "load_average": load_average()}
    pairs = zip(turns, apart, strict=True)
    of_cores = statistics.median(arguments.workers * median(one[1][-1]).seconds / separate for one, separate in pairs)
    emit("data_prep_workers", statistics.median(ratios[names[-1]]), "times", "separate jobs at once", of_cores, details)
    stored = paths[: arguments.workers_files]
    seconds_by = by_workers(",".join(map(str, stored)), arguments, folder)
    details = settings | {"files": [path.name for path in stored], "seconds_by_workers": seconds_by}
    times = seconds_by[1] / seconds_by[arguments.workers]
    emit("data_prep_workers_stored", times, "times", None, None, details | {"load_average": load_average()})


def in_turns(
    texts: Sequence[Path], sizes: Sequence[int], arguments: argparse.Namespace, folder: Path
) -> tuple[list[Turn], list[float]]:
    """The turns over the texts, and after each turn the seconds of separate simultaneous jobs on the last text."""
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


def by_workers(text: str, arguments: argparse.Namespace, folder: Path) -> dict[int, float]:
    """The median seconds for a text with one worker, and with --workers."""
    seconds: dict[int, list[float]] = {workers: [] for workers in sorted({1, arguments.workers})}
    for _ in range(arguments.repeats):
        for workers, found in seconds.items():
            found.append(prepare(text, arguments, workers, folder).seconds)
    return {workers: round(statistics.median(found), 2) for workers, found in seconds.items()}


def side_by_side(text: Path, arguments: argparse.Namespace, folder: Path) -> float:
    """Seconds until as many jobs as there are workers, of one worker each, have all ended on the same text."""
    outputs = [folder / f"apart_{number}" for number in range(arguments.workers)]
    seconds = timed([bert_jax_command(text, output, arguments, 1) for output in outputs], folder)
    for output in outputs:
        shutil.rmtree(output)
    return seconds


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """k of the power law seconds = c * size**k, by least squares on the logarithms."""
    return round(float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0]), 4)
