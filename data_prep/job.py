"""A build_examples job on disk: `DIR.incomplete` while it runs, and `DIR` once it is complete.

DIR.incomplete/job                  what a later run needs to resume it (resumable.py, unit_records.py)
DIR.incomplete/tokenizer, train, eval, manifest.json, unigram_counts.npy, SHA256SUMS   as in DIR
"""

import contextlib
import dataclasses
import importlib.metadata
import io
import json
import platform
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import bert_jax
from bert_jax.array_types import Int64
from bert_jax.data.manifest import PARTS, REARRANGED, SCHEMA_VERSION, Part
from bert_jax.data.masking.rule import MaskingRule
from bert_jax.storage.files import write_atomic
from bert_jax.tokenization.tokenizer import Tokenizer
from data_prep import copy
from data_prep.build_options import BuildOptions, Share
from data_prep.readers import Source
from data_prep.resumable import UnitRecord, complete, resumable_folder, unit_folder
from data_prep.sentences import RULE_VERSION
from data_prep.units import UnusableCorpus, summarise

UNIGRAMS = "unigram_counts.npy"
_LIBRARIES = ("numpy", "pyarrow", "tokenizers", "sentencepiece", "array_record")

# Options that decide nothing in the shards, or only through the sources, the tokenizer and the size of the units.
NOT_COMPARED = frozenset(
    ("input", "weights", "on_error", "tokenizer", "lowercase", "unit_mb", "output")
    + ("engine", "engine_options", "workers", "token_cache", "token_cache_gb")
)


class Arguments(NamedTuple):
    """Everything that decides the bytes of the shards."""

    options: BuildOptions
    short_seq_prob: float
    unit_bytes: int
    share: Share
    sources: tuple[Source, ...]  # of the share
    corpus_hash: str  # of the sources of all shares
    tokenizer_hash: str

    def to_json(self) -> dict[str, Any]:
        """The content of arguments.json."""
        values = {name: value for name, value in vars(self.options).items() if name not in NOT_COMPARED} | {
            "short_seq_prob": self.short_seq_prob,
            "unit_bytes": self.unit_bytes,
            "sources": self.sources,
            "tokenizer_hash": self.tokenizer_hash,
            "sentence_rule": RULE_VERSION,
            "schema_version": SCHEMA_VERSION,
        }
        return json.loads(json.dumps(values))


@contextlib.contextmanager
def open_job(output: Path, arguments: Arguments, tokenizer: Tokenizer) -> Iterator["Job"]:
    """Begins or resumes a job, and holds its lock.

    Raises UserError if the output exists, another job is writing it, or an earlier run that it would resume had other
    arguments. An exception keeps the finished units and removes a folder that holds none; UnusableCorpus removes
    everything, because no later run can use it.
    """
    with resumable_folder(output, arguments.to_json()) as directory:
        for part in PARTS:
            (directory / part).mkdir(exist_ok=True)
        # An attempt that was killed before its first unit may have left a tokenizer of another kind.
        shutil.rmtree(directory / "tokenizer", ignore_errors=True)
        _of_shards(tokenizer).save(directory / "tokenizer")
        try:
            yield Job(output, directory, arguments, tokenizer)
        except UnusableCorpus:
            shutil.rmtree(unit_folder(directory), ignore_errors=True)
            raise


