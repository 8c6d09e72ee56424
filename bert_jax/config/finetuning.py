"""The configuration keys of fine-tuning: the task, its columns and metrics, seeds and sweeps."""

from dataclasses import dataclass, field

from bert_jax.config.model import LoraConfig
from bert_jax.config.training import OptimizerConfig, TrainConfig, key, marks
from bert_jax.errors import UserError


@dataclass(frozen=True)
class TaskConfig:
    """A named task (bert_jax/tasks/named), or the user's own files and columns."""

    name: str = ""  # a task that bert_jax knows, such as sst2 (bert-jax finetune --help); empty: files of yours
    data_dir: str = key("", "file")  # the folder of a named task's files, or tfds: and a name; empty: $BERT_JAX_DATA
    train: str = key("", "file")  # the file to train on; `bert-jax recipes own` describes the formats
    # The file that chooses seeds and rates, and with early_stop steps; empty: none.
    dev: str = key("", "file", "held_out")
    test: str = key("", "file")  # a file that is never trained on, for task.submission; empty: none
    text: str = ""  # a column, by its header name or its number from 0
    text_pair: str = ""  # the column of the second text of a pair; empty: single texts
    label: str = ""  # the column of the label; for tags a column or a field of the words
    # For a question about one word in each text: the columns of the start and end of the word in characters: a,b,...
    marks: str = ""
    choices: str = ""  # multiple choice: a comma-separated list of columns, or one column that holds a list
    # classification, regression, multilabel, choice, tagging, token_regression, question, spans, span_pairs, embedding
    kind: str = ""
    metrics: str = ""  # names, separated by commas; the first one selects seeds and rates, and with early_stop steps
    labels: str = ""  # names, separated by commas, in the order of the classes; empty: those of the training file
    label_map: str = ""  # what labels of the files mean: LABEL_OF_THE_FILE:LABEL,..., such as 0:NEGATIVE,1:POSITIVE
    positive: str = ""  # classification: the label that f1, precision and recall are of; empty: the second label
    max_length: int = 128  # in tokens, special ones included; longer texts are truncated
    # Pooling for a class, a score or a vector: cls, mean, max, last, and, except for vectors, attention_dot and
    # attention_additive; empty: that of init_from.
    pooling: str = ""
    class_weights: str = ""  # loss weights: balanced, or LABEL=WEIGHT,... (1 for other labels)
    label_smoothing: float = 0.0  # the weight of the uniform distribution in the targets, such as 0.1
    label_subwords: str = ""  # the pieces of a word whose target is its tag: first, all; empty: first
    decode: str = ""  # predicts a word's tag from its first piece (first) or all (mean); empty: first
    crf: bool = False  # adds a linear-chain conditional random field over the tags
    crf_rate: float = 100.0  # the learning rate of its transitions, relative to optimizer.learning_rate
    # Regression and token_regression: trains on (number - mean) / deviation of the training file: yes, no; auto: where
    # the mean or the deviation exceeds 10. Predictions and metrics have the units of the files.
    scale_targets: str = "auto"
    layer_mix: bool = False  # classes, scores and tags from a learned mix of all layers, instead of the last one
    max_span: int = 0  # spans: maximum length in words; 0: the longest of the training file, at most 12
    span_scores: str = ""  # spans: binary (each type independently), classes (at most one); empty: binary
    # spans: the vector of a span. endpoints: the hidden states of its first and last word and the mean of all;
    # boundary: a dense layer for each end instead of its state; content: these, and attention instead of the mean.
    span_vectors: str = "endpoints"
    span_overlap: str = "any"  # spans: predicted spans that overlap: any, nested (not in part), flat (none)
    threshold: float = 0.0  # spans, multilabel: minimum probability of a prediction; 0: the best on dev (of each label)
    relation_threshold: float = 0.0  # span_pairs: minimum probability of a relation; 0: that of no relation
    relations_between: str = ""  # span_pairs: predicted (also trains on spans) or given spans; empty: predicted
    normalize: bool | None = None  # embedding: vectors have length 1; unset: as those of init_from, or else True
    # embedding: put before single texts, and before both texts of pairs with a score; none: no prompt; empty: that of
    # init_from.
    prompt: str = ""
    # embedding: put before text, of pairs without a score; none: no prompt; empty: that of init_from
    query_prompt: str = ""
    # embedding: put before text_pair and negatives, of pairs without a score; none: no prompt; empty: that of init_from
    document_prompt: str = ""
    negatives: str = ""  # embedding: the columns of hard negatives, separated by commas
    loss: str = ""  # embedding: contrastive, cosent; empty: cosent if the training file has scores (label)
    scale: float = 20.0  # embedding: of cosines; the inverse of the temperature
    symmetric: bool = False  # embedding: also finds text by text_pair
    dimensions: tuple[int, ...] = ()  # embedding: Matryoshka, such as (384,128,64); empty: whole vectors
    # embedding: vectors are cut to their first dimensions after training; the model's width: whole vectors; 0: those of
    # init_from, or else whole.
    truncate_dim: int = 0
    submission: str = key("", "file")  # a folder for the leaderboard submission of a named task; empty: none
    max_query_length: int = 64  # question: questions are truncated to this many pieces
    doc_stride: int = 128  # question: pieces between the starts of successive windows of a long context
    n_best: int = 20  # question: answers kept for each question
    max_answer_length: int = 30  # question: in pieces
    # For questions that may have no answer: predict none above this probability of none; unset: the best on dev.
    null_threshold: float | None = key(None, "measured")


@dataclass(frozen=True)
class FinetuneConfig(TrainConfig):
    # Devlin et al. 2019, appendix A.3, tried 2e-5 to 5e-5; a warmup of -1 is a tenth of the run.
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=3e-5, warmup_steps=-1))
    task: TaskConfig = field(default_factory=TaskConfig, metadata=marks("batches"))
    # One number: how many seeds, starting at `seed`; several: the seeds themselves.
    seeds: tuple[int, ...] = key((0,), "free")
    # A sweep over any keys, each setting with all seeds: optimizer.learning_rate=1e-5,3e-5;batch_size=16,32. Values
    # with commas are in parentheses or double quotes: init_layers=(0,2,4),(1,3,5).
    sweep: str = ""
    # A sweep over rates and seeds: 2e-5,3e-5,5e-5; empty: optimizer.learning_rate.
    learning_rates: str = key("", "free")
    early_stop: int = key(0, "end")  # stop after this many evaluations without a better first dev metric; 0: off
    epochs: float = key(3.0, "end")  # the length of the run, if steps and budget_minutes are 0
    # all, head, last:K, no_embeddings; gradual: first the head, then one more layer each epoch; gradual:EPOCHS.
    train_layers: str = "all"
    lora: LoraConfig = field(default_factory=LoraConfig)  # trains adapters and the head alone (docs/adapting.md)
    reinit_layers: int = 0  # the last layers, and the pooler, that begin with random parameters instead of init_from's
    batch_size: int = key(32, "batches")  # global, in rows
    # Groups rows by length within this many steps, which reduces padding; 1: no grouping.
    length_pool: int = key(32, "batches")
    # Batches are padded to at most so many lengths, each compiled once; 0: up to 6, as many as save time on the whole.
    padded_lengths: int = key(0, "batches")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sweep:  # whose settings may have other values
            self._check_lora()

    def _check_lora(self) -> None:
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
