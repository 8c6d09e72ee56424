"""The peer of benchmarks/finetune.py: transformers fine-tunes a sequence classifier, padded by DataCollatorWithPadding.

It runs on the GPU if there is one; --compute_dtype=bfloat16 then means autocast, with float32 parameters.

benchmarks/finetune.py starts it under a Python with torch and transformers, which are imported only when they are used.
It prints its versions first. With --seeds=turns it then reads numbers of steps, one per line, and answers with a JSON
list of their seconds. Otherwise it trains once per seed, and prints the run's dev metrics as a JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats
from sklearn import metrics

if TYPE_CHECKING:
    import transformers

GROUPED = "grouped"  # --batches: rows of similar lengths, by transformers' own sampler


class PeerTrainer:
    """A model, its optimizer and its data, set up as in run_glue.py of transformers."""

    def __init__(self, arguments: argparse.Namespace, seed: int) -> None:
        import torch
        import transformers

        transformers.set_seed(seed)
        self.arguments = arguments
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
        splits = json.loads(arguments.rows.read_text(encoding="utf-8"))
        self.rows = {name: [self._encoded(tokenizer, row) for row in rows] for name, rows in splits.items()}
        self.collate = transformers.DataCollatorWithPadding(tokenizer)
        self.model = transformers.AutoModelForSequenceClassification.from_pretrained(
            arguments.model, num_labels=arguments.labels
        )
        self.model.to(self.device).train()
        without_decay = ("bias", "LayerNorm.weight")
        named = list(self.model.named_parameters())
        groups = [
            {"params": [value for name, value in named if not name.endswith(without_decay)], "weight_decay": 0.01},
            {"params": [value for name, value in named if name.endswith(without_decay)], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=5e-5, fused=self.device == "cuda" or None)
        self.epoch = -(-len(self.rows["train"]) // arguments.batch_size)
        total = round(self.epoch * arguments.epochs)
        self.schedule = transformers.get_linear_schedule_with_warmup(self.optimizer, total // 10, total)
        self.total = total
        self.generator = np.random.default_rng(seed)

    def _encoded(self, tokenizer: transformers.PreTrainedTokenizerBase, row: list) -> dict:
        encoded = dict(tokenizer(row[0], row[1], truncation=True, max_length=self.arguments.max_length))
        return encoded | {"labels": row[2]}

    def batches(self) -> Iterator[dict]:
        """Endless epochs in random order, or in one that groups rows by length."""
        from transformers.trainer_pt_utils import LengthGroupedSampler

        rows, size = self.rows["train"], self.arguments.batch_size
        grouped = LengthGroupedSampler(size, lengths=[len(row["input_ids"]) for row in rows])
        while True:
            order = list(grouped) if self.arguments.batches == GROUPED else self.generator.permutation(len(rows))
            for start in range(0, len(rows), size):
                yield self.collate([rows[index] for index in order[start : start + size]])

    def step(self, batch: dict) -> None:
        """One update of the parameters."""
        import torch

        self._outputs(batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def _outputs(self, batch: dict) -> transformers.modeling_outputs.SequenceClassifierOutput:
        import torch

        with torch.autocast(self.device, torch.bfloat16, enabled=self.arguments.compute_dtype == "bfloat16"):
            return self.model(**{name: value.to(self.device) for name, value in batch.items()})

    def wait(self) -> None:
        """Waits until the GPU has done what it was given."""
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def scores(self) -> dict[str, float]:
        """The metrics of the dev set."""
        import torch

        self.model.eval()
        outputs = []
        with torch.no_grad():
            for start in range(0, len(self.rows["dev"]), 64):
                batch = self.collate(self.rows["dev"][start : start + 64])
                outputs.append(self._outputs(batch).logits.float().cpu().numpy())
        logits = np.concatenate(outputs)
        labels = np.array([row["labels"] for row in self.rows["dev"]])
        if self.arguments.labels == 1:
            return {
                "pearson": float(stats.pearsonr(labels, logits[:, 0]).statistic),
                "spearman": float(stats.spearmanr(labels, logits[:, 0]).statistic),
            }
        predictions = logits.argmax(axis=1)
        return {
            "accuracy": float(metrics.accuracy_score(labels, predictions)),
            "f1": float(metrics.f1_score(labels, predictions)),
            "matthews_correlation": float(metrics.matthews_corrcoef(labels, predictions)),
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--seeds", required=True)
    parser.add_argument("--batches", choices=("random", GROUPED), default="random")
    parser.add_argument("--compute_dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--epochs", type=float, required=True)
    for name in ("labels", "batch_size", "max_length"):
        parser.add_argument(f"--{name}", type=int, required=True)
    arguments = parser.parse_args()
    import transformers

    transformers.utils.logging.set_verbosity_error()
    print_versions()
    if arguments.seeds == "turns":
        take_turns(PeerTrainer(arguments, 0))
        return
    for seed in map(int, arguments.seeds.split(",")):
        trainer = PeerTrainer(arguments, seed)
        for _, batch in zip(range(trainer.total), trainer.batches(), strict=False):
            trainer.step(batch)
        print(json.dumps(trainer.scores()), flush=True)


def print_versions() -> None:
    """Prints the versions of the peer's libraries as a JSON line."""
    import torch
    import transformers

    versions = {"peer torch": torch.__version__, "peer transformers": transformers.__version__}
    print(json.dumps(versions | {"peer threads": torch.get_num_threads()}), flush=True)


def take_turns(trainer: PeerTrainer) -> None:
    """Trains as many steps as each line of the input says, and prints the seconds of each step."""
    batches = trainer.batches()
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            start = time.perf_counter()
            trainer.step(next(batches))
            trainer.wait()
            seconds.append(time.perf_counter() - start)
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
