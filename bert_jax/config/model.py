"""The architecture of a model, its adapters (LoRA), and the model keys of a recipe."""

import dataclasses
import math
import re
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from bert_jax.config.options import POSITIVE, RATE, Kinds, at_least, check, group, option
from bert_jax.errors import UserError

# The matrices of a layer that may have an adapter, as paths that `targets` matches.
MATRICES = (
    *(f"encoder/layers/attention/{name}" for name in ("query", "key", "value", "output")),
    *(f"encoder/layers/feed_forward/{name}" for name in ("input", "output")),
)

# The matrices that cannot have one. Heads are trained in full; embeddings, also a table that is the output too, and
# the pooler stay as they are.
WITHOUT = (
    *(f"embeddings/{name}" for name in ("token", "position", "segment", "projection")),
    *("pooler/dense", "mlm_head/transform", "classifier/dense", "tagger/dense", "question_head/dense"),
)


@dataclass(frozen=True)
class LoraConfig:
    """Adapters of rank `rank` (LoRA; Hu et al. 2021): a matrix W computes x W + s dropout(x) A B.

    Only A and B are trained. The scale s is alpha / rank, or alpha / sqrt(rank) with rank_stabilized (Kalajdzievski
    2023). Raises UserError for values out of range, and for targets that match no matrix, or that name one that cannot
    have an adapter.
    """

    rank: int = option(0, "columns of A, such as 8; 0: no adapters", valid=at_least(0))
    alpha: float = option(16.0, "the adapters' scale times their rank", valid=POSITIVE)
    dropout: float = option(0.0, "dropout rate of the adapters' inputs", valid=RATE)
    targets: str = option(".*", "a regex over matrix paths; fewer matrices may learn late (docs/adapting.md)")
    rank_stabilized: bool = option(False, "scale by alpha / sqrt(rank)")

    def __post_init__(self) -> None:
        check(self, "lora.")
        try:
            matched = self.matrices
        except re.error as error:
            raise UserError(f"lora.targets is {self.targets!r}, which is not a regular expression: {error}") from None
        if not matched:
            raise UserError(
                f"lora.targets is {self.targets!r}, which matches no matrix; they are {', '.join(MATRICES)}"
            )
        named = [path for path in WITHOUT if re.search(self.targets, path)]
        if named and matched != MATRICES:  # a pattern for everything, such as .*, names none of them
            raise UserError(
                f"lora.targets is {self.targets!r}, which also matches {named[0]}, but only matrices of encoder layers "
                f"have adapters: {', '.join(MATRICES)}. Heads train in full; leave the others out"
            )

    def check_unused(self) -> None:
        """Raises UserError for keys that have no effect without adapters.

        It checks the configuration that is trained, since a sweep may set the rank.
        """
        changed = [item.name for item in dataclasses.fields(self) if getattr(self, item.name) != item.default]
        if self.rank == 0 and changed:
            raise UserError(
                f"lora.{changed[0]} is {getattr(self, changed[0])}, but lora.rank is 0, which means no adapters. "
                "Set --config.lora.rank, such as 8"
            )

    @property
    def matrices(self) -> tuple[str, ...]:
        """The paths of the adapted matrices."""
        return tuple(path for path in MATRICES if re.search(self.targets, path))

    @property
    def scale(self) -> float:
        """The factor s of the adapters' outputs."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


Options = TypeVar("Options")


@dataclass(frozen=True)
class EncoderConfig(Kinds):
    """The kind of a model's layers, with the options that it alone has. An extension adds its own (docs/extending.md).

    module       module(config, runtime=..., key=...) gives an nnx.Module with the interface of
                 bert_jax.model.transformer.Encoder; None: that one
    required     the values that other fields of ModelConfig must have, such as {"positions": "none"}
    directions   the language models of the encoder, each with its own part of every hidden state
    logits       the name of each direction's logits in exported programs; empty: lm_logits
    objective    the objective that config.objective=auto means; empty: causal or mlm, as the model is
    """

    module: ClassVar[Callable[..., Any] | None] = None
    required: ClassVar[Mapping[str, Any]] = {}
    directions: ClassVar[int] = 1
    logits: ClassVar[tuple[str, ...]] = ()
    objective: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check(self, "model.encoder.")

    def check(self, model: "ModelConfig") -> None:
        """Raises UserError if the model's other fields do not fit."""

    def check_rows(self, length: int, name: str) -> None:
        """Raises UserError if the training rows in the shards `name` are too short."""

    def computes_as(self, other: "EncoderConfig") -> bool:
        """Whether the parameters of another encoder mean the same in this one."""
        return self == other

    def layer_flops(self, model: "ModelConfig") -> int | None:
        """FLOPs in all layers' forward matmuls, per position and direction; None: as in a Transformer."""
        return None


