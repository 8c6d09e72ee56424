"""Writes golden arrays of recurrent language models from torch.nn.RNN and torch.nn.LSTM.

    golden_env/bin/python tests/tools/make_golden_recurrent.py --output tests/testdata

rnn.npz has two layers and tied embeddings, lstm.npz three layers and an output matrix of its own. Keys are those of
make_golden_encoders.py: weights and gradients have bert_jax's parameter paths, layers stacked. outputs/hidden_0 are the
embeddings, and outputs/loss is the mean cross-entropy of the next ids of real tokens. torch's two biases of a layer are
summed; both have the gradient of the sum.
"""

import argparse
import json
import pathlib

import numpy as np
import torch

RNN = {"encoder": "rnn", "vocab_size": 43, "layers": 2, "width": 11, "tied_output": True}
LSTM = {"encoder": "lstm", "vocab_size": 53, "layers": 3, "width": 13, "tied_output": False}
COMMON = {
    "heads": 1,
    "feed_forward": 1,
    "max_positions": 24,
    "segment_types": 0,
    "embedding_norm": False,
    "positions": "none",
    "causal": True,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
MODULES = {"rnn": torch.nn.RNN, "lstm": torch.nn.LSTM}


def by_paths(tensors: dict[str, torch.Tensor], config: dict) -> dict[str, np.ndarray]:
    """Returns torch's parameters or gradients by bert_jax's paths: kernels [L, in, gates, out]."""
    layers, width = range(config["layers"]), config["width"]
    found = {"embeddings/token/table": tensors["token.weight"].numpy()}
    for path, name in (("input/kernel", "weight_ih"), ("recurrent/kernel", "weight_hh")):
        matrices = [tensors[f"layers.{name}_l{layer}"].numpy() for layer in layers]
        found[f"encoder/layers/{path}"] = np.stack([one.T.reshape(width, -1, width) for one in matrices])
    biases = [tensors[f"layers.bias_ih_l{layer}"].numpy().reshape(-1, width) for layer in layers]
    found["encoder/layers/input/bias"] = np.stack(biases)
    if not config["tied_output"]:
        found["lm_head/output/table"] = tensors["output.weight"].numpy()
    return found


def write(path: pathlib.Path, config: dict, seed: int) -> None:
    """Writes a model of random parameters, its outputs on rows with padding, and the gradients of one step."""
    config = COMMON | config
    torch.manual_seed(seed)
    width, vocabulary, depth = config["width"], config["vocab_size"], config["layers"]
    model = torch.nn.ModuleDict(
        {
            "token": torch.nn.Embedding(vocabulary, width),
            "layers": MODULES[config["encoder"]](width, width, depth, batch_first=True),
            "output": torch.nn.Linear(width, vocabulary, bias=False),
        }
    )
    if config["tied_output"]:
        model["output"].weight = model["token"].weight
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(0.4 * torch.randn(value.shape))
    lengths, length = torch.tensor([[19], [7], [14]]), 19
    mask = (torch.arange(length) < lengths).long()
    ids = torch.randint(1, vocabulary, mask.shape) * mask
    states = [model["token"](ids)]
    for layer in range(depth):  # one module of one layer each, since a stack returns its last layer only
        one = MODULES[config["encoder"]](width, width, 1, batch_first=True)
        one.load_state_dict({f"{name}_l0": getattr(model["layers"], f"{name}_l{layer}") for name in one_names(one)})
        states.append(one(states[-1])[0])
    last = model["layers"](states[0])[0]
    torch.testing.assert_close(states[-1], last)
    states[-1] = last
    logits = model["output"](last)
    targets = torch.where(mask[:, 1:] == 1, ids[:, 1:], -100)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())
    loss.backward()
    named = dict(model.named_parameters())
    weights = by_paths({name: value.detach() for name, value in named.items()}, config)
    second = [named[f"layers.bias_hh_l{layer}"].detach().numpy().reshape(-1, width) for layer in range(depth)]
    weights["encoder/layers/input/bias"] = weights["encoder/layers/input/bias"] + np.stack(second)
    gradients = by_paths({name: value.grad for name, value in named.items()}, config)
    outputs = {f"hidden_{depth}": state for depth, state in enumerate(states)} | {"logits": logits, "loss": loss}
    arrays = {f"weights/{name}": value for name, value in weights.items()}
    arrays |= {f"gradients/{name}": value for name, value in gradients.items()}
    arrays |= {f"outputs/{name}": value.detach().numpy() for name, value in outputs.items()}
    arrays |= {"inputs/input_ids": ids.numpy(), "inputs/attention_mask": mask.numpy()}
    arrays |= {"inputs/labels": np.full(ids.shape, -100)}
    texts = {"config": json.dumps(config, sort_keys=True), "versions": json.dumps({"torch": torch.__version__})}
    np.savez_compressed(path, **arrays, **{name: np.array(text) for name, text in texts.items()})
    print(f"{path}: {path.stat().st_size} bytes, {len(arrays)} arrays")


def one_names(module: torch.nn.Module) -> list[str]:
    """Returns the names of the parameters of a module of one layer, without the number of the layer."""
    return [name.removesuffix("_l0") for name in module.state_dict()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("tests/testdata"), help="output folder")
    folder = parser.parse_args().output
    torch.set_num_threads(1)
    write(folder / "rnn.npz", RNN, seed=91)
    write(folder / "lstm.npz", LSTM, seed=92)


if __name__ == "__main__":
    main()
