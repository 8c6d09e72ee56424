"""The systems that benchmarks/lineage.py compares, and the configuration of each at the same number of parameters."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bert_jax.config import (
    CheckpointConfig,
    EvalConfig,
    ModelConfig,
    ModelOptions,
    OptimizerConfig,
    PretrainConfig,
    PretrainDataConfig,
)
from bert_jax.model import paths, sizes
from bert_jax.planning.compile import AbstractStep, RowSpec
from bert_jax.planning.program import count_flops
from bert_jax.planning.topology import CHIPS, Topology
from bert_jax.train.objectives import Objective, pretraining_objective
from bert_jax.train.objectives.pretraining import ShardTraits
from bert_jax.vocabulary import Vocabulary

REFERENCE = "bert"  # the system whose number of parameters the others match
MULTIPLE = 8  # of the widths that are searched: the floats of a vector register
MOST_WIDTH = 4096
HEAD_WIDTH = 32
# The peak rates: of a small encoder (1e-3 in configs/bert_tiny.py), and of the models without attention.
RATE, RECURRENT_RATE = 1e-3, 2e-3

# The data sets: the options of build_examples that differ from `single`, whose text and held-out documents all have.
SHARDS: dict[str, dict[str, Any]] = {
    "single": {"objective": "single"},
    "spans": {"objective": "single", "mask_unit": "span"},
    "nsp": {"objective": "nsp"},
    "sop": {"objective": "sop", "mask_unit": "ngram"},
}


def setting(default: Any, help: str) -> Any:
    """A field with the help text of its command-line flag."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Settings:
    """What determines the numbers. A folder of results belongs to one value of it."""

    budget_minutes: float = setting(10.0, "minutes of pretraining of each system")
    steps: int = setting(0, "steps of each system instead of minutes: a row again on a machine of another speed")
    seeds: int = setting(3, "runs of each fine-tuning")
    text: str = setting("", "files to pretrain on, patterns separated by commas (default: wiki_en_0 and books_en_0)")
    eval_fraction: float = setting(0.01, "share of the documents that is held out")
    vocab_size: int = setting(8192, "tokens of the vocabulary, which is trained on the text")
    length: int = setting(128, "positions of a row")
    layers: int = setting(3, "layers of the Transformers")
    width: int = setting(128, "width of the Transformers; that of the other systems follows from their parameters")
    batch_size: int = setting(32, "rows of a pretraining batch")
    epochs: float = setting(2.0, "epochs of a fine-tuning")
    sst2_examples: int = setting(5000, "training examples of SST-2, evenly spaced in its file")
    pseudo_rows: int = setting(64, "held-out rows, evenly spaced, of the pseudo-perplexity")


@dataclass(frozen=True)
class System:
    """A row of the table.

    source    the paper that it follows
    preset    a name in bert_jax/model/sizes.py
    chart     the chart in which its curves are, and the logged losses that they show
    shards    a key of SHARDS
    model     changes to the preset, on top of those that all systems of its encoder have
    search    the field of the model that is chosen so that it has as many parameters as REFERENCE; empty: none
    rate      the peak rate; 0: RATE, or RECURRENT_RATE for models without attention
    training  the objective and its options
    """

    name: str
    title: str
    source: str
    preset: str
    chart: str
    losses: tuple[str, ...] = ("mlm_loss",)
    shards: str = "single"
    model: Mapping[str, Any] = field(default_factory=dict)
    search: str = ""
    rate: float = 0.0
    training: Mapping[str, Any] = field(default_factory=dict)


NEXT, BOTH = "Next tokens", "Next tokens, in both directions"
MASKED, OTHER = "Masked tokens", "Masked spans, masks of ELECTRA's generator, and diffusion"
SYSTEMS = (
    System("feed_forward", "Feed-forward", "Bengio et al. 2003", "feed_forward_lm", NEXT, ("lm_loss",), search="width"),
    System("rnn", "RNN", "Elman 1990", "rnn", NEXT, ("lm_loss",), search="width"),
    System(
        "lstm",
        "LSTM",
        "Zaremba et al. 2014",
        "lstm_medium",
        NEXT,
        ("lm_loss",),
        # Two layers of gates make a small signal smaller: with the others' values it learns token frequencies only.
        model={"initializer_range": 0.2},
        search="width",
        rate=5e-3,
    ),
    System(
        "bilm",
        "biLM (ELMo)",
        "Peters et al. 2018",
        "elmo_small",
        BOTH,
        ("forward_lm_loss", "backward_lm_loss"),
        search="cell_width",
    ),
    System("gpt", "GPT-2-style", "Radford et al. 2019", "gpt2", NEXT, ("lm_loss",)),
    System("bert", "BERT", "Devlin et al. 2019", "tiny", MASKED, shards="nsp"),
    System("roberta", "RoBERTa-style", "Liu et al. 2019", "roberta_base", MASKED),
    System(
        "spanbert",
        "SpanBERT-style",
        "Joshi et al. 2020",
        "spanbert_base",
        OTHER,
        shards="spans",
        training={"span_boundary": True},
    ),
    System("albert", "ALBERT", "Lan et al. 2020", "albert_base_v2", MASKED, shards="sop", search="width"),
    System("electra", "ELECTRA", "Clark et al. 2020", "electra_base", OTHER, training={"objective": "replaced_tokens"}),
    System(
        "modernbert",
        "ModernBERT-style",
        "Warner et al. 2024",
        "modernbert_base",
        MASKED,
        model={"rotary_base": 10_000.0, "global_every": 3},
        training={"data": {"mask_rate": 0.3}},
    ),
    System(
        "diffusion",
        "Masked diffusion",
        "Sahoo et al. 2024",
        "tiny",
        OTHER,
        ("mdm_loss",),
        model={"segment_types": 0},
        training={"objective": "diffusion"},
    ),
)
NAMES = tuple(system.name for system in SYSTEMS)


