"""The configuration keys of every run: `--config.a.b=value` sets them.

TrainConfig holds the keys that pretraining and fine-tuning share, in groups (data, optimizer, mesh, checkpoint, eval,
distill). PretrainConfig adds the keys of pretraining; config/finetuning.py has those of fine-tuning.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import TypeAlias

from bert_jax.config.model import ModelOptions
from bert_jax.config.options import POSITIVE, RATE, Kinds, Valid, at_least, check, group, option
from bert_jax.errors import UserError

SEEDS = 2**32  # jax.random.key uses the lower 32 bits of a seed, so larger seeds would repeat smaller ones

LAST, UNIFORM = "last", "uniform"
# The keys of each term, which have no effect if its weight is 0.
_TERM_KEYS = {"soft_weight": ("temperature", "positions"), "hidden_weight": ("hidden_loss", "layers")}

Sources: TypeAlias = dict[str, str | tuple[str, float]]  # by name: a folder, or a folder and its share of the rows
Pairs = tuple[tuple[int, int], ...]  # (layer of the student, layer of the teacher); 0: the embeddings


@dataclass(frozen=True)
class DistillConfig:
    """The teacher of a student, and the weights of the loss's terms.

    The loss is hard_weight times the loss without a teacher, plus soft_weight times the soft term, plus hidden_weight
    times the hidden term (bert_jax/train/objectives/distilled.py defines both). Raises UserError for values out of
    range.
    """

    teacher: str = option("", "any checkpoint; empty: no distillation", "file")
    temperature: float = option(2.0, "of both softmaxes of the soft term", valid=POSITIVE)
    soft_weight: float = option(1.0, "weight of the term that compares outputs", valid=at_least(0))
    hard_weight: float = option(1.0, "weight of the loss without a teacher", valid=at_least(0))
    hidden_weight: float = option(0.0, "weight of the term that compares hidden states; 0: none", valid=at_least(0))
    hidden_loss: str = option(
        "cosine", "the loss of hidden states: cosine (DistilBERT), mse (TinyBERT)", choices=("cosine", "mse")
    )
    layers: str | dict[int, int] = option(
        LAST,
        "the hidden states to compare: last; uniform, the embeddings and each layer of the student with every Nth of "
        "the teacher; or pairs {STUDENT: TEACHER}, e.g. {1: 2, 2: 4, 3: 6}, counted from 1; 0 are the embeddings",
    )
    positions: str = option(
        "masked", "pretraining: the soft term's positions, masked or all", choices=("masked", "all")
    )

    def __post_init__(self) -> None:
        check(self, "distill.")

    def check_unused(self) -> None:
        """Checks that every key has an effect, and that something is learned from the teacher.

        This is no part of __post_init__, since a sweep may still set the weight that a key needs.

        Raises:
            UserError: A key has no effect, or no term uses the teacher.
        """
        defaults = {item.name: item.default for item in dataclasses.fields(self)}
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
        for weight, names in _TERM_KEYS.items():
            unused = [name for name in names if name in changed]
            if unused and not getattr(self, weight):
                name = unused[0]
                raise UserError(
                    f"distill.{name} is {getattr(self, name)}, which has no effect with distill.{weight}=0. Set the "
                    f"weight, or leave distill.{name} at {defaults[name]}"
                )

    def pairs(self, student: int, teacher: int) -> Pairs:
        """Pairs the student's hidden states with the teacher's, for comparison; empty without hidden_weight.

        Args:
            student: The student's number of layers.
            teacher: The teacher's number of layers.

        Returns:
            Pairs (student, teacher), counted from 1; 0 is the embeddings.

        Raises:
            UserError: `layers` is malformed or names a layer that does not exist.
        """
        if not self.hidden_weight:
            return ()
        if self.layers == LAST:
            return ((student, teacher),)
        if self.layers == UNIFORM:
            if teacher % student:
                raise UserError(
                    f"distill.layers is {UNIFORM}, but the teacher's {teacher} layers are no multiple of the student's "
                    f"{student}. Name the pairs, such as --config.distill.layers='{{{student}: {teacher}}}'"
                )
            return tuple((layer, layer * teacher // student) for layer in range(student + 1))
        if not isinstance(self.layers, dict) or not self.layers:
            raise UserError(
                f"distill.layers is {self.layers!r}; use {LAST}, {UNIFORM}, or pairs such as {{{student}: {teacher}}}"
            )
        for pair in self.layers.items():
            for whose, layer, layers in zip(("student", "teacher"), pair, (student, teacher), strict=True):
                if not 0 <= layer <= layers:
                    raise UserError(
                        f"distill.layers names layer {layer} of the {whose}, which has {layers}. Use 1 to {layers}, or "
                        "0 for the embeddings"
                    )
        return tuple(self.layers.items())


@dataclass(frozen=True)
class MaskingConfig(Kinds):
    """The choice of the tokens that training predicts, with dynamic masks. Held-out rows have the masks of the shards.

    Extensions add kinds, and their functions to bert_jax.data.masking.choices.MASKINGS.
    """

    def __post_init__(self) -> None:
        check(self, "config.data.masking.")


@dataclass(frozen=True)
class ShardMasking(MaskingConfig, kind="shards"):
    """By the rule of the shards (bert-jax build-examples --mask_unit)."""


@dataclass(frozen=True)
class PretrainDataConfig:
    """Shards, their mixtures and phases, and the rate of dynamic masks in training.

    Without mask_rate and mask_schedule, training uses the rate of the shards, as evaluation always does.
    """

    train: str = option("", "the output of bert-jax build-examples, or its train/", "file")
    eval: str = option(
        "",
        "the output of bert-jax build-examples, or its eval/; empty: the same output as data.train",
        "file",
        "held_out",
    )
    any_part: bool = option(
        False, "read the part that an address names: train from DIR/eval, or evaluate on DIR/train", "free"
    )
    mixture: Sources = option(
        {},
        "several shards instead of data.train, with their shares of the rows: {wiki: ('DIR', 0.7), books: ('DIR', "
        "0.3)}; or {de: 'DIR', th: 'DIR'}, with shares by their numbers of tokens",
        "file",
    )
    mixture_alpha: float = option(
        1.0,
        "exponent of the numbers of tokens that give shares; below 1, shares are more equal",
        "file",  # the resulting shares are compared
        valid=at_least(0),
    )
    phases: dict[int, str | Sources] = option(
        {},
        "shards to use from a step on, possibly of another length: {900000: 'shards_512'}, or a mixture: {900000: "
        "{wiki: ('DIR', 0.5), books: ('DIR', 0.5)}}",
        "file",
    )
    cache_dir: str = option(
        "",
        "a local folder for copies of all shards, if they are in object stores (gs://, s3://) or on slow disks",
        "free",
    )
    cache_bytes: float = option(
        0.0,
        "memory of each process in bytes, such as 8e9, for reading rows in windows from where they are, if they do not "
        "fit a local disk (docs/scaling.md). 0: a full permutation of local shards",
        "file",  # the resulting order of rows is compared
        valid=Valid(
            lambda size: 0 <= size < math.inf,
            "a number of bytes, such as 8e9, or 0 for a full permutation of local shards",
        ),
    )
    masking: MaskingConfig = group(
        ShardMasking, "which tokens training predicts; held-out rows always have the masks of the shards"
    )
    mask_rate: float | None = option(None, "such as 0.2; None: the rate of the shards")
    mask_schedule: dict[int, float] = option({}, "instead of mask_rate, by step: {0: 0.30, 50000: 0.15, 90000: 0.05}")
    mask_shape: str = option("steps", "of mask_schedule: steps (constant between its points) or linear (interpolated)")

    def __post_init__(self) -> None:
        check(self, "config.data.")


@dataclass(frozen=True)
class ScheduleConfig(Kinds):
    """The learning rate relative to its peak: a warmup, then a decay of its own (bert_jax/train/optim.py)."""

    warmup_steps: int = option(
        10_000,
        "steps in which the rate grows from 0 to its peak; -1 (fine-tuning): a tenth of the run",
        valid=at_least(-1),
    )
    warmup_share: float = option(
        0.0,
        "share of the run, instead of warmup_steps",
        valid=Valid(lambda share: 0 <= share < 1, "0 or a share below 1, such as 0.06"),
    )
    warmup_tokens: float = option(
        0.0, "instead of warmup_steps and warmup_share, if config.tokens is the run's length", valid=at_least(0)
    )

    def __post_init__(self) -> None:
        check(self, "optimizer.schedule.")
        if sum(count > 0 for count in (self.warmup_steps, self.warmup_share, self.warmup_tokens)) > 1:
            raise UserError(
                f"optimizer.schedule.warmup_steps is {self.warmup_steps}, warmup_share is {self.warmup_share} and "
                f"warmup_tokens is {self.warmup_tokens:g}, but only one of them can be used. Set the others to 0"
            )


@dataclass(frozen=True)
class DecayingSchedule(ScheduleConfig):
    final_share: float = option(
        0.0,
        "share of the peak rate at the end of the run",
        valid=Valid(lambda share: 0 <= share <= 1, "a share from 0 to 1"),
    )


@dataclass(frozen=True)
class FallingSchedule(DecayingSchedule):
    from_start: bool = option(
        False,
        "fall from the first step of the run, as google-research/bert; False: from the end of the warmup, as "
        "transformers",
    )


@dataclass(frozen=True)
class LinearSchedule(FallingSchedule, kind="linear"):
    """Falls linearly."""


@dataclass(frozen=True)
class CosineSchedule(FallingSchedule, kind="cosine"):
    """Falls as half a cosine (Loshchilov and Hutter 2017)."""


@dataclass(frozen=True)
class WSDSchedule(DecayingSchedule, kind="wsd"):
    """Stays at the peak, then falls as 1 - sqrt (warmup-stable-decay; Hu et al. 2024)."""

    decay_share: float = option(
        0.1,
        "share of the run that is the decay",
        valid=Valid(lambda share: 0 < share <= 1, "a share above 0 and up to 1, such as 0.1"),
    )
    decay_tokens: float = option(0.0, "instead of decay_share, if config.tokens is the run's length", valid=at_least(0))


@dataclass(frozen=True)
class ConstantSchedule(ScheduleConfig, kind="constant"):
    """Stays at the peak."""


@dataclass(frozen=True)
class InverseSqrtSchedule(DecayingSchedule, kind="inverse_sqrt"):
    """Falls as the inverse square root of the step, relative to the warmup (Vaswani et al. 2017)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.warmup_steps or self.warmup_share or self.warmup_tokens):
            raise UserError(
                "optimizer.schedule=inverse_sqrt decays relative to the length of the warmup, but no warmup is "
                "configured. Set --config.optimizer.schedule.warmup_steps or --config.optimizer.schedule.warmup_share"
            )


