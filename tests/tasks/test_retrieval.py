"""Retrieval: the nearest documents and their metrics by brute force, and the files of BEIR's layout."""

import gzip
import json

import numpy as np
import pytest

from bert_jax.errors import UserError
from bert_jax.tasks import measurement, metrics
from bert_jax.tasks.metrics import Nearest, rank_metrics, ranks_of


@pytest.mark.parametrize("chunk", [1, 7, 40])
@pytest.mark.parametrize("k", [1, 5, 60])
def test_the_nearest_do_not_depend_on_chunks_and_equal_scores_are_in_order(monkeypatch, chunk, k):
    monkeypatch.setattr(metrics, "QUERIES_AT_ONCE", 4)
    draw = np.random.default_rng(0)
    queries = draw.integers(-2, 3, (9, 3)).astype(np.float32)  # few values, so many equal scores
    documents = draw.integers(-2, 3, (40, 3)).astype(np.float32)
    numbers = draw.permutation(40)
    nearest = Nearest(queries, k)
    for start in range(0, 40, chunk):
        nearest.add(documents[start : start + chunk], numbers[start : start + chunk])
    for row, query in enumerate(queries):
        wanted = sorted(range(40), key=lambda place: (-float(query @ documents[place]), numbers[place]))[:k]
        assert nearest.documents[row].tolist() == numbers[wanted].tolist()
        assert nearest.scores[row].tolist() == [float(query @ documents[place]) for place in wanted]


def test_ranks_count_the_candidates_with_a_higher_score_and_half_of_those_with_the_same(monkeypatch):
    monkeypatch.setattr(metrics, "QUERIES_AT_ONCE", 2)
    queries = np.eye(3, dtype=np.float32)
    candidates = np.array([[1, 0, 3], [2, 0, 2], [2, 5, 1]], np.float32)
    assert ranks_of(queries, candidates, np.array([1, 2, 2])).tolist() == [1.5, 1, 3]
    collapsed = ranks_of(np.ones((3, 2), np.float32), np.ones((9, 2), np.float32), np.arange(3))
    assert collapsed.tolist() == [5, 5, 5]


def test_a_score_that_is_not_a_number_counts_against_its_query():
    queries, candidates = np.ones((2, 1), np.float32), np.array([[1], [np.nan], [0]], np.float32)
    assert ranks_of(queries, candidates, np.array([0, 0])).tolist() == [2, 2]
    assert min(ranks_of(queries, candidates, np.array([1, 1]))) >= 3


def test_metrics_of_a_known_ranking():
    hits = {"q1": ["a", "b", "c"], "q2": ["c", "a"], "q3": ["a"], "q4": ["a"]}
    found = rank_metrics(hits, {"q1": {"b", "c", "x"}, "q2": {"c"}, "q3": {"x"}}, cutoffs=(1, 2))
    gain, ideal = 1 / np.log2(3) + 1 / np.log2(4), 1 + 1 / np.log2(3) + 1 / np.log2(4)
    assert found["ndcg@10"] == pytest.approx((gain / ideal + 1 + 0) / 3)
    assert found["mrr@10"] == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert found["recall@1"] == pytest.approx((0 + 1 + 0) / 3)
    assert found["recall@2"] == pytest.approx((1 / 3 + 1 + 0) / 3)


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "qrels").mkdir()
    corpus = [{"_id": "d2", "title": "T", "text": "two"}, {"_id": "d10", "text": "ten"}, {"_id": "d1", "text": "one"}]
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress(lines(corpus).encode()))
    (tmp_path / "queries.jsonl").write_text(lines([{"_id": "q1", "text": "first"}, {"_id": "q9", "text": "unjudged"}]))
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td10\t1\nq1\td1\t0\n")
    (tmp_path / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td2\t2\n")
    return tmp_path


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_a_beir_folder_is_measured(folder, monkeypatch, chunk):
    monkeypatch.setattr(measurement, "DOCUMENTS_AT_ONCE", chunk)
    seen = []

    def embed(texts, role):
        seen.extend((text, role) for text in texts)
        return np.ones((len(texts), 2), np.float32)  # equal scores: by the identifiers d1, d10, d2

    assert (
        measurement.is_beir(folder)
        and measurement.is_beir(folder / "qrels" / "dev.tsv")
        and not measurement.is_beir(folder / "qrels")
    )
    metrics, counts = measurement.measure_beir(folder, embed)
    assert seen == [("first", "query"), ("T two", "document"), ("ten", "document"), ("one", "document")]
    assert (metrics["mrr@10"], metrics["recall@1"], metrics["recall@5"]) == (1 / 2, 0, 1)
    assert counts == {"queries": 1, "documents": 3}
    assert measurement.measure_beir(folder / "qrels" / "dev.tsv", embed)[0]["mrr@10"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("queries.jsonl", '{"_id": "q7", "text": "x"}\n', "no query of its qrels file is in queries.jsonl"),
        ("queries.jsonl", '{"id": "q1"}\n', "queries.jsonl line 1: expected an object"),
        ("queries.jsonl", '{"_id": 1, "text": "x"}\n', "queries.jsonl line 1: _id, title and text are strings"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1 d1 1\n", "test.tsv line 2 is 'q1 d1 1'; expected query-id"),
        ("qrels/test.tsv", "q1\t0\td1\t1\n", r"test.tsv line 1 is 'q1.*'; expected query-id, corpus-id and score"),
        ("qrels/test.tsv", "q1 0 d1 1\n", "test.tsv line 1 is 'q1 0 d1 1'; expected query-id"),
        ("qrels/test.tsv", "q1\td1\tyes\nq1\td1\tno\n", "test.tsv line 2 is"),
    ],
)
def test_files_of_another_form_are_refused(folder, name, content, message):
    (folder / name).write_text(content)
    with pytest.raises(UserError, match=message):
        measurement.measure_beir(folder, lambda texts, role: np.ones((len(texts), 2), np.float32))


def test_a_qrels_file_without_a_header_keeps_its_first_judgment(folder):
    (folder / "qrels" / "test.tsv").write_text("q1\td1\t1.0\nq1\td10\t0\n")
    found, _ = measurement.measure_beir(folder, lambda texts, role: np.ones((len(texts), 2), np.float32))
    assert found["recall@1"] == 1


def test_queries_that_are_documents_find_themselves_unless_they_are_left_out(folder, capsys):
    """d1 is the first of equal scores; it is a query, too, whose answer is d10."""
    (folder / "queries.jsonl").write_text(lines([{"_id": "d1", "text": "one"}, {"_id": "q1", "text": "x"}]))
    (folder / "qrels" / "test.tsv").write_text("d1\td10\t1\nq1\td1\t1\n")

    def embed(texts, role):
        return np.ones((len(texts), 2), np.float32)

    assert measurement.measure_beir(folder, embed)[0]["mrr@10"] == (1 / 2 + 1) / 2
    assert "1 of 2 queries have the _id of a document" in capsys.readouterr().err
    assert measurement.measure_beir(folder, embed, skip_self=True)[0]["mrr@10"] == 1
    assert capsys.readouterr().err == ""


def test_several_splits_without_a_usual_name_are_refused(folder):
    for name in ("test", "dev"):
        (folder / "qrels" / f"{name}.tsv").rename(folder / "qrels" / f"{name}2.tsv")
    with pytest.raises(UserError, match="has the splits dev2, test2; name one"):
        measurement.measure_beir(folder, lambda texts, role: np.ones((len(texts), 2), np.float32))
