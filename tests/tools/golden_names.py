"""Maps bert_jax's parameter paths to reference tensors, for architectures without a format in bert_jax.interop.

This does not use bert_jax, so that golden arrays define the meaning of a path independently of the package.
"""

from collections.abc import Mapping

import numpy as np
import torch

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
