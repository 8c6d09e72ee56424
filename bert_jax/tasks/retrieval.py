"""Measures retrieval on a folder in the layout of BEIR (Thakur et al. 2021).

corpus.jsonl   {"_id": ..., "title": ..., "text": ...} on each line; a document's text is its title and its text
queries.jsonl  {"_id": ..., "text": ...}
qrels/*.tsv    query-id, corpus-id, score, with or without a header; a score above 0 marks a relevant document

Text files may be compressed.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32, Int64

from bert_jax.config import TrainConfig
from bert_jax.errors import UserError
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.sentence_transformers import COSINE, DOT, unused_document_prompt
from bert_jax.progress import print_note
from bert_jax.storage.files import SUFFIXES
from bert_jax.tasks.embedder import Embedder, VectorSettings
from bert_jax.tasks.labels import parse_number
from bert_jax.tasks.metrics import QUERIES_AT_ONCE
from bert_jax.tasks.reading.tables import numbered_lines, plain_name
from bert_jax.train.run import make_runtime

CORPUS, QUERIES, QRELS = "corpus.jsonl", "queries.jsonl", "qrels"
PREFERRED = ("test", "dev")  # the split that is measured if a folder has several
DOCUMENTS_AT_ONCE = 16384
HITS = 100

Embed = Callable[[Sequence[str], str], Float32[np.ndarray, "N D"]]  # (texts, "query" or "document") -> vectors


def is_beir(data: Path) -> bool:
    """Checks whether a path is a folder in BEIR's layout, or one of its qrels files."""
    return _find(_folder(data), CORPUS) is not None


def measure_beir(data: Path, embed: Embed, skip_self: bool = False) -> tuple[dict[str, float], dict[str, int]]:
    """Measures retrieval by dot products, over the queries with a relevant document.

    Args:
        data: A qrels file, or the folder, whose qrels/test.tsv or qrels/dev.tsv is measured.
        skip_self: Whether to drop the document with the query's own identifier from its hits, as BEIR does. Otherwise,
            a note says how many queries have one.

    Returns:
        The metrics of rank_metrics, and the numbers of queries and documents.

    Raises:
        UserError: A file is missing, or a line is malformed.
    """
    folder = _folder(data)
    relevant = _read_qrels(data if data != folder else _default_qrels(folder))
    texts = {name: text for name, text in _read(folder, QUERIES) if name in relevant}
    if not texts:
        raise UserError(f"{folder}: no query of its qrels file is in {QUERIES}. Use the files of one data set")
    # The corpus is read twice, in chunks, so that memory holds its identifiers but not its texts.
    # Of documents with one identifier the last one counts, as in BEIR.
    last = {name: place for place, (name, _) in enumerate(_read(folder, CORPUS))}
    names, places = list(last), set(last.values())
    if repeated := max(places, default=0) + 1 - len(names):
        print_note(f"{repeated:,} documents of {folder} repeat an _id; the last one of each is used")
    # Documents are numbered in the order of their identifiers, which decides between equal scores, so that results do
    # not depend on the order of the file.
    order = np.argsort(np.array(names, dtype=object), kind="stable")
    numbers = dict(zip((names[place] for place in order), range(len(names)), strict=True))
    if not skip_self and (count := len(texts.keys() & set(names))):
        print_note(
            f"{count:,} of {len(texts):,} queries have the _id of a document, which may be among their hits, as in "
            "sentence-transformers; --skip_self leaves it out, as BEIR does"
        )
    # With skip_self, one more hit replaces the query's own document.
    nearest = Nearest(embed(list(texts.values()), "query"), HITS + skip_self)
    documents = (document for place, document in enumerate(_read(folder, CORPUS)) if place in places)
    while chunk := list(itertools.islice(documents, DOCUMENTS_AT_ONCE)):
        vectors = embed([text for _, text in chunk], "document")
        nearest.add(vectors, np.array([numbers[name] for name, _ in chunk], np.int64))
    hits = {}
    for query, ranked in zip(texts, nearest.documents, strict=True):
        ranked_names = (names[order[number]] for number in ranked)
        hits[query] = [name for name in ranked_names if not skip_self or name != query][:HITS]
    return rank_metrics(hits, relevant), {"queries": len(texts), "documents": len(names)}


