"""Workdirs as runs leave them, and what a page of the report holds."""

import dataclasses
import html.parser
import json
from pathlib import Path
from typing import Any

from random_checkpoints import odd_config, random_checkpoint

from bert_jax.config import FinetuneConfig, ModelConfig, TaskConfig, to_dict
from bert_jax.interop import export
from bert_jax.model.heads.config import Heads
from bert_jax.storage.files import write_json
from bert_jax.tasks import registry
from bert_jax.tasks.registry import to_json
from bert_jax.train.workdir import WorkdirConfig, write_config


class Page(html.parser.HTMLParser):
    """The tags of a page, and its words outside of style and script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self._open[-1:]):
            self.words += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def metric_line(step: int) -> dict[str, float | int | None]:
    return {
        "step": step,
        "time": 1000.0 + step,
        "loss": 9.0 - step / 100,
        "mlm_loss": 8.0 - step / 100,
        "mlm_accuracy": step / 1000,
        "nsp_accuracy": 0.5,
        "learning_rate": 1e-3,
        "tokens_per_second": 1234.5,
        "data_wait_share": 0.01,
        "padding_share": 0.02,
        "mfu": None,
    } | ({"eval_mlm_accuracy": step / 1100, "eval_mlm_loss": 8.1 - step / 100} if step % 100 == 0 else {})


def make_workdir(
    workdir: Path, training: dict, *, kind: str = "pretraining", task: dict | None = None, result: dict | None = None
) -> Path:
    """A workdir that logged 20 lines, without checkpoints."""
    model = ModelConfig(vocab_size=1000, layers=2, width=32, heads=4, feed_forward=48, max_positions=64)
    write_config(workdir, WorkdirConfig(model, Heads(mlm=True), kind, training, task))
    lines = [json.dumps(metric_line(step)) for step in range(10, 210, 10)]
    (workdir / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if result is not None:
        (workdir / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return workdir


def finetuned_workdir(folder: Path, kind: str, lines: list[str], name: str, **task: Any) -> Path:
    """A workdir as fine-tuning leaves it, with random parameters, and the dev file next to it."""
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    named = TaskConfig.kinds[kind](train=str(folder / name), dev=str(folder / name), max_length=16, **task)
    resolved, files = registry.resolve(named)
    resolved = resolved.complete(registry.read(resolved, files["dev"]))
    heads = resolved.objective().heads
    training = json.loads(json.dumps(to_dict(FinetuneConfig(task=named))))
    loaded = random_checkpoint(folder / "vocabulary", odd_config(layers=1), heads, task=to_json(resolved))
    export.write(dataclasses.replace(loaded, training=training), folder / "run")
    lines = [json.dumps({"step": step, "loss": 1.0, "task_loss": 1.0, "eval_accuracy": 0.5}) for step in (1, 2)]
    (folder / "run" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    metrics = {"accuracy": {"mean": 0.5, "std": None, "values": [0.5]}}
    result = {"task": "own", "seeds": [0], "metrics": metrics, "counts": {"dev": {"examples": len(lines)}}}
    write_json(folder / "run" / "result.json", result)
    return folder / "run"
