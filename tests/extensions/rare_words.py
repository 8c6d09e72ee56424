"""A masking rule of its own: rare words are masked more often than frequent ones.

It shows the parts of a rule: options, a function of the candidates of many sequences, and the table that it joins. A
word's weight is its frequency to the power of -gamma; words are drawn without replacement in proportion to their
weights, as the highest of u ** (1 / weight) for uniform u (Efraimidis and Spirakis 2006).
"""

from dataclasses import dataclass

import numpy as np

from bert_jax.config import MaskingConfig
from bert_jax.config.options import at_least, option
from bert_jax.data.masking.choices import MASKINGS, highest_words


@dataclass(frozen=True)
class RareWords(MaskingConfig, kind="rare_words"):
    """Masks words in proportion to a power of their rarity."""

    gamma: float = option(0.5, "exponent of the inverse frequency of first tokens; 0: all alike", valid=at_least(0))


def rule(options, dataset, vocabulary):
    counts = dataset.unigram_counts() + 1.0  # by token, in the training rows
    weights = (counts / counts.sum()) ** -options.gamma

    def choose(candidates):
        return highest_words(candidates, np.log(candidates.random + 1e-300) / weights[candidates.ids])

    return choose


MASKINGS["rare_words"] = rule
