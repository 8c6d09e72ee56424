"""predict: one answer an input, in order, as the model gives it; streams, files, and what is refused."""

import csv
import dataclasses
import io
import itertools
import json
import os
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
from random_checkpoints import odd_config, random_checkpoint

from bert_jax import progress
from bert_jax.commands import evaluate
from bert_jax.commands import predict as commands_predict
from bert_jax.errors import UserError
from bert_jax.interop import export
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model import layers
from bert_jax.model.heads.config import Heads, SpanHeads
from bert_jax.tasks import embedder, measurement, registry
from bert_jax.tasks import prediction as predict_lib
from bert_jax.tasks.embedder import embed
from bert_jax.tasks.kinds.question import compared_words
from bert_jax.tasks.leaderboards import write_squad
from bert_jax.tasks.prediction import predict
from bert_jax.tasks.reading import inputs
from bert_jax.tasks.reading.tables import Columns
from bert_jax.train import sharding

CLASSES = {"name": "own", "kind": "classification", "labels": ["glad", "sad", "so so"], "max_length": 16}
SCORE = {"name": "own", "kind": "regression", "labels": [], "max_length": 16}
TAGS = {"name": "own", "kind": "tagging", "labels": ["O", "B-X", "I-X"], "max_length": 16}
TEXTS = ["the cat sat", "a dog", "un want able river on the mat . the dog", "mat"]


def model(tmp_path_factory: pytest.TempPathFactory, heads: Heads, task: dict) -> LoadedModel:
    folder = tmp_path_factory.mktemp("vocabulary")
    return random_checkpoint(folder, odd_config(layers=1), heads, task=task, origin="the checkpoint")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return model(tmp_path_factory, Heads(pooler=True, classes=3), CLASSES)


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return model(tmp_path_factory, Heads(tags=3), TAGS)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory, classifier: LoadedModel) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "moods"
    export.write(classifier, folder)
    return folder


