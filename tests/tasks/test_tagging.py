"""Tagging: files, rows, predictions, the schemes of entity tags, and a model that learns."""

import functools
import itertools
import math
import os
import re
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_finetuning
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax
from seqeval import scheme as strict
from tokenizer_kinds import byte_pairs

from bert_jax.config import (
    AdamW,
    AutoTaskConfig,
    EvalConfig,
    FinetuneConfig,
    LinearSchedule,
    ModelConfig,
    ModelOptions,
    TaggingConfig,
)
from bert_jax.errors import UserError
from bert_jax.model.bert import abstract_params, bind
from bert_jax.model.heads import structured
from bert_jax.model.runtime import Runtime
from bert_jax.tasks import measurement, registry, tag_schemes
from bert_jax.tasks.evaluation import evaluate
from bert_jax.tasks.finetuning import finetune
from bert_jax.tasks.kinds import tagging
from bert_jax.tasks.kinds.tagging import (
    TagAnswer,
    TaggingTask,
    TagObjective,
    TagRows,
)
from bert_jax.tasks.metrics import TAGGING_METRICS, compute_metrics
from bert_jax.tasks.prediction import predict
from bert_jax.tasks.reading.inputs import InputRecord
from bert_jax.tasks.reading.tables import Columns
from bert_jax.tasks.rows import Sentence, Span, Split, TaskBatch
from bert_jax.tasks.tag_schemes import entities, entity_tags, irregular_tags
from bert_jax.tasks.task import Task
from bert_jax.tokenization import tokenizer as tokenizer_lib

letters = tiny_finetuning.letters  # a fixture

TASK = TaggingTask("own", ("N", "V", "X"), max_length=8, metrics=("accuracy",))


def measure(task: Task, rows: TagRows, guesses: np.ndarray) -> dict[str, float]:
    """The metrics of these predicted tags."""
    answers = np.full((rows.count, rows.lengths.max()), -1)
    answers[rows.word_rows, rows.word_slots] = guesses
    return task.measure(rows, [TagAnswer(tags, np.ones(len(tags), np.float32)) for tags in answers])


def split_of(*sentences: list[tuple[str, str]]) -> Split[Sentence]:
    items = []
    line = 1
    for sentence in sentences:
        words, tags = zip(*sentence, strict=True)
        items.append(Sentence(words, tags, tuple(range(line, line + len(words)))))
        line += len(words) + 1
    return Split(Path("train.conll"), tuple(items), labelled=True)


def test_the_tag_stands_on_the_first_piece_of_each_word(letters):
    rows = TASK.encode(split_of([("cat", "X"), ("is", "V")], [("a", "N")]), letters)
    batch = rows.batch(np.array([0, 1]), 8)
    assert letters.tokens(batch.input_ids[0]) == ["[CLS]", "c", "##a", "##t", "i", "##s", "[SEP]", "[PAD]"]
    assert batch.label_weights.tolist() == [[0, 1, 0, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0]]
    assert batch.labels.tags[0, [1, 4]].tolist() == [2, 1]
    assert batch.labels.tags[1, 1] == 0
    assert batch.labels.words.tolist() == [[0, 1, 1, 1, 2, 2, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0]]


def test_all_pieces_of_a_word_learn_its_tag(letters):
    task = replace(TASK, label_subwords="all")
    rows = task.encode(split_of([("cat", "X"), ("is", "V")], [("a", "N")]), letters)
    batch = rows.batch(np.array([0, 1]), 8)
    assert batch.labels.tags[0].tolist() == [0, 2, 2, 2, 1, 1, 0, 0]
    assert batch.label_weights.tolist() == [[0, 1, 1, 1, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0]]
    unlabelled = task.encode(replace(rows.split, labelled=False), letters).batch(np.array([0]), 8)
    assert not unlabelled.label_weights.any()
    np.testing.assert_array_equal(unlabelled.labels.words, batch.labels.words[:1])


def answers_of(task: Task, rows: TagRows, logits: np.ndarray, crf: dict | None = None) -> list[TagAnswer]:
    """The predictions of the objective for these logits; crf: the parameters of the CRF."""
    objective, batch = task.objective(), rows.batch(np.arange(rows.count), logits.shape[1])
    model = ModelConfig(vocab_size=60, layers=1, width=8, heads=1, feed_forward=4, max_positions=16)
    wanted = abstract_params(model, objective.heads)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), wanted) | ({"crf": crf} if crf else {})

    @jax.jit
    def answer(params: dict, logits: jax.Array, batch: TaskBatch) -> TagAnswer:
        return objective.answers(bind(model, objective.heads, params, Runtime()), logits, batch)

    @jax.jit
    def joint(params: dict, inputs: tuple) -> TagAnswer:
        return objective.joint_answers(bind(model, objective.heads, params, Runtime()), inputs)

    found = jax.device_get(answer(params, logits.astype(np.float32), batch))
    by_row = [jax.tree.map(lambda leaf, row=row: leaf[row], found) for row in range(rows.count)]
    return task.joined(rows, by_row, functools.partial(joint, params))


