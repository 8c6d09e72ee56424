"""Runs all steps from text to an exported BERT, with the commands that a user would type.

`quickstart` lists the stages in order. `Stages` is the output folder: it runs the commands and records each stage's
time and figures.
"""

import contextlib
import dataclasses
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

import data_prep
from bert_jax.config import TaskConfig
from bert_jax.config.options import POSITIVE, Checked, option, parse
from bert_jax.errors import Stopped, UserError
from bert_jax.reporting.finetuning import TaggingScore, score_tagger
from bert_jax.reporting.pretraining import UnigramBaseline, unigram_baseline
from bert_jax.storage.files import write_json
from bert_jax.train.describe import VERBOSE
from bert_jax.train.metrics import duration, read_metrics
from bert_jax.train.workdir import latest_step

RECORD = "quickstart.json"
LOG_WIDTH = 110  # of tables if the output is not a terminal


class Stages:
    """A folder and its RECORD: the completed stages, with seconds and figures, and whether all are complete.

    Raises UserError for a folder whose stages are all complete, and for one with other contents.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.console = Console(highlight=False, soft_wrap=True)
        if not self.console.is_terminal:
            self.console.width = LOG_WIDTH
        self.record: dict[str, Any] = {"finished": False, "stages": {}}
        if (self.folder / RECORD).exists():
            self.record = json.loads((self.folder / RECORD).read_text(encoding="utf-8"))
        elif self.folder.exists() and any(self.folder.iterdir()):
            raise UserError(
                f"{self.folder} already exists and is not the output of a quickstart; choose another --output"
            )
        if self.record["finished"]:
            raise UserError(
                f"{self.folder} holds a finished quickstart (see {self.folder / RECORD}); to run it again, choose "
                f"another --output, or first run: rm -r {self.folder}"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self.save()

    def path(self, name: str) -> str:
        """The path of a file in the folder, as an argument of a command."""
        return str(self.folder / name)

    def exists(self, name: str) -> bool:
        """Whether an earlier run has made a file already; prints a line if so."""
        if found := (self.folder / name).exists():
            self.console.print(f"already exists: {self.path(name)}")
        return found

    def save(self) -> None:
        write_json(self.folder / RECORD, self.record)

    @contextlib.contextmanager
    def stage(self, name: str, description: str) -> Iterator[dict[str, Any]]:
        """Times a stage. The caller puts its `figures` into the dict, which is recorded if the stage succeeds."""
        self.console.rule(f"[bold]{name}", align="left")
        self.console.print(description)
        entry: dict[str, Any] = {"figures": ""}
        started = time.monotonic()
        yield entry
        earlier = self.record["stages"].get(name, {}).get("seconds", 0.0)
        entry["seconds"] = round(earlier + time.monotonic() - started, 1)
        self.record["stages"][name] = entry
        self.save()
        self.console.print(f"[green]{entry['figures']}[/]  ({duration(entry['seconds'])})\n")

    def run(self, *arguments: str) -> None:
        """Prints and runs bert-jax with these arguments; its output is shown.

        Raises UserError if it fails, and Stopped after SIGTERM, which is forwarded to it.
        """
        with self._started(arguments) as process:
            code = process.wait()
        if code:
            raise UserError(f"exit code {code} from: {_command_line(arguments)}; its output is above")

    def run_and_kill(self, *arguments: str, when: Callable[[], bool]) -> None:
        """Runs a command as `run` does, and sends it SIGKILL when `when()` is true.

        Raises UserError if it ends before that.
        """
        with self._started(arguments) as process:
            while not when():
                if process.poll() is not None:
                    line = _command_line(arguments)
                    raise UserError(f"exit code {process.returncode} before it could be killed, from: {line}")
                time.sleep(0.1)
            process.kill()
        if self.console.is_terminal:
            self.console.show_cursor()  # a killed progress bar leaves the cursor hidden

    @contextlib.contextmanager
    def _started(self, arguments: tuple[str, ...]) -> Iterator[subprocess.Popen[bytes]]:
        self.console.print(f"$ {_command_line(arguments)}", style="bold cyan", markup=False)
        self.console.file.flush()  # before the output of the command
        earlier = signal.signal(signal.SIGTERM, _stop)
        process = subprocess.Popen([sys.executable, "-m", "bert_jax", *arguments])
        try:
            yield process
            process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, earlier)


def _stop(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise Stopped("SIGTERM: run the same command again to resume the stage that was stopped")


def _command_line(arguments: tuple[str, ...]) -> str:
    return f"bert-jax {shlex.join(arguments)}"


DESCRIPTION = """Runs all steps from text to an exported BERT, in less than 10 minutes on two cores.

  bert-jax quickstart --output runs/quickstart