def same(got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> bool:
    """Equal up to the rounding of floats."""
    if len(got) != len(wanted):
        return False
    for left, right in zip(got, wanted, strict=True):
        flat = [_flat(left), _flat(right)]
        if flat[0].keys() != flat[1].keys():
            return False
        for name, value in flat[0].items():
            close = isinstance(value, float) and value == pytest.approx(flat[1][name], rel=1e-5)
            if not close and value != flat[1][name]:
                return False
    return True


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {key: one for part in value for key, one in _flat(value[part], f"{name}.{part}").items()}
    if isinstance(value, list):
        return {key: one for place, part in enumerate(value) for key, one in _flat(part, f"{name}.{place}").items()}
    return {name: value}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_answers_are_in_order_for_any_batches(classifier: LoadedModel) -> None:
    alone = [predict(classifier, [text], all_scores=True)[0] for text in TEXTS]
    together = predict(classifier, TEXTS * 3, all_scores=True, batch_size=8)
    assert same(together, alone * 3)
    for told in alone:
        assert sum(told["scores"].values()) == pytest.approx(1)
        assert told["score"] == max(told["scores"].values()) == told["scores"][told["label"]]
    assert len({told["score"] for told in alone}) == len(TEXTS)  # the texts matter
    assert same(predict(classifier, TEXTS), [{key: told[key] for key in ("label", "score")} for told in alone])


def test_objects_pairs_and_ids(classifier: LoadedModel) -> None:
    objects = [{"id": "x7", "text": "the cat", "text_pair": "a dog"}, {"text": "a", "text_pair": "mat", "id": 2}]
    told = predict(classifier, objects)
    assert [one.pop("id") for one in told] == ["x7", 2]
    assert same(
        told, predict(classifier, [{"text": "the cat", "text_pair": "a dog"}, {"text": "a", "text_pair": "mat"}])
    )
    assert not same(told, predict(classifier, ["the cat", "a"]))
    for pairs in ([("the cat", "a dog"), ("a", "mat")], [["the cat", "a dog"], ["a", "mat"]]):
        assert same(told, predict(classifier, pairs))
    for wrong in (("the cat", 3), (), None, float("nan")):
        with pytest.raises(UserError, match=r"input 2 is .*; expected a text, a tuple of two texts, or an object"):
            predict(classifier, ["a", wrong])
        assert "input 2 is" in predict(classifier, ["a", wrong], on_error="skip")[1]["error"]


def test_errors_have_the_ids_of_their_inputs_and_name_a_null(classifier: LoadedModel) -> None:
    given = [{"id": 1, "text": "the cat"}, {"id": "b", "text": " "}, {"id": None, "text": None}, {"id": 4, "other": 5}]
    told = predict(classifier, given, on_error="skip")
    assert [(one["id"], "error" in one) for one in told] == [(1, False), ("b", True), (None, True), (4, True)]
    assert [next(iter(one)) for one in told] == ["id"] * 4
    assert "line 3: 'text' is null" in told[2]["error"] and "line 4 has no field 'text'" in told[3]["error"]


def test_a_tuple_is_a_question_and_its_context(tmp_path_factory: pytest.TempPathFactory) -> None:
    loaded = model(tmp_path_factory, Heads(question=True), {"name": "own", "kind": "question", "labels": []})
    given = "the cat", "a\tdog sat"
    told, expected = predict(loaded, [given]), predict(loaded, [{"question": given[0], "context": given[1]}])
    assert told == expected and told[0]["id"] == "1"
    with pytest.raises(UserError, match="inputs line 1 has 3 texts; expected 2: question, context"):
        predict(loaded, [("a", "b", "c")])


def test_an_id_of_a_question_keeps_its_type(tmp_path_factory: pytest.TempPathFactory) -> None:
    loaded = model(tmp_path_factory, Heads(question=True), {"name": "own", "kind": "question", "labels": []})
    [told] = predict(loaded, [{"id": 7, "question": "the cat", "context": "a dog sat"}])
    assert told["id"] == 7 and next(iter(told)) == "id"


def test_a_pipe_that_is_named_as_a_file_is_read_once(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"the cat sat\na dog\n")
    os.close(writer)
    commands_predict.main([f"--checkpoint={workdir}", f"--input=/dev/fd/{reader}"])
    os.close(reader)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_tab_in_a_text_of_a_caller_is_white_space(classifier: LoadedModel, tagger: LoadedModel) -> None:
    assert same(predict(classifier, ["the\tcat\tsat", "a"]), predict(classifier, ["the cat sat", "a"]))
    assert predict(tagger, ["the\tcat"])[0]["words"] == ["the", "cat"]
    pairs = dataclasses.replace(classifier, task=CLASSES | {"columns": {"text": "a", "text_pair": "b"}})
    with pytest.raises(UserError, match=r"line 1 is one text, but the task needs 2\. Give a tuple, or an object with"):
        predict(pairs, ["the cat\ta dog"])


def test_parameters_are_copied_to_the_device_once(classifier: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = dataclasses.replace(classifier)
    copied: list[str] = []
    put = sharding.put

    def counting(tree: Any, mesh: Any) -> Any:
        copied.extend(layers.flatten(tree))
        return put(tree, mesh)

    monkeypatch.setattr(sharding, "put", counting)
    first = predict(loaded, TEXTS)
    assert "classifier/dense/kernel" in copied and len(copied) == len(set(copied))
    assert predict(loaded, TEXTS) == first
    vectors = embed(loaded, TEXTS)["embeddings"]
    assert len(copied) == len(set(copied)) == len(loaded.params)  # embed adds those that predict does not read
    np.testing.assert_array_equal(embed(loaded, TEXTS)["embeddings"], vectors)
    assert len(copied) == len(loaded.params)
    gone = weakref.ref(loaded)
    del loaded
    assert gone() is None  # nothing keeps the copies


def test_progress_is_shown_where_somebody_watches(
    classifier: LoadedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(predict_lib, "WINDOW", 1)
    seconds = itertools.count(0, 20)  # a line appears every 15
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    predict(classifier, TEXTS * 4, batch_size=8)
    embed(classifier, TEXTS, batch_size=8)
    assert capsys.readouterr().err == ""
    for module in (predict_lib, embedder):
        monkeypatch.setattr(module, "is_watched", lambda: True)
    predict(classifier, TEXTS * 4, batch_size=8)
    embed(classifier, TEXTS, batch_size=8)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("%")[0] for line in lines] == ["predicting:  50.0", "predicting: 100.0", "embedding: 100.0"]
    predict(classifier, TEXTS[:1], batch_size=8)
    assert capsys.readouterr().err == ""  # of one window


def test_a_score_is_the_number_that_the_head_gives(tmp_path_factory: pytest.TempPathFactory) -> None:
    loaded = model(tmp_path_factory, Heads(pooler=True, classes=1), SCORE)
    loaded.params["classifier/dense/kernel"][:] = 0  # then it is the bias
    loaded.params["classifier/dense/bias"][:] = 3.75
    assert predict(loaded, TEXTS) == [{"score": 3.75}] * len(TEXTS)


def test_a_score_that_is_nan_is_written_as_null_and_reported(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = model(tmp_path_factory, Heads(pooler=True, classes=1), SCORE)
    loaded.params["classifier/dense/bias"][:] = np.nan
    export.write(loaded, tmp_path / "model")
    (tmp_path / "in.txt").write_text("\n".join(TEXTS) + "\n")
    run("--checkpoint", tmp_path / "model", "--input", tmp_path / "in.txt", "--output", tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == '{"score": null}\n' * len(TEXTS)
    assert "the predictions of 4 of 4 inputs mean nothing, as their scores are not finite" in capsys.readouterr().err


def test_an_invalid_input_is_reported_by_its_line_or_in_its_place(classifier: LoadedModel) -> None:
    given = ["the cat", " ", {"sentence": "a"}, "a dog"]
    with pytest.raises(UserError, match="inputs line 2 is empty"):
        predict(classifier, given)
    told = predict(classifier, given, on_error="skip")
    assert "line 2 is empty" in told[1]["error"] and "no field 'text'" in told[2]["error"]
    assert same([told[0], told[3]], predict(classifier, ["the cat", "a dog"]))
    assert predict(classifier, [" "], on_error="skip") == [{"error": told[1]["error"].replace("2", "1")}]


def test_a_pair_among_texts_is_an_error_in_its_place(classifier: LoadedModel) -> None:
    free = dataclasses.replace(classifier, task={**CLASSES, "columns": {}})
    given = [{"text": "the cat"}, {"text": "a", "text_pair": "dog"}, {"text": "a dog"}]
    told = predict(free, given, on_error="skip")
    assert "line 2 is a pair, but line 1 is one text" in told[1]["error"]
    assert same([told[0], told[2]], predict(free, ["the cat", "a dog"]))


def test_a_model_is_measured_at_another_length(classifier: LoadedModel, tmp_path: Path) -> None:
    file = tmp_path / "dev.tsv"
    file.write_text("text\tlabel\n" + "".join(f"{text}\tglad\n" for text in TEXTS), encoding="utf-8")
    columns = Columns("text", label="label")
    short = measurement.evaluate(classifier, file, columns=columns, max_length=8)
    trained_so = dataclasses.replace(classifier, task={**CLASSES, "max_length": 8})
    assert short == measurement.evaluate(trained_so, file, columns=columns)
    assert "lost tokens to task.max_length=8" in " ".join(short.remarks)
    with pytest.raises(UserError, match="--max_length is 25; use 8 to 24"):
        measurement.evaluate(classifier, file, columns=columns, max_length=25)
    export.write(random_checkpoint(tmp_path / "words", odd_config(layers=1)), tmp_path / "pretrained")
    arguments = [f"--checkpoint={tmp_path / 'pretrained'}", f"--data={tmp_path}", "--max_length=16"]
    with pytest.raises(UserError, match="--max_length is 16, but the checkpoint has no task; omit it"):
        evaluate.main(arguments)


def test_tags_of_raw_text_lie_in_it(tagger: LoadedModel) -> None:
    text = "the (cat) sat, a dog"
    (told,) = predict(tagger, [text])
    assert told["words"] == ["the", "(", "cat", ")", "sat", ",", "a", "dog"]
    assert [text[start:end] for start, end in told["offsets"]] == told["words"]
    assert len(told["tags"]) == len(told["tag_scores"]) == 8 and min(told["tag_scores"]) > 1 / 3 - 1e-6
    for entity in told["entities"]:
        assert entity["text"] == text[entity["start"] : entity["end"]]
    (given,) = predict(tagger, [{"tokens": told["words"]}])
    assert same([given], [{"words": told["words"], "tags": told["tags"], "tag_scores": told["tag_scores"]} | given])
    others = [{"tokens": tuple(told["words"])}, {"tokens": np.array(told["words"], object)}]
    assert same(predict(tagger, others), [given, given])
    (blanks,) = predict(tagger, [" ".join(told["words"])], words=True)
    assert blanks["tags"] == told["tags"]
    assert predict(tagger, ["un-want"], words=True)[0]["words"] == ["un-want"]


def run(*arguments: object) -> None:
    commands_predict.main([str(argument) for argument in arguments])


def test_files_of_every_form_give_the_same(workdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = predict(workdir, TEXTS)
    (tmp_path / "in.txt").write_text("\ufeff" + "\n".join(TEXTS) + "\n", encoding="utf-8")
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS), encoding="utf-8")
    (tmp_path / "in.tsv").write_text("a\tb\n" + "\n".join(f"{text}\t?" for text in TEXTS) + "\n", encoding="utf-8")
    for name, more in {"in.txt": [], "in.jsonl": [], "in.tsv": ["--text=a"]}.items():
        output = tmp_path / f"{name}.out.jsonl"
        run("--checkpoint", workdir, "--input", tmp_path / name, "--output", output, *more)
        assert same(lines_of(output), wanted)
        assert not (tmp_path / f"{name}.out.jsonl.incomplete").exists()
    capsys.readouterr()
    run("--checkpoint", workdir, "--input", tmp_path / "in.txt", "--input_format=text")
    assert same([json.loads(line) for line in capsys.readouterr().out.splitlines()], wanted)
    assert same(predict(workdir, tmp_path / "in.jsonl"), wanted)


def test_a_column_of_another_name_leaves_the_others_as_they_were(classifier: LoadedModel, tmp_path: Path) -> None:
    pairs = dataclasses.replace(classifier, task=CLASSES | {"columns": {"text": "a", "text_pair": "b", "label": "c"}})
    wanted = predict(pairs, [{"text": text, "text_pair": "mat"} for text in TEXTS])
    path = tmp_path / "in.tsv"
    path.write_text("other\tb\tc\n" + "\n".join(f"{text}\tmat\t{text[6:9]}" for text in TEXTS), encoding="utf-8")
    assert same(predict(pairs, path, columns=Columns("other")), wanted)
    assert same(predict(pairs, path, columns={"text": "other"}), wanted)
    with pytest.raises(UserError, match="columns names 'label'; it may name the columns of text and text_pair"):
        predict(pairs, path, columns={"text": "other", "label": "x"})
    path.write_text("\n".join(f"{text}\tmat" for text in TEXTS), encoding="utf-8")
    assert same(predict(pairs, path, columns=Columns("0", "1")), wanted)  # and no header


def test_output_is_whole_or_not_there(workdir: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{"text": \n', encoding="utf-8")
    arguments = ["--checkpoint", workdir, "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl"]
    with pytest.raises(UserError, match=r"in\.jsonl line 2 is not JSON"):
        run(*arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    run(*arguments, "--on_error", "skip")
    assert [sorted(line) for line in lines_of(tmp_path / "out.jsonl")] == [["label", "score"], ["error"]]
    with pytest.raises(UserError, match="exists"):
        run(*arguments)


@pytest.mark.parametrize("piped", [False, True])
def test_blank_json_lines_are_no_inputs_and_others_keep_their_numbers(
    workdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], piped: bool
) -> None:
    lines = ['{"text": "the cat"}', "", '{"text": "a dog"}', " ", '{"text": 3}', ""]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    source = tmp_path / "in.jsonl"
    if piped:
        reader, writer = os.pipe()
        os.write(writer, source.read_bytes())
        os.close(writer)
        source = Path(f"/dev/fd/{reader}")
    run("--checkpoint", workdir, "--input", source, "--on_error=skip")
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert same(told[:2], predict(workdir, ["the cat", "a dog"])) and len(told) == 3
    assert "line 5: expected a string" in told[2]["error"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("in.tsv", ["--on_error=skip", "--text=a"], r"--on_error skip is for lines .*in\.tsv is a task file; omit it"),
        ("in.txt", ["--text=a"], r"--text and --text_pair name columns, but .*in\.txt is read as lines of text"),
        ("in.txt", ["--text_pair=a"], r"--text and --text_pair name columns, but .*in\.txt is read as lines of text"),
        ("in.jsonl", ["--words"], r"--words is for lines of text, but .*in\.jsonl is read as jsonl"),
        ("in.tsv", ["--words", "--text=a"], r"--words is for lines of text, but .*in\.tsv is read as task"),
        ("in.tsv", ["--format=glue", "--form=jsonl"], r"--format glue is .* but --form is jsonl; omit it"),
    ],
)
def test_an_option_without_effect_on_the_inputs_is_refused(
    workdir: Path, tmp_path: Path, name: str, options: list[str], message: str
) -> None:
    contents = {"in.tsv": "a\tb\nthe cat\tx\n", "in.txt": "the cat\n", "in.jsonl": '{"text": "the cat"}\n'}
    (tmp_path / name).write_text(contents[name])
    with pytest.raises(UserError, match=message):
        run("--checkpoint", workdir, "--input", tmp_path / name, *options)


def test_truncated_texts_are_counted_and_reported(
    workdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_text("mat\n" + "the cat " * 12 + "\n")
    arguments = ["--checkpoint", workdir, "--input", tmp_path / "in.txt"]
    run(*arguments)
    assert "1 input was longer than 16 tokens and truncated (--max_length)" in capsys.readouterr().err
    run(*arguments, "--max_length=24")
    assert "1 input was longer than 24" in capsys.readouterr().err
    with pytest.raises(UserError, match="--max_length is 30; use 8 to 24"):
        run(*arguments, "--max_length=30")


def test_a_pipe_is_answered_line_by_line(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Whoever writes a line and waits for its answer gets it."""
    reading, writing = os.pipe()
    answered = threading.Event()
    written: list[bytes] = []

    class Output(io.BytesIO):
        def write(self, content: Any) -> int:
            written.append(bytes(content))
            return len(content)

        def flush(self) -> None:
            answered.set()

    with os.fdopen(reading, "rb") as stdin, os.fdopen(writing, "wb") as pipe:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stdin))
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(Output()))

        def write() -> None:
            for text in TEXTS:
                answered.clear()
                pipe.write(text.encode() + b"\n")
                pipe.flush()
                assert answered.wait(60)
            pipe.close()

        writer = threading.Thread(target=write)
        writer.start()
        run("--checkpoint", workdir, "--input", "-")
        writer.join()
    assert len(written) == len(TEXTS)
    assert same([json.loads(line) for line in written], predict(workdir, TEXTS))


def test_blank_lines_do_not_decide_the_form_of_standard_input(
    workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lines").write_text("\n" * 70 + " \n" + "".join(json.dumps({"text": one}) + "\n" for one in TEXTS[:2]))
    monkeypatch.setattr("bert_jax.tasks.prediction.WINDOW", 2)
    with (tmp_path / "lines").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        run("--checkpoint", workdir, "--input", "-")
    assert same([json.loads(line) for line in capsys.readouterr().out.splitlines()], predict(workdir, TEXTS[:2]))


def test_columns_name_the_fields_of_objects_among_texts(classifier: LoadedModel) -> None:
    assert len(predict(classifier, [TEXTS[0], {"review": TEXTS[1]}], columns=Columns("review"))) == 2


def test_windows_of_a_stream_have_a_maximum_of_lines(tmp_path: Path) -> None:
    lines = [(number, str(number)) for number in range(1, 11)]
    assert [len(window) for window in inputs.windows(lines, 4)] == [4, 4, 2]
    path = tmp_path / "lines"
    for content in ("\ufeff" + "\n".join(text for _, text in lines), "\r\n".join(text for _, text in lines) + "\r\n"):
        path.write_bytes(content.encode())
        with path.open("rb") as stream:
            found = list(inputs.stream_windows(stream, 4))
        assert [len(window) for window in found] == [4, 4, 2]
        assert [line for window in found for line in window] == lines


def test_a_line_of_a_stream_that_is_not_utf_8_is_an_error_after_the_lines_that_arrived_before() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as stream, os.fdopen(writing, "wb", buffering=0) as pipe:
        windows = inputs.stream_windows(stream, 4)
        pipe.write(b"one\ntwo\nthr")
        assert next(windows) == [(1, "one"), (2, "two")]
        pipe.write(b"ee\n\xff\n")
        with pytest.raises(UserError, match="standard input line 4 is not UTF-8"):
            list(windows)


def test_the_form_of_standard_input_is_that_of_its_first_line() -> None:
    lines = ['{"text": "a"}', '{"text": ', "[1]", "plain", ""]
    assert [inputs.form_of_line(line) for line in lines] == ["jsonl", "text", "text", "text", "text"]
    names = {"a.txt": "text", "a.jsonl.gz": "jsonl", "a": "text", "a.tsv": "task", "a.conllu.xz": "task"}
    assert {name: inputs.form_of_file(Path(name)) for name in names} == names


@pytest.mark.parametrize(
    ("inputs", "options", "said"),
    [
        (TEXTS, {"form": "csv"}, "unknown form 'csv'; choose from auto, text, jsonl, task"),
        (TEXTS, {"on_error": "stop"}, "unknown on_error 'stop'; choose from fail, skip"),
        (TEXTS, {"batch_size": 0}, r"batch_size is 0\. Use a finite number of at least 1"),
        (TEXTS, {"batch_sise": 8}, r"unknown option batch_sise; did you mean batch_size\?"),
        (TEXTS, {"words": "yes"}, "words is 'yes'; expected bool"),
        (TEXTS, {"columns": Columns("review")}, "columns names the fields of objects, but all inputs are plain texts"),
        ([{"text": TEXTS[0]}], {"words": True}, "words is for plain texts, but none of the inputs is one; omit it"),
        ("a", {}, "expected a list of texts"),
    ],
)
def test_mistakes_in_inputs_and_options_are_refused(classifier: LoadedModel, inputs: Any, options: dict, said: str):
    with pytest.raises(UserError, match=said):
        predict(classifier, inputs, **options)


def test_a_checkpoint_that_was_not_fine_tuned_is_refused(tmp_path: Path) -> None:
    loaded = random_checkpoint(tmp_path, odd_config(layers=1))
    with pytest.raises(UserError, match="was not fine-tuned for a task"):
        predict(loaded, ["a"])
    with pytest.raises(UserError, match="expected a list of texts"):
        predict(loaded, "a")


def test_probabilities_are_the_softmax_of_the_logits(classifier: LoadedModel) -> None:
    """By the head's bias alone, where its kernel is 0."""
    params = dict(classifier.params)
    params["classifier/dense/kernel"] = np.zeros_like(params["classifier/dense/kernel"])
    params["classifier/dense/bias"] = np.log(np.array([0.2, 0.7, 0.1], np.float32))
    loaded = LoadedModel(classifier.model, classifier.heads, params, classifier.vocabulary, classifier.task)
    (told,) = predict(loaded, ["the cat"], all_scores=True)
    assert told["label"] == "sad"
    assert told["scores"] == pytest.approx({"glad": 0.2, "sad": 0.7, "so so": 0.1}, abs=1e-6)


def test_the_file_that_a_leaderboard_takes(classifier: LoadedModel, tmp_path: Path) -> None:
    labels = {"labels": ["entailment", "neutral", "contradiction"]}
    task = {"name": "mnli", "kind": "classification", "max_length": 16} | labels
    task["columns"] = {"text": "sentence1", "text_pair": "sentence2", "label": "gold_label"}
    export.write(dataclasses.replace(classifier, task=task), tmp_path / "mnli")
    pairs = [("the cat", "a dog"), ("mat", "river"), ("sat", "the")]
    lines = ["index\tsentence1\tsentence2", *(f"{n}\t{a}\t{b}" for n, (a, b) in enumerate(pairs))]
    for name in ("test_mismatched.tsv", "mine.tsv"):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    arguments = ["--checkpoint", tmp_path / "mnli", "--output", tmp_path / "out", "--format"]
    run(*arguments, "glue", "--input", tmp_path / "test_mismatched.tsv")
    told = predict(tmp_path / "mnli", [{"text": one, "text_pair": other} for one, other in pairs])
    wanted = ["index\tprediction", *(f"{n}\t{one['label']}" for n, one in enumerate(told))]
    assert (tmp_path / "out" / "MNLI-mm.tsv").read_text().splitlines() == wanted
    for benchmark, name in (("superglue", "test_mismatched.tsv"), ("glue", "mine.tsv")):
        with pytest.raises(UserError, match=f"the {benchmark} leaderboard does not accept .*{name} for task mnli"):
            run(*arguments, benchmark, "--input", tmp_path / name)
    with pytest.raises(UserError, match="name the folder"):
        run("--checkpoint", tmp_path / "mnli", "--input", tmp_path / "mine.tsv", "--format=glue")


QUESTION = {"name": "own", "kind": "question", "labels": [], "max_length": 24}
NUMBERS = {"name": "own", "kind": "token_regression", "labels": [], "max_length": 16}
CHOICES = {"name": "own", "kind": "choice", "labels": [], "max_length": 16}
SPANS = {"name": "own", "kind": "spans", "labels": ["X"], "max_length": 16, "max_span": 3, "threshold": 0.01}
ASKED = {"question": "the cat", "context": "a dog sat on the mat ."}


def test_squad_s_files_leave_out_invalid_questions(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export.write(model(tmp_path_factory, Heads(question=True), QUESTION), tmp_path / "squad")
    (tmp_path / "q.jsonl").write_text(json.dumps({"id": "a", **ASKED}) + "\n" + json.dumps({"id": "b"}) + "\n")
    files = ["--input", tmp_path / "q.jsonl", "--output", tmp_path / "out"]
    run("--checkpoint", tmp_path / "squad", *files, "--format", "squad", "--on_error", "skip")
    assert set(json.loads((tmp_path / "out" / "predictions.json").read_text())) == {"a"}
    assert "1 of 2 inputs were invalid" in capsys.readouterr().err


def test_squad_s_files_hold_the_answers_and_the_odds_of_none(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their scores, computed from the files, are those of evaluate at the threshold of the task."""
    task = QUESTION | {"unanswerable": True, "null_threshold": 0.5, "metrics": ["exact", "NoAns_exact"]}
    asked = model(tmp_path_factory, Heads(question=True), task)
    contexts = ["a dog sat on the mat .", "the river sat", "cat . mat . river", "un want able cat"]
    answers = [[{"text": "dog", "answer_start": 2}], [], [{"text": "mat", "answer_start": 6}], []]
    questions = [
        {
            "context": context,
            "qas": [{"id": f"q{n}", "question": "the cat", "answers": given, "is_impossible": not given}],
        }
        for n, (context, given) in enumerate(zip(contexts, answers, strict=True))
    ]
    file = tmp_path / "dev.json"
    file.write_text(json.dumps({"version": "v2.0", "data": [{"title": "x", "paragraphs": questions}]}))
    shares = sorted(one["no_answer_probability"] for one in predict(asked, file))
    least = (shares[1] + shares[2]) / 2  # two questions have an answer
    asked = dataclasses.replace(asked, task=task | {"null_threshold": least})
    export.write(asked, tmp_path / "squad")
    reads: list[Path] = []
    read = registry.read
    with monkeypatch.context() as patch:
        patch.setattr(registry, "read", lambda *given, **options: reads.append(given[1]) or read(*given, **options))
        run("--checkpoint", tmp_path / "squad", "--output", tmp_path / "out", "--format", "squad", "--input", file)
    assert reads == [file]
    names = ("predictions", "null_odds")
    assert capsys.readouterr().out.split() == [str(tmp_path / "out" / f"{name}.json") for name in names]
    texts, odds = (json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in ("predictions", "null_odds"))
    told = {one["id"]: one for one in predict(asked, file, all_scores=True)}
    assert list(texts) == list(odds) == list(told) == ["q0", "q1", "q2", "q3"]
    for name, one in told.items():
        none = 1 / (1 + np.exp(-odds[name]))
        assert none == pytest.approx(one["no_answer_probability"])
        assert texts[name] == ("" if none > least else one["scores"][0]["answer"])
    assert list(texts.values()).count("") == 2
    words = [compared_words(given[0]["text"] if given else "") for given in answers]
    right = [compared_words(texts[f"q{n}"]) == expected for n, expected in enumerate(words)]
    found = measurement.evaluate(asked, file).metrics
    assert found["exact"] == np.mean(right) and found["NoAns_exact"] == np.mean(right[1::2])
    assert set(measurement.evaluate(asked, file, metrics=("NoAns_f1", "exact")).metrics) == {
        "NoAns_f1",
        "exact",
        "task_loss",
    }
    for given in ("exact_match", ("f1", "exact_match")):
        with pytest.raises(
            UserError, match=r"\(in evaluate: --metrics\) has 'exact_match', but .*dev.json has questions"
        ):
            measurement.evaluate(dataclasses.replace(asked, task=QUESTION), file, metrics=given)
    with pytest.raises(UserError, match="2 questions have only 1 different ids"):
        write_squad([{"id": "a", "answer": ""}] * 2, tmp_path)


def test_a_model_that_always_answers_abstains_where_it_is_asked_to(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """So Hugging Face's models of SQuAD 2.0 are, which record neither that nor a threshold."""
    always = model(tmp_path_factory, Heads(question=True), QUESTION)
    export.write(always, tmp_path / "squad")
    entry = {"id": "a", "question": "the cat", "answers": [{"text": "dog", "answer_start": 0}]}
    paragraph = {"context": "dog sat on mat", "qas": [entry, {"id": "b", "question": "a dog", "answers": []}]}
    file = tmp_path / "dev.json"
    file.write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    shares = {one["id"]: one["no_answer_probability"] for one in predict(always, file, null_threshold=0.0)}
    assert "no_answer_probability" not in predict(always, file)[0]
    arguments = ["--checkpoint", tmp_path / "squad", "--input", file, "--output", tmp_path / "out", "--format", "squad"]
    for given, threshold in (([], 0.5), (["--null_threshold", 0], 0.0), (["--null_threshold", 1], 1.0)):
        run(*arguments, *given)
        texts, odds = (
            json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in ("predictions", "null_odds")
        )
        assert {name: text == "" for name, text in texts.items()} == {
            name: share > threshold for name, share in shares.items()
        }
        assert {name: 1 / (1 + np.exp(-value)) for name, value in odds.items()} == pytest.approx(shares)
    metrics = {cut: measurement.evaluate(always, file, null_threshold=cut).metrics for cut in (None, 0.0, 0.5, 1.0)}
    assert metrics[None] == metrics[0.5] and (metrics[0.0]["NoAns_f1"], metrics[1.0]["NoAns_f1"]) == (1, 0)
    unsettled = dataclasses.replace(always, task=QUESTION | {"unanswerable": True})
    assert measurement.evaluate(unsettled, file).metrics == metrics[0.5]
    assert len({(found["best_f1"], found["best_f1_thresh"]) for found in metrics.values()}) == 1


def test_a_threshold_of_no_answer_is_for_questions(workdir: Path, classifier: LoadedModel, tmp_path: Path) -> None:
    said = "--null_threshold is 0.5, but a task of kind classification has no questions; omit it"
    with pytest.raises(UserError, match=said):
        run("--checkpoint", workdir, "--input", tmp_path / "a.txt", "--null_threshold", 0.5)
    with pytest.raises(UserError, match=said):
        measurement.evaluate(classifier, tmp_path / "a.tsv", null_threshold=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "task", "line", "told", "bad"),
    [
        (Heads(question=True), QUESTION, ASKED, ["answer", "end", "id", "score", "start"], {"question": "a"}),
        (Heads(tags=1), NUMBERS, {"text": "the cat"}, ["numbers", "offsets", "words"], {"text": ""}),
        (Heads(spans=SpanHeads(length=3, classes=1)), SPANS, {"text": "the cat"}, ["spans", "words"], {"text": " "}),
        (
            Heads(pooler=True, choices=True),
            CHOICES,
            {"text": "a", "choices": ["the cat", "mat"]},
            ["choice", "label", "score"],
            {"text": "a", "choices": ("the cat",)},
        ),
    ],
    ids=["question", "token_regression", "spans", "choice"],
)
def test_the_command_predicts_every_kind(
    heads: Heads,
    task: dict,
    line: dict,
    told: list[str],
    bad: dict,
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
) -> None:
    loaded = model(tmp_path_factory, heads, task)
    export.write(loaded, tmp_path / "run")
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(bad) + "\n")
    arguments = ["--checkpoint", tmp_path / "run", "--input", tmp_path / "in.jsonl"]
    run(*arguments, "--output", tmp_path / "out.jsonl", "--on_error=skip")
    good, refused = lines_of(tmp_path / "out.jsonl")
    assert sorted(good) == told and "line 2" in refused["error"]
    if "answer" in good:
        assert good["answer"] == line["context"][good["start"] : good["end"]]
    for span in good.get("spans", ()):
        assert span["text"] == line["text"][span["start"] : span["end"]]
    with pytest.raises(UserError, match=r"in\.jsonl line 2"):
        run(*arguments)


def table_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_csv_has_the_columns_of_the_input_and_the_predictions(workdir: Path, tmp_path: Path) -> None:
    texts = ['He said, "good"\nand left', "naïve, good", "dark"]
    wanted = predict(workdir, [{"text": text} for text in texts])
    with (tmp_path / "in.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("a", "label", "n"), *((text, "old", str(n)) for n, text in enumerate(texts))])
    run("--checkpoint", workdir, "--input", tmp_path / "in.csv", "--text=a", "--output", tmp_path / "out.csv")
    rows = table_of(tmp_path / "out.csv")
    assert [*rows[0]] == ["a", "label", "n", "predicted_label", "score"]
    assert [row["a"] for row in rows] == texts and {row["label"] for row in rows} == {"old"}
    assert [row["predicted_label"] for row in rows] == [prediction["label"] for prediction in wanted]
    np.testing.assert_allclose([float(row["score"]) for row in rows], [one["score"] for one in wanted], rtol=1e-5)
    # As another reader has it.
    table = pyarrow.csv.read_csv(tmp_path / "out.csv", parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True))
    assert table["a"].to_pylist() == texts and table["n"].to_pylist() == [0, 1, 2]


def test_inputs_of_every_form_become_a_csv(workdir: Path, tmp_path: Path) -> None:
    texts = ["good", "dark", "the sea"]
    labels = [prediction["label"] for prediction in predict(workdir, texts)]
    (tmp_path / "in.txt").write_text("\n".join(texts))
    objects = [{"id": n, "text": text, "tags": ["x", {"y": 1}]} for n, text in enumerate(texts)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, objects)))
    (tmp_path / "in.tsv").write_text("text\ttext\n" + "".join(f"?\t{text}\n" for text in texts))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "n": [1.5, None, 3.0]}), tmp_path / "in.parquet")
    header = {
        "in.txt": ["text"],
        "in.jsonl": ["id", "text", "tags"],
        "in.tsv": ["text", "text (1)"],
        "in.parquet": ["n", "text"],
    }
    for name, columns in header.items():
        more = ["--text=1"] if name == "in.tsv" else ["--text=text"] if name == "in.parquet" else []
        if name == "in.tsv":  # without a header
            (tmp_path / name).write_text("".join(f"?\t{text}\n" for text in texts))
            columns = ["0", "1"]
        run("--checkpoint", workdir, "--input", tmp_path / name, "--output", tmp_path / f"{name}.csv", *more)
        rows = table_of(tmp_path / f"{name}.csv")
        assert sorted(rows[0]) == sorted([*columns, "label", "score"]), name
        assert [row["label"] for row in rows] == labels
    rows = table_of(tmp_path / "in.jsonl.csv")
    assert [json.loads(row["tags"]) for row in rows] == [given["tags"] for given in objects]
    assert [row["n"] for row in table_of(tmp_path / "in.parquet.csv")] == ["1.5", "", "3.0"]


def test_skipped_inputs_have_their_error_in_the_csv(workdir: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "good"}\n{"text": ""}\n')
    output = tmp_path / "out.csv"
    run("--checkpoint", workdir, "--input", tmp_path / "in.jsonl", "--output", output, "--on_error=skip")
    rows = table_of(output)
    assert [row["error"] == "" for row in rows] == [True, False] and rows[1]["label"] == ""


@pytest.mark.parametrize("name", ["out.xlsx", "out.json", "out.CSVX"])
def test_an_unknown_ending_is_refused_before_the_checkpoint_is_opened(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"files that end in \.\w+ are not written; use \.jsonl, \.ndjson, \.csv"):
        run("--checkpoint", tmp_path / "none", "--input", tmp_path / "in.txt", "--output", tmp_path / name)
    assert not list(tmp_path.iterdir())
