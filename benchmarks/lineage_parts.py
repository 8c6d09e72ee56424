"""Makes parts of the table of benchmarks/lineage.py, in a process of their own.

    python -m benchmarks.lineage_parts FOLDER lstm held_out,rte

benchmarks/lineage.py starts it and keeps its standard input open: the process ends when that closes, so that nothing
keeps running after the command is killed. Each part that is finished is a file in FOLDER/parts, and a line on stdout.
A part that was interrupted continues from the checkpoints in FOLDER/runs.
"""

import dataclasses
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.lineage_systems import Settings, System, named, sized, trained_in, warmed_up_in
from bert_jax import command, shard_metrics, vocabulary
from bert_jax.config import EvalConfig, FinetuneConfig, ModelOptions, OptimizerConfig, TaskConfig, TrainConfig, to_dict
from bert_jax.data.example import Rows
from bert_jax.data.shards import Dataset, open_dataset
from bert_jax.evaluate import evaluate
from bert_jax.features import FeatureOptions, features
from bert_jax.finetune import finetune
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.planning.abstract_step import RowSpec
from bert_jax.pretrain import pretrain
from bert_jax.storage.local import read_json, write_json
from bert_jax.train.host_memory import keep_freed_memory
from bert_jax.train.metrics import read_metrics

PRETRAINING, HELD_OUT = "pretraining", "held_out"
# The metric of each task that the table shows; the file of a part holds all of them.
PROBES = {"ewt": "accuracy", "conll2003": "f1"}
FINETUNED = {
    "sst2": "accuracy",
    "mrpc": "accuracy",
    "rte": "accuracy",
    "cola": "matthews_correlation",
    "stsb": "spearman",
}
TASKS = (*PROBES, *FINETUNED)
# Values for small models: Turc et al. 2019 try up to 3e-4 for theirs.
FINETUNING_RATE, FINETUNING_DROPOUT = 3e-4, 0.1
PROBE = FeatureOptions(layers="last", seeds=1, head="linear", batch_size=128, learning_rate=5e-3, epochs=20, patience=3)


@dataclass(frozen=True)
class Place:
    """The folder of a table, and where it holds what one system needs."""

    folder: Path
    system: System
    settings: Settings

    @property
    def shards(self) -> Path:
        return self.folder / "shards" / self.system.shards

    @property
    def runs(self) -> Path:
        return self.folder / "runs" / self.system.name

    @property
    def pretrained(self) -> Path:
        return self.runs / PRETRAINING

    def part(self, name: str) -> Path:
        return self.folder / "parts" / self.system.name / f"{name}.json"


class EvenlySpaced:
    """Rows of a data set at equal distances, as a RowTable of their own (bert_jax/data/loader.py)."""

    def __init__(self, dataset: Dataset, count: int) -> None:
        self._dataset = dataset
        self._chosen = np.arange(min(count, dataset.rows)) * dataset.rows // min(count, dataset.rows)
        self.rows = len(self._chosen)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def gather(self, indices: np.ndarray) -> Rows:
        return self._dataset.gather(self._chosen[indices])


def pretraining(place: Place) -> dict[str, Any]:
    """Pretrains a system for its minutes or steps, with a program that a run of one step has compiled before."""
    size = sized(place.system, place.settings, vocabulary.load(place.folder / "vocabulary"))
    warming = place.runs / "compiling"
    if not (place.pretrained / "checkpoints").exists():
        shutil.rmtree(warming, ignore_errors=True)
        pretrain(warmed_up_in(size.config, place.shards), warming)
        shutil.rmtree(warming)
    config = trained_in(size.config, place.shards, place.settings)
    result = pretrain(config, place.pretrained)
    rows = RowSpec.of(config, None, None)
    lines = read_metrics(place.pretrained)
    return {
        "configuration": portable(to_dict(config), place.folder),
        "model": dataclasses.asdict(size.model),
        "parameters": size.parameters,
        "steps": result["step"],
        "tokens": result["tokens"],
        "seconds": result["seconds"],
        "flops": result["step"] * size.step_flops(rows),
        "start_share": start_share(lines),
        "held_out": {name: value for name, value in result.items() if name.startswith("eval_") and value is not None},
        "curve": _curve(lines, place.system, place.settings),
    }


