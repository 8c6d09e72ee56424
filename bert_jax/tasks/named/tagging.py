"""Tagging tasks: parts of speech of UD English EWT, entities of CoNLL-2003."""

from dataclasses import dataclass
from pathlib import Path

from bert_jax.tasks.kinds.tagging import TaggingTask
from bert_jax.tasks.kinds.words import SentenceReader
from bert_jax.tasks.named.layout import SPLITS, NamedTask
from bert_jax.tasks.reading import Columns, is_stored, read_conllu

# https://universaldependencies.org/u/pos
UNIVERSAL_TAGS = (
    *("ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM", "PART"),
    *("PRON", "PROPN", "PUNCT", "SCONJ", "SYM", "VERB", "X"),
)


@dataclass(frozen=True)
class EwtTask(TaggingTask):
    """UD English EWT, whose text files are CoNLL-U regardless of the endings of their names."""

    def reader_of(self, path: Path) -> SentenceReader:
        return super().reader_of(path) if is_stored(path) else read_conllu


TAGGING = (
    NamedTask(
        EwtTask("ewt", UNIVERSAL_TAGS, metrics=("accuracy",), columns=Columns("FORM", "", "UPOS")),
        ("ud_english_ewt",),
        {split: (f"en_ewt-ud-{split}.conllu",) for split in SPLITS},
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
    ),
)