@dataclass(frozen=True)
class OptimizerConfig(Kinds):
    """The optimizer (bert_jax/train/optim). The defaults are BERT's (Devlin et al. 2019, appendix A.2)."""

    learning_rate: float = option(1e-4, "the peak", valid=at_least(0))
    schedule: ScheduleConfig = group(LinearSchedule, "the learning rate over the run")
    beta1: float = option(0.9, "decay of the mean of gradients", valid=RATE)
    beta2: float = option(0.999, "decay of the mean of their squares", valid=RATE)
    epsilon: float = option(1e-6, "added to the root of that mean", valid=POSITIVE)
    bias_correction: bool = option(
        True, "of Adam's moments; False: as in the original BERT code, whose first steps are larger"
    )
    weight_decay: float = option(
        0.01,
        "multiplied by the learning rate; of all but biases, norms and what `decays` matches",
        valid=at_least(0),
    )
    decays: dict[str, float] = option(
        {}, "weight decay by parameter path: {REGEX: DECAY}, as {'encoder/layers/0/': 0.1}"
    )
    layer_decay: float = option(
        1.0,
        "learning rate of each layer relative to the layer above it",
        valid=Valid(lambda decay: 0 < decay <= 1, "1 (no decay) or a number between 0 and 1"),
    )
    rates: dict[str, float] = option(
        {}, "learning-rate factors by parameter path, on top of layer_decay: {REGEX: FACTOR}; 0 freezes"
    )
    clip_norm: float = option(1.0, "maximum global gradient norm; 0: no clipping", valid=at_least(0))
    ema_decay: float = option(
        0.0, "decay of a moving average of the parameters, evaluated and saved, too; 0: none", valid=RATE
    )

    def __post_init__(self) -> None:
        check(self, "optimizer.")


