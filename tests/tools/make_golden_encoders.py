"""Writes golden arrays of architectures without a format in bert_jax.interop, by bert_jax's parameter paths.

Run it in a separate environment (see make_golden.py). transformers 5 removed Shaw's relative positions, so one file
needs an older release in a second environment:

    golden_env/bin/python tests/tools/make_golden_encoders.py --output tests/testdata
    python -m venv older_env && older_env/bin/pip install torch transformers==4.46.3 safetensors
    older_env/bin/python tests/tools/make_golden_encoders.py --output tests/testdata --only shaw

| file             | reference                                                                                 |
|------------------|-------------------------------------------------------------------------------------------|
| original.npz     | torch.nn.TransformerEncoder: post-norm, ReLU; sinusoids by the equation of Vaswani et al. |
| pre_norm.npz     | torch.nn.TransformerEncoder, norm_first with a final norm; x sigmoid(1.702x); untied table |
| buckets.npz      | MPNetForMaskedLM: one bias per bucket, shared by all layers; rows above 128            |
| shaw.npz         | BertForMaskedLM with position_embedding_type="relative_key", far distances set equal     |
| gpt.npz          | OpenAIGPTLMHeadModel: post-norm, causal, no embedding norm; the loss of next ids          |
| activations.npz  | ACT2FN of transformers: x, and the value and slope of each activation at x                |
| rotations.npz    | ModernBertRotaryEmbedding: the speed of each pair of coordinates, by base                 |

Keys are those of make_golden.py, except that `config` holds the fields of bert_jax.config.ModelConfig, and weights and
gradients have bert_jax's parameter paths, layers stacked; a vocabulary's table has exactly vocab_size rows. This does
not use bert_jax, so that golden arrays define the meaning of a path independently of the package.
"""

import argparse
import json
import math
import pathlib
from collections.abc import Callable, Mapping

import make_golden
import numpy as np
import torch
import transformers

NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}
Tensors = Mapping[str, torch.Tensor]
Names = Mapping[str, str | tuple[str, ...]]
Arrays = dict[str, np.ndarray]

# Parameter path -> reference tensor, with {} for the layer; a tuple lists tensors that are fused.
TORCH_NAMES = {
    "embeddings/token/table": "token.weight",
    "embeddings/position/table": "position.weight",
    "embeddings/segment/table": "segment.weight",
    "embeddings/norm": "norm",
    "encoder/layers/attention/qkv": tuple(f"encoder.layers.{{}}.self_attn.{part}" for part in "qkv"),
    "encoder/layers/attention/output": "encoder.layers.{}.self_attn.out_proj",
    "encoder/layers/attention_norm": "encoder.layers.{}.norm1",
    "encoder/layers/feed_forward/input": "encoder.layers.{}.linear1",
    "encoder/layers/feed_forward/output": "encoder.layers.{}.linear2",
    "encoder/layers/feed_forward_norm": "encoder.layers.{}.norm2",
    "encoder/final_norm": "encoder.norm",
    "mlm_head/transform": "transform",
    "mlm_head/norm": "head_norm",
    "mlm_head/bias": "head_bias",
    "mlm_head/output/table": "output.weight",
}
MPNET_NAMES = {
    "embeddings/token/table": "mpnet.embeddings.word_embeddings.weight",
    "embeddings/position/table": "mpnet.embeddings.position_embeddings.weight",
    "embeddings/norm": "mpnet.embeddings.LayerNorm",
    "encoder/layers/attention/qkv": tuple(f"mpnet.encoder.layer.{{}}.attention.attn.{part}" for part in "qkv"),
    "encoder/layers/attention/output": "mpnet.encoder.layer.{}.attention.attn.o",
    "encoder/layers/attention_norm": "mpnet.encoder.layer.{}.attention.LayerNorm",
    "encoder/layers/feed_forward/input": "mpnet.encoder.layer.{}.intermediate.dense",
    "encoder/layers/feed_forward/output": "mpnet.encoder.layer.{}.output.dense",
    "encoder/layers/feed_forward_norm": "mpnet.encoder.layer.{}.output.LayerNorm",
    "encoder/relative_bias/table": "mpnet.encoder.relative_attention_bias.weight",
    "mlm_head/transform": "lm_head.dense",
    "mlm_head/norm": "lm_head.layer_norm",
    "mlm_head/bias": "lm_head.bias",
}
BERT_NAMES = {
    "embeddings/token/table": "bert.embeddings.word_embeddings.weight",
    "embeddings/segment/table": "bert.embeddings.token_type_embeddings.weight",
    "embeddings/norm": "bert.embeddings.LayerNorm",
    "encoder/layers/attention/qkv": tuple(
        f"bert.encoder.layer.{{}}.attention.self.{part}" for part in ("query", "key", "value")
    ),
    "encoder/layers/attention/relative/table": "bert.encoder.layer.{}.attention.self.distance_embedding.weight",
    "encoder/layers/attention/output": "bert.encoder.layer.{}.attention.output.dense",
    "encoder/layers/attention_norm": "bert.encoder.layer.{}.attention.output.LayerNorm",
    "encoder/layers/feed_forward/input": "bert.encoder.layer.{}.intermediate.dense",
    "encoder/layers/feed_forward/output": "bert.encoder.layer.{}.output.dense",
    "encoder/layers/feed_forward_norm": "bert.encoder.layer.{}.output.LayerNorm",
    "mlm_head/transform": "cls.predictions.transform.dense",
    "mlm_head/norm": "cls.predictions.transform.LayerNorm",
    "mlm_head/bias": "cls.predictions.bias",
}
GPT_NAMES = {
    "embeddings/token/table": "transformer.tokens_embed.weight",
    "embeddings/position/table": "transformer.positions_embed.weight",
    "encoder/layers/attention/qkv": tuple(f"transformer.h.{{}}.attn.{part}" for part in "qkv"),
    "encoder/layers/attention/output": "transformer.h.{}.attn.c_proj",
    "encoder/layers/attention_norm": "transformer.h.{}.ln_1",
    "encoder/layers/feed_forward/input": "transformer.h.{}.mlp.c_fc",
    "encoder/layers/feed_forward/output": "transformer.h.{}.mlp.c_proj",
    "encoder/layers/feed_forward_norm": "transformer.h.{}.ln_2",
}


