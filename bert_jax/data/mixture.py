"""The data sets whose rows the steps of a phase read: one, or several in given shares."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bert_jax.command import UserError
from bert_jax.data.mixture_spec import MixtureSpec
from bert_jax.data.row_shares import RowShares
from bert_jax.data.shards import Dataset
from bert_jax.storage.remote import address_of


class Source(NamedTuple):
    """A data set of a mixture."""

    name: str  # empty: the only data set of a phase that is not a mixture
    dataset: Dataset


class Mixture(NamedTuple):
    """Data sets with rows of one layout, and their shares of the rows of each batch.

    The largest share comes first, so that batches do not depend on the order or the names in which a mixture is
    written, and counts are closest to the shares (RowShares).
    """

    sources: tuple[Source, ...]
    shares: RowShares

    @classmethod
    def single(cls, dataset: Dataset) -> "Mixture":
        """One data set, without a name."""
        return cls((Source("", dataset),), RowShares((1,)))

    @classmethod
    def of(cls, spec: MixtureSpec, datasets: Sequence[Dataset], key: str) -> "Mixture":
        """The mixture of a parsed text, whose folders are opened as `datasets`; `key` is its configuration key.

        With alpha, the share of a source is proportional to its number of training tokens to the power alpha (Conneau
        et al. 2020, section 3.1). Raises UserError for sources that do not fit into one batch, that hold the same rows,
        or whose shares are too small.
        """
        names = [folder.name for folder in spec.folders]
        check_sources(names, datasets, key)
        if spec.alpha is None:
            weights = [folder.weight for folder in spec.folders if folder.weight is not None]
        else:
            tokens = [training_counts(dataset)["tokens"] for dataset in datasets]
            weights = [(count / max(*tokens, 1)) ** spec.alpha for count in tokens]
        shares = RowShares.of(weights, names, key)
        found = zip(shares.weights, names, datasets, strict=True)
        ordered = sorted(found, key=lambda one: (-one[0], one[2].fingerprint))
        sources = tuple(Source(name, dataset) for _, name, dataset in ordered)
        return cls(sources, RowShares(tuple(weight for weight, _, _ in ordered)))

    @property
    def dataset(self) -> Dataset:
        """The first data set, for what all of them share: vocabulary, length, objective and masking."""
        return self.sources[0].dataset

    @property
    def filled(self) -> float:
        """The share of positions that are not padding, by the manifests, in rows of the mixture's shares."""
        counts = [training_counts(source.dataset) for source in self.sources]
        shares = [one["tokens"] / max(one["rows"] * self.dataset.seq_len, 1) for one in counts]
        weights = self.shares.weights
        return sum(weight * share for weight, share in zip(weights, shares, strict=True)) / sum(weights)

    @property
    def named(self) -> bool:
        """Whether the sources have names."""
        return bool(self.sources[0].name)


def training_counts(dataset: Dataset) -> Mapping[str, Any]:
    """The counts of a data set's part in its manifest, such as rows and tokens."""
    return dataset.manifest["parts"][dataset.part]


def check_sources(names: Sequence[str], datasets: Sequence[Dataset], key: str) -> None:
    """Raises UserError, which names two sources, unless the rows of all sources fit into one batch and differ."""
    first = datasets[0]
    for number, dataset in enumerate(datasets[1:], 1):
        here, there = (f"{names[each]} ({address_of(datasets[each].directory)})" for each in (number, 0))
        for (what, option, value), (_, _, wanted) in zip(_layout(dataset), _layout(first), strict=True):
            if value != wanted:
                raise UserError(
                    f"{here} has {what} {value}, but {there} has {wanted}. Build all sources of {key} with the same "
                    f"{option}"
                )
        fingerprints = [other.fingerprint for other in datasets[:number]]
        if dataset.fingerprint in fingerprints:
            same = names[fingerprints.index(dataset.fingerprint)]
            raise UserError(
                f"{key} names the same rows twice, as {same} and {here}. Name them once, with the sum of the weights"
            )


def _layout(dataset: Dataset) -> tuple[tuple[str, str, Any], ...]:
    """What the rows of one batch share: in words, the option of build_examples, and the value."""
    manifest, masking = dataset.manifest, dataset.manifest["masking"]
    values = dataset.masking.to_manifest()
    values.pop("words", None)  # stated only if the text has scripts without spaces, and then it is always scripts
    rule = ", ".join(f"{name} {value}" for name, value in values.items())
    return (
        ("the tokenizer", "--tokenizer", dataset.tokenizer_hash[:12]),
        ("--seq_len", "--seq_len", dataset.seq_len),
        ("--objective", "--objective", manifest["objective"]),
        ("--pack", "--pack", dataset.pack),
        ("--masking", "--masking", masking["kind"]),
        ("the masking rule", "options of masking", rule),
        ("a maximum of predictions per row of", "options of masking", dataset.max_predictions),
    )