@pytest.mark.parametrize(
    ("labels", "written"),
    [
        (("O", "B-LOC", "I-LOC", "I-PER"), ["I-PER", "I-PER", "O", "I-LOC", "B-LOC", "I-LOC"]),  # some B-X of IOB1
        (("O", "I-LOC", "I-PER"), ["I-PER", "I-PER", "O", "I-LOC", "I-LOC", "I-LOC"]),
    ],
)
def test_entities_are_those_of_the_file_where_the_labels_lack_beginnings(letters, labels, written):
    task = TaggingTask("own", labels, max_length=16, metrics=("f1", "precision", "recall", "accuracy"))
    tags = ["B-PER", "B-PER", "O", "B-LOC", "B-LOC", "I-LOC"]
    for file in (tags, ["I-PER", "B-PER", "O", "I-LOC", "B-LOC", "I-LOC"]):
        split = split_of(list(zip("abcdef", file, strict=True)))
        ids = task.label_ids(split)
        assert [labels[number] for number in ids] == written
        found = measure(task, task.encode(split, letters), np.array(ids))
        guessed = tag_schemes.entities(written)
        right = len({*guessed} & {*tag_schemes.entities(tags)})
        assert (found["precision"], found["recall"]) == (right / len(guessed), right / 4)
        truth = np.array(["I-PER", "B-PER", *file[2:3], "I-LOC", "B-LOC", "I-LOC"])
        assert found["accuracy"] == np.mean(np.array(written) == truth)


@pytest.mark.parametrize("labels", [("O", "I-PER", "I-LOC"), ("O", "B-LOC", "I-LOC", "I-PER")])
def test_a_crf_allows_the_tags_of_files_whose_labels_lack_beginnings(labels):
    task = TaggingTask("own", labels, max_length=16, metrics=("f1",), crf=True)
    objective = task.objective()
    assert isinstance(objective, TagObjective) and objective.scheme is not None
    ids = task.label_ids(split_of(list(zip("abcdef", ["B-PER", "O", "I-PER", "B-LOC", "B-LOC", "I-LOC"], strict=True))))
    assert objective.scheme.first[ids[0]] and objective.scheme.last[ids[-1]]
    assert all(objective.scheme.pairs[last][tag] for last, tag in itertools.pairwise(ids))


@pytest.mark.parametrize("decode", ["first", "mean"])
def test_a_word_is_decoded_from_its_first_piece_or_from_the_mean_of_all(letters, decode):
    task = replace(TASK, label_subwords="all", decode=decode)
    rows = task.encode(split_of([("ab", "X"), ("c", "V")], [("def", "N")]), letters)
    logits = np.random.default_rng(0).normal(size=(2, 8, 3))
    shares = softmax(logits, axis=-1)
    wanted = [shares[0, 1], shares[0, 3], shares[1, 1]]
    if decode == "mean":
        wanted = [shares[0, 1:3].mean(axis=0), shares[0, 3], shares[1, 1:4].mean(axis=0)]
    told = task.predictions(rows, answers_of(task, rows, logits))
    assert [tag for said in told for tag in said["tags"]] == [TASK.labels[word.argmax()] for word in wanted]
    assert [score for said in told for score in said["tag_scores"]] == pytest.approx([word.max() for word in wanted])


def test_a_crf_predicts_the_best_path_and_its_marginals(letters):
    task = TaggingTask("own", ("O", "B-X", "I-X"), max_length=12, metrics=("f1",), crf=True)
    split = replace(split_of([("ab", "O"), ("c", "O"), ("de", "O")]), labelled=False)
    rows = task.encode(split, letters)
    draw = np.random.default_rng(2)
    chain = {"transitions": draw.normal(size=(3, 3)), "start": draw.normal(size=3), "end": draw.normal(size=3)}
    logits = draw.normal(size=(1, 12, 3))
    scores = {}
    for path in itertools.product(range(3), repeat=3):
        if path[0] == 2 or (0, 2) in itertools.pairwise(path):  # I-X may only follow B-X or I-X
            continue
        moves = sum(chain["transitions"][pair] for pair in itertools.pairwise(path))
        scores[path] = chain["start"][path[0]] + moves + chain["end"][path[-1]] + logits[0, [1, 3, 4], path].sum()
    best = max(scores, key=scores.__getitem__)
    crf = {name: value.astype(np.float32) for name, value in chain.items()}
    (told,) = task.predictions(rows, answers_of(task, rows, logits, crf))
    assert told["tags"] == [task.labels[tag] for tag in best]
    total = sum(np.exp(score) for score in scores.values())
    for place, (tag, score) in enumerate(zip(best, told["tag_scores"], strict=True)):
        through = sum(np.exp(other) for path, other in scores.items() if path[place] == tag)
        assert score == pytest.approx(through / total, rel=1e-4)


