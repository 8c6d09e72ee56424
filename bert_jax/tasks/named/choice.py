"""SWAG (Zellers et al. 2018), as https://github.com/rowanz/swagaf lays it out, and COPA as SuperGLUE gives it."""

from bert_jax.tasks.kinds.choice_items import read_copa
from bert_jax.tasks.named.layout import NamedTask
from bert_jax.tasks.named.superglue import FILES, STORED_SPLITS, superglue_folders
from bert_jax.tasks.reading import Columns
from bert_jax.tasks.task import Task

CHOICES: dict[str, NamedTask] = {
    # sent1 is the context, sent2 (a noun phrase) what every ending goes on from; the test file holds no labels.
    "swag": NamedTask(
        Task(
            "swag",
            "choice",
            metrics=("accuracy",),
            columns=Columns("sent1", "sent2", "label"),
            choices="ending0,ending1,ending2,ending3",
        ),
        ("swag", "SWAG", "swagaf/data", "swagaf", "swag/regular"),
        {"train": ("train.csv",), "dev": ("val.csv",), "test": ("test.csv",)},
        stored_splits=STORED_SPLITS,
    ),
    "copa": NamedTask(
        Task(
            "copa",
            "choice",
            metrics=("accuracy",),
            columns=Columns("premise", "question", "label"),
            choices="choice1,choice2",
        ),
        superglue_folders("COPA"),
        FILES,
        stored="super_glue/copa",
        stored_splits=STORED_SPLITS,
        reader=read_copa,
    ),
}
