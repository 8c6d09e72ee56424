"""Configuration: frozen dataclasses that reject unknown keys and say which was meant.

A recipe in configs/ returns an ml_collections ConfigDict made by `recipe`, so that `--config.a.b=value` works;
`load` turns it back into a dataclass once, at the border. Inside the library there are only these classes.
"""

import dataclasses
import difflib
import importlib.util
import inspect
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import ml_collections
from absl import flags
from ml_collections import config_dict, config_flags

from bert_jax.command import UserError

MODEL_CHOICES = {
    "norm": ("post", "pre", "pre_but_first"),
    "activation": ("gelu", "gelu_tanh", "gelu_sigmoid", "relu"),
    "positions": ("learned", "sinusoidal", "rotary", "none"),
    "relative": ("none", "shaw", "buckets"),
    "pooler": ("tanh", "transform"),
}
MODEL_LEAST = {
    "vocab_size": 1,
    "layers": 1,
    "width": 1,
    "heads": 1,
    "feed_forward": 1,
    "max_positions": 1,
    "segment_types": 0,
    "position_offset": 0,
    "relative_distance": 1,
    "window": 0,
    "global_every": 1,
    "layer_norm_epsilon": 0,
    "initializer_range": 0,
    "rotary_base": 1,
    "rotary_base_local": 1,
}


