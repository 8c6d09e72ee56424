"""The results of a speedrun: one JSON file, the logs of training, an HTML page, and a table for the documentation."""

import json
import math
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from bert_jax.data.manifest import read_manifest
from bert_jax.errors import UserError
from bert_jax.reporting import page, runs
from bert_jax.reporting.document import Block, Charts, Document, Section, Settings, Table, Tile
from bert_jax.storage.files import read_json, write_atomic, write_json
from bert_jax.train.metrics import METRICS_FILE, read_lines
from bert_jax.train.run import RESULT_FILE
from bert_jax.train.workdir import CONFIG_FILE

RESULTS = common.REPOSITORY / "benchmarks" / "results" / "speedrun"
PAGE = common.REPOSITORY / "docs" / "speedrun.md"
RESULTS_FILE = "results.json"
MARK = "<!-- not run: it ran for this table -->"  # of the block of commands (website/code_blocks.py)
BEGIN, END = "<!-- results: benchmarks/speedrun.py -->\n", "<!-- end of results -->\n"
TARGET = 3.3  # nats; fixed after the first full run, which reached it after about three quarters of its time

GLUE = ("sst2", "mrpc", "cola", "stsb", "rte")
MEAN = "GLUE mean"
SYSTEMS = {
    "trained": "speedrun",
    "random": "random parameters",
    "peer": "transformers",
    "reference": "reference",
    "minilm": "all-MiniLM-L6-v2",
}
# Systems with settings of their own: a difference from them would not be that of pretraining alone.
OTHER_SETTINGS = ("minilm",)
PROGRAM = "benchmarks.speedrun"
NOTE = (
    "Dev scores in points: the mean of the fine-tuning seeds and its standard error. A difference is the speedrun's "
    "lead, with twice its standard error in parentheses. The scores of all-MiniLM-L6-v2, which is three times as large "
    "and was trained on far more text, have the settings and seeds of benchmarks/results/finetuning.md. Each model is "
    "pretrained once, so the errors do not cover other pretraining seeds."
)


def collect(output: Path, target: float) -> dict[str, Any]:
    """Returns the finished parts of a speedrun: settings, training of both sides, and scores by system and task.

    A run that follows the log of another run is a `replay`, and has no time. `replayed` lists the tasks that are scored
    with its model. `settings` include the vocabulary and tokens of the shards.
    """
    systems: dict[str, dict[str, Any]] = {}
    for system in SYSTEMS:
        files = sorted((output / "scores" / system).glob("*.json"))
        found = {file.stem: read_json(file) for file in files}
        if found:
            held_out = found.pop("held_out", None)
            values = {name: seed_values(result) for name, result in found.items()}
            systems[system] = {"held_out": held_out, "tasks": found, "values": values | glue_mean(values)}
    training: dict[str, Any] = {}
    trained = output / "trained"
    if (trained / RESULT_FILE).exists():
        config = read_json(trained / CONFIG_FILE)
        result, origin = read_json(trained / RESULT_FILE), _origin(output / "trained.json")
        if is_replay(config):
            training["replay"] = {name: result[name] for name in ("step", "tokens", "eval_mlm_loss")} | origin
            if "trained" in systems:
                systems["trained"]["replayed"] = list(systems["trained"]["tasks"])
        else:
            training["trained"] = result | {"config": config} | origin
            budget = config["training"]["budget_minutes"]
            training["target"] = {
                "eval_mlm_loss": target,
                "minutes": minutes_to_target(read_lines(trained / METRICS_FILE), target, budget),
            }
    if (output / "peer" / RESULT_FILE).exists():
        training["peer"] = read_json(output / "peer" / RESULT_FILE) | _origin(output / "peer.json")
    manifest = read_manifest(output / "shards")
    settings = {name: value for name, value in read_json(output / common.SETTINGS_FILE).items() if name != "input"}
    settings |= {"vocabulary": manifest["tokenizer"]["hash"], "tokens": manifest["counts"]["tokens"]}
    text = json.dumps({"settings": settings, "training": training, "systems": systems})
    without_paths: dict[str, Any] = json.loads(text.replace(str(output), "OUTPUT"))
    return without_paths


def is_replay(config: Mapping[str, Any]) -> bool:
    """Returns whether a run with this config.json follows the log of another run."""
    return bool(config["training"]["budget_replay"])