@pytest.mark.parametrize(
    ("labels", "grammar"),
    [
        (("O", "B-X", "I-X", "B-Y", "I-Y"), r"(O |B-X (I-X )*|B-Y (I-Y )*)*"),
        (("O", "B-X", "I-X", "E-X", "S-X"), r"(O |S-X |B-X (I-X )*E-X )*"),
        (("O", "B-X", "I-X", "I-Y", "I-Z"), r"(O |I-Y |I-Z |I-X (B-X |I-X )*)*"),
    ],
)
def test_tags_of_a_sentence_in_several_rows_are_a_sequence_of_their_scheme(letters, labels, grammar):
    task = TaggingTask("own", labels, max_length=5, metrics=("f1",), crf=True)
    split = replace(split_of(*([("ab", "O"), ("c", "O"), ("de", "O"), ("f", "O")] for _ in range(20))), labelled=False)
    rows = task.encode(split, letters)
    assert rows.count == 60 and not rows.whole.all()
    draw = np.random.default_rng(0)
    sizes = {"transitions": (5, 5), "start": 5, "end": 5}
    crf = {name: draw.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    answers = answers_of(task, rows, draw.normal(0, 3, (rows.count, 5, 5)), crf)
    tags = [one["tags"] for one in task.predictions(rows, answers)]
    assert all(re.fullmatch(grammar, "".join(f"{tag} " for tag in sentence)) for sentence in tags)
    crossing = [span for sentence in tags for span in tag_schemes.entities(sentence) if span.first < 2 <= span.end - 1]
    assert crossing  # an entity may cross the border between two rows


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"decode": "mean"}, "add --config.task.label_subwords=all"),
        ({"crf": True, "label_subwords": "all"}, "task.crf uses the first piece of each word"),
        ({"label_subwords": "last"}, "unknown task.label_subwords 'last'; choose from first, all"),
        ({"crf": True, "class_weights": "balanced"}, "which task.crf replaces; remove one of the two"),
        ({"crf_rate": 10.0}, "task.crf_rate is 10.0, but there is no CRF"),
        ({"crf": True, "crf_rate": -1.0}, "task.crf_rate is -1.0. Use a finite number of at least 0"),
    ],
)
def test_incompatible_options_are_refused(options, said):
    with pytest.raises(UserError, match=said):
        replace(TASK, **options)


@pytest.mark.parametrize("labels", [("O", "B-X", "I-X"), ("O", "B-X", "I-X", "E-X", "S-X")])
def test_a_file_in_another_scheme_is_encoded_in_that_of_the_labels(letters, labels):
    task = TaggingTask("own", labels, max_length=16, metrics=("f1",))
    files = [
        ("I-X", "I-X", "O", "I-X", "B-X", "I-X"),
        ("B-X", "I-X", "O", "B-X", "B-X", "I-X"),
        ("B-X", "E-X", "O", "S-X", "B-X", "E-X"),
    ]
    found = []
    for tags in files:
        rows = task.encode(split_of(list(zip("abcdef", tags, strict=True))), letters)
        found.append([task.labels[number] for number in rows.labels[rows.word_starts]])
        assert TASK.describe(rows).counts == {"words": 6, "irregular_tags": 0}
    assert found == [list(files[1] if len(labels) == 3 else files[2])] * 3
    broken = task.encode(split_of([("a", "B-X"), ("b", "O"), ("c", "I-X"), ("d", "O")], [("e", "B-X")]), letters)
    assert TASK.describe(broken).counts["irregular_tags"] == 1


def test_words_of_byte_level_bpe_have_the_space_before_them(tmp_path):
    tokenizer = tokenizer_lib.load(byte_pairs(tmp_path, ["Ġ a", "Ġ b", "Ġa b"]))
    rows = TASK.encode(split_of([("ab", "X"), ("ab", "V"), ("b", "N")], [("b", "N")]), tokenizer)
    assert tokenizer.tokens(rows.input_ids) == ["<s>", "a", "b", "Ġab", "Ġb", "</s>", "<s>", "b", "</s>"]
    np.testing.assert_array_equal(rows.input_ids[1:5], tokenizer.encode("ab ab b"))


def test_a_word_without_pieces_becomes_unknown(letters):
    rows = TASK.encode(split_of([("a", "X"), ("\x00", "V"), ("b", "N")]), letters)
    assert letters.tokens(rows.input_ids) == ["[CLS]", "a", "[UNK]", "b", "[SEP]"]
    assert rows.label_weights.tolist() == [0, 1, 1, 1, 0]


def test_only_a_word_longer_than_a_row_is_cut(letters):
    rows = TASK.encode(split_of([("abcdefghij", "X"), ("k", "V")]), letters)
    assert letters.tokens(rows.input_ids[:8]) == ["[CLS]", "a", *(f"##{letter}" for letter in "bcdef"), "[SEP]"]
    assert rows.lengths.tolist() == [8, 3] and rows.truncated == 1
    cut, read = measurement.remarks(rows, TASK)
    assert cut.endswith(": 1 words lost tokens to task.max_length=8")
    assert read.endswith(": 1 of 1 sentences are longer than task.max_length=8 tokens, and are read in 2 windows")


words = st.text("abcdefg\x00", min_size=1, max_size=9)
sentences = st.lists(st.lists(words, min_size=1, max_size=12), min_size=1, max_size=5)


