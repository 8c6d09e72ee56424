"""Masked diffusion: tokens masked at a random rate, and a bound on the likelihood of the text (MDLM)."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from bert_jax.data.example import Batch, one_in_each_row
from bert_jax.model.bert import Bert
from bert_jax.model.dropout import content_seeds, derived_seeds, numbered_seeds, sequence_numbers, uniform
from bert_jax.model.heads.config import Heads
from bert_jax.model.layers import child_key
from bert_jax.train.objectives.language_modeling import ACCURACY, MASK_FIELDS, token_sums, unmasked
from bert_jax.train.objectives.objective import Counts, Likelihood, Objective, Term, Terms

LEAST_RATE = 1e-3  # training.sampling_eps in configs/config.yaml of kuleshov-group/mdlm
EVALUATION_RATES = 8  # mask rates at which a held-out sequence is measured: this repository's choice


class MaskedBatch(NamedTuple):
    """A training batch with its masks, as numpy or jax arrays; fields as in Batch, and targets and weights."""

    input_ids: Any  # with the mask token at masked positions
    segment_ids: Any
    sequence_ids: Any
    positions: Any
    cls_positions: Any
    targets: Any  # i32[B,T], the text
    weights: Any  # f32[B,T], 1/t at masked positions and 0 at others

    @property
    def unpacked(self) -> bool:
        """Whether each row holds one sequence at most, as in Batch."""
        return one_in_each_row(self.cls_positions)


@dataclass(frozen=True)
class DiffusionObjective(Objective):
    """Each masked token from the others, at mask rates from 0 to 1 (mdm; Sahoo et al. 2024, sections 3.1 to 3.5).

    A sequence has a rate t ~ U(0,1), and its tokens are masked with probability t. The loss is the cross-entropy at
    masked tokens times 1/t, over the number of maskable tokens (section 3.5 with the log-linear schedule, and Nie et
    al. 2025, section 2.1). Its expectation is an upper bound on the text's negative log-likelihood, in nats per token.
    The accuracy has the same weights, so it is the mean over all rates. The shards' masks are undone.

    The rates of a batch are spread evenly: sequence i of N has t = (u + i/N) mod 1 for one u ~ U(0,1), the
    low-discrepancy sampler of their code. As there, t is then mapped linearly onto [0.001, 1], which bounds the
    weights. If the cross-entropy grows with the rate, this raises the bound, by at most 0.1%. Rates and masks follow
    from the run's seed, the step, and the sequence's number in the batch, on any mesh, for any number of microbatches,
    and in packed and padded rows alike.

    In evaluation the loss of each sequence is the mean over EVALUATION_RATES rates, (u + k/8) mod 1. There, u and the
    masks follow from the sequence's tokens, so that they depend neither on the row nor on the batch.
    """

    special_ids: tuple[int, ...]  # tokens that are given: they are never masked, and the bound does not count them
    mask_id: int

    heads = Heads(mlm=True)
    term_metrics: ClassVar = {"mdm": ACCURACY}
    batch_fields = MASK_FIELDS
    predicts_all = True
    likelihoods: ClassVar = {"mdm": Likelihood("mdm_", with_special=False)}

    def counts(self, batch: Batch) -> Counts:
        # Counted in the text, not in the sampled masks: a denominator must not depend on a random change (law 3).
        return {"mdm": self.maskable(unmasked(batch), batch.sequence_ids).sum().astype(jnp.float32)}

    def corrupt(self, batch: Batch, key: PRNGKeyArray) -> MaskedBatch:
        # Seeds by sequence and position: a packed row gets the masks of its sequences in separate rows.
        start = jax.random.uniform(child_key(key, "mask_rates"))
        seeds = derived_seeds(numbered_seeds(child_key(key, "masks"), batch.sequence_ids), batch.positions)
        rates = mask_rates(spread(start, batch.sequence_ids))
        return self.masked(batch, unmasked(batch), rates, uniform(seeds, (*seeds.shape[:2], 1))[..., 0])

    def apply(self, model: Bert, batch: Batch | MaskedBatch, dropout_key: PRNGKeyArray | None) -> Terms:
        if isinstance(batch, MaskedBatch):
            return {"mdm": _term(model, batch, dropout_key)}
        assert dropout_key is None, "in training, corrupt is called first"
        # Seeds come from the text, so a sequence has the same masks in any row and with any masks of the shards.
        text = unmasked(batch)
        seeds = content_seeds(text, batch.sequence_ids, batch.positions)
        start = uniform(seeds, (*text.shape, 1))[..., 0]
        noise = uniform(derived_seeds(seeds, batch.positions), (*text.shape, EVALUATION_RATES))

        def add(total: Term, draw: tuple[Array, Array]) -> tuple[Term, None]:
            number, noise = draw
            # Rates of one sequence are spread evenly, as those of a batch are in training.
            rates = mask_rates((start + number / EVALUATION_RATES) % 1)
            return jax.tree.map(jnp.add, total, _term(model, self.masked(batch, text, rates, noise), None)), None

        # A scan, so that the activations of one rate exist at a time.
        numbered = (jnp.arange(EVALUATION_RATES, dtype=jnp.float32), jnp.moveaxis(noise, 2, 0))
        total, _ = jax.lax.scan(add, Term(jnp.zeros(()), {"accuracy": jnp.zeros(())}), numbered)
        return {"mdm": jax.tree.map(lambda value: value / EVALUATION_RATES, total)}

    def maskable(self, text: Int[Array, "B T"], sequence_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
        """Marks tokens that are neither special nor padding."""
        ordinary = sequence_ids > 0
        for special in self.special_ids:
            ordinary &= text != special
        return ordinary

    def masked(
        self, batch: Any, text: Int[Array, "B T"], rates: Float[Array, "B T"], noise: Float[Array, "B T"]
    ) -> MaskedBatch:
        """Masks maskable tokens whose noise, uniform in (0,1), is below the rate."""
        chosen = self.maskable(text, batch.sequence_ids) & (noise < rates)
        ids = jnp.where(chosen, self.mask_id, text)
        # At most 1,000, since no rate is below LEAST_RATE.
        weights = jnp.where(chosen, 1 / rates, 0)
        layout = batch.segment_ids, batch.sequence_ids, batch.positions, batch.cls_positions
        return MaskedBatch(ids, *layout, text, weights)


def spread(start: Float[Array, ""], sequence_ids: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns (start + i/N) mod 1 at the positions of sequence i; the batch's N sequences are counted in row order."""
    # Sequences of a row are numbered from 1, so the maximum counts them. The 1 is for a batch of padding.
    count = jnp.maximum(sequence_ids.max(axis=1).sum(), 1)
    return (start + sequence_numbers(sequence_ids).astype(jnp.float32) / count) % 1


def mask_rates(uniforms: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Maps numbers in [0,1) to rates in [LEAST_RATE, 1)."""
    return LEAST_RATE + (1 - LEAST_RATE) * uniforms


def _term(model: Bert, batch: MaskedBatch, key: PRNGKeyArray | None) -> Term:
    sums = token_sums(model, model.encode(batch, key).last, batch.targets, batch.weights)
    return Term(sums.loss, {"accuracy": sums.correct})
