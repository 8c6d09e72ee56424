"""Runs all steps from text to an exported BERT, with the commands that a user would type.

`quickstart` lists the stages in order. `Stages` is the output folder: it runs commands, and records time and figures.
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
from bert_jax.config import AutoTaskConfig
from bert_jax.config.options import POSITIVE, Checked, option, parse
from bert_jax.errors import Stopped, UserError
from bert_jax.reporting.finetuning import score_tagger
from bert_jax.reporting.pretraining import unigram_baseline
from bert_jax.storage.files import write_json
from bert_jax.train.describe import VERBOSE
from bert_jax.train.metrics import duration, read_metrics
from bert_jax.train.workdir import latest_step

RECORD = "quickstart.json"
TAGS = AutoTaskConfig(name="ewt")  # the task that the tagger is scored on
LOG_WIDTH = 110  # of tables if the output is not a terminal


class Stages:
    """The output folder and its RECORD, which lists completed stages with their seconds and figures.

    Raises:
        UserError: All stages of the folder are complete, or it has other content.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.console = Console(highlight=False, soft_wrap=True)
        if not self.console.is_terminal:
            self.console.width = LOG_WIDTH
        self.record: dict[str, Any] = {"finished": False, "stages": {}}
        if (self.folder / RECORD).exists():
            self.record = self.read(RECORD)
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
        """Returns a file's path in the folder, as a command's argument."""
        return str(self.folder / name)

    def exists(self, name: str) -> bool:
        """Whether an earlier run has made a file; prints a line if so."""
        if exists := (self.folder / name).exists():
            self.console.print(f"already exists: {self.path(name)}")
        return exists

    def read(self, name: str) -> dict[str, Any]:
        """Returns the content of a JSON file in the folder."""
        return json.loads((self.folder / name).read_text(encoding="utf-8"))

    def save(self) -> None:
        write_json(self.folder / RECORD, self.record)

    @contextlib.contextmanager
    def stage(self, name: str, description: str) -> Iterator[dict[str, Any]]:
        """Times a stage. The caller puts its `figures` into the dictionary, which is recorded if the stage succeeds."""
        self.console.rule(f"[bold]{name}", align="left")
        self.console.print(description)
        entry: dict[str, Any] = {"figures": ""}
        started = time.monotonic()
        yield entry
        # A quickstart that is run again enters its finished stages, too, and adds the time that they take.
        earlier = self.record["stages"].get(name, {}).get("seconds", 0.0)
        entry["seconds"] = round(earlier + time.monotonic() - started, 1)
        self.record["stages"][name] = entry
        self.save()
        self.console.print(f"[green]{entry['figures']}[/]  ({duration(entry['seconds'])})\n")

    def run(self, command: str, *arguments: str, **flags: Any) -> None:
        """Prints and runs `bert-jax COMMAND --FLAG VALUE ...`; its output is shown.

        Raises:
            UserError: It fails.
            Stopped: After SIGTERM, which is forwarded to it.
        """
        line = _command_line(command, *arguments, **flags)
        with self._started(line) as process:
            code = process.wait()
        if code:
            raise UserError(f"exit code {code} from: {shlex.join(line)}; its output is above")

    def make(self, name: str, command: str, *arguments: str, **flags: Any) -> None:
        """Runs a command whose --output is a file or folder with this name, unless an earlier run has made it."""
        if not self.exists(name):
            self.run(command, *arguments, **flags, output=self.path(name))

    def run_and_kill(self, command: str, *arguments: str, when: Callable[[], bool], **flags: Any) -> None:
        """Runs a command as `run` does, and sends it SIGKILL when `when()` is true.

        Raises:
            UserError: It ends before that.
        """
        line = _command_line(command, *arguments, **flags)
        with self._started(line) as process:
            while not when():
                if (code := process.poll()) is not None:
                    raise UserError(f"exit code {code} before it could be killed, from: {shlex.join(line)}")
                time.sleep(0.1)
            process.kill()
        if self.console.is_terminal:
            self.console.show_cursor()  # a killed progress bar leaves the cursor hidden

    @contextlib.contextmanager
    def _started(self, line: list[str]) -> Iterator[subprocess.Popen[bytes]]:
        self.console.print(f"$ {shlex.join(line)}", style="bold cyan", markup=False)
        self.console.file.flush()  # before the output of the command
        # SIGTERM would end this process alone, and the command would train on without it.
        earlier = signal.signal(signal.SIGTERM, _stop)
        # By this Python, since the `bert-jax` on the PATH may belong to another installation.
        process = subprocess.Popen([sys.executable, "-m", "bert_jax", *line[1:]])
        try:
            yield process
            process.wait()
        except BaseException:  # also Stopped, so that no command outlives the quickstart
            process.terminate()
            process.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, earlier)


