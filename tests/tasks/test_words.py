"""Words and entities: tables of words, entities by characters, and raw text in scripts without spaces."""

import csv
import json
import random

import pytest

from bert_jax.errors import UserError
from bert_jax.tasks.kinds.span import SpanTask
from bert_jax.tasks.kinds.tagging import TaggingTask
from bert_jax.tasks.reading.entities import mark_entities
from bert_jax.tasks.reading.inputs import (
    ALL_CHARACTERS,
    CHARACTERS,
    PIECES,
    InputRecord,
    split_text,
    unit_of_words,
)
from bert_jax.tasks.reading.tables import Columns
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.tokenization.wordpiece import WordPieceSpec

WORDS = Columns("Word", "", "Tag")


def read(task, path, columns, labelled=True):
    return task("own", columns=columns).read(path, columns, labelled)


@pytest.mark.parametrize("ending", ["csv", "tsv", "txt", "CSV"])
@pytest.mark.parametrize("name", ["Sentence #", "sentence_id", "sent_id", "SentenceID"])
@pytest.mark.parametrize("repeated", [True, False])
def test_a_table_of_words_is_sentences(tmp_path, ending, name, repeated):
    sentences = [[("Ann", "B-per"), ("left", "O"), (",", "O")], [('"', "O"), ("Bob", "B-per")], [("x", "O")]]
    path = tmp_path / f"a.{ending}"
    with path.open("w", newline="") as file:
        quoted = ending.lower() == "csv"
        writer = csv.writer(file) if quoted else csv.writer(file, "excel-tab", quoting=csv.QUOTE_NONE, quotechar=None)
        writer.writerow([name, "Word", "POS", "Tag"])
        for number, sentence in enumerate(sentences):
            for place, (word, tag) in enumerate(sentence):
                writer.writerow([f"Sentence: {number}" if repeated or not place else "", word, "X", tag])
    split = read(TaggingTask, path, WORDS)
    assert [list(zip(item.words, item.tags, strict=True)) for item in split.items] == sentences
    assert split.remarks == (f"a sentence ends where the column {name!r} changes; it has 3 sentences",)
    unlabelled = read(TaggingTask, path, Columns("Word"), labelled=False)
    assert [item.words for item in unlabelled.items] == [item.words for item in split.items]


