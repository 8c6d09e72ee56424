"""The masking rule: how sequences are masked, as stored in the manifest."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from bert_jax.command import UserError

UNITS = ("token", "word", "ngram", "span", "infill")
RANDOM_TOKENS = ("uniform", "unigram")
WORDS = ("spaces", "scripts")
# Lengths of infilled spans in words: Poisson, 0 included (Lewis et al. 2020, section 2.2). Longer ones than the maximum
# have a probability of 1e-11.
INFILL_MEAN = 3.0
INFILL_MAX = 20


class ReplacementShares(NamedTuple):
    """The shares of chosen tokens that become [MASK], become random or stay; they sum to 1."""

    mask: float
    random: float
    keep: float


BERT_SHARES = ReplacementShares(0.8, 0.1, 0.1)  # Devlin et al. 2019, section 3.1


@dataclass(frozen=True)
class MaskingRule:
    """The unit of masking, its rate, and the replacement of chosen tokens.

    The rate is the share of a sequence's positions, including [CLS] and [SEP], that are predicted; with unit infill,
    that are replaced, of which the first of each span is predicted. Raises UserError for an unknown unit, an invalid
    rate or invalid shares.
    """

    unit: str = "token"
    rate: float = 0.15
    split: ReplacementShares = BERT_SHARES
    random: str = "uniform"  # or unigram: by frequency in the training rows
    reorder_rate: float = 0.0  # share of positions in shuffled trigrams (StructBERT), in addition to masks
    ngram_max: int = 3  # words (Lan et al. 2020, section 4.1)
    span_p: float = 0.2  # of the geometric distribution of span lengths (Joshi et al. 2020, section 3.1)
    span_max: int = 10  # words (same source)
    # Words are what the vocabulary marks (spaces); or each token is one in scripts without spaces between words.
    words: str = "spaces"

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise UserError(f"unknown masking unit {self.unit!r}; choose from {', '.join(UNITS)}")
        check_rate(self.rate)
        if self.random not in RANDOM_TOKENS:
            raise UserError(f"unknown choice of random tokens {self.random!r}; choose from {', '.join(RANDOM_TOKENS)}")
        if self.words not in WORDS:
            raise UserError(f"unknown rule for words {self.words!r}; choose from {', '.join(WORDS)}")
        if not (all(share >= 0 for share in self.split) and math.isclose(sum(self.split), 1.0, abs_tol=1e-9)):
            raise UserError(
                f"mask split {','.join(map(str, self.split))} is invalid. Give three shares that sum to 1, for [MASK], "
                "random tokens and unchanged tokens, such as 0.8,0.1,0.1"
            )
        if not 0 <= self.reorder_rate <= 1 or (self.reorder_rate and self.unit in ("span", "infill")):
            raise UserError(
                f"reorder rate {self.reorder_rate} is invalid with unit {self.unit}. Use a share from 0 to 1, and 0 "
                "with unit span or infill, because shuffled tokens would hide the ends of spans"
            )
        if self.ngram_max < 1 or self.span_max < 1 or not 0 < self.span_p < 1:
            raise UserError(
                f"ngram_max {self.ngram_max}, span_max {self.span_max} or span_p {self.span_p} is invalid. Use at "
                "least 1 word, and a span_p above 0 and below 1"
            )

    @classmethod
    def from_manifest(cls, masking: Mapping[str, Any]) -> "MaskingRule":
        """The rule in the `masking` of a manifest that is valid otherwise (bert_jax/data/manifest.py)."""
        if len(masking["split"]) != len(BERT_SHARES):
            raise UserError(f"damaged manifest: masking.split is {masking['split']!r}; copy the folder again")
        given = {name: masking[name] for name in cls.__dataclass_fields__ if name in masking}
        given |= {name: float(masking[name]) for name in ("rate", "reorder_rate", "span_p")}
        return cls(**given | {"split": ReplacementShares(*map(float, masking["split"]))})

    def to_manifest(self) -> dict[str, Any]:
        """The JSON values that `from_manifest` reads."""
        values = asdict(self) | {"split": list(self.split)}
        if self.words == "spaces":  # a manifest states a rule only if the text has scripts without spaces
            del values["words"]
        return values


def check_rate(rate: float) -> None:
    """Raises UserError for a rate outside (0, 1]."""
    if not 0 < rate <= 1:
        raise UserError(f"mask rate {rate} is out of range. Use a rate above 0 and at most 1, such as 0.15")
