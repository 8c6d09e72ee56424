"""Trains the encoder of configs/cpu_speedrun.py for two hours on two cores, and compares its scores with other models.

    BERT_JAX_DATA=DATA python -m benchmarks.speedrun --output runs/speedrun --peer_python ENV/bin/python

The parts, in order; --part NAME,NAME runs some of them:

data       a vocabulary and shards from the English text in DATA/pretrain, with held-out documents
train      the recipe, limited by its training time; --config.KEY=VALUE overrides a key. With --replay, the published
           run again, step by step, however long it takes: its schedule is read from its log
scores     dev metrics of this model, fine-tuned on every task with every seed
random     scores of the same architecture with random parameters
peer       scores of transformers' BertForMaskedLM of the same size: trained on the same rows for the same minutes with
           the defaults of its script run_mlm.py (benchmarks/speedrun_peer.py), under --peer_python
reference  scores of another model in Hugging Face layout, --reference FOLDER, with the same settings
page       RESULTS/ and a block in a page of the documentation: the table and the curve of all finished parts, together
           with the results that RESULTS/ already holds

A part that was interrupted is resumed by the same command, and a finished one is not repeated. A folder belongs to its
text, sizes, seeds and --config values, and others are refused. Nothing else should run on the machine while it trains,
except that the peer, given its pace on an idle machine by --peer_pace, counts its steps and not the time.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common, scores, speedrun_page
from benchmarks.scores import DATA, Score
from bert_jax import command_line
from bert_jax import config as config_lib
from bert_jax.config import PretrainConfig
from bert_jax.data.manifest import read_manifest, read_shard_table
from bert_jax.data.shards import read_shard
from bert_jax.errors import UserError
from bert_jax.model import sizes
from bert_jax.storage.files import read_json, write_json
from bert_jax.train.metrics import METRICS_FILE
from bert_jax.train.run import RESULT_FILE
from bert_jax.train.workdir import CONFIG_FILE

RECIPE = "configs/cpu_speedrun.py"
PARTS = ("data", "train", "scores", "random", "peer", "reference", "page")
VOCAB_SIZE = 16384
SEQ_LEN = 128
SETTINGS = ("input", "vocab_size", "eval_fraction", "seeds", "peer_minutes")  # flags that determine the numbers

# A small model needs a higher rate than BERT-Base: the highest of the grid of Turc et al. 2019. All systems have the
# same settings. To score a model within 40 minutes on two cores, SST-2 has 32,000 examples of its 67,349, chosen at
# random by each seed, and tags have two epochs. GLUE has the mean of all positions: without next sentences, nothing in
# pretraining trains [CLS] to speak for a text.
_SETTINGS = ("optimizer.learning_rate=3e-4", "batch_size=32")
_TEXTS = (*_SETTINGS, "task.pooling=mean")
_GLUE = (*_TEXTS, "epochs=3")
_TAGS = (*_SETTINGS, "epochs=2", f"task.data_dir={DATA}")
TASKS = (
    Score("sst2", "glue.py:task=sst2", (*_TEXTS, "epochs=1", "steps=1000"), ("accuracy",)),
    Score("mrpc", "glue.py:task=mrpc", _GLUE, ("accuracy", "f1")),
    Score("cola", "glue.py:task=cola", _GLUE, ("matthews_correlation",)),
    Score("stsb", "glue.py:task=stsb", _GLUE, ("pearson", "spearman")),
    Score("rte", "glue.py:task=rte", _GLUE, ("accuracy",)),
    Score("ewt", "tagging.py:task=ewt", _TAGS, ("accuracy",)),
    Score("conll2003", "tagging.py:task=conll2003", _TAGS, ("f1",)),
)


class Speedrun:
    """The folder of a speedrun, and its parts."""

    def __init__(self, flags: argparse.Namespace, overrides: Sequence[str]) -> None:
        self.flags, self.overrides = flags, list(overrides)
        self.output: Path = flags.output.absolute()
        self.shards = self.output / "shards"
        self.recipe = config_lib.from_flags(PretrainConfig, str(common.REPOSITORY / RECIPE), self.overrides)
        self.output.mkdir(parents=True, exist_ok=True)
        settings = {name: getattr(flags, name) for name in SETTINGS}
        common.keep_settings(self.output, settings | {"config": self.overrides})

    def data(self) -> None:
        """Makes the vocabulary and the shards. Documents are held out by a hash of their text."""
        pattern = str(self.flags.input)
        vocabulary = self.output / "vocabulary"
        if not vocabulary.exists():
            size = f"--vocab_size={self.flags.vocab_size}"
            run(
                "train-tokenizer",
                f"--input={pattern}",
                f"--output={vocabulary}",
                size,
                "--lowercase",
                "--strip_accents=yes",
            )
        if not self.shards.exists():
            options = (
                "--objective=doc_sentences",
                "--pack=16",
                "--dedup",
                f"--eval_fraction={self.flags.eval_fraction}",
            )
            source = (f"--input={pattern}", f"--tokenizer={vocabulary}", f"--output={self.shards}")
            run("build-examples", *source, f"--seq_len={SEQ_LEN}", *options)

    def train(self) -> None:
        """Trains the recipe."""
        config, log = self.output / "trained" / CONFIG_FILE, self.flags.results.absolute() / METRICS_FILE
        replays = bool(self.flags.replay)
        if config.exists() and speedrun_page.is_replay(read_json(config)) != replays:
            what, flag = ("a run by the clock", "without") if replays else ("a replay", "with")
            raise UserError(f"{config.parent} holds {what}. Use it {flag} --replay, or choose another --output")
        self._pretrain("trained", *(["budget_minutes=0", f"budget_replay={log}"] if replays else []))

    def scores(self) -> None:
        """Scores the trained model."""
        self._score("trained", self.output / "trained")

    def random(self) -> None:
        """Scores the same architecture with random parameters, which a step at rate 0 saves."""
        self._pretrain("random", "steps=1", "budget_minutes=0", "optimizer.learning_rate=0", "eval.every_steps=0")
        self._score("random", self.output / "random")

    def peer(self) -> None:
        """Trains transformers' model on the same rows, and scores it."""
        folder = self.output / "peer"
        if not (folder / "model").exists():
            if not self.flags.peer_python:
                print("skipped: peer needs --peer_python, a Python with torch and transformers", file=sys.stderr)
                return
            folder.mkdir(parents=True, exist_ok=True)
            self._write_rows(folder / "rows.npy")
            common.run_command(self._peer_line(folder))
            speedrun_page.write_origin(self.output / "peer.json")
            (folder / "rows.npy").unlink()
        self._score("peer", folder / "model")

    def reference(self) -> None:
        """Scores the model of --reference."""
        if not self.flags.reference:
            print("skipped: reference needs --reference, a folder in Hugging Face layout", file=sys.stderr)
            return
        self._score("reference", self.flags.reference.absolute())

    def page(self) -> None:
        """Writes the results, and the block of the page."""
        folder = self.flags.results.absolute()
        found = speedrun_page.collect(self.output, self.flags.target)
        results = speedrun_page.with_minilm(speedrun_page.with_published(found, folder), scores.RESULTS)
        speedrun_page.copy_logs(found, self.output, folder)
        speedrun_page.write(results, folder, self.flags.page)

    def _pretrain(self, name: str, *more: str) -> None:
        workdir = self.output / name
        if not (workdir / RESULT_FILE).exists():
            options = [f"--config.data.train={self.shards}", *self.overrides, *(f"--config.{one}" for one in more)]
            run("pretrain", f"--config={RECIPE}", f"--workdir={workdir}", *options)
            speedrun_page.write_origin(self.output / f"{name}.json")

    def _score(self, system: str, model: Path) -> None:
        """Writes OUTPUT/scores/SYSTEM/TASK.json for each task, and the metrics of all held-out rows."""
        if not model.exists():
            raise UserError(f"no model at {model}. Run the part that trains it first (see --help)")
        folder = self.output / "scores" / system
        folder.mkdir(parents=True, exist_ok=True)
        held_out = folder / "held_out.json"
        if system != "reference" and not held_out.exists():
            metrics = run("evaluate", f"--checkpoint={model}", f"--data={self.shards}", "--batch_size=32")
            write_json(held_out, json.loads(metrics))
        for task in TASKS:
            file = folder / f"{task.name}.json"
            if task.name in self.flags.tasks and not file.exists():
                seeded = Score(task.name, task.recipe, (f"seeds={self.flags.seeds}", *task.options), task.metrics)
                name = model.name if system == "reference" else system
                made = scores.make(seeded, model, self.output / "finetuning" / system, name)
                write_json(file, made | {"shown": task.metrics})
                shutil.rmtree(self.output / "finetuning" / system / task.name)  # ten checkpoints of no further use

    def _write_rows(self, target: Path) -> None:
        """Writes the ids of all rows of train as uint16[rows, T]."""
        shards = read_shard_table(self.shards, read_manifest(self.shards)).part("train").names
        np.save(target, np.concatenate([read_shard(self.shards / name).input_ids for name in shards]))

    def _peer_line(self, folder: Path) -> list[str]:
        """The command that trains the peer."""
        model = sizes.model_config(self.recipe.model, self.flags.vocab_size)
        values: dict[str, Any] = {
            "rows": folder / "rows.npy",
            "tokenizer": self.shards / "tokenizer",
            "output": folder,
            "minutes": self.flags.peer_minutes or self.recipe.budget_minutes,
            "pace": self.flags.peer_pace,
            "layers": model.layers,
            "width": model.width,
            "heads": model.heads,
        }
        script = Path(__file__).with_name("speedrun_peer.py")
        return [str(self.flags.peer_python), str(script), *(f"--{name}={value}" for name, value in values.items())]