On the text that comes with the code, it trains a vocabulary, builds shards, pretrains a tiny BERT (which it kills and
resumes once), evaluates it, fine-tunes it to tag parts of speech, exports it, fills masks and writes reports. Each
command is printed before it runs, so that you can run it by hand. If the quickstart is stopped, the same command
resumes the stage that was running.
"""

SENTENCES = (
    "He took up his hat and went [MASK] of the room.",
    "I am very glad to [MASK] you, my dear boy.",
    "She looked at him with tears in her [MASK].",
)


@dataclass(frozen=True)
class Plan:
    """The text and the sizes. Among the sizes tried, these learn most in a few minutes on two cores."""

    minutes: float = 3.5  # of pretraining
    text: str = ""  # pattern of the input; empty: the books that come with the code
    vocabulary: int = 4096
    length: int = 32  # positions per row; with 64, as many tokens did not suffice to learn to attend to neighbours
    pairings: int = 4  # of each document, so that few rows repeat
    held_out: float = 0.05
    rows: int = 64  # per batch
    epochs: float = 6.0  # of tagging
    verbose: bool = False  # print each parameter of the models


def quickstart(output: str | Path, plan: Plan | None = None) -> dict[str, Any]:
    """Runs every stage that `output` does not hold yet, and returns the contents of OUTPUT/quickstart.json.

    Raises UserError for an output that holds a finished quickstart or other files, for a command that fails, for a run
    that did not resume from its checkpoint, and for a model that predicts no better than the most frequent token.
    """
    stages, plan = Stages(output), plan or Plan()
    vocabulary(stages, plan)
    shards(stages, plan)
    pretraining(stages, plan)
    held_out(stages)
    tagging(stages, plan)
    exporting(stages)
    filling(stages)
    reports(stages)
    stages.record["finished"] = True
    stages.save()
    stages.console.rule("[bold]Summary", align="left")
    stages.console.print(_summary(stages))
    stages.console.print(_places(stages))
    return stages.record


def vocabulary(stages: Stages, plan: Plan) -> None:
    with stages.stage("Vocabulary", "Trains a WordPiece vocabulary on the text.") as entry:
        if not stages.exists("tokenizer"):
            stages.run(
                *("train-tokenizer", "--input", _text(plan), "--output", stages.path("tokenizer")),
                *("--vocab_size", str(plan.vocabulary), "--lowercase"),
            )
        entry["figures"] = f"{plan.vocabulary:,} tokens"


def shards(stages: Stages, plan: Plan) -> None:
    with stages.stage("Shards", "Writes pairs of sentences as rows of ids; some documents are held out.") as entry:
        if not stages.exists("shards"):
            stages.run(
                *("build-examples", "--input", _text(plan), "--tokenizer", stages.path("tokenizer")),
                *("--output", stages.path("shards"), "--seq_len", str(plan.length), "--objective", "nsp"),
                *("--masking", "dynamic", "--mask_unit", "word", "--dupe_factor", str(plan.pairings)),
                *("--eval_fraction", str(plan.held_out)),
            )
        stages.run("inspect-shards", stages.path("shards"), "--verify", "--show", "2")
        parts = _read_json(stages.path("shards/manifest.json"))["parts"]
        entry["figures"] = (
            f"{parts['train']['rows']:,} rows to train on ({parts['train']['tokens']:,} tokens), "
            f"{parts['eval']['rows']:,} held out; every hash verified"
        )


def pretraining(stages: Stages, plan: Plan) -> None:
    arguments = (
        *("pretrain", "--config", "bert_tiny"),
        *("--workdir", stages.path("pretrained"), f"--config.data.train={stages.path('shards')}"),
        *(f"--config.budget_minutes={plan.minutes:g}", f"--config.batch_size={plan.rows}"),
        *("--config.optimizer.learning_rate=2e-3", "--config.optimizer.schedule.warmup_steps=100"),
        *("--config.model.dropout=0.0", "--config.eval.every_steps=400"),
        f"--config.checkpoint.every_minutes={min(0.5, plan.minutes / 4):.3g}",
        *_verbose(plan),
    )
    description = f"Pretrains for {plan.minutes:g} minutes. After its first checkpoint it is killed, then resumed."
    with stages.stage("Pretraining", description) as entry:
        if not stages.exists("pretrained/result.json"):
            if "killed" not in stages.record:
                _kill_once(stages, arguments)
            stages.run(*arguments)
        resumed = check_resumed(stages)
        result = _read_json(stages.path("pretrained/result.json"))
        trained = f"{result['step']:,} steps, {result['tokens']:,} tokens in {duration(result['seconds'])}"
        entry["figures"] = f"{trained}; {resumed}"


def _kill_once(stages: Stages, arguments: Sequence[str]) -> None:
    """Starts pretraining and kills it when it has trained past its first checkpoint."""
    workdir = Path(stages.path("pretrained"))

    def past_checkpoint() -> bool:
        saved = latest_step(workdir)
        return saved is not None and _last_step(workdir) > saved

    stages.run_and_kill(*arguments, when=past_checkpoint)
    killed = {"step": _last_step(workdir), "checkpoint": latest_step(workdir), "time": time.time()}
    stages.record["killed"] = killed
    stages.save()
    stages.console.print(f"killed (SIGKILL) at step {killed['step']}", style="bold red")
    stages.console.print(
        f"Its newest checkpoint is at step {killed['checkpoint']}, from which the same command resumes:", style="bold"
    )


def check_resumed(stages: Stages) -> str:
    """Says from which step the run resumed. Raises UserError if the times in its log show that it did not."""
    if "killed" not in stages.record:  # the user ran the command to its end
        return "not killed"
    killed = stages.record["killed"]
    lines = read_metrics(Path(stages.path("pretrained")))
    early = [line for line in lines if line["step"] <= killed["checkpoint"]]
    late = [line for line in lines if line["step"] > killed["checkpoint"]]
    kept = early and all(line["time"] < killed["time"] for line in early)
    trained_again = late and all(line["time"] > killed["time"] for line in late)
    if not (kept and trained_again):
        raise UserError(
            f"{stages.path('pretrained')} did not resume from its checkpoint at step {killed['checkpoint']}"
        )
    return f"killed at step {killed['step']:,}, resumed from step {killed['checkpoint']:,}"


def held_out(stages: Stages) -> None:
    with stages.stage("Held out", "Compares the held-out metrics with a unigram baseline.") as entry:
        result = _read_json(stages.path("pretrained/result.json"))
        baseline = unigram_baseline(stages.path("shards"))
        stages.record["held_out"] = {**result, "unigram": dataclasses.asdict(baseline)}
        stages.console.print(_held_out_table(result, baseline))
        accuracy = result["eval_mlm_accuracy"]
        compared = f"{accuracy:.1%} of the masked tokens correct, the unigram baseline {baseline.accuracy:.1%}"
        entry["figures"] = compared
        if accuracy <= baseline.accuracy:
            raise UserError(f"the model has learnt nothing: {compared}. Give it more --minutes, in another --output")


def _held_out_table(result: dict[str, Any], baseline: UnigramBaseline) -> Table:
    shown = Table("held-out text", "the model", "the unigram baseline")
    shown.add_row(
        "masked tokens correct",
        f"{result['eval_mlm_accuracy']:.1%}",
        f'{baseline.accuracy:.1%} (always "{baseline.token}")',
    )
    shown.add_row("masked-token loss, nats", f"{result['eval_mlm_loss']:.3f}", f"{baseline.loss:.3f} (unigram entropy)")
    if baseline.next_sentence_accuracy is not None:
        majority = f"{baseline.next_sentence_accuracy:.1%} (the more frequent label)"
        shown.add_row("next sentences correct", f"{result['eval_nsp_accuracy']:.1%}", majority)
    return shown


def tagging(stages: Stages, plan: Plan) -> None:
    with stages.stage(
        "Tagging", "Fine-tunes on parts of speech (UD English EWT, the part in this repository)."
    ) as entry:
        if not stages.exists("tagger/result.json"):
            stages.run(
                *("finetune", "--config", "tagging:task=ewt"),
                *("--workdir", stages.path("tagger"), f"--config.init_from={stages.path('pretrained')}"),
                *(f"--config.epochs={plan.epochs:g}", f"--config.task.max_length={plan.length}"),
                *("--config.optimizer.learning_rate=2e-3", "--config.model.dropout=0.1", *_verbose(plan)),
            )
        score = score_tagger(stages.path("tagger"), TaskConfig(name="ewt", max_length=plan.length))
        stages.record["tagging"] = dataclasses.asdict(score)
        stages.console.print(_tagging_table(score))
        baseline = f"the word's most frequent tag {score.baseline.accuracy:.1%}"
        entry["figures"] = f"{score.accuracy:.1%} of the test words correct, {baseline}"


def _tagging_table(score: TaggingScore) -> Table:
    base = score.baseline
    unknown = f"{base.unknown_words:,} not in the training file"
    shown = Table("test words correct", "the model", "the word's most frequent tag")
    shown.add_row(f"all {base.words:,}", f"{score.accuracy:.1%}", f"{base.accuracy:.1%}")
    shown.add_row(unknown, f"{score.unknown_accuracy:.1%}", f"{base.unknown_accuracy:.1%}")
    return shown


def exporting(stages: Stages) -> None:
    with stages.stage("Export", "Writes the pretrained model in the Hugging Face format.") as entry:
        if not stages.exists("exported"):
            stages.run(
                *("export", "--checkpoint", stages.path("pretrained")),
                *("--format", "hf", "--output", stages.path("exported")),
            )
        size = sum(file.stat().st_size for file in Path(stages.path("exported")).iterdir())
        entry["figures"] = f"{size / 1e6:.1f} MB, for transformers' BertForPreTraining.from_pretrained"


def filling(stages: Stages) -> None:
    with stages.stage("Fill masks", "Predicts the masked words of sentences with the exported model.") as entry:
        stages.run("fill-mask", "--checkpoint", stages.path("exported"), *SENTENCES)
        entry["figures"] = f"{len(SENTENCES)} sentences"


def reports(stages: Stages) -> None:
    with stages.stage("Reports", "Writes a report of each run as an HTML page.") as entry:
        stages.run("report", stages.path("pretrained"))
        stages.run("report", stages.path("tagger"))
        entry["figures"] = "2 pages"


def _summary(stages: Stages) -> Table:
    shown = Table("stage", "time", "figures")
    entries: dict[str, Any] = stages.record["stages"]
    for name, entry in entries.items():
        shown.add_row(name, duration(entry["seconds"]), entry["figures"])
    shown.add_section()
    shown.add_row("all", duration(sum(entry["seconds"] for entry in entries.values())), "")
    return shown


def _places(stages: Stages) -> Table:
    shown = Table("where", "what")
    for name, what in (
        ("tokenizer", "the vocabulary, for transformers too"),
        ("shards", "rows for pretraining (docs/data_format.md)"),
        ("pretrained", "the pretraining run: checkpoints, metrics.jsonl, TensorBoard events, result.json"),
        ("pretrained/report.html", "its report: open it in a browser"),
        ("tagger", "the fine-tuning run, with the same files"),
        ("tagger/report.html", "its report"),
        ("exported", "the pretrained model for transformers"),
        (RECORD, "these figures"),
    ):
        shown.add_row(stages.path(name), what)
    return shown


def _read_json(path: str) -> dict[str, Any]:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def _last_step(workdir: Path) -> int:
    """The last step that a run has logged; 0 before the first."""
    lines = read_metrics(workdir)
    return lines[-1]["step"] if lines else 0


def _text(plan: Plan) -> str:
    return plan.text or str(_relative(data_prep.__path__[0]) / "sample/books/*.txt.xz")


def _verbose(plan: Plan) -> tuple[str, ...]:
    return ("--verbose",) if plan.verbose else ()


def _relative(path: str) -> Path:
    """A path as a user would type it in the current folder."""
    here = Path.cwd()
    return Path(path).relative_to(here) if Path(path).is_relative_to(here) else Path(path)


@dataclass(frozen=True, kw_only=True)
class Options(Checked):
    """The flags of the command."""

    output: str = option(help="the folder for all results", metavar="DIR")
    minutes: float = option(
        Plan.minutes, "minutes of pretraining", metavar="M", aliases=["budget_minutes"], valid=POSITIVE
    )
    verbose: bool = option(False, VERBOSE)


def main(arguments: Sequence[str]) -> None:
    options = parse("bert-jax quickstart", DESCRIPTION, Options, arguments)
    quickstart(options.output, Plan(minutes=options.minutes, verbose=options.verbose))
