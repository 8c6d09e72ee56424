"""The configuration of a run: the keys that --config.a.b=value sets. They are a contract (README, configs/)."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from bert_jax.command import UserError
from bert_jax.config.distill import DistillConfig
from bert_jax.config.lora import LoraConfig
from bert_jax.config.model import ModelOptions

ON_NONFINITE = ("stop", "skip")
SEEDS = 2**32  # jax.random.key uses the lower 32 bits of a seed, so larger seeds would repeat smaller ones

# What a change of a key means for a run that resumes (train/workdir.py). A key without a mark must have the value of
# the checkpoint, unless allow_changes names it. A mark of a group is one of all its keys.
#   free      no number of the run depends on it: it may change
#   end       it decides when the run ends: it may change, which is reported, since the learning rate depends on it
#   file      it names files: the fingerprint of what was read is compared instead
#   measured  it changes held-out metrics only: it may change unless checkpoint.best compares them
#   held_out  it names held-out data
#   batches   it decides the batch of a step (law 1): when it changes, the log says from which step on
Mark = Literal["free", "end", "file", "measured", "held_out", "batches"]


def marks(*given: Mark) -> dict[str, Any]:
    """Returns the metadata of a dataclass field that has these marks."""
    return {"marks": given}


def key(default: Any, *given: Mark) -> Any:
    """Returns a dataclass field with this default and these marks."""
    return field(default=default, metadata=marks(*given))


def marked(config: Any, mark: Mark) -> tuple[str, ...]:
    """Returns the keys and groups of a configuration that have a mark, such as mesh.data."""
    found: list[str] = []
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if mark in item.metadata.get("marks", ()):
            found.append(item.name)
        elif dataclasses.is_dataclass(value):
            found += [f"{item.name}.{name}" for name in marked(value, mark)]
    return tuple(found)


@dataclass(frozen=True)
class DataConfig:
    train: str = key("", "file")  # the output of bert-jax build-examples, or its train/
    # The output of bert-jax build-examples, or its eval/; empty: the same output as train.
    eval: str = key("", "file", "held_out")
    prefetch: int = key(4, "free")  # batches prepared ahead in a thread

    def __post_init__(self) -> None:
        _check_numbers("data", least=1, prefetch=self.prefetch)


@dataclass(frozen=True)
class PretrainDataConfig(DataConfig):
    """Mixtures and phases of shards, and the rate of dynamic masks in training.

    Without mask_rate and mask_schedule, training uses the rate of the shards, as evaluation always does.
    """

    # Instead of train: several shards, with their shares of the rows (wiki=DIR:0.7,books=DIR:0.3), or with shares by
    # their numbers of tokens to a power (de=DIR,th=DIR:alpha=0.3).
    mixture: str = key("", "file")
    # STEP:DIR,...: shards to use from these steps on, possibly of another length, such as 900000:shards_512. A phase
    # may be a mixture, too: 900000:wiki=DIR:0.5,books=DIR:0.5
    phases: str = key("", "file")
    # A local folder for copies of all shards, if they are in object stores (gs://, s3://) or on slow disks.
    cache_dir: str = key("", "free")
    # Memory in bytes, such as 8e9, for reading rows in windows from where they are, if they do not fit a local disk
    # (docs/scaling.md); of all processes together. It decides the order of rows. 0: a full permutation of local shards.
    cache_bytes: float = 0.0
    mask_rate: float | None = None  # such as 0.2; None: the rate of the shards
    mask_schedule: str = ""  # STEP:RATE,..., such as 0:0.30,50000:0.15,90000:0.05
    mask_shape: str = "steps"  # of mask_schedule: steps (constant between its points) or linear (interpolated)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.cache_bytes < math.inf:
            raise UserError(
                f"config.data.cache_bytes is {self.cache_bytes}. Use a number of bytes, such as 8e9, or 0 for a full "
                "permutation of local shards"
            )


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer (bert_jax/train/optim). The defaults are BERT's (Devlin et al. 2019, appendix A.2)."""

    name: str = "adamw"  # adamw, lamb, muon (hidden matrices; adamw for the rest), stable_adamw
    learning_rate: float = 1e-4  # the peak
    warmup_steps: int = 10_000  # in which the rate grows from 0 to its peak; -1 (fine-tuning): a tenth of the run
    warmup_share: float = 0.0  # share of the run, instead of warmup_steps; the schedule covers the rest
    schedule: str = "linear"  # linear, cosine, wsd (constant, then a decay as 1 - sqrt), constant, inverse_sqrt
    decay_share: float = 0.1  # share of the run: the decay of wsd
    warmup_tokens: float = 0.0  # instead of warmup_steps and warmup_share, where config.tokens is the run's length
    decay_tokens: float = 0.0  # instead of decay_share, where config.tokens is the run's length
    final_share: float = 0.0  # share of the peak rate at the end of the schedule
    beta1: float = 0.9  # the decay of the mean of gradients
    beta2: float = 0.999  # the decay of the mean of their squares
    epsilon: float = 1e-6  # added to the root of that mean
    bias_correction: bool = True  # of Adam's moments; False: as in the original BERT code, whose first steps are larger
    momentum: float = 0.95  # of muon: the decay of the mean of gradients
    weight_decay: float = 0.01  # multiplied by the learning rate; of all but biases, norms and what decays matches
    decays: str = ""  # REGEX=DECAY;...: weight decay by parameter path, such as encoder/layers/0/=0.1
    layer_decay: float = 1.0  # learning rate of each layer relative to the layer above it
    rates: str = ""  # REGEX=FACTOR;...: learning-rate factors by parameter path, on top of layer_decay; 0 freezes
    clip_norm: float = 1.0  # maximum global gradient norm; 0: no clipping
    ema_decay: float = 0.0  # of a moving average of the parameters, also evaluated and saved; 0: none