@dataclass(frozen=True)
class Transformer(EncoderConfig, kind="transformer"):
    """Attention and feed-forward layers, whose options are those of the model."""


RELATIVE = ["none", "shaw", "buckets"]  # of model.relative; extensions append theirs


@dataclass(frozen=True)
class ModelConfig:
    """The complete architecture, which a checkpoint's config.json stores under `model`. Sizes: bert_jax/model/sizes.py.

    The defaults are BERT's. Raises UserError for values that are not allowed or contradict one another.
    """

    vocab_size: int = option(help="the tokenizer's; the table is padded (bert_jax/shapes.py)", valid=at_least(1))
    layers: int = option(help="encoder layers", valid=at_least(1))
    width: int = option(help="width of the hidden states", valid=at_least(1))
    heads: int = option(help="attention heads in each layer", valid=at_least(1))
    feed_forward: int = option(help="width between a layer's two projections", valid=at_least(1))
    embedding_width: int = option(
        0, "width of the embeddings, projected to the layers' width (Lan et al. 2020); 0: that width", valid=at_least(0)
    )
    shared_layers: str = option(
        "none",
        "parameters that all layers share (Lan et al. 2020)",
        choices=("none", "all", "attention", "feed_forward"),
    )
    max_positions: int = option(512, "maximum sequence length", valid=at_least(1))
    segment_types: int = option(
        2, "0: no segment embeddings; 1: all tokens have the same type, as in RoBERTa", valid=at_least(0)
    )
    dropout: float = option(0.1, "dropout rate of embeddings and of sublayers' outputs", valid=RATE)
    attention_dropout: float = option(
        0.1, "dropout rate of attention weights; follows model.dropout unless set", valid=RATE
    )
    layer_norm_epsilon: float = option(1e-12, "added to the variance", valid=at_least(0))
    initializer_range: float = option(0.02, "standard deviation of initial matrices", valid=at_least(0))
    norm: str = option(
        "post",
        "post (BERT), pre (GPT-2), pre_but_first (ModernBERT: no norm before the first attention)",
        choices=("post", "pre", "pre_but_first"),
    )
    embedding_norm: bool = option(True, "LayerNorm over the summed embeddings")
    bias: bool = option(True, "False: no biases, except in layers that give logits")
    activation: str = option(
        "gelu", "of the feed-forward layers", choices=("gelu", "gelu_tanh", "gelu_sigmoid", "relu")
    )
    gated: bool = option(False, "multiply the activation by a second projection (GeGLU; Shazeer 2020)")
    positions: str = option("learned", "how positions are encoded", choices=("learned", "sinusoidal", "rotary", "none"))
    position_offset: int = option(0, "unused first rows of the learned positions; 2 in RoBERTa", valid=at_least(0))
    rotary_base: float = option(10_000.0, "rotary base of layers with global attention", valid=at_least(1))
    rotary_base_local: float = option(10_000.0, "rotary base of layers with a window", valid=at_least(1))
    relative: str = option(
        "none", "relative positions: shaw (Shaw et al. 2018), buckets (T5; Raffel et al. 2020)", choices=RELATIVE
    )
    relative_distance: int = option(128, "relative distances are clipped to it", valid=at_least(1))
    window: int = option(0, "positions that a layer attends to on either side; 0: all", valid=at_least(0))
    global_every: int = option(1, "with a window: layers 0, n, 2n, ... have global attention", valid=at_least(1))
    causal: bool = option(False, "each position attends only to itself and to earlier positions")
    tied_output: bool = option(True, "the token table is also the output matrix")
    encoder: EncoderConfig = group(Transformer, "the kind of layers; bert_jax/lineage has older ones")
    lora: LoraConfig | None = option(None, "adapters of the layers' matrices (config.lora of fine-tuning)")
    pooler: str = option(
        "tanh",
        "activation over [CLS]: tanh, relu (DistilBERT), gelu (ELECTRA); transform: before heads (ModernBERT)",
        choices=("tanh", "relu", "gelu", "transform"),
    )

    def __post_init__(self) -> None:
        check(self, "model.")
        if self.width % self.heads:
            raise UserError(
                f"model.width {self.width} is not a multiple of model.heads {self.heads}. Change one of them"
            )
        # Rotary positions rotate pairs of dimensions. Sinusoidal ones pair every sine with a cosine.
        if self.positions == "rotary" and (self.width // self.heads) % 2:
            raise UserError(
                f"model.positions=rotary needs heads of even width, but model.width / model.heads is "
                f"{self.width // self.heads}"
            )
        if self.positions == "sinusoidal" and self.table_width % 2:
            raise UserError(f"model.positions=sinusoidal needs embeddings of even width, but it is {self.table_width}")
        if self.lora is not None and self.encoder.kind != "transformer":
            raise UserError(
                f"lora adapts matrices of Transformer layers, which model.encoder={self.encoder.kind} does not have. "
                "Use --config.lora.rank=0"
            )
        self.encoder.check(self)
        if self.width % self.directions:
            raise UserError(
                f"model.width is {self.width}, but model.encoder={self.encoder.kind} gives each direction half of it. "
                f"Use an even width, such as {self.width + 1}"
            )
        for name, value in self.encoder.required.items():
            if getattr(self, name) != value:
                raise UserError(
                    f"model.encoder={self.encoder.kind} does not support model.{name}={getattr(self, name)}. "
                    f"Use --config.model.{name}={str(value).lower()}"
                )

    @property
    def directions(self) -> int:
        """How many language models the encoder has; each has its own part of every hidden state."""
        return self.encoder.directions

    @property
    def layer_width(self) -> int:
        """One direction's width: the hidden states' width, or a part of it."""
        return self.width // self.directions

    @property
    def table_width(self) -> int:
        """The embeddings' width, which is also the input width of the output matrix."""
        return self.embedding_width or self.layer_width

    @property
    def residual_deviation(self) -> float:
        """The standard deviation of initial kernels whose outputs are added to the residual stream.

        Without a norm after the sum, 2 L of them add up (Radford et al. 2019, section 2.3; ModernBERT does the same).
        """
        return self.initializer_range / (1.0 if self.norm == "post" else math.sqrt(2 * self.layers))

    def is_global(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has global attention."""
        return not self.window or layer % self.global_every == 0


def _add_optional_fields(source: type, leave_out: Collection[str]) -> Callable[[type[Options]], type[Options]]:
    """Returns a class decorator that copies a dataclass's fields, each optional with default None."""

    def add(target: type[Options]) -> type[Options]:
        hints = typing.get_type_hints(source)
        # The decorator runs before @dataclass, which takes the annotations added here for fields.
        for item in dataclasses.fields(source):
            if item.name not in leave_out:
                target.__annotations__[item.name] = hints[item.name] | None
                setattr(target, item.name, dataclasses.field(default=None, metadata=item.metadata))
        return target

    return add


@dataclass(frozen=True)
@_add_optional_fields(ModelConfig, leave_out=("vocab_size", "lora"))
class ModelOptions:
    """The model keys of a recipe: a preset architecture, how to run it, and changes to it.

    The changes are the fields of ModelConfig except lora, and vocab_size, which the tokenizer determines. None keeps
    the value of the preset; attention_dropout follows dropout unless it is set.
    """

    preset: str = option("base", "a name in bert_jax/model/sizes.py, or `checkpoint`: the architecture of init_from")
    layer_loop: str = option(
        "auto",
        "scan (compiles fast), unrolled (runs fast), auto: unrolled up to 12 layers, on accelerators 24",
    )
    attention: str = option(
        "auto",
        "the kernel: einsum, banded (layers with a window), cudnn and triton (NVIDIA), splash and flash (TPU). cudnn "
        "and splash need attention_dropout=0. auto never takes flash, which has not run on a TPU yet, and takes triton "
        "only on Hopper GPUs, for attention dropout with heads of 64, in rows of a multiple of 64 from 128 on, in "
        "layers without a window or a causal mask (docs/plan.md)",
    )
    remat: str = option(
        "none",
        "what the backward pass recomputes instead of storing it: none, attention (the scores of einsum), matmuls (all "
        "but a layer's weight matmuls), layer (all but its input)",
    )
    logits_at_once: int = option(
        0,
        "vocabulary entries whose logits exist at the same time in training; the whole array is the largest of a "
        "causal or diffusion step. 0: all, but 8,192 on NVIDIA GPUs, and 4,096 with remat of matmuls or layer. Not "
        "with mesh.tensor, nor in ELECTRA's generator",
    )

    if typing.TYPE_CHECKING:  # the type checker does not see the added fields

        def __init__(
            self,
            *,
            preset: str = "",
            layer_loop: str = "",
            attention: str = "",
            remat: str = "",
            logits_at_once: int = 0,
            **changes: Any,
        ) -> None: ...

        def __getattr__(self, name: str) -> Any: ...
