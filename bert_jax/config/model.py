"""The architecture of a model, its adapters (LoRA), and the model keys of a recipe."""

import dataclasses
import math
import re
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from bert_jax.errors import UserError

# The matrices of a layer that may have an adapter, by the path that `targets` matches.
MATRICES = (
    *(f"encoder/layers/attention/{name}" for name in ("query", "key", "value", "output")),
    *(f"encoder/layers/feed_forward/{name}" for name in ("input", "output")),
)

# Those that cannot have one. Heads are trained in full; embeddings, also a table that is the output too, and the pooler
# stay as they are.
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

    rank: int = 0  # columns of A; 0: no adapters
    alpha: float = 16.0  # the scale of the adapters times their rank
    dropout: float = 0.0  # of the adapters' inputs
    targets: str = ".*"  # a regex over the paths of matrices; fewer may learn late (docs/adapting.md)
    rank_stabilized: bool = False  # the scale is alpha / sqrt(rank)

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise UserError(f"lora.rank is {self.rank}. Use 1 or more, such as 8, or 0 for no adapters")
        if not 0 < self.alpha < math.inf:
            raise UserError(f"lora.alpha is {self.alpha}. Use a number above 0, such as {max(2 * self.rank, 16)}")
        if not 0 <= self.dropout < 1:
            raise UserError(f"lora.dropout is {self.dropout}. Use a rate from 0 to below 1, such as 0.1")
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

        This is a check of the configuration that is trained: a sweep may set the rank.
        """
        changed = [item.name for item in fields(self) if getattr(self, item.name) != item.default]
        if self.rank == 0 and changed:
            raise UserError(
                f"lora.{changed[0]} is {getattr(self, changed[0])}, but lora.rank is 0, which means no adapters. "
                "Set --config.lora.rank, such as 8"
            )

    @property
    def matrices(self) -> tuple[str, ...]:
        """The paths of the matrices that have adapters."""
        return tuple(path for path in MATRICES if re.search(self.targets, path))

    @property
    def scale(self) -> float:
        """The factor s of the adapters' outputs."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


Options = TypeVar("Options")

# The allowed values of fields with a fixed choice.
MODEL_CHOICES = {
    "encoder": ("transformer",),  # and those of extensions (add_encoder)
    "norm": ("post", "pre", "pre_but_first"),
    "activation": ("gelu", "gelu_tanh", "gelu_sigmoid", "relu"),
    "positions": ("learned", "sinusoidal", "rotary", "none"),
    "relative": ("none", "shaw", "buckets"),
    "pooler": ("tanh", "relu", "gelu", "transform"),
    "shared_layers": ("none", "all", "attention", "feed_forward"),
}
# The least allowed values of numeric fields.
MODEL_LEAST = {
    "vocab_size": 1,
    "layers": 1,
    "width": 1,
    "heads": 1,
    "feed_forward": 1,
    "embedding_width": 0,
    "max_positions": 1,
    "segment_types": 0,
    "position_offset": 0,
    "relative_distance": 1,
    "window": 0,
    "global_every": 1,
    "bptt": 0,
    "cell_width": 0,
    "layer_norm_epsilon": 0,
    "initializer_range": 0,
    "rotary_base": 1,
    "rotary_base_local": 1,
}

# The values that the fields of recurrent encoders must have in the others.
WITHOUT_RECURRENCE: dict[str, Any] = {"bptt": 0, "cell_width": 0, "recurrent_residual": False}


@dataclass(frozen=True)
class EncoderKind:
    """What model.encoder=NAME means. Extensions add their own by add_encoder (docs/extending.md).

    module       module(config, runtime=..., key=...) gives an nnx.Module with the interface of
                 bert_jax.model.transformer.Encoder; None: that one
    required     the values that other fields of ModelConfig must have, such as {"positions": "none"}
    check        raises UserError for other fields that do not fit
    layer_flops  the FLOPs of the layers' forward matmuls for one position of one direction; None: a Transformer's
    directions   the language models of the encoder, each with its own part of every hidden state
    logits       the name of each direction's logits in exported programs; empty: lm_logits
    objective    the name in OBJECTIVES that config.objective=auto means; empty: causal or mlm, as the model is
    """

    module: Callable[..., Any] | None = None
    required: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    check: "Callable[[ModelConfig], None] | None" = None
    layer_flops: "Callable[[ModelConfig], int] | None" = None
    directions: int = 1
    logits: tuple[str, ...] = ()
    objective: str = ""