def _stop(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise Stopped("run the same command again to resume the stage that was stopped")


def _command_line(command: str, *arguments: str, **flags: Any) -> list[str]:
    return ["bert-jax", command, *arguments, *(part for name in flags for part in (f"--{name}", str(flags[name])))]


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
    """The text and the sizes. Of all sizes tried, these learn most in a few minutes on two cores."""

    minutes: float = 3.5  # of pretraining
    text: str = ""  # files of text; empty: the books that come with the code
    vocabulary: int = 4096
    length: int = 32  # positions per row; with 64, as many tokens did not suffice to learn to attend to neighbours
    pairings: int = 4  # of each document, so that few rows repeat
    held_out: float = 0.05
    rows: int = 64  # per batch
    epochs: float = 6.0  # of tagging
    verbose: bool = False  # print each parameter of the models


def quickstart(output: str | Path, plan: Plan | None = None) -> dict[str, Any]:
    """Runs the stages that `output` lacks, and returns the content of OUTPUT/quickstart.json.

    Raises:
        UserError: The output holds a finished quickstart or other files, a command fails, a run does not resume from
            its checkpoint, or the model predicts no better than the most frequent token.
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
    _print_summary(stages)
    return stages.record


def vocabulary(stages: Stages, plan: Plan) -> None:
    with stages.stage("Vocabulary", "Trains a WordPiece vocabulary on the text.") as entry:
        size = plan.vocabulary
        stages.make(
            "tokenizer", "train-tokenizer", "--lowercase", "--strip_accents=yes", input=_text(plan), vocab_size=size
        )
        entry["figures"] = f"{size:,} tokens"


def shards(stages: Stages, plan: Plan) -> None:
    with stages.stage("Shards", "Writes pairs of sentences as rows of ids; some documents are held out.") as entry:
        stages.make(
            *("shards", "build-examples", "--objective=nsp", "--masking=dynamic", "--mask_unit=word"),
            input=_text(plan),
            tokenizer=stages.path("tokenizer"),
            seq_len=plan.length,
            dupe_factor=plan.pairings,
            eval_fraction=plan.held_out,
        )
        stages.run("inspect-shards", stages.path("shards"), "--verify", show=2)
        parts = stages.read("shards/manifest.json")["parts"]
        entry["figures"] = (
            f"{parts['train']['rows']:,} rows to train on ({parts['train']['tokens']:,} tokens), "
            f"{parts['eval']['rows']:,} held out; every hash verified"
        )


def pretraining(stages: Stages, plan: Plan) -> None:
    arguments = (
        *("--config=bert_tiny", f"--workdir={stages.path('pretrained')}"),
        *(f"--config.data.train={stages.path('shards')}", f"--config.batch_size={plan.rows}"),
        *(f"--config.budget_minutes={plan.minutes:g}", "--config.optimizer.learning_rate=2e-3"),
        *("--config.optimizer.schedule.warmup_steps=100", "--config.model.dropout=0.0"),
        # At least one checkpoint in the first quarter leaves time to kill and resume the run.
        *("--config.eval.every_steps=400", f"--config.checkpoint.every_minutes={min(0.5, plan.minutes / 4):.3g}"),
        *_verbose(plan),
    )
    description = f"Pretrains for {plan.minutes:g} minutes. After its first checkpoint it is killed, then resumed."
    with stages.stage("Pretraining", description) as entry:
        # result.json is written at the end, so a run without it has not finished.
        if not stages.exists("pretrained/result.json"):
            # The run is killed only once, even if the quickstart is stopped after that and run again.
            if "killed" not in stages.record:
                _kill_once(stages, arguments)
            stages.run("pretrain", *arguments)
        resumed = check_resumed(stages)
        result = stages.read("pretrained/result.json")
        trained = f"{result['step']:,} steps, {result['tokens']:,} tokens in {duration(result['seconds'])}"
        entry["figures"] = f"{trained}; {resumed}"


def _kill_once(stages: Stages, arguments: Sequence[str]) -> None:
    """Starts pretraining and kills it when it has trained past its first checkpoint."""
    workdir = Path(stages.path("pretrained"))

    def past_checkpoint() -> bool:
        saved = latest_step(workdir)
        # Only steps after the checkpoint can show that the run was resumed: they are trained again.
        return saved is not None and _last_step(workdir) > saved

    stages.run_and_kill("pretrain", *arguments, when=past_checkpoint)
    killed = {"step": _last_step(workdir), "checkpoint": latest_step(workdir), "time": time.time()}
    stages.record["killed"] = killed
    stages.save()
    stages.console.print(f"killed (SIGKILL) at step {killed['step']}", style="bold red")
    stages.console.print(
        f"Its newest checkpoint is at step {killed['checkpoint']}, from which the same command resumes:", style="bold"
    )


def check_resumed(stages: Stages) -> str:
    """Describes from which step the run resumed. Raises UserError if the times in its log show that it did not."""
    if "killed" not in stages.record:  # the user ran the command to its end
        return "not killed"
    killed = stages.record["killed"]
    lines = read_metrics(Path(stages.path("pretrained")))
    # A log that resumed has times before the kill up to the checkpoint, and times after it from there on.
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
        result = stages.read("pretrained/result.json")
        baseline = unigram_baseline(stages.path("shards"))
        stages.record["held_out"] = {**result, "unigram": dataclasses.asdict(baseline)}
        shown = Table("held-out text", "the model", "the unigram baseline")
        most_frequent = f'{baseline.accuracy:.1%} (always "{baseline.token}")'
        shown.add_row("masked tokens correct", f"{result['eval_mlm_accuracy']:.1%}", most_frequent)
        entropy = f"{baseline.loss:.3f} (unigram entropy)"
        shown.add_row("masked-token loss, nats", f"{result['eval_mlm_loss']:.3f}", entropy)
        if baseline.next_sentence_accuracy is not None:
            majority = f"{baseline.next_sentence_accuracy:.1%} (the more frequent label)"
            shown.add_row("next sentences correct", f"{result['eval_nsp_accuracy']:.1%}", majority)
        stages.console.print(shown)
        accuracy = result["eval_mlm_accuracy"]
        compared = f"{accuracy:.1%} of the masked tokens correct, the unigram baseline {baseline.accuracy:.1%}"
        entry["figures"] = compared
        if accuracy <= baseline.accuracy:
            raise UserError(f"the model has learnt nothing: {compared}. Give it more --minutes, in another --output")


def tagging(stages: Stages, plan: Plan) -> None:
    description = "Fine-tunes on parts of speech (UD English EWT, the part in this repository)."
    with stages.stage("Tagging", description) as entry:
        if not stages.exists("tagger/result.json"):
            stages.run(
                *("finetune", "--config=tagging:task=ewt", f"--workdir={stages.path('tagger')}"),
                *(f"--config.init_from={stages.path('pretrained')}", f"--config.epochs={plan.epochs:g}"),
                *(f"--config.task.max_length={plan.length}", "--config.optimizer.learning_rate=2e-3"),
                *("--config.model.dropout=0.1", *_verbose(plan)),
            )
        score = score_tagger(stages.path("tagger"), dataclasses.replace(TAGS, max_length=plan.length))
        stages.record["tagging"] = dataclasses.asdict(score)
        base = score.baseline
        shown = Table("test words correct", "the model", "the word's most frequent tag")
        shown.add_row(f"all {base.words:,}", f"{score.accuracy:.1%}", f"{base.accuracy:.1%}")
        unknown = f"{base.unknown_words:,} not in the training file"
        shown.add_row(unknown, f"{score.unknown_accuracy:.1%}", f"{base.unknown_accuracy:.1%}")
        stages.console.print(shown)
        baseline = f"the word's most frequent tag {base.accuracy:.1%}"
        entry["figures"] = f"{score.accuracy:.1%} of the test words correct, {baseline}"


def exporting(stages: Stages) -> None:
    with stages.stage("Export", "Writes the pretrained model in the Hugging Face format.") as entry:
        stages.make("exported", "export", checkpoint=stages.path("pretrained"), format="hf")
        size = sum(file.stat().st_size for file in (stages.folder / "exported").iterdir())
        entry["figures"] = f"{size / 1e6:.1f} MB, for transformers' BertForPreTraining.from_pretrained"


def filling(stages: Stages) -> None:
    with stages.stage("Fill masks", "Predicts the masked words of sentences with the exported model.") as entry:
        stages.run("fill-mask", *SENTENCES, checkpoint=stages.path("exported"))
        entry["figures"] = f"{len(SENTENCES)} sentences"


def reports(stages: Stages) -> None:
    with stages.stage("Reports", "Writes a report of each run as an HTML page.") as entry:
        stages.run("report", stages.path("pretrained"))
        stages.run("report", stages.path("tagger"))
        entry["figures"] = "2 pages"


def _print_summary(stages: Stages) -> None:
    """Prints the time and figures of all stages, and the folders to look at."""
    stages.console.rule("[bold]Summary", align="left")
    shown = Table("stage", "time", "figures")
    entries: dict[str, Any] = stages.record["stages"]
    for name, entry in entries.items():
        shown.add_row(name, duration(entry["seconds"]), entry["figures"])
    shown.add_section()
    shown.add_row("all", duration(sum(entry["seconds"] for entry in entries.values())), "")
    stages.console.print(shown)
    places = Table("path", "content")
    for name, content in (
        ("tokenizer", "the vocabulary, for transformers too"),
        ("shards", "rows for pretraining (docs/data_format.md)"),
        ("pretrained", "the pretraining run: checkpoints, metrics.jsonl, TensorBoard events, result.json"),
        ("pretrained/report.html", "its report: open it in a browser"),
        ("tagger", "the fine-tuning run, with the same files"),
        ("tagger/report.html", "its report"),
        ("exported", "the pretrained model for transformers"),
        (RECORD, "these figures"),
    ):
        places.add_row(stages.path(name), content)
    stages.console.print(places)


def _last_step(workdir: Path) -> int:
    """Returns the last step that a run has logged; 0 before the first."""
    lines = read_metrics(workdir)
    return lines[-1]["step"] if lines else 0


def _text(plan: Plan) -> str:
    """Returns the text's files, relative to the current folder if they are in it, as a user would type them."""
    sample, here = Path(data_prep.__path__[0]) / "sample/books/*.txt.xz", Path.cwd()
    return plan.text or str(sample.relative_to(here) if sample.is_relative_to(here) else sample)


def _verbose(plan: Plan) -> tuple[str, ...]:
    return ("--verbose",) if plan.verbose else ()


@dataclass(frozen=True, kw_only=True)
class Options(Checked):
    output: str = option(help="the folder for all results", metavar="DIR")
    minutes: float = option(
        Plan.minutes, "minutes of pretraining", metavar="M", aliases=["budget_minutes"], valid=POSITIVE
    )
    verbose: bool = option(False, VERBOSE)


def main(arguments: Sequence[str]) -> None:
    options = parse("bert-jax quickstart", DESCRIPTION, Options, arguments)
    quickstart(options.output, Plan(minutes=options.minutes, verbose=options.verbose))
