"""Reading text: the sources of a corpus (local, gs://, s3://, tfds:) and their documents, one at a time.

corpus            all sources in order, with weights    plain_text        documents separated by blank lines
refusal           what is wrong with an input           json_and_parquet  documents in a field of records
file_blocks       decompressed bytes of a file          tfds_corpus       documents of prepared TFDS datasets
"""

from collections.abc import Iterator
from pathlib import Path

from bert_jax.command import UserError
from bert_jax.storage.compression import OnRead, ignore_progress
from data_prep.readers.corpus import DOCUMENT, ON_ERROR, Corpus, Reading, Source, find_sources, read
from data_prep.readers.refusal import Refusal

__all__ = [
    "DOCUMENT",
    "ON_ERROR",
    "Corpus",
    "Reading",
    "Refusal",
    "Source",
    "documents",
    "expand",
    "find_sources",
    "read",
]


def expand(pattern: str) -> list[Path]:
    """The sorted local files of one or several comma-separated globs (`books/*.txt.xz,more/**/*.txt`).

    Raises UserError if a pattern matches nothing, or a folder.
    """
    corpus = Corpus(find_sources(pattern))
    remote = [source.path for source in corpus.sources if not Path(source.path).exists()]
    if remote:
        raise UserError(f"{remote[0]} is not a local file. Copy it to this machine first")
    return [Path(source.path) for source in corpus.sources]


def documents(path: str | Path, on_read: OnRead = ignore_progress) -> Iterator[str]:
    """The documents of one file. `on_read` gets the number of stored bytes read since its last call.

    Raises UserError at the first document that cannot be used.
    """
    for item in read(str(path), on_read=on_read):
        if isinstance(item, Refusal):
            raise item
        yield item.decode()