@dataclass(frozen=True)
class AdamW(OptimizerConfig, kind="adamw"):
    """Adam with decoupled weight decay."""


@dataclass(frozen=True)
class Lamb(OptimizerConfig, kind="lamb"):
    """Adam's step, scaled to the norm of each tensor, for large batches."""


@dataclass(frozen=True)
class Muon(OptimizerConfig, kind="muon"):
    """Orthogonalized momentum for hidden matrices, and AdamW for the rest."""

    momentum: float = option(0.95, "decay of the mean of gradients of hidden matrices", valid=RATE)


@dataclass(frozen=True)
class StableAdamW(OptimizerConfig, kind="stable_adamw"):
    """AdamW with smaller steps when gradients suddenly grow."""


@dataclass(frozen=True)
class ObjectiveConfig(Kinds):
    """The objective of pretraining (bert_jax/train/objectives)."""

    def __post_init__(self) -> None:
        check(self, "config.objective.")


# Default and meaning of a key that several objectives have.
_Z_LOSS = (
    0.0,
    "weight of the mean squared logarithm of the softmax's normalizer, such as 1e-4 (z-loss; Chowdhery et al. 2022, "
    "section 5)",
)


@dataclass(frozen=True)
class AutoObjective(ObjectiveConfig, kind="auto"):
    """mlm, or causal for a causal model, or the encoder's own objective."""


