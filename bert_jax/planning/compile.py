"""Compiles a recipe's train step for devices that this machine lacks, without allocating any array.

`RowSpec` and `with_architecture` complete a recipe, `AbstractStep` builds the step as training does, but with abstract
arrays, and `compile_step` compiles it and reports its memory.
"""

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bert_jax.config import ModelConfig, ModelOptions, PretrainConfig
from bert_jax.data.example import Batch, max_predictions
from bert_jax.data.loader import batch_predictions
from bert_jax.data.phases import open_phases
from bert_jax.data.schedules import mask_rates
from bert_jax.errors import UserError
from bert_jax.interop.initial import architecture, open_initial
from bert_jax.model import sizes
from bert_jax.planning import program as programs
from bert_jax.planning.topology import GIB, Topology
from bert_jax.storage.remote import first_line
from bert_jax.train import optim
from bert_jax.train import sharding as partitioning
from bert_jax.train.objectives import pretraining_objective
from bert_jax.train.objectives.pretraining import ShardTraits
from bert_jax.train.rules import Trained
from bert_jax.train.run import make_runtime
from bert_jax.train.step import Plan, initial_state, jitted

BERT_VOCABULARY = 30522  # bert-base-uncased
MASK_RATE = 0.15  # Devlin et al. 2019, section 3.1
USUAL_LENGTH = 512


@dataclass(frozen=True)
class RowSpec:
    """The shape of batches."""

    seq_len: int  # T
    pack: int  # S
    predictions: int  # M
    vocab_size: int  # V
    labelled: bool  # whether sequences are pairs with a label
    filled: float | None = None  # share of positions that hold a token, by the manifest; None without shards

    @classmethod
    def of(cls, config: PretrainConfig, seq_len: int | None, vocab_size: int | None) -> "RowSpec":
        """Reads the shape from the manifests of data.train or data.mixture, if the recipe has these.

        Args:
            seq_len: Positions, if the recipe has no shards.
            vocab_size: Tokens in the vocabulary, if the recipe has no shards.

        Raises:
            UserError: Shards cannot be read or differ from seq_len or vocab_size, or a mask rate is invalid.
        """
        rates = mask_rates(config.data.mask_rate, config.data.mask_schedule, config.data.mask_shape)
        source = config.data.train or ", ".join(config.data.mixture)
        if not source:
            words = vocab_size or BERT_VOCABULARY
            length = seq_len or min(USUAL_LENGTH, sizes.model_config(config.model, words).max_positions)
            rate = MASK_RATE if rates is None else max(rates.values)
            return cls(length, 1, max_predictions(length, 1, rate), words, labelled=True)
        [phase] = open_phases(dataclasses.replace(config.data, phases={}), only_manifests=True)
        data = phase.mixture.dataset  # all sources of a mixture have rows of one shape
        for flag, given, stored, unit in (
            ("--seq_len", seq_len, data.seq_len, "positions in a row"),
            ("--vocab_size", vocab_size, data.vocab_size, "tokens in the vocabulary"),
        ):
            if given not in (None, stored):
                raise UserError(f"{flag} is {given}, but {source} has {stored} {unit}; omit {flag}")
        predictions = batch_predictions(data, rates)
        return cls(data.seq_len, data.pack, predictions, data.vocab_size, data.labelled, phase.mixture.filled)