@settings(deadline=None, max_examples=60)
@given(texts=sentences, max_length=st.integers(8, 16), stride=st.integers(0, 20))
def test_every_word_is_predicted_exactly_once(letters, texts, max_length, stride):
    split = split_of(*([(word, "NVX"[len(word) % 3]) for word in text] for text in texts))
    rows = replace(TASK, max_length=max_length, doc_stride=stride).encode(split, letters)
    flat = [word for text in texts for word in text]
    assert rows.label_weights.sum() == len(flat) == len(set(zip(rows.word_rows, rows.word_slots, strict=True)))
    assert rows.lengths.max() <= max_length
    batch = rows.batch(np.arange(rows.count), max_length)
    for word, row, slot, size in zip(flat, rows.word_rows, rows.word_slots, rows.word_sizes, strict=True):
        pieces = letters.encode(word) if len(letters.encode(word)) else [letters.unk_id]
        room = max_length - 2
        assert size == min(len(pieces), room)
        assert batch.input_ids[row, slot : slot + min(len(pieces), room)].tolist() == list(pieces[:room])
        assert batch.labels.tags[row, slot] == len(word) % 3 and batch.label_weights[row, slot] == 1
    truth = np.array([len(word) % 3 for word in flat])
    assert measure(TASK, rows, truth) == {"accuracy": 1.0}
    assert measure(TASK, rows, (truth + 1) % 3) == {"accuracy": 0.0}


def test_a_row_never_holds_words_of_two_sentences(letters):
    rows = TASK.encode(split_of([("a", "X")] * 7, [("b", "X")]), letters)
    assert rows.lengths.tolist() == [8, 6, 3] and rows.items().tolist() == [0, 0, 1]
    assert rows.sentence_offsets.tolist() == [0, 7, 8]


def test_a_training_file_of_entities_closes_the_set_of_tags():
    task = replace(TASK, labels=(), metrics=())
    found = task.complete(split_of([("EU", "I-ORG"), ("says", "O"), ("Rome", "I-LOC")]))
    assert found.labels == ("O", "B-LOC", "B-ORG", "I-LOC", "I-ORG")
    assert found.metrics[0] == "f1"
    plain = task.complete(split_of([("EU", "PROPN"), ("says", "VERB")]))
    assert (plain.labels, plain.metrics) == (("PROPN", "VERB"), ("accuracy",))


def test_entities_are_measured_over_whole_sentences(letters):
    task = TaggingTask("own", ("O", "B-X", "I-X"), max_length=8, metrics=("f1", "accuracy"))
    # A sentence of two rows whose only entity lies across the border.
    split = split_of([(letter, "O") for letter in "abcde"] + [("f", "B-X"), ("g", "I-X"), ("h", "O")])
    rows = task.encode(split, letters)
    assert rows.count == 2
    right = np.array([0, 0, 0, 0, 0, 1, 2, 0])
    assert measure(task, rows, right) == {"f1": 1.0, "accuracy": 1.0}
    shorter = np.array([0, 0, 0, 0, 0, 1, 0, 0])
    assert measure(task, rows, shorter) == {"f1": 0.0, "accuracy": pytest.approx(7 / 8)}


@pytest.mark.parametrize("crf", [False, True])
def test_words_with_the_label_minus_100_neither_train_nor_count(letters, crf):
    """Metrics are those of seqeval without these words, as run_ner.py of transformers computes them."""
    split = split_of(
        [("a", "B-X"), ("b", "-100"), ("c", "I-X"), ("d", "O")], [("e", "-100"), ("f", "-100")], [("g", "O")]
    )
    task = TaggingTask("own", max_length=8, crf=crf).complete(split)
    assert task.labels == ("O", "B-X", "I-X") and task.metrics[0] == "f1"
    rows = task.encode(split, letters)
    assert rows.batch(np.arange(3), 6).label_weights.tolist() == [[0, 1, 0, 1, 1, 0], [0] * 6, [0, 1, 0, 0, 0, 0]]
    guesses = np.array([1, 0, 2, 1, 1, 1, 0])
    kept = [["B-X", "I-X", "O"], [], ["O"]], [["B-X", "I-X", "B-X"], [], ["O"]]
    assert measure(task, rows, guesses) == pytest.approx(compute_metrics(TAGGING_METRICS, task.metrics, *kept))
    description = task.describe(rows)
    assert description.counts == {"words": 7, "irregular_tags": 0, "ignored_words": 3}
    assert description.remarks == ["train.conll: 3 of 7 words have the label -100, which stands for none"]
    with pytest.raises(UserError, match="every tag is '-100'"):
        TaggingTask("own").complete(split_of([("a", "-100")]))


def test_numbers_of_classes_may_be_minus_100(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"tokens": ["a", "b"], "labels": [0, -100]}\n', encoding="utf-8")
    for labels, tag in ((), "0"), (("O", "B-X"), "O"):
        (item,) = TaggingTask("own", labels).read(path, Columns(), label_required=True).items
        assert item.tags == (tag, "-100")


