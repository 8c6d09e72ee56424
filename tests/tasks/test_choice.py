"""Multiple choice: files, rows of several sequences, scores equal to the reference's, and what must not change them."""

import functools
import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_finetuning
from golden import assert_close, open_golden, task_batch
from scipy.special import log_softmax

from bert_jax.config import (
    AdamW,
    AutoTaskConfig,
    ChoiceConfig,
    FinetuneConfig,
    LinearSchedule,
    MeshConfig,
    ModelConfig,
    ModelOptions,
)
from bert_jax.errors import UserError
from bert_jax.model import layers
from bert_jax.model.bert import abstract_params, bind
from bert_jax.model.heads.structured import IMPOSSIBLE
from bert_jax.model.runtime import Runtime
from bert_jax.tasks import registry
from bert_jax.tasks.finetuning import finetune
from bert_jax.tasks.kinds import choice
from bert_jax.tasks.kinds.choice import ChoiceLabels, ChoiceRows, ChoiceTask, MultipleChoice
from bert_jax.tasks.reading.inputs import InputRecord
from bert_jax.tasks.rows import Split, TaskBatch
from bert_jax.tasks.task import Task
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.train import sharding
from bert_jax.train.objectives import total_loss

letters = tiny_finetuning.letters  # a fixture

TASK = ChoiceTask("own", max_length=12, metrics=("accuracy",))
MODEL = ModelConfig(vocab_size=60, layers=1, width=16, heads=2, feed_forward=24, max_positions=16)
ITEMS = [
    ("a b", "", ("c", "d e f", "g"), "1"),
    ("h i j k", "l", ("m n", "o"), "A"),
    ("p", "q", ("r", "", "s t"), "s t"),
]


def split_of(items: list) -> Split[MultipleChoice]:
    return Split(Path("train.jsonl"), tuple(MultipleChoice(*item, line) for line, item in enumerate(items, 1)), True)


@pytest.fixture(scope="module")
def rows(letters: Tokenizer) -> ChoiceRows:
    return TASK.encode(split_of(ITEMS), letters)


@functools.cache
def params() -> dict:
    """Parameters large enough that choices differ, sampled by numpy because jax takes longer than the test."""
    draw = np.random.default_rng(1)
    abstract = abstract_params(MODEL, TASK.objective().heads)
    return jax.tree.map(lambda leaf: draw.normal(0, 0.3, leaf.shape).astype(np.float32), abstract)


@functools.partial(jax.jit, static_argnums=0)
def scores_of(task: Task, params: dict, batch: TaskBatch) -> jax.Array:
    objective = task.objective()
    return objective.outputs(bind(MODEL, objective.heads, params, Runtime()), batch, None)


@jax.jit
def gradient(params: dict, batch: TaskBatch) -> tuple[jax.Array, dict]:
    objective = TASK.objective()

    def loss(params: dict) -> jax.Array:
        model = bind(MODEL, objective.heads, params, Runtime())
        return total_loss(objective.apply(model, batch, None), objective.counts(batch))

    return jax.value_and_grad(loss)(params)


def test_a_row_holds_a_sequence_for_each_choice(letters, rows):
    batch = rows.batch(np.array([1, 2, -1]), 10)
    assert batch.input_ids.shape == (3, 3 * 10)
    first, second, third = batch.input_ids[0].reshape(3, 10)
    assert letters.tokens(first) == ["[CLS]", *"hijk", "[SEP]", *"lmn", "[SEP]"]
    assert letters.tokens(second) == ["[CLS]", *"hijk", "[SEP]", *"lo", "[SEP]", "[PAD]"]
    assert letters.tokens(third) == ["[PAD]"] * 10
    assert batch.segment_ids[0].reshape(3, 10)[1].tolist() == [0] * 6 + [1] * 3 + [0]
    assert batch.positions[0].reshape(3, 10)[1].tolist() == [*range(9), 0]
    assert batch.sequence_ids[0].reshape(3, 10).max(axis=1).tolist() == [1, 2, 0]
    last = letters.tokens(batch.input_ids[1].reshape(3, 10)[2])
    assert last == ["[CLS]", "p", "[SEP]", *"qst", "[SEP]", *["[PAD]"] * 3]
    assert batch.labels.present.tolist() == [[True, True, False], [True, False, True], [False] * 3]
    assert batch.labels.right[:2].tolist() == [0, 2] and batch.label_weights.tolist() == [1, 1, 0]
    assert rows.lengths.tolist() == [8, 10, 7] and TASK.describe(rows).counts == {"choices": 7, "empty_texts": 0}


