"""Readers: what a line becomes, and which line a mistake is in."""

import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert_jax.errors import UserError
from bert_jax.tasks.kinds.tagging import TaggingTask
from bert_jax.tasks.reading import tables, texts, words
from bert_jax.tasks.reading.tables import Columns
from bert_jax.tasks.registry import KINDS

CONLLU = """\
# newdoc id = email
# text = I can't go
1\tI\tI\tPRON\tPRP\t_\t3\tnsubj\t_\t_
2-3\tcan't\t_\t_\t_\t_\t_\t_\t_\t_
2\tca\tcan\tAUX\tMD\t_\t4\taux\t_\t_
3\tn't\tnot\tPART\tRB\t_\t4\tadvmod\t_\t_
3.1\tgone\tgo\tVERB\tVB\t_\t_\t_\t_\t_
4\tgo\tgo\tVERB\tVB\t_\t0\troot\t_\t_

# text = Why?
1\tWhy\twhy\tADV\tWRB\t_\t0\troot\t_\tSpaceAfter=No
2\t?\t?\tPUNCT\t.\t_\t1\tpunct\t_\t_
"""
CONLL = """\
-DOCSTART- -X- O O

EU NNP I-NP I-ORG
rejects VBZ I-VP O

Peter NNP I-NP I-PER
"""


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
def test_a_table_reads_alike_plain_and_compressed(tmp_path: Path, ending: str) -> None:
    compress = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[ending]
    path = write(tmp_path / f"a.tsv{ending}", compress(b'sentence\tlabel\nhide new " secretions \t0\n\x20wit\t1\n'))
    split = texts.read_table(path, Columns("sentence", "", "label"), label_required=True)
    assert [(item.text, item.label, item.line) for item in split.items] == [
        ('hide new " secretions ', "0", 2),
        (" wit", "1", 3),
    ]
    assert split.labelled and split.items[0].text_pair is None


def test_numbers_for_columns_mean_that_there_is_no_header(tmp_path: Path) -> None:
    path = write(tmp_path / "train.tsv", "gj04\t1\t\tOur friends won't buy this.\ngj04\t0\t*\tMe go.\n")
    split = texts.read_table(path, Columns("3", "", "1"), label_required=True)
    assert [(item.text, item.label) for item in split.items] == [("Our friends won't buy this.", "1"), ("Me go.", "0")]


def test_a_number_next_to_a_name_counts_columns_under_the_header(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "id\t#1 String\t#2 String\n7\tone\ttwo\n")
    split = texts.read_table(path, Columns("#1 String", "-1", "0"), label_required=True)
    assert split.items == ((("one", "two", "7", 2)),)


def test_a_byte_order_mark_and_windows_line_ends_are_no_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "\ufefftext\tlabel\r\none\u2028line\ty\r\n")
    split = texts.read_table(path, Columns("text", "", "label"), label_required=True)
    assert [(item.text, item.label) for item in split.items] == [("one\u2028line", "y")]


def test_a_test_file_may_lack_labels(tmp_path: Path) -> None:
    path = write(tmp_path / "test.tsv", "index\tsentence\n0\tBill whistled past the house.\n")
    assert not texts.read_table(path, Columns("sentence", "", "label"), label_required=False).labelled


def test_conllu_words_are_neither_multiword_tokens_nor_empty_nodes(tmp_path: Path) -> None:
    split = words.read_conllu(write(tmp_path / "a.conllu", CONLLU), Columns(), label_required=True)
    assert [item.words for item in split.items] == [("I", "ca", "n't", "go"), ("Why", "?")]
    assert [item.tags for item in split.items] == [("PRON", "AUX", "PART", "VERB"), ("ADV", "PUNCT")]
    assert split.items[0].lines == (3, 5, 6, 8)


def test_conllu_columns_go_by_name_or_number(tmp_path: Path) -> None:
    path = write(tmp_path / "a.conllu", CONLLU)
    by_name = words.read_conllu(path, Columns("LEMMA", "", "XPOS"), label_required=True)
    assert by_name.items == words.read_conllu(path, Columns("2", "", "4"), label_required=True).items
    assert by_name.items[1].tags == ("WRB", ".")


