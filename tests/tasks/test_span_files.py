"""Sentences with spans and relations from JSON lines; errors name the line."""

import json
from pathlib import Path
from typing import Any

import pytest

from bert_jax.errors import UserError
from bert_jax.tasks.kinds.span import SpanPairTask
from bert_jax.tasks.kinds.span_data import read_spans
from bert_jax.tasks.reading.tables import Columns
from bert_jax.tasks.rows import Relation, Span

GOOD = {
    "tokens": ["Bank", "of", "China", "hired", "Ann"],
    "spans": [{"start": 0, "end": 3, "label": "ORG"}, {"start": 2, "end": 3, "label": "LOC"}, {"start": 4, "end": 5}],
    "relations": [{"head": 2, "tail": 0, "label": "works_for"}],
}


def written(folder: Path, *objects: Any) -> Path:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in objects))
    return path


def test_spans_nest_and_relations_are_between_them(tmp_path: Path) -> None:
    split = read_spans(written(tmp_path, GOOD, {"tokens": ["No"], "spans": []}), Columns(), True, relations=False)
    first, second = split.items
    assert first.spans == (Span("ORG", 0, 3), Span("LOC", 2, 3), Span("", 4, 5))
    assert first.relations == (Relation("works_for", 2, 0),)
    assert second.spans == () and second.line == 2 and split.labelled


def test_a_file_without_what_is_asked_for_is_not_labelled(tmp_path: Path) -> None:
    path = written(tmp_path, {"tokens": ["a"], "spans": [{"start": 0, "end": 1, "label": "X"}]})
    assert read_spans(path, Columns(), False, relations=False).labelled
    assert not read_spans(path, Columns(), False, relations=True).labelled
    with pytest.raises(UserError, match="has no column 'relations'"):
        read_spans(path, Columns(), True, relations=True)
    renamed = written(tmp_path, {"words": ["a"], "entities": []})
    assert read_spans(renamed, Columns("words", "", "entities"), True, relations=False).items[0].words == ("a",)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": []}, r"tokens is \[\]; expected a list of words"),
        ({"tokens": ["a", ""]}, "expected a list of words, each a text that is not empty"),
        ({"spans": "x"}, "spans is 'x'; expected a list of spans"),
        ({"spans": [3]}, r"spans\[0\] is 3; expected an object like"),
        (
            {"spans": [{"start": 0, "end": True, "label": "X"}]},
            r"spans\[0\] is .*word indices from 0, the end exclusive",
        ),
        (
            {"spans": [{"start": 2, "end": 2, "label": "X"}]},
            "is from word 2 to 2, but the sentence has",
        ),
        ({"spans": [{"start": 2, "end": 6, "label": "X"}]}, r"is from word 2 to 6"),
        (
            {"relations": [{"head": 0, "tail": 3, "label": "r"}]},
            r"relations\[0\] is from span 0 to 3; expected the indices",
        ),
        ({"relations": [{"head": 0, "tail": 0, "label": "r"}]}, r"two different spans \(the line has 3\)"),
        ({"relations": [{"head": 0, "tail": 1}]}, "expected an object like"),
        ({"relations": 4}, "relations is 4; expected a list of relations"),
    ],
)
def test_an_invalid_line_is_refused_with_its_number(tmp_path: Path, change: dict, said: str) -> None:
    with pytest.raises(UserError, match=rf"train.jsonl line 2: .*{said}"):
        read_spans(written(tmp_path, GOOD, GOOD | change), Columns(), True, relations=True)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train.tsv: spans are read from .jsonl or .parquet"):
        read_spans(tmp_path / "train.tsv", Columns(), True, relations=False)


def test_relations_between_given_spans_are_predicted_for_a_file_without_any(tmp_path: Path) -> None:
    task = SpanPairTask("own", relations_between="given")
    bare = {name: GOOD[name] for name in ("tokens", "spans")}
    split = task.read(written(tmp_path, bare), Columns(), False)
    assert not split.labelled and len(split.items[0].spans) == 3
    with pytest.raises(UserError, match="has no column 'spans'"):
        task.read(written(tmp_path, {"tokens": ["a"]}), Columns(), False)
    with pytest.raises(UserError, match="has no column 'relations'"):
        task.read(written(tmp_path, bare), Columns(), True)


def test_a_file_whose_labels_are_all_null_is_not_labelled(tmp_path: Path) -> None:
    withheld = GOOD | {"spans": None, "relations": None}
    for relations, name in ((False, "spans"), (True, "relations")):
        path = written(tmp_path, withheld, withheld)
        assert not read_spans(path, Columns(), False, relations=relations).labelled
        with pytest.raises(UserError, match=f"train.jsonl has no labels: column '{name}' is null throughout"):
            read_spans(path, Columns(), True, relations=relations)
        assert read_spans(written(tmp_path, withheld, withheld | {name: []}), Columns(), False, relations).labelled