def test_max_length_is_of_one_choice_and_cuts_the_longer_part(letters):
    rows = replace(TASK, max_length=8).encode(split_of(ITEMS), letters)
    assert rows.lengths.max() == 8 and rows.truncated == 1  # of both choices of an item
    assert letters.tokens(rows.batch(np.array([1]), 8).input_ids[0, :8]) == ["[CLS]", *"hij", "[SEP]", *"lm", "[SEP]"]


def test_an_empty_context_is_counted_and_reported(letters):
    rows = TASK.encode(split_of([(" ", "", ("b", "c"), "0"), ITEMS[0]]), letters)
    assert TASK.describe(rows).counts == {"choices": 5, "empty_texts": 1}
    assert TASK.describe(rows).remarks == ["train.jsonl: 1 of 2 items have an empty context"]


def test_scores_and_loss_are_those_of_berts_published_head(tmp_path):
    golden = open_golden("bert_choices", tmp_path)
    count, choices, length = golden.arrays["inputs/input_ids"].shape
    plain = task_batch({name: array.reshape(-1, length) for name, array in golden.arrays.items() if array.ndim == 3})
    numbers = np.tile(np.arange(1, choices + 1), count)[:, None]
    side_by_side = [
        leaf.reshape(count, -1).astype(np.int32)
        for leaf in plain._replace(sequence_ids=plain.sequence_ids * numbers)[:4]
    ]
    labels = ChoiceLabels(golden.arrays["inputs/labels"].astype(np.int32), np.ones((count, choices), bool))
    batch = TaskBatch(*side_by_side, labels, np.ones(count, np.float32))
    loaded, objective = golden.loaded, TASK.objective()
    assert loaded.heads == objective.heads

    @jax.jit
    def run(params: dict, batch: TaskBatch) -> tuple:
        model = bind(loaded.model, loaded.heads, params, Runtime())
        outputs = objective.outputs(model, batch, None)
        return outputs, total_loss(objective.loss_terms(model, outputs, batch), objective.counts(batch))

    scores, loss = run(layers.unflatten(dict(loaded.params)), batch)
    assert_close(scores, golden.output("logits"), "logits")
    assert_close(loss, golden.output("loss"), "loss")


def test_the_loss_is_over_the_choices_that_are_there(rows):
    batch = rows.batch(np.array([0, 1, 2]), 10)
    scores = np.asarray(scores_of(TASK, params(), batch))
    assert (scores[~batch.labels.present] == np.float32(IMPOSSIBLE)).all()
    known = [scores[row][batch.labels.present[row]] for row in range(3)]
    wanted = [-log_softmax(known[0])[1], -log_softmax(known[1])[0], -log_softmax(known[2])[1]]
    assert float(gradient(params(), batch)[0]) == pytest.approx(np.mean(wanted), rel=1e-5)


def test_padding_and_fillers_change_neither_loss_nor_gradient(rows):
    plain, padded = rows.batch(np.array([0, 1, 2]), 10), rows.batch(np.array([0, 1, 2, -1, -1]), 16)
    pair = gradient(params(), plain), gradient(params(), padded)
    jax.tree.map(lambda left, right: np.testing.assert_allclose(left, right, atol=2e-6), *pair)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_choices_in_another_order_have_the_same_scores(letters, pooling):
    task, order = replace(TASK, pooling=pooling), [2, 0, 1]
    moved = [(*item[:2], tuple(item[2][place] for place in order), "0") for item in (ITEMS[0], ITEMS[2])]
    first = task.encode(split_of([ITEMS[0], ITEMS[2]]), letters).batch(np.array([0, 1]), 12)
    second = task.encode(split_of([(*moved[0][:3], "0"), moved[1]]), letters).batch(np.array([0, 1]), 12)
    before, after = scores_of(task, params(), first), scores_of(task, params(), second)
    np.testing.assert_allclose(np.asarray(before)[:, order], after, atol=1e-6)
    assert np.ptp(np.asarray(before)[0]) > 1e-3


