"""Reads labelled texts, pairs of texts and words from tables of any format, from CoNLL columns and from CoNLL-U.

`read_table` reads a label for each text, `read_label_sets` any number, `read_word_lists`, `read_conll` and
`read_conllu` one for each word. tables.py reads the columns.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bert_jax.errors import UserError
from bert_jax.tasks.labels import same_names
from bert_jax.tasks.reading.entities import entity_remarks, entity_tags, mark_entities
from bert_jax.tasks.reading.inputs import checked_text
from bert_jax.tasks.reading.tables import (
    Column,
    Columns,
    Table,
    TableRow,
    column_index,
    delimited_records,
    ending,
    first_fields,
    is_number,
    is_stored,
    numbered_lines,
    opened,
    read_records,
)
from bert_jax.tasks.rows import IGNORED, Example, LabelSet, Sentence, Split

# Marks the word of a text that a task asks about: rare in running text, in every vocabulary, and a single token
# between spaces.
MARK = "*"
SEPARATORS = ("|", ";", "#", "\t", "/")  # of the labels of a text, if it is not a comma
YES, NO = ("1", "true", "yes", "1.0"), ("0", "false", "no", "0.0", "")
LABEL = 2  # the index of the label among the values that read_labelled reads


def read_table(
    path: Path, columns: Columns, label_required: bool, labels: Sequence[str] = (), ragged_lines: bool = False
) -> Split[Example]:
    """Reads texts, or pairs, from a table (tables.py), with their labels as strings.

    In JSON, Parquet and prepared data, a label may be the number of a class. It becomes the class's name if the file
    gives it, or the label with this index in `labels` unless these are numbers. true and false become `true` and
    `false`; a null text becomes an empty one. A file whose labels are all empty, null or -1 is unlabelled. Without
    label_required, so is a file without the label column, and single labels may be missing.

    Raises:
        UserError: A column is not set or missing, a required label is missing, or as in read_records.
    """
    marks = [Column(name, "marks") for name in columns.marks]
    table, labelled = read_labelled(path, columns, marks, label_required, ragged_lines)
    items, names = [], table.class_names[LABEL]
    for line, (text, text_pair, value, *borders) in table.records:
        texts = [read_text(f"{path} line {line}: column {columns.text!r}", text)]
        if columns.text_pair:
            texts.append(read_text(f"{path} line {line}: column {columns.text_pair!r}", text_pair))
        if borders:
            texts = mark_words(path, line, texts, borders)
        value = None if names and value in (-1, int(IGNORED)) else value  # no class
        unknown = not labelled or (not label_required and is_missing(value))
        label = None if unknown else _label(path, line, value, labels, names)
        items.append(Example(texts[0], texts[1] if columns.text_pair else None, label, line))
    return Split(path, tuple(items), labelled, table.left_out, names if labelled else ())


def read_labelled(
    path: Path,
    columns: Columns,
    others: Sequence[Column],
    label_required: bool,
    ragged_lines: bool = False,
    label_names: Sequence[str] = (),
) -> tuple[Table, bool]:
    """Reads the columns text, text_pair (unless it has no name), the labels, and `others`.

    Args:
        label_names: The columns of labels; by default one, columns.label.

    Returns:
        The table, and whether it is labelled.

    Raises:
        UserError: A column is not set, or labels are required and the file has none.
    """
    for role, name in (("text", columns.text), ("label", columns.label)):
        if not name and (role == "text" or label_required):
            raise UserError(
                f"task.{role} is not set; name the column of {path} that holds the {role} (a header name or a number)"
            )
    label_names = label_names or [columns.label]
    requested = [
        Column(columns.text, "text"),
        Column(columns.text_pair, "text_pair", required=bool(columns.text_pair)),
        *(Column(name, "label", required=label_required) for name in label_names),
        *others,
    ]
    # The order of `requested` is the order of the values: LABEL is the index of the first label.
    table = read_records(path, requested, ragged_lines)
    labels = slice(LABEL, LABEL + len(label_names))
    labelled = bool(columns.label) and all(table.present[labels])
    # Data sets write -1, too, for labels that they withhold. As a text it may be the name of a label, but not if there
    # are several columns, which hold 1 or 0.
    withheld = ("-1",) if len(label_names) > 1 else ()
    labelled = labelled and not all(
        is_missing(value) or value == -1 or (isinstance(value, str) and value.strip() in withheld)
        for record in table.records
        for value in record.values[labels]
    )
    if label_required and not labelled:
        raise UserError(f"{path} has no labels: column {columns.label!r} is empty, null or -1 throughout")
    return table, labelled


def mark_words(path: Path, line: int, texts: Sequence[str], borders: Sequence[Any]) -> list[str]:
    """Puts one word per text between marks: "to * place * it".

    The word's tokens do not change, and any encoder with a classification head can be used. The baseline of Wang et al.
    2019b instead classifies the words' vectors concatenated with the vector of [CLS], which needs a special head.

    Args:
        borders: The word's characters [start, end), text by text.

    Raises:
        UserError: Borders are not inside the text. The message names the line.
    """
    marked = []
    # TSV and CSV hold numbers as texts.
    places = [int(value) if isinstance(value, str) and value.isdecimal() else value for value in borders]
    for text, start, end in zip(texts, places[::2], places[1::2], strict=True):
        if not (isinstance(start, int) and isinstance(end, int) and 0 <= start < end <= len(text)):
            raise UserError(
                f"{path} line {line}: characters {start!r} to {end!r} are not in {text!r:.60}, which has "
                f"{len(text)} characters. Correct the line"
            )
        marked.append(f"{text[:start]}{MARK} {text[start:end]} {MARK}{text[end:]}")
    return marked


def is_missing(label: Any) -> bool:
    """Whether a label is empty, null or NaN."""
    if isinstance(label, str):
        return not label.strip()
    return label is None or (isinstance(label, float) and math.isnan(label))


def yes_or_no(value: Any) -> bool | None:
    """True for 1, true or yes in any table, False for 0, false, no or a missing value; None for others."""
    written = "" if is_missing(value) else str(value).strip().lower()
    return written in YES if written in (*YES, *NO) else None


def read_text(place: str, value: Any) -> str:
    """The text in a column; a null is an empty text. Raises UserError, which begins with `place`, for other values."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{place} holds {value!r:.40}; expected a text. Write it in quotes")
    return value


