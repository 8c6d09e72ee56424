"""How data preparation grows: time, memory and disk with the text, speed with the workers (benchmarks.data_prep)."""

import argparse
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.common import emit
from benchmarks.corpus import write_mixture
from benchmarks.data_prep_runs import MB, Prepared, load_average, our_command, prepare, timed, watch
from data_prep import readers

PAGE_MB = 0.02
Turn = list[list[Prepared]]  # of each text, its runs one after another


def scaling(arguments: argparse.Namespace, folder: Path) -> None:
    """The claims on growth: memory, disk and time over three sizes, each with one worker and with all of them."""
    paths = readers.expand(arguments.text)
    texts = [folder / f"text_{number}.txt" for number in range(len(arguments.sizes))]
    sizes = [write_mixture(paths, megabytes, text) for megabytes, text in zip(arguments.sizes, texts, strict=True)]
    turns, apart = in_turns(texts, sizes, arguments, folder)
    middle = {
        workers: [median([run for one in found for run in one[place]]) for place in range(len(texts))]
        for workers, found in turns.items()
    }
    taken = {workers: [watch(text, arguments, workers, folder) for text in texts] for workers in middle}
    settings = {"seq_len": arguments.seq_len, "masking": arguments.masking, "repeats": arguments.repeats}
    runs = zip(sizes, middle[arguments.workers], taken[arguments.workers], strict=True)
    table = [{"text_mb": round(size / MB, 1)} | one.told() | found.told() for size, one, found in runs]
    memory = max(found.peak_bytes for found in taken[arguments.workers]) / MB
    told = settings | {"workers": arguments.workers}
    emit("data_prep_memory", memory, "MB", None, None, told | {"runs": table}, lower_is_better=True)
    names = [f"{size / MB:.0f} MB" for size in sizes]
    disk = [one.shard_bytes / one.counts["tokens"] for one in middle[arguments.workers]]
    each = {name: round(one, 3) for name, one in zip(names, disk, strict=True)}
    emit("data_prep_disk", max(disk), "bytes/token", None, None, told | each, lower_is_better=True)

    write_mixture(paths, PAGE_MB, texts[0])
    starts = by_workers(str(texts[0]), arguments, folder)
    for workers, prepared in middle.items():
        seconds = np.array([one.seconds for one in prepared])
        told = settings | {
            "workers": workers,
            "seconds": {name: round(one, 2) for name, one in zip(names, seconds.tolist(), strict=True)},
            "cpu_seconds": {name: round(one.cpu_seconds, 2) for name, one in zip(names, taken[workers], strict=True)},
            "by_turn": [exponent(sizes, [median(runs).seconds for runs in one]) for one in turns[workers]],
            "start_seconds": round(starts[workers], 2),
            "exponent_without_start": exponent(sizes, (seconds - starts[workers]).tolist()),
            "load_average": load_average(),
        }
        emit("data_prep_exponent", exponent(sizes, seconds.tolist()), "power of the size", None, None, told)

    pairs = zip(names, middle[1], middle[arguments.workers], strict=True)
    ratios = {name: round(one.seconds / many.seconds, 3) for name, one, many in pairs}
    told = settings | {"workers": arguments.workers, "by_size": ratios, "load_average": load_average()}
    of_cores = arguments.workers * middle[1][-1].seconds / statistics.median(apart)
    emit("data_prep_workers", ratios[names[-1]], "times", "separate jobs at once", of_cores, told)
    stored = paths[: arguments.workers_files]
    seconds_by = by_workers(",".join(map(str, stored)), arguments, folder)
    told = settings | {"files": [path.name for path in stored], "seconds_by_workers": seconds_by}
    ratio = seconds_by[1] / seconds_by[arguments.workers]
    emit("data_prep_workers_stored", ratio, "times", None, None, told | {"load_average": load_average()})


def in_turns(
    texts: Sequence[Path], sizes: Sequence[int], arguments: argparse.Namespace, folder: Path
) -> tuple[dict[int, list[Turn]], list[float]]:
    """Turns by how many workers; and seconds of separate jobs side by side on the last text, once a turn."""
    turns: dict[int, list[Turn]] = {workers: [] for workers in sorted({1, arguments.workers})}
    apart: list[float] = []
    for _ in range(arguments.repeats):
        for workers, found in turns.items():
            runs: Turn = [[] for _ in texts]
            for place in order(sizes):
                runs[place].append(prepare(texts[place], arguments, workers, folder))
            found.append(runs)
        apart.append(side_by_side(texts[-1], arguments, folder))
    return turns, apart


def order(sizes: Sequence[int]) -> list[int]:
    """The places of texts in a turn, shorter ones several times: a short run meets a single mood of the machine."""
    counts = [max(1, round(max(sizes) / size / 2)) for size in sizes]
    spread = [((number + 0.5) / count, place) for place, count in enumerate(counts) for number in range(count)]
    return [place for _, place in sorted(spread)]


def median(runs: Sequence[Prepared]) -> Prepared:
    """Runs of one text as one, of their median time."""
    return runs[0]._replace(seconds=statistics.median(one.seconds for one in runs))


def by_workers(text: str, arguments: argparse.Namespace, folder: Path) -> dict[int, float]:
    """Seconds of a text by one worker, and by --workers."""
    seconds: dict[int, list[float]] = {workers: [] for workers in sorted({1, arguments.workers})}
    for _ in range(arguments.repeats):
        for workers, found in seconds.items():
            found.append(prepare(text, arguments, workers, folder).seconds)
    return {workers: round(statistics.median(found), 2) for workers, found in seconds.items()}


def side_by_side(text: Path, arguments: argparse.Namespace, folder: Path) -> float:
    """Seconds until as many jobs as there are workers, of one worker each, have all ended on the same text."""
    outputs = [folder / f"apart_{number}" for number in range(arguments.workers)]
    seconds = timed([our_command(text, output, arguments, 1) for output in outputs], folder)
    for output in outputs:
        shutil.rmtree(output)
    return seconds


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """k of the power law seconds = c * size**k, by least squares on the logarithms."""
    return round(float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0]), 4)
