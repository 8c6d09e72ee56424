"""The named tasks: layouts of their files, published sizes, and what a configuration may say."""

import dataclasses
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert_jax.config import (
    AutoTaskConfig,
    ClassificationConfig,
    FinetuneConfig,
    RegressionConfig,
    TaskConfig,
    load,
)
from bert_jax.errors import UserError
from bert_jax.tasks import named, registry, tag_schemes
from bert_jax.tasks.reading.tables import Columns
from bert_jax.tasks.registry import from_json, to_json
from bert_jax.tasks.task import Task

# Two lines of each published file, headers where they have them; test files carry no labels.
GLUE_FILES = {
    "sst2": (
        "sentence\tlabel\nhide new secretions from the parental units \t0\n",
        "index\tsentence\n0\tuneasy mishmash of styles and genres .\n",
    ),
    "cola": (
        "gj04\t1\t\tOur friends won't buy this analysis.\n",
        "index\tsentence\n0\tBill whistled past the house.\n",
    ),
    "mrpc": (
        'Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t702876\t702977\tHe called " it " so .\tHe said so .\n',
        "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t1\t2\tPCCW 's chief .\tThe chief .\n",
    ),
    "stsb": (
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
        "0\tmain\tMSRvid\t2012\t0001\tnone\tnone\tA plane is taking off.\tAn air plane is taking off.\t5.000\n",
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\n"
        "0\tmain\tMSRvid\t2012\t0024\tnone\tnone\tA girl.\tA boy.\n",
    ),
    "rte": (
        "index\tsentence1\tsentence2\tlabel\n0\tNo weapons found.\tWeapons found.\tnot_entailment\n",
        "index\tsentence1\tsentence2\n0\tMangla was summoned.\tShukla is related.\n",
    ),
    "qqp": (
        'id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\tHow does it "end"?\tDoes it end?\t0\n',
        "id\tquestion1\tquestion2\n0\tWould it work?\tDoes it?\n",
    ),
    "qnli": (
        "index\tquestion\tsentence\tlabel\n0\tWhen did it start?\tIt was late.\tnot_entailment\n",
        "index\tquestion\tsentence\n0\tWhat came?\tA law.\n",
    ),
    "wnli": (
        "index\tsentence1\tsentence2\tlabel\n0\tI stuck a pin through it.\tThe pin had a hole.\t1\n",
        "index\tsentence1\tsentence2\n0\tMaude and Dora saw the trains.\tThe trains were seen.\n",
    ),
}
MNLI_HEADER = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
    "sentence2_parse\tsentence1\tsentence2"
)
MNLI_LINE = "0\t31193\t31193n\tgovernment\t( a )\t( b )\t(ROOT a)\t(ROOT b)\tProduct and geography.\tBoth are."
# The published layout: one annotation in train, five in dev, none in test; the diagnostic set is next to MNLI.
MNLI_FILES = {
    "MNLI/train.tsv": f"{MNLI_HEADER}\tlabel1\tgold_label\n{MNLI_LINE}\tneutral\tneutral\n",
    **{
        f"MNLI/dev_{genres}.tsv": f"{MNLI_HEADER}\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label\n{MNLI_LINE}\t"
        + "neutral\tentailment\tneutral\tneutral\tneutral\tneutral\n"
        for genres in ("matched", "mismatched")
    },
    **{f"MNLI/test_{genres}.tsv": f"{MNLI_HEADER}\n{MNLI_LINE}\n" for genres in ("matched", "mismatched")},
    "diagnostic/diagnostic.tsv": "index\tsentence1\tsentence2\n0\tThe cat sat.\tIt sat.\n",
}
DIAGNOSTIC = (
    "Lexical Semantics\tPredicate-Argument Structure\tLogic\tKnowledge\tDomain\tPremise\tHypothesis\tLabel\n"
    "\t\tNegation\t\tArtificial\tThe cat sat.\tThe cat did not sit.\tcontradiction\n"
)
EXPECTED = {
    "sst2": ("hide new secretions from the parental units ", None, "0"),
    "cola": ("Our friends won't buy this analysis.", None, "1"),
    "mrpc": ('He called " it " so .', "He said so .", "1"),
    "stsb": ("A plane is taking off.", "An air plane is taking off.", "5.000"),
    "rte": ("No weapons found.", "Weapons found.", "not_entailment"),
    "qqp": ('How does it "end"?', "Does it end?", "0"),
    "qnli": ("When did it start?", "It was late.", "not_entailment"),
    "wnli": ("I stuck a pin through it.", "The pin had a hole.", "1"),
}
# Published sizes; CoNLL-2003 and EWT in sentences (Tjong Kim Sang and De Meulder 2003; UD releases).
PUBLISHED = {
    "sst2": (67_349, 872, 1_821),
    "cola": (8_551, 1_043, 1_063),
    "mrpc": (3_668, 408, 1_725),
    "stsb": (5_749, 1_500, 1_379),
    "rte": (2_490, 277, 3_000),
    "conll2003": (14_041, 3_250, 3_453),
    "ewt": (12_544, 2_001, 2_077),
}


