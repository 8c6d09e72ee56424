"""Reads CoNLL columns and CoNLL-U."""

from pathlib import Path

from bert_jax.command import UserError
from bert_jax.tasks.example import Sentence, Split
from bert_jax.tasks.reading.columns import Columns, place_of
from bert_jax.tasks.reading.text_lines import numbered_lines

# The columns of CoNLL-U: https://universaldependencies.org/format.html
CONLLU_COLUMNS = ("ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", "MISC")
# Marks the start of a document in the CoNLL-2003 files; it is not a sentence.
DOCUMENT_MARK = "-DOCSTART-"

Group = list[tuple[int, list[str]]]  # the line and the fields of each word of a sentence


def read_conllu(path: Path, columns: Columns, label_required: bool) -> Split[Sentence]:
    """Reads CoNLL-U: words from FORM and tags from UPOS, unless columns names others.

    Lines of multiword tokens (1-2) and empty nodes (1.1) are not words and are skipped. Raises UserError for a line
    without the ten columns, an unknown column name, and a file without words.
    """
    groups: list[Group] = [[]]
    for number, line in numbered_lines(path):
        if not line.strip():
            groups.append([])
        elif not line.startswith("#"):
            fields = line.split("\t")
            if len(fields) != len(CONLLU_COLUMNS):
                raise UserError(
                    f"{path} line {number} has {len(fields)} tab-separated fields; a word of CoNLL-U has "
                    f"{len(CONLLU_COLUMNS)} (https://universaldependencies.org/format.html)"
                )
            if fields[0].isdigit():
                groups[-1].append((number, fields))
    _check_words(path, groups)
    names, width = list(CONLLU_COLUMNS), len(CONLLU_COLUMNS)
    word_column = place_of(path, names, width, columns.text or "FORM", "text")
    tag_column = place_of(path, names, width, columns.label or "UPOS", "label")
    return _sentences(path, groups, word_column, tag_column)


def read_conll(path: Path, columns: Columns, label_required: bool) -> Split[Sentence]:
    """Reads CoNLL columns: one word on each line, columns separated by tabs or spaces, blank lines between sentences.

    Words are in column 0 and tags in the last column, unless columns gives other numbers; -DOCSTART- lines
    are skipped. Without label_required, a file of one column is read as unlabelled. Raises UserError for a
    line whose number of columns differs from that of the first line, a missing column, and a file without words.
    """
    groups: list[Group] = [[]]
    width = 0
    for number, line in numbered_lines(path):
        if not line.strip():
            groups.append([])
            continue
        fields = line.split("\t") if "\t" in line else [field for field in line.split(" ") if field]
        width = width or len(fields)
        if len(fields) != width:
            raise UserError(
                f"{path} line {number} has {len(fields)} columns, but the first line has {width}. Correct the line"
            )
        if fields[0] != DOCUMENT_MARK:
            groups[-1].append((number, fields))
    _check_words(path, groups)
    word_column = place_of(path, [], width, columns.text or "0", "text")
    if width == 1 and not label_required:
        return _sentences(path, groups, word_column, None)
    tag_column = place_of(path, [], width, columns.label or "-1", "label")
    if width == 1:
        raise UserError(f"{path} has one column; expected two or more, for words and tags, separated by tabs or spaces")
    return _sentences(path, groups, word_column, tag_column)


def _check_words(path: Path, groups: list[Group]) -> None:
    if not any(groups):
        raise UserError(f"{path} contains no words; expected one word on each line and a blank line between sentences")


def _sentences(path: Path, groups: list[Group], word_column: int, tag_column: int | None) -> Split[Sentence]:
    items = tuple(
        Sentence(
            words=tuple(fields[word_column] for _, fields in group),
            tags=None if tag_column is None else tuple(fields[tag_column] for _, fields in group),
            lines=tuple(number for number, _ in group),
        )
        for group in groups
        if group
    )
    return Split(path, items, tag_column is not None)