@pytest.mark.slow
def test_each_device_keeps_its_own_items(rows):
    """Rows become sequences without a device asking another, and the loss is that of one device."""
    batch = rows.batch(np.array([0, 1, 2, 0, 1, 2, 1, 2]), 12)
    mesh = sharding.make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
        placed, held = sharding.place(batch, 8, mesh), sharding.put(params(), mesh)
        compiled = gradient.lower(held, placed).compile()
        loss, _ = compiled(held, placed)
    talk = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    assert set(re.findall(rf"= .* ({talk})(?:-start)?\(", compiled.as_text())) == {"all-reduce"}
    assert float(loss) == pytest.approx(float(gradient(params(), batch)[0]), rel=1e-5)


def test_answers_are_measured_and_returned(rows):
    answers = [np.array([0.0, 1.0, -1.0]), np.array([0.0, 1.0, IMPOSSIBLE]), np.array([2.0, IMPOSSIBLE, 3.0])]
    assert TASK.measure(rows, answers) == {"accuracy": pytest.approx(2 / 3)}
    told = TASK.predictions(rows, answers)
    assert [(one["label"], one["choice"]) for one in told] == [(1, "d e f"), (1, "o"), (2, "s t")]
    assert told[2]["scores"] == pytest.approx({"0": 1 / (1 + np.e), "2": np.e / (1 + np.e)})
    assert told[2]["score"] == told[2]["scores"]["2"]


SWAG = """,video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label
0,anetv_jkn6,3416,A drum. A drum line,"A drum line, of ""six"".",A drum line,gold,passes by.,has heard.,arrives,turns,2
"""
COPA = [
    {"premise": "It rained.", "choice1": "I got wet.", "choice2": "I ate.", "question": "effect", "label": 0, "idx": 0},
    {"premise": "I fell.", "choice1": "I ate.", "choice2": "I slipped.", "question": "cause", "label": 1, "idx": 1},
]


