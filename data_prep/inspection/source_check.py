"""Reads the text of an output again and checks that each document is where the manifest states it."""

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_jax.command import UserError
from bert_jax.data.manifest import MANIFEST, PARTS
from bert_jax.storage.remote import is_remote
from data_prep import processes, shares
from data_prep.objectives import fewest_documents
from data_prep.readers import Corpus, Reading, Source
from data_prep.readers.tfds_corpus import PREFIX
from data_prep.units import UnitSplitter


@dataclass
class Corpora:
    """The corpora of the shares of an output, which are read one after another."""

    each: Sequence[Corpus]

    @property
    def bytes_read(self) -> int:
        return sum(corpus.bytes_read for corpus in self.each)

    @property
    def total_bytes(self) -> int:
        return sum(corpus.total_bytes for corpus in self.each)

    @property
    def refused(self) -> Counter[str]:
        """Documents, or rests of files, that cannot be used, by reason."""
        return sum((corpus.refused for corpus in self.each), Counter())


def source_corpora(directory: Path, manifest: Mapping[str, Any]) -> Corpora:
    """The text that an output was made from. Raises UserError if its files are missing or have another size."""
    sources = []
    for source in manifest["sources"]:
        path, folder = source["path"], False
        if not is_remote(path) and not path.startswith(PREFIX):
            if not os.path.exists(path):
                raise UserError(f"{path}, a source in {directory / MANIFEST}, does not exist any more; omit --source")
            folder = os.path.isdir(path)
            if not folder and os.stat(path).st_size != source["bytes"]:
                raise UserError(
                    f"{path} has {os.stat(path).st_size} bytes, but had {source['bytes']} when {directory} was made; "
                    "build the examples again, or omit --source"
                )
        sources.append(Source(path, source["bytes"], float(source["weight"]), folder))
    reading = manifest["reading"]
    chosen = reading.get("input_format", "auto")
    others = chosen, reading.get("document_separator", "")
    read = Reading(reading["text_field"], reading["document"], "skip", *others, workers=processes.cores())
    rest = iter(sources)
    entries = shares.of_manifest(manifest)
    return Corpora([Corpus(tuple(itertools.islice(rest, share["sources"])), read) for share in entries])


def check_source(
    directory: Path, manifest: Mapping[str, Any], corpora: Corpora, on_document: Callable[[], None]
) -> int:
    """Counts the documents of the text as build_examples does and returns how many there are.

    Raises UserError that names the first count of the manifest that differs. Calls `on_document` for each document.
    """
    fewest = fewest_documents(manifest["objective"])
    splitter = UnitSplitter(manifest["unit_bytes"], manifest["eval_fraction"], fewest, manifest["reading"]["dedup"])
    found = dict.fromkeys(PARTS, 0)

    def texts(corpus: Corpus) -> Iterator[bytes | None]:
        for text in corpus.texts():
            on_document()
            yield text

    for corpus, share in zip(corpora.each, shares.of_manifest(manifest), strict=True):
        splitter.divided = shares.Share(share["number"], share["of"]).is_divided
        for unit in splitter.split(texts(corpus)):
            found[unit.part] += len(unit.documents)
    skipped = corpora.refused + splitter.skipped
    stated = manifest["skipped_reading"]
    for name, counted, wanted in [
        *((f"documents in {part}", found[part], manifest["parts"][part]["documents"]) for part in PARTS),
        *((f"{reason} skipped", skipped[reason], stated.get(reason, 0)) for reason in sorted({*skipped, *stated})),
    ]:
        if counted != wanted:
            raise UserError(
                f"{directory / MANIFEST} states {wanted} {name}, but the text gives {counted}; build the examples again"
            )
    return sum(found.values()) + skipped.total()
