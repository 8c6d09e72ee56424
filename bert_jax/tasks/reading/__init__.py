"""Readers of a task's files, plain or compressed. Every error names the file and the line.

text_lines      the lines of a text file, whatever it is compressed with; the kind of file that a name means
columns         which columns of a file hold what
tables          chosen columns of any table: one interface over the two modules below
delimited       TSV (never quoted) and CSV (quoted)
typed_tables    JSON lines, Parquet, and prepared data of TensorFlow Datasets
parquet_parts   a data set in several Parquet files, under the name of the first
marks           marks the word of a text that a task asks about
labelled_texts  texts and pairs of texts with a label, from tables
conll           words and tags: CoNLL columns and CoNLL-U
word_lists      words and their labels, as lists
"""

from bert_jax.tasks.reading.columns import Column, Columns
from bert_jax.tasks.reading.conll import read_conll, read_conllu
from bert_jax.tasks.reading.labelled_texts import read_table
from bert_jax.tasks.reading.marks import mark_words
from bert_jax.tasks.reading.parquet_parts import check_apart, files_of, first_file
from bert_jax.tasks.reading.tables import Table, TableRow, is_stored, read_records
from bert_jax.tasks.reading.text_lines import COMPRESSED, TFDS, kind_of_file, numbered_lines, plain_name
from bert_jax.tasks.reading.word_lists import read_word_lists

__all__ = [
    "COMPRESSED",
    "TFDS",
    "Column",
    "Columns",
    "Table",
    "TableRow",
    "check_apart",
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
    "read_table",
    "read_word_lists",
]