def test_conll_takes_first_and_last_column_and_no_document_marks(tmp_path: Path) -> None:
    split = words.read_conll(write(tmp_path / "eng.train", CONLL), Columns(), label_required=True)
    assert [(item.words, item.tags) for item in split.items] == [
        (("EU", "rejects"), ("I-ORG", "O")),
        (("Peter",), ("I-PER",)),
    ]


def test_conll_columns_may_be_separated_by_tabs(tmp_path: Path) -> None:
    path = write(tmp_path / "a.conll", "O\tNew York\nX\tis\n")
    split = words.read_conll(path, Columns("1", "", "0"), label_required=True)
    assert (split.items[0].words, split.items[0].tags) == (("New York", "is"), ("O", "X"))


def test_a_space_that_does_not_break_is_part_of_a_word(tmp_path: Path) -> None:
    split = words.read_conll(write(tmp_path / "a.conll", "10\u00a0000  O \n\u3000 O\n"), Columns(), True)
    assert split.items[0].words == ("10\u00a0000", "\u3000") and split.items[0].tags == ("O", "O")


def test_a_conll_file_of_words_alone_is_unlabelled(tmp_path: Path) -> None:
    path = write(tmp_path / "a.conll", "New\nYork\n")
    assert not words.read_conll(path, Columns(), label_required=False).labelled
    with pytest.raises(UserError, match="one column"):
        words.read_conll(path, Columns(), label_required=True)