GOOD = [("Ann", "B-PER"), ("Lee", "I-PER"), ("saw", "O"), ("Rome", "B-LOC"), (".", "O")]


@pytest.mark.parametrize(
    ("stray", "read"),
    [
        (("0", "o", "X", "PER", "_"), ("O",) * 5),
        (("b-PER", "i-per"), ("B-PER", "I-PER")),
        (("B_PER", "I_PER"), ("B-PER", "I-PER")),
        (("B:PER", "I/PER"), ("B-PER", "I-PER")),
        (("B-", "O-PER"), ("O", "O")),
    ],
)
def test_stray_tags_keep_the_entities_of_a_file(tmp_path, stray, read):
    """What is no tag of an entity is outside of all, as for conlleval and seqeval."""
    path = tmp_path / "train.conll"
    sentences = [GOOD] * 20 + [[("a", tag) for tag in stray]]
    path.write_text("\n".join("".join(f"{word} {tag}\n" for word, tag in lines) for lines in sentences))
    split = TaggingTask("own").read(path, Columns(), label_required=True)
    assert split.items[-1].tags == read
    total = 20 * len(GOOD) + len(stray)
    (remark,) = split.remarks
    assert remark.startswith(f"{len(stray)} of {total} tags (the first one in line 121) are read as entity tags")
    task = TaggingTask("own").complete(split)
    assert task.labels == ("O", "B-LOC", "B-PER", "I-LOC", "I-PER") and task.metrics[0] == "f1"
    # A model that has such a tag keeps it.
    assert TaggingTask("own", ("O", *stray)).read(path, Columns(), label_required=True).items[-1].tags == stray


@pytest.mark.parametrize("mark", ["B_PER I_PER O", "b-PER i-PER o", "B:PER I:PER 0"])
def test_a_file_with_other_separators_or_cases_marks_entities(tmp_path, mark):
    begin, inside, outside = mark.split()
    path = tmp_path / "train.conll"
    path.write_text(f"Ann {begin}\nLee {inside}\nsat {outside}\n")
    split = TaggingTask("own").read(path, Columns(), label_required=True)
    assert split.items[0].tags == ("B-PER", "I-PER", "O") and len(split.remarks) == 1


@pytest.mark.parametrize("tags", ["N V O", "B-PER L-PER U-LOC O", "B M E O", "B-PER I-PER O", "B-X_Y O", "_ _ _"])
def test_tags_that_are_of_a_scheme_or_of_none_are_not_corrected(tmp_path, tags):
    path = tmp_path / "train.conll"
    path.write_text("".join(f"a {tag}\n" for tag in tags.split()))
    split = TaggingTask("own").read(path, Columns(), label_required=False)
    assert not split.remarks
    many = path.with_name("many.conll")
    many.write_text("a B-X\nb O\nc Y\n")
    split = TaggingTask("own").read(many, Columns(), label_required=True)
    assert split.items[0].tags == ("B-X", "O", "Y") and "so metrics compare words: 'Y'" in split.remarks[0]


def test_an_unknown_tag_is_refused_with_file_and_line(letters):
    split = split_of([("a", "N")], [("b", "V"), ("c", "ADJ")])
    with pytest.raises(UserError, match=r"train.conll line 4: unknown label 'ADJ'; .* labels are: 'N', 'V', 'X'"):
        TASK.encode(split, letters)


def test_the_baseline_takes_the_most_frequent_tag_of_the_word_and_of_all():
    run, tie = [("run", "V"), ("run", "N"), ("run", "V"), ("a", "X")], [("tie", "V"), ("tie", "N")]
    train = split_of(run, [("b", "X"), ("c", "X"), *tie])
    test = split_of([("run", "V"), ("run", "N"), ("tie", "N"), ("new", "X"), ("newer", "V")])
    found = tagging.most_frequent_tag_baseline(train, test)
    assert found == tagging.Baseline(accuracy=3 / 5, unknown_accuracy=1 / 2, words=5, unknown_words=2)
    assert math.isnan(tagging.most_frequent_tag_baseline(train, train).unknown_accuracy)


def test_entities_are_read_as_conlleval_reads_them_and_lie_in_the_raw_text(letters):
    task = TaggingTask("own", ("O", "B-P", "I-P", "B-L", "I-L"), max_length=16)
    split = task.parse(Path("in"), [InputRecord(1, "ann lee,of rome"), InputRecord(2, {"tokens": ["rome", "x"]})])
    rows = task.encode(split, letters)
    tags = ["B-P", "I-P", "O", "O", "I-L", "I-P", "B-P"]  # an I- that follows no entity of its type begins one
    answers = [TagAnswer(np.zeros(16, np.int32), np.zeros(16, np.float32)) for _ in range(rows.count)]
    for place, (tag, row, slot) in enumerate(zip(tags, rows.word_rows, rows.word_slots, strict=True)):
        answers[row].tags[slot], answers[row].scores[slot] = task.labels.index(tag), (place + 1) / 8
    raw, words = task.predictions(rows, answers)
    assert raw["tags"] == tags[:5] and raw["offsets"][1] == [4, 7]
    assert raw["entities"] == [
        {"type": "P", "text": "ann lee", "score": 0.1875, "start": 0, "end": 7, "words": [0, 2]},
        {"type": "L", "text": "rome", "score": 0.625, "start": 11, "end": 15, "words": [4, 5]},
    ]
    assert words == {
        "words": ["rome", "x"],
        "tags": ["I-P", "B-P"],
        "tag_scores": [0.75, 0.875],
        "entities": [
            {"type": "P", "text": "rome", "score": 0.75, "words": [0, 1]},
            {"type": "P", "text": "x", "score": 0.875, "words": [1, 2]},
        ],
    }


