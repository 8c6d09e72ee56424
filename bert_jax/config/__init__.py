"""Configuration: frozen dataclasses that reject unknown keys and suggest the nearest known one.

A recipe in configs/ returns an ml_collections ConfigDict made by `recipe`, so that `--config.a.b=value` works. `load`
converts it to a dataclass once, at the border; the library itself uses only these classes.
"""

from bert_jax.config.finetuning import FinetuneConfig, TaskConfig
from bert_jax.config.loading import change, from_flags, from_values, load, recipe, recipe_module, to_dict
from bert_jax.config.model import ENCODERS, EncoderKind, LoraConfig, ModelConfig, ModelOptions, add_encoder
from bert_jax.config.training import (
    CheckpointConfig,
    DistillConfig,
    EvalConfig,
    MeshConfig,
    OptimizerConfig,
    PretrainConfig,
    PretrainDataConfig,
    TrainConfig,
)

__all__ = [
    "ENCODERS",
    "CheckpointConfig",
    "DistillConfig",
    "EncoderKind",
    "EvalConfig",
    "FinetuneConfig",
    "LoraConfig",
    "MeshConfig",
    "ModelConfig",
    "ModelOptions",
    "OptimizerConfig",
    "PretrainConfig",
    "PretrainDataConfig",
    "TaskConfig",
    "TrainConfig",
    "add_encoder",
    "change",
    "from_flags",
    "from_values",
    "load",
    "recipe",
    "recipe_module",
    "to_dict",
]