@dataclass(frozen=True)
class MaskedLM(ObjectiveConfig, kind="mlm"):
    """Predicts masked tokens, and next sentences if the shards have labels."""

    next_sentence: bool = option(True, "also predict next sentences, or their order, if the shards have labels")
    span_boundary: bool = option(
        False, "also predict spans from their boundaries (SpanBERT; Joshi et al. 2020, section 3.2)"
    )
    z_loss: float = option(*_Z_LOSS, valid=at_least(0))


@dataclass(frozen=True)
class CausalLM(ObjectiveConfig, kind="causal"):
    """Predicts next tokens."""

    z_loss: float = option(*_Z_LOSS, valid=at_least(0))


@dataclass(frozen=True)
class ReplacedTokens(ObjectiveConfig, kind="replaced_tokens"):
    """Finds the tokens that a generator replaced (ELECTRA; Clark et al. 2020)."""

    generator_size: float = option(
        0.25,
        "width of the generator relative to the model's",
        valid=Valid(lambda size: 0 < size <= 1, "a share above 0 and up to 1, such as 0.25"),
    )
    replaced_weight: float = option(50.0, "weight of the model's loss next to the generator's", valid=at_least(0))


@dataclass(frozen=True)
class Diffusion(ObjectiveConfig, kind="diffusion"):
    """Predicts masked tokens at all mask rates (MDLM; Sahoo et al. 2024)."""


@dataclass(frozen=True)
class Phases(ObjectiveConfig, kind="phases"):
    """Predicts next tokens in some phases of a run and masked tokens in others."""

    phases: dict[int, str] = option(
        {0: "causal", 5000: "mlm"}, "causal and mlm, by the step from which they apply; the last one is mlm"
    )
    z_loss: float = option(*_Z_LOSS, valid=at_least(0))


@dataclass(frozen=True)
class MeshConfig:
    """The number of devices on each mesh axis; one may be -1: the rest. train/sharding.py says what is sharded."""

    data: int = option(-1, "shards the rows of a batch; each device has all parameters", "free")
    fsdp: int = option(1, "shards the rows, the parameters and the optimizer state", "free")
    tensor: int = option(1, "shards the attention heads, the feed-forward width and the vocabulary", "free")
    shard_optimizer: bool = option(False, "shards the optimizer state and the update over data, too", "free")
    # Not "free" like the other keys of the mesh: rounded sums change the results.
    reduce_dtype: str = option(
        "auto",
        "dtype in which devices sum gradients: float32 or bfloat16, which halves the bytes and rounds each sum to 8 "
        "bits. auto: float32, or with one microbatch on a mesh of data alone the compute dtype",
    )


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = option(0, "steps between checkpoints; 0: not by step", valid=at_least(0))
    every_minutes: float = option(10.0, "minutes between checkpoints; 0: not by time", valid=at_least(0))
    keep: int = option(2, "newest checkpoints to keep; 0: all", valid=at_least(0))
    keep_every: int = option(
        0, "also save the steps that this divides, and keep their checkpoints; 0: none", valid=at_least(0)
    )
    best: str = option("", "eval_loss, eval_mlm_accuracy, ...: also save and keep the best checkpoint by this metric")

    def __post_init__(self) -> None:
        check(self, "config.checkpoint.")


@dataclass(frozen=True)
class EvalConfig:
    every_steps: int = option(
        0,
        "steps between held-out evaluations; 0: at the end, in fine-tuning each epoch; -1: at the end",
        "free",
        valid=at_least(-1),
    )
    batch_size: int = option(
        0, "rows of a held-out batch; 0: one microbatch of training's smallest batch", "free", valid=at_least(0)
    )
    max_rows: int = option(0, "held-out rows to evaluate, from the first; 0: all", "measured", valid=at_least(0))

    def __post_init__(self) -> None:
        check(self, "config.eval.")


