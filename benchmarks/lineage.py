"""Pretrains the systems of the field's history at one size, on one text, for the same minutes, and compares them.

    BERT_JAX_DATA=DATA python -m benchmarks.lineage --budget_minutes 10 --output DIR
    python -m benchmarks.lineage --data benchmarks/results/lineage/cpu.json --page docs/lineage.md

The first command makes DIR/index.html, a page of curves and the table, and DIR/lineage.json, all data of it. Systems
are pretrained one after the other, each with all cores, and then measured side by side, each on one core. The command
may be killed at any time: run again, it reads what is finished and continues the rest. DIR belongs to its settings;
other settings need another folder. The second command runs nothing: it writes the table of a lineage.json into a page,
between its two markers.
"""

import dataclasses
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import common, lineage_page
from benchmarks.lineage_parts import HELD_OUT, PRETRAINING, TASKS, Place, portable, read_settings
from benchmarks.lineage_systems import NAMES, SHARDS, Settings, System, named
from bert_jax import command
from bert_jax.command import UserError
from bert_jax.config import TaskConfig
from bert_jax.progress import print_note
from bert_jax.storage.compression import read_blocks
from bert_jax.storage.local import lock, write_atomic, write_json
from bert_jax.tasks import registry
from bert_jax.train.compilation_cache import VARIABLE
from bert_jax.train.metrics import duration
from data_prep.build_examples import build
from data_prep.build_options import BuildOptions
from data_prep.train_tokenizer import TokenizerOptions, train

TEXT = ("wiki_en_0.txt.xz", "books_en_0.txt.xz")  # in BERT_JAX_DATA/pretrain
# Seconds that a part is expected to take on a core; only the first estimates of the remaining time depend on them.
EXPECTED_SECONDS, EXPECTED_OVERHEAD = 60.0, 30.0


@dataclass
class Progress:
    """Prints a line for each finished part, with the time left: the parts so far give the pace of the others."""

    total: float  # expected seconds of all missing parts
    count: int
    parts: int = 0
    done: float = 0.0
    started: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def finished(self, system: str, part: str, seconds: float, expected: float) -> None:
        with self._lock:
            self.parts, self.done = self.parts + 1, self.done + expected
            left = (time.monotonic() - self.started) * (self.total - self.done) / self.done
            print_note(
                f"[{self.parts}/{self.count}] {system}: {part} in {duration(seconds)}, ETA {duration(max(left, 0.0))}"
            )


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("python -m benchmarks.lineage", __doc__ or "")
    parser.add_argument("--output", type=Path, metavar="DIR", help="the folder of the runs, the page and the data")
    for item in dataclasses.fields(Settings):
        what = f"{item.metadata['help']}" + (f" (default: {item.default})" if item.default else "")
        parser.add_argument(f"--{item.name}", type=type(item.default), default=item.default, help=what)
    parser.add_argument("--only", default=",".join(NAMES), help=f"systems (default: {','.join(NAMES)})")
    parser.add_argument("--tasks", default=",".join(TASKS), help=f"tasks (default: {','.join(TASKS)})")
    parser.add_argument("--data", type=Path, metavar="FILE", help="take the numbers of this lineage.json, run nothing")
    parser.add_argument("--page", type=Path, help="write the table into this page, between its two markers")
    flags = parser.parse_args(arguments)
    if (flags.output is None) == (flags.data is None):
        raise UserError("give either --output, to run and measure, or --data, to read what was measured")
    if flags.data:
        data = json.loads(flags.data.read_text(encoding="utf-8"))
    else:
        settings = Settings(**{item.name: getattr(flags, item.name) for item in dataclasses.fields(Settings)})
        systems = [named(name) for name in chosen(flags.only, NAMES, "--only")]
        data = run(flags.output.absolute(), settings, systems, chosen(flags.tasks, TASKS, "--tasks"))
    if flags.page:
        lineage_page.write_table(data, flags.page)
    elif flags.data:
        print(lineage_page.markdown(data))


