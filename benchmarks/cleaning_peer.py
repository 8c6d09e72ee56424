"""The peer of benchmarks.cleaning, which runs it in an interpreter that has datatrove and spacy.

Arguments: a file with a JSON list of documents, and `decisions` or `seconds`. Prints the versions, and then for
`decisions` the text that each filter keeps of each document and why it drops it (an empty reason: it does not), for
`seconds` the processor time of each filter and of all in turn. Both are given by its own words, and by the words and
sentences of data_prep.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from datatrove.utils.typeshelper import Languages
from datatrove.utils.word_tokenizers import WordTokenizer

_SENTENCE = re.compile(r"[.!?][\"')\]]*(?:\s|$)")


class SameWords(WordTokenizer):
    """The words and sentences of data_prep.cleaning.rules."""

    def word_tokenize(self, text: str) -> list[str]:
        return text.split()

    def sent_tokenize(self, text: str) -> list[str]:
        return [text[start:end] for start, end in self.span_tokenize(text)]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        ends = [found.end() for found in _SENTENCE.finditer(text)] or [len(text)]
        return list(zip([0, *ends], ends, strict=False))


def filters(language: Any) -> dict[str, Any]:
    return {
        "gopher_repetition": GopherRepetitionFilter(language=language),
        "gopher": GopherQualityFilter(language=language),
        "c4": C4QualityFilter(language=language),
        "fineweb": FineWebQualityFilter(language=language),
    }


def decide(one: Any, texts: Sequence[str]) -> list[tuple[str, str]]:
    """The text that a filter keeps of each document, and why it drops it."""
    found = []
    for number, text in enumerate(texts):
        document = Document(text=text, id=str(number))
        kept = one.filter(document)
        found.append((document.text, "" if kept is True else kept[1]))
    return found


def seconds(chain: Sequence[Any], texts: Sequence[str]) -> float:
    """The processor time of the filters in turn; a document that one drops reaches none after it."""
    documents = [Document(text=text, id=str(number)) for number, text in enumerate(texts)]
    began = time.process_time()
    for document in documents:
        for one in chain:
            if one.filter(document) is not True:
                break
    return time.process_time() - began


def main() -> None:
    texts, answer = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), sys.argv[2]
    versions = {name: importlib.metadata.version(name) for name in ("datatrove", "spacy", "numpy")}
    print(json.dumps(versions | {"python": platform.python_version()}))
    # The limits of Penedo et al. 2024, section 3.6, which has no limit of line breaks.
    published = FineWebQualityFilter(language=SameWords(), char_duplicates_ratio=0.1, new_line_ratio=float("inf"))
    kinds = {"own_words": filters(Languages.english), "same_words": filters(SameWords()) | {"fineweb": published}}
    found: dict[str, Any] = {}
    for words, rules in kinds.items():
        if answer == "decisions":
            found[words] = {name: decide(rule, texts) for name, rule in rules.items()}
        else:
            seconds([rules["gopher"]], texts[:1])  # loads the tokenizer
            chains = {name: [rule] for name, rule in rules.items()} | {"all": list(rules.values())}
            found[words] = {name: seconds(chain, texts) for name, chain in chains.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