def named(name: str) -> System:
    return SYSTEMS[NAMES.index(name)]


@dataclass(frozen=True)
class Sized:
    """A system at its size: its configuration without data and folders, its model and its objective."""

    config: PretrainConfig
    model: ModelConfig
    objective: Objective

    @functools.cached_property
    def parameters(self) -> dict[str, int]:
        """The number of trained parameters: all of them, and those of the token table."""
        shapes = paths.flatten(jax.eval_shape(lambda key: self.objective.init(self.model, key), jax.random.key(0)))
        table = shapes["embeddings/token/table"].size
        return {"all": sum(leaf.size for leaf in shapes.values()), "token_table": table}

    def step_flops(self, rows: RowSpec) -> float:
        """FLOPs of the matmuls of a training step, counted in its program (bert_jax/planning/program.py).

        The formula of bert_jax/train/metrics.py does not fit all systems alike: masked language models compute their
        last layer at the masked positions only.
        """
        one = Topology("one device", CHIPS["v5e"], tuple(jax.local_devices()[:1]), (1, 1))  # any chip: same program
        return count_flops(AbstractStep.of(self.config, one, rows).traced().jaxpr).total


def sized(system: System, settings: Settings, vocabulary: Vocabulary) -> Sized:
    """The system with the number of parameters of REFERENCE, as near as the searched field permits."""
    if not system.search:
        return _at(system, settings, vocabulary, 0)
    target = _at(named(REFERENCE), settings, vocabulary, 0).parameters["all"]

    # The number is a parabola in the width, so three widths give all others.
    known = [MULTIPLE * multiple for multiple in (8, 16, 24)]
    parabola = np.polyfit(known, [_at(system, settings, vocabulary, size).parameters["all"] for size in known], 2)
    sizes_tried = np.arange(MULTIPLE, MOST_WIDTH + 1, MULTIPLE)
    nearest = np.abs(np.polyval(parabola, sizes_tried) - target).argmin()
    return _at(system, settings, vocabulary, int(sizes_tried[nearest]))


def _at(system: System, settings: Settings, vocabulary: Vocabulary, size: int) -> Sized:
    """The system with this value of its searched field."""
    config = _config(system, settings, size)
    model = sizes.model_config(config.model, vocabulary.vocab_size)
    labelled, unit = system.shards in ("nsp", "sop"), SHARDS[system.shards].get("mask_unit", "token")
    traits = ShardTraits(system.shards, labelled, unit, vocabulary)
    return Sized(config, model, pretraining_objective(config, model, [traits]))


def _config(system: System, settings: Settings, size: int) -> PretrainConfig:
    architecture = sizes.PRESETS[system.preset]
    changes: dict[str, Any] = {"max_positions": settings.length, "dropout": 0.0}
    recurrent = architecture.get("encoder", "transformer") != "transformer"
    if recurrent:
        width = size if system.search == "width" else settings.width
        changes |= {"tied_output": True, "width": width, "initializer_range": 1 / math.sqrt(3 * width)}  # as torch.nn's
        if system.search != "width":
            changes |= {"width": 2 * width, system.search: size}  # half of it for each direction
    else:
        width = size or settings.width
        factor = 8 / 3 if architecture.get("gated") else 4  # a gate is a third matrix
        changes |= {
            "layers": settings.layers,
            "width": width,
            "heads": max(settings.width // HEAD_WIDTH, 1),
            "feed_forward": round(width * factor / MULTIPLE) * MULTIPLE,
        }
        if "embedding_width" in architecture:
            changes["embedding_width"] = settings.width
        if "window" in architecture:
            changes["window"] = settings.length // 8
        if system.shards not in ("nsp", "sop"):
            changes["segment_types"] = 0  # no row has a second segment
    training = dict(system.training)
    data = training.pop("data", {})
    return PretrainConfig(
        model=ModelOptions(preset=system.preset, **(changes | dict(system.model))),
        data=PretrainDataConfig(**data),
        optimizer=OptimizerConfig(
            learning_rate=system.rate or (RECURRENT_RATE if recurrent else RATE), warmup_steps=0, warmup_share=0.1
        ),
        checkpoint=CheckpointConfig(every_minutes=1.0, keep=1),
        eval=EvalConfig(batch_size=64),
        batch_size=settings.batch_size,
        log_every=1_000_000,  # a line for each hundredth of the budget
        **training,
    )


def trained_in(config: PretrainConfig, shards: Path, settings: Settings) -> PretrainConfig:
    """The configuration of a run of the settings' minutes, or steps, on the shards."""
    data = dataclasses.replace(config.data, train=str(shards))
    if settings.steps:
        return dataclasses.replace(config, data=data, steps=settings.steps, log_every=max(settings.steps // 100, 1))
    return dataclasses.replace(config, data=data, steps=0, budget_minutes=settings.budget_minutes)


def warmed_up_in(config: PretrainConfig, shards: Path) -> PretrainConfig:
    """The configuration of a run of one step, which compiles the step of the other run."""
    data = dataclasses.replace(config.data, train=str(shards))
    return dataclasses.replace(config, data=data, steps=1, eval=EvalConfig(batch_size=64, max_rows=64))