def chosen(given: str, known: Sequence[str], flag: str) -> list[str]:
    """The names in a flag, in the order of `known`. Raises UserError for an unknown one."""
    names = given.split(",")
    for name in names:
        if name not in known:
            raise UserError(f"{flag}: unknown {name!r}; choose from {', '.join(known)}")
    return [name for name in known if name in names]


def run(folder: Path, settings: Settings, systems: Sequence[System], tasks: Sequence[str]) -> dict[str, Any]:
    """Makes the missing parts, writes the page and the data, and returns the data.

    Raises UserError for data that are missing, for a folder of other settings, and where a part fails.
    """
    settings = dataclasses.replace(settings, text=settings.text or _default_text())
    _find_tasks(tasks)
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder / "lock"):
        common.keep_settings(folder, dataclasses.asdict(settings))
        prepare(folder, settings, systems, tasks)
        places = [Place(folder, system, settings) for system in systems]
        make_missing(places, tasks, settings)
        data = collect(folder)
        write_json(folder / "lineage.json", data)
        write_atomic(folder / "index.html", lineage_page.page(data, str(folder)).encode())
    print(folder / "index.html")
    return data


def prepare(folder: Path, settings: Settings, systems: Sequence[System], tasks: Sequence[str]) -> None:
    """Makes what is missing of the vocabulary, the shards and the training file of SST-2."""
    words = folder / "vocabulary"
    if not words.exists():
        train(TokenizerOptions(settings.text, words, settings.vocab_size, lowercase=True), quiet=False)
    for name in dict.fromkeys(["single", *(system.shards for system in systems)]):
        output = folder / "shards" / name
        if not output.exists():
            options: dict[str, Any] = {"seq_len": settings.length, "token_cache": str(folder / "tokens")}
            options["eval_fraction"] = settings.eval_fraction
            build(BuildOptions(settings.text, words, output, **options, **SHARDS[name]), quiet=False)
    check_held_out(folder)
    if "sst2" in tasks and not (folder / "tasks" / "sst2.tsv").exists():
        (folder / "tasks").mkdir(exist_ok=True)
        write_atomic(folder / "tasks" / "sst2.tsv", _evenly_spaced_sst2(settings.sst2_examples).encode())


def check_held_out(folder: Path) -> None:
    """Raises UserError unless all shards hold out the same documents."""
    held_out = {}
    for path in sorted((folder / "shards").glob("*/manifest.json")):
        part = json.loads(path.read_text(encoding="utf-8"))["parts"]["eval"]
        held_out[path.parent.name] = (part["documents"], part["sentences"], part["source_tokens"])
    for name, counts in held_out.items():
        if counts != held_out["single"] or not counts[0]:
            raise UserError(
                f"{folder / 'shards' / name} holds out {counts[0]} documents, and single {held_out['single'][0]}: all "
                "systems need the same, at least one. Use more text, or a larger --eval_fraction, in another --output"
            )


