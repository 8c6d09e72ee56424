"""Writes golden arrays of recurrent language models from torch.nn.RNN and torch.nn.LSTM.

    golden_env/bin/python tests/tools/make_golden_recurrent.py --output tests/testdata

rnn.npz has two layers and tied embeddings, lstm.npz three layers and an output matrix of its own. Keys are those of
make_golden_encoders.py: weights and gradients have bert_jax's parameter paths, layers stacked. outputs/hidden_0 are the
embeddings, and outputs/loss is the mean cross-entropy of the next ids of real tokens. torch's two biases of a layer are
summed; both have the gradient of the sum.

bilstm.npz and elmo.npz are two torch.nn.LSTM with the same embeddings and output matrix. The second reads each row from
its last real token to its first, and predicts the previous ids: outputs/forward_loss and outputs/backward_loss, whose
sum is outputs/loss. Hidden states are [forward; backward]. elmo.npz has projections and residual connections.
"""

import argparse
import json
import pathlib

import numpy as np
import torch

RNN = {"encoder": "rnn", "vocab_size": 43, "layers": 2, "width": 11, "tied_output": True}
LSTM = {"encoder": "lstm", "vocab_size": 53, "layers": 3, "width": 13, "tied_output": False}
BILSTM = {"encoder": "bilstm", "vocab_size": 43, "layers": 2, "width": 14, "tied_output": True, "causal": False}
ELMO = BILSTM | {"tied_output": False, "cell_width": 9, "residual": True}
COMMON = {"heads": 1, "feed_forward": 1, "max_positions": 24, "segment_types": 0, "embedding_norm": False}
COMMON |= {"positions": "none", "causal": True, "dropout": 0.0, "attention_dropout": 0.0}
DIRECTIONS = ("forward_layers", "backward_layers")
MODULES = {"rnn": torch.nn.RNN, "lstm": torch.nn.LSTM}


def by_paths(tensors: dict[str, torch.Tensor], config: dict) -> dict[str, np.ndarray]:
    """Returns torch's parameters or gradients by bert_jax's paths."""
    found = {"embeddings/token/table": tensors["token.weight"].numpy()}
    if config["encoder"] == "bilstm":
        for direction in DIRECTIONS:
            found |= layers_by_paths(
                tensors, config, config["width"] // 2, direction, f"{direction.removesuffix('_layers')}/"
            )
    else:
        found |= layers_by_paths(tensors, config, config["width"], "layers", "")
    if not config["tied_output"]:
        found["lm_head/output/table"] = tensors["output.weight"].numpy()
    return found


def layers_by_paths(
    tensors: dict[str, torch.Tensor], config: dict, width: int, module: str, folder: str
) -> dict[str, np.ndarray]:
    """Returns the tensors of one stack by path: kernels [L, in, gates, cells], projections [L, cells, out]."""
    layers, cells, found = range(config["layers"]), config.get("cell_width") or width, {}
    for path, name in (("input/kernel", "weight_ih"), ("recurrent/kernel", "weight_hh")):
        matrices = [tensors[f"{module}.{name}_l{layer}"].numpy() for layer in layers]
        found[f"encoder/layers/{folder}{path}"] = np.stack([one.T.reshape(width, -1, cells) for one in matrices])
    biases = [tensors[f"{module}.bias_ih_l{layer}"].numpy().reshape(-1, cells) for layer in layers]
    found[f"encoder/layers/{folder}input/bias"] = np.stack(biases)
    if config.get("cell_width"):
        projections = [tensors[f"{module}.weight_hr_l{layer}"].numpy().T for layer in layers]
        found[f"encoder/layers/{folder}projection/kernel"] = np.stack(projections)
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
    save(path, config, model, {"logits": logits, "loss": loss}, states, ids, mask)


