"""The architecture of a model, and what a recipe says of it."""

import math
from dataclasses import dataclass

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
    remat: str = "none"  # none, attention, matmuls, layer: less memory for more work (bert_jax/model/runtime.py)
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