def by_our_paths(tensors: Tensors, names: Names, config: dict) -> Arrays:
    """Converts parameters or gradients: kernels [in, out], separate heads, fused query, key, value, stacked layers."""
    heads, width = config["heads"], config["width"]

    def one(path: str, layer: int) -> Arrays:
        if isinstance(names[path], tuple):
            fused = [part.format(layer) for part in names[path]]
            kernels = [tensors[f"{name}.weight"].numpy().T.reshape(width, heads, -1) for name in fused]
            biases = [tensors[f"{name}.bias"].numpy().reshape(heads, -1) for name in fused]
            return {"/kernel": np.stack(kernels, axis=1), "/bias": np.stack(biases)}
        name = names[path].format(layer)
        if name in tensors:
            return {"": tensors[name].numpy()}
        weight, bias = (tensors[f"{name}.{part}"].numpy() for part in ("weight", "bias"))
        if path.endswith("norm"):
            return {"/scale": weight, "/bias": bias}
        kernel = weight.T.reshape(heads, -1, width) if path.endswith("attention/output") else weight.T
        return {"/kernel": kernel, "/bias": bias}

    found: Arrays = {}
    for path in names:
        if path.startswith("encoder/layers/"):
            layers = [one(path, layer) for layer in range(config["layers"])]
            found |= {path + end: np.stack([layer[end] for layer in layers]) for end in layers[0]}
        else:
            found |= {path + end: value for end, value in one(path, 0).items()}
    return found