@dataclass(frozen=True)
class MeshConfig:
    """The number of devices on each mesh axis; one may be -1: the rest. train/partitioning.py says what is sharded."""

    data: int = key(-1, "free")  # shards the rows of a batch; each device has all parameters
    fsdp: int = key(1, "free")  # shards the rows, the parameters and the optimizer state
    tensor: int = key(1, "free")  # shards the attention heads, the feed-forward width and the vocabulary
    shard_optimizer: bool = key(False, "free")  # shards the optimizer state and the update over data, too
    # float32 or bfloat16, of gradients while devices sum them; bfloat16 halves the bytes and rounds each sum to 8 bits.
    # auto: float32, or with one microbatch on a mesh of data alone the compute dtype.
    reduce_dtype: str = "auto"


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = 0  # steps between checkpoints; 0: not by step
    every_minutes: float = 10.0  # minutes between checkpoints; 0: not by time
    keep: int = 2  # the number of newest checkpoints to keep; 0: all
    keep_every: int = 0  # also save the steps that this divides, and keep their checkpoints; 0: none
    best: str = ""  # eval_loss, eval_mlm_accuracy, ...: also save and keep the best checkpoint by this metric

    def __post_init__(self) -> None:
        _check_numbers("checkpoint", every_steps=self.every_steps, every_minutes=self.every_minutes)
        _check_numbers("checkpoint", keep=self.keep, keep_every=self.keep_every)


@dataclass(frozen=True)
class EvalConfig:
    # Steps between held-out evaluations; 0: at the end, in fine-tuning each epoch; -1: at the end.
    every_steps: int = key(0, "free")
    # Rows of a held-out batch; 0: those of one microbatch of training's smallest batch.
    batch_size: int = key(0, "free")
    max_rows: int = key(0, "measured")  # the first held-out rows to evaluate; 0: all

    def __post_init__(self) -> None:
        _check_numbers("eval", least=-1, every_steps=self.every_steps)
        _check_numbers("eval", batch_size=self.batch_size, max_rows=self.max_rows)


def _check_numbers(group: str, least: int = 0, **numbers: int | float) -> None:
    for name, value in numbers.items():
        if not value >= least:
            raise UserError(f"config.{group}.{name} is {value}. Use a number of at least {least}")