TABLE, NAMED = texts.read_table, Columns("text", "", "label")
MISTAKES = {
    "empty file": (TABLE, NAMED, "", "is empty"),
    "header only": (TABLE, NAMED, "text\tlabel\n", "no examples"),
    "no such column": (TABLE, NAMED, "review\tlabel\na\tb\n", "no column 'text'; its columns are: review, label"),
    "no label column": (TABLE, NAMED, "text\tstars\na\tb\n", "no column 'label'.*task.label"),
    "no label asked for": (TABLE, Columns("text"), "text\tstars\na\tb\n", "task.label is not set"),
    "no text asked for": (TABLE, Columns(), "text\tstars\na\tb\n", "task.text is not set"),
    "number too high": (TABLE, Columns("0", "", "2"), "a\tb\n", "no column '2'.*columns 0 to 1"),
    "number of another kind": (TABLE, Columns("0", "", "²"), "a\tb\n", "no column '²'; its columns are: a, b"),
    "two columns of one name": (TABLE, NAMED, "text\tlabel\tlabel\na\tb\tc\n", "has 2 columns named 'label'. Rename"),
    "ragged table": (TABLE, NAMED, "text\tlabel\na\tb\nc\n", "line 3 has 1 fields, but the first line has 2"),
    "not UTF-8": (TABLE, NAMED, b"text\tlabel\na\tb\n\xe9\tb\n", "line 3 is not UTF-8"),
    "ragged conllu": (words.read_conllu, Columns(), "# x\n1\tI\tPRON\n", "line 2 has 3 tab-separated fields"),
    "conllu column": (words.read_conllu, Columns(label="POS"), CONLLU, "no column 'POS'.*UPOS"),
    "empty conllu": (words.read_conllu, Columns(), "# text\n\n", "contains no words"),
    "ragged conll": (words.read_conll, Columns(), "a X O\nb O\n", "line 2 has 2 columns, but the first line has 3"),
    "conll column": (words.read_conll, Columns(label="tag"), "a X O\n", "no column 'tag'.*columns 0 to 2"),
    "empty conll": (words.read_conll, Columns(), "-DOCSTART- O\n", "contains no words"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_invalid_file_is_refused_with_the_place(tmp_path: Path, mistake: str) -> None:
    reader, columns, text, message = MISTAKES[mistake]
    path = write(tmp_path / "file.txt", text)
    with pytest.raises(UserError, match=message) as caught:
        reader(path, columns, True)
    assert "file.txt" in str(caught.value) or mistake == "no label asked for" or "CoNLL-U" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ending", ["gz", "xz"])
def test_a_truncated_compressed_file_is_refused(tmp_path: Path, ending: str) -> None:
    whole = {"gz": gzip.compress, "xz": lzma.compress}[ending](
        "".join(f"word {n}\t{n}\n" for n in range(9999)).encode()
    )
    path = write(tmp_path / f"a.tsv.{ending}", whole[: len(whole) // 2])
    with pytest.raises(UserError, match="cut short or damaged"):
        texts.read_table(path, Columns("0", "", "1"), label_required=True)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        texts.read_table(tmp_path / "none.tsv", NAMED, label_required=True)
    with pytest.raises(UserError, match="is a folder"):
        texts.read_table(tmp_path, NAMED, label_required=True)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.tsv", "table"), ("a.tsv.xz", "table"), ("a.txt", "table"), ("a.conllu.gz", "conllu"), ("a.iob2", "conll")],
)
def test_the_ending_determines_the_kind(name: str, kind: str) -> None:
    assert tables.kind_of_file(Path("folder.conllu") / name) == kind


@pytest.mark.parametrize("listed", ["Sequence", "List"])  # as datasets 2 and 3, and as datasets 4 writes it
def test_numbers_of_tags_become_the_names_that_a_parquet_file_gives_them(tmp_path: Path, listed: str) -> None:
    tags = {"feature": {"names": ["O", "B-X"], "_type": "ClassLabel"}, "_type": listed}
    table = pa.table({"tokens": [["a", "b"], ["c"]], "ner_tags": [[0, 1], [0]]})
    schema = {"huggingface": json.dumps({"info": {"features": {"ner_tags": tags}}})}
    pq.write_table(table.replace_schema_metadata(schema), tmp_path / "a.parquet")
    split = words.read_word_lists(tmp_path / "a.parquet", Columns(label="ner_tags"), True)
    assert [item.tags for item in split.items] == [("O", "B-X"), ("O",)] and split.class_names == ("O", "B-X")


def test_lists_of_prepared_data_are_those_of_json() -> None:
    example = {"tokens": [b"caf\xc3\xa9", b"b"], "tags": [np.int64(0), np.float32(0.5)], "more": {"text": [b"c"]}}
    assert tables.plain_value(example) == {"tokens": ["café", "b"], "tags": [0, 0.5], "more": {"text": ["c"]}}


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("tagging", "a\tN\nb\t\n", "line 2: a word has no tag"),
        ("spans", "a\tO\nb\t\n", "line 2: the tag does not mark an entity"),
        ("spans", "a\tDET\nb\tNOUN\n", "line 1: the tag does not mark an entity"),
    ],
)
def test_a_tag_that_is_none_is_a_mistake(tmp_path: Path, kind: str, text: str, said: str) -> None:
    task, path = KINDS[kind]("own"), write(tmp_path / "a.conll", text)
    with pytest.raises(UserError, match=said):
        task.read(path, Columns(), True)


def test_a_file_without_any_tag_is_unlabelled(tmp_path: Path) -> None:
    task, path = TaggingTask("own"), write(tmp_path / "a.conll", "a\t\n\nb\t\n")
    split = task.read(path, Columns(), False)
    assert not split.labelled and [item.words for item in split.items] == [("a",), ("b",)]
    with pytest.raises(UserError, match="line 1: a word has no tag"):
        task.read(path, Columns(), True)
    some = write(tmp_path / "some.conll", "a\tN\n\nb\t\n")  # whose tags predict does not read
    assert [item.words for item in task.read(some, Columns(), False).items] == [("a",), ("b",)]


@pytest.mark.parametrize("withheld", [None, []])
@pytest.mark.parametrize("kind", ["tagging", "token_regression"])
def test_lists_of_words_without_any_label_are_unlabelled(tmp_path: Path, kind: str, withheld: list | None) -> None:
    pq.write_table(pa.table({"tokens": [["a", "b"], ["c"]], "labels": [withheld] * 2}), tmp_path / "a.parquet")
    rows = "".join(json.dumps({"tokens": words, "labels": withheld}) + "\n" for words in (["a", "b"], ["c"]))
    for path in (tmp_path / "a.parquet", write(tmp_path / "a.jsonl", rows)):
        split = KINDS[kind]("own").read(path, Columns(), False)
        assert not split.labelled and [item.words for item in split.items] == [("a", "b"), ("c",)]
        with pytest.raises(UserError, match=r"line 1: labels .*; expected a list of 2|line 1: labels has 0 labels"):
            KINDS[kind]("own").read(path, Columns(), True)


def test_a_list_of_labels_that_is_missing_among_others_is_a_mistake(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"tokens": ["a"], "labels": ["N"]}\n{"tokens": ["b"], "labels": null}\n')
    with pytest.raises(UserError, match="line 2: labels is None; expected a list of 1"):
        TaggingTask("own").read(path, Columns(), False)
