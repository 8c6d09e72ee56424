"""Questions as files have them: SQuAD's JSON, records, and what is wrong with either."""

import csv
import json
import lzma
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_checkpoints import write_vocabulary

from bert_jax.config import AutoTaskConfig, FinetuneConfig, ModelOptions, QuestionConfig
from bert_jax.errors import UserError
from bert_jax.storage.location import location
from bert_jax.tasks import registry
from bert_jax.tasks.kinds.question import QuestionTask
from bert_jax.tasks.kinds.question_data import Answer, Question, QuestionRows, locate
from bert_jax.tasks.reading.inputs import InputRecord
from bert_jax.tasks.reading.tables import Columns
from bert_jax.tasks.rows import Split
from bert_jax.tasks.runs import prepare
from bert_jax.tasks.windows import cut_windows
from bert_jax.tokenization import tokenizer as tokenizer_lib
from bert_jax.tokenization.wordpiece import WordPieceSpec

TASK = QuestionTask("own")
CONTEXT = "The bridge was built in 1905 by Ada."


def read(path: Path, label_required: bool = True, columns: Columns | None = None) -> Split[Question]:
    return TASK.read(path, columns or Columns(), label_required)


def squad(path: Path, *questions: dict, context: str = CONTEXT) -> Path:
    """Writes questions on a context as SQuAD's JSON."""
    content = {"version": "v2.0", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": questions}]}]}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def json_lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_squad_is_read_with_questions_that_have_no_answer(tmp_path):
    path = squad(
        tmp_path / "train.json",
        {"id": "a", "question": "When?", "answers": [{"text": "1905", "answer_start": 24}]},
        {"id": "b", "question": "Why?", "answers": [], "is_impossible": True},
        {"id": "c", "question": "Who?", "answers": [{"text": "Ada", "answer_start": 32}], "is_impossible": True},
    )
    packed = tmp_path / "train.json.xz"
    packed.write_bytes(lzma.compress(path.read_bytes()))
    for file in (path, packed):
        split = read(file)
        assert [one.answers for one in split.items] == [(Answer("1905", 24),), (), ()] and split.labelled
        assert split.items[1] == Question("b", "Why?", CONTEXT, (), "question b")
    assert TASK.complete(split).unanswerable


def test_questions_without_answers_are_read_where_no_labels_are_asked_for(tmp_path):
    path = squad(tmp_path / "test.json", {"id": "a", "question": "When?"})
    assert not read(path, label_required=False).labelled
    with pytest.raises(UserError, match=r"test.json question a has no answers; .* 'answers': \[\]"):
        read(path)
    squad(path, {"id": "a", "question": "When?", "answers": []}, {"id": "b", "question": "Who?"})
    with pytest.raises(UserError, match="question b has no answers"):
        read(path, label_required=False)


@pytest.mark.parametrize(
    "answers, expected",
    [
        ({"text": ["1905", "in 1905"], "answer_start": [24, 21]}, (Answer("1905", 24), Answer("in 1905", 21))),
        ({"text": [], "answer_start": []}, ()),
        ([{"text": "1905", "answer_start": 24}], (Answer("1905", 24),)),
        (["1905"], (Answer("1905", None),)),
        ("1905", (Answer("1905", None),)),
        (" ", ()),
        ("['1905']", (Answer("['1905']", None),)),
        ("[]", (Answer("[]", None),)),
    ],
)
def test_answers_of_records_may_be_written_in_each_usual_way(tmp_path, answers, expected):
    path = json_lines(tmp_path / "train.jsonl", {"id": 7, "question": "When?", "context": CONTEXT, "answers": answers})
    assert read(path).items == (Question("7", "When?", CONTEXT, expected, "line 1"),)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{'text': ['1905'], 'answer_start': [24]}", (Answer("1905", 24),)),
        (json.dumps({"text": ["1905"], "answer_start": [24]}), (Answer("1905", 24),)),
        (
            "{'text': array(['1905', \"Ada's\"],\n dtype=object), 'answer_start': array([24, 0], dtype=int32)}",
            (Answer("1905", 24), Answer("Ada's", 0)),
        ),
        ("{'text': array([], dtype=object), 'answer_start': array([], dtype=int32)}", ()),
        ("[{'text': '1905', 'answer_start': np.int64(24)}]", (Answer("1905", 24),)),
        ("['1905', 'in 1905']", (Answer("1905", None), Answer("in 1905", None))),
        (" [] ", ()),
        ("[24]", (Answer("[24]", None),)),
        ("{'text': ['1905', \"a 'b' 'c'\"], 'answer_start': [nan, 0]}", (Answer("1905", None), Answer("a 'b' 'c'", 0))),
        ("['1905' 'in 1905']", (Answer("['1905' 'in 1905']", None),)),
        ("{'a', 'b'}", (Answer("{'a', 'b'}", None),)),
        ("set()", (Answer("set()", None),)),
        ("{bridge}", (Answer("{bridge}", None),)),
        ("[sic] 1905", (Answer("[sic] 1905", None),)),
    ],
)
def test_answers_of_a_table_may_be_written_as_pandas_does(tmp_path, written, expected):
    path = tmp_path / "train.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["question", "context", "answers"], ["When?", CONTEXT, written]])
    assert [one.answers for one in read(path).items] == [expected]


