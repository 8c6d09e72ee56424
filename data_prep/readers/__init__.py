"""Reading text: the sources of a corpus (local, gs://, s3://, hf://, tfds:) and their documents, one at a time.

corpus            all sources in order, with weights    plain_text        documents separated by blank or other lines
reading           which reader reads a file             json_and_parquet  documents in a field of records
input_format      the format of a file, by its name     csv_and_tsv       documents in a column
                  and its first bytes                   arrow_file        documents in a column
saved_dataset     Arrow files of Hugging Face datasets  tfds_corpus       documents of prepared TFDS datasets
hub_dataset       Parquet files of those on the Hub
file_blocks       decompressed bytes of a file          web_archive       pages of WARC and WET
refusal           what is wrong with an input           mediawiki_dump    articles of Wikipedia and other wikis
                                                        wikitext          MediaWiki's markup as text
"""

from collections.abc import Iterator
from pathlib import Path

from bert_jax.errors import UserError
from bert_jax.storage.files import OnRead, ignore_progress
from data_prep.readers.corpus import DOCUMENT, ON_ERROR, Corpus, Reading, Source, check_readable, find_sources, read
from data_prep.readers.refusal import Refusal, of_flag

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
    "of_flag",
    "read",
]


def expand(pattern: str) -> list[Path]:
    """The sorted local files of one or several comma-separated globs (`books/*.txt.xz,more/**/*.txt`).

    Raises UserError if a pattern matches nothing, or a folder.
    """
    sources = find_sources(pattern)
    for source in sources:
        check_readable(source)
        if not Path(source.path).exists():
            raise UserError(f"{source.path} is not a local file. Copy it to this machine first")
    return [Path(source.path) for source in sources]


def documents(path: str | Path, on_read: OnRead = ignore_progress) -> Iterator[str]:
    """The documents of one file. `on_read` gets the number of stored bytes read since its last call.

    Raises UserError at the first document that cannot be used.
    """
    for item in read(str(path), on_read=on_read):
        if isinstance(item, Refusal):
            raise item
        if isinstance(item, bytes):
            yield item.decode()
