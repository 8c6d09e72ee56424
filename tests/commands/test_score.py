"""The command score: forms of input and output, accuracies by group, and mistakes."""

import csv
import json
import re

import pyarrow.parquet as pq
import pytest
from random_checkpoints import odd_config, random_checkpoint, sensitive

from bert_jax.commands import score
from bert_jax.errors import UserError
from bert_jax.interop.export import export_loaded
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.tasks import scoring

PAIRS = [
    {"uid": "b", "kind": 1, "good": "the cat sat .", "bad": "the cat on ."},
    {"uid": "a", "kind": 1, "good": "a dog", "bad": "dog a"},
    {"uid": "a", "kind": 2, "good": "The mat", "bad": "the mat"},
    {"uid": "a", "kind": 2, "good": "dog a", "bad": "a dog"},
]
COLUMNS = "--text", "good", "--text_pair", "bad"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("checkpoint")
    export_loaded(sensitive(random_checkpoint(folder / "words", odd_config())), folder / "hf")
    return str(folder / "hf")


@pytest.fixture
def pairs(tmp_path) -> str:
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    return str(tmp_path / "pairs.jsonl")


@pytest.fixture
def expected(checkpoint) -> list[scoring.PairScore]:
    return scoring.score(open_checkpoint(checkpoint), [(pair["good"], pair["bad"]) for pair in PAIRS])


def test_accuracies_are_printed_by_group(checkpoint, pairs, expected, tmp_path, capsys):
    output = tmp_path / "out.json"
    arguments = ["--checkpoint", checkpoint, "--input", pairs, *COLUMNS, "--group", "uid,kind"]
    score.main([*arguments, "--output", str(output)])
    right = [pair.first > pair.second for pair in expected]
    # Of the group a: one text before and behind the other, and a tie.
    assert right[1] != right[3] and expected[2].preferred is None
    of_b, kinds = float(right[0]), [(right[0] + right[1]) / 2, right[3] / 2]
    printed = capsys.readouterr().out
    rows = [re.split(r"\s{2,}", line) for line in printed.splitlines() if line]
    assert rows == [
        ["uid", "pairs", "accuracy"],
        ["a", "3", "33.33%"],
        ["b", "1", f"{of_b:.2%}"],
        ["mean of 2", f"{(1 / 3 + of_b) / 2:.2%}"],
        ["kind", "pairs", "accuracy"],
        ["1", "2", f"{kinds[0]:.2%}"],
        ["2", "2", f"{kinds[1]:.2%}"],
        ["mean of 2", f"{sum(kinds) / 2:.2%}"],
        [f"accuracy {sum(right) / 4:.2%} of 4 pairs; 1 with equal scores"],
    ]
    written = json.loads(output.read_text())
    assert (written["pairs"], written["ties"], written["accuracy"]) == (4, 1, sum(right) / 4)
    assert written["by"]["uid"]["groups"]["a"] == {"pairs": 3, "accuracy": pytest.approx(1 / 3)}
    score.main(arguments)
    assert capsys.readouterr().out == printed


def test_every_format_has_the_rows_of_the_input_in_order(checkpoint, pairs, expected, tmp_path, capsys):
    arguments = ["--checkpoint", checkpoint, "--input", pairs, *COLUMNS]
    score.main(arguments)
    printed = capsys.readouterr()
    rows = [json.loads(line) for line in printed.out.splitlines()]
    assert printed.err.splitlines()[-1].startswith("accuracy ")
    for row, pair, (first, second, better) in zip(rows, PAIRS, expected, strict=True):
        assert (row["good"], row["bad"]) == (pair["good"], pair["bad"])
        assert (row["score"], row["score_pair"]) == pytest.approx((first, second), rel=1e-6)
        assert row["tokens"] == len(pair["good"].split()) and row["tokens_pair"] == len(pair["bad"].split())
        assert row["preferred"] == ("tie" if better is None else ("good", "bad")[better])
    for ending in ("jsonl", "csv", "parquet", "json"):
        score.main([*arguments, "--output", str(tmp_path / f"out.{ending}")])
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == rows
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == rows
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == rows
    with (tmp_path / "out.csv").open() as file:
        assert list(csv.DictReader(file)) == [{name: str(value) for name, value in row.items()} for row in rows]


def test_the_same_texts_have_the_same_scores_in_every_form(checkpoint, tmp_path, capsys):
    (tmp_path / "t.txt").write_text("the cat sat .\na dog\tdog a\n")
    score.main(["--checkpoint", checkpoint, "--input", str(tmp_path / "t.txt"), "--masking", "within_word_l2r"])
    single, pair = map(json.loads, capsys.readouterr().out.splitlines())
    assert "preferred" not in single and pair["preferred"] in ("text", "text_pair")
    (tmp_path / "t.csv").write_text("id,text\n1,the cat sat .\n2,a dog\n")
    score.main(["--checkpoint", checkpoint, "--input", str(tmp_path / "t.csv"), "--masking", "within_word_l2r"])
    printed = capsys.readouterr()
    assert [json.loads(line)["score"] for line in printed.out.splitlines()] == [single["score"], pair["score"]]
    mean = (single["score"] + pair["score"]) / 6
    assert printed.err.splitlines()[-1] == f"2 sentences, 6 tokens: {mean:.4f} per token"


@pytest.mark.parametrize(
    "content, arguments, message",
    [
        ("a\n \nb\n", [], r"t.txt line 2 is empty: it has no token to score. Write a text in it, or remove it"),
        ("a\n" + "a " * 30, [], r"t.txt line 2 has 32 tokens, but the model 24 positions. Shorten or remove it"),
        ("", [], r"t.txt has no sentences"),
        ("a\n", ["--text", "good"], r"--text is 'good', but .* is read as lines of text"),
        ("a\n", ["--group", "uid"], r"--group is for the accuracy of pairs; name their second sentence"),
        ("a\n", ["--text", "score"], r"the output would have two columns 'score'. Rename the column"),
        ("a\n", ["--output", "x.xlsx"], r"--output is x.xlsx, but files that end in .xlsx are not written"),
        ('{"text": 1}\n', ["--form", "jsonl"], r"line 1: 'text' is 1, not a text. .* name one with --text"),
        (
            '{"text": "a", "text_pair": "b"}\n',
            ["--form", "jsonl", "--text_pair", "text_pair", "--group", "uid"],
            r"line 1: 'uid' is None, not a group. Its fields are 'text', 'text_pair'; name one with --group",
        ),
    ],
)
def test_mistakes_name_the_line_or_the_flag(checkpoint, tmp_path, content, arguments, message):
    (tmp_path / "t.txt").write_text(content)
    with pytest.raises(UserError, match=message):
        score.main(["--checkpoint", checkpoint, "--input", str(tmp_path / "t.txt"), *arguments])