# Training examples with a label.
POSITIVE = {"sst2": ("1", 37_569), "cola": ("1", 6_023), "mrpc": ("1", 2_474), "rte": ("entailment", 1_249)}


@pytest.mark.parametrize("name", GLUE_FILES)
@pytest.mark.parametrize("inside", ["glue", "."])
def test_a_glue_folder_is_read_in_its_published_layout(tmp_path, name, inside):
    folder = tmp_path / inside / named.TASKS[name].folders[0]
    folder.mkdir(parents=True)
    for split in ("train", "dev"):
        (folder / f"{split}.tsv").write_text(GLUE_FILES[name][0])
    (folder / "test.tsv").write_text(GLUE_FILES[name][1])
    for data_dir in (tmp_path, folder):
        task, files = registry.resolve(AutoTaskConfig(name=name, data_dir=str(data_dir)))
        assert list(files) == ["train", "dev", "test"]
        train, test = registry.read(task, files["train"]), registry.read(task, files["test"], label_required=False)
        assert train.items[0][:3] == EXPECTED[name]
        assert train.labelled and not test.labelled
        assert task.complete(train) == task  # labels and metrics are fixed


@pytest.fixture
def mnli(tmp_path: Path) -> Path:
    for name, text in MNLI_FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_mnli_has_matched_and_mismatched_files_and_the_diagnostic_set(mnli):
    task, files = registry.resolve(AutoTaskConfig(name="mnli", data_dir=str(mnli)))
    assert list(files) == ["train", "dev", "dev_mismatched", "test", "test_mismatched", "ax"]
    for split, path in files.items():
        found = registry.read(task, path, label_required=split.startswith(("train", "dev")))
        assert found.labelled == split.startswith(("train", "dev"))
        pair = ("The cat sat.", "It sat.") if split == "ax" else ("Product and geography.", "Both are.")
        assert found.items[0][:3] == (*pair, "neutral" if found.labelled else None)


def test_the_labelled_diagnostic_set_is_taken_before_the_bare_one_and_has_its_own_metric(mnli):
    (mnli / "diagnostic" / "diagnostic-full.tsv").write_text(DIAGNOSTIC)
    task, files = registry.resolve(AutoTaskConfig(name="mnli", data_dir=str(mnli)))
    found = registry.read(task, files["ax"], label_required=False)
    assert found.items[0][:3] == ("The cat sat.", "The cat did not sit.", "contradiction")
    assert registry.with_split_metrics(task, "ax").metrics == ("matthews_correlation",)
    assert registry.with_split_metrics(task, "dev_mismatched") == task


def test_a_named_task_takes_named_files_alone_where_no_folder_is_given(tmp_path, monkeypatch):
    monkeypatch.setenv("BERT_JAX_DATA", str(tmp_path))
    content = "index\tsentence1\tsentence2\tgold_label\n0\tIt is.\tIt is not.\tcontradiction\n"
    (tmp_path / "four.tsv").write_text(content)
    task, files = registry.resolve(AutoTaskConfig(name="mnli", train=str(tmp_path / "four.tsv"), dev="dev.tsv"))
    assert list(files) == ["train", "dev"]
    assert registry.read(task, files["train"]).items == (("It is.", "It is not.", "contradiction", 2),)


def test_the_bundled_treebank_is_the_default_of_ewt(monkeypatch):
    monkeypatch.delenv("BERT_JAX_DATA", raising=False)
    task, files = registry.resolve(AutoTaskConfig(name="ewt"))
    for path in files.values():
        tags = {tag for item in registry.read(task, path).items for tag in item.tags}
        assert tags <= set(task.labels) and len(tags) > 10
    assert len(files) == 3


def test_own_files_need_no_name(tmp_path):
    config = AutoTaskConfig(train="a.tsv", dev="b.tsv", text="review", label="stars", max_length=64)
    task, files = registry.resolve(config)
    assert (task.kind, task.columns, task.max_length) == ("classification", Columns("review", "", "stars"), 64)
    assert files == {"train": Path("a.tsv"), "dev": Path("b.tsv")}
    assert registry.resolve(AutoTaskConfig(train="a.conllu.xz"))[0].kind == "tagging"
    assert registry.resolve(RegressionConfig(train="a.tsv"))[0].kind == "regression"


