"""Encoders before the Transformer, as an extension of the core: importing this package registers them.

encoders.py          recurrent encoders (Elman's network, the LSTM, ELMo's two LSTMs), and one tanh layer over the last
                     few tokens (Bengio et al. 2003)
bidirectional_lm.py  ELMo's objective

open_checkpoint imports it, so that every command opens such checkpoints; the recipes lstm, elmo and feed_forward_lm do,
too. Presets, as published except for the vocabulary:

rnn             Mikolov et al. 2010, table 2: one layer of 400
lstm            Zaremba et al. 2014, section 4.1, medium and large: two layers of 650 or 1500
elmo            Peters et al. 2018, section 3.4: two layers of 4096 cells in each direction, projected to 512, and a
                residual connection. Embeddings of tokens replace its convolutions over characters. The released small
                and medium models have 1024 and 2048 cells, projected to 128 and 256
feed_forward_lm Bengio et al. 2003, table 1: order 5, 100 hidden units; embeddings of the same width instead of 30
"""

from typing import Any

from bert_jax.config import EncoderKind, ModelConfig, add_encoder
from bert_jax.config.model import WITHOUT_RECURRENCE
from bert_jax.errors import UserError
from bert_jax.lineage.bidirectional_lm import BidirectionalLMObjective, bidirectional_lm
from bert_jax.lineage.encoders import CELLS, FeedForwardEncoder, RecurrentEncoder
from bert_jax.model.sizes import PRESETS
from bert_jax.train.objectives.pretraining import OBJECTIVES
from bert_jax.train.sharding import FSDP, PARAMETER_RULES

__all__ = ["WITHOUT_ATTENTION", "BidirectionalLMObjective"]

# The values of fields for attention, norms and positions in a model without them.
WITHOUT_ATTENTION: dict[str, Any] = {
    "causal": True,
    "positions": "none",
    "relative": "none",
    "norm": "post",
    "shared_layers": "none",
    "gated": False,
}
_WITHOUT_WINDOW = WITHOUT_ATTENTION | {"window": 0}


def _check_recurrent(model: ModelConfig) -> None:
    if model.bptt > model.max_positions:
        raise UserError(
            f"model.bptt is {model.bptt}, longer than any row. Use at most model.max_positions, {model.max_positions}"
        )


def _check_feed_forward(model: ModelConfig) -> None:
    if not model.window:
        raise UserError(
            "model.encoder=feed_forward needs a window: set --config.model.window to the number of tokens that "
            "each position sees, itself included, such as 4"
        )


def _recurrent_flops(model: ModelConfig) -> int:
    """Each gate has a matmul with the input and one with the state."""
    width, gates = model.layer_width, CELLS[model.encoder].gates
    return model.layers * (4 * gates * width * (model.cell_width or width) + 2 * model.cell_width * width)


def _recurrent(required: dict[str, Any], **options: Any) -> EncoderKind:
    return EncoderKind(RecurrentEncoder, required, _check_recurrent, _recurrent_flops, **options)


add_encoder("rnn", _recurrent(_WITHOUT_WINDOW | {"cell_width": 0}))
add_encoder("lstm", _recurrent(_WITHOUT_WINDOW))
add_encoder(
    "bilstm",
    _recurrent(
        _WITHOUT_WINDOW | {"causal": False},
        directions=2,
        logits=("forward_lm_logits", "backward_lm_logits"),
        objective="bidirectional_lm",
    ),
)
add_encoder(
    "feed_forward",
    EncoderKind(
        FeedForwardEncoder,
        WITHOUT_ATTENTION | {"layers": 1} | WITHOUT_RECURRENCE,
        _check_feed_forward,
        lambda model: 2 * model.window * model.width**2,
    ),
)
OBJECTIVES["bidirectional_lm"] = bidirectional_lm
PARAMETER_RULES[:0] = [
    (r"(^|/)layers/((forward|backward)/)?(input|recurrent)/kernel$", (None, FSDP, None, None)),  # [L, D, G, C]
    (r"(^|/)layers/((forward|backward)/)?projection/kernel$", (None, FSDP, None)),  # [L, C, D], of an LSTM
    (r"(^|/)layers/window/kernel$", (None, None, FSDP, None)),  # [1, n, D, D], of the feed-forward language model
]


def _without_attention(encoder: str, layers: int, width: int, *, causal: bool = True) -> dict[str, Any]:
    """A language model without attention, norms, positions and segments, and with an output matrix of its own."""
    return {
        "encoder": encoder,
        "layers": layers,
        "width": width,
        "heads": 1,
        "feed_forward": 1,
        "segment_types": 0,
        "embedding_norm": False,
        "positions": "none",
        "causal": causal,
        "tied_output": False,
    }


def _elmo(cells: int, projected: int) -> dict[str, Any]:
    """Two language models, one per direction, with two LSTM layers each."""
    layers = _without_attention("bilstm", 2, 2 * projected, causal=False)
    return layers | {"cell_width": cells, "recurrent_residual": True}


PRESETS |= {
    "feed_forward_lm": _without_attention("feed_forward", 1, 100) | {"window": 4},
    "rnn": _without_attention("rnn", 1, 400),
    "lstm_medium": _without_attention("lstm", 2, 650),
    "lstm_large": _without_attention("lstm", 2, 1500),
    "elmo_small": _elmo(1024, 128),
    "elmo_medium": _elmo(2048, 256),
    "elmo": _elmo(4096, 512),
}
