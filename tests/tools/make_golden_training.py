"""Writes muon.npz and class_costs.npz: torch's Muon, and its cross-entropy with class weights and label smoothing.

    PYTHON_WITH_TORCH tests/tools/make_golden_training.py --output tests/testdata        (torch 2.13 on a CPU)

muon.npz holds matrices after each step. torch computes the Newton-Schulz steps in bfloat16. This script computes them
in float32, so that results can be compared exactly, by replacing torch's cast method while it runs.

class_costs.npz holds the mean loss and its gradient for each setting. A row of the logits [7, 5] with label -100 is
ignored.
"""

import argparse
import pathlib

import numpy as np
import torch

SHAPES = {"wide": (5, 12), "tall": (12, 5), "square": (8, 8)}  # [in, out]
STEPS, RATE, DECAY, MOMENTUM = 4, 0.02, 0.1, 0.95
CLASS_WEIGHTS = (0.5, 2.0, 1.0, 0.1, 3.0)
SETTINGS = {
    "plain": (None, 0.0),
    "weighed": (CLASS_WEIGHTS, 0.0),
    "smoothed": (None, 0.1),
    "both": (CLASS_WEIGHTS, 0.1),
}


def muon(path: pathlib.Path) -> None:
    torch.Tensor.bfloat16 = lambda tensor: tensor.float().clone()  # the reference divides in place
    random = np.random.default_rng(0)
    settings = {"rate": RATE, "decay": DECAY, "momentum": MOMENTUM}
    arrays = {f"settings/{name}": value for name, value in settings.items()}
    for name, shape in SHAPES.items():
        start = random.normal(size=shape).astype(np.float32)
        gradients = random.normal(size=(STEPS, *shape)).astype(np.float32)
        weight = torch.nn.Parameter(torch.tensor(start))
        optimizer = torch.optim.Muon(
            [weight], lr=RATE, weight_decay=DECAY, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"
        )
        after = []
        for gradient in gradients:
            weight.grad = torch.tensor(gradient)
            optimizer.step()
            after.append(weight.detach().numpy().copy())
        arrays |= {f"{name}/start": start, f"{name}/gradients": gradients, f"{name}/after": np.stack(after)}
    np.savez_compressed(path, **arrays)


def class_costs(path: pathlib.Path) -> None:
    logits = np.random.default_rng(0).normal(0, 2, (7, 5)).astype(np.float32)
    labels = np.array([3, 0, 4, -100, 1, 1, 2])
    arrays = {"logits": logits, "labels": labels, "class_weights": np.array(CLASS_WEIGHTS, np.float32)}
    for name, (weights, smoothing) in SETTINGS.items():
        scores = torch.tensor(logits, requires_grad=True)
        tensor = None if weights is None else torch.tensor(weights)
        loss = torch.nn.functional.cross_entropy(scores, torch.tensor(labels), weight=tensor, label_smoothing=smoothing)
        loss.backward()
        arrays |= {f"{name}/loss": loss.detach().numpy(), f"{name}/gradient": scores.grad.numpy()}
    np.savez_compressed(path, **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("tests/testdata"), help="output folder")
    folder = parser.parse_args().output
    muon(folder / "muon.npz")
    class_costs(folder / "class_costs.npz")


if __name__ == "__main__":
    main()
