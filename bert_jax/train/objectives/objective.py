"""The interface of a training objective: a loss as named terms, each a sum with a count that divides it."""

import abc
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.model import bert
from bert_jax.model.heads.config import Heads
from bert_jax.model.runtime import Runtime

Counts = dict[str, Array]  # the denominator of each term, float32


class Term(NamedTuple):
    """A loss term: float32 sums over a batch's rows, which the term's count divides."""

    loss: Float[Array, ""]
    metrics: dict[str, Float[Array, ""]]  # by name, such as accuracy; logged as TERM_NAME


Terms = dict[str, Term]


class Likelihood(NamedTuple):
    """A term whose loss is a negative log-likelihood of the text, or a bound on it, in nats per token."""

    prefix: str  # for the names of its perplexities
    with_special: bool  # whether special tokens are predicted and counted too, except the first of a sequence


NO_WEIGHTS: Mapping[str, float] = MappingProxyType({})


class Objective(abc.ABC):
    """A training target: batch fields, heads, loss and metrics.

    Objectives are immutable, and equal ones have equal hashes, so that compiled programs are shared. A subclass
    gives `heads`, `term_metrics`, `counts` and `apply`; a frozen dataclass is the usual form. The defaults of `init`
    and `bind` serve an encoder with those heads; an objective over several encoders overrides both.
    """

    @property
    @abc.abstractmethod
    def heads(self) -> Heads:
        """The heads that the model needs."""

    @property
    @abc.abstractmethod
    def term_metrics(self) -> Mapping[str, tuple[str, ...]]:
        """The loss terms, and their metrics in addition to the loss, such as {"mlm": ("accuracy",)}."""

    @abc.abstractmethod
    def counts(self, batch: Any) -> Counts:
        """Returns the denominators of the terms, from the batch alone.

        They must be known for the whole global batch before its first microbatch is differentiated: only then does no
        mesh, microbatch or short row change the gradient.
        """

    @abc.abstractmethod
    def apply(self, model: Any, batch: Any, dropout_key: PRNGKeyArray | None) -> Terms:
        """Returns the terms in the order in which the loss adds them up; `model` comes from `bind`.

        Without a key nothing drops out.
        """

    @property
    def term_weights(self) -> Mapping[str, float]:
        """Factors of terms in the loss, 1 by default. Metrics are without them."""
        return {}

    @property
    def predicts_all(self) -> bool:
        """Whether logits are computed at all positions, and not only at the batch's masked_positions."""
        return False

    @property
    def compares_rows(self) -> bool:
        """Whether a row's loss depends on its batch's other rows; the batch may then not be split."""
        return False

    @property
    def batch_fields(self) -> tuple[str, ...]:
        """The batch fields read in addition to the encoder's; a batch without one is refused."""
        return ()

    @property
    def metric_names(self) -> tuple[str, ...]:
        """All metrics' names in logs, results and reports: `loss`, TERM_loss and TERM_METRIC."""
        terms = self.term_metrics.items()
        return ("loss", *(f"{term}_{name}" for term, metrics in terms for name in ("loss", *metrics)))

    @property
    def likelihoods(self) -> Mapping[str, Likelihood]:
        """The terms that measure the text's likelihood; `evaluate` adds their perplexities to the metrics."""
        return {}

    @property
    def changes(self) -> tuple[int, ...]:
        """The steps at which `batch_at` changes its result, so that another program is compiled."""
        return ()

    @property
    def evaluated(self) -> "Objective":
        """The objective for held-out rows: this one, unless it needs more than the model."""
        return self

    def evaluated_params(self, params: dict[str, Any]) -> dict[str, Any]:
        """Selects the parameters of `evaluated`."""
        return params

    def predictions(self, batch: Any) -> int:
        """Returns the number of positions per row whose vocabulary logits are computed."""
        if self.predicts_all:
            return batch.input_ids.shape[-1]
        # Most tasks' batches have no masked positions, and compute no vocabulary logits.
        masked = getattr(batch, "masked_positions", None)
        return 0 if masked is None else masked.shape[-1]

    def last_positions(self, batch: Any) -> int | None:
        """Returns the number of positions per row at which the last layer is computed; None: all."""
        return None

    def batch_at(self, step: int, batch: Any) -> Any:
        """Returns the batch as a step, or an evaluation after it, reads it. An objective of several phases marks it.

        It is called on the host, before extend_batch.
        """
        return batch

    def extend_batch(self, batch: Any) -> Any:
        """Returns the batch with the objective's own fields, as a NamedTuple of numpy arrays [B, ...].

        It is called on the host, with a process's own rows. A row's fields must be a function of that row
        alone (law 1).
        """
        return batch

    def corrupt(self, batch: Any, key: PRNGKeyArray) -> Any:
        """Samples the changes of a training batch, such as masks; evaluation does not call it.

        The compiled step calls it with the step's key on the global batch, before it is split into microbatches. So the
        sample is the same on any mesh and for any number of microbatches. Arrays of the result are [B, ...].
        """
        return batch

    def init(self, config: ModelConfig, key: PRNGKeyArray) -> dict[str, Any]:
        """Returns initial parameters, float32, nested by module."""
        return bert.init_params(config, self.heads, key)

    def bind(self, config: ModelConfig, params: dict[str, Any], runtime: Runtime) -> Any:
        """Returns the model over parameters, inside a jitted or differentiated function."""
        return bert.bind(config, self.heads, params, runtime)