def _label(path: Path, line: int, value: Any, labels: Sequence[str], names: Sequence[str]) -> str:
    if is_missing(value):
        raise UserError(f"{path} line {line} has no label, but other lines have one. Remove the line or add its label")
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bool):
        # Before int, because bool is a subclass of it.
        written, number = str(value).lower(), int(value)
    elif isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        number = int(value)
        written = names[number] if 0 <= number < len(names) else str(number)
    elif isinstance(value, float):
        return repr(value)
    else:
        raise UserError(f"{path} line {line}: {value!r:.40} is not a label; expected a text, a number, true or false")
    # A value that is a label as it is written stays one, before it may count as the number of a class.
    if written in labels:
        return written
    # A class may have the name of a label of the task, in another spelling.
    if written != str(number) and (same := same_names([written], labels)):
        return same[written]
    # The labels may be the numbers of classes, although this file names them.
    if str(number) in labels:
        return str(number)
    numbered = any(label.removeprefix("-").isdecimal() for label in labels)
    return labels[number] if not numbered and 0 <= number < len(labels) else written


# Only a list has quotes, or several parts in one pair of brackets. A label may itself be in brackets.
_OF_LISTS = re.compile(r"""['"]|\[[^][]*,[^][]*\]""")


def read_label_sets(path: Path, columns: Columns, label_required: bool, labels: Sequence[str] = ()) -> Split[LabelSet]:
    """Reads texts, or pairs, and their sets of labels, which may be empty.

    columns.label names one column: a list of labels in JSON lines, Parquet and prepared data, where a number is a class
    of the file, or else an index in `labels` unless these are numbers; in texts, labels separated by commas (or another
    one, see recognize_separator), or a list or set in brackets (['a', 'b']), as pandas writes it. Or it names several
    columns, separated by commas: each is a label, and holds 1 or 0 (or true or false). A file without the columns, or
    whose columns are all empty, null or -1, is unlabelled.

    Raises:
        UserError: A value is none of these, or a required label column is missing. The message names the line.
    """
    names = [name.strip() for name in columns.label.split(",")]
    table, known = read_labelled(path, columns, (), label_required, label_names=names)
    numbered = any(label.removeprefix("-").isdecimal() for label in labels)
    classes = table.class_names[LABEL] if len(names) == 1 else ()
    by_number = classes or (() if numbered else tuple(labels))
    if known and len(names) == 1:
        # [0, 1] and [1, 0] alone are one value for each of two classes.
        sets = [opened(record.values[LABEL]) for record in table.records]
        if [0, 1] in sets and [1, 0] in sets and all(item in ([0, 1], [1, 0]) for item in sets):
            raise _value_for_each_class(f"{path}: column {columns.label!r}", sets[0])
    # One for the whole file, because a text with a single label does not show it.
    separator = (
        recognize_separator([record.values[LABEL] for record in table.records], by_number) if len(names) == 1 else ","
    )
    items = []
    for line, (text, text_pair, *values) in table.records:
        place = f"{path} line {line}: column"
        second = read_text(f"{place} {columns.text_pair!r}", text_pair) if columns.text_pair else None
        item_labels: tuple[str, ...] | None = None
        if known and len(names) == 1:
            item_labels = _listed(f"{place} {names[0]!r}", values[0], by_number, separator)
        elif known:
            flags = {name: yes_or_no(value) for name, value in zip(names, values, strict=True)}
            if unclear := next((name for name, flag in flags.items() if flag is None), ""):
                raise UserError(
                    f"{place} {unclear!r} holds {values[names.index(unclear)]!r:.40}; expected 1 or 0, because "
                    "task.label names several columns"
                )
            item_labels = tuple(name for name, flag in flags.items() if flag)
        items.append(LabelSet(read_text(f"{place} {columns.text!r}", text), second, item_labels, line))
    several = sum(len(item.labels or ()) > 1 for item in items)
    remark = f"labels are separated by {separator!r}; {several} of {len(items)} texts have several"
    return Split(path, tuple(items), known, table.left_out, classes, () if separator == "," else (remark,))