def test_answers_that_are_not_in_their_contexts_are_refused_before_training(tmp_path):
    write_vocabulary(tmp_path, 131)
    tokenizer = tokenizer_lib.load(tmp_path, lowercase=True)
    record = {"question": "When?", "context": CONTEXT}
    path = json_lines(tmp_path / "train.jsonl", record | {"answers": "1906"}, record | {"answers": []})
    config = FinetuneConfig(model=ModelOptions(preset="tiny"), task=QuestionConfig(train=str(path)))
    with pytest.raises(UserError, match=r"train\.jsonl: no answer occurs in its context, .*\(line 1: '1906'\)"):
        prepare(config, location(tmp_path / "run"), tokenizer)
    json_lines(path, record | {"answers": "1906"}, record | {"answers": "1905"})
    assert len(TASK.describe(TASK.encode(read(path), tokenizer), training=True).remarks) == 1


def test_records_have_the_columns_that_a_user_names(tmp_path):
    path = json_lines(tmp_path / "train.jsonl", {"q": "When?", "passage": CONTEXT, "gold": "1905"})
    (question,) = read(path, columns=Columns("q", "passage", "gold")).items
    assert question == Question("1", "When?", CONTEXT, (Answer("1905", None),), "line 1")
    with pytest.raises(UserError, match=r"line 1 has no column 'question'; its columns are: q, passage, gold"):
        read(path)


def test_parquet_as_hugging_faces_data_sets_have_it_is_read_as_a_named_task(tmp_path):
    rows = [
        {"id": "a", "question": "When?", "context": CONTEXT, "answers": {"text": ["1905"], "answer_start": [24]}},
        {"id": "b", "question": "Why?", "context": CONTEXT, "answers": {"text": [], "answer_start": []}},
    ]
    for split in ("train", "validation"):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{split}-00000-of-00001.parquet")
    task, files = registry.resolve(AutoTaskConfig(name="squad2", data_dir=str(tmp_path), max_length=384))
    assert [one.answers for one in registry.read(task, files["dev"]).items] == [(Answer("1905", 24),), ()]
    assert task.unanswerable and task.max_length == 384


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_prepared_data_of_tensorflow_datasets_are_read(tmp_path):
    import tensorflow_datasets as tfds
    from array_record.python.array_record_module import ArrayRecordWriter
    from tensorflow_datasets.proto import tf_example_pb2

    text = tfds.features.Text()
    answers = tfds.features.Sequence({"text": text, "answer_start": np.int32})
    features = {"id": text, "context": text, "question": text, "answers": answers}
    template = tfds.core.ShardedFileTemplate(
        data_dir=tmp_path, dataset_name="squad", filetype_suffix="array_record", split="train"
    )
    info = tfds.core.SplitInfo(name="train", shard_lengths=[2], num_bytes=1, filename_template=template)
    writer = ArrayRecordWriter(str(info.filepaths[0]), "group_size:1")
    for question, texts, starts in (("When?", ["1905", "in 1905"], [24, 21]), ("Why?", [], [])):
        example = tf_example_pb2.Example()
        values = {"id": ["x"], "context": [CONTEXT], "question": [question], "answers/text": texts}
        for key, value in values.items():
            example.features.feature[key].bytes_list.value.extend(one.encode() for one in value)
        example.features.feature["answers/answer_start"].int64_list.value.extend(starts)
        writer.write(example.SerializeToString())
    writer.close()
    identity = tfds.core.DatasetIdentity(
        name="squad", config_name="v2.0", version=tfds.core.Version("3.0.0"), data_dir=str(tmp_path), module_name=""
    )
    information = tfds.core.DatasetInfo(builder=identity, features=tfds.features.FeaturesDict(features))
    information.set_file_format(tfds.core.FileFormat.ARRAY_RECORD)
    information.set_splits(tfds.core.SplitDict([info]))
    information.write_to_directory(tmp_path)
    split = read(Path(f"tfds:{tmp_path}"))
    assert [one.answers for one in split.items] == [(Answer("1905", 24), Answer("in 1905", 21)), ()]


