"""Writes tests/testdata/class_costs.npz: torch's cross-entropy with class weights and label smoothing.

    PYTHON_WITH_TORCH tests/tools/make_golden_class_costs.py        (torch 2.13 on a CPU)

A row of the logits [7, 5] with label -100 is ignored. The file holds the mean loss and its gradient for each setting.
"""

from pathlib import Path

import numpy as np
import torch

FILE = Path(__file__).parent.parent / "testdata" / "class_costs.npz"
CLASS_WEIGHTS = (0.5, 2.0, 1.0, 0.1, 3.0)
SETTINGS = {
    "plain": (None, 0.0),
    "weighed": (CLASS_WEIGHTS, 0.0),
    "smoothed": (None, 0.1),
    "both": (CLASS_WEIGHTS, 0.1),
}


def main() -> None:
    random = np.random.default_rng(0)
    logits = random.normal(0, 2, (7, 5)).astype(np.float32)
    labels = np.array([3, 0, 4, -100, 1, 1, 2])
    arrays = {"logits": logits, "labels": labels, "class_weights": np.array(CLASS_WEIGHTS, np.float32)}
    for name, (weights, smoothing) in SETTINGS.items():
        scores = torch.tensor(logits, requires_grad=True)
        of_class = None if weights is None else torch.tensor(weights)
        loss = torch.nn.functional.cross_entropy(
            scores, torch.tensor(labels), weight=of_class, label_smoothing=smoothing
        )
        loss.backward()
        arrays |= {f"{name}/loss": loss.detach().numpy(), f"{name}/gradient": scores.grad.numpy()}
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    main()
