"""Makes small random checkpoints for tests that read and write them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.interop.families.modernbert import ALWAYS
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model import layers
from bert_jax.model.bert import abstract_params
from bert_jax.model.heads.config import Heads
from bert_jax.tokenization import tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "cat", "dog", "sat", "on", "a", "mat", ".", "un", "##want", "##able", "##s", "river"]
PRETRAINING = Heads(mlm=True, next_sentence=True, pooler=True)


def write_vocabulary(folder: Path, size: int) -> None:
    """Writes a WordPiece vocabulary of some words, filled up to the size."""
    tokens = SPECIAL + WORDS
    tokens += [f"word{index}" for index in range(len(tokens), size)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(tokens[:size]) + "\n")


def odd_config(**changes: Any) -> ModelConfig:
    """Returns a configuration in which no two axes have the same size."""
    sizes = {"vocab_size": 131, "layers": 3, "width": 20, "heads": 4, "feed_forward": 28, "max_positions": 24}
    return ModelConfig(**(sizes | changes))


def random_tree(abstract: Any, scale: float = 0.3, seed: int = 1) -> Any:
    """Returns numpy arrays of the shapes of a tree, large enough that no parameter is without effect."""
    draw = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: draw.normal(0, scale, leaf.shape).astype(np.float32), abstract)


def random_checkpoint(folder: Path, config: ModelConfig, heads: Heads = PRETRAINING, **known: object) -> LoadedModel:
    """Returns random parameters, with zeros for the padding of the vocabulary; writes the vocabulary to `folder`."""
    write_vocabulary(folder, config.vocab_size)
    generator = np.random.default_rng(0)
    params = {
        path: (0.3 * generator.standard_normal(leaf.shape)).astype(np.float32)
        for path, leaf in layers.flatten(abstract_params(config, heads)).items()
    }
    for path in ("embeddings/token/table", "mlm_head/bias", "mlm_head/output/table", "lm_head/output/table"):
        if path in params:
            params[path][config.vocab_size :] = 0
    return LoadedModel(config, heads, params, tokenizer.load(folder, lowercase=True), **known)


def sensitive(loaded: LoadedModel) -> LoadedModel:
    """The model with norms that scale by about 1, so that a masked neighbor changes a score by more than rounding."""
    return dataclasses.replace(
        loaded, params={path: value + path.endswith("scale") for path, value in loaded.params.items()}
    )


def change_config(folder: Path, **changes: object) -> None:
    """Sets fields of config.json in a Hugging Face folder."""
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))


def assert_same_tensors(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    """Asserts that names, dtypes and all bits are equal."""
    assert set(got) == set(wanted)
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype, name
        np.testing.assert_array_equal(got[name], tensor, err_msg=name)


MODERN_SIZES = {"width": 24, "layers": 4, "layer_norm_epsilon": 1e-5, "dropout": 0.0}
ROTATIONS = {"rotary_base": 160_000.0, "rotary_base_local": 500.0, "window": 3, "global_every": 3}


def modernbert(**changes):
    """ModernBERT of odd sizes."""
    return odd_config(**(MODERN_SIZES | ROTATIONS | ALWAYS | {"bias": False} | changes))