def test_blank_lines_end_the_sentences_of_a_table_without_their_numbers(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('Ann,B-PER\n"a,b",O\n\n"\n",O\nBob,B-PER\n')
    split = read(TaggingTask, path, Columns())
    assert [(item.words, item.tags) for item in split.items] == [
        (("Ann", "a,b"), ("B-PER", "O")),
        (("\n", "Bob"), ("O", "B-PER")),
    ]
    path.write_text("Word,Tag\nAnn,B-PER\nleft,O\n")
    with pytest.raises(UserError, match=r"does not show where its sentences end\. Add a column sentence_id"):
        read(TaggingTask, path, WORDS)
    path.write_text("sentence_id,words,labels\n1,Ann,O\n")
    with pytest.raises(UserError, match=r"name its columns .* task.text .*: sentence_id, words, labels"):
        read(TaggingTask, path, Columns())


def test_lists_in_a_table_are_sentences(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("Sentence #,Sentence,Tag\n1,Ann left,\"['B-per', 'O']\"\n2,Bob,['B-per']\n")
    split = read(TaggingTask, path, Columns("Sentence", "", "Tag"))
    assert [item.words for item in split.items] == [("Ann", "left"), ("Bob",)]
    assert [item.tags for item in split.items] == [("B-per", "O"), ("B-per",)]


TEXT = "Ann Lee moved to Rome."
ENTITIES = {
    "spacy": [[0, 7, "PER"], [17, 21, "LOC"]],
    "argilla": [["PER", 0, 7], ["LOC", 17, 21]],
    "doccano": [
        {"id": 1, "label": "PER", "start_offset": 0, "end_offset": 7},
        {"id": 2, "label": "LOC", "start_offset": 17, "end_offset": 21},
    ],
    "prodigy": [
        {"start": 0, "end": 7, "token_start": 0, "token_end": 1, "label": "PER"},
        {"start": 17, "end": 21, "label": "LOC"},
    ],
    "label studio": [
        {"value": {"start": 0, "end": 7, "text": "Ann Lee", "labels": ["PER"]}, "type": "labels"},
        {"start": 17, "end": 21, "text": "Rome", "labels": ["LOC"]},
    ],
}


@pytest.mark.parametrize("tool", ENTITIES)
def test_entities_are_read_by_their_characters(tmp_path, tool):
    path = tmp_path / "a.jsonl"
    rows = [{"text": TEXT, "entities": ENTITIES[tool]}, {"text": "No one.", "entities": []}]
    path.write_text("\n".join(map(json.dumps, rows)))
    columns = Columns("text", "", "entities")
    first, second = read(TaggingTask, path, columns).items
    assert first.words == ("Ann", "Lee", "moved", "to", "Rome", ".")
    assert first.tags == ("B-PER", "I-PER", "O", "O", "B-LOC", "O") and second.tags == ("O", "O", "O")
    assert [(span.label, span.first, span.end) for span in read(SpanTask, path, columns).items[0].spans] == [
        ("PER", 0, 2),
        ("LOC", 4, 5),
    ]


def test_the_documents_of_label_tools_are_read(tmp_path):
    columns, path = Columns("text", "", "entities"), tmp_path / "a.json"
    expected = ("B-PER", "I-PER", "O", "O", "B-LOC", "O")
    path.write_text(json.dumps([[TEXT, {"entities": ENTITIES["spacy"]}]], indent=1))
    assert read(TaggingTask, path, columns).items[0].tags == expected
    annotations = [{"was_cancelled": True, "result": []}, {"result": ENTITIES["label studio"][:1] * 2}]
    path.write_text(json.dumps([{"id": 1, "data": {"text": TEXT}, "annotations": annotations}]))
    split = read(TaggingTask, path, Columns("text", "", "label"))
    assert split.items[0].tags == ("B-PER", "I-PER", "O", "O", "O", "O")
    assert split.remarks == (
        "1 entities overlap longer ones, and a word has one tag, so they are left out (the kind spans holds all)",
    )


def test_entities_of_whole_words_are_found_in_any_text():
    draw = random.Random(0)
    alphabet = ["a", "é", "é", "x-y", "中", "กำ", "👍🏽", "'", " ", "\n", "b1", "한국"]
    for _ in range(300):
        text = "".join(draw.choices(alphabet, k=12)) + "end"
        words = split_text(text)
        first, last = sorted(draw.choices(range(len(words)), k=2))
        start, end = words[first][0], words[last][1]
        marked = mark_entities("", text, [[start, end, "X"]])
        (span,) = marked.spans
        assert (span.first, span.end, marked.widened) == (first, last + 1, 0)
        assert "".join(marked.words) == "".join(text.split()) or "\u200d" in text


@pytest.mark.parametrize(
    ("entity", "message"),
    [
        ([0, 99, "PER"], r"a\[0\] is characters 0 to 99, but the text has 22 characters"),
        ([7, 8, "PER"], "which holds no word"),
        ([3, 3, "PER"], "characters 3 to 3"),
        ([0, 3], "expected .*start, end"),
        ({"start": 0, "end": 3}, "expected .*start, end"),
        ({"start": 0, "end": 3, "text": "Lee", "label": "PER"}, "is 'Ann' by its characters, but 'Lee' by its text"),
        ("PER", "expected .*start, end"),
    ],
)
def test_malformed_entities_are_refused(entity, message):
    with pytest.raises(UserError, match=message):
        mark_entities("a", TEXT, [entity])


def test_an_entity_within_a_word_marks_the_word_and_is_counted():
    marked = mark_entities("a", "Pre-war Romebound trains", [[8, 12, "LOC"], [0, 3, "X"]])
    assert [marked.words[span.first : span.end] for span in marked.spans] == [("Romebound",), ("Pre",)]
    assert marked.widened == 1


@pytest.mark.parametrize(
    ("sentences", "unit"),
    [
        ([["陈", "静", "在", "天", "津", "2020", "。"]], CHARACTERS),
        ([[*"陈静在天津2020年10月"]] * 5, ALL_CHARACTERS),
        ([["陈静", "在", "天津", "工作"]], PIECES),
        ([["กำ", "ลัง"], ["ภาษา"]], PIECES),
        ([["กั", "ล", "ง"]], CHARACTERS),
        ([["Ann", "left"], ["a", "b"]], PIECES),
        ([["한국", "은"]], PIECES),
        ([], PIECES),
    ],
)
def test_words_show_how_text_without_spaces_is_split(sentences, unit):
    assert unit_of_words(sentences) == unit


@pytest.mark.parametrize(
    ("text", "unit", "words"),
    [
        ("王明在AI公司。", CHARACTERS, ["王", "明", "在", "AI", "公", "司", "。"]),
        ("王明在AI公司。", ALL_CHARACTERS, ["王", "明", "在", "A", "I", "公", "司", "。"]),
        ("王明在AI公司。", PIECES, ["王明在AI公司", "。"]),
        ("กำลัง ดี", CHARACTERS, ["ก", "ำ", "ลั", "ง", "ดี"]),
        ("ភាសា", CHARACTERS, ["ភា", "សា"]),
        ("한국은 Ann's", CHARACTERS, ["한국은", "Ann", "'", "s"]),
    ],
)
def test_text_is_split_by_character_where_its_script_has_no_spaces(text, unit, words):
    assert [text[start:end] for start, end in split_text(text, unit)] == words


def test_raw_text_is_split_as_the_training_file(tmp_path):
    tokens = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "王", "明", "กำ", "##ลัง", "a", "ใน"
    tokenizer = Tokenizer(WordPieceSpec(tokens, False, False))
    path = tmp_path / "a.conll"
    for content, unit, thai in (("王 B\n明 I\n", CHARACTERS, ["ก", "ำ", "ลั", "ง"]), ("王明 B\n", PIECES, ["กำ", "ลัง"])):
        path.write_text(content + "x O\n")
        split = read(TaggingTask, path, Columns())
        task = TaggingTask("own").complete(split)
        assert task.raw_words == unit
        for text, words in (("王明 a", ["王", "明", "a"]), ("กำลัง", thai)):
            parsed = task.parse(path, [InputRecord(1, text)])
            rows = task.encode(parsed, tokenizer)
            (item,) = rows.split.items
            assert list(item.words) == words == [text[start:end] for start, end in item.offsets]
        # Words that are given stay as they are.
        parsed = task.parse(path, [InputRecord(1, {"tokens": ["กำลัง"], "text": "กำลัง"})])
        assert task.encode(parsed, tokenizer).split.items[0].words == ("กำลัง",)


@pytest.mark.parametrize(
    ("content", "is_conll"),
    [
        ("Ann B-PER\nLee I-PER\nleft O\n", True),
        ("Ann B-PER\n\nleft O\n", True),
        ("# id 1\n-DOCSTART- O\n\nAnn\tNNP\tB-PER\nleft\tVBD\tO\n", True),
        ("Ann\nleft\n\nBob\nate\n", True),
        ("Ann\nleft\n", False),
        ("Ann B-PER\nLee left home O\n", False),
        ("Ann left\nBob ate\n", False),
        ("\nAnn left O\nBob ate it\n", False),
        ("", False),
    ],
)
def test_a_file_of_conll_columns_is_recognized_under_any_name(tmp_path, content, is_conll):
    path = tmp_path / "test.txt"
    path.write_text(content)
    assert TaggingTask("own", ("O", "B-PER", "I-PER")).has_layout(path) == is_conll


def test_the_header_of_the_training_file_is_recognized(tmp_path):
    path = tmp_path / "test.txt"
    for content, columns, same in (
        ("text\tlabel\na\tb\n", Columns("text", "", "label"), True),
        ("text\nlabel\n", Columns("text", "", "label"), False),
        ("a\tb\n", Columns("0", "", "1"), False),
        ("q\tp\n", Columns("q", "p"), True),
    ):
        path.write_text(content)
        assert TaggingTask("own", columns=columns).has_layout(path) == same


def test_a_record_of_prodigy_is_predicted_as_it_is_trained(tmp_path):
    row = {"text": TEXT, "tokens": [{"text": "Ann", "start": 0, "end": 3, "id": 0}], "spans": ENTITIES["prodigy"]}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row))
    columns = Columns("text", "", "spans")
    task = TaggingTask("own", columns=columns)
    trained = read(TaggingTask, path, columns).items[0].words
    assert task.parse(path, [InputRecord(1, row)]).items[0].words == trained
    assert SpanTask("own", columns=columns).parse(path, [InputRecord(1, row)]).items[0].words == trained
    given = {"text": "Ann Lee", "tokens": ["Ann L", "ee"]}
    assert task.parse(path, [InputRecord(1, given)]).items[0].words == ("Ann L", "ee")
