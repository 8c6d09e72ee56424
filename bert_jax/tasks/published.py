"""Published results of other models, for comparison."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """Metrics of a task on its dev file, as test_NAME on its test file, with their model and source."""

    source: str
    metrics: Mapping[str, float]


# The table of huggingface/transformers, examples/flax/text-classification/README.md: three epochs of batches of 32. Of
# MNLI the matched dev file.
_FLAX = "bert-base-cased (Hugging Face's Flax example; dev, mean of 5 seeds)"
_GLUE: dict[str, dict[str, float]] = {
    "cola": {"matthews_correlation": 0.590},
    "sst2": {"accuracy": 0.922},
    "mrpc": {"f1": 0.890, "accuracy": 0.844},
    "stsb": {"pearson": 0.889, "spearman": 0.886},
    "qqp": {"accuracy": 0.908, "f1": 0.875},
    "mnli": {"accuracy": 0.838},
    "qnli": {"accuracy": 0.908},
    "rte": {"accuracy": 0.648},
    "wnli": {"accuracy": 0.370},
}

FIGURES: dict[str, Published] = {
    **{task: Published(_FLAX, metrics) for task, metrics in _GLUE.items()},
    "conll2003": Published(
        "BERT-Base, cased, fine-tuned with document context (Devlin et al. 2019, table 7; mean of 5 runs)",
        {"f1": 0.964, "test_f1": 0.924},
    ),
    "squad1": Published(
        "BERT-Base, single (Devlin et al. 2019, table 2; official training and dev files)",
        {"exact_match": 0.808, "f1": 0.885},
    ),
}