@dataclass(frozen=True)
class ModelConfig:
    """The architecture, whole: what a checkpoint's config.json stores under `model`. Sizes: bert_jax/model/sizes.py.

    The defaults are BERT's. Raises UserError for values that are none of the choices, or that do not go together.
    """

    vocab_size: int  # the tokenizer's; the table is padded (bert_jax/shapes.py)
    layers: int
    width: int
    heads: int
    feed_forward: int
    max_positions: int = 512  # slots of the longest sequence
    segment_types: int = 2  # 0: no segment embeddings; 1: every token is of the one type, as in RoBERTa
    dropout: float = 0.1
    attention_dropout: float = 0.1
    layer_norm_epsilon: float = 1e-12
    initializer_range: float = 0.02
    norm: str = "post"  # post; pre (GPT-2); pre_but_first (ModernBERT: none before the first attention)
    embedding_norm: bool = True  # LayerNorm over the summed embeddings
    bias: bool = True  # False: none in dense layers and norms, but in what gives logits
    activation: str = "gelu"  # gelu, gelu_tanh, gelu_sigmoid, relu
    gated: bool = False  # the activation of one product times another (GeGLU; Shazeer 2020)
    positions: str = "learned"  # learned, sinusoidal, rotary, none
    position_offset: int = 0  # rows of the learned positions before the first that is used; 2 in RoBERTa
    rotary_base: float = 10_000.0  # of layers that see the whole sequence
    rotary_base_local: float = 10_000.0  # of layers with a window
    relative: str = "none"  # none, shaw (Shaw et al. 2018), buckets (T5; Raffel et al. 2020)
    relative_distance: int = 128  # distances beyond it are as it
    window: int = 0  # slots that a layer sees to either side; 0: all
    global_every: int = 1  # with a window: the layers 0, n, 2n, ... see all
    causal: bool = False  # each slot sees itself and those before it
    tied_output: bool = True  # the token table is the output matrix, too
    pooler: str = "tanh"  # tanh, over [CLS] (BERT); transform, before each head (ModernBERT)

    def __post_init__(self) -> None:
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"model.{name} is {getattr(self, name)}; use a share from 0 to below 1, as 0.1")
        for name, known in MODEL_CHOICES.items():
            if getattr(self, name) not in known:
                raise UserError(f"model.{name} is {getattr(self, name)!r}; use one of: {', '.join(known)}")
        for name, least in MODEL_LEAST.items():
            if not least <= getattr(self, name) < math.inf:  # nor NaN
                raise UserError(f"model.{name} is {getattr(self, name)}; it must be at least {least}, and finite")
        if self.width % self.heads:
            raise UserError(f"model.width {self.width} is not a multiple of model.heads {self.heads}")
        if self.positions == "rotary" and (self.width // self.heads) % 2:
            raise UserError(f"model.positions=rotary needs heads of even width, got {self.width // self.heads}")
        if self.positions == "sinusoidal" and self.width % 2:
            raise UserError(f"model.positions=sinusoidal needs an even model.width, got {self.width}")

    @property
    def residual_deviation(self) -> float:
        """Of the initial kernels whose outputs are added to the residual stream.

        Where no norm follows the sum, 2 L of them add up (Radford et al. 2019, section 2.3; ModernBERT does the same).
        """
        return self.initializer_range / (1.0 if self.norm == "post" else math.sqrt(2 * self.layers))

    def is_global(self, layer: int) -> bool:
        """Whether a layer, counted from 0, sees the whole sequence."""
        return not self.window or layer % self.global_every == 0


@dataclass(frozen=True)
class ModelOptions:
    """What a recipe says of the model: an architecture by name, changes to it, and how to run it."""

    preset: str = "base"  # a name of bert_jax/model/sizes.py, or checkpoint: as init_from has it
    layer_loop: str = "auto"  # scan (compiles fast), unrolled (runs fast), auto: unrolled up to 12 layers
    attention: str = "auto"  # see bert_jax/model/attention_impl.py
    remat: str = "none"  # layer: less memory, a third more work (bert_jax/model/runtime.py)
    # The fields of ModelConfig, which says what they mean. None keeps the preset's value.
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    feed_forward: int | None = None
    max_positions: int | None = None
    segment_types: int | None = None
    dropout: float | None = None  # attention_dropout follows it unless given
    attention_dropout: float | None = None
    layer_norm_epsilon: float | None = None
    initializer_range: float | None = None
    norm: str | None = None
    embedding_norm: bool | None = None
    bias: bool | None = None
    activation: str | None = None
    gated: bool | None = None
    positions: str | None = None
    position_offset: int | None = None
    rotary_base: float | None = None
    rotary_base_local: float | None = None
    relative: str | None = None
    relative_distance: int | None = None
    window: int | None = None
    global_every: int | None = None
    causal: bool | None = None
    tied_output: bool | None = None
    pooler: str | None = None


@dataclass(frozen=True)
class DataConfig:
    train: str = ""  # the output of data_prep.build_examples, or its train/
    eval: str = ""  # the same, or its eval/; empty: train's
    prefetch: int = 4  # batches prepared ahead, in a thread


@dataclass(frozen=True)
class PretrainDataConfig(DataConfig):
    """The rate of dynamic masks in training; without either key it is that of the shards, as in evaluation always."""

    mask_rate: float | None = None  # as 0.2
    mask_schedule: str = ""  # STEP:RATE,..., each rate held until the next step: 0:0.30,50000:0.15,90000:0.05


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW as in BERT (Devlin et al. 2019, appendix A.2), with bias correction."""

    name: str = "adamw"
    learning_rate: float = 1e-4
    warmup_steps: int = 10_000
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-6
    weight_decay: float = 0.01
    clip_norm: float = 1.0


@dataclass(frozen=True)
class MeshConfig:
    data: int = -1  # devices on this axis; -1: what is left


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = 0  # 0: not by steps
    every_minutes: float = 10.0  # 0: not by the clock
    keep: int = 2


@dataclass(frozen=True)
class EvalConfig:
    every_steps: int = 0  # 0: at the end only
    batch_size: int = 0  # 0: the training batch size
    max_rows: int = 0  # 0: all


@dataclass(frozen=True)
class TrainConfig:
    """What pretraining and fine-tuning share. Keys are a contract (README, configs/)."""

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    batch_size: int = 256  # global, in rows
    microbatches: int = 1  # gradient accumulation: each step runs this many parts of the batch
    steps: int = 0
    budget_minutes: float = 0.0  # wall-clock; with steps too, whichever ends first
    budget_replay: str = ""  # a metrics.jsonl whose logged budget fractions are followed instead of the clock
    seed: int = 0
    compute_dtype: str = "auto"  # bfloat16, float32 (matmul precision highest); auto: bfloat16 but on CPU
    log_every: int = 50
    init_from: str = ""  # any checkpoint; empty: from scratch


@dataclass(frozen=True)
class PretrainConfig(TrainConfig):
    data: PretrainDataConfig = field(default_factory=PretrainDataConfig)
    steps: int = 1_000_000
    objective: str = "auto"  # mlm, with next sentences where the shards have labels; causal; auto: what the model can
    span_boundary: bool = False  # masked spans from their boundaries, too (SpanBERT; Joshi et al. 2020, section 3.2)


@dataclass(frozen=True)
class TaskConfig:
    """A task by name (bert_jax/tasks), or files and columns of the user's own."""

    name: str = ""
    data_dir: str = ""  # the folder of a named task's files; empty: $BERT_JAX_DATA
    train: str = ""
    dev: str = ""
    test: str = ""
    text: str = ""  # column, by header name or number from 0
    text_pair: str = ""
    label: str = ""
    kind: str = ""  # classification, regression, tagging
    max_length: int = 128
    # How a class or a score reads a text: cls, mean, max, attention_dot, attention_additive; empty: as init_from does.
    pooling: str = ""


@dataclass(frozen=True)
class FinetuneConfig(TrainConfig):
    # Devlin et al. 2019, appendix A.3, tried 2e-5 to 5e-5; a warmup of -1 is a tenth of the steps.
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=3e-5, warmup_steps=-1))
    task: TaskConfig = field(default_factory=TaskConfig)
    seeds: tuple[int, ...] = (0,)
    epochs: float = 3.0
    train_layers: str = "all"  # all, head, last:k, no_embeddings
    batch_size: int = 32