def test_a_named_task_may_have_another_file_for_a_split(tmp_path):
    folder = tmp_path / "RTE"
    folder.mkdir()
    (folder / "train.tsv").write_text(GLUE_FILES["rte"][0])
    _, files = registry.resolve(AutoTaskConfig(name="rte", data_dir=str(tmp_path), dev="mine.tsv"))
    assert files == {"train": folder / "train.tsv", "dev": Path("mine.tsv")}


@pytest.mark.parametrize(
    ("name", "folder", "column", "numbers", "tags", "classes"),
    [
        ("conll2003", "conll2003", "ner_tags", [0, 1, 2, 7], ("O", "B-PER", "I-PER", "B-MISC"), ()),
        ("conll2003", ".", "ner_tags", [0, 2, 1], ("O", "I-PER", "B-PER"), ("O", "B-PER", "I-PER")),
        ("ewt", "universal_dependencies/en_ewt", "upos", [13, 17, 7, 0], ("AUX", "PART", "NOUN"), ()),
    ],
)
def test_tagging_tasks_are_read_from_their_hugging_face_data_sets(
    tmp_path, name, folder, column, numbers, tags, classes
):
    """Numbers are classes in their order, or as the file names them; _ (13 in upos) is no word."""
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    words = [f"w{number}" for number in numbers]
    feature = {"feature": {"names": classes, "_type": "ClassLabel"}, "_type": "Sequence"}
    info = json.dumps({"info": {"features": {column: feature}}})
    table = pa.table({"tokens": [words], column: [numbers]})
    for split in ("train", "validation"):
        if classes:
            pq.write_table(table.replace_schema_metadata({"huggingface": info}), tmp_path / f"{split}.parquet")
        elif split == "train":
            pq.write_table(table, tmp_path / folder / "train-00000-of-00001.parquet")
        else:
            line = json.dumps({"tokens": words, column: numbers})
            (tmp_path / folder / "validation.jsonl").write_text(line + "\n")
    task, files = registry.resolve(AutoTaskConfig(name=name, data_dir=str(tmp_path)))
    for split in ("train", "dev"):
        (sentence,) = registry.read(task, files[split]).items
        assert sentence.tags == tags and sentence.words == tuple(words[len(words) - len(tags) :])
        assert len(sentence.lines) == len(tags) and set(tags) <= set(task.labels)


def test_numbers_of_ewt_are_those_of_its_data_set_only_in_its_own_column(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"tokens": ["a", "b"], "upos": [7, 15], "labels": [7, 15]}) + "\n")
    task, given = named.TASKS["ewt"].task, named.TASKS["ewt"].task.labels[::-1]

    def tags(task: Task) -> tuple[str, ...]:
        return registry.read(task, path).items[0].tags

    assert tags(task) == ("PART", "INTJ")
    own = dataclasses.replace(task, columns=Columns("tokens", "", "labels"))
    assert tags(own) == (task.labels[7], task.labels[15]) == ("NOUN", "VERB")
    for task_with_labels in (dataclasses.replace(own, labels=given), dataclasses.replace(task, labels=given)):
        assert tags(task_with_labels) == (given[7], given[15])
    assert tags(dataclasses.replace(task, label_map={"7": "X", "15": "NOUN"})) == ("X", "NOUN")


