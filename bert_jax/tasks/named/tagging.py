"""Tagging tasks: parts of speech of UD English EWT, entities of CoNLL-2003."""

from dataclasses import dataclass, replace
from pathlib import Path

from bert_jax.tasks.example import Sentence, Split
from bert_jax.tasks.kinds.tagging import TaggingTask
from bert_jax.tasks.kinds.words import SentenceReader
from bert_jax.tasks.named.layout import SPLITS, STORED_SPLITS, NamedTask
from bert_jax.tasks.reading import Columns, is_stored, read_conllu, read_word_lists

# https://universaldependencies.org/u/pos
UNIVERSAL_TAGS = (
    *("ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM", "PART"),
    *("PRON", "PROPN", "PUNCT", "SCONJ", "SYM", "VERB", "X"),
)


# The classes of STORED_LABEL by number in the Hugging Face data set `universal_dependencies`.
STORED_LABEL = "upos"
NO_WORD = "_"  # a multiword token, whose words follow it, or an empty node
STORED_TAGS = (
    *("NOUN", "PUNCT", "ADP", "NUM", "SYM", "SCONJ", "ADJ", "PART", "DET"),
    *("CCONJ", "PROPN", "PRON", "X", NO_WORD, "ADV", "INTJ", "VERB", "AUX"),
)


@dataclass(frozen=True)
class EwtTask(TaggingTask):
    """UD English EWT, whose text files are CoNLL-U regardless of the endings of their names."""

    def reader_of(self, path: Path) -> SentenceReader:
        return self._read_lists if is_stored(path) else read_conllu

    def _read_lists(self, path: Path, columns: Columns, label_required: bool) -> Split[Sentence]:
        """Reads lists, where numbers are STORED_TAGS in the data set's own column, unless other labels are given."""
        own = columns.label == STORED_LABEL and self.labels == UNIVERSAL_TAGS and not self.label_map
        return read_word_lists(path, columns, label_required, STORED_TAGS if own else self.numbered_labels)

    def read(self, path: Path, columns: Columns, label_required: bool) -> Split[Sentence]:
        """Also leaves out what is no word (NO_WORD) in the lists of the Hugging Face data set, as read_conllu does."""
        split = super().read(path, columns, label_required)
        if not split.labelled or not is_stored(path):
            return split
        return replace(split, items=tuple(item for item in map(_words_of, split.items) if item.words))


def _words_of(sentence: Sentence) -> Sentence:
    """The sentence without what is tagged NO_WORD."""
    tagged = zip(sentence.words, sentence.tags or (), sentence.lines, strict=True)
    kept = [one for one in tagged if one[1] != NO_WORD]
    return sentence._replace(
        words=tuple(word for word, _, _ in kept),
        tags=tuple(tag for _, tag, _ in kept),
        lines=tuple(line for *_, line in kept),
    )


TAGGING = (
    NamedTask(
        EwtTask("ewt", UNIVERSAL_TAGS, metrics=("accuracy",), columns=Columns("FORM", "", "UPOS")),
        ("ud_english_ewt", "universal_dependencies/en_ewt", "en_ewt"),
        {split: (f"en_ewt-ud-{split}.conllu",) for split in SPLITS},
        stored_splits=STORED_SPLITS,
        stored_columns=Columns("tokens", "", STORED_LABEL),
    ),
    # Tjong Kim Sang and De Meulder 2003; the order of the labels is that of the Hugging Face `conll2003` data set.
    NamedTask(
        TaggingTask(
            "conll2003",
            ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC"),
            metrics=("f1", "precision", "recall", "accuracy"),
            columns=Columns("0", "", "-1"),
        ),
        ("conll2003",),
        {"train": ("eng.train",), "dev": ("eng.testa",), "test": ("eng.testb",)},
        stored_splits=STORED_SPLITS,
        stored_columns=Columns("tokens", "", "ner_tags"),
    ),
)
