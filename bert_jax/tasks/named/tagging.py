"""Tags of words: parts of speech of UD English EWT, entities of CoNLL-2003."""

from bert_jax.tasks.named.layout import SPLITS, NamedTask
from bert_jax.tasks.reading import Columns
from bert_jax.tasks.task import Task

# https://universaldependencies.org/u/pos
UNIVERSAL_TAGS = (
    *("ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM", "PART"),
    *("PRON", "PROPN", "PUNCT", "SCONJ", "SYM", "VERB", "X"),
)

WORDS: dict[str, NamedTask] = {
    "ewt": NamedTask(
        Task("ewt", "tagging", UNIVERSAL_TAGS, metrics=("accuracy",), columns=Columns("FORM", "", "UPOS")),
        ("ud_english_ewt",),
        {split: (f"en_ewt-ud-{split}.conllu",) for split in SPLITS},
    ),
    # Tjong Kim Sang and De Meulder 2003; the order of the labels is that of the Hugging Face `conll2003` data set.
    "conll2003": NamedTask(
        Task(
            "conll2003",
            "tagging",
            ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC"),
            metrics=("f1", "precision", "recall", "accuracy"),
            columns=Columns("0", "", "-1"),
        ),
        ("conll2003",),
        {"train": ("eng.train",), "dev": ("eng.testa",), "test": ("eng.testb",)},
    ),
}