def with_published(found: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Completes results by the results that the folder already holds.

    So systems and tasks can be measured on several days or machines.

    Raises:
        UserError: The published results have other settings, text or vocabulary.
    """
    file = folder / RESULTS_FILE
    if not file.exists():
        return dict(found)
    before = read_json(file)
    if before["settings"] != found["settings"]:
        raise UserError(
            f"{file} holds results of {before['settings']}, and these are of {found['settings']}. Delete it to start a "
            "new table, or choose another --results"
        )
    systems = before["systems"] | {
        name: _with_tasks(system, before["systems"].get(name)) for name, system in found["systems"].items()
    }
    training = before["training"] | found["training"]
    if "trained" in found["training"]:
        training.pop("replay", None)  # that of the run before
    return {"settings": found["settings"], "training": training, "systems": systems}


def _with_tasks(system: Mapping[str, Any], before: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """A system with the tasks that were published of the same parameters, or of the training that it replays.

    The same parameters have the same held-out metrics.
    """
    same = before is not None and before.get("held_out") == system.get("held_out")
    if before is None or not (same or "replayed" in system):
        return system
    replayed = before.get("replayed", [])
    kept = {name: task for name, task in before["tasks"].items() if same or name not in replayed}
    tasks = kept | system["tasks"]
    values = {name: seed_values(task) for name, task in tasks.items()}
    known = {**system, "tasks": tasks, "values": values | glue_mean(values)}
    if "replayed" in system:
        of_replay = {*system["replayed"], *(name for name in replayed if name in kept)}
        known["replayed"] = [name for name in tasks if name in of_replay]
    return known


def with_minilm(results: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the results with the scores of all-MiniLM-L6-v2 on the same tasks, from the files of benchmarks.scores.

    They have settings of their own and one to three seeds, so their GLUE mean is the mean of the tasks' means.
    """
    trained = results["systems"].get("trained", {"tasks": {}})["tasks"]
    files = {name: folder / f"{name}.json" for name in trained}
    tasks = {name: read_json(file) | {"shown": trained[name]["shown"]} for name, file in files.items() if file.exists()}
    values = {name: seed_values(task) for name, task in tasks.items()}
    means = {name: [statistics.mean(found)] for name, found in values.items()}
    found = {"held_out": None, "tasks": tasks, "values": values | glue_mean(means)}
    return {**results, "systems": results["systems"] | ({"minilm": found} if tasks else {})}


def write_origin(file: Path) -> None:
    """Records the machine, the versions of packages and the commit of a training run that has just ended."""
    write_json(file, {"machine": common.machine(), "versions": common.versions(), "commit": common.commit()})


def _origin(file: Path) -> dict[str, Any]:
    return {"origin": read_json(file)} if file.exists() else {}


def seed_values(result: Mapping[str, Any]) -> list[float]:
    """Returns the score of each seed: the mean of the task's metrics. An undefined metric counts as 0.

    A correlation is undefined where a model predicts the same for all examples.
    """
    columns = [result["metrics"][name]["values"] for name in result["shown"]]
    return [
        statistics.mean(0.0 if value is None or math.isnan(value) else value for value in seed)
        for seed in zip(*columns, strict=True)
    ]


def glue_mean(values: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Returns the mean of the five tasks of GLUE by seed, if all of them are scored with equally many seeds."""
    if any(task not in values for task in GLUE) or len({len(values[task]) for task in GLUE}) > 1:
        return {}
    return {MEAN: [statistics.mean(seed) for seed in zip(*(values[task] for task in GLUE), strict=True)]}


def standard_error(values: Sequence[float]) -> float:
    """Returns the standard error of the mean; NaN for fewer than two values."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Returns the difference of two means and twice its standard error."""
    error = math.hypot(standard_error(ours), standard_error(theirs))
    return statistics.mean(ours) - statistics.mean(theirs), 2 * error


def minutes_to_target(lines: Sequence[Mapping[str, Any]], target: float, budget_minutes: float) -> float | None:
    """Returns the minutes of training until the first evaluation at or below a held-out loss; None if there is none.

    Time is the logged share of the budget, which counts training time over all restarts.
    """
    for line in lines:
        if line.get("eval_mlm_loss") is not None and line["eval_mlm_loss"] <= target and "budget_fraction" in line:
            return round(float(line["budget_fraction"]) * budget_minutes, 2)
    return None


def table(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Returns the header and the rows: means and standard errors in points, and the speedrun's lead over the others."""
    systems = results["systems"]
    ours = systems.get("trained", {"values": {}, "held_out": None})
    others = [name for name in SYSTEMS if name != "trained" and name in systems]
    header = ["task", "metric", SYSTEMS["trained"]]
    for name in others:
        header += [SYSTEMS[name]] if name in OTHER_SETTINGS else [SYSTEMS[name], "difference"]
    return header, [*_score_rows(systems, ours, others), *_loss_row(systems, ours, others)]


def _score_rows(systems: Mapping[str, Any], ours: Mapping[str, Any], others: Sequence[str]) -> Iterator[list[str]]:
    for task, values in sorted(ours["values"].items(), key=lambda item: _place(item[0])):
        shown = ours["tasks"][task]["shown"] if task in ours["tasks"] else ["mean"]
        row = [task, ", ".join(shown).replace("_", " "), _points(values)]
        for name in others:
            theirs = systems[name]["values"].get(task)
            cells = [_points(theirs), _lead(*difference(values, theirs))] if theirs else ["-", "-"]
            row += cells[:1] if name in OTHER_SETTINGS else cells
        yield row


def _loss_row(systems: Mapping[str, Any], ours: Mapping[str, Any], others: Sequence[str]) -> Iterator[list[str]]:
    if ours["held_out"]:
        row = ["held-out text", "masked-token loss, nats", f"{ours['held_out']['mlm_loss']:.3f}"]
        for name in others:
            found = systems[name]["held_out"]
            both = (found["mlm_loss"], ours["held_out"]["mlm_loss"] - found["mlm_loss"]) if found else None
            cells = [f"{both[0]:.3f}", f"{both[1]:+.3f}"] if both else ["-", "-"]
            row += cells[:1] if name in OTHER_SETTINGS else cells
        yield row


def _place(task: str) -> int:
    order = (MEAN, *GLUE)
    return order.index(task) if task in order else len(order)


def _points(values: Sequence[float]) -> str:
    error = standard_error(values)
    return f"{100 * statistics.mean(values):.1f}" + ("" if math.isnan(error) else f" ± {100 * error:.1f}")


def _lead(points: float, two_errors: float) -> str:
    return f"{100 * points:+.1f}" + ("" if math.isnan(two_errors) else f" (± {100 * two_errors:.1f})")


def facts(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the page's facts about training, machines and commits, by name."""
    training, found = results["training"], {}
    if run := training.get("trained"):
        found["training"] = f"{run['seconds'] / 60:.1f} minutes, {run['step']:,} steps, {run['tokens']:,} tokens"
    if replay := training.get("replay"):
        losses = [f"{one['eval_mlm_loss']:.5f}" for one in (replay, run) if one]
        scored = results["systems"].get("trained", {}).get("replayed")
        found["trained once more by its log"] = (
            f"{replay['step']:,} steps, to the loss {' instead of '.join(losses)} on the first held-out rows"
            + (f"; its model is that of {', '.join(sorted(scored, key=_place))} below" if scored else "")
        )
    if peer := training.get("peer"):
        found["training of transformers' model"] = (
            f"{peer['minutes']:.1f} minutes, {peer['steps']:,} steps, {peer['tokens']:,} tokens, "
            f"torch {peer['versions']['torch']}, transformers {peer['versions']['transformers']}"
        )
    if (target := training.get("target")) and target["eval_mlm_loss"]:
        reached = f"{target['minutes']:g} minutes" if target["minutes"] is not None else "not reached"
        found[f"time to a held-out loss of {target['eval_mlm_loss']:g}"] = reached
    origins = [run["origin"] for run in training.values() if "origin" in run]
    origins += [task for system in results["systems"].values() for task in system["tasks"].values()]
    machines = [_machine(origin["machine"]) for origin in origins]
    commits = [common.short_commit(origin["commit"]) for origin in origins]
    return found | {
        name: "; ".join(dict.fromkeys(values))
        for name, values in (("machine", machines), ("commit", commits))
        if values
    }


def _machine(described: Mapping[str, Any]) -> str:
    cores = f"{described['cores']} core" + "s" * (described["cores"] != 1)
    return ", ".join([described["processor"], cores, *described.get("gpus", [])])


def markdown(results: Mapping[str, Any]) -> str:
    """Returns the block of the page: the facts, the table and the commands."""
    header, rows = table(results)
    lines = [f"- {name}: {value}" for name, value in facts(results).items()]
    lines += ["", *(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)), "", NOTE, ""]
    commands = [task["command"] for task in results["systems"].get("trained", {"tasks": {}})["tasks"].values()]
    return "\n".join([*lines, MARK, "", *(f"    {line}" for line in commands), ""])


def copy_logs(found: Mapping[str, Any], output: Path, folder: Path) -> None:
    """Publishes the logs of all finished trainings in a folder. A replay has no log of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for system, name in (("trained", METRICS_FILE), ("peer", "peer_metrics.jsonl")):
        if system in found["training"]:
            shutil.copy(output / system / METRICS_FILE, folder / name)


def write(results: Mapping[str, Any], folder: Path, page_file: Path) -> None:
    """Writes the published files into a folder, and the block into a page."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RESULTS_FILE, results)
    published = folder / METRICS_FILE
    blocks: list[Block] = [Charts(runs.charts(read_lines(published), {}))] if published.exists() else []
    header, rows = table(results)
    run = results["training"].get("trained")
    document = Document(
        title="The speedrun of configs/cpu_speedrun.py",
        program=PROGRAM,
        source=folder.name,
        tiles=[Tile(row[2], row[0], row[1]) for row in rows[:1]],
        sections=[
            Section("Scores", [Table(header, [rows])], NOTE),
            Section("Training", [Settings({"": facts(results)}), *blocks]),
            Section("Configuration", [Settings({"": run["config"]["training"]})] if run else []),
        ],
    )
    write_atomic(folder / "page.html", page.render(document).encode())
    common.replace_block(page_file, BEGIN, markdown(results), END)
    print(json.dumps({"page": str(folder / "page.html"), "rows": len(rows)}))