def make_missing(places: Sequence[Place], tasks: Sequence[str], settings: Settings) -> None:
    """Runs the missing parts: each pretraining alone, then the measurements of as many systems as there are cores."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    workers = min(len(cores) or os.cpu_count() or 1, len(places))
    expected = {PRETRAINING: 60 * settings.budget_minutes + EXPECTED_OVERHEAD}
    missing = {
        place.system.name: [part for part in (PRETRAINING, HELD_OUT, *tasks) if not place.part(part).exists()]
        for place in places
    }

    def seconds_of(part: str) -> float:
        return expected.get(part, EXPECTED_SECONDS / workers)

    every = list(itertools.chain.from_iterable(missing.values()))
    progress = Progress(sum(map(seconds_of, every)), len(every))

    def work(place: Place, parts: Sequence[str], core: int | None) -> None:
        for line in run_parts(place, parts, core):
            progress.finished(place.system.name, line["part"], line["seconds"], seconds_of(line["part"]))

    for place in places:
        if PRETRAINING in missing[place.system.name]:
            work(place, [PRETRAINING], None)
    free: queue.Queue[int | None] = queue.Queue()
    for number in range(workers):
        free.put(cores[number] if cores and workers > 1 else None)

    def measure(place: Place) -> None:
        core = free.get()
        try:
            if parts := [part for part in missing[place.system.name] if part != PRETRAINING]:
                work(place, parts, core)
        finally:
            free.put(core)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(measure, places))


def run_parts(place: Place, parts: Sequence[str], core: int | None) -> Iterator[dict[str, Any]]:
    """Runs parts in a process of their own, on one core if given, and yields a line for each that is finished.

    Raises UserError, with the last line of the log, if the process fails.
    """
    log = place.folder / "logs" / f"{place.system.name}.log"
    log.parent.mkdir(exist_ok=True)
    line = [sys.executable, "-m", "benchmarks.lineage_parts", str(place.folder), place.system.name, ",".join(parts)]
    line += [] if core is None else [f"--core={core}"]
    environment = {VARIABLE: str(place.folder / "programs")} | os.environ
    with (
        log.open("a", encoding="utf-8") as written,
        subprocess.Popen(
            line,
            cwd=common.REPOSITORY,
            env=environment,
            stdin=subprocess.PIPE,  # it stays open, and closes when this process ends in whatever way
            stdout=subprocess.PIPE,
            stderr=written,
            text=True,
        ) as process,
    ):
        assert process.stdout
        for text in process.stdout:
            yield json.loads(text)
        if process.wait():
            last = (log.read_text(encoding="utf-8").strip().splitlines() or ["no message"])[-1]
            raise UserError(f"{place.system.name} failed ({last}); see {log}, and run the same command to resume")


def collect(folder: Path) -> dict[str, Any]:
    """All data: the settings, the shards, and the parts of each system that are finished."""
    shards = {}
    for path in sorted((folder / "shards").glob("*/manifest.json")):
        manifest = json.loads(path.read_text(encoding="utf-8"))
        rows = {name: part["rows"] for name, part in manifest["parts"].items()}
        shards[path.parent.name] = {"options": SHARDS[path.parent.name], "rows": rows, "counts": manifest["counts"]}
    systems: dict[str, Any] = {}
    for name in NAMES:
        files = [folder / "parts" / name / f"{part}.json" for part in (PRETRAINING, HELD_OUT, *TASKS)]
        parts = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()}
        if parts:
            systems[name] = parts
    settings = portable(dataclasses.asdict(read_settings(folder)), folder)
    return {"settings": settings, "shards": shards, "systems": systems}


def _default_text() -> str:
    data = common.shared_data()
    if data is None:
        raise UserError("BERT_JAX_DATA is not set; set it to the folder of the data, or give the text by --text")
    return ",".join(str(data / "pretrain" / name) for name in TEXT)


def _find_tasks(tasks: Sequence[str]) -> None:
    """Raises UserError if the files of a task are missing, before anything is trained."""
    for task in tasks:
        if common.shared_data() is None:
            raise UserError(f"BERT_JAX_DATA is not set, which names the folder of the files of {task}")
        registry.resolve(TaskConfig(name=task, data_dir=str(common.shared_data())))


def _evenly_spaced_sst2(count: int) -> str:
    """The header of the training file of SST-2, and `count` of its lines at equal distances."""
    _, files = registry.resolve(TaskConfig(name="sst2", data_dir=str(common.shared_data())))
    header, *lines = b"".join(read_blocks(str(files["train"]))).decode().splitlines()
    count = min(count, len(lines))
    return "\n".join([header, *(lines[index * len(lines) // count] for index in range(count))]) + "\n"


if __name__ == "__main__":
    command.run(main)