Config = TypeVar("Config")
Values: TypeAlias = Mapping[str, Any] | ml_collections.ConfigDict


def recipe(config: Any) -> ml_collections.ConfigDict:
    """The ConfigDict of a config dataclass, for a recipe's get_config; fields that are None may be overridden too."""
    tree = ml_collections.ConfigDict()
    hints = typing.get_type_hints(type(config))
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            tree[item.name] = recipe(value)
        elif value is None:
            tree[item.name] = config_dict.placeholder(_plain_type(hints[item.name]))
        else:
            tree[item.name] = value
    return tree


def load(config_class: type[Config], values: Values, where: str = "config") -> Config:
    """Builds a config dataclass from a ConfigDict or a dict, recursively.

    Raises UserError for an unknown key (naming the nearest known one), a missing key or a value of another type.
    """
    hints = typing.get_type_hints(config_class)
    fields = {item.name: item for item in dataclasses.fields(config_class)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise UserError(_unknown_key(where, key, fields))
    arguments = {}
    for name, item in fields.items():
        if name in values:
            arguments[name] = _convert(hints[name], values[name], f"{where}.{name}")
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise UserError(f"{where}.{name} is missing; give a value of type {_plain_type(hints[name]).__name__}")
    return config_class(**arguments)


def to_dict(config: Any) -> dict[str, Any]:
    """Plain JSON values of a config dataclass."""
    return dataclasses.asdict(config)


def read_flags(recipe_name: str, overrides: Sequence[str] = ()) -> ml_collections.ConfigDict:
    """The recipe FILE or FILE:ARG, with `--config.a.b=value` overrides applied.

    Raises UserError for a missing file, an argument that the recipe does not know, an unknown key or a value of
    another type.
    """
    arguments = ["command", *overrides]
    values = flags.FlagValues()
    tree = _run_recipe(recipe_name)
    for override in overrides:
        _check_override(tree, override)
    try:
        config_flags.DEFINE_config_dict("config", tree, flag_values=values, sys_argv=arguments)
        rest = values(arguments)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"in an override of {recipe_name}: {' '.join(str(error).split())}") from error
    if len(rest) > 1:
        raise UserError(f"unexpected argument {rest[1]!r}; overrides look like --config.batch_size=64")
    return values.config


def _check_override(tree: ml_collections.ConfigDict, override: str) -> None:
    """Raises UserError for `--config.a.b=...` where the recipe has no a.b."""
    if not (match := re.match(r"--?config\.([\w.]+)", override)):
        return
    where = "config"
    place: Any = tree
    for key in match[1].split("."):
        if not isinstance(place, ml_collections.ConfigDict):
            raise UserError(f"unknown key {where}.{key}; {where} is a single value, as --{where}=VALUE")
        if key not in place:
            raise UserError(_unknown_key(where, key, place.keys()))
        where, place = f"{where}.{key}", place[key]


def _unknown_key(where: str, key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
    meant = f"did you mean {where}.{near[0]}?" if near else f"known: {', '.join(sorted(known))}"
    return f"unknown key {where}.{key}; {meant}"


def _run_recipe(recipe_name: str) -> ml_collections.ConfigDict:
    """Runs get_config of a recipe file, with what stands after the colon as its argument."""
    file, colon, argument = recipe_name.partition(":")
    specification = importlib.util.spec_from_file_location("recipe", file)
    if not Path(file).is_file() or specification is None or specification.loader is None:
        raise UserError(f"no such recipe: {file}; those that come with bert_jax are configs/*.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    get_config = getattr(module, "get_config", None)
    if get_config is None:
        raise UserError(f"{file} has no get_config(); see configs/bert_tiny.py for what a recipe looks like")
    if not colon:
        return get_config()
    if not inspect.signature(get_config).parameters:
        raise UserError(f"{file} takes no argument, but got {argument!r}; leave out the colon and what follows")
    return get_config(argument)


def _convert(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping | ml_collections.ConfigDict):
            raise UserError(f"{where} is {value!r}; it holds keys, as --{where}.KEY=VALUE")
        return load(typing.cast(type[Any], kind), typing.cast(Values, value), where)
    if value is None and types.NoneType in typing.get_args(kind):
        return None
    if typing.get_origin(kind) is tuple:
        element = typing.get_args(kind)[0]
        parts = value if isinstance(value, list | tuple) else (value,)
        return tuple(_convert(element, part, where) for part in parts)
    wanted = _plain_type(kind)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise UserError(f"{where} is {value!r}; it takes a value of type {wanted.__name__}")
    return value


def _plain_type(kind: Any) -> type:
    """int for int, int | None and so on; tuple for tuple[...]."""
    inner = [argument for argument in typing.get_args(kind) if argument is not types.NoneType]
    if typing.get_origin(kind) is tuple:
        return tuple
    return inner[0] if inner else kind
