"""Retrieval: the nearest documents of queries, and the metrics of their ranks.

Equal scores are ordered by the identifier of the document, so that results depend on nothing else.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Float64, Int64

QUERIES_AT_ONCE = 1024  # rows of a matrix of scores, whose columns are the documents of a chunk


@dataclass
class Nearest:
    """The k documents with the highest scores for each of Q queries, over documents that come in chunks.

    Memory is that of one chunk and of Q * k scores. Documents have numbers that say their order where scores are equal.
    """

    queries: Float32[np.ndarray, "Q D"]
    k: int

    def __post_init__(self) -> None:
        count = len(self.queries)
        self.scores = np.full((count, 0), -np.inf, np.float32)
        self.documents = np.zeros((count, 0), np.int64)

    def add(self, vectors: Float32[np.ndarray, "C D"], numbers: Int64[np.ndarray, "C"]) -> None:
        """Takes a chunk of documents; scores are dot products, which are cosines of unit vectors."""
        order = np.argsort(numbers)
        vectors, numbers = vectors[order], numbers[order]
        scores, documents = [], []
        for start in range(0, len(self.queries), QUERIES_AT_ONCE):
            part = slice(start, start + QUERIES_AT_ONCE)
            found = self.queries[part] @ vectors.T
            best = _best(found, self.k)
            scores.append(np.concatenate([self.scores[part], np.take_along_axis(found, best, axis=1)], axis=1))
            documents.append(np.concatenate([self.documents[part], numbers[best]], axis=1))
        both, known = np.concatenate(scores), np.concatenate(documents)
        kept = np.lexsort((known, -both), axis=1)[:, : self.k]
        self.scores = np.take_along_axis(both, kept, axis=1)
        self.documents = np.take_along_axis(known, kept, axis=1)


def ranks_of(
    queries: Float32[np.ndarray, "Q D"], candidates: Float32[np.ndarray, "K D"], right: Int64[np.ndarray, "Q"]
) -> Float64[np.ndarray, "Q"]:
    """The rank, from 1, of each query's candidate; of candidates with equal scores the mean of their ranks.

    A score that is not a number counts against the query.
    """
    ranks = np.zeros(len(queries))
    for start in range(0, len(queries), QUERIES_AT_ONCE):
        part = slice(start, start + QUERIES_AT_ONCE)
        scores = queries[part] @ candidates.T
        own = np.take_along_axis(scores, right[part, None], axis=1)
        higher, at_least = ~(scores <= own), ~(scores < own)  # both true of NaN
        ranks[part] = (1 + higher.sum(axis=1) + at_least.sum(axis=1)) / 2
    return ranks


def retrieval_metrics(
    hits: Mapping[str, Sequence[str]], relevant: Mapping[str, Set[str]], cutoffs: Sequence[int] = (1, 5, 10, 100)
) -> dict[str, float]:
    """ndcg@10, mrr@10, and recall@k of each cutoff, as means over the queries that have a relevant document.

    hits are the documents found for each query, best first; at least as many as the highest cutoff where there are as
    many. Relevance is binary. ndcg is that of Järvelin and Kekäläinen 2002 with the discount 1 / log2(rank + 1); recall
    divides by the number of relevant documents. These are the figures of sentence-transformers'
    InformationRetrievalEvaluator.
    """
    judged = [query for query in hits if relevant.get(query)]
    totals = dict.fromkeys(("ndcg@10", "mrr@10", *(f"recall@{k}" for k in cutoffs)), 0.0)
    for query in judged:
        right = relevant[query]
        ranks = [rank for rank, document in enumerate(hits[query], start=1) if document in right]
        gain = sum(1 / math.log2(rank + 1) for rank in ranks if rank <= 10)
        ideal = sum(1 / math.log2(rank + 1) for rank in range(1, min(len(right), 10) + 1))
        totals["ndcg@10"] += gain / ideal
        totals["mrr@10"] += 1 / ranks[0] if ranks and ranks[0] <= 10 else 0.0
        for k in cutoffs:
            totals[f"recall@{k}"] += sum(rank <= k for rank in ranks) / len(right)
    return {name: total / len(judged) if judged else math.nan for name, total in totals.items()}


def _best(scores: Float32[np.ndarray, "Q C"], k: int) -> Int64[np.ndarray, "Q K"]:
    """The columns of the k highest scores of each row; of equal ones the first."""
    if scores.shape[1] <= k:
        return np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    best = np.argpartition(-scores, k - 1, axis=1)[:, :k]
    lowest = np.take_along_axis(scores, best, axis=1).min(axis=1)
    for row in np.flatnonzero((scores >= lowest[:, None]).sum(axis=1) > k):  # some equal the lowest and were left out
        best[row] = np.argsort(-scores[row], kind="stable")[:k]
    return best