class Reference(torch.nn.Module):
    """A masked language model from torch's modules: embeddings, TransformerEncoder, BERT's head."""

    def __init__(self, config: dict, activation: Callable[[torch.Tensor], torch.Tensor], *, norm_first: bool) -> None:
        super().__init__()
        width, vocabulary, epsilon = config["width"], config["vocab_size"], config["layer_norm_epsilon"]
        self.config, self.activation = config, activation
        self.token = torch.nn.Embedding(vocabulary, width)
        if config["positions"] == "learned":
            self.position = torch.nn.Embedding(config["max_positions"], width)
        if config["segment_types"]:
            self.segment = torch.nn.Embedding(config["segment_types"], width)
        if config["embedding_norm"]:
            self.norm = torch.nn.LayerNorm(width, epsilon)
        layer = torch.nn.TransformerEncoderLayer(
            width,
            config["heads"],
            config["feed_forward"],
            dropout=0.0,
            activation=activation,
            layer_norm_eps=epsilon,
            batch_first=True,
            norm_first=norm_first,
        )
        last_norm = torch.nn.LayerNorm(width, epsilon) if norm_first else None
        self.encoder = torch.nn.TransformerEncoder(layer, config["layers"], last_norm, enable_nested_tensor=False)
        self.transform = torch.nn.Linear(width, width)
        self.head_norm = torch.nn.LayerNorm(width, epsilon)
        self.head_bias = torch.nn.Parameter(torch.zeros(vocabulary))
        if not config["tied_output"]:
            self.output = torch.nn.Embedding(vocabulary, width)

    def embed(self, inputs: Tensors) -> torch.Tensor:
        ids = inputs["input_ids"]
        positions = torch.arange(ids.shape[1])
        found = self.token(ids)
        if self.config["positions"] == "learned":
            found = found + self.position(positions)
        else:
            found = found * math.sqrt(found.shape[-1]) + sinusoids(ids.shape[1], found.shape[-1])
        if self.config["segment_types"]:
            found = found + self.segment(inputs["token_type_ids"])
        return self.norm(found) if self.config["embedding_norm"] else found

    def forward(self, inputs: Tensors) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Returns the embeddings and the output of every layer, the last after the final norm; and the MLM logits."""
        padding = inputs["attention_mask"] == 0
        states = [self.embed(inputs)]
        for layer in self.encoder.layers:
            states.append(layer(states[-1], src_key_padding_mask=padding))
        if self.encoder.norm is not None:
            states[-1] = self.encoder.norm(states[-1])
        torch.testing.assert_close(states[-1], self.encoder(states[0], src_key_padding_mask=padding))
        table = self.token if self.config["tied_output"] else self.output
        rows = self.head_norm(self.activation(self.transform(states[-1])))
        return states, torch.nn.functional.linear(rows, table.weight, self.head_bias)


def sinusoids(length: int, width: int) -> torch.Tensor:
    """PE(p, 2i) = sin(p / 10000^(2i/D)), PE(p, 2i+1) the cosine (Vaswani et al. 2017, section 3.5)."""
    found = np.zeros((length, width))
    for position in range(length):
        for pair in range(0, width, 2):
            angle = position / 10000 ** (pair / width)
            found[position, pair : pair + 2] = math.sin(angle), math.cos(angle)
    return torch.tensor(found, dtype=torch.float32)


def tensors_of(model: torch.nn.Module) -> tuple[Tensors, Tensors]:
    """Returns parameters and gradients by name, with kernels [out, in] and separate query, key and value."""
    weights, gradients = {}, {}
    for name, value in model.named_parameters():
        parts = {name: (value.detach(), value.grad)}
        if any(part in name for part in (".c_attn.", ".c_proj.", ".c_fc.")):  # OpenAI's kernels are [in, out]
            parts = {name: (value.detach().T, value.grad.T)} if value.ndim == 2 else parts
        if ".c_attn." in name:
            ((weight, gradient),) = parts.values()
            chunks = zip("qkv", weight.chunk(3), gradient.chunk(3), strict=True)
            parts = {name.replace(".c_attn.", f".{part}."): pair for part, *pair in chunks}
        if ".in_proj_" in name:
            bare, kind = name.split(".in_proj_")
            chunks = zip("qkv", value.detach().chunk(3), value.grad.chunk(3), strict=True)
            parts = {f"{bare}.{part}.{kind}": (weight, gradient) for part, weight, gradient in chunks}
        weights |= {part: weight for part, (weight, _) in parts.items()}
        gradients |= {part: gradient for part, (_, gradient) in parts.items()}
    return weights, gradients


def labels_of(inputs: Tensors, vocabulary: int, seed: int) -> torch.Tensor:
    """Returns the true ids at a quarter of the real positions, including id 0; other positions are ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = inputs["input_ids"]
    chosen = (torch.rand(ids.shape, generator=generator) < 0.25) & (inputs["attention_mask"] == 1)
    targets = torch.randint(0, vocabulary, chosen.shape, generator=generator)
    targets[0, 2], chosen[0, 2] = 0, True
    return torch.where(chosen, targets, make_golden.IGNORED)


def write(
    path: pathlib.Path,
    model: torch.nn.Module,
    names: Names,
    config: dict,
    inputs: Tensors,
    outputs: Tensors,
) -> None:
    weights, gradients = tensors_of(model)
    present = {
        name: place
        for name, place in names.items()
        if any(tensor.startswith((place if isinstance(place, str) else place[0]).format(0)) for tensor in weights)
    }
    arrays = {f"weights/{name}": value for name, value in by_our_paths(weights, present, config).items()}
    arrays |= {f"gradients/{name}": value for name, value in by_our_paths(gradients, present, config).items()}
    arrays |= {f"inputs/{name}": value.numpy() for name, value in inputs.items()}
    arrays |= {f"outputs/{name}": value.detach().numpy() for name, value in outputs.items()}
    versions = {package.__name__: package.__version__ for package in (torch, transformers)}
    texts = {"config": json.dumps(config, sort_keys=True), "versions": json.dumps(versions, sort_keys=True)}
    np.savez_compressed(path, **arrays, **{name: np.array(text) for name, text in texts.items()})
    print(f"{path}: {path.stat().st_size} bytes, {len(arrays)} arrays")