@dataclass(frozen=True)
class TrainConfig:
    """The keys that pretraining and fine-tuning share. They are a contract (README, configs/)."""

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataConfig = field(default_factory=DataConfig, metadata=marks("batches"))
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig, metadata=marks("free"))
    eval: EvalConfig = field(default_factory=EvalConfig)
    batch_size: int = key(256, "batches")  # global, in rows
    microbatches: int = 1  # gradient accumulation: each step processes the batch in this many parts
    steps: int = key(0, "end")  # the length of the run; 0: by budget_minutes, tokens or epochs
    budget_minutes: float = key(0.0, "end")  # wall-clock limit; if steps is set too, whichever ends first
    budget_replay: str = key("", "end")  # a workdir or metrics.jsonl whose logged budget fractions replace the clock
    seed: int = key(0, "batches")  # of initial parameters, the order of rows, masks and dropout
    compute_dtype: str = "auto"  # bfloat16, float32 (matmul precision highest); auto: float32 on CPU, else bfloat16
    on_nonfinite: str = key("stop", "free")  # on a non-finite loss or gradient: stop, or skip the update of that step
    skip_at_most: int = key(10, "free")  # updates that a run may skip before it stops
    log_every: int = key(50, "free")  # steps between lines of metrics.jsonl and of the log; 0: a line for each step
    # Steps to trace, FIRST:LAST, such as 100:105; written to WORKDIR/profile (TensorBoard, Perfetto).
    profile: str = key("", "free")
    init_from: str = key("", "file")  # any checkpoint; empty: train from scratch
    init_layers: tuple[int, ...] = ()  # the layers of init_from to begin with, from 0, such as (0,2,4); empty: all
    # Of a workdir: ema, last:K (the mean of its last K checkpoints); empty: no average.
    init_average: str = key("", "file")
    distill: DistillConfig = field(default_factory=DistillConfig)  # a teacher to learn from (docs/adapting.md)
    # Keys that may differ from those of the checkpoint that is resumed: optimizer.learning_rate,seed; or all.
    allow_changes: str = key("", "free")

    def __post_init__(self) -> None:
        if self.init_average and not self.init_from:
            raise UserError(
                f"init_average is {self.init_average!r}, but init_from is not set. Omit it, or set init_from"
            )
        if not 0 <= self.seed < SEEDS:
            raise UserError(f"config.seed is {self.seed}. Use a whole number from 0 to {SEEDS - 1}")
        if self.on_nonfinite not in ON_NONFINITE:
            raise UserError(f"unknown config.on_nonfinite {self.on_nonfinite!r}; choose from {', '.join(ON_NONFINITE)}")
        for name in ("steps", "budget_minutes", "log_every"):
            if not getattr(self, name) >= 0:
                raise UserError(f"config.{name} is {getattr(self, name)}. Use a number of at least 0")
        if self.skip_at_most < 0:
            raise UserError(f"config.skip_at_most is {self.skip_at_most}. Use a number of steps of at least 0")

    def evaluation_rows(self, batch_size: int) -> int:
        """Returns the rows of a held-out batch, before the mesh rounds them up: by default those of one microbatch.

        batch_size   of training; with a batch_schedule its smallest
        """
        return self.eval.batch_size or max(batch_size // max(self.microbatches, 1), 1)


@dataclass(frozen=True)
class PretrainConfig(TrainConfig):
    data: PretrainDataConfig = field(default_factory=PretrainDataConfig, metadata=marks("batches"))
    batch_schedule: str = key("", "batches")  # STEP:ROWS,..., instead of batch_size, such as 0:256,10000:512
    steps: int = key(1_000_000, "end")  # the length of the run; 0: by budget_minutes or tokens
    # The length of the run in tokens, such as 5e8, with steps=0. Steps count as many as their rows have on average,
    # before infilling.
    tokens: float = key(0.0, "end")
    # WORKDIR/checkpoints/STEP of another run: begin there, with its optimizer state, in a workdir of one's own.
    branch_from: str = key("", "file")
    # mlm, with next sentences where the shards have labels; causal; bidirectional_lm (ELMo); replaced_tokens (ELECTRA);
    # diffusion (MDLM); auto: mlm, causal or bidirectional_lm, as the model can. STEP:NAME,... for phases of causal and
    # mlm, such as 0:causal,5000:mlm
    objective: str = "auto"
    next_sentence: bool = True  # of mlm: also predict next sentences, or their order, where the shards have labels
    generator_size: float = 0.25  # of replaced_tokens: width of the generator relative to the model's
    replaced_weight: float = 50.0  # of replaced_tokens: weight of the model's loss next to the generator's
    # Of mlm and causal: weight of the mean squared logarithm of the softmax's normalizer, such as 1e-4 (z-loss of
    # Chowdhery et al. 2022, section 5)
    z_loss: float = 0.0
    span_boundary: bool = False  # also predict spans from their boundaries (SpanBERT; Joshi et al. 2020, section 3.2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.branch_from and self.init_from:
            raise UserError(
                "branch_from and init_from are both set. A branch has the parameters of its checkpoint: leave out "
                "init_from, or branch_from to begin with a new optimizer state at step 0"
            )
        if not 0 <= self.tokens < math.inf:
            raise UserError(f"config.tokens is {self.tokens}. Use a number of tokens, such as 5e8, or 0")
        others = [name for name in ("steps", "budget_minutes", "budget_replay") if getattr(self, name)]
        if self.tokens and others:
            raise UserError(
                f"config.tokens is {self.tokens:g}, but config.{others[0]} is {getattr(self, others[0])}, too; the "
                f"length of a run is one of them. Set --config.{others[0]}={'' if others[0] == 'budget_replay' else 0}"
            )


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
