"""The accuracy of a fine-tuned tagger and of the most-frequent-tag baseline, on known and on unknown words."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import jax
import numpy as np

from bert_jax.config import TaskConfig, TrainConfig
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import paths
from bert_jax.tasks import measurement, registry
from bert_jax.tasks.baseline import Baseline, most_frequent_tag_baseline
from bert_jax.tasks.example import Sentence, Split
from bert_jax.tasks.kinds.tagging import Tagging, guessed_tags
from bert_jax.train import partitioning, trainer


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
    task = measurement.task_of(loaded)
    rows = Tagging().encode(task, test, loaded.tokenizer)
    settings = TrainConfig(batch_size=32)
    mesh = partitioning.make_mesh(settings.mesh)
    with jax.set_mesh(mesh):
        params = paths.unflatten(dict(loaded.params))
        params = jax.device_put(params, partitioning.shardings(mesh, params))
        predictor = measurement.Predictor(task, loaded.model, trainer.runtime_of(settings), mesh)
        answers, _ = predictor.answers(params, rows, settings.batch_size)

    known = {word for sentence in train.items for word in sentence.words}
    pairs = [pair for sentence in test.items for pair in zip(sentence.words, sentence.tags or (), strict=True)]
    predicted = [tag for sentence in guessed_tags(task, rows, answers) for tag in sentence]
    correct = np.array([one == tag for one, (_, tag) in zip(predicted, pairs, strict=True)])
    unknown = np.array([word not in known for word, _ in pairs])
    return TaggingScore(
        accuracy=float(correct.mean()),
        unknown_accuracy=float(correct[unknown].mean()) if unknown.any() else float("nan"),
        baseline=most_frequent_tag_baseline(train, test),
    )
