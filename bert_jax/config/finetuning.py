"""The configuration keys of fine-tuning: the task, its columns and metrics, seeds and sweeps.

A kind of task has its options in a class of its own, such as TaggingOptions. Two classes inherit them: TaggingConfig,
whose fields are the keys of config.task, and TaggingTask in bert_jax/tasks/kinds, which uses them.
"""

from dataclasses import dataclass
from typing import Any

from bert_jax.config.model import LoraConfig
from bert_jax.config.options import POSITIVE, RATE, Kinds, Valid, at_least, between, check, group, option
from bert_jax.config.training import AdamW, LinearSchedule, OptimizerConfig, TrainConfig
from bert_jax.errors import UserError

PROBABILITY = Valid(lambda value: 0 <= value < 1, "a probability below 1, or 0 for the default")


@dataclass(frozen=True)
class TaskConfig(Kinds):
    """The keys that tasks of all kinds have: a named task (bert_jax/tasks/named.py), or your own files and columns."""

    name: str = option("", "a task that bert_jax knows, such as sst2 (bert-jax finetune --help); empty: files of yours")
    data_dir: str = option("", "the folder of a named task's files, or tfds: and a name; empty: $BERT_JAX_DATA", "file")
    train: str = option("", "the file to train on; `bert-jax recipes own` describes the formats", "file")
    dev: str = option(
        "",
        "the file that chooses seeds and settings, and with early_stop steps; empty: dev_share of the training file",
        "file",
        "held_out",
    )
    dev_share: float = option(
        0.1,
        "share of the training file that is held out if there is no dev file, by a hash of the text; 0: none",
        valid=Valid(lambda share: 0 <= share < 1, "a share from 0 to below 1, such as 0.1"),
    )
    test: str = option("", "a file that is never trained on, for task.submission; empty: none", "file")
    text: str = option("", "a column, by its header name or its number from 0")
    label: str | tuple[str, ...] = option("", "the column of the label, or of tags; multilabel: also several columns")
    metrics: tuple[str, ...] = option(
        (), "the first one selects seeds and settings, and with early_stop steps; empty: those of the kind"
    )
    max_length: int = option(128, "in tokens, special ones included; longer texts are truncated", valid=at_least(8))
    submission: str = option("", "a folder for the leaderboard submission of a named task; empty: none", "file")

    def __post_init__(self) -> None:
        check(self, "config.task.")


# Keys that several kinds have.


@dataclass(frozen=True)
class PairColumn(TaskConfig):
    text_pair: str = option("", "the column of the second text of a pair; empty: single texts")


@dataclass(frozen=True)
class TextConfig(PairColumn):
    marks: tuple[str, ...] = option((), "for a question about a word in each text: the columns of its start and end")


@dataclass(frozen=True)
class PoolingConfig(TaskConfig):
    pooling: str = option(
        "",
        "pooling for a class, a score or a vector: cls, mean, max, last, and, except for vectors, attention_dot and "
        "attention_additive; empty: that of init_from",
    )


@dataclass(frozen=True)
class LabelNames(TaskConfig):
    labels: tuple[str, ...] = option((), "the labels in the order of the classes; empty: those of the training file")


@dataclass(frozen=True)
class LabelMap:
    label_map: dict[str, str] = option({}, "what labels of the files mean, such as {0: NEGATIVE, 1: POSITIVE}")


@dataclass(frozen=True)
class Smoothing:
    label_smoothing: float = option(0.0, "weight of the uniform distribution in the targets, such as 0.1", valid=RATE)


@dataclass(frozen=True)
class ClassLoss(Smoothing):
    class_weights: str | dict[str, float] = option(
        "", "loss weights: balanced, or {LABEL: WEIGHT}, and 1 for other labels; empty: 1"
    )


@dataclass(frozen=True)
class LayerMix:
    layer_mix: bool = option(False, "read a learned mix of all layers, not the last one (Peters et al. 2018)")


@dataclass(frozen=True)
class ScaledTargets:
    scale_targets: str = option(
        "auto",
        "train on (number - mean) / deviation of the training file: yes, no; auto: if the mean or the deviation "
        "exceeds 10, the deviation is below 0.1, or the mean exceeds 10 deviations. Predictions and metrics have the "
        "units of the files",
        choices=("auto", "yes", "no"),
    )


@dataclass(frozen=True)
class Truncation:
    truncation: str = option(
        "right",
        "what a text over max_length loses: its end (right), beginning (left) or middle; or nothing: windows are rows "
        "of their own in training, and answers are the mean (windows) or maximum (windows_max) of their probabilities "
        "or numbers",
        choices=("right", "left", "middle", "windows", "windows_max"),
    )


