"""What a recipe says of a run: the keys that --config.a.b=value sets. They are a contract (README, configs/)."""

from dataclasses import dataclass, field

from bert_jax.command import UserError
from bert_jax.config.model import ModelOptions

ON_NONFINITE = ("stop", "skip")
PRNGS = ("threefry2x32", "rbg")
SEEDS = 2**32  # jax.random.key takes the lower 32 bits of a seed: beyond them another one's parameters would be drawn


@dataclass(frozen=True)
class DataConfig:
    train: str = ""  # the output of data_prep.build_examples, or its train/
    eval: str = ""  # the same, or its eval/; empty: train's
    prefetch: int = 4  # batches prepared ahead, in a thread


@dataclass(frozen=True)
class PretrainDataConfig(DataConfig):
    """Shards in phases, and the rate of dynamic masks in training.

    Without either key of it the rate is that of the shards, as in evaluation always.
    """

    # STEP:DIR,...: from these steps on other shards than train's, perhaps of another length, as 900000:shards_512.
    phases: str = ""
    # A local folder that keeps copies of all these shards, for those in object stores (gs://, s3://) or on slow disks.
    cache_dir: str = ""
    mask_rate: float | None = None  # as 0.2
    mask_schedule: str = ""  # STEP:RATE,..., each rate held until the next step: 0:0.30,50000:0.15,90000:0.05


@dataclass(frozen=True)
class OptimizerConfig:
    """How parameters descend (bert_jax/train/optim); by default as BERT's (Devlin et al. 2019, appendix A.2)."""

    name: str = "adamw"  # adamw, lamb, muon (hidden matrices; adamw for the rest), stable_adamw
    learning_rate: float = 1e-4  # the peak
    warmup_steps: int = 10_000
    warmup_share: float = 0.0  # of the run, in place of steps; the schedule then runs over what is left of the run
    schedule: str = "linear"  # linear, cosine, wsd (flat, then a fall as 1 - sqrt), constant, inverse_sqrt
    decay_share: float = 0.1  # of the run: wsd's fall
    final_share: float = 0.0  # of the peak: where the schedule ends
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-6
    bias_correction: bool = True  # of Adam's moments; False: as the original BERT code, whose first steps are longer
    momentum: float = 0.95  # muon's
    weight_decay: float = 0.01  # times the rate; none on biases and norms
    decays: str = ""  # REGEX=DECAY;...: the weight decay of what matches, as encoder/layers/0/=0.1; layers by number
    layer_decay: float = 1.0  # the rate of each layer by that of the layer above it
    rates: str = ""  # REGEX=FACTOR;...: factors of the rate, beside layer_decay's; 0 freezes
    clip_norm: float = 1.0  # of all gradients together; 0: no clipping
    ema_decay: float = 0.0  # of a moving average of the parameters, which is evaluated and saved too; 0: none


@dataclass(frozen=True)
class MeshConfig:
    """Devices on each axis (train/partitioning.py says what lies over which); -1, once: what the others leave."""

    data: int = -1  # rows of a batch; parameters are whole on each
    fsdp: int = 1  # rows, and parts of the parameters and of the optimizer's state
    tensor: int = 1  # attention heads, inner units of the feed-forward, the vocabulary
    overlap: bool = True  # sums of gradients beside products, where XLA has to be told so (train/compiler.py)


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = 0  # 0: not by steps
    every_minutes: float = 10.0  # 0: not by the clock
    keep: int = 2  # the newest so many; 0: all
    keep_every: int = 0  # those of steps that this divides stay for good; 0: none
    best: str = ""  # eval_loss, eval_mlm_accuracy ...: the best by it stays too, saved as soon as it is measured


@dataclass(frozen=True)
class EvalConfig:
    every_steps: int = 0  # 0: at the end only
    batch_size: int = 0  # 0: that of training, the smallest of a batch_schedule
    max_rows: int = 0  # 0: all