def test_what_is_to_be_predicted_is_a_record_or_a_line_of_two_texts():
    records = [
        InputRecord(1, f"When?\t{CONTEXT}"),
        InputRecord(2, {"question": "Who?", "context": CONTEXT, "answers": ["Ada"]}),
    ]
    split = TASK.parse(Path("input"), records)
    assert [(one.id, one.question, one.answers) for one in split.items] == [("1", "When?", None), ("2", "Who?", None)]
    assert not split.labelled
    with pytest.raises(UserError, match="input line 3 has 1 texts separated by tabs; expected 2: question, context"):
        TASK.parse(Path("input"), [InputRecord(3, "When?")])


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "line 1 is not JSON"),
        ("[]", "does not hold an object; expected the JSON of SQuAD"),
        ("{}", r"the file has no 'data' \(a list\)"),
        ('{"data": []}', "contains no questions"),
        ('{"data": [{"paragraphs": [{"context": " ", "qas": []}]}]}', "article 0 has an empty context"),
        ('{"data": [{"paragraphs": [{"context": 3, "qas": []}]}]}', r"article 0 has no 'context' \(a text\)"),
        ('{"data": [{"paragraphs": [{"context": "a", "qas": [{}]}]}]}', r"question 1 has no 'question' \(a text\)"),
        ('{"data": [{"paragraphs": [{"context": "a", "qas": [7]}]}]}', r"question 1 has no 'question' \(a text\)"),
        (
            '{"data": [{"paragraphs": [{"context": "a", "qas": [{"question": "\\ud800"}]}]}]}',
            "question 1 contains half of a surrogate pair",
        ),
        (
            '{"data": [{"paragraphs": [{"context": "a", "qas": [{"question": "b", "answers": 3}]}]}]}',
            "question 1: answers is 3; expected a list",
        ),
        (
            '{"data": [{"paragraphs": [{"context": "a", "qas": [{"question": "b", "answers": [{"text": "a", '
            '"answer_start": "0"}]}]}]}]}',
            "question 1: answer_start is '0'; expected a number",
        ),
    ],
)
def test_other_json_than_squads_is_refused_with_the_place(tmp_path, text, said):
    path = tmp_path / "train.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=rf"train\.json:? {said}") as told:
        read(path)
    assert "\n" not in str(told.value)


def test_broken_lines_are_reported_with_their_numbers(tmp_path):
    path = tmp_path / "train.jsonl"
    whole = json.dumps({"question": "When?", "context": CONTEXT, "answers": []})
    for line, said in (("{", "line 2 is not JSON"), ("[1]", "line 2 is not a JSON object")):
        path.write_text(f"{whole}\n{line}\n")
        with pytest.raises(UserError, match=rf"train\.jsonl {said}"):
            read(path)
    json_lines(path, {"question": " ", "context": CONTEXT, "answers": []})
    with pytest.raises(UserError, match=r"train\.jsonl line 1 is empty"):
        read(path)
    json_lines(path, {"question": "a", "context": CONTEXT, "answers": {"text": ["b"], "answer_start": []}})
    with pytest.raises(UserError, match="line 1: answers has different numbers of text and answer_start"):
        read(path)


@pytest.mark.parametrize(
    "context, answer, expected",
    [
        ("The man said that he left.", Answer("he", None), 18),
        ("In 1812 and 12 years later.", Answer("12", None), 12),
        ("In 1812 and 12 years later.", Answer("12", 0), 5),
        ("In 1990 it was 5 km; 5 years.", Answer("5", 14), 15),
        ("a1 1", Answer("1", 2), 3),  # both are one character away
        ("In 1812.", Answer("12", None), 5),
        ("他在北京出生。", Answer("北京", None), 2),
        ("они北京市，北京。北京", Answer("北京", 4), 3),
        ("该公司总部在北京市。北京，是首都。", Answer("北京", 5), 6),
        ("यह कि क", Answer("क", None), 6),
        ("กา ก", Answer("ก", None), 0),  # this vowel is a letter
        ("กี ก", Answer("ก", None), 3),  # and this one a mark
        ("they, he and he", Answer("he", 14), 13),
    ],
)
def test_an_answer_is_the_nearest_occurrence_or_without_a_start_one_of_whole_words(context, answer, expected):
    assert locate(context, answer) == (expected, expected + len(answer.text))


@pytest.mark.parametrize("written, impossible", [("True", True), ("1", True), ("false", False), ("", False)])
def test_is_impossible_of_a_table_may_be_written_in_each_usual_way(tmp_path, written, impossible):
    path = tmp_path / "train.csv"
    path.write_text(f"question,context,answers,is_impossible\nWhen?,{CONTEXT},1905,{written}\n")
    assert read(path).items[0].answers == (() if impossible else (Answer("1905", None),))