def _of_shards(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer that encodes texts as the sequences of shards, which always have special tokens.

    Those of a published GPT-2 have none; a model that is trained on its shards sees them, and keeps this tokenizer.
    """
    if tokenizer.adds_special_tokens:
        return tokenizer
    spec: Any = tokenizer.spec
    return Tokenizer(dataclasses.replace(spec, adds_special_tokens=True))


class Job(NamedTuple):
    """A job that holds the lock of its folder, as `open_job` yields it."""

    output: Path
    directory: Path
    arguments: Arguments
    tokenizer: Tokenizer

    def finish(
        self, records: Iterable[UnitRecord], skipped: Counter[str], cleaning: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Writes the unigram counts and then the manifest, and renames the folder. Returns the manifest.

        skipped    number of documents that are in no unit, by reason
        cleaning   what bert-jax clean reported of the text (summary.py)
        """
        records = sorted(records, key=lambda record: (PARTS.index(record.part), record.number))
        options, vocab_size = self.arguments.options, self.tokenizer.vocab_size
        counted = {part: np.zeros(vocab_size + options.seq_len + 1, np.int64) for part in PARTS}
        for record in records:
            counted[record.part] += np.load(unit_folder(self.directory) / f"{record.name}.npy")
        buffer = io.BytesIO()
        np.save(buffer, counted["train"][:vocab_size])
        write_atomic(self.directory / UNIGRAMS, buffer.getvalue())
        lengths = {part: counts[vocab_size:] for part, counts in counted.items()}
        rule = options.rule
        text = (counted["train"] + counted["eval"])[:vocab_size]
        if not text[self.tokenizer.unspaced].any():
            rule = dataclasses.replace(rule, words="spaces")  # the same words, and the manifest of before the choice
        manifest = _manifest(self.arguments, rule, self.tokenizer, records, skipped, lengths, cleaning)
        self._remove_strays({shard["name"] for shard in manifest["shards"]})
        copy.write_with_manifest(self.directory, manifest)
        complete(self.directory, self.output)
        return manifest

    def _remove_strays(self, names: set[str]) -> None:
        """Removes what a killed worker left unfinished."""
        for part in PARTS:
            for path in (self.directory / part).iterdir():
                if f"{part}/{path.name}" not in names:
                    path.unlink()


def versions() -> dict[str, str]:
    """The versions of everything that can change the bytes of the output."""
    libraries = {library: importlib.metadata.version(library) for library in _LIBRARIES}
    return {"python": platform.python_version(), "bert_jax": bert_jax.__version__, **libraries}


def _manifest(
    arguments: Arguments,
    rule: MaskingRule,
    tokenizer: Tokenizer,
    records: list[UnitRecord],
    skipped: Counter[str],
    lengths: Mapping[Part, Int64[np.ndarray, "n"]],
    cleaning: list[dict[str, Any]],
) -> dict[str, Any]:
    """The content of manifest.json, as described in docs/data_format.md."""
    options = arguments.options
    parts = {part: _sum_counts((record for record in records if record.part == part), options) for part in PARTS}
    for part, held in parts.items():
        positions = held["rows"] * options.seq_len
        held["filled"] = round(held["tokens"] / positions, 6) if positions else 0.0
        held["lengths"] = summarise(lengths[part])
    counts = _sum_counts(records, options)
    # Documents that gave no unit were read as well, so that all counts add up to those of the corpus.
    counts["documents"] += skipped.total()
    counts["skipped"] = dict(sorted((skipped + Counter(counts["skipped"])).items()))
    return {
        "schema_version": SCHEMA_VERSION,
        "format": options.format,
        "objective": options.objective,
        "seq_len": options.seq_len,
        "pack": options.pack,
        "masking": {
            "kind": options.masking,
            "max_predictions": options.max_predictions,
            **rule.to_manifest(),
        },
        "tokenizer": {
            "hash": tokenizer.content_hash,
            "vocab_size": tokenizer.vocab_size,
            "lowercase": tokenizer.lowercase,
        },
        "seed": options.seed,
        "dupe_factor": options.dupe_factor,
        "eval_fraction": options.eval_fraction,
        "short_seq_prob": arguments.short_seq_prob,
        "corruption": {"delete_rate": options.delete_rate, "insert_rate": options.insert_rate}
        | {name: share for name in REARRANGED if (share := getattr(options, name))},
        "unit_bytes": arguments.unit_bytes,
        "sources": [
            {"path": source.path, "bytes": source.bytes, "weight": source.weight} for source in arguments.sources
        ],
        "reading": {"document": options.document, "text_field": options.text_field, "dedup": options.dedup}
        | ({"document_separator": options.document_separator} if options.document_separator else {})
        | ({"input_format": options.input_format} if options.input_format != "auto" else {})
        | ({"newlines": options.newlines} if options.newlines != "join" else {}),
        "counts": counts,
        "skipped_reading": dict(sorted(skipped.items())),
        **({"cleaning": cleaning} if cleaning else {}),
        "parts": parts,
        "unigram_counts": UNIGRAMS,
        "shards": [shard for record in records for shard in record.shards],
        "versions": versions(),
        **({"shares": [_share(arguments, counts["documents"] - skipped.total())]} if options.part else {}),
    }


def _share(arguments: Arguments, documents: int) -> dict[str, Any]:
    """The entry of the job's share (data_prep/build_options.py); documents are those in units."""
    return {
        "number": arguments.share.number,
        "of": arguments.share.of,
        "corpus": arguments.corpus_hash if arguments.share.of else "",
        "sources": len(arguments.sources),
        "documents": documents,
        "versions": versions(),
    }


def _sum_counts(records: Iterable[UnitRecord], options: BuildOptions) -> dict[str, Any]:
    total: Counter[str] = Counter(dict.fromkeys(options.counted, 0))
    skipped: Counter[str] = Counter()
    for record in records:
        total.update(record.counts)
        skipped.update(record.skipped)
    return {**total, "skipped": dict(sorted(skipped.items()))}