def of_torch(path: pathlib.Path, config: dict, activation: Callable, *, norm_first: bool, seed: int) -> None:
    """Writes one backward pass of the MLM loss of a Reference."""
    model = Reference(config, activation, norm_first=norm_first).train()
    make_golden.randomize(model, seed)
    inputs = make_golden.inputs_of(transformers.BertConfig(vocab_size=config["vocab_size"]), [13, 5, 9], 13, seed + 1)
    if not config["segment_types"]:
        inputs["token_type_ids"] = torch.zeros_like(inputs["token_type_ids"])
    inputs["labels"] = labels_of(inputs, config["vocab_size"], seed + 2)
    states, logits = model(inputs)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())
    loss.backward()
    outputs = {f"hidden_{depth}": state for depth, state in enumerate(states)} | {"mlm_logits": logits, "loss": loss}
    write(path, model, TORCH_NAMES, config, inputs, outputs)


def of_transformers(
    path: pathlib.Path,
    model: torch.nn.Module,
    names: Names,
    config: dict,
    inputs: Tensors,
    finish: Callable[[], None] = lambda: None,
) -> None:
    """Writes one backward pass of the MLM loss of a transformers model; `finish` may change the arrays."""
    output = model(**inputs, output_hidden_states=True)
    output.loss.backward()
    finish()
    outputs = make_golden.hidden_states(output) | {"mlm_logits": output.logits, "loss": output.loss}
    segments = {"token_type_ids": torch.zeros_like(inputs["input_ids"])}
    write(path, model, names, config, segments | inputs, outputs)


def original(path: pathlib.Path) -> None:
    sizes = {"vocab_size": 43, "layers": 2, "width": 18, "heads": 3, "feed_forward": 25, "max_positions": 17}
    kind = {"activation": "relu", "positions": "sinusoidal", "embedding_norm": False, "segment_types": 0}
    config = sizes | kind | NO_DROPOUT | {"layer_norm_epsilon": 1e-6, "tied_output": True}
    of_torch(path, config, torch.nn.functional.relu, norm_first=False, seed=11)


def pre_norm(path: pathlib.Path) -> None:
    sizes = {"vocab_size": 37, "layers": 3, "width": 15, "heads": 3, "feed_forward": 22, "max_positions": 16}
    kind = {"norm": "pre", "activation": "gelu_sigmoid", "positions": "learned", "embedding_norm": True}
    config = sizes | kind | NO_DROPOUT | {"segment_types": 2, "layer_norm_epsilon": 1e-5, "tied_output": False}
    of_torch(path, config, transformers.activations.ACT2FN["quick_gelu"], norm_first=True, seed=21)


def buckets(path: pathlib.Path) -> None:
    """Uses rows of up to 141 positions, so that distances fall into every bucket and beyond the last bound, 128."""
    named = dict(zip(make_golden.NAMES, (31, 14, 2, 2, 19, 149 + 2), strict=True)) | make_golden.NO_DROPOUT
    theirs = transformers.MPNetConfig(layer_norm_eps=1e-5, attn_implementation="eager", **named)
    model = transformers.MPNetForMaskedLM(theirs).train()
    make_golden.randomize(model, seed=31)
    inputs = make_golden.inputs_of(theirs, lengths=[141, 90], length=141, seed=32)
    inputs.pop("token_type_ids")
    # The model derives positions from the ids: id 1 is padding, so no other token may have it.
    inputs["input_ids"] = torch.where(inputs["attention_mask"] == 1, inputs["input_ids"].clamp(min=2), 1)
    sizes = {"vocab_size": 31, "layers": 2, "width": 14, "heads": 2, "feed_forward": 19, "max_positions": 149}
    kind = {"position_offset": 2, "segment_types": 0, "relative": "buckets", "relative_distance": 128}
    config = sizes | kind | NO_DROPOUT | {"layer_norm_epsilon": 1e-5}
    inputs["labels"] = labels_of(inputs, config["vocab_size"], seed=33)
    of_transformers(path, model, MPNET_NAMES, config, inputs)