def test_labels_are_in_the_order_of_the_classes_that_a_file_names():
    split = split_of([("EU", "B-ORG"), ("says", "O"), ("Rome", "B-LOC")])
    named = replace(split, class_names=("O", "B-ORG", "I-ORG", "B-LOC"))
    task = replace(TASK, labels=(), metrics=())
    assert task.complete(named).labels == ("O", "B-ORG", "I-ORG", "B-LOC", "I-LOC")
    bilou = replace(split_of([("EU", "U-X"), ("is", "O")]), class_names=("U-X", "O", "B-X", "I-X", "L-X"))
    assert tag_schemes.with_usual_letters(bilou).class_names == ("S-X", "O", "B-X", "I-X", "E-X")
    assert task.complete(replace(split, class_names=("O", "X"))).labels[0] == "O"  # not those of this column
    unused = replace(split, class_names=("O", "B-ORG", "B-LOC", "X"))  # which marks no entity
    assert task.complete(unused).labels == ("O", "B-ORG", "B-LOC", "I-LOC", "I-ORG")
    more = replace(bilou, class_names=(*bilou.class_names, "PAD"))
    assert tag_schemes.with_usual_letters(more).class_names[-1] == "PAD"


ENTITY_METRICS = ("precision", "recall", "f1")
BIO_TAGS = ["O", "B-X", "I-X", "B-Y", "I-Y"]
BIO = st.lists(st.sampled_from(BIO_TAGS), min_size=1, max_size=9)
IOBES = st.lists(st.sampled_from(["O", *(f"{m}-{t}" for m in "BIES" for t in "XY")]), min_size=1, max_size=9)

BILOU = st.lists(st.sampled_from(["O", *(f"{m}-{t}" for m in "BILU" for t in "XY")]), min_size=1, max_size=9)
BARE_IOBES = st.lists(st.lists(st.sampled_from("OBIES"), min_size=1, max_size=9), min_size=2, max_size=2)


def strictly(tags: list[str], scheme: type) -> list[Span]:
    """The entities that seqeval's strict reader of a scheme finds."""
    return [Span(found.tag, found.start, found.end) for found in strict.Tokens(tags, scheme).entities]


@settings(deadline=None)
@given(tags=IOBES | BIO)
def test_rewritten_tags_mark_the_same_entities_and_all_follow(tags):
    found = entities(tags)
    for ends, scheme in ((False, strict.IOB2), (True, strict.IOBES)):
        rewritten = list(entity_tags(found, len(tags), ends))
        assert entities(rewritten) == found == strictly(rewritten, scheme)
        assert irregular_tags([rewritten]) == 0
        assert structured.marks_ends(rewritten) == (ends and bool(found))


@settings(deadline=None)
@given(tags=BIO)
def test_tags_of_bio_are_regular_where_a_strict_reader_finds_all_that_conlleval_finds(tags):
    readings = [strictly(tags, strict.IOB2) == entities(tags), strictly(tags, strict.IOB1) == entities(tags)]
    assert (irregular_tags([tags]) == 0) == any(readings)


@settings(deadline=None)
@given(tags=IOBES)
def test_tags_of_iobes_are_regular_where_a_strict_reader_finds_all_that_conlleval_finds(tags):
    if structured.marks_ends(tags):
        assert (irregular_tags([tags]) == 0) == (strictly(tags, strict.IOBES) == entities(tags))


