"""Writes tests/testdata/muon.npz: matrices after each step of torch.optim.Muon.

    PYTHON_WITH_TORCH tests/tools/make_golden_muon.py        (torch 2.13 on a CPU)

torch computes the Newton-Schulz steps in bfloat16. This script computes them in float32, so that results can be
compared exactly, by replacing torch's cast method while it runs.
"""

from pathlib import Path

import numpy as np
import torch

FILE = Path(__file__).parent.parent / "testdata" / "muon.npz"
SHAPES = {"wide": (5, 12), "tall": (12, 5), "square": (8, 8)}  # [in, out]
STEPS, RATE, DECAY, MOMENTUM = 4, 0.02, 0.1, 0.95


def main() -> None:
    torch.Tensor.bfloat16 = lambda tensor: tensor.float().clone()  # the reference divides in place
    random = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    for name, shape in SHAPES.items():
        start = random.normal(size=shape).astype(np.float32)
        gradients = random.normal(size=(STEPS, *shape)).astype(np.float32)
        weight = torch.nn.Parameter(torch.tensor(start))
        muon = torch.optim.Muon(
            [weight], lr=RATE, weight_decay=DECAY, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"
        )
        after = []
        for gradient in gradients:
            weight.grad = torch.tensor(gradient)
            muon.step()
            after.append(weight.detach().numpy().copy())
        arrays |= {f"{name}/start": start, f"{name}/gradients": gradients, f"{name}/after": np.stack(after)}
    settings = {"rate": RATE, "decay": DECAY, "momentum": MOMENTUM}
    np.savez_compressed(FILE, **arrays, **{f"settings/{key}": value for key, value in settings.items()})


if __name__ == "__main__":
    main()