def test_another_is_impossible_is_refused(tmp_path):
    record = {"question": "When?", "context": CONTEXT, "answers": ["1905"], "is_impossible": 1}
    assert read(json_lines(tmp_path / "train.jsonl", record)).items[0].answers == ()
    missing = read(json_lines(tmp_path / "train.jsonl", record | {"is_impossible": math.nan}))
    assert missing.items[0].answers == (Answer("1905", None),)
    with pytest.raises(UserError, match=r"train\.jsonl line 1: is_impossible is 'maybe'; expected true or false"):
        read(json_lines(tmp_path / "train.jsonl", record | {"is_impossible": "maybe"}))
    with pytest.raises(UserError, match=r"a\.json question 1: is_impossible is 2; expected true or false"):
        read(squad(tmp_path / "a.json", {"question": "When?", "answers": [], "is_impossible": 2}))


@given(st.text("ab \n", min_size=1, max_size=12), st.text("ab \n", min_size=1, max_size=3), st.integers(-2, 14))
def test_an_answer_is_located_where_it_is_or_nearest(context, text, start):
    found = locate(context, Answer(text, start))
    stripped = text.strip()
    if not stripped:
        assert found is None
        return
    # White space within an answer matches any, so that lengths may differ.
    same = [
        (begin, end)
        for begin in range(len(context))
        for end in range(begin + 1, len(context) + 1)
        if context[begin:end].split() == stripped.split() and context[begin:end].strip() == context[begin:end]
    ]
    if found is None:
        assert not same
    else:
        assert found in same
        wanted = start + len(text) - len(text.lstrip())
        padded = f" {context} "
        cut = [any(padded[end : end + 2].isalnum() for end in span) for span in same]
        assert found == min(zip(same, cut, strict=True), key=lambda one: (abs(one[0][0] - wanted), one[1]))[0]
        assert locate(context, Answer(text, None)) == min(zip(cut, same, strict=True))[1]


def test_a_table_without_a_header_loses_no_question_where_answers_are_not_asked_for(tmp_path):
    path = tmp_path / "q.tsv"
    path.write_text(f"When?\t{CONTEXT}\nWho?\t{CONTEXT}\n")
    split = read(path, False, Columns("0", "1"))
    assert [one.question for one in split.items] == ["When?", "Who?"] and not split.labelled


def test_windows_are_those_of_all_pieces_and_windows_at_once():
    draw = np.random.default_rng(0)
    cases = [tuple(map(int, draw.integers((0, 1, 1), (300, 80, 100)))) for _ in range(300)]
    for pieces, room, stride in [*cases, (5000, 9, 4), (4097, 300, 1)]:
        firsts = np.arange(0, max(pieces - room, 0) + min(stride, room), min(stride, room))
        ends, place = np.minimum(firsts + room, pieces), np.arange(pieces)
        inside = (firsts[:, None] <= place) & (place < ends[:, None])
        sides = np.minimum(place - firsts[:, None], ends[:, None] - 1 - place) + 0.01 * (ends - firsts)[:, None]
        best = np.where(inside, sides, -np.inf).argmax(axis=0)
        windows = cut_windows(pieces, room, stride)
        np.testing.assert_array_equal(windows[:, :2], np.stack([firsts, ends], axis=1))
        for number, (_, _, begin, end) in enumerate(windows):
            assert np.flatnonzero(best == number).tolist() == list(range(begin, end))


def test_memory_of_windows_grows_with_the_context():
    tracemalloc.start()
    cut_windows(1_000_003, 300, 128)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64e6


def test_the_longest_answer_follows_the_training_file(tmp_path):
    tokenizer = tokenizer_lib.Tokenizer(
        WordPieceSpec(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "x", "y"), True, True)
    )

    def task_of(lengths: list[int], **options: int) -> tuple[QuestionTask, QuestionRows]:
        rows = [
            {"question": "who", "context": f"x {'the ' * length}y", "answers": ("the " * length).strip()}
            for length in lengths
        ]
        path = tmp_path / "f.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = QuestionTask("own", max_length=100, **options)
        encoded = task.encode(task.read(path, task.columns, True), tokenizer)
        return task.fitted(encoded), encoded

    assert task_of([3, 5])[0].max_answer_length == 30
    assert task_of([3] * 99 + [50])[0].max_answer_length == 30
    task, rows = task_of([3] * 98 + [40, 50])
    assert task.max_answer_length == 40
    assert [line.split(": ", 1)[1] for line in task.describe(rows, training=True).remarks] == [
        "training answers are long, so answers of up to 40 pieces are predicted (task.max_answer_length)",
        "1 answers are longer than task.max_answer_length=40 pieces, so they cannot be predicted; the longest has 50",
    ]
    task, rows = task_of([3, 50], max_answer_length=20)
    assert task.max_answer_length == 20 and "1 answers are longer than" in task.describe(rows).remarks[0]
    task, rows = task_of([3, 150, 90])
    assert task.max_answer_length == 100 and rows.cut_answers == 1
    assert "1 answers are in no window as a whole" in task.describe(rows).remarks[-1]