def shaw(path: pathlib.Path, distance: int = 4) -> None:
    """Sets the vectors of all distances beyond the clip equal; the reference's table has one row for each.

    The gradient of the shared vector is the sum of their gradients.
    """
    theirs = make_golden.config_of(41, 20, 2, 4, 23, 15, position_embedding_type="relative_key")
    model = transformers.BertForMaskedLM(theirs).train()
    make_golden.randomize(model, seed=41)
    first, last = 14 - distance, 14 + distance  # row 14 + i - j belongs to query i and key j
    tables = [getattr(layer.attention.self, "distance_embedding", None) for layer in model.bert.encoder.layer]
    if None in tables:
        raise SystemExit(
            f"transformers {transformers.__version__} has no relative_key; see the first lines of this file"
        )
    with torch.no_grad():
        for table in tables:
            table.weight[:first], table.weight[last + 1 :] = table.weight[first], table.weight[last]
    inputs = make_golden.inputs_of(theirs, lengths=[13, 8], length=13, seed=42)
    sizes = {"vocab_size": 41, "layers": 2, "width": 20, "heads": 4, "feed_forward": 23, "max_positions": 15}
    config = sizes | {"positions": "none", "relative": "shaw", "relative_distance": distance} | NO_DROPOUT

    def clip() -> None:
        for table in tables:
            gradient = table.weight.grad
            gradient[first], gradient[last] = gradient[: first + 1].sum(0), gradient[last:].sum(0)
            table.weight.grad = None
            table.weight = torch.nn.Parameter(table.weight[first : last + 1].detach().clone())
            table.weight.grad = gradient[first : last + 1]

    inputs["labels"] = labels_of(inputs, config["vocab_size"], seed=43)
    of_transformers(path, model, BERT_NAMES, config, inputs, finish=clip)


def gpt(path: pathlib.Path) -> None:
    named = {"vocab_size": 29, "n_embd": 15, "n_layer": 2, "n_head": 3, "n_positions": 13}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    theirs = transformers.OpenAIGPTConfig(attn_implementation="eager", **named, **dropouts)
    model = transformers.OpenAIGPTLMHeadModel(theirs).train()
    make_golden.randomize(model, seed=51)
    inputs = make_golden.inputs_of(theirs, lengths=[11, 6], length=11, seed=52)
    inputs.pop("token_type_ids", None)
    inputs["labels"] = torch.where(inputs["attention_mask"] == 1, inputs["input_ids"], make_golden.IGNORED)
    sizes = {"vocab_size": 29, "layers": 2, "width": 15, "heads": 3, "feed_forward": 60, "max_positions": 13}
    kind = {"activation": "gelu_tanh", "embedding_norm": False, "segment_types": 0, "causal": True}
    of_transformers(path, model, GPT_NAMES, sizes | kind | NO_DROPOUT | {"layer_norm_epsilon": 1e-5}, inputs)


def activations(path: pathlib.Path) -> None:
    theirs = {"gelu": "gelu", "gelu_tanh": "gelu_new", "gelu_sigmoid": "quick_gelu", "relu": "relu"}
    arrays = {"x": np.linspace(-7, 7, 58, dtype=np.float32)}  # does not contain 0
    for own_name, name in theirs.items():
        x = torch.tensor(arrays["x"], requires_grad=True)
        value = transformers.activations.ACT2FN[name](x)
        value.sum().backward()
        arrays |= {f"{own_name}/value": value.detach().numpy(), f"{own_name}/slope": x.grad.numpy()}
    np.savez_compressed(path, **arrays)
    print(f"{path}: {path.stat().st_size} bytes, {len(arrays)} arrays")


def rotations(path: pathlib.Path) -> None:
    """Writes ModernBERT's rotary speeds for heads of 64 and both layer types."""
    kinds = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}
    parameters = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in kinds.items()}
    config = transformers.ModernBertConfig(hidden_size=128, num_attention_heads=2, rope_parameters=parameters)
    rotary = transformers.models.modernbert.modeling_modernbert.ModernBertRotaryEmbedding(config)
    speeds = {f"{base:.0f}": getattr(rotary, f"{kind}_inv_freq").numpy() for kind, base in kinds.items()}
    np.savez_compressed(path, **speeds)
    print(f"{path}: {path.stat().st_size} bytes, {len(speeds)} arrays")


FILES = {made.__name__: made for made in (original, pre_norm, buckets, shaw, gpt, activations, rotations)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("tests/testdata"), help="output folder")
    parser.add_argument("--only", nargs="+", choices=FILES, default=[name for name in FILES if name != "shaw"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.only:
        FILES[name](arguments.output / f"{name}.npz")


if __name__ == "__main__":
    main()