@pytest.mark.parametrize(
    ("sentences", "count"),
    [
        ([["B-X", "I-X", "O", "I-X"], ["B-Y"]], 1),  # IOB2 with an I-X after O
        ([["B-LOC", "I-PER", "O"], ["B-LOC"], ["B-PER"]], 1),
        ([["I-X", "I-X", "B-X", "I-X"], ["I-Y", "I-X", "O"]], 0),  # IOB1
        ([["I-X", "I-X", "B-X"], ["I-Y", "O", "B-X"]], 1),  # IOB1 with a B-X after O
        ([["B-X", "E-X", "S-Y"]], 0),
        ([["B-X", "O", "E-Y", "S-Y", "B-X", "I-Y", "E-Y", "B-Y"]], 4),  # cut off, unbegun, of two types, unended
    ],
)
def test_tags_that_cannot_follow_are_counted(sentences, count):
    assert irregular_tags(sentences) == count


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from("OBI"), min_size=1, max_size=9), min_size=2, max_size=2) | BARE_IOBES)
def test_tags_without_types_are_those_of_one_type(sentences):
    typed = [[tag if tag == "O" else f"{tag}-X" for tag in tags] for tags in sentences]
    found, wanted = list(map(entities, sentences)), list(map(entities, typed))
    assert [[span._replace(label="X") for span in spans] for spans in found] == wanted
    assert {span.label for spans in found for span in spans} <= {"_"}
    assert irregular_tags(sentences) == irregular_tags(typed)
    for ends in (False, True):
        rewritten = [entity_tags(spans, 9, ends) for spans in found]
        assert list(map(entities, rewritten)) == found and {tag for tags in rewritten for tag in tags} <= set("OBIES")
    lengths = min(map(len, sentences))
    truth, guess = ([tags[:lengths]] for tags in sentences)
    wanted_truth, wanted_guess = ([tags[:lengths]] for tags in typed)
    wanted_metrics = compute_metrics(TAGGING_METRICS, ENTITY_METRICS, wanted_truth, wanted_guess)
    assert compute_metrics(TAGGING_METRICS, ENTITY_METRICS, truth, guess) == wanted_metrics


@settings(deadline=None)
@given(tags=BILOU)
def test_bilou_is_iobes_by_other_letters(tags):
    split = Split(Path("train.conll"), (Sentence(tuple("w" * len(tags)), tuple(tags), (1,)),), True)
    (found,) = tag_schemes.with_usual_letters(split).items
    assert found.tags is not None and strictly(list(found.tags), strict.IOBES) == strictly(tags, strict.BILOU)
    if not {tag[0] for tag in tags} & set("LU"):
        assert found.tags == tuple(tags)


def test_bmes_is_iobes_and_classes_stay_as_they_are():
    for tags, wanted in [
        (("B-X", "M-X", "E-X", "S-Y"), ("B-X", "I-X", "E-X", "S-Y")),
        (("B", "M", "E"), ("B", "M", "E")),
        (("L-X", "NOUN"), ("L-X", "NOUN")),
        (("M-X", "L-X"), ("M-X", "L-X")),
    ]:
        sentences = Sentence(tuple("w" * len(tags)), tags, (1,)), Sentence(("a",), None, ())
        first, second = tag_schemes.with_usual_letters(Split(Path("train.conll"), sentences, True)).items
        assert first.tags == wanted and second.tags is None


def test_tags_without_types_mark_entities_where_they_can():
    assert structured.marks_entities({"O", "B", "I"}) and structured.marks_entities({"O", "I"})
    for classes in ({"B", "I"}, {"O", "S"}, {"O", "B", "M", "E"}, {"I", "E"}):
        assert not structured.marks_entities(classes)
    assert tag_schemes.closed_set({"O", "I"}) == {"O", "B", "I"}
    assert tag_schemes.closed_set({"O", "B", "E"}) == set("OBIES")
    task, path = TaggingTask("own", max_length=8), Path("train.conll")
    split = Split(path, (Sentence(("a", "b"), ("I", "I"), (1, 2)), Sentence(("c", "d"), ("O", "I"), (4, 5))), True)
    task = task.complete(split)
    assert task.labels == ("O", "B", "I") and task.metrics[0] == "f1"
    assert task.label_ids(split) == [1, 2, 0, 1]  # IOB1 is encoded as IOB2, also in a sentence without O


def test_a_set_of_tags_is_closed_in_its_scheme():
    assert tag_schemes.closed_set({"I-X"}) == {"O", "B-X", "I-X"}
    assert tag_schemes.closed_set({"S-X", "O"}) == {"O", "B-X", "I-X", "E-X", "S-X"}
    assert not structured.marks_entities({"O"}) and not structured.marks_entities({"B-X", "NOUN"})


@settings(deadline=None)
@given(pairs=st.lists(st.lists(st.tuples(*[st.sampled_from(BIO_TAGS)] * 2), min_size=1), min_size=1))
def test_entity_scores_are_shares_of_equal_entities(pairs):
    truth, guess = ([[pair[side] for pair in sentence] for sentence in pairs] for side in (0, 1))
    sides = [{(row, found) for row, tags in enumerate(part) for found in entities(tags)} for part in (truth, guess)]
    right = len(sides[0] & sides[1])
    found = compute_metrics(TAGGING_METRICS, ENTITY_METRICS, truth, guess)
    wanted = [right / len(sides[1] or "0"), right / len(sides[0] or "0"), 2 * right / (sum(map(len, sides)) or 1)]
    assert list(found.values()) == pytest.approx(wanted)


@pytest.fixture(scope="module")
def official() -> Path:
    """The conlleval of CoNLL-2003 (version 2004-01-26), where $BERT_JAX_CONLLEVAL names it."""
    if "BERT_JAX_CONLLEVAL" not in os.environ:
        pytest.skip("BERT_JAX_CONLLEVAL names no conlleval.pl (of https://www.clips.uantwerpen.be/conll2003/ner/)")
    return Path(os.environ["BERT_JAX_CONLLEVAL"])


