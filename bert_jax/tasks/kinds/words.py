"""What the kinds that label words share: reading and parsing sentences, and the objects of their predictions."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_jax.tasks import reading
from bert_jax.tasks.example import Sentence, Span, SpannedSentence, Split
from bert_jax.tasks.input_records import InputRecord, sentences_of
from bert_jax.tasks.reading import Columns
from bert_jax.tasks.task import Rows, Task
from bert_jax.tasks.word_rows import LabelledWordRows

SentenceReader = Callable[[Path, Columns, bool], Split[Sentence]]


@dataclass(frozen=True)
class WordTask(Task[Sentence, Rows]):
    """A task with a label for every word."""

    unread_columns = ("text_pair", "marks")

    @property
    def numbered_labels(self) -> tuple[str, ...]:
        """The labels that numbers in JSON lines, Parquet and prepared data stand for."""
        return ()

    def reader_of(self, path: Path) -> SentenceReader:
        """The reader for a file, by its name: CoNLL-U, CoNLL columns, or lists in JSON lines, Parquet and prepared
        data."""
        if reading.is_stored(path):
            return functools.partial(reading.read_word_lists, labels=self.numbered_labels)
        return reading.read_conllu if reading.kind_of_file(path) == "conllu" else reading.read_conll

    def parse(self, source: Path, records: Sequence[InputRecord]) -> Split[Sentence]:
        """Sentences of the given words, or of the words of raw texts."""
        return sentences_of(source, records, self.columns.text)


def sentence_objects(rows: LabelledWordRows, **values: Sequence[Any]) -> list[dict[str, Any]]:
    """The prediction for each sentence: `words`, the values of its words, and their `offsets` in a raw text.

    values has one value for each word of the file.
    """
    found = []
    for item, *parts in zip(rows.split.items, *map(rows.by_sentence, values.values()), strict=True):
        one = {"words": list(item.words)} | {name: list(part) for name, part in zip(values, parts, strict=True)}
        if item.offsets is not None:
            one["offsets"] = [list(place) for place in item.offsets]
        found.append(one)
    return found


def span_object(sentence: Sentence | SpannedSentence, span: Span, score: float) -> dict[str, Any]:
    """A predicted span of a sentence: `type`, `text`, `score`, `words` [first, end), and `start` and `end`, characters
    of the raw text, where there is one."""
    one = {"type": span.label, "text": " ".join(sentence.words[span.first : span.end]), "score": score}
    if sentence.text is not None and sentence.offsets is not None:
        start, end = sentence.offsets[span.first][0], sentence.offsets[span.end - 1][1]
        one |= {"text": sentence.text[start:end], "start": start, "end": end}
    return one | {"words": [span.first, span.end]}