@dataclass(frozen=True)
class TrainConfig:
    """The keys that pretraining and fine-tuning share. They are a contract (README, configs/)."""

    model: ModelOptions = group(ModelOptions, "the architecture and how to run it")
    optimizer: OptimizerConfig = group(AdamW, "the optimizer")
    mesh: MeshConfig = group(MeshConfig, "devices by mesh axis")
    checkpoint: CheckpointConfig = group(CheckpointConfig, "which checkpoints are saved and kept", "free")
    eval: EvalConfig = group(EvalConfig, "held-out evaluation")
    batch_size: int = option(256, "rows per batch, over all devices", "batches")
    microbatches: int = option(1, "gradient accumulation: parts in which each step processes its batch")
    steps: int = option(0, "length of the run; 0: by budget_minutes, tokens or epochs", "end", valid=at_least(0))
    budget_minutes: float = option(
        0.0, "wall-clock limit; if steps is set too, whichever ends first", "end", valid=at_least(0)
    )
    budget_replay: str = option("", "a workdir or metrics.jsonl whose logged budget fractions replace the clock", "end")
    seed: int = option(
        0,
        "seed of initial parameters, the order of rows, masks and dropout",
        "batches",
        valid=Valid(lambda seed: 0 <= seed < SEEDS, f"a whole number from 0 to {SEEDS - 1}"),
    )
    compute_dtype: str = option(
        "auto", "bfloat16, float32 (matmul precision highest); auto: float32 on CPU, else bfloat16"
    )
    on_nonfinite: str = option(
        "stop",
        "on a non-finite loss or gradient: stop, or skip the step's update",
        "free",
        choices=("stop", "skip"),
    )
    skip_at_most: int = option(10, "updates that a run may skip before it stops", "free", valid=at_least(0))
    log_every: int = option(
        50, "steps between lines of metrics.jsonl and of the log; 0: a line for each step", "free", valid=at_least(0)
    )
    profile: tuple[int, ...] = option(
        (),
        "steps to trace, from the first to before the last: (100, 105); written to WORKDIR/profile (TensorBoard, "
        "Perfetto)",
        "free",
    )
    init_from: str = option("", "any checkpoint; empty: train from scratch", "file")
    init_layers: tuple[int, ...] = option((), "layers of init_from to begin with, from 0, such as (0,2,4); empty: all")
    init_average: str = option(
        "", "of a workdir: ema, or last:K (the mean of its last K checkpoints); empty: no average", "file"
    )
    distill: DistillConfig = group(DistillConfig, "a teacher to learn from (docs/adapting.md)")
    allow_changes: tuple[str, ...] = option(
        (),
        "keys that may differ from those of the resumed checkpoint, e.g. optimizer.learning_rate,seed; or all",
        "free",
    )

    def __post_init__(self) -> None:
        check(self, "config.")
        if self.init_average and not self.init_from:
            raise UserError(
                f"init_average is {self.init_average!r}, but init_from is not set. Omit it, or set init_from"
            )

    def evaluation_rows(self, batch_size: int) -> int:
        """Returns the rows of a held-out batch, before the mesh rounds them up: by default one microbatch.

        Args:
            batch_size: Training's batch size; with a batch_schedule the smallest.
        """
        return self.eval.batch_size or max(batch_size // max(self.microbatches, 1), 1)


@dataclass(frozen=True)
class PretrainConfig(TrainConfig):
    data: PretrainDataConfig = group(PretrainDataConfig, "training and held-out shards", "batches")
    batch_schedule: dict[int, int] = option({}, "instead of batch_size, by step: {0: 256, 10000: 512}", "batches")
    steps: int = option(1_000_000, "length of the run; 0: by budget_minutes or tokens", "end", valid=at_least(0))
    tokens: float = option(
        0.0,
        "length of the run in tokens, such as 5e8, with steps=0. A step counts the tokens that its rows have on "
        "average, before infilling",
        "end",
        valid=Valid(lambda tokens: 0 <= tokens < math.inf, "a number of tokens, such as 5e8, or 0"),
    )
    branch_from: str = option(
        "",
        "WORKDIR/checkpoints/STEP of another run: begin there, with its optimizer state, in a workdir of one's own",
        "file",
    )
    objective: ObjectiveConfig = group(AutoObjective, "what the model learns to predict (docs/pretraining.md)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.branch_from and self.init_from:
            raise UserError(
                "branch_from and init_from are both set. A branch has the parameters of its checkpoint: leave out "
                "init_from, or branch_from to begin with a new optimizer state at step 0"
            )
        # The default of steps counts, too: it could end a run before all tokens are read.
        others = [name for name in ("steps", "budget_minutes", "budget_replay") if getattr(self, name)]
        if self.tokens and others:
            raise UserError(
                f"config.tokens is {self.tokens:g}, but config.{others[0]} is {getattr(self, others[0])}, too; the "
                f"length of a run is one of them. Set --config.{others[0]}={'' if others[0] == 'budget_replay' else 0}"
            )
