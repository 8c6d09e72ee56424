"""The train step that a recipe asks for, as shapes: what is compiled, with nothing in memory."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bert_jax.command import UserError
from bert_jax.config import ModelConfig, PretrainConfig
from bert_jax.data.example import Batch, max_predictions
from bert_jax.data.shards import open_dataset
from bert_jax.model import sizes
from bert_jax.model.bert import abstract_params, bind, init_params
from bert_jax.planning.topology import Topology
from bert_jax.train import optim, partitioning
from bert_jax.train.losses import CausalObjective, Objective, PretrainingObjective
from bert_jax.train.run import runtime_of
from bert_jax.train.steps import Plan, initial_state, jitted

BERT_VOCABULARY = 30522  # bert-base-uncased
MASK_RATE = 0.15  # Devlin et al. 2019, section 3.1
USUAL_LENGTH = 512


@dataclass(frozen=True)
class Rows:
    """What the batches are like: T slots, up to S sequences, M predictions, ids below V; labelled pairs or not."""

    seq_len: int
    pack: int
    predictions: int
    vocab_size: int
    labelled: bool

    @classmethod
    def of(cls, config: PretrainConfig, seq_len: int | None, vocab_size: int | None) -> "Rows":
        """Those of data.train where it is given, else of seq_len slots (None: the model's positions, up to 512).

        Raises UserError for shards that cannot be read, and where both are given and differ.
        """
        if config.data.train:
            data = open_dataset(config.data.train, "train")
            if seq_len not in (None, data.seq_len):
                raise UserError(
                    f"--seq_len is {seq_len}, the rows of {config.data.train} have {data.seq_len} slots; leave it out"
                )
            return cls(data.seq_len, data.pack, data.max_predictions, data.tokenizer().vocab_size, data.labelled)
        words = vocab_size or BERT_VOCABULARY
        length = seq_len or min(USUAL_LENGTH, sizes.model_config(config.model, words).max_positions)
        rate = config.data.mask_rate if config.data.mask_rate is not None else MASK_RATE
        return cls(length, 1, max_predictions(length, 1, rate), words, labelled=True)


@dataclass(frozen=True)
class Step:
    """A train step and where its arguments lie."""

    config: PretrainConfig
    topology: Topology
    rows: Rows
    model: ModelConfig
    plan: Plan
    mesh: Mesh

    @classmethod
    def of(cls, config: PretrainConfig, topology: Topology, rows: Rows) -> "Step":
        """Raises UserError for a model, mesh or batch that training would refuse, too."""
        model = sizes.model_config(config.model, rows.vocab_size)
        if rows.seq_len > model.max_positions:
            raise UserError(
                f"rows of {rows.seq_len} slots, but the model has {model.max_positions} positions; use "
                f"--config.model.max_positions={rows.seq_len}"
            )
        objective = _objective(config, model, rows)
        mesh = partitioning.make_mesh(config.mesh, topology.devices)
        partitioning.check_model(model, mesh)
        partitioning.check_batch(config.batch_size, config.microbatches, mesh)
        abstract = abstract_params(model, objective.heads)
        plan = Plan(
            model=model,
            runtime=runtime_of(config, "tpu"),
            objective=objective,
            optimizer_config=config.optimizer,
            optimizer=optim.build(config.optimizer, abstract),
            microbatches=config.microbatches,
            overlap=config.mesh.overlap,
            factors=optim.rate_factors(config.optimizer, abstract, None),
        )
        return cls(config, topology, rows, model, plan, mesh)

    def state(self) -> Any:
        """The training state, each leaf with its sharding."""

        def draw(key: jax.Array) -> Any:
            return initial_state(self.plan, init_params(self.model, self.plan.objective.heads, key))

        return partitioning.with_shardings(self.mesh, jax.eval_shape(draw, _key(self.config.prng)))

    def batch(self) -> Batch:
        """A global batch, its rows over the devices."""
        rows, size = self.rows, self.config.batch_size
        sharding = partitioning.rows_sharding(self.mesh)

        def array(width: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((size, width), dtype, sharding=sharding)

        slots, places = array(rows.seq_len), array(rows.predictions)
        spans = places if self.config.span_boundary else None
        return Batch(
            input_ids=slots,
            segment_ids=slots,
            sequence_ids=slots,
            positions=slots,
            masked_positions=places,
            masked_ids=places,
            masked_weights=array(rows.predictions, jnp.float32),
            cls_positions=array(rows.pack),
            next_sentence_label=array(rows.pack),
            next_sentence_weight=array(rows.pack, jnp.float32),
            span_left=spans,
            span_right=spans,
            span_offsets=spans,
        )

    def traced(self) -> Any:
        """The step as jax.jit traces it: what gives its jaxpr and is lowered."""
        whole = partitioning.replicated(self.mesh)
        key = _key(self.config.prng)
        fraction = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
        placed_key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=whole)
        with jax.set_mesh(self.mesh):
            state = self.state()
            return jitted(self.plan, self.mesh, state).trace(state, self.batch(), fraction, placed_key)

    def kept_bytes(self) -> int:
        """What the backward pass needs of the forward pass, on all devices, before the compiler thinks about it.

        Parameters are left out. Only ratios of it are used: the compiler keeps less.
        """
        params = abstract_params(self.model, self.plan.objective.heads)

        def forward(params: Any, batch: Batch, key: jax.Array) -> Any:
            def loss(params: Any) -> jax.Array:
                model = bind(self.model, self.plan.objective.heads, params, self.plan.runtime)
                sums = self.plan.objective.sums(model, batch, key)
                return sum((sums[name] for name in sums if name.endswith("_loss")), jnp.float32(0))

            return jax.vjp(loss, params)[1]

        with jax.set_mesh(self.mesh):
            kept = jax.eval_shape(forward, params, self.batch(), _key(self.config.prng))
        everything = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))
        return everything - sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))


def _key(kind: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=kind))


def _objective(config: PretrainConfig, model: ModelConfig, rows: Rows) -> Objective:
    if model.causal:
        return CausalObjective()
    return PretrainingObjective(next_sentence=rows.labelled, span_boundary=config.span_boundary)