def start_share(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """The share of the budget that passed before the first step, at the pace of the logged steps."""
    timed = [line for line in lines if line.get("budget_fraction")]
    if len(timed) < 2 or timed[-1]["step"] == timed[0]["step"]:
        return None
    first, last = timed[0], timed[-1]
    pace = (last["budget_fraction"] - first["budget_fraction"]) / (last["step"] - first["step"])
    return round(max(first["budget_fraction"] - pace * first["step"], 0.0), 4)


def held_out(place: Place) -> dict[str, Any]:
    """The perplexity of a language model, and the pseudo-perplexity of a masked one, on the same held-out documents."""
    common_rows = place.folder / "shards" / "single"
    metrics = evaluate(place.pretrained, common_rows)
    loaded = open_checkpoint(place.pretrained)
    dataset = open_dataset(common_rows, "eval")
    found: dict[str, Any] = {"rows": dataset.rows, "metrics": metrics}
    if loaded.heads.mlm or loaded.heads.generator:
        rows = EvenlySpaced(dataset, place.settings.pseudo_rows)
        config = TrainConfig(batch_size=64)
        found |= {"pseudo_rows": rows.rows, "pseudo": shard_metrics.pseudo_perplexity(loaded, rows, config)}
    return found


def probe(place: Place, task: str) -> dict[str, Any]:
    """A linear layer on the frozen vectors of the last layer."""
    files = str(common.shared_data())
    config = FinetuneConfig(task=TaskConfig(name=task, max_length=place.settings.length, data_dir=files))
    return {"options": dataclasses.asdict(PROBE), **features(place.pretrained, config, PROBE)}


def finetuning(place: Place, task: str) -> dict[str, Any]:
    """All seeds of a fine-tuning; its folder is removed at the end, since the result holds all that is shown."""
    workdir = place.runs / task
    config = _finetuning_config(place, task)
    result = finetune(config, workdir)
    del result["start"]
    configuration = portable(to_dict(config), place.folder)
    return {"configuration": configuration, **result}


def _finetuning_config(place: Place, task: str) -> FinetuneConfig:
    files: dict[str, Any] = {"data_dir": str(common.shared_data())}
    if task == "sst2":
        files["train"] = str(place.folder / "tasks" / "sst2.tsv")
    return FinetuneConfig(
        # The mean of all positions: a causal model has no [CLS] that sees the text, and all are treated alike.
        task=TaskConfig(name=task, pooling="mean", max_length=place.settings.length, **files),
        model=ModelOptions(dropout=FINETUNING_DROPOUT, layer_loop="scan"),
        optimizer=OptimizerConfig(learning_rate=FINETUNING_RATE, warmup_steps=0, warmup_share=0.1),
        eval=EvalConfig(every_steps=1_000_000),  # only at the end
        init_from=str(place.pretrained),
        epochs=place.settings.epochs,
        seeds=(place.settings.seeds,),
    )


def make(place: Place, name: str) -> dict[str, Any]:
    """Makes a part, and returns the content of its file."""
    work: Mapping[str, Callable[[Place], dict[str, Any]]] = {PRETRAINING: pretraining, HELD_OUT: held_out}
    started, used = time.monotonic(), time.process_time()
    measure = probe if name in PROBES else finetuning
    found = work[name](place) if name in work else measure(place, name)
    about = {"machine": common.machine(), "versions": common.versions(), "commit": common.commit()}
    spent = {"part_seconds": time.monotonic() - started, "cpu_seconds": time.process_time() - used}
    return {**found, **{name: round(seconds, 1) for name, seconds in spent.items()}, **about}


def read_settings(folder: Path) -> Settings:
    return Settings(**read_json(folder / common.SETTINGS_FILE))


def _curve(lines: Sequence[Mapping[str, Any]], system: System, settings: Settings) -> dict[str, list[float]]:
    """The minutes of the log lines, and the losses of the system's chart. Steps count as shares of the minutes."""

    def share(line: Mapping[str, Any]) -> float | None:
        return line["step"] / settings.steps if settings.steps else line.get("budget_fraction")

    timed = [(part, line) for line in lines if (part := share(line)) is not None]
    kept = [(part, line) for part, line in timed if all(line.get(loss) for loss in system.losses)]
    curve = {loss: [round(line[loss], 4) for _, line in kept] for loss in system.losses}
    return {"minutes": [round(part * settings.budget_minutes, 4) for part, _ in kept], **curve}


def portable(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """JSON values with DIR for the folder of the table, and $BERT_JAX_DATA for that of the data."""
    text = json.dumps(values)
    for path, shown in ((folder, "DIR"), (common.shared_data(), "$BERT_JAX_DATA")):
        text = text.replace(json.dumps(str(path))[1:-1], shown) if path else text
    return json.loads(text)


def _end_with_stdin() -> None:
    """Ends this process when its standard input closes, which the end of the command does."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(command.EXIT_STOPPED)


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("benchmarks.lineage_parts", __doc__ or "")
    parser.add_argument("folder", type=Path, help="the --output of benchmarks.lineage")
    parser.add_argument("system", help="the name of a system")
    parser.add_argument("parts", help="names of parts, separated by commas")
    parser.add_argument("--core", type=int, help="the core to run on (default: all)")
    flags = parser.parse_args(arguments)
    if flags.core is not None:
        os.sched_setaffinity(0, {flags.core})  # before jax starts its threads, of which there is one for each core
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    keep_freed_memory()
    folder = flags.folder.absolute()
    place = Place(folder, named(flags.system), read_settings(folder))
    for name in flags.parts.split(","):
        found = make(place, name)
        place.part(name).parent.mkdir(parents=True, exist_ok=True)
        write_json(place.part(name), found)
        if name in FINETUNED:
            shutil.rmtree(place.runs / name)
        print(json.dumps({"part": name, "seconds": found["part_seconds"]}), flush=True)


if __name__ == "__main__":
    command.run(main)
