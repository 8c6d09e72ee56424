"""Readers of a task's files, plain or compressed; every mistake is told with file and line.

lines      lines of a text file, whatever it is compressed by; what kind of file a name means
columns    which columns of a file hold what
records    chosen columns of any table: one face over those below
delimited  TSV (never quoted) and CSV (quoted)
stored     JSON lines, Parquet, and prepared data of TensorFlow Datasets
shards     several Parquet files under the first one's name
marks      the word of a text that a task asks about
examples   texts and pairs of texts with a label, from records
conll      words and tags: CoNLL columns and CoNLL-U
lists      words and what is said of them, as lists
spans      words, spans among them and relations between these, from records
"""

from bert_jax.tasks.reading.columns import Column, Columns
from bert_jax.tasks.reading.conll import read_conll, read_conllu
from bert_jax.tasks.reading.examples import read_table
from bert_jax.tasks.reading.lines import COMPRESSED, TFDS, kind_of_file, numbered_lines, plain_name
from bert_jax.tasks.reading.lists import read_word_lists
from bert_jax.tasks.reading.marks import mark_words
from bert_jax.tasks.reading.records import Record, Records, is_stored, read_records
from bert_jax.tasks.reading.shards import check_apart, files_of, first_file
from bert_jax.tasks.reading.spans import checked_spans, read_spans

__all__ = [
    "COMPRESSED",
    "TFDS",
    "Column",
    "Columns",
    "Record",
    "Records",
    "check_apart",
    "checked_spans",
    "files_of",
    "first_file",
    "is_stored",
    "kind_of_file",
    "mark_words",
    "numbered_lines",
    "plain_name",
    "read_conll",
    "read_conllu",
    "read_records",
    "read_spans",
    "read_table",
    "read_word_lists",
]
