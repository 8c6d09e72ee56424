"""Measures retrieval on a folder in the layout of BEIR (Thakur et al. 2021).

corpus.jsonl   {"_id": ..., "title": ..., "text": ...} on each line; the text of a document is its title and its text
queries.jsonl  {"_id": ..., "text": ...}
qrels/*.tsv    query-id, corpus-id, score, with or without a header; a score above 0 marks a relevant document

Text files may be compressed. The corpus is read in chunks, twice: for its identifiers, and for its texts.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from bert_jax.command import UserError
from bert_jax.progress import print_note
from bert_jax.tasks.kinds.labels import parse_number
from bert_jax.tasks.reading import COMPRESSED, numbered_lines, plain_name
from bert_jax.tasks.retrieval import Nearest, retrieval_metrics

CORPUS, QUERIES, QRELS = "corpus.jsonl", "queries.jsonl", "qrels"
PREFERRED = ("test", "dev")  # the split that is measured where several are there and none is named
DOCUMENTS_AT_ONCE = 16384
HITS = 100

Embed = Callable[[Sequence[str], str], Float32[np.ndarray, "N D"]]  # (texts, "query" or "document") -> vectors


def is_beir(data: Path) -> bool:
    """Whether a path is a folder in BEIR's layout, or one of its qrels files."""
    return _find(_folder(data), CORPUS) is not None


def measure(data: Path, embed: Embed, skip_self: bool = False) -> tuple[dict[str, float], dict[str, int]]:
    """The metrics of retrieval_metrics, and the numbers of queries and documents.

    data is the folder, of which qrels/test.tsv or qrels/dev.tsv is measured, or the qrels file. Scores are dot
    products. Queries without a relevant document do not count. With skip_self, the document with the identifier of a
    query is none of its hits, as in BEIR; without, a note says how many queries have one. Raises UserError, with file
    and line, for malformed files.
    """
    folder = _folder(data)
    relevant = _read_qrels(data if data != folder else _default_qrels(folder))
    texts = {name: text for name, text in _read(_needed(folder, QUERIES)) if name in relevant}
    if not texts:
        raise UserError(f"{folder}: no query of its qrels file is in {QUERIES}. Use the files of one data set")
    corpus = _needed(folder, CORPUS)
    names = [name for name, _ in _read(corpus)]
    order = np.argsort(np.array(names, dtype=object), kind="stable")
    numbers = np.empty(len(names), np.int64)
    numbers[order] = np.arange(len(names))
    if not skip_self and (count := len(texts.keys() & set(names))):
        print_note(
            f"{count:,} of {len(texts):,} queries have the _id of a document, which may be among their hits, as in "
            "sentence-transformers; --skip_self leaves it out, as BEIR does"
        )
    nearest = Nearest(embed(list(texts.values()), "query"), HITS + skip_self)
    start = 0
    for chunk in _chunks(_read(corpus)):
        nearest.add(embed([text for _, text in chunk], "document"), numbers[start : start + len(chunk)])
        start += len(chunk)
    hits = {}
    for query, found in zip(texts, nearest.documents, strict=True):
        documents = [names[order[number]] for number in found]
        hits[query] = [name for name in documents if not skip_self or name != query][:HITS]
    return retrieval_metrics(hits, relevant), {"queries": len(texts), "documents": len(names)}


def _folder(data: Path) -> Path:
    return data.parent.parent if data.parent.name == QRELS and data.is_file() else data


def _find(folder: Path, name: str) -> Path | None:
    return next((path for ending in ("", *COMPRESSED) if (path := folder / (name + ending)).is_file()), None)


def _needed(folder: Path, name: str) -> Path:
    found = _find(folder, name)
    if found is None:
        raise UserError(f"{folder} has no {name}; expected BEIR's layout: {CORPUS}, {QUERIES} and {QRELS}/SPLIT.tsv")
    return found


def _default_qrels(folder: Path) -> Path:
    there = {plain_name(path).removesuffix(".tsv"): path for path in sorted((folder / QRELS).glob("*.tsv*"))}
    for split in PREFERRED:
        if split in there:
            return there[split]
    if len(there) != 1:
        found = ", ".join(there) or "none"
        raise UserError(f"{folder / QRELS} has the splits {found}; name one: --data {folder / QRELS}/SPLIT.tsv")
    return next(iter(there.values()))


def _read_qrels(path: Path) -> dict[str, set[str]]:
    relevant: dict[str, set[str]] = {}
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        fields = line.split("\t")
        score = parse_number(fields[-1])  # infinite where it is none
        if number == 1 and len(fields) == 3 and math.isinf(score):
            continue  # the header
        if len(fields) != 3 or not math.isfinite(score):
            raise UserError(
                f"{path} line {number} is {line[:60]!r}; expected query-id, corpus-id and score, separated by tabs"
            )
        if score > 0:
            relevant.setdefault(fields[0], set()).add(fields[1])
    return relevant


def _read(path: Path) -> Iterator[tuple[str, str]]:
    """The identifiers and the texts of a file of JSON lines."""
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            values: Any = json.loads(line)
            name, text, title = values["_id"], values["text"], values.get("title") or ""
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise UserError(f'{path} line {number}: expected an object {{"_id": ..., "text": ...}}') from None
        if not (isinstance(name, str) and isinstance(text, str) and isinstance(title, str)):
            raise UserError(f"{path} line {number}: _id, title and text are strings. Write them in quotes")
        yield name, f"{title} {text}".strip()


def _chunks(documents: Iterator[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    chunk: list[tuple[str, str]] = []
    for document in documents:
        chunk.append(document)
        if len(chunk) == DOCUMENTS_AT_ONCE:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