ENCODERS = {"transformer": EncoderKind(required=WITHOUT_RECURRENCE)}  # by model.encoder


def add_encoder(name: str, kind: EncoderKind) -> None:
    """Makes an encoder available as model.encoder=NAME."""
    ENCODERS[name] = kind
    if name not in MODEL_CHOICES["encoder"]:
        MODEL_CHOICES["encoder"] += (name,)


@dataclass(frozen=True)
class ModelConfig:
    """The complete architecture, which a checkpoint's config.json stores under `model`. Sizes: bert_jax/model/sizes.py.

    The defaults are BERT's. Raises UserError for values that are not allowed or contradict one another.
    """

    vocab_size: int  # that of the tokenizer; the table is padded (bert_jax/shapes.py)
    layers: int  # of the encoder
    width: int  # of the hidden states
    heads: int  # of attention, in each layer
    feed_forward: int  # the width between the two projections of a layer
    embedding_width: int = 0  # of the embeddings, projected to the layers' width (Lan et al. 2020); 0: that width
    shared_layers: str = "none"  # what all layers share: none, all, attention, feed_forward (Lan et al. 2020)
    max_positions: int = 512  # the maximum sequence length
    segment_types: int = 2  # 0: no segment embeddings; 1: all tokens have the same type, as in RoBERTa
    dropout: float = 0.1  # of embeddings and of the outputs of sublayers
    attention_dropout: float = 0.1  # of attention weights; it follows dropout unless it is set
    layer_norm_epsilon: float = 1e-12  # added to the variance
    initializer_range: float = 0.02  # the standard deviation of initial matrices
    norm: str = "post"  # post (BERT), pre (GPT-2), pre_but_first (ModernBERT: no norm before the first attention)
    embedding_norm: bool = True  # LayerNorm over the summed embeddings
    bias: bool = True  # False: no biases, except in the layers that give logits
    activation: str = "gelu"  # gelu, gelu_tanh, gelu_sigmoid, relu
    gated: bool = False  # multiplies the activation by a second projection (GeGLU; Shazeer 2020)
    positions: str = "learned"  # learned, sinusoidal, rotary, none
    position_offset: int = 0  # unused first rows of the learned positions; 2 in RoBERTa
    rotary_base: float = 10_000.0  # of layers with global attention
    rotary_base_local: float = 10_000.0  # of layers with a window
    relative: str = "none"  # none, shaw (Shaw et al. 2018), buckets (T5; Raffel et al. 2020)
    relative_distance: int = 128  # longer distances are clipped to it
    window: int = 0  # positions that a layer attends to on either side; 0: all
    global_every: int = 1  # with a window: layers 0, n, 2n, ... have global attention
    causal: bool = False  # each position attends to itself and to earlier positions
    tied_output: bool = True  # the token table is also the output matrix
    encoder: str = "transformer"  # or one of an extension, such as those of bert_jax/lineage
    # The next three are of recurrent encoders (bert_jax/lineage).
    bptt: int = 0  # no gradient of the state crosses each multiple of it in a row; 0: all cross
    cell_width: int = 0  # cells, whose output is projected to the layers' width; 0: that width
    recurrent_residual: bool = False  # all layers but the lowest add their input to their output
    lora: LoraConfig | None = None  # adapters of layers' matrices (config.lora of fine-tuning); None: no adapters
    pooler: str = "tanh"  # over [CLS]: tanh, relu (DistilBERT), gelu (ELECTRA); transform: before heads (ModernBERT)

    def __post_init__(self) -> None:
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"model.{name} is {getattr(self, name)}. Use a rate from 0 to below 1, such as 0.1")
        for name, known in MODEL_CHOICES.items():
            if getattr(self, name) not in known:
                raise UserError(f"unknown model.{name} {getattr(self, name)!r}; choose from {', '.join(known)}")
        for name, least in MODEL_LEAST.items():
            if not least <= getattr(self, name) < math.inf:  # false for NaN as well
                raise UserError(f"model.{name} is {getattr(self, name)}. Use a finite number of at least {least}")
        if self.width % self.heads:
            raise UserError(
                f"model.width {self.width} is not a multiple of model.heads {self.heads}. Change one of them"
            )
        if self.positions == "rotary" and (self.width // self.heads) % 2:
            raise UserError(
                f"model.positions=rotary needs heads of even width, but model.width / model.heads is "
                f"{self.width // self.heads}"
            )
        if self.positions == "sinusoidal" and self.table_width % 2:
            raise UserError(f"model.positions=sinusoidal needs embeddings of even width, but it is {self.table_width}")
        self._check_encoder()
        if self.lora is not None and self.encoder != "transformer":
            raise UserError(
                f"lora adapts matrices of Transformer layers, which model.encoder={self.encoder} does not have. "
                "Use --config.lora.rank=0"
            )

    def _check_encoder(self) -> None:
        kind = ENCODERS[self.encoder]
        if kind.check is not None:
            kind.check(self)
        if self.width % self.directions:
            raise UserError(
                f"model.width is {self.width}, but model.encoder={self.encoder} gives each direction half of it. Use "
                f"an even width, such as {self.width + 1}"
            )
        for name, value in kind.required.items():
            if getattr(self, name) != value:
                raise UserError(
                    f"model.encoder={self.encoder} does not support model.{name}={getattr(self, name)}. "
                    f"Use --config.model.{name}={str(value).lower()}"
                )

    @property
    def directions(self) -> int:
        """The number of language models of the encoder, each with its own part of every hidden state."""
        return ENCODERS[self.encoder].directions

    @property
    def layer_width(self) -> int:
        """The width of the layers of one direction: that of the hidden states, or of a part of them."""
        return self.width // self.directions

    @property
    def table_width(self) -> int:
        """The width of the embeddings, and of the vectors that the output matrix multiplies."""
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
    """A class decorator that adds the fields of a dataclass, each optional with default None."""

    def add(target: type[Options]) -> type[Options]:
        hints = typing.get_type_hints(source)
        for item in dataclasses.fields(source):
            if item.name not in leave_out:
                target.__annotations__[item.name] = hints[item.name] | None
                setattr(target, item.name, None)
        return target

    return add


@dataclass(frozen=True)
@_add_optional_fields(ModelConfig, leave_out=("vocab_size", "lora"))
class ModelOptions:
    """The model keys of a recipe: a preset architecture, how to run it, and changes to it.

    The changes are the fields of ModelConfig except lora, and vocab_size, which the tokenizer determines. None keeps
    the value of the preset; attention_dropout follows dropout unless it is set.
    """

    preset: str = "base"  # a name in bert_jax/model/sizes.py, or `checkpoint`: the architecture of init_from
    layer_loop: str = "auto"  # scan (compiles fast), unrolled (runs fast), auto: unrolled to 12 layers, accelerators 24
    # The kernel: einsum, banded (layers with a window), cudnn and triton (NVIDIA), splash and flash (TPU). cudnn and
    # splash need attention_dropout=0. auto never takes flash, which has not run on a TPU yet, and triton only on Hopper
    # GPUs, for attention dropout with heads of 64, in rows of a multiple of 64 from 128 on, in layers without a window
    # or a causal mask (docs/plan.md).
    attention: str = "auto"
    # What the backward pass recomputes instead of storing it: none, attention (the scores of einsum), matmuls (all but
    # the weight matmuls of a layer), layer (all but its input).
    remat: str = "none"
    # Tokens of the vocabulary whose logits exist at the same time in training; their whole array is the largest of a
    # causal or diffusion step. 0: all, but 8,192 on NVIDIA GPUs, and 4,096 with remat of matmuls or layer. Not with
    # mesh.tensor, nor in ELECTRA's generator.
    logits_at_once: int = 0

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