@dataclass(frozen=True)
class TrainConfig:
    """What pretraining and fine-tuning share. Keys are a contract (README, configs/)."""

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    batch_size: int = 256  # global, in rows
    microbatches: int = 1  # gradient accumulation: each step runs this many parts of the batch
    steps: int = 0
    budget_minutes: float = 0.0  # wall-clock; with steps too, whichever ends first
    budget_replay: str = ""  # a metrics.jsonl whose logged budget fractions are followed instead of the clock
    seed: int = 0
    compute_dtype: str = "auto"  # bfloat16, float32 (matmul precision highest); auto: bfloat16 but on CPU
    prng: str = "threefry2x32"  # of first parameters and dropout's seeds; rbg may draw others on another mesh
    on_nonfinite: str = "stop"  # at a loss or gradient that is not finite; skip: leave that step's update out
    skip_at_most: int = 10  # steps of a run whose updates are left out before it stops
    log_every: int = 50
    profile: str = ""  # steps to trace, FIRST:LAST, as 100:105, into WORKDIR/profile (TensorBoard, Perfetto)
    init_from: str = ""  # any checkpoint; empty: from scratch
    init_average: str = ""  # of a workdir: ema, last:K (the mean of its last K checkpoints); empty: as they are
    # Keys that may differ from those of the checkpoint that a run goes on from: optimizer.learning_rate,seed; or all.
    allow_changes: str = ""

    def __post_init__(self) -> None:
        if self.init_average and not self.init_from:
            raise UserError(f"init_average is {self.init_average!r}, but init_from is not set; leave it out")
        if not 0 <= self.seed < SEEDS:
            raise UserError(f"config.seed is {self.seed}; use a whole number from 0 to {SEEDS - 1}")
        if self.prng not in PRNGS:
            raise UserError(f"config.prng is {self.prng!r}; use one of: {', '.join(PRNGS)}")
        if self.on_nonfinite not in ON_NONFINITE:
            raise UserError(f"config.on_nonfinite is {self.on_nonfinite!r}; use one of: {', '.join(ON_NONFINITE)}")
        if self.skip_at_most < 0:
            raise UserError(f"config.skip_at_most is {self.skip_at_most}; use a number of steps, 0 or more")


@dataclass(frozen=True)
class PretrainConfig(TrainConfig):
    data: PretrainDataConfig = field(default_factory=PretrainDataConfig)
    batch_schedule: str = ""  # STEP:ROWS,..., in the place of batch_size: 0:256,10000:512
    steps: int = 1_000_000
    objective: str = "auto"  # mlm, with next sentences where the shards have labels; causal; auto: what the model can
    span_boundary: bool = False  # masked spans from their boundaries, too (SpanBERT; Joshi et al. 2020, section 3.2)


@dataclass(frozen=True)
class TaskConfig:
    """A task by name (bert_jax/tasks), or files and columns of the user's own."""

    name: str = ""
    data_dir: str = ""  # the folder of a named task's files, or tfds: and a name; empty: $BERT_JAX_DATA
    train: str = ""
    dev: str = ""
    test: str = ""
    text: str = ""  # column, by header name or number from 0
    text_pair: str = ""
    label: str = ""
    marks: str = ""  # where a word of each text is asked about: columns of its first character and its end, a,b,...
    choices: str = ""  # of multiple choice: their columns, parted by commas, or one that holds a list
    # classification, regression, choice, tagging, token_regression, question, spans, span_pairs
    kind: str = ""
    max_length: int = 128
    # How a class or a score reads a text: cls, mean, max, attention_dot, attention_additive; empty: as init_from does.
    pooling: str = ""
    class_weights: str = ""  # of the loss: balanced, or LABEL=WEIGHT,... (labels that are not named weigh 1)
    label_smoothing: float = 0.0  # the share of the uniform distribution in the truth, as 0.1
    label_subwords: str = ""  # which pieces of a word learn its tag: first, all; empty: first
    decode: str = ""  # what a word's tag is read from: first (its first piece), mean (of all its pieces); empty: first
    crf: bool = False  # tags of words depend on those beside them (a linear chain)
    max_span: int = 0  # of spans: the words of the longest that is looked for; 0: as the training file's, at most 12
    span_scores: str = ""  # of spans: binary (yes or no to each type), classes (one of them, or none); empty: binary
    threshold: float = 0.0  # the probability from which a span is one; 0: what is best on dev
    relations_between: str = ""  # of span_pairs: predicted spans (learnt, too), or given ones; empty: predicted
    submission: str = ""  # a folder for the files that the leaderboard of a named task takes; empty: none
    max_query_length: int = 64  # what is kept of a question, in pieces
    doc_stride: int = 128  # from one window of a long context to the next, in pieces
    n_best: int = 20  # answers that are kept of a question
    max_answer_length: int = 30  # in pieces
    # Of questions that may have no answer: its probability, 0 to 1, above which there is none; unset: best on dev.
    null_threshold: float | None = None


@dataclass(frozen=True)
class FinetuneConfig(TrainConfig):
    # Devlin et al. 2019, appendix A.3, tried 2e-5 to 5e-5; a warmup of -1 is a tenth of the run.
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=3e-5, warmup_steps=-1))
    task: TaskConfig = field(default_factory=TaskConfig)
    seeds: tuple[int, ...] = (0,)  # one number: how many, from `seed` on; several: the seeds themselves
    learning_rates: str = ""  # a sweep, each with each seed: 2e-5,3e-5,5e-5; empty: optimizer.learning_rate
    run_together: str = "auto"  # all these runs in one program: yes, no; auto: on an accelerator that holds them
    early_stop: int = 0  # evaluations without a better first dev metric (or checkpoint.best) that end a run; 0: none
    epochs: float = 3.0
    # all, head, last:k, no_embeddings; gradual: the head first, one more layer each epoch; gradual:EPOCHS for each.
    train_layers: str = "all"
    batch_size: int = 32
    length_pool: int = 32  # steps whose rows are grouped by length, so that little is padding; 1: as they come