def with_architecture(config: PretrainConfig, vocab_size: int | None) -> tuple[PretrainConfig, int | None]:
    """Replaces the preset `checkpoint` by the architecture and vocabulary size of init_from or branch_from.

    A recipe with another preset is returned unchanged.

    Raises:
        UserError: There is no checkpoint, or its vocabulary does not have vocab_size tokens.
    """
    if config.model.preset != sizes.FROM_CHECKPOINT:
        return config, vocab_size
    # The vocabulary size of 1 is not used, since the preset `checkpoint` has its own.
    model = architecture(config, 1, open_initial(config))
    if vocab_size not in (None, model.vocab_size):
        raise UserError(
            f"--vocab_size is {vocab_size}, but the model of {config.init_from or config.branch_from} has "
            f"{model.vocab_size} tokens; omit --vocab_size"
        )
    options = {item.name for item in dataclasses.fields(ModelOptions)}
    parts = {item.name: getattr(model, item.name) for item in dataclasses.fields(ModelConfig) if item.name in options}
    preset = ModelOptions().preset  # any preset will do, because all of its parts are replaced
    named = dataclasses.replace(config.model, preset=preset, **parts)
    return dataclasses.replace(config, model=named), model.vocab_size


@dataclass(frozen=True)
class AbstractStep:
    """A recipe's train step on some devices, with abstract arrays."""

    config: PretrainConfig
    topology: Topology
    rows: RowSpec
    model: ModelConfig
    plan: Plan
    mesh: Mesh

    @classmethod
    def of(cls, config: PretrainConfig, topology: Topology, rows: RowSpec) -> "AbstractStep":
        """Builds the step. Raises UserError for a model, mesh, batch or rates that training would refuse, too."""
        model = sizes.model_config(config.model, rows.vocab_size)
        # Without shards, assume traits that fit the configuration, so that no check refuses it.
        name = config.data.train or ", ".join(config.data.mixture) or "the shards"
        traits = ShardTraits(
            name, rows.labelled, "span" if getattr(config.objective, "span_boundary", False) else "token"
        )
        sizes.check_positions(model, rows.seq_len, traits.name)
        model.encoder.check_rows(rows.seq_len, traits.name)
        if config.distill.teacher:
            raise UserError(
                "config.distill.teacher is set, but a plan does not count a teacher's work. Leave it out to plan the "
                "student alone"
            )
        objective = pretraining_objective(config, model, [traits])
        mesh = partitioning.make_mesh(config.mesh, topology.devices)
        # Devices that do not exist may not report their slice, so the topology says how many slices there are.
        partitioning.check_slices(mesh.shape[partitioning.DATA], topology.slices, mesh.size)
        partitioning.check_model(model, mesh, shard_optimizer=config.mesh.shard_optimizer)
        partitioning.check_batch(config.batch_size, config.microbatches, mesh)
        abstract = jax.eval_shape(lambda key: objective.init(model, key), jax.random.key(0))
        optimizer_config = optim.with_token_shares(config.optimizer, config.tokens)
        factors = optim.rate_factors(config.optimizer, abstract, None)
        trained = Trained.by_factors(factors)  # None: all parameters
        if trained is not None:
            trained.check(config.optimizer.rates)
        plan = Plan(
            model=model,
            runtime=make_runtime(config, topology.platform, topology.capability),
            objective=objective,
            optimizer_config=optimizer_config,
            optimizer=optim.build(optimizer_config, abstract, trained),
            microbatches=config.microbatches,
            mesh_config=config.mesh,
            factors=factors,
            trained=trained,
        )
        return cls(config, topology, rows, model, plan, mesh)

    def state(self) -> Any:
        """Returns the abstract training state. Every leaf has a sharding."""
        init = self.plan.objective.init
        abstract = jax.eval_shape(lambda: initial_state(self.plan, init(self.model, jax.random.key(0))))
        return partitioning.with_shardings(self.mesh, abstract, shard_optimizer=self.config.mesh.shard_optimizer)

    def batch(self) -> Batch:
        """Returns an abstract global batch, whose rows are sharded over the devices."""
        rows, size = self.rows, self.config.batch_size
        sharding = partitioning.rows_sharding(self.mesh)

        def array(width: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((size, width), dtype, sharding=sharding)

        tokens, predictions = array(rows.seq_len), array(rows.predictions)
        spans = predictions if "span_offsets" in self.plan.objective.batch_fields else None
        return Batch(
            **dict.fromkeys(("input_ids", "segment_ids", "sequence_ids", "positions"), tokens),
            **dict.fromkeys(("masked_positions", "masked_ids"), predictions),
            masked_weights=array(rows.predictions, jnp.float32),
            **dict.fromkeys(("cls_positions", "next_sentence_label"), array(rows.pack)),
            next_sentence_weight=array(rows.pack, jnp.float32),
            **dict.fromkeys(("span_left", "span_right", "span_offsets"), spans),
        )

    def traced(self) -> Any:
        """Traces the step by jax.jit. The result has a jaxpr and can be lowered."""
        whole = partitioning.replicated(self.mesh)
        key = jax.eval_shape(lambda: jax.random.key(0))
        fraction = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
        placed_key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=whole)
        with jax.set_mesh(self.mesh):
            state = self.state()
            return jitted(self.plan, self.mesh, state).trace(state, self.batch(), fraction, placed_key)


