"""Compares the cleaning rules of data_prep with the filters of datatrove: decisions and speed, on the same documents.

    python -m venv datatrove_env && datatrove_env/bin/pip install 'datatrove[processing]==0.10.1' spacy
    BERT_JAX_DATA=DATA python -m benchmarks.cleaning --peer_python datatrove_env/bin/python

Without --peer_python there is no peer. The documents are whole ones of Wikipedia, books and talk in BERT_JAX_DATA (or
of --text), and web-like pages made of them (benchmarks/cleaning_pages.py). Each line of output is JSON:

  cleaning_decisions   for each rule, the share of documents that both keep or both drop, of all, of the whole documents
                       and of the pages; and each kind of disagreement with its number of documents, its reason in words
                       and the start of one document
  cleaning_RULE        MB of text per second of one core's processor time, of each rule alone, and of all in turn
                       (cleaning_all: a document that one drops reaches none after it)

The peer runs with its own words (spaCy's, in which punctuation marks are words) and default limits, and, under
`same_words`, with words and sentences as in data_prep and FineWeb's limits as published. Each program is one process
with the texts in memory; they take turns. Six minutes on two cores.

What the two define differently, by choice:

- Words are what white space separates, and sentences end at . ! or ? before a space; no tokenizer runs.
- gopher: the common English words are also recognized in capitals; ‣ ◦ ● ▪ * are bullets, too; blank lines are not
  counted as lines; words without a letter or digit are not counted for the length.
- gopher_repetition: an n-gram that occurs once is not repeated; of repeated n-grams that overlap, each word counts
  (the paper counts their characters once; datatrove continues after the first).
- fineweb: the limits are those of the paper: 10% of repeated characters instead of 1%, equality drops, a line of 30
  characters is not short, and there is no limit of line breaks per word. Quotation marks and an ellipsis end a line,
  too, as quotation marks did in earlier versions of the filter.
"""

import collections
import itertools
import json
import re
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import cleaning_pages, common, turns
from bert_jax import command
from data_prep import readers
from data_prep.cleaning.rules import RULES, Rule

TEXT = "pretrain/wiki_en_0.txt.xz,pretrain/books_en_0.txt.xz,pretrain/talk_en.txt.xz"
PEER = Path(__file__).with_name("cleaning_peer.py")
MB = 1e6
EXCERPT = 120  # characters

Decision = tuple[str, str]  # the text that is kept, and why the document is dropped; an empty reason: it is not

# By the rule and the pair of reasons, of which one is empty; the first that matches.
WORDS = "its words are spaCy's, in which punctuation marks are words"
EXPLANATIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "gopher_repetition": (
        (r"gopher_repeated_\d+_grams/", "every word of overlapping repeated n-grams counts"),
        (r"/top_\d_gram", "an n-gram that occurs once is not repeated"),
    ),
    "gopher": (
        (r"gopher_bullets/", "more kinds of bullets; blank lines are not counted"),
        (r"gopher_ellipses/", "blank lines are not counted"),
        (r"gopher_length/", "words without a letter or digit are not counted"),
        (r"/gopher_enough_stop_words", "common words are recognized in capitals and next to punctuation"),
    ),
    "c4": (),
    "fineweb": (
        (r"/line_punct_ratio", "quotation marks and an ellipsis end a line"),
        (r"/short_line_ratio", "a line of exactly 30 characters is not short"),
        (r"fineweb_\w+/", "a document exactly at the limit is dropped, and white space around lines is not counted"),
    ),
}
# Those of its own words and default limits, which come first.
OWN_EXPLANATIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "gopher_repetition": ((r"n_grams$|grams/", f"{WORDS}, so n-grams are shorter"),),
    "gopher": (
        (r"/gopher_below_alpha_threshold", f"{WORDS} without letters"),
        (
            r"gopher_(word_)?length/|gopher_(symbols|letters)/|/gopher_(short|below|above|too_many_(hashes|ellipsis))",
            WORDS,
        ),
        (r"gopher_common_words/", f"{WORDS}, so it also finds common words within longer words"),
    ),
    "c4": ((r"few_sentences", "its sentences are spaCy's, which know abbreviations"),),
    "fineweb": (
        (r"/char_dup_ratio", "its default limit of repeated characters is 1%, the published one 10%"),
        (r"/list_ratio", "it also limits line breaks per word"),
    ),
}


def texts_of(files: Sequence[Path], megabytes: float, count: int) -> tuple[list[str], list[str]]:
    """Whole documents of the files, in turn, up to a size in MB, and `count` pages made of them."""
    whole: list[str] = []
    size = 0
    for document in itertools.chain.from_iterable(itertools.zip_longest(*map(readers.documents, files))):
        if document is None:
            continue
        whole.append(document)
        size += len(document.encode())
        if size >= megabytes * MB:
            break
    return whole, list(cleaning_pages.pages(whole, count, seed=0))


def agreement(ours: Sequence[Decision], peers: Sequence[Decision], places: range) -> float | None:
    """The share of the documents at these places that both keep or both drop; None without documents."""
    same = [(not ours[place][1]) == (not peers[place][1]) for place in places]
    return round(sum(same) / len(same), 4) if same else None


