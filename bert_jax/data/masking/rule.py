"""How sequences are masked, as one value: what the manifest keeps, and what a mask is a function of."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from bert_jax.command import UserError

UNITS = ("token", "word", "ngram", "span")
RANDOM_TOKENS = ("uniform", "unigram")


class ReplacementShares(NamedTuple):
    """What becomes of a chosen token, as shares that sum to 1."""

    mask: float
    random: float
    keep: float


BERT_SHARES = ReplacementShares(0.8, 0.1, 0.1)  # Devlin et al. 2019, section 3.1


@dataclass(frozen=True)
class MaskingRule:
    """The unit of masking, its rate, and what chosen tokens become.

    The rate is the share of a sequence's slots, [CLS] and [SEP] counted, that its budget of predictions is. Raises
    UserError for a unit, rate or split that there is not.
    """

    unit: str = "token"
    rate: float = 0.15
    split: ReplacementShares = BERT_SHARES
    random: str = "uniform"  # or unigram: as often as in the rows of train
    reorder_rate: float = 0.0  # share of the slots in shuffled trigrams (StructBERT); beside the masks
    ngram_max: int = 3  # words (Lan et al. 2020, section 3.1)
    span_p: float = 0.2  # of the geometric distribution of a span's words (Joshi et al. 2020, section 3.1)
    span_max: int = 10  # words (the same)

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise UserError(f"unit of masking {self.unit!r}; it is one of: {', '.join(UNITS)}")
        check_rate(self.rate)
        if self.random not in RANDOM_TOKENS:
            raise UserError(f"random tokens {self.random!r}; they are one of: {', '.join(RANDOM_TOKENS)}")
        if not (all(share >= 0 for share in self.split) and math.isclose(sum(self.split), 1.0, abs_tol=1e-9)):
            raise UserError(
                f"split {','.join(map(str, self.split))}; it is three shares that sum to 1, of [MASK], random tokens "
                "and tokens kept, as 0.8,0.1,0.1"
            )
        if not 0 <= self.reorder_rate <= 1 or (self.reorder_rate and self.unit == "span"):
            raise UserError(
                f"reorder rate {self.reorder_rate} with unit {self.unit}; it is a share from 0 to 1, and 0 with spans, "
                "whose ends tokens out of order would hide"
            )
        if self.ngram_max < 1 or self.span_max < 1 or not 0 < self.span_p < 1:
            raise UserError(
                f"ngram_max {self.ngram_max}, span_max {self.span_max}, span_p {self.span_p}; words are 1 or more, "
                "and span_p is above 0 and below 1"
            )

    @classmethod
    def from_manifest(cls, masking: Mapping[str, Any]) -> "MaskingRule":
        """The rule of a manifest's `masking`; keys that an older one lacks have the defaults above."""
        given = {name: masking[name] for name in cls.__dataclass_fields__ if name in masking}
        given["rate"] = float(given["rate"])
        if isinstance(given.get("reorder_rate"), int):
            given["reorder_rate"] = float(given["reorder_rate"])
        for name, kind in (
            ("random", str),
            ("reorder_rate", float),
            ("ngram_max", int),
            ("span_p", float),
            ("span_max", int),
        ):
            if not isinstance(given.get(name, kind()), kind):
                raise UserError(f"damaged manifest: masking.{name} is {given[name]!r}; copy the folder again")
        if "split" in given:
            split = given["split"]
            if not (isinstance(split, list) and len(split) == 3 and all(isinstance(x, int | float) for x in split)):
                raise UserError(f"damaged manifest: masking.split is {split!r}; copy the folder again")
            given["split"] = ReplacementShares(*map(float, split))
        return cls(**given)

    def to_manifest(self) -> dict[str, Any]:
        """JSON values of `from_manifest`."""
        return asdict(self) | {"split": list(self.split)}


def check_rate(rate: float) -> None:
    """Raises UserError for a rate outside (0, 1]."""
    if not 0 < rate <= 1:
        raise UserError(f"mask rate {rate}; it must be above 0 and at most 1, as 0.15")
