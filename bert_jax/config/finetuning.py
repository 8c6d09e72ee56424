"""The configuration keys of fine-tuning: the task, its columns and metrics, seeds and sweeps."""

from dataclasses import dataclass
from typing import Any

from bert_jax.config.model import LoraConfig
from bert_jax.config.options import check, group, option
from bert_jax.config.training import AdamW, LinearSchedule, OptimizerConfig, TrainConfig
from bert_jax.errors import UserError


@dataclass(frozen=True)
class TaskConfig:
    """A named task (bert_jax/tasks/named.py), or the user's own files and columns."""

    name: str = option("", "a task that bert_jax knows, such as sst2 (bert-jax finetune --help); empty: files of yours")
    data_dir: str = option("", "the folder of a named task's files, or tfds: and a name; empty: $BERT_JAX_DATA", "file")
    train: str = option("", "the file to train on; `bert-jax recipes own` describes the formats", "file")
    dev: str = option(
        "", "the file that chooses seeds and settings, and with early_stop steps; empty: none", "file", "held_out"
    )
    test: str = option("", "a file that is never trained on, for task.submission; empty: none", "file")
    text: str = option("", "a column, by its header name or its number from 0")
    text_pair: str = option("", "the column of the second text of a pair; empty: single texts")
    label: str | tuple[str, ...] = option("", "the column of the label, or of tags; multilabel: also several columns")
    marks: tuple[str, ...] = option((), "for a question about a word in each text: the columns of its start and end")
    choices: tuple[str, ...] = option((), "multiple choice: the columns of the choices, or one that holds a list")
    kind: str = option(
        "",
        "classification, regression, multilabel, choice, tagging, token_regression, question, spans, span_pairs, "
        "embedding; empty: by the format of the files",
    )
    metrics: tuple[str, ...] = option(
        (), "the first one selects seeds and settings, and with early_stop steps; empty: those of the kind"
    )
    labels: tuple[str, ...] = option((), "the labels in the order of the classes; empty: those of the training file")
    label_map: dict[str, str] = option({}, "what labels of the files mean, such as {0: NEGATIVE, 1: POSITIVE}")
    positive: str = option(
        "", "classification: the label that f1, precision and recall measure; empty: the second label"
    )
    max_length: int = option(128, "in tokens, special ones included; longer texts are truncated")
    pooling: str = option(
        "",
        "pooling for a class, a score or a vector: cls, mean, max, last, and, except for vectors, attention_dot and "
        "attention_additive; empty: that of init_from",
    )
    class_weights: str | dict[str, float] = option(
        "", "loss weights: balanced, or {LABEL: WEIGHT}, and 1 for other labels; empty: 1"
    )
    label_smoothing: float = option(0.0, "weight of the uniform distribution in the targets, such as 0.1")
    label_subwords: str = option(
        "", "tagging: the pieces of a word that its tag is the target of: first, all; empty: first"
    )
    decode: str = option("", "tagging: predict a word's tag from its first piece (first) or all (mean); empty: first")
    crf: bool = option(False, "tagging: add a linear-chain conditional random field over the tags")
    crf_rate: float = option(100.0, "tagging: learning rate of its transitions, relative to optimizer.learning_rate")
    scale_targets: str = option(
        "auto",
        "regression, token_regression: train on (number - mean) / deviation of the training file: yes, no; auto: if "
        "the mean or the deviation exceeds 10. Predictions and metrics have the units of the files",
    )
    layer_mix: bool = option(False, "classes, scores and tags from a learned mix of all layers, not the last one")
    max_span: int = option(0, "spans: maximum length in words; 0: the longest of the training file, at most 12")
    span_scores: str = option("", "spans: binary (each type independently), classes (at most one); empty: binary")
    span_vectors: str = option(
        "endpoints",
        "spans: the vector of a span. endpoints: the hidden states of its first and last word and the mean of all; "
        "boundary: a dense layer for each end instead of its state; content: these, and attention instead of the mean",
    )
    span_overlap: str = option("any", "spans: predicted spans that overlap: any, nested (not in part), flat (none)")
    threshold: float = option(
        0.0, "spans, multilabel: minimum probability of a prediction; 0: the best on dev (of each label)"
    )
    relation_threshold: float = option(
        0.0, "span_pairs: minimum probability of a relation; 0: the probability of no relation"
    )
    relations_between: str = option("", "span_pairs: predicted (also trains on spans) or given spans; empty: predicted")
    normalize: bool | None = option(
        None, "embedding: vectors have length 1; unset: as those of init_from, or else True"
    )
    prompt: str = option(
        "",
        "embedding: put before single texts, and before both texts of pairs with a score; none: no prompt; empty: that "
        "of init_from",
    )
    query_prompt: str = option(
        "", "embedding: put before text, in pairs without a score; none: no prompt; empty: that of init_from"
    )
    document_prompt: str = option(
        "",
        "embedding: put before text_pair and negatives, in pairs without a score; none: no prompt; empty: that of "
        "init_from",
    )
    negatives: tuple[str, ...] = option((), "embedding: the columns of hard negatives, or one that holds a list")
    loss: str = option("", "embedding: contrastive, cosent; empty: cosent if the training file has scores (label)")
    scale: float = option(20.0, "embedding: factor of the cosines; the inverse of the temperature")
    symmetric: bool = option(False, "embedding: also find text by text_pair")
    dimensions: tuple[int, ...] = option((), "embedding: Matryoshka, such as (384,128,64); empty: whole vectors")
    truncate_dim: int = option(
        0,
        "embedding: vectors are cut to their first dimensions after training; the model's width: whole vectors; 0: "
        "those of init_from, or else whole",
    )
    submission: str = option("", "a folder for the leaderboard submission of a named task; empty: none", "file")
    max_query_length: int = option(64, "question: questions are truncated to this many pieces")
    doc_stride: int = option(128, "question: pieces between the starts of successive windows of a long context")
    n_best: int = option(20, "question: answers kept for each question")
    max_answer_length: int = option(30, "question: in pieces")
    null_threshold: float | None = option(
        None,
        "question: predict no answer above this probability of none; unset: the best on dev",
        "measured",
    )

    def __post_init__(self) -> None:
        check(self, "config.task.")


@dataclass(frozen=True)
class FinetuneConfig(TrainConfig):
    # Devlin et al. 2019, appendix A.3, tried 2e-5 to 5e-5; a warmup of -1 is a tenth of the run.
    optimizer: OptimizerConfig = group(
        lambda: AdamW(learning_rate=3e-5, schedule=LinearSchedule(warmup_steps=-1)), "the optimizer"
    )
    task: TaskConfig = group(TaskConfig, "the task and its files", "batches")
    seeds: int | tuple[int, ...] = option(
        1, "how many seeds, starting at `seed`, such as 5; or the seeds themselves, such as (0, 7, 9)", "free"
    )
    sweep: dict[str, tuple[Any, ...]] = option(
        {},
        "a sweep over any keys, each setting with all seeds: {optimizer.learning_rate: (1e-5, 3e-5), batch_size: (16, "
        "32)}",
    )
    early_stop: int = option(0, "stop after this many evaluations without a better first dev metric; 0: off", "end")
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
        32, "steps within which rows are grouped by length, which reduces padding; 1: no grouping", "batches"
    )
    padded_lengths: int = option(
        0,
        "batches are padded to at most so many lengths, each compiled once; 0: up to 6, as many as save time",
        "batches",
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
