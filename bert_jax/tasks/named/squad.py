"""SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016, 2018), and the dev set of 1.1 with other training questions."""

from bert_jax.tasks.kinds.question import QuestionTask
from bert_jax.tasks.kinds.question_metrics import SQUAD1_METRICS, SQUAD2_METRICS
from bert_jax.tasks.named.layout import NamedTask

FOLDERS = ("squad", "SQuAD")


def _squad(name: str, version: str, metrics: tuple[str, ...], unanswerable: bool = False) -> NamedTask:
    return NamedTask(
        QuestionTask(name, metrics=metrics, unanswerable=unanswerable),
        FOLDERS,
        {"train": (f"train-{version}.json",), "dev": (f"dev-{version}.json",)},
        stored=f"squad/{version}",
        stored_splits={"train": "train", "dev": "validation"},
    )


SQUAD = (
    _squad("squad1", "v1.1", SQUAD1_METRICS),
    _squad("squad2", "v2.0", SQUAD2_METRICS, unanswerable=True),
    # Miller et al. 2020: questions on Wikipedia articles that are in neither part of SQuAD.
    NamedTask(
        QuestionTask("new_wiki", metrics=SQUAD1_METRICS),
        FOLDERS,
        {"train": ("squadshifts_new_wiki.json", "new_wiki_v1.0.json"), "dev": ("dev-v1.1.json",)},
    ),
)
