"""SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016, 2018), and the dev set of 1.1 with other training questions."""

from bert_jax.tasks.kinds.question import QuestionTask
from bert_jax.tasks.kinds.question_metrics import SQUAD1_METRICS, SQUAD2_METRICS
from bert_jax.tasks.named.layout import NamedTask

FOLDERS = ("squad", "SQuAD")
STORED_SPLITS = {"train": "train", "dev": "validation"}

SQUAD: dict[str, NamedTask] = {
    "squad1": NamedTask(
        QuestionTask("squad1", metrics=SQUAD1_METRICS),
        FOLDERS,
        {"train": ("train-v1.1.json",), "dev": ("dev-v1.1.json",)},
        stored="squad/v1.1",
        stored_splits=STORED_SPLITS,
    ),
    "squad2": NamedTask(
        QuestionTask("squad2", metrics=SQUAD2_METRICS, unanswerable=True),
        FOLDERS,
        {"train": ("train-v2.0.json",), "dev": ("dev-v2.0.json",)},
        stored="squad/v2.0",
        stored_splits=STORED_SPLITS,
    ),
    # Miller et al. 2020: questions on Wikipedia articles that are in neither part of SQuAD.
    "new_wiki": NamedTask(
        QuestionTask("new_wiki", metrics=SQUAD1_METRICS),
        FOLDERS,
        {"train": ("squadshifts_new_wiki.json", "new_wiki_v1.0.json"), "dev": ("dev-v1.1.json",)},
    ),
}