def _folder(data: Path) -> Path:
    return data.parent.parent if data.parent.name == QRELS and data.is_file() else data


def _find(folder: Path, name: str) -> Path | None:
    return next((path for ending in ("", *SUFFIXES) if (path := folder / (name + ending)).is_file()), None)


def _default_qrels(folder: Path) -> Path:
    files = {plain_name(path).removesuffix(".tsv"): path for path in sorted((folder / QRELS).glob("*.tsv*"))}
    for split in PREFERRED if len(files) != 1 else files:
        if split in files:
            return files[split]
    raise UserError(
        f"{folder / QRELS} has the splits {', '.join(files) or 'none'}; name one: --data {folder / QRELS}/SPLIT.tsv"
    )


def _read_qrels(path: Path) -> dict[str, set[str]]:
    relevant: dict[str, set[str]] = {}
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        fields = line.split("\t")
        score = parse_number(fields[-1])
        if number == 1 and len(fields) == 3 and math.isinf(score):  # a header, whose last field is no number
            continue
        if len(fields) != 3 or not math.isfinite(score):
            raise UserError(
                f"{path} line {number} is {line[:60]!r}; expected query-id, corpus-id and score, separated by tabs"
            )
        if score > 0:
            relevant.setdefault(fields[0], set()).add(fields[1])
    return relevant


def _read(folder: Path, name: str) -> Iterator[tuple[str, str]]:
    """Yields identifiers and texts from a file of JSON lines."""
    path = _find(folder, name)
    if path is None:
        raise UserError(f"{folder} has no {name}; expected BEIR's layout: {CORPUS}, {QUERIES} and {QRELS}/SPLIT.tsv")
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            values: Any = json.loads(line)
            identifier, text, title = values["_id"], values["text"], values.get("title") or ""
            if not all(isinstance(value, str) for value in (identifier, text, title)):
                # Caught below, so that all malformed lines have one message.
                raise TypeError
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise UserError(
                f'{path} line {number}: expected an object {{"_id": "...", "title": "...", "text": "..."}}, whose '
                "values are strings"
            ) from None
        yield identifier, f"{title} {text}".strip()


@dataclass
class Nearest:
    """The k documents with the highest scores for Q queries, over documents that come in chunks.

    Memory holds one chunk and Q * k scores. Documents have numbers, by which those with equal scores are ordered.
    """

    queries: Float32[np.ndarray, "Q D"]
    k: int

    def __post_init__(self) -> None:
        count = len(self.queries)
        self.scores = np.full((count, 0), -np.inf, np.float32)
        self.documents = np.zeros((count, 0), np.int64)

    def add(self, vectors: Float32[np.ndarray, "C D"], numbers: Int64[np.ndarray, "C"]) -> None:
        """Takes a chunk of documents. Scores are dot products, which are cosines if vectors have length 1."""
        # By number, because _best prefers the first of equal scores.
        order = np.argsort(numbers)
        vectors, numbers = vectors[order], numbers[order]
        all_scores, all_documents = [], []
        for start in range(0, len(self.queries), QUERIES_AT_ONCE):
            part = slice(start, start + QUERIES_AT_ONCE)
            scores = self.queries[part] @ vectors.T
            best = _best(scores, self.k)
            all_scores.append(np.concatenate([self.scores[part], np.take_along_axis(scores, best, axis=1)], axis=1))
            all_documents.append(np.concatenate([self.documents[part], numbers[best]], axis=1))
        # The best so far and the best in this chunk: at most 2 * k candidates for a query.
        scores, documents = np.concatenate(all_scores), np.concatenate(all_documents)
        highest = np.lexsort((documents, -scores), axis=1)[:, : self.k]
        self.scores = np.take_along_axis(scores, highest, axis=1)
        self.documents = np.take_along_axis(documents, highest, axis=1)