def save(
    path: pathlib.Path,
    config: dict,
    model: torch.nn.ModuleDict,
    outputs: dict[str, torch.Tensor],
    states: list[torch.Tensor],
    ids: torch.Tensor,
    mask: torch.Tensor,
) -> None:
    """Writes the file of a model after its backward pass."""
    named = dict(model.named_parameters())
    tensors = {name: value.detach() for name, value in named.items()}
    for name in [name for name in tensors if ".bias_ih_" in name]:
        tensors[name] = tensors[name] + tensors[name.replace("_ih_", "_hh_")]
    weights = by_paths(tensors, config)
    gradients = by_paths({name: value.grad for name, value in named.items()}, config)
    outputs = {f"hidden_{depth}": state for depth, state in enumerate(states)} | outputs
    arrays = {f"weights/{name}": value for name, value in weights.items()}
    arrays |= {f"gradients/{name}": value for name, value in gradients.items()}
    arrays |= {f"outputs/{name}": value.detach().numpy() for name, value in outputs.items()}
    arrays |= {"inputs/input_ids": ids.numpy(), "inputs/attention_mask": mask.numpy()}
    arrays |= {"inputs/labels": np.full(ids.shape, -100)}
    own = {key: config[key] for key in ("cell_width", "residual") if key in config}
    stored = {key: value for key, value in config.items() if key not in own}
    stored["encoder"] = {"kind": config["encoder"]} | own
    texts = {"config": json.dumps(stored, sort_keys=True), "versions": json.dumps({"torch": torch.__version__})}
    np.savez_compressed(path, **arrays, **{name: np.array(text) for name, text in texts.items()})
    print(f"{path}: {path.stat().st_size} bytes, {len(arrays)} arrays")


def write_bidirectional(path: pathlib.Path, config: dict, seed: int) -> None:
    """Writes two language models that share embeddings and output matrix, as `write` does."""
    config = COMMON | config
    torch.manual_seed(seed)
    width, vocabulary, depth = config["width"] // 2, config["vocab_size"], config["layers"]
    cells = config.get("cell_width") or width
    projected = {"proj_size": width} if config.get("cell_width") else {}
    stacks = {name: torch.nn.LSTM(width, cells, depth, batch_first=True, **projected) for name in DIRECTIONS}
    token, output = torch.nn.Embedding(vocabulary, width), torch.nn.Linear(width, vocabulary, bias=False)
    model = torch.nn.ModuleDict({"token": token, **stacks, "output": output})
    if config["tied_output"]:
        output.weight = token.weight
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(0.4 * torch.randn(value.shape))
    rows = [torch.randint(1, vocabulary, (length,)) for length in (17, 6, 13)]
    # Each row is computed alone, without padding.
    states = torch.zeros(depth + 1, len(rows), 17, 2 * width)
    sums, count = {name: torch.zeros(()) for name in DIRECTIONS}, sum(len(row) - 1 for row in rows)
    for number, row in enumerate(rows):
        for part, name in enumerate(DIRECTIONS):
            text = row.flip(0) if part else row
            found = layers_of(stacks[name], token(text), config)
            loss = torch.nn.functional.cross_entropy(output(found[-1][:-1]), text[1:], reduction="sum")
            sums[name] = sums[name] + loss / count
            for layer, state in enumerate(found):
                own = (state.flip(0) if part else state).detach()
                states[layer, number, : len(row), part * width : (part + 1) * width] = own
    total = sums[DIRECTIONS[0]] + sums[DIRECTIONS[1]]
    total.backward()
    outputs = {"loss": total, "forward_loss": sums[DIRECTIONS[0]], "backward_loss": sums[DIRECTIONS[1]]}
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    save(path, config, model, outputs, list(states), ids, (ids > 0).long())


def layers_of(stack: torch.nn.LSTM, embedded: torch.Tensor, config: dict) -> list[torch.Tensor]:
    """Returns the embeddings and the output of each layer on one text, [T, D] each."""
    states = [embedded]
    for layer in range(config["layers"]):
        one = torch.nn.LSTM(stack.input_size, stack.hidden_size, 1, batch_first=True, proj_size=stack.proj_size)
        own = {name: getattr(stack, f"{name}_l{layer}") for name in one_names(one)}
        above = torch.func.functional_call(one, {f"{name}_l0": value for name, value in own.items()}, (states[-1],))[0]
        states.append(above + states[-1] if config.get("residual") and layer else above)
    if not config.get("residual"):
        torch.testing.assert_close(stack(embedded)[0], states[-1])
    return states


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
    write_bidirectional(folder / "bilstm.npz", BILSTM, seed=93)
    write_bidirectional(folder / "elmo.npz", ELMO, seed=94)


if __name__ == "__main__":
    main()
