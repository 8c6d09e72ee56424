"""The peer of benchmarks/embeddings.py: sentence-transformers embeds texts, or trains with CoSENTLoss.

benchmarks/embeddings.py starts it under a Python with this library, which is imported only when it is used. It runs on
the GPU if there is one; --compute_dtype=bfloat16 then means training by autocast, with float32 parameters. It prints
its versions first. With --work=embed or --work=train it then reads numbers of steps, one per line, and answers with a
JSON list of their seconds. Otherwise --work names seeds: it trains once per seed, and prints Spearman on dev as a JSON
line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy import stats


class PeerModel:
    """A model with its data and the optimizer that the library's trainer uses by default."""

    def __init__(self, arguments: argparse.Namespace, seed: int) -> None:
        import torch
        import transformers
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.losses import CoSENTLoss

        transformers.set_seed(seed)
        self.arguments = arguments
        self.rows = json.loads(arguments.rows.read_text(encoding="utf-8"))
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = SentenceTransformer(arguments.model, device=self.device)
        self.model.max_seq_length = arguments.max_length
        self.loss = CoSENTLoss(self.model)
        without_decay = ("bias", "LayerNorm.weight")
        named = list(self.model.named_parameters())
        groups = [
            {"params": [value for name, value in named if not name.endswith(without_decay)], "weight_decay": 0.01},
            {"params": [value for name, value in named if name.endswith(without_decay)], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=2e-5, fused=self.device == "cuda" or None)
        self.total = round(-(-len(self.rows["train"]) // arguments.batch_size) * arguments.epochs)
        self.schedule = transformers.get_linear_schedule_with_warmup(self.optimizer, self.total // 10, self.total)
        self.generator = np.random.default_rng(seed)
        self.texts = [row[0] for row in self.rows["dev"]] + [row[1] for row in self.rows["dev"]]
        self.chunk = 0

    def batches(self) -> Iterator[list]:
        """Endless epochs in random order."""
        rows, size = self.rows["train"], self.arguments.batch_size
        while True:
            order = self.generator.permutation(len(rows))
            for start in range(0, len(rows), size):
                yield [rows[index] for index in order[start : start + size]]

    def tokenized(self, batch: list) -> tuple[list, list[float]]:
        """The features of both texts of a batch, and its scores."""
        return [self.model.preprocess([row[place] for row in batch]) for place in (0, 1)], [row[2] for row in batch]

    def train(self, features: list, scores: list[float]) -> None:
        """One update of the parameters."""
        import torch
        from sentence_transformers.util import batch_to_device

        self.model.train()
        placed = [batch_to_device(one, torch.device(self.device)) for one in features]
        with torch.autocast(self.device, torch.bfloat16, enabled=self.arguments.compute_dtype == "bfloat16"):
            loss = self.loss(placed, torch.tensor(scores, device=self.device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def wait(self) -> None:
        """Waits until the GPU has done what it was given."""
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def embed(self) -> None:
        """Embeds the next chunk of texts."""
        size = self.arguments.chunk
        first = self.chunk % (len(self.texts) // size) * size
        self.chunk += 1
        self.encoded(self.texts[first : first + size])

    def encoded(self, texts: list[str]) -> np.ndarray:
        return self.model.encode(texts, batch_size=self.arguments.batch_size, show_progress_bar=False)

    def spearman(self) -> float:
        """Spearman's correlation of cosines with the scores of dev."""
        found = self.encoded(self.texts)
        units = found / np.linalg.norm(found, axis=1, keepdims=True)
        first, second = np.split(units, 2)
        return float(stats.spearmanr((first * second).sum(axis=1), [row[2] for row in self.rows["dev"]]).statistic)


def print_versions() -> None:
    """Prints the versions of the peer's libraries as a JSON line."""
    import sentence_transformers
    import torch

    versions = {"peer torch": torch.__version__, "peer sentence-transformers": sentence_transformers.__version__}
    print(json.dumps(versions | {"peer threads": torch.get_num_threads()}), flush=True)


def take_turns(peer: PeerModel) -> None:
    """Takes as many steps as each line of the input says, and prints the seconds of each step."""
    batches = peer.batches()
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            embeds = peer.arguments.work == "embed"
            batch = () if embeds else peer.tokenized(next(batches))  # before the clock starts, as in bert_jax
            start = time.perf_counter()
            peer.embed() if embeds else peer.train(*batch)
            peer.wait()
            seconds.append(time.perf_counter() - start)
        print(json.dumps(seconds), flush=True)


def parse(line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--compute_dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--epochs", type=float, required=True)
    for name in ("batch_size", "max_length", "chunk"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser.parse_args(line)


def main() -> None:
    arguments = parse()
    print_versions()
    if arguments.work in ("embed", "train"):
        take_turns(PeerModel(arguments, 0))
        return
    for seed in map(int, arguments.work.split(",")):
        peer = PeerModel(arguments, seed)
        for _, batch in zip(range(peer.total), peer.batches(), strict=False):
            peer.train(*peer.tokenized(batch))
        print(json.dumps({"spearman": peer.spearman()}), flush=True)


if __name__ == "__main__":
    main()