def extended_batch(objective: Objective, batch: Any) -> Any:
    """Returns the batch with the objective's own fields. Raises UserError if a field in batch_fields is absent."""
    extended = objective.extend_batch(batch)
    if missing := [name for name in objective.batch_fields if getattr(extended, name, None) is None]:
        raise UserError(
            f"{type(objective).__name__} reads the batch fields {', '.join(missing)}, and these shards have "
            "none; build the examples with the options of bert-jax build-examples that write them"
        )
    return extended


def total_loss(terms: Terms, counts: Counts, weights: Mapping[str, float] = NO_WEIGHTS) -> Float[Array, ""]:
    """Adds up the terms in the order of the counts: sum / count * weight."""
    # In a fixed order, since sums of floating-point numbers depend on it.
    total = jnp.float32(0)
    for name, count in counts.items():
        mean = terms[name].loss / _divisor(count)
        total += weights[name] * mean if name in weights else mean
    return total


def means(terms: Terms, counts: Counts, weights: Mapping[str, float] = NO_WEIGHTS) -> dict[str, Array]:
    """Returns the metrics by name (Objective.metric_names); NaN if a term's count is 0."""
    metrics = {"loss": total_loss(terms, counts, weights)}
    for name, term in terms.items():
        # NaN, not 0, for a term without targets: an evaluation drops it, and metrics.jsonl has null.
        count = counts[name]
        for metric, value in {"loss": term.loss, **term.metrics}.items():
            metrics[f"{name}_{metric}"] = jnp.where(count > 0, value / _divisor(count), jnp.nan)
    return metrics


def _divisor(count: Float[Array, ""]) -> Float[Array, ""]:
    return jnp.where(count > 0, count, 1)  # not a maximum: small class weights give counts between 0 and 1


class ObjectiveSource:
    """A source of batches (train/run.py) with the objective's own fields (extended_batch)."""

    def __init__(self, source: Any, objective: Objective) -> None:
        self._source, self._objective = source, objective
        self.fingerprints = source.fingerprints
        # The steps at which a batch may change its shape or its type, either of which compiles another program.
        self.changes = tuple(sorted({*source.changes, *objective.changes}))

    def rows_at(self, step: int) -> int:
        return self._source.rows_at(step)

    def batch(self, step: int, rows: slice | np.ndarray | None = None) -> Any:
        # The phase's mark comes first, since the objective's own fields may depend on it.
        return extended_batch(self._objective, self._objective.batch_at(step, self._source.batch(step, rows)))
