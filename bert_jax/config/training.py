"""The configuration keys of every run: `--config.a.b=value` sets them.

TrainConfig holds what pretraining and fine-tuning share, in groups (data, optimizer, mesh, checkpoint, eval,
distill). PretrainConfig adds the keys of pretraining; config/finetuning.py has those of fine-tuning.
"""

import dataclasses
import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from bert_jax.config.model import ModelOptions
from bert_jax.errors import UserError

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
    keys: list[str] = []
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if mark in item.metadata.get("marks", ()):
            keys.append(item.name)
        elif dataclasses.is_dataclass(value):
            keys += [f"{item.name}.{name}" for name in marked(value, mark)]
    return tuple(keys)


HIDDEN_LOSSES = ("cosine", "mse")
POSITIONS = ("masked", "all")
LAST, UNIFORM = "last", "uniform"
# The keys of each term, which have no effect where its weight is 0.
_OF_TERMS = {"soft_weight": ("temperature", "positions"), "hidden_weight": ("hidden_loss", "layers")}

Pairs = tuple[tuple[int, int], ...]  # (layer of the student, layer of the teacher); 0: the embeddings


@dataclass(frozen=True)
class DistillConfig:
    """What a student learns from a teacher, and the weights of the parts of its loss.

    The loss is hard_weight times the loss without a teacher, plus soft_weight times the soft term, plus hidden_weight
    times the hidden term (bert_jax/train/objectives/distilled.py defines both). Raises UserError for values out of
    range.
    """

    teacher: str = key("", "file")  # any checkpoint; empty: no distillation
    temperature: float = 2.0  # of both softmaxes of the soft term
    soft_weight: float = 1.0  # of the term that compares outputs with the teacher's
    hard_weight: float = 1.0  # of the loss without a teacher
    hidden_weight: float = 0.0  # of the term that compares hidden states; 0: they are not compared
    hidden_loss: str = "cosine"  # of hidden states: cosine (DistilBERT), mse (TinyBERT)
    # The hidden states that are compared: last; uniform, the embeddings and each layer of the student with every Nth of
    # the teacher; or STUDENT:TEACHER,... such as 1:2,2:4,3:6, counted from 1, where 0 are the embeddings.
    layers: str = LAST
    positions: str = "masked"  # of pretraining: the soft term at masked positions, or at all

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise UserError(f"distill.temperature is {self.temperature}. Use a number above 0, such as 2")
        for name in ("soft_weight", "hard_weight", "hidden_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"distill.{name} is {getattr(self, name)}. Use a weight such as 1, or 0 for none")
        for name, known in (("hidden_loss", HIDDEN_LOSSES), ("positions", POSITIONS)):
            if getattr(self, name) not in known:
                raise UserError(f"unknown distill.{name} {getattr(self, name)!r}; choose from {', '.join(known)}")

    def check_unused(self) -> None:
        """Raises UserError for keys that have no effect, and for a teacher from which nothing is learned.

        This is a check of the configuration that is trained: a sweep may set the weight that a key needs.
        """
        defaults = {item.name: item.default for item in fields(self)}
        changed = [name for name, default in defaults.items() if getattr(self, name) != default]
        if not self.teacher:
            if changed:
                raise UserError(
                    f"distill.{changed[0]} is {getattr(self, changed[0])}, but distill.teacher is not set. Name the "
                    "checkpoint of the teacher with --config.distill.teacher=CHECKPOINT"
                )
            return
        if not self.soft_weight and not self.hidden_weight:
            raise UserError(
                "distill.soft_weight and distill.hidden_weight are both 0, so nothing is learned from distill.teacher. "
                "Set one of them, or omit distill.teacher"
            )
        for weight, names in _OF_TERMS.items():
            unused = [name for name in names if name in changed]
            if unused and not getattr(self, weight):
                name = unused[0]
                raise UserError(
                    f"distill.{name} is {getattr(self, name)}, which has no effect with distill.{weight}=0. Set the "
                    f"weight, or leave distill.{name} at {defaults[name]}"
                )

    def pairs(self, student: int, teacher: int) -> Pairs:
        """The hidden states to compare, for a student and a teacher with so many layers; none without hidden_weight.

        Raises UserError for `layers` that name a layer that does not exist, or cannot be read.
        """
        if not self.hidden_weight:
            return ()
        if self.layers == LAST:
            return ((student, teacher),)
        if self.layers == UNIFORM:
            if teacher % student:
                raise UserError(
                    f"distill.layers is {UNIFORM}, but the teacher's {teacher} layers are no multiple of the student's "
                    f"{student}. Name the pairs, such as --config.distill.layers={student}:{teacher}"
                )
            return tuple((layer, layer * teacher // student) for layer in range(student + 1))
        pairs: list[tuple[int, int]] = []
        for part in self.layers.split(","):
            ends = [end.strip() for end in part.split(":")]
            if len(ends) != 2 or not all(end.isdecimal() for end in ends):
                raise UserError(
                    f"distill.layers is {self.layers!r}; use {LAST}, {UNIFORM}, or STUDENT:TEACHER,... such as "
                    f"{student}:{teacher}"
                )
            pairs.append((int(ends[0]), int(ends[1])))
            for whose, layer, layers in zip(("student", "teacher"), pairs[-1], (student, teacher), strict=True):
                if layer > layers:
                    raise UserError(
                        f"distill.layers names layer {layer} of the {whose}, which has {layers}. Use 1 to {layers}, or "
                        "0 for the embeddings"
                    )
        return tuple(pairs)


@dataclass(frozen=True)
class DataConfig:
    train: str = key("", "file")  # the output of bert-jax build-examples, or its train/
    # The output of bert-jax build-examples, or its eval/; empty: the same output as train.
    eval: str = key("", "file", "held_out")
    prefetch: int = key(4, "free")  # batches prepared ahead in a thread

    def __post_init__(self) -> None:
        _check_numbers("data.", least=1, prefetch=self.prefetch)


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
    """The number of devices on each mesh axis; one may be -1: the rest. train/sharding.py says what is sharded."""

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
        _check_numbers("checkpoint.", every_steps=self.every_steps, every_minutes=self.every_minutes)
        _check_numbers("checkpoint.", keep=self.keep, keep_every=self.keep_every)


@dataclass(frozen=True)
class EvalConfig:
    # Steps between held-out evaluations; 0: at the end, in fine-tuning each epoch; -1: at the end.
    every_steps: int = key(0, "free")
    # Rows of a held-out batch; 0: those of one microbatch of training's smallest batch.
    batch_size: int = key(0, "free")
    max_rows: int = key(0, "measured")  # the first held-out rows to evaluate; 0: all

    def __post_init__(self) -> None:
        _check_numbers("eval.", least=-1, every_steps=self.every_steps)
        _check_numbers("eval.", batch_size=self.batch_size, max_rows=self.max_rows)


def _check_numbers(group: str, least: int = 0, **numbers: int | float) -> None:
    for name, value in numbers.items():
        if not value >= least:
            raise UserError(f"config.{group}{name} is {value}. Use a number of at least {least}")


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
        _check_numbers("", steps=self.steps, budget_minutes=self.budget_minutes)
        _check_numbers("", log_every=self.log_every, skip_at_most=self.skip_at_most)

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