def json_lines(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_swag_is_read_as_published(tmp_path):
    folder = tmp_path / "swag"
    folder.mkdir()
    (folder / "train.csv").write_text(SWAG)
    (folder / "val.csv").write_text(SWAG)
    (folder / "test.csv").write_text("\n".join(line.rpartition(",")[0] for line in SWAG.splitlines()) + "\n")
    task, files = registry.resolve(AutoTaskConfig(name="swag", data_dir=str(tmp_path)))
    assert list(files) == ["train", "dev", "test"] and task.kind == "choice"
    (item,) = registry.read(task, files["dev"]).items
    endings = ("passes by.", "has heard.", "arrives", "turns")
    assert item == MultipleChoice('A drum line, of "six".', "A drum line", endings, "2", 2)
    test = registry.read(task, files["test"], label_required=False)
    assert not test.labelled and test.items[0].choices == endings


def test_copa_asks_for_the_cause_or_the_effect(tmp_path):
    folder = tmp_path / "COPA"
    folder.mkdir()
    for name, records in (("train", COPA), ("val", COPA), ("test", [record | {"label": None} for record in COPA])):
        json_lines(folder / f"{name}.jsonl", records)
    task, files = registry.resolve(AutoTaskConfig(name="copa", data_dir=str(tmp_path)))
    split = registry.read(task, files["train"])
    contexts = ["It rained. What happened as a RESULT?", "I fell. What was the CAUSE of this?"]
    assert [item.context for item in split.items] == contexts
    parsed = task.parse(Path("in"), [InputRecord(2, COPA[1])]).items[0]
    assert split.items[1] == parsed._replace(label="1", numbered=True)
    assert not registry.read(task, files["test"], label_required=False).labelled
    with pytest.raises(UserError, match=r"bad.jsonl line 1: question is 'why'; expected cause or effect"):
        registry.read(task, json_lines(tmp_path / "bad.jsonl", [COPA[0] | {"question": "why"}]))


def own(path: Path, **columns: str) -> Split[MultipleChoice]:
    task, files = registry.resolve(ChoiceConfig(train=str(path), text="context", label="right", **columns))
    return registry.read(task, files["train"])


def test_own_items_have_a_list_of_choices_or_columns_of_them(tmp_path, letters):
    given = (("bcd", 2), ("bc", "B"), ("bc", "b"))
    records = [{"context": "a", "options": [*options], "right": right} for options, right in given]
    split = own(json_lines(tmp_path / "own.jsonl", records), choices=("options",))
    assert TASK.encode(split, letters).labels.tolist() == [2, 1, 0]
    columns = tmp_path / "own.tsv"
    columns.write_text("context\tone\ttwo\tthree\tright\na\tb\tc\t\t1\na\tb\tc\td\t2\n")
    split = own(columns, choices=("one", "two", "three"))
    assert split.items[0].choices == ("b", "c", "")
    assert TASK.encode(split, letters).part_lengths.tolist() == [[5, 5, 0], [5, 5, 5]]


@pytest.mark.parametrize(
    ("choices", "labels", "expected"),
    [
        (["1", "2", "3", "4"], ["3", "1", "4"], [2, 0, 3]),
        (["B", "C", "A"], ["A", "B"], [2, 0]),
        (["7", "1", "0"], ["1", "2"], [1, 2]),
        (["1", "0", "x"], ["1", "2"], [1, 2]),  # 2 is no text, so all are indices
    ],
)
def test_labels_are_texts_if_all_of_a_file_are_and_else_indices_if_all_can_be(letters, choices, labels, expected):
    split = split_of([("a", "", tuple(choices), label) for label in labels])
    assert TASK.encode(split, letters).labels.tolist() == expected


@pytest.mark.parametrize(
    ("items", "said"),
    [
        (
            [(("x", "y"), "x"), (("b", "c"), "0"), (("1", "0"), "0")],
            r"line 3: label '0' is the text of choice 1 \(from 0\), and as an index or letter it names choice 0",
        ),
        # A label that is no choice is reported before one that could be two.
        (
            [(("1", "0", "2"), "0"), (("b", "c"), "1"), (("b", "c"), "7")],
            "line 3: label '7' is not one of its 2 choices",
        ),
    ],
)
def test_a_label_that_is_no_choice_or_could_be_two_is_refused(letters, items, said):
    with pytest.raises(UserError, match=said):
        TASK.encode(split_of([("a", "", *item) for item in items]), letters)


def numbers_of(path: Path, *labels: int | str) -> Split[MultipleChoice]:
    records = [{"context": "a", "options": ["1", "2", "3", "4"], "right": label} for label in labels]
    return own(json_lines(path, records), choices=("options",))


@pytest.mark.parametrize(
    ("labels", "expected", "said"),
    [
        (["A", "B", "1", "2", "4"], [0, 1, 0, 1, 3], "3 of 5 labels are numbers and others letters"),  # as in ARC
        (["A", "0", "3"], [0, 0, 3], ""),
        (["A", "D"], [0, 3], ""),
        (["1", "2"] * 10, [1, 2] * 10, "none of 20 labels is 0"),
        (["1", "2"] * 9, [1, 2] * 9, ""),
    ],
)
def test_letters_and_numbers_are_one_scheme(letters, labels, expected, said):
    split = split_of([("q", "", ("b", "c", "d", "e"), label) for label in labels])
    for task in (TASK, TASK.complete(split), replace(TASK, choice_labels=choice.PLACES)):
        rows = task.encode(split, letters)
        assert rows.labels.tolist() == expected
        remarks = task.describe(rows).remarks
        assert (said in remarks[0]) if said else not remarks
    # The training file decides for a file of numbers alone.
    if "4" in labels:
        numbers = split_of([("q", "", ("b", "c", "d", "e"), "1")])
        assert TASK.complete(split).encode(numbers, letters).labels.tolist() == [0]


def test_numbers_are_indices_whatever_the_choices(tmp_path, letters):
    """All of 1, 2 and 3 are the text of a choice, too; 0 and 1.0 are none."""
    for labels in ((1, 2, 3), (0, 1.0, 3)):
        split = numbers_of(tmp_path / "own.jsonl", *labels)
        assert TASK.encode(split, letters).labels.tolist() == [*labels]
    with pytest.raises(UserError, match=r"line 3: label '4' is not one of its 4 choices; .* \(numbers are indices"):
        TASK.encode(numbers_of(tmp_path / "own.jsonl", 1, 2, 4), letters)


def test_the_training_file_decides_what_labels_of_other_files_are(tmp_path, letters):
    train, dev = (numbers_of(tmp_path / name, *labels) for name, labels in (("a.jsonl", "013"), ("b.jsonl", "123")))
    for first, second, expected in ((train, dev, [1, 2, 3]), (dev, train, None)):
        task = TASK.complete(first)
        assert registry.from_json(registry.to_json(task)) == task
        if expected:
            assert task.encode(second, letters).labels.tolist() == expected
            continue
        with pytest.raises(UserError, match=r"b?a.jsonl line 2: label '1' is the text of choice 0 \(from 0\), and as"):
            task.encode(second, letters)  # texts, of which 0 is none
    mixed = numbers_of(tmp_path / "own.jsonl", "4", 1)
    assert TASK.complete(dev).encode(mixed, letters).labels.tolist() == [3, 1]


def test_accuracy_is_the_only_metric_of_training_but_runs_that_record_others_still_open(letters):
    recorded = replace(TASK, metrics=("accuracy", "macro_f1"))
    rows = recorded.encode(split_of(ITEMS), letters)
    assert recorded.measure(rows, [np.eye(3)[label] for label in rows.labels]) == {"accuracy": 1.0, "macro_f1": 1.0}
    with pytest.raises(UserError, match="unknown metric 'macro_f1' for this kind of task; choose from: accuracy"):
        recorded.complete(split_of(ITEMS))


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"options": ["b"]}, "line 1 has fewer than two choices"),
        ({"options": ["b", ""]}, "line 1: choices is .* a list of texts, none of them empty"),
        ({"options": "b"}, "line 1 has fewer than two choices"),
        ({"right": None}, "own.jsonl has no labels"),
        ({"right": [1]}, r"line 1: \[1\] is not a label; expected the index of the correct choice, from 0"),
        ({"context": 3}, "line 1 holds 3; expected a text"),
        ({"right": 2}, "line 1: label '2' is not one of its 2 choices; expected an index from 0, a letter"),
        ({"right": "z"}, "line 1: label 'z' is not one of its 2 choices"),
    ],
)
def test_an_invalid_item_is_refused_with_file_and_line(tmp_path, letters, record, said):
    whole = {"context": "a", "options": ["b", "c"], "right": 0} | record
    with pytest.raises(UserError, match=said):
        TASK.encode(own(json_lines(tmp_path / "own.jsonl", [whole]), choices=("options",)), letters)


