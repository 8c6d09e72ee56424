"""The files of the leaderboards: names, headers, the labels of each benchmark, scores within their range."""

import dataclasses
import json

import pytest

from bert_jax.errors import UserError
from bert_jax.tasks import leaderboards
from bert_jax.tasks.named import TASKS

# What gluebenchmark.com asks for: a file a row of its table, by name.
LEADERBOARD = ("SST-2", "CoLA", "MRPC", "STS-B", "QQP", "MNLI-m", "MNLI-mm", "QNLI", "RTE", "WNLI", "AX")


def answers(*labels: str) -> list[dict]:
    return [{"label": label, "score": 0.9} for label in labels]


def test_every_file_of_the_leaderboard_has_a_task_that_makes_it():
    tables = {name for name in leaderboards.FILES.values() if name.endswith(".tsv")}
    assert tables == {f"{name}.tsv" for name in LEADERBOARD}
    for task_name, split in leaderboards.FILES:
        assert split in TASKS[task_name].files


def test_labels_are_written_as_the_published_files_write_them(tmp_path):
    path = leaderboards.write_submission(TASKS["mnli"].task, "ax", answers("neutral", "entailment"), tmp_path / "new")
    assert path == tmp_path / "new" / "AX.tsv"
    assert path.read_text() == "index\tprediction\n0\tneutral\n1\tentailment\n"
    path = leaderboards.write_submission(TASKS["cola"].task, "test", answers("1", "0"), tmp_path)
    assert path.read_text() == "index\tprediction\n0\t1\n1\t0\n"


def test_labels_with_other_names_are_refused(tmp_path):
    task = dataclasses.replace(TASKS["cola"].task, labels=("bad", "good"), label_map={"0": "bad", "1": "good"})
    with pytest.raises(
        UserError, match=r"task\.label_map=\{'0': 'bad', '1': 'good'\}, but the leaderboard expects those of its own"
    ):
        leaderboards.write_submission(task, "test", answers("good"), tmp_path)


def test_scores_of_similarity_stay_within_their_range(tmp_path):
    told = [{"score": score} for score in (-0.3, 2.41739, 5.2)]
    path = leaderboards.write_submission(TASKS["stsb"].task, "test", told, tmp_path)
    assert path.read_text() == "index\tprediction\n0\t0.000\n1\t2.417\n2\t5.000\n"


def test_superglue_takes_an_object_a_line(tmp_path):
    path = leaderboards.write_submission(TASKS["boolq"].task, "test", answers("true", "false"), tmp_path)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"idx": 0, "label": "true"},
        {"idx": 1, "label": "false"},
    ]
    choices = [{"label": 1, "choice": "It rained."}, {"label": 0, "choice": "It shone."}]
    path = leaderboards.write_submission(TASKS["copa"].task, "test", choices, tmp_path)
    assert path.read_text() == '{"idx": 0, "label": 1}\n{"idx": 1, "label": 0}\n'


@pytest.mark.parametrize(
    ("name", "split", "told", "message"),
    [
        (
            "rte",
            "dev",
            answers("entailment"),
            "no leaderboard accepts predictions of dev of task rte; .* use one of: cola",
        ),
        ("ewt", "test", answers("NOUN"), "no leaderboard accepts predictions of test of task ewt"),
        ("rte", "test", [], "there are no predictions for RTE.tsv"),
    ],
)
def test_tasks_and_splits_without_a_leaderboard_are_refused(tmp_path, name, split, told, message):
    with pytest.raises(UserError, match=message):
        leaderboards.write_submission(TASKS[name].task, split, told, tmp_path)
    assert not list(tmp_path.iterdir())
