"""The accuracy of a fine-tuned tagger and of the most-frequent-tag baseline, on known and on unknown words."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from bert_jax.config import TaskConfig
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.tasks import registry
from bert_jax.tasks.baseline import Baseline, most_frequent_tag_baseline
from bert_jax.tasks.example import Sentence, Split
from bert_jax.tasks.inference import FineTuned


@dataclass(frozen=True)
class TaggingScore:
    """Accuracy on the words of the test file; `unknown`: on those that do not occur in the training file."""

    accuracy: float
    unknown_accuracy: float
    baseline: Baseline


def score_tagger(checkpoint: str | Path, config: TaskConfig) -> TaggingScore:
    """Tags the test file of a tagging task and evaluates the baseline on the same words.

    Raises UserError for a checkpoint that is not a tagger, and for files that are missing or have no tags.
    """
    named, files = registry.resolve(config)
    train, test = (cast(Split[Sentence], registry.read(named, files[split])) for split in ("train", "test"))
    loaded = open_checkpoint(checkpoint)
    model = FineTuned(loaded)
    predictions = model.predictions(model.encode(test))
    known = {word for sentence in train.items for word in sentence.words}
    pairs = [pair for sentence in test.items for pair in zip(sentence.words, sentence.tags or (), strict=True)]
    predicted = [tag for sentence in predictions for tag in sentence["tags"]]
    correct = np.array([one == tag for one, (_, tag) in zip(predicted, pairs, strict=True)])
    unknown = np.array([word not in known for word, _ in pairs])
    return TaggingScore(
        accuracy=float(correct.mean()),
        unknown_accuracy=float(correct[unknown].mean()) if unknown.any() else float("nan"),
        baseline=most_frequent_tag_baseline(train, test),
    )