def test_a_table_needs_the_columns_of_all_choices(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("context,choices,right\na,b,0\n")
    with pytest.raises(UserError, match=r"task.choices names one column, 'choices'. Name one column for each choice"):
        own(path)


def test_what_is_to_be_predicted_is_a_line_of_parts_or_an_object():
    records = [InputRecord(1, "a b\tc\td"), InputRecord(2, {"context": "a b", "choices": ["c", "d"]})]
    first, second = TASK.parse(Path("in"), records).items
    assert first == second._replace(line=1) == MultipleChoice("a b", "", ("c", "d"), None, 1)
    with pytest.raises(UserError, match="in line 1 has fewer than two choices"):
        TASK.parse(Path("in"), [InputRecord(1, "a b\tc")])


@pytest.mark.slow
def test_it_learns_from_scratch(tmp_path, letters):
    """The right choice is the one that ends in a vowel."""
    draw = np.random.default_rng(0)
    for name, count in (("train", 256), ("dev", 64)):
        records = []
        for _ in range(count):
            right = int(draw.integers(3))
            words = [" ".join(draw.choice(list("bcdfghjk"), 3)) for _ in range(3)]
            words[right] = " ".join([words[right][:3], str(draw.choice(list("aeiou")))])
            records.append({"context": "x y", "choices": words, "right": right})
        json_lines(tmp_path / f"{name}.jsonl", records)
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "dev")}
    config = FinetuneConfig(
        model=ModelOptions(layers=1, width=32, heads=2, feed_forward=64, max_positions=16, dropout=0.0),
        task=ChoiceConfig(**files, text="context", label="right", max_length=16),
        optimizer=AdamW(learning_rate=5e-3, schedule=LinearSchedule(warmup_steps=-1)),
        batch_size=16,
        epochs=3.0,
    )
    result = finetune(config, tmp_path / "run", tokenizer=letters)
    assert result["metrics"]["accuracy"]["mean"] > 0.9  # a third by chance
    assert result["counts"]["train"]["choices"] == 3 * 256