@dataclass(frozen=True)
class Memory:
    """Bytes on one device. Activations are everything that a step allocates, such as gradients and the batch."""

    parameters: int
    optimizer: int
    activations: int
    available: int

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + self.activations

    @property
    def fits(self) -> bool:
        return self.total <= self.available


class Compiled(NamedTuple):
    """A compiled step."""

    program: programs.Program | None  # None: it exceeds the memory
    memory: Memory
    flops: programs.Flops  # in the traced step, over all devices


def compile_step(step: AbstractStep) -> Compiled:
    """Compiles the step for its devices, which takes minutes.

    Raises:
        UserError: The compiler fails, but not because the step exceeds the memory.
    """
    traced = step.traced()
    flops = programs.count_flops(traced.jaxpr)
    state, topology = step.state(), step.topology
    # The state holds parameters and optimizer. Everything else counts as activations.
    parameters = bytes_per_device(state.params)
    optimizer = bytes_per_device(state) - parameters
    try:
        with partitioning.without_cache():
            built = traced.lower().compile(compiler_options=topology.compiler_options)
    except jax.errors.JaxRuntimeError as error:
        exceeded = parse_out_of_memory(str(error), parameters + optimizer)
        if exceeded is None:
            reason = first_line(error)
            raise UserError(f"the compiler could not build the step for {topology.name}: {reason}") from error
        total, available = exceeded
        return Compiled(None, Memory(parameters, optimizer, total - parameters - optimizer, available), flops)
    used = built.memory_analysis()
    # The new state reuses the memory of the old one, which is donated, so these bytes are subtracted once.
    total = used.argument_size_in_bytes + used.output_size_in_bytes - used.alias_size_in_bytes
    total += used.temp_size_in_bytes + used.generated_code_size_in_bytes
    memory = Memory(parameters, optimizer, max(total - parameters - optimizer, 0), topology.memory_bytes)
    return Compiled(programs.parse(built.as_text()), memory, flops)


def bytes_per_device(tree: Any) -> int:
    """Returns the bytes on one device for a tree of arrays, or shapes with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * int(leaf.dtype.itemsize) for leaf in jax.tree.leaves(tree)
    )


_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}
_SIZE = r"([\d.]+)([KMGTB]?)"
_EXCEEDED = re.compile(rf"(?:Used|HLO temporaries) \(?{_SIZE}\)? (?:of|exceeds available HBM) \(?{_SIZE}")


def parse_out_of_memory(message: str, arguments: int) -> tuple[int, int] | None:
    """Reads the bytes needed and available from libtpu's out-of-memory message; None for another message.

    Args:
        arguments: Bytes of the step's arguments. One form of the message ("HLO temporaries") does not count them.
    """
    # Only for TPUs: on GPUs, XLA also compiles steps that exceed the memory.
    if not (match := _EXCEEDED.search(message)):
        return None
    wanted, available = (round(float(match[i]) * _UNITS[match[i + 1]]) for i in (1, 3))
    return wanted + arguments * match[0].startswith("HLO"), available