def run(name: str, *arguments: str) -> str:
    """Runs a command of bert_jax, and returns what it prints."""
    return common.run_command([sys.executable, "-m", "bert_jax", name, *arguments])


def listed(known: Sequence[str], value: str) -> tuple[str, ...]:
    """The names of a list separated by commas. Raises UserError for an unknown one."""
    names = tuple(value.split(","))
    for name in names:
        if name not in known:
            raise UserError(f"unknown name {name!r}; choose from {', '.join(known)}")
    return names


def main(arguments: Sequence[str]) -> None:
    parser = command_line.Parser("python -m benchmarks.speedrun", __doc__ or "")
    add = parser.add_argument
    tasks = [task.name for task in TASKS]
    add("--output", type=Path, required=True, help="folder of all parts; resumed if it exists")
    add("--part", default=",".join(PARTS), help="parts to run, separated by commas (default: all)")
    add("--input", help="the text (default: the English files of BERT_JAX_DATA/pretrain)")
    add("--vocab_size", type=int, default=VOCAB_SIZE, help=f"default: {VOCAB_SIZE}")
    add("--eval_fraction", type=float, default=0.005, help="share of documents that is held out (default: 0.005)")
    add("--tasks", default=",".join(tasks), help="tasks to score, separated by commas (default: all)")
    add("--seeds", type=int, default=5, help="fine-tunings of each task (default: 5)")
    add("--peer_python", type=Path, help="a Python with torch and transformers; without it the peer is omitted")
    add("--peer_minutes", type=float, default=0.0, help="training time of the peer (default: that of the recipe)")
    add("--peer_pace", type=float, default=0.0, help="steps a minute to count for the peer (default: it is timed)")
    add("--reference", type=Path, help="another model in Hugging Face layout; without it none is scored")
    parser.add_switch("replay", help="train the published run again, by its log (default: off)")
    add("--target", type=float, default=speedrun_page.TARGET, help="held-out masked-token loss to reach, in nats")
    add("--results", type=Path, default=speedrun_page.RESULTS, help="folder of the published files")
    add("--page", type=Path, default=speedrun_page.PAGE, help="the page whose block is replaced")
    flags, overrides = parser.parse_known_args(list(arguments))
    flags.tasks = listed(tasks, flags.tasks)
    if not flags.input:
        if not (folder := common.shared_data()):
            raise UserError("BERT_JAX_DATA is not set. Set it to the folder with pretrain/ and the tasks' files")
        flags.input = f"{folder}/pretrain/*_en*.txt.xz"
    chosen = listed(PARTS, flags.part)
    speedrun = Speedrun(flags, overrides)
    for part in PARTS:
        if part in chosen:
            getattr(speedrun, part)()


if __name__ == "__main__":
    command_line.run(main)