def differences(
    rule: str, texts: Sequence[str], ours: Sequence[Decision], peers: Sequence[Decision], own_words: bool
) -> list[dict[str, Any]]:
    """Each kind of disagreement: the reasons of both, documents, an explanation (or None), and one example."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for text, (_, our_reason), (_, peer_reason) in zip(texts, ours, peers, strict=True):
        if (not our_reason) != (not peer_reason):
            found[f"{our_reason}/{peer_reason}"].append(text)
    known = (OWN_EXPLANATIONS[rule] if own_words else ()) + EXPLANATIONS[rule]
    return [
        {
            "bert_jax": reasons.split("/")[0] or "keeps",
            "datatrove": reasons.split("/")[1] or "keeps",
            "documents": len(examples),
            "why": next((words for pattern, words in known if re.search(pattern, reasons)), None),
            "example": min(examples, key=len)[:EXCERPT],
        }
        for reasons, examples in sorted(found.items(), key=lambda item: -len(item[1]))
    ]


def compared(
    texts: Sequence[str], whole: int, ours: Mapping[str, Sequence[Decision]], peers: Mapping[str, Any], own_words: bool
) -> dict[str, Any]:
    """The agreement of each rule; the first `whole` texts are whole documents, the others pages."""
    results = {}
    for rule, decisions in ours.items():
        theirs = peers[rule]
        both_keep = [
            (one[0], other[0]) for one, other in zip(decisions, theirs, strict=True) if not one[1] and not other[1]
        ]
        results[rule] = {
            "agreement": agreement(decisions, theirs, range(len(texts))),
            "of_whole_documents": agreement(decisions, theirs, range(whole)),
            "of_pages": agreement(decisions, theirs, range(whole, len(texts))),
            "same_kept_text": round(sum(one == other for one, other in both_keep) / max(len(both_keep), 1), 4),
            "differences": differences(rule, texts, decisions, theirs, own_words),
        }
    return results


def seconds(chain: Sequence[Rule], texts: Sequence[str]) -> float:
    """The processor time of the rules in turn."""
    began = time.process_time()
    for text in texts:
        for rule in chain:
            text, reason = rule(text)
            if reason:
                break
    return time.process_time() - began


def measure(files: Sequence[Path], megabytes: float, count: int, repeats: int, peer_python: str) -> None:
    """Prints the lines of all results."""
    whole, pages = texts_of(files, megabytes, count)
    texts = whole + pages
    size = sum(len(text.encode()) for text in texts) / MB
    ours = {name: [rule(text) for text in texts] for name, rule in RULES.items()}
    chains = {name: [rule] for name, rule in RULES.items()} | {"all": list(RULES.values())}
    times: dict[str, list[float]] = {name: [] for name in chains}
    peer_times: dict[str, dict[str, list[float]]] = {
        words: {name: [] for name in chains} for words in ("own_words", "same_words")
    }
    versions: dict[str, str] | None = None
    peers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "texts.json"
        file.write_text(json.dumps(texts), encoding="utf-8")
        if peer_python:
            versions, (peers,) = turns.peer_answers([peer_python, str(PEER), str(file), "decisions"])
        for _ in range(repeats):
            for name, chain in chains.items():
                times[name].append(seconds(chain, texts))
            if peer_python:
                _, (turn,) = turns.peer_answers([peer_python, str(PEER), str(file), "seconds"])
                for words, found in turn.items():
                    for name, value in found.items():
                        peer_times[words][name].append(value)
    settings = {
        "text": [file.name for file in files],
        "mb": round(size, 2),
        "whole_documents": len(whole),
        "pages": len(pages),
        "repeats": f"median of {repeats}",
    }
    results: dict[str, Any] = {
        "dropped": {
            name: dict(collections.Counter(reason for _, reason in decisions if reason))
            for name, decisions in ours.items()
        }
    }
    for words, decisions in peers.items():
        results[words] = compared(texts, len(whole), ours, decisions, words == "own_words")
    common.emit_results("cleaning_decisions", results, settings | {"peer_versions": versions})
    for name, found in times.items():
        theirs = {words: size / statistics.median(peer_times[words][name]) for words in peers}
        more = {f"peer_value_of_{words}": round(value, 3) for words, value in theirs.items()}
        peer = "datatrove, its own words" if peers else None
        value = size / statistics.median(found)
        common.emit(
            f"cleaning_{name}",
            value,
            "MB/s of one core's time",
            peer,
            theirs.get("own_words"),
            settings | more | {"seconds": [round(one, 3) for one in found]},
            versions and {f"peer {package}": version for package, version in versions.items()},
        )


def main(arguments: Sequence[str]) -> None:
    data = common.shared_data()
    parser = command.Parser("python -m benchmarks.cleaning", __doc__ or "")
    parser.add_argument("--text", default="", help="files or globs, separated by commas (default: of BERT_JAX_DATA)")
    parser.add_argument("--megabytes", type=float, default=2.0, help="MB of whole documents (default: 2)")
    parser.add_argument("--pages", type=int, default=1200, help="number of pages (default: 1200)")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each program (default: 3)")
    parser.add_argument("--peer_python", default="", help="an interpreter with datatrove and spacy (default: none)")
    options = parser.parse_args(arguments)
    if not options.text and not data:
        raise command.UserError("there is no text. Set --text=FILES, or BERT_JAX_DATA to the folder of shared data")
    text = options.text or ",".join(str(data / part) for part in TEXT.split(",") if data)
    measure(readers.expand(text), options.megabytes, options.pages, options.repeats, options.peer_python)


if __name__ == "__main__":
    command.run(main)
