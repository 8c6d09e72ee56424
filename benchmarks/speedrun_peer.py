"""The peer of benchmarks/speedrun.py: transformers' BertForMaskedLM, trained with the defaults of its run_mlm.py.

benchmarks/speedrun.py starts it under a Python that has torch and transformers, which are imported only when they are
used. Model: BertConfig of the given size, so a dropout of 0.1. Batches: eight rows in random order, 15% of the tokens
masked by DataCollatorForLanguageModeling. Optimizer: AdamW with rate 5e-5, betas 0.9 and 0.999, epsilon 1e-8 and no
decay; gradients clipped at 1; the rate decays linearly without warmup (TrainingArguments of transformers 5.23). The
script's decay is over three epochs; here it is over the minutes of training. Rows have the length of bert_jax's.

Time is measured, or counted: with --pace, each step counts as long as a step of transformers takes on an idle machine,
so that other work beside it takes nothing from the peer. A counted step applies the vocabulary head at the masked
positions only, which halves its work and changes neither loss nor gradients: the losses of one batch are compared
before training.

It saves its state every few minutes and resumes from it. OUTPUT/model has the Hugging Face layout.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

BATCH_SIZE = 8
LEARNING_RATE = 5e-5
LOG_STEPS = 100
SAVE_SECONDS = 300.0


class PeerPretraining:
    """A model, its optimizer and its data, set up as in run_mlm.py of transformers."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch
        import transformers

        transformers.set_seed(42)  # the default of TrainingArguments
        self.output: Path = arguments.output
        self.rows = np.load(arguments.rows, mmap_mode="r")
        tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.tokenizer)
        self.pad = tokenizer.pad_token_id
        self.collate = transformers.DataCollatorForLanguageModeling(tokenizer)
        config = transformers.BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=arguments.width,
            num_hidden_layers=arguments.layers,
            num_attention_heads=arguments.heads,
            intermediate_size=4 * arguments.width,
            pad_token_id=self.pad,
        )
        self.model = transformers.BertForMaskedLM(config).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
        self.budget = 60 * arguments.minutes
        self.pace: float = arguments.pace
        self.steps, self.tokens, self.seconds = 0, 0, 0.0
        self._resume()

    def check_equal_losses(self) -> None:
        """Raises SystemExit unless both forms of the loss agree on the first rows, without dropout."""
        import torch

        with torch.no_grad(), torch.random.fork_rng():
            batch = self._batch(np.arange(BATCH_SIZE))
            self.model.eval()
            whole, masked = float(self.model(**batch).loss), float(self._masked_loss(batch))
            self.model.train()
        if not abs(whole - masked) <= 1e-5 * abs(whole):
            raise SystemExit(f"the loss is {whole} for all positions and {masked} for the masked ones")

    def train(self) -> None:
        """Trains until the budget is spent; the time of saving does not count."""
        losses: list[float] = []
        saved = time.monotonic()
        order, epoch = np.empty(0, np.int64), -1
        steps_an_epoch = max(len(self.rows) // BATCH_SIZE, 1)
        while self.seconds < self.budget:
            start = time.perf_counter()
            if self.steps // steps_an_epoch != epoch:
                epoch = self.steps // steps_an_epoch
                order = np.random.default_rng(epoch).permutation(len(self.rows))
            place = self.steps % steps_an_epoch * BATCH_SIZE
            losses.append(self._step(order[place : place + BATCH_SIZE]))
            measured = self.seconds + time.perf_counter() - start
            self.seconds = 60 * self.steps / self.pace if self.pace else measured
            if self.steps % LOG_STEPS == 0:
                self._log({"step": self.steps, "minutes": self.seconds / 60, "mlm_loss": float(np.mean(losses))})
                losses = []
            if time.monotonic() - saved >= SAVE_SECONDS:
                self._save()
                saved = time.monotonic()

    def _step(self, chosen: np.ndarray) -> float:
        import torch

        batch = self._batch(chosen)
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * max(0.0, 1.0 - self.seconds / self.budget)
        loss = self._masked_loss(batch) if self.pace else self.model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.tokens += int(batch["attention_mask"].sum())
        return float(loss.detach())

    def _batch(self, chosen: np.ndarray) -> Any:
        rows = [{"input_ids": row.tolist(), "attention_mask": (row != self.pad).tolist()} for row in self.rows[chosen]]
        return self.collate(rows)

    def _masked_loss(self, batch: Any) -> Any:
        """The loss of BertForMaskedLM, from logits at the masked positions only."""
        import torch

        inputs = {name: value for name, value in batch.items() if name != "labels"}
        hidden = self.model.bert(**inputs).last_hidden_state.flatten(0, 1)
        labels = batch["labels"].flatten()
        places = (labels != -100).nonzero()[:, 0]
        return torch.nn.functional.cross_entropy(self.model.cls(hidden[places]), labels[places])

    def finish(self, tokenizer: Path) -> None:
        """Writes OUTPUT/result.json and OUTPUT/model, which appears when it is complete."""
        import torch
        import transformers

        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        counts = {"steps": self.steps, "tokens": self.tokens, "minutes": self.seconds / 60, "pace": self.pace}
        parameters = sum(value.numel() for value in self.model.parameters())
        found = counts | {"parameters": parameters, "threads": torch.get_num_threads(), "versions": versions}
        (self.output / "result.json").write_text(json.dumps(found), encoding="utf-8")
        folder = self.output / "model.incomplete"
        self.model.save_pretrained(folder)
        for file in tokenizer.iterdir():
            shutil.copy(file, folder / file.name)
        folder.rename(self.output / "model")
        (self.output / "state.pt").unlink(missing_ok=True)

    def _state(self) -> dict[str, Any]:
        import torch

        counts = {"steps": self.steps, "tokens": self.tokens, "seconds": self.seconds}
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return parts | {"counts": counts, "random": torch.get_rng_state()}

    def _save(self) -> None:
        import torch

        unfinished = self.output / "state.pt.incomplete"
        torch.save(self._state(), unfinished)
        unfinished.rename(self.output / "state.pt")

    def _resume(self) -> None:
        import torch

        log = self.output / "metrics.jsonl"
        lines: list[str] = []
        if (self.output / "state.pt").exists():
            state = torch.load(self.output / "state.pt", weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["random"])
            self.steps, self.tokens, self.seconds = (state["counts"][name] for name in ("steps", "tokens", "seconds"))
            lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= self.steps]
        log.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def _log(self, values: dict[str, float]) -> None:
        with (self.output / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("rows", "tokenizer", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--pace", type=float, default=0.0, help="steps a minute to count; 0 measures the time")
    for name in ("layers", "width", "heads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    arguments = parser.parse_args()
    training = PeerPretraining(arguments)
    if arguments.pace:
        training.check_equal_losses()
    training.train()
    training.finish(arguments.tokenizer)


if __name__ == "__main__":
    main()