def recognize_separator(values: Sequence[Any], labels: Sequence[str]) -> str:
    """Recognizes what separates labels in a column of texts: a comma, unless the column shows one of SEPARATORS.

    It shows a separator if no text has a comma, no part between separators is empty, and some part also occurs
    elsewhere, as labels do. If `labels` are known, all parts must be among them instead.
    """
    cells = {value.strip() for value in values if isinstance(value, str) and opened(value) is value}
    if any("," in cell for cell in cells):
        return ","
    for separator in SEPARATORS:
        # Some files also end the last label with a separator.
        split = [[part.strip() for part in cell.rstrip(separator).split(separator)] for cell in cells]
        counts = Counter(part for parts in split for part in {*parts})
        joined = {part for parts in split if len(parts) > 1 for part in parts}
        shared = joined <= {*labels} if labels else any(counts[part] > 1 for part in joined)
        if joined and "" not in joined and shared:
            return separator
    return ","


def _listed(place: str, value: Any, by_number: Sequence[str], separator: str) -> tuple[str, ...]:
    """The labels in a list, or in a text that separates them."""
    if value is None:
        return ()
    content = opened(value)
    value = content if isinstance(content, list) else value  # a label may be in braces
    if isinstance(value, str):
        in_brackets = value.strip().startswith("[") and value.strip().endswith("]")
        # A list that cannot be parsed is refused below, instead of being split at its commas.
        if not (in_brackets and _OF_LISTS.search(value)):
            value = [part.strip() for part in value.split(separator) if part.strip()]
    if not isinstance(value, list) or not all(isinstance(label, str | int) for label in value):
        raise UserError(
            f"{place} holds {value!r:.60}; expected a list of labels, such as ['a', 'b'], or a text that separates "
            "them by commas"
        )
    # Numbers of classes do not repeat, but [0, 1, 0] does: one value for each of three classes.
    repeated = len({*value}) < len(value) and {*value} <= {0, 1}
    if repeated or any(isinstance(label, bool) for label in value):
        raise _value_for_each_class(place, value)
    names = dict(enumerate(by_number))
    return tuple(dict.fromkeys(names.get(label, str(label).strip()) for label in value))


