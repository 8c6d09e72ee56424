"""SWAG (Zellers et al. 2018), in the layout of https://github.com/rowanz/swagaf, and COPA in that of SuperGLUE."""

from dataclasses import dataclass, replace
from pathlib import Path

from bert_jax.command import UserError
from bert_jax.tasks.example import Split
from bert_jax.tasks.input_records import InputRecord
from bert_jax.tasks.kinds.choice import ChoiceTask
from bert_jax.tasks.kinds.choice_items import MultipleChoice
from bert_jax.tasks.named.layout import STORED_SPLITS, NamedTask
from bert_jax.tasks.named.superglue import FILES, superglue_folders
from bert_jax.tasks.reading import Columns

# The question that follows the premise of an item, as the authors print it (Roemmele et al. 2011, figure 1).
COPA_QUESTIONS = {"cause": "What was the CAUSE of this?", "effect": "What happened as a RESULT?"}


@dataclass(frozen=True)
class CopaTask(ChoiceTask):
    """COPA of SuperGLUE: a premise, and a question about its cause or its effect."""

    def read(self, path: Path, columns: Columns, label_required: bool) -> Split[MultipleChoice]:
        """Reads items whose column text_pair is one of COPA_QUESTIONS, which is asked about the premise."""
        split = super().read(path, columns, label_required)
        return replace(split, items=tuple(_with_question(path, item) for item in split.items))

    def item_of(self, source: Path, record: InputRecord) -> MultipleChoice:
        item = super().item_of(source, record)
        return _with_question(source, item) if item.start else item


def _with_question(source: Path, item: MultipleChoice) -> MultipleChoice:
    """The item with the question after its premise. Raises UserError for one that is not in COPA_QUESTIONS."""
    if item.start not in COPA_QUESTIONS:
        raise UserError(
            f"{source} line {item.line}: question is {item.start!r}; expected {' or '.join(COPA_QUESTIONS)}"
        )
    return item._replace(context=f"{item.context} {COPA_QUESTIONS[item.start]}", start="")


SWAG = NamedTask(
    # sent1 is the context, sent2 (a noun phrase) the common beginning of all endings; the test file has no labels.
    ChoiceTask(
        "swag",
        metrics=("accuracy",),
        columns=Columns("sent1", "sent2", "label"),
        choices="ending0,ending1,ending2,ending3",
    ),
    ("swag", "SWAG", "swagaf/data", "swagaf", "swag/regular"),
    {"train": ("train.csv",), "dev": ("val.csv",), "test": ("test.csv",)},
    stored_splits=STORED_SPLITS,
)
COPA = NamedTask(
    CopaTask("copa", metrics=("accuracy",), columns=Columns("premise", "question", "label"), choices="choice1,choice2"),
    superglue_folders("COPA"),
    FILES,
    stored="super_glue/copa",
    stored_splits=STORED_SPLITS,
)