MISTAKES = {
    "unknown name": (AutoTaskConfig(name="sst3"), "task.name is 'sst3'; choose from: sst2, cola"),
    "no task": (AutoTaskConfig(), "no task is given; set task.name"),
    "columns for a named task": (
        AutoTaskConfig(name="sst2", text="x"),
        "task.text is for your own files, but task.name is sst2",
    ),
    "unknown pooling": (
        AutoTaskConfig(name="rte", dev="a", train="a", test="a", pooling="first"),
        "unknown task.pooling 'first'; choose from cls, mean",
    ),
    "pooled tags": (
        AutoTaskConfig(train="a.conllu", pooling="mean"),
        "task.pooling is set, but the task is tagging, which does not have it",
    ),
    "no data folder": (AutoTaskConfig(name="sst2"), r"BERT_JAX_DATA is not set.*SST-2"),
    "missing folder": (AutoTaskConfig(name="sst2", data_dir="/nowhere/glue"), "no such folder: /nowhere/glue"),
    "a folder without a name": (
        AutoTaskConfig(train="a.tsv", text="0", label="1", data_dir="glue"),
        "task.data_dir is 'glue', which is for the files of a named task, but task.name is not set",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_invalid_task_is_refused(monkeypatch, mistake):
    monkeypatch.delenv("BERT_JAX_DATA", raising=False)
    config, message = MISTAKES[mistake]
    with pytest.raises(UserError, match=message):
        registry.resolve(config)


def test_a_folder_without_the_task_is_refused_with_the_paths_tried(tmp_path):
    with pytest.raises(UserError, match=r"train.tsv of task cola was not found in: .*CoLA.*task.data_dir"):
        registry.resolve(AutoTaskConfig(name="cola", data_dir=str(tmp_path)))


def test_options_of_no_kind_and_no_room_are_refused():
    with pytest.raises(UserError, match=r"unknown config\.task 'span'; did you mean spans"):
        load(FinetuneConfig, {"task": {"kind": "span"}})
    with pytest.raises(UserError, match=r"config.task.max_length is 4\. Use a finite number of at least 8"):
        AutoTaskConfig(name="sst2", max_length=4)


def test_options_have_the_same_defaults_in_configurations_and_in_tasks():
    """Except options that are empty or unset in a configuration, which leaves the choice to the task."""
    for name, kind in registry.KINDS.items():
        own = {item.name: item.default for item in dataclasses.fields(kind)}
        for item in dataclasses.fields(TaskConfig.kinds[name]):
            if item.name in own and item.default not in ("", None):
                assert own[item.name] == item.default, (kind, item.name)


def test_a_tagging_file_is_no_classification():
    task, files = registry.resolve(ClassificationConfig(train="a.conllu", text="0", label="1"))
    with pytest.raises(UserError, match=r"a.conllu is a tagging file"):
        registry.read(task, files["train"])


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_real_files_have_their_published_sizes(bert_jax_data, name):
    task, files = registry.resolve(AutoTaskConfig(name=name, data_dir=os.fspath(bert_jax_data)))
    splits = {split: registry.read(task, path, label_required=split != "test") for split, path in files.items()}
    assert tuple(len(split.items) for split in splits.values()) == PUBLISHED[name]
    assert splits["test"].labelled == (task.kind == "tagging")
    if task.kind == "classification":
        assert {item.label for item in splits["train"].items} == set(task.labels)
        assert sum(item.label == POSITIVE[name][0] for item in splits["train"].items) == POSITIVE[name][1]


@pytest.mark.slow
def test_conll_2003_holds_its_published_entities(bert_jax_data):
    task, files = registry.resolve(AutoTaskConfig(name="conll2003", data_dir=os.fspath(bert_jax_data)))
    found = {
        split: sum(len(tag_schemes.entities(item.tags)) for item in registry.read(task, path).items)
        for split, path in files.items()
    }
    assert found == {"train": 23_499, "dev": 5_942, "test": 5_648}


def test_broken_lines_of_qqp_are_skipped_in_training_and_never_in_prediction(tmp_path):
    labelled, unlabelled = GLUE_FILES["qqp"]
    path = tmp_path / "test.tsv"
    path.write_text(labelled + "1\t2\t3\tHow\nis it?\tWhy?\t0\n")
    assert registry.read(named.TASKS["qqp"].task, path).left_out == 2
    path.write_text(unlabelled + "1\tHow\nis it?\tWhy?\n")
    with pytest.raises(UserError, match=r"test.tsv line 3 has 2 fields, but the first line has 3"):
        registry.read(named.TASKS["qqp"].task, path, label_required=False)


# As super.gluebenchmark.com gives them: an object a line, labels that are words, true or false; none in test files.
SUPERGLUE_FILES = {
    "boolq": ("BoolQ", {"question": "do iran and afghanistan speak the same language", "passage": "Persian."}, True),
    "cb": ("CB", {"premise": "It was a complex language.", "hypothesis": "the language was peeled down"}, "neutral"),
    "superglue_rte": ("RTE", {"premise": "No weapons.", "hypothesis": "Weapons found."}, "not_entailment"),
    "wic": (
        "WiC",
        {
            "word": "place",
            "sentence1": "Do you want to come over to my place later?",
            "sentence2": "A political system with no place for the less prominent groups.",
            **{"start1": 31, "end1": 36, "start2": 27, "end2": 32, "version": 1.1},
        },
        False,
    ),
}


@pytest.mark.parametrize("name", SUPERGLUE_FILES)
@pytest.mark.parametrize("inside", ["superglue", "."])
def test_a_superglue_folder_is_read_in_its_published_layout(tmp_path, name, inside):
    folder, example, label = SUPERGLUE_FILES[name]
    place = tmp_path / inside / folder
    place.mkdir(parents=True)
    for file in ("train", "val", "test"):
        told = example | {"idx": 0} | ({} if file == "test" else {"label": label})
        (place / f"{file}.jsonl").write_text(json.dumps(told) + "\n")
    task, files = registry.resolve(AutoTaskConfig(name=name, data_dir=str(tmp_path)))
    assert list(files) == ["train", "dev", "test"]
    train, test = registry.read(task, files["train"]), registry.read(task, files["test"], label_required=False)
    assert train.items[0].label == (str(label).lower()) and train.items[0].label in task.labels
    assert test.items[0][:2] == train.items[0][:2] and not test.labelled
    texts = list(example.values())
    if name == "wic":
        texts = ["Do you want to come over to my * place * later?"]
        texts.append("A political system with no * place * for the less prominent groups.")
    assert list(train.items[0][:2]) == texts[:2]


def test_words_of_ones_own_pairs_are_marked_too_and_a_checkpoint_keeps_their_columns(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("a,b,from,to,other,end,same\nthe bank,a bank,4,8,2,6,yes\n")
    marks = ("from", "to", "other", "end")
    config = AutoTaskConfig(train=str(path), text="a", text_pair="b", label="same", marks=marks)
    task, files = registry.resolve(config)
    assert registry.read(task, files["train"]).items == (("the * bank *", "a * bank *", "yes", 2),)
    assert from_json(json.loads(json.dumps(to_json(task)))) == task
    with pytest.raises(UserError, match=r"task.marks is 'from,to'; give 4 columns"):
        registry.resolve(dataclasses.replace(config, marks=("from", "to")))


def test_a_marked_word_outside_the_text_is_refused_with_file_and_line(tmp_path):
    good = SUPERGLUE_FILES["wic"][1] | {"label": True}
    path = tmp_path / "train.jsonl"
    for change in ({"end1": 31}, {"start2": -1}, {"end2": 400}, {"start1": "x"}):
        path.write_text(json.dumps(good) + "\n" + json.dumps(good | change) + "\n")
        with pytest.raises(UserError, match=r"train.jsonl line 2: characters .* are not in '(Do|A)"):
            registry.read(named.TASKS["wic"].task, path)


# Names of classes by their numbers in the Hugging Face data sets `glue` and `super_glue`.
HUGGING_FACE_LABELS = {
    "mnli": ["entailment", "neutral", "contradiction"],
    "qnli": ["entailment", "not_entailment"],
    "rte": ["entailment", "not_entailment"],
    "boolq": ["False", "True"],
    "cb": ["entailment", "contradiction", "neutral"],
    "superglue_rte": ["entailment", "not_entailment"],
    "wic": ["False", "True"],
}


@pytest.mark.parametrize("name", HUGGING_FACE_LABELS)
def test_labels_have_the_numbers_of_the_hugging_face_data(name):
    assert list(named.TASKS[name].task.labels) == [label.lower() for label in HUGGING_FACE_LABELS[name]]


# Rows of the files at hand that are parts of published sets, as their README counts them.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "files", "rows"),
    [
        ("mnli", ("train_10k", "dev_matched"), (9_999, 9_815)),
        ("qqp", ("train_subset", "dev_subset"), (22_869, 9_999)),
    ],
)
def test_real_subsets_are_read_by_naming_their_files(bert_jax_data, name, files, rows):
    folder = bert_jax_data / "glue" / name.upper()
    train, dev = (str(folder / f"{file}.tsv.xz") for file in files)
    task, found = registry.resolve(AutoTaskConfig(name=name, train=train, dev=dev))
    splits = [registry.read(task, path) for path in found.values()]
    assert tuple(len(split.items) for split in splits) == rows
    for split in splits:
        assert {item.label for item in split.items} == set(task.labels) and split.left_out == 0
    if name == "mnli":
        assert [sum(item.label == label for item in splits[1].items) for label in task.labels] == [3_479, 3_123, 3_213]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {"marks": ("start", "end")}) for kind in ("multilabel", "choice", "tagging", "question")),
        *((kind, {"text_pair": "x"}) for kind in ("tagging", "token_regression", "spans", "span_pairs")),
    ],
)
def test_columns_that_a_kind_does_not_read_are_refused(kind, options):
    [key] = options
    with pytest.raises(UserError, match=rf"unknown key task.{key}: task={kind} does not have it"):
        load(TaskConfig, {"kind": kind, "train": "a.jsonl", **options}, "task")
