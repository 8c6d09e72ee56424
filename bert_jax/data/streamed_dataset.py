"""Training rows that are read from where they are, in windows of data.cache_bytes together, instead of from a copy."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.array_types import Int64
from bert_jax.command import UserError
from bert_jax.data.example import Rows
from bert_jax.data.manifest import Part, read_manifest
from bert_jax.data.mixture import Mixture
from bert_jax.data.shard_cache import local_copy, open_output
from bert_jax.data.shard_ranges import Piece, ShardRanges
from bert_jax.data.shards import Dataset, check_arrow, check_has_rows
from bert_jax.data.window_cache import WindowCache
from bert_jax.data.window_order import WindowOrder, window_sizes
from bert_jax.storage.remote import is_remote


class StreamedDataset(Dataset):
    """A part of an output whose rows are read by ranges. `open_streamed` creates it.

    directory    a local folder that holds everything except these rows
    cache_bytes  the memory for windows, over all data sets of a mixture and all processes
    """

    def __init__(
        self, directory: Path, part: Part, manifest: Mapping[str, Any], address: str, cache_bytes: float
    ) -> None:
        super().__init__(directory, part, manifest)
        self.address, self.cache_bytes = address, cache_bytes
        self.ranges = ShardRanges(address, part, manifest)

    def gather(self, indices: Int64[np.ndarray, "R"]) -> Rows:
        """Copies of the requested rows, each read by itself. Raises UserError for a shard that cannot be read."""
        return self.ranges.gather(indices)

    def shard_rows(self, shard: int) -> Rows:
        """All rows of one of `shards`. Raises UserError for a shard that cannot be read."""
        rows = self.ranges.allocate(self.shards[shard]["rows"])
        self.ranges.read(Piece(shard, 0, len(rows.input_ids)), rows)
        return rows

    def order(self, lanes: int, seed: int, share: float = 1.0) -> WindowOrder:
        """The order of the rows in training, with windows of a share of cache_bytes.

        Raises UserError for fewer rows than lanes, and for windows that are too small.
        """
        row_bytes = self.ranges.row_bytes
        sizes = window_sizes(self.rows, lanes, row_bytes, self.cache_bytes, self.address, share)
        return WindowOrder(self.rows, sizes, seed, self.fingerprint)


def window_caches(mixtures: Sequence[Mixture], lanes: int, seed: int) -> dict[str, WindowCache]:
    """What reads the streamed data sets of the mixtures of all phases, by fingerprint.

    A data set has the same order in all phases, so that later ones resume it where earlier ones stopped. Its windows
    therefore have the smallest of its shares of the memory. Raises UserError as `StreamedDataset.order` does.
    """
    shares: dict[str, float] = {}
    datasets: dict[str, StreamedDataset] = {}
    for mixture in mixtures:
        for source, share in zip(mixture.sources, mixture.shares.fractions, strict=True):
            dataset = source.dataset
            if isinstance(dataset, StreamedDataset):
                datasets.setdefault(dataset.fingerprint, dataset)
                shares[dataset.fingerprint] = min(share, shares.get(dataset.fingerprint, 1.0))
    orders = {name: dataset.order(lanes, seed, shares[name]) for name, dataset in datasets.items()}
    return {name: WindowCache(order, datasets[name].ranges) for name, order in orders.items()}


def open_streamed(
    address: str, cache_bytes: float, cache_dir: str, held_out: bool, log: Callable[[str], object]
) -> StreamedDataset:
    """Opens the training part of an output to stream it, or the part that the address ends in.

    address    the output of build_examples, or its train/ or eval/: a local folder, gs://, s3:// or hf://
    cache_dir  a local folder for copies of the tokenizer and, if `held_out` is true, of the held-out rows
    log        gets a line if anything is copied
    Raises UserError for an address that cannot be read or holds no finished output of Arrow shards, and for an address
    in a store without a cache_dir.
    """
    output, chosen = open_output(address)
    directory = output.address
    if cache_dir:
        directory = local_copy(output.address, cache_dir, ("eval",) if held_out else (), log)
    elif is_remote(address):
        raise UserError(
            f"{address} is in an object store. Its training rows are streamed, but its tokenizer and its held-out rows "
            "are read from a local disk: set --config.data.cache_dir=DIR to a folder for copies of them"
        )
    manifest = read_manifest(Path(directory))
    check_arrow(Path(directory), manifest)
    dataset = StreamedDataset(Path(directory).absolute(), chosen or "train", manifest, output.address, cache_bytes)
    check_has_rows(dataset)
    return dataset