def _value_for_each_class(place: str, value: Any) -> UserError:
    return UserError(
        f"{place} holds {value!r:.60}, one value for each class. Give the numbers or names of the classes that apply, "
        "or one column for each class (task.label=a,b,...)"
    )


# The columns of CoNLL-U: https://universaldependencies.org/format.html
CONLLU_COLUMNS = ("ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", "MISC")
# Marks the start of a document in the CoNLL-2003 files; it is not a sentence.
DOCUMENT_MARK = "-DOCSTART-"

_CONLLU_ID = re.compile(r"[0-9]+([-.][0-9]+)?")

Group = list[tuple[int, list[str]]]  # the line and the fields of each word of a sentence


def read_conllu(path: Path, columns: Columns, label_required: bool) -> Split[Sentence]:
    """Reads CoNLL-U: words from FORM and tags from UPOS, unless columns names others.

    Lines of multiword tokens (1-2) and empty nodes (1.1) are not words and are skipped.

    Raises:
        UserError: A line lacks the ten columns, a column name is unknown, or the file has no words.
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
    word_column = column_index(path, names, width, columns.text or "FORM", "text")
    tag_column = column_index(path, names, width, columns.label or "UPOS", "label")
    return _sentences(path, groups, word_column, tag_column)


def read_conll(path: Path, columns: Columns, label_required: bool) -> Split[Sentence]:
    """Reads CoNLL columns: one word per line, columns separated by tabs or spaces, blank lines between sentences.

    Words are in column 0 and tags in the last column, unless columns gives other numbers; names in the first line make
    it a table (read_word_table). Lines of DOCUMENT_MARK and comments (_is_comment) are not words. Lines of CoNLL-U are
    read as such (read_conllu). Without label_required, a file of one column is read as unlabelled.

    Raises:
        UserError: A line has more or fewer columns than the first word, a column is missing, or the file has no words.
    """
    lines = [(number, _fields(line)) for number, line in numbered_lines(path)]
    words = [fields for _, fields in lines if fields and not fields[0].startswith(("#", DOCUMENT_MARK))]
    if words and all(len(fields) == len(CONLLU_COLUMNS) and _CONLLU_ID.fullmatch(fields[0]) for fields in words):
        return read_conllu(path, columns, label_required)
    # Only a table with a header has columns with names.
    names = {name for name in (columns.text, columns.label) if name and not is_number(name)}
    if names and names <= {*first_fields(path)}:
        return read_word_table(path, columns, label_required)
    # A file may have no other words than # and those that begin with it.
    width = len(words[0]) if words else max((len(fields) for _, fields in lines), default=0)
    _check_words(path, [lines] if width else [])
    word_column = column_index(path, [], width, columns.text or "0", "text")
    known = width > 1 or label_required
    tag_column = column_index(path, [], width, columns.label or "-1", "label") if known else None
    # The tags of words tell the word # from a comment.
    tags = {fields[tag_column] for fields in words if len(fields) == width} if tag_column is not None else set()
    groups: list[Group] = [[]]
    comments = 0
    for number, fields in lines:
        if not fields or fields[0].startswith(DOCUMENT_MARK):
            groups.append([])
        elif not groups[-1] and fields[0].startswith("#") and _is_comment(fields, width, tag_column, tags):
            comments += 1
        elif len(fields) != width:
            raise UserError(
                f"{path} line {number} has {len(fields)} columns, but the first word has {width}. Correct the line"
            )
        else:
            groups[-1].append((number, fields))
    _check_words(path, groups)
    if width == 1 and known:
        raise UserError(f"{path} has one column; expected two or more, for words and tags, separated by tabs or spaces")
    remarks = (f"{comments} lines are comments, which begin with #",) if comments else ()
    return replace(_sentences(path, groups, word_column, tag_column), remarks=remarks)


def has_conll_columns(path: Path, columns: Columns, is_tag: Callable[[str], bool]) -> bool:
    """Whether a file, whatever its name, has CoNLL columns: equally many in all lines, with tags in their column.

    A file of one column qualifies too, if blank lines separate its words.
    """
    width, blank, separated = 0, False, False
    tag_column = int(columns.label) if is_number(columns.label) else -1
    for _, line in numbered_lines(path):
        fields = _fields(line)
        if not fields or fields[0].startswith(DOCUMENT_MARK):
            # Blank lines at the beginning or the end of the file separate nothing, so they count only between words.
            blank = blank or bool(width)
            continue
        if fields[0].startswith("#"):  # a comment, or a word such as #tag
            continue
        width, separated = width or len(fields), separated or blank
        is_conllu = width == len(CONLLU_COLUMNS) and _CONLLU_ID.fullmatch(fields[0])
        tagged = is_conllu or (-width <= tag_column < width and is_tag(fields[tag_column]))
        if len(fields) != width or (width > 1 and not tagged):
            return False
    return width > 1 or separated


def _fields(line: str) -> list[str]:
    """Splits a line into its columns; a blank line has none."""
    if not line.strip():
        return []
    # With tabs, a word may contain spaces. split() without an argument would also split words at other white space,
    # such as U+3000 or U+00A0.
    return line.split("\t") if "\t" in line else [field for field in line.split(" ") if field]


def _is_comment(fields: list[str], width: int, tag_column: int | None, tags: Collection[str]) -> bool:
    """Whether a line that begins with #, before a sentence's first word, is a comment (# id 3) and not a word (# O).

    It is one if its number of columns differs from the words', or if it has a lone # and, in the column for tags, no
    tag of another word.
    """
    if len(fields) != width:
        return True
    return fields[0] == "#" and width > 1 and (tag_column is None or fields[tag_column] not in tags)


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


# The name of a column that numbers sentences: "Sentence #", sentence_id.
_SENTENCES = re.compile(r"(sentence|sent)(id|no|nr|num|number|idx|index)?")


def read_word_table(path: Path, columns: Columns, label_required: bool) -> Split[Sentence]:
    """Reads CSV or TSV with a word on each line, or lists of the words and tags of a sentence (read_word_lists).

    A sentence ends where the column of sentences (_SENTENCES) has another value, empty ones apart; without such a
    column, at a blank line.

    Raises:
        UserError: The file has neither, or as in delimited_records.
    """
    header = first_fields(path)
    names = [name for name in header if _SENTENCES.fullmatch(re.sub(r"[^a-z]", "", name.lower()))]
    if names and not (columns.text and (columns.label or not label_required)):
        raise UserError(
            f"{path} has one word on each line and a header; name its columns of words and of tags by task.text and "
            f"task.label (in predict, evaluate and embed: --text). Its columns are: {', '.join(header)}"
        )
    # As in CoNLL columns, words are first and tags last by default.
    filled = columns.filled(Columns("0", "", "-1"))
    requested = [
        Column(filled.text, "text"),
        Column(filled.label, "label", required=label_required),
        Column(names[0] if names else "", "sentences", required=False),
    ]
    (_, labelled, _), rows = delimited_records(path, requested, quoted=ending(path) == ".csv")
    records = list(rows)
    if records and isinstance(opened(records[0].values[1] if labelled else records[0].values[0]), list):
        return read_word_lists(path, columns, label_required)
    groups: list[Group] = [[]]
    last_line, number = 0, ""
    for line, (word, tag, sentence) in records:
        # A record has the number of its last line, and a word may be a line end.
        after_blank = not names and line - last_line - word.count("\n") > 1
        if groups[-1] and (after_blank or (names and sentence and sentence != number)):
            groups.append([])
        # An empty value continues the sentence, because some tables number only its first word.
        last_line, number = line, sentence or number
        groups[-1].append((line, [word, tag or ""]))
    _check_words(path, groups)
    if len(groups) == 1 and not names:
        raise UserError(
            f"{path} does not show where its sentences end. Add a column sentence_id with another number for each "
            f"sentence, or a blank line after each; its first line is: {', '.join(header):.80}"
        )
    remark = f"a sentence ends where the column {names[0]!r} changes" if names else "blank lines end sentences"
    split = _sentences(path, groups, 0, 1 if labelled else None)
    return replace(split, remarks=(f"{remark}; it has {len(split.items)} sentences",))


def read_word_lists(path: Path, columns: Columns, label_required: bool, labels: Sequence[str] = ()) -> Split[Sentence]:
    """Reads sentences from JSON lines, Parquet or prepared data, or from lists that CSV holds as texts.

    The words are in column text (default `tokens`), their labels in column label (default `labels`). Labels become
    texts: null becomes empty, and a class number its name if the file gives it, or the label with this index in
    `labels` unless these are numbers; -1 is no class, and -100 stays IGNORED. If a text stands in place of a word list,
    its labels are entities (mark_entities) or, in CSV, one label for each word between spaces. Without label_required,
    a file without the label column, or with nulls and empty lists alone, is read as unlabelled.

    Raises:
        UserError: A value is not a list of words, or labels are not one per word. The message names the line.
    """
    requested = [
        Column(columns.text or "tokens", "text"),
        Column(columns.label or "labels", "label", required=label_required),
    ]
    table = read_records(path, requested)
    records = table.records
    if not is_stored(path):
        records = [record._replace(values=tuple(map(opened, record.values))) for record in records]
    names = table.class_names[1]
    # The items are texts instead of lists of words: with entities or, in CSV, with words between spaces.
    if all(isinstance(words, str) for _, (words, _) in records):
        if all(_are_entities(values) for _, (_, values) in records):
            return _read_entities(path, records, requested, label_required)
        if not is_stored(path):
            records = [record._replace(values=(record.values[0].split(), record.values[1])) for record in records]
    labelled = label_required or any(record.values[1] not in (None, []) for record in records)
    numbered = any(label.removeprefix("-").isdecimal() for label in labels)
    items = []
    for line, (words, word_labels) in records:
        if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
            raise UserError(f"{path} line {line}: {requested[0].name} is {words!r:.60}; expected a list of words")
        tags = None
        if labelled:
            if not isinstance(word_labels, list) or len(word_labels) != len(words):
                got = f"has {len(word_labels)} labels" if isinstance(word_labels, list) else f"is {word_labels!r:.40}"
                raise UserError(
                    f"{path} line {line}: {requested[1].name} {got}; expected a list of {len(words)}, one for each word"
                )
            tags = tuple(_written(label, names or (() if numbered else labels)) for label in word_labels)
        items.append(Sentence(tuple(words), tags, (line,) * len(words)))
    return Split(path, tuple(items), labelled, class_names=names if labelled else ())


def _are_entities(values: Any) -> bool:
    """Whether the labels of a text are entities, or none."""
    return values is None or (isinstance(values, list) and all(isinstance(value, list | dict) for value in values))


def _read_entities(
    path: Path, records: Sequence[TableRow], columns: Sequence[Column], label_required: bool
) -> Split[Sentence]:
    """Reads texts with entities by their characters (mark_entities) as sentences with the tags B-X, I-X and O."""
    labelled = label_required or any(values is not None for _, (_, values) in records)
    items, widened, lost = [], 0, 0
    for line, (text, values) in records:
        checked_text(path, line, text)
        if labelled and values is None:
            raise UserError(
                f"{path} line {line} has no {columns[1].name!r}, but other lines have it; write an empty list for a "
                "text without entities"
            )
        marked = mark_entities(f"{path} line {line}: {columns[1].name}", text, values or [])
        tags, overlapping = entity_tags(marked.spans, len(marked.words))
        items.append(Sentence(marked.words, tags if labelled else None, (line,) * len(tags), text, marked.offsets))
        widened, lost = widened + marked.widened, lost + overlapping
    return Split(path, tuple(items), labelled, remarks=entity_remarks(widened, lost))


def _written(label: Any, names: Sequence[str]) -> str:
    if isinstance(label, int) and 0 <= label < len(names):
        return names[label]
    if label is None or (names and label == -1):
        return ""
    # The number -100 becomes IGNORED.
    return label.strip() if isinstance(label, str) else repr(label)