def by_official(script: Path, truth: list[list[str]], guess: list[list[str]]) -> dict[str, float]:
    """What the official script prints, in percent with two digits, and its counts."""
    lines = [
        "\n".join(f"word {' '.join(pair)}" for pair in zip(*pair, strict=True)) + "\n\n"
        for pair in zip(truth, guess, strict=True)
    ]
    said = subprocess.run(["perl", script], input="".join(lines), capture_output=True, text=True, check=True).stdout
    names = {"precision": "precision", "recall": "recall", "f1": "FB1", "accuracy": "accuracy"}
    return {name: float(re.search(rf"{word}: +([\d.]+)", said)[1]) for name, word in names.items()}


def percent(found: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{100 * value:.2f}") for name, value in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_scores_of_any_tags_are_the_official_ones(official, seed):
    draw = np.random.default_rng(seed)
    tags = np.array(["O", *(f"{mark}-{name}" for mark in "BI" for name in ("PER", "LOC", "A-B"))])
    truth, guess = [], []
    for _ in range(400):
        said = draw.choice(tags, draw.integers(1, 30))
        truth.append(said.tolist())
        guess.append(np.where(draw.random(len(said)) < 0.3, draw.choice(tags, len(said)), said).tolist())
    names = (*ENTITY_METRICS, "accuracy")
    assert percent(compute_metrics(TAGGING_METRICS, names, truth, guess)) == by_official(official, truth, guess)


@pytest.mark.slow
def test_scores_of_predictions_on_conll_2003_are_the_official_ones(official, bert_jax_data):
    """Predicts each word's most frequent tag of the training file, which gives many invalid sequences."""
    task, files = registry.resolve(AutoTaskConfig(name="conll2003", data_dir=os.fspath(bert_jax_data)))
    counts: dict[str, Counter] = {}
    for sentence in registry.read(task, files["train"]).items:
        for word, tag in zip(sentence.words, sentence.tags, strict=True):
            counts.setdefault(word, Counter())[tag] += 1
    test = registry.read(task, files["test"]).items
    truth = [list(item.tags) for item in test]
    guess = [[counts[word].most_common(1)[0][0] if word in counts else "O" for word in item.words] for item in test]
    names = (*ENTITY_METRICS, "accuracy")
    assert percent(compute_metrics(TAGGING_METRICS, names, truth, guess)) == by_official(official, truth, guess)


# By the first letter of a word; its second piece says nothing.
TAGS = {"a": "O", "c": "O"} | {
    letter: f"{mark}-{kind}"
    for kind in "DG"
    for mark, letter in zip("BIES", "defghijk"[4 * (kind == "G") :], strict=False)
}


def written(path: Path, draw: np.random.Generator, sentences: int) -> Path:
    """Sentences of entities of one to three words, with words outside between them."""
    letters = {tag: letter for letter, tag in TAGS.items()}
    lines = []
    for _ in range(sentences):
        for _ in range(draw.integers(1, 4)):
            lines += ["al O"] * draw.integers(1, 3)
            kind, length = str(draw.choice(["D", "G"])), int(draw.integers(1, 4))
            tags = [f"{mark}-{kind}" for mark in ("S" if length == 1 else "B" + "I" * (length - 2) + "E")]
            lines += [f"{letters[tag]}{draw.choice(['l', 'm'])} {tag}" for tag in tags]
        lines += ["c O", ""]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("options", [{"crf": True}, {"label_subwords": "all", "decode": "mean"}], ids=["crf", "mean"])
def test_a_tagger_learns_entities_in_the_scheme_of_its_file(tmp_path, options):
    vocabulary = tmp_path / "vocab.txt"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary.write_text("\n".join([*special, *TAGS, "##l", "##m"]) + "\n")
    draw = np.random.default_rng(0)
    files = {
        name: str(written(tmp_path / f"{name}.conll", draw, count)) for name, count in (("train", 300), ("dev", 50))
    }
    config = FinetuneConfig(
        model=ModelOptions(layers=1, width=32, heads=2, feed_forward=64, max_positions=48),
        task=TaggingConfig(max_length=48, **files, **options),
        optimizer=AdamW(learning_rate=5e-3, schedule=LinearSchedule(warmup_steps=5)),
        batch_size=32,
        epochs=8.0,
        eval=EvalConfig(every_steps=1000),  # at the end only
    )
    result = finetune(config, tmp_path / "run", tokenizer_lib.load(vocabulary, lowercase=True))
    assert result["metrics"]["f1"]["mean"] > 0.95
    assert result["counts"]["dev"]["irregular_tags"] == 0
    again = evaluate(tmp_path / "run", files["dev"])
    assert again["f1"] == pytest.approx(result["metrics"]["f1"]["mean"])
    (told,) = predict(tmp_path / "run", [{"tokens": ["al", "dm", "fl", "al", "km", "c"]}])
    assert told["tags"] == ["O", "B-D", "E-D", "O", "S-G", "O"]
    assert [entity["words"] for entity in told["entities"]] == [[1, 3], [4, 5]]
    assert all(1 / 9 < score <= 1.0001 for score in told["tag_scores"])  # the best of nine tags
