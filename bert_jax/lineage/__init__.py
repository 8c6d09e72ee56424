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

from bert_jax.config import EncoderConfig
from bert_jax.lineage.bidirectional_lm import BidirectionalLMObjective, bidirectional_lm
from bert_jax.lineage.encoders import LSTM, RNN, WITHOUT_ATTENTION, BiLSTM, FeedForward
from bert_jax.model.sizes import PRESETS
from bert_jax.train.objectives.pretraining import OBJECTIVES
from bert_jax.train.sharding import FSDP, PARAMETER_RULES

__all__ = ["LSTM", "RNN", "WITHOUT_ATTENTION", "BiLSTM", "BidirectionalLMObjective", "FeedForward"]

OBJECTIVES["bidirectional_lm"] = bidirectional_lm
# At the front, because the first match counts, and the last rule matches every path.
PARAMETER_RULES[:0] = [
    (r"(^|/)layers/((forward|backward)/)?(input|recurrent)/kernel$", (None, FSDP, None, None)),  # [L, D, G, C]
    (r"(^|/)layers/((forward|backward)/)?projection/kernel$", (None, FSDP, None)),  # [L, C, D], of an LSTM
    (r"(^|/)layers/window/kernel$", (None, None, FSDP, None)),  # [1, n, D, D], of the feed-forward language model
]


def _without_attention(encoder: EncoderConfig, layers: int, width: int, *, causal: bool = True) -> dict[str, Any]:
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
    return _without_attention(BiLSTM(cell_width=cells, residual=True), 2, 2 * projected, causal=False)


PRESETS |= {
    "feed_forward_lm": _without_attention(FeedForward(), 1, 100),
    "rnn": _without_attention(RNN(), 1, 400),
    "lstm_medium": _without_attention(LSTM(), 2, 650),
    "lstm_large": _without_attention(LSTM(), 2, 1500),
    "elmo_small": _elmo(1024, 128),
    "elmo_medium": _elmo(2048, 256),
    "elmo": _elmo(4096, 512),
}