def rank_metrics(
    hits: Mapping[str, Sequence[str]], relevant: Mapping[str, Set[str]], cutoffs: Sequence[int] = (1, 5, 10, 100)
) -> dict[str, float]:
    """Computes ndcg@10, mrr@10 and recall@k, as means over the queries that have a relevant document.

    Relevance is binary; ndcg follows Järvelin and Kekäläinen 2002, with the discount 1 / log2(rank + 1), and recall
    divides by the number of relevant documents. InformationRetrievalEvaluator of sentence-transformers agrees.

    Args:
        hits: By query, the nearest documents, best first: at least as many as the highest cutoff, if there are so many.
    """
    judged = [query for query in hits if relevant.get(query)]
    totals = dict.fromkeys(("ndcg@10", "mrr@10", *(f"recall@{k}" for k in cutoffs)), 0.0)
    # Ranks are from 1; a document outside the hits has none.
    for query in judged:
        right = relevant[query]
        # A document counts once.
        ranks = [rank for rank, document in enumerate(dict.fromkeys(hits[query]), start=1) if document in right]
        gain = sum(1 / math.log2(rank + 1) for rank in ranks if rank <= 10)
        ideal = sum(1 / math.log2(rank + 1) for rank in range(1, min(len(right), 10) + 1))
        totals["ndcg@10"] += gain / ideal
        totals["mrr@10"] += 1 / ranks[0] if ranks and ranks[0] <= 10 else 0.0
        for k in cutoffs:
            totals[f"recall@{k}"] += sum(rank <= k for rank in ranks) / len(right)
    return {name: total / len(judged) if judged else math.nan for name, total in totals.items()}


def _best(scores: Float32[np.ndarray, "Q C"], k: int) -> Int64[np.ndarray, "Q K"]:
    """Returns the columns with each row's k highest scores; the first ones among equal scores."""
    if scores.shape[1] <= k:
        return np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    best = np.argpartition(-scores, k - 1, axis=1)[:, :k]
    # A partition picks any of equal scores, so rows in which some were left out are sorted.
    lowest = np.take_along_axis(scores, best, axis=1).min(axis=1)
    for row in np.flatnonzero((scores >= lowest[:, None]).sum(axis=1) > k):
        best[row] = np.argsort(-scores[row], kind="stable")[:k]
    return best


def evaluate(
    loaded: LoadedModel, data: Path, settings: VectorSettings, batch_size: int, compute_dtype: str, skip_self: bool
) -> dict[str, Any]:
    """Measures retrieval by cosines, or by dot products if these are the checkpoint's similarity."""
    if jax.process_count() > 1:
        raise UserError("retrieval is measured by one process, on all of its devices. Start only one")
    config = TrainConfig(compute_dtype=compute_dtype)
    # Cosines are dot products of vectors that have length 1 after they are cut.
    similarity = (loaded.task or {}).get("similarity", COSINE)
    if similarity != DOT:
        settings = dataclasses.replace(settings, normalize=True, cut_first=True)
        if similarity != COSINE:
            print_note(f"retrieval is measured by cosines, but the checkpoint's similarity is {similarity!r}")
    if name := unused_document_prompt(loaded.task or {}):
        print_note(
            f"documents have no prompt, as in sentence-transformers: the checkpoint's prompt {name!r} would have to be "
            "called 'document'"
        )
    model = Embedder(loaded, settings, batch_size=batch_size, compute_dtype=make_runtime(config).compute_dtype)
    metrics, counts = measure_beir(
        data, lambda texts, role: model.vectors([(t,) for t in texts], model.prompts[role]), skip_self
    )
    return {**metrics, "counts": counts | {"truncated": model.truncated}}