# The kinds.


@dataclass(frozen=True)
class ClassificationOptions(ClassLoss, LabelMap, LayerMix, Truncation):
    positive: str = option("", "the label that f1, precision and recall measure; empty: the second label of two")


@dataclass(frozen=True)
class AutoTaskConfig(ClassificationOptions, LabelNames, PoolingConfig, TextConfig, kind="auto"):
    """The kind of the named task, or the one that the format of the files suggests, which usually is classification."""


@dataclass(frozen=True)
class ClassificationConfig(ClassificationOptions, LabelNames, PoolingConfig, TextConfig, kind="classification"):
    """One class for each text or pair."""


@dataclass(frozen=True)
class RegressionOptions(ScaledTargets, LayerMix, Truncation):
    """The options of a number for each text."""


@dataclass(frozen=True)
class RegressionConfig(RegressionOptions, PoolingConfig, TextConfig, kind="regression"):
    """A number for each text or pair."""


@dataclass(frozen=True)
class MultiLabelOptions(LabelMap, LayerMix, Truncation):
    threshold: float = option(
        0.0, "minimum probability of a label; 0: the best of each label on dev", valid=PROBABILITY
    )


@dataclass(frozen=True)
class MultiLabelConfig(MultiLabelOptions, LabelNames, PoolingConfig, PairColumn, kind="multilabel"):
    """Any number of labels for each text or pair."""


@dataclass(frozen=True)
class ChoiceOptions(Smoothing):
    choices: tuple[str, ...] = option((), "the columns of the choices, or one that holds a list")


@dataclass(frozen=True)
class ChoiceConfig(ChoiceOptions, PoolingConfig, PairColumn, kind="choice"):
    """Which of several texts follows a context."""


@dataclass(frozen=True)
class TaggingOptions(ClassLoss, LabelMap, LayerMix):
    label_subwords: str = option(
        "first", "the pieces of a word that its tag is the target of: first, all", choices=("first", "all")
    )
    decode: str = option(
        "first", "predict a word's tag from its first piece (first) or all (mean)", choices=("first", "mean")
    )
    crf: bool = option(False, "add a linear-chain conditional random field over the tags")
    crf_rate: float = option(
        100.0, "learning rate of its transitions, relative to optimizer.learning_rate", valid=at_least(0)
    )


@dataclass(frozen=True)
class TaggingConfig(TaggingOptions, LabelNames, kind="tagging"):
    """A tag for each word."""


@dataclass(frozen=True)
class TokenRegressionConfig(ScaledTargets, TaskConfig, kind="token_regression"):
    """A number for each word."""


@dataclass(frozen=True)
class QuestionOptions:
    max_query_length: int = option(64, "questions are truncated to this many pieces", valid=at_least(1))
    doc_stride: int = option(
        128, "pieces between the starts of successive windows of a long context", valid=at_least(1)
    )
    max_answer_length: int = option(
        0, "in pieces; 0: 30, or more if 1% of the training file's answers are longer", valid=at_least(0)
    )
    null_threshold: float | None = option(
        None,
        "predict no answer above this probability of none; unset: the best on dev",
        "measured",
        valid=between(0, 1),
    )


@dataclass(frozen=True)
class QuestionConfig(QuestionOptions, PairColumn, kind="question"):
    """The answer to a question, in a context."""


@dataclass(frozen=True)
class SpanOptions:
    max_span: int = option(
        0, "maximum length in words; 0: the longest of the training file, at most 12", valid=at_least(0)
    )
    span_scores: str = option(
        "binary", "binary (each type independently), classes (at most one)", choices=("binary", "classes")
    )
    span_vectors: str = option(
        "endpoints",
        "the vector of a span. endpoints: the hidden states of its first and last word and the mean of all; boundary: "
        "a dense layer for each end instead of its state; content: these, and attention instead of the mean",
        choices=("endpoints", "boundary", "content"),
    )
    span_overlap: str = option(
        "any", "predicted spans that overlap: any, nested (not in part), flat (none)", choices=("any", "nested", "flat")
    )
    threshold: float = option(0.0, "minimum probability of a span; 0: the best on dev", valid=PROBABILITY)


@dataclass(frozen=True)
class SpanConfig(SpanOptions, LabelNames, kind="spans"):
    """Spans of words, with a type."""


