"""Readers of a task's files, plain or compressed. Every error names the file and the line.

text_lines      reads the lines of a plain or compressed text file, and detects the kind of a file
columns         names the columns that hold the texts and the labels, and their values
tables          reads selected columns of any table, through the next two modules
delimited       reads TSV (never quoted) and CSV (quoted)
typed_tables    reads JSON lines, Parquet, and data prepared by TensorFlow Datasets
parquet_parts   finds the files of a data set that is split into several Parquet files
labelled_texts  reads labelled texts and pairs of texts from tables, and marks the words that a task asks about
label_sets      reads texts and pairs of texts that have any number of labels
written_values  opens lists and objects that a table holds as texts
conll           reads words and tags from CoNLL columns and CoNLL-U
word_lists      reads words and their labels from lists
"""

from bert_jax.tasks.reading.columns import Column, Columns
from bert_jax.tasks.reading.conll import read_conll, read_conllu
from bert_jax.tasks.reading.label_sets import read_label_sets
from bert_jax.tasks.reading.labelled_texts import mark_words, read_table
from bert_jax.tasks.reading.parquet_parts import check_apart, files_of, first_file
from bert_jax.tasks.reading.tables import is_stored, read_records
from bert_jax.tasks.reading.text_lines import COMPRESSED, TFDS, kind_of_file, numbered_lines, plain_name
from bert_jax.tasks.reading.word_lists import read_word_lists
from bert_jax.tasks.reading.written_values import opened

__all__ = [
    "COMPRESSED",
    "TFDS",
    "Column",
    "Columns",
    "check_apart",
    "files_of",
    "first_file",
    "is_stored",
    "kind_of_file",
    "mark_words",
    "numbered_lines",
    "opened",
    "plain_name",
    "read_conll",
    "read_conllu",
    "read_label_sets",
    "read_records",
    "read_table",
    "read_word_lists",
]