@dataclass(frozen=True)
class SpanPairOptions(SpanOptions):
    relations_between: str = option(
        "predicted", "predicted (also trains on spans) or given spans", choices=("predicted", "given")
    )
    relation_threshold: float = option(
        0.0, "minimum probability of a relation; 0: the probability of no relation", valid=PROBABILITY
    )


@dataclass(frozen=True)
class SpanPairConfig(SpanPairOptions, LabelNames, kind="span_pairs"):
    """Relations between spans of words."""


@dataclass(frozen=True)
class EmbeddingOptions:
    prompt: str = option(
        "",
        "put before single texts, and before both texts of pairs with a score; none: no prompt; empty: that of "
        "init_from",
    )
    query_prompt: str = option(
        "", "put before text, in pairs without a score; none: no prompt; empty: that of init_from"
    )
    document_prompt: str = option(
        "", "put before text_pair and negatives, in pairs without a score; none: no prompt; empty: that of init_from"
    )
    negatives: tuple[str, ...] = option((), "the columns of hard negatives, or one that holds a list")
    loss: str = option(
        "",
        "contrastive, cosent; empty: cosent if the training file has scores (label)",
        choices=("", "contrastive", "cosent"),
    )
    scale: float = option(20.0, "factor of the cosines; the inverse of the temperature", valid=POSITIVE)
    symmetric: bool = option(False, "also find text by text_pair")
    dimensions: tuple[int, ...] = option(
        (),
        "Matryoshka, such as (384,128,64); empty: whole vectors",
        valid=Valid(lambda sizes: all(size > 0 for size in sizes), "numbers of dimensions from 1"),
    )
    truncate_dim: int = option(
        0,
        "vectors are cut to their first dimensions after training; the model's width: whole vectors; 0: those of "
        "init_from, or else whole",
        valid=at_least(0),
    )


@dataclass(frozen=True)
class EmbeddingConfig(EmbeddingOptions, PoolingConfig, PairColumn, kind="embedding"):
    """A vector for each text."""

    normalize: bool | None = option(None, "vectors have length 1; unset: as those of init_from, or else True")


@dataclass(frozen=True)
class FinetuneConfig(TrainConfig):
    # Devlin et al. 2019, appendix A.3, tried 2e-5 to 5e-5; a warmup of -1 is a tenth of the run.
    optimizer: OptimizerConfig = group(
        lambda: AdamW(learning_rate=3e-5, schedule=LinearSchedule(warmup_steps=-1)), "the optimizer"
    )
    task: TaskConfig = group(AutoTaskConfig, "the kind of task, and its files", "batches")
    seeds: int | tuple[int, ...] = option(
        1, "how many seeds, starting at `seed`, such as 5; or the seeds themselves, such as (0, 7, 9)", "free"
    )
    sweep: dict[str, tuple[Any, ...]] = option(
        {},
        "a sweep over any keys, each setting with all seeds: {optimizer.learning_rate: (1e-5, 3e-5), batch_size: (16, "
        "32)}",
    )
    early_stop: int = option(
        0, "stop after this many evaluations without a better first dev metric; 0: off", "end", valid=at_least(0)
    )
    epochs: float = option(3.0, "length of the run, if steps and budget_minutes are 0", "end")
    train_layers: str = option(
        "all",
        "all, head, last:K, no_embeddings; gradual: first the head, then one more layer each epoch; gradual:EPOCHS",
    )
    lora: LoraConfig = group(LoraConfig, "trains adapters and the head alone (docs/adapting.md)")
    reinit_layers: int = option(
        0, "last layers that begin, with the pooler, with random parameters instead of init_from's"
    )
    batch_size: int = option(32, "rows per batch, over all devices", "batches")
    length_pool: int = option(
        0,
        "steps within which rows are grouped by length, which reduces padding, at most a quarter of an epoch; 1: no "
        "grouping; 0: 32, or 1 if each word has a label",
        "batches",
        valid=at_least(0),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sweep:  # whose settings may have other values
            return
        self.lora.check_unused()
        if not self.lora.rank:
            return
        if self.train_layers not in ("all", "head"):
            raise UserError(
                f"train_layers={self.train_layers} trains layers, but lora.rank={self.lora.rank} trains only adapters "
                "and the head. Omit train_layers, or set --config.lora.rank=0"
            )
        if not self.init_from:
            raise UserError(
                f"lora.rank is {self.lora.rank}, but init_from is not set: adapters need a pretrained model. Name one "
                "with --config.init_from=CHECKPOINT, or set --config.lora.rank=0"
            )
