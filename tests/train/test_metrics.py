"""What a run reports: log lines on disk and in an object store, FLOPs, TensorBoard events, and the progress line."""

import dataclasses
import errno
import json
import math
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from tensorboardX import SummaryWriter
from tensorboardX.proto.event_pb2 import Event

from bert_jax.config import ModelConfig
from bert_jax.lineage import LSTM, RNN, BiLSTM
from bert_jax.model.bert import bind, init_params
from bert_jax.model.heads.config import Heads
from bert_jax.model.outputs import masked_logits, span_boundary_product, vocabulary_logits
from bert_jax.model.runtime import Runtime
from bert_jax.planning.program import count_flops
from bert_jax.tasks.rows import TaskBatch
from bert_jax.train import metrics
from bert_jax.train.metric_accumulator import training_flops
from bert_jax.train.metrics import FOLDER, METRICS_FILE, MetricsWriter, Segments, read_metrics, read_segments

WIDE = ModelConfig(vocab_size=1024, layers=2, width=256, heads=4, feed_forward=512, max_positions=64)
GATED = dataclasses.replace(WIDE, gated=True, bias=False, norm="pre", positions="rotary", segment_types=0)
CAUSAL = dataclasses.replace(WIDE, causal=True, norm="pre", segment_types=0)


@pytest.mark.parametrize("config", [WIDE, GATED, CAUSAL], ids=["bert", "gated", "causal"])
def test_flops_are_three_times_those_that_xla_counts_in_the_forward_pass(config):
    heads = Heads(mlm=not config.causal, lm=config.causal)
    slots = jnp.tile(jnp.arange(64, dtype=jnp.int32)[None], (2, 1))
    batch = TaskBatch(slots, slots * 0, slots * 0 + 1, slots, jnp.zeros(2), jnp.zeros(2))
    predicted = slots if config.causal else slots[:, :10]

    def forward(params):
        model = bind(config, heads, params, Runtime(layer_loop="unrolled"))
        return masked_logits(model, model.encode(batch).last, predicted)

    params = jax.eval_shape(lambda: init_params(config, heads, jax.random.key(0)))
    counted = jax.jit(forward).lower(params).cost_analysis()["flops"]
    # XLA counts norms, softmax and the small tables' one-hot products, too: a few per cent.
    assert 0.9 < training_flops(config, rows=2, length=64, predictions=10) / (3 * counted) < 1.0


TWO_DIRECTIONS = {"encoder": BiLSTM(), "causal": False}


@pytest.mark.parametrize(
    "changes",
    [
        {"encoder": RNN()},
        {"encoder": LSTM()},
        {"encoder": LSTM(cell_width=320), "embedding_width": 96},
        TWO_DIRECTIONS,
        TWO_DIRECTIONS | {"encoder": BiLSTM(cell_width=320), "embedding_width": 96},
    ],
    ids=["rnn", "lstm", "projected", "bilstm", "elmo"],
)
def test_flops_of_a_recurrent_model_are_three_times_its_forward_matmuls(changes):
    config = dataclasses.replace(CAUSAL, **{"positions": "none", "norm": "post"} | changes)
    slots = jnp.tile(jnp.arange(64, dtype=jnp.int32)[None], (2, 1))
    batch = TaskBatch(slots, slots * 0, slots * 0 + 1, slots, jnp.zeros(2), jnp.zeros(2))

    def forward(params):
        model = bind(config, Heads(lm=True), params, Runtime())
        last = model.encode(batch).last
        return [vocabulary_logits(model, part) for part in jnp.split(last, config.directions, axis=-1)]

    params = jax.eval_shape(lambda: init_params(config, Heads(lm=True), jax.random.key(0)))
    counted = count_flops(jax.make_jaxpr(forward)(params)).total
    assert training_flops(config, rows=2, length=64, predictions=10) == 3 * counted


@pytest.mark.parametrize("changes", [{}, {"layers": 3}, {"gated": True}], ids=str)
def test_flops_of_a_last_layer_at_few_positions_are_three_times_its_matmuls(changes):
    config = dataclasses.replace(WIDE, positions="none", segment_types=0, **changes)
    slots = jnp.tile(jnp.arange(64, dtype=jnp.int32)[None], (2, 1))
    batch = TaskBatch(slots, slots * 0, slots * 0 + 1, slots, jnp.zeros(2), jnp.zeros(2))
    predicted, read = slots[:, :10], slots[:, :12]

    def forward(params):
        model = bind(config, Heads(mlm=True), params, Runtime(attention="einsum", layer_loop="unrolled"))
        return vocabulary_logits(model, model.encode_at(batch, read)[:, : predicted.shape[1]])

    params = jax.eval_shape(lambda: init_params(config, Heads(mlm=True), jax.random.key(0)))
    looked_up = 2 * 2 * 12 * 64 * config.width  # the last layer's queries, by a product with one-hot vectors
    counted = count_flops(jax.make_jaxpr(forward)(params)).total - looked_up
    assert training_flops(config, rows=2, length=64, predictions=10, read=12) == 3 * counted


def test_a_window_counts_what_it_sees():
    local = dataclasses.replace(WIDE, window=7, global_every=2)
    spared = 3 * 4 * WIDE.width * (2 * 64) * (64 - 15)  # the second of two layers sees 15 of 64 positions
    whole = training_flops(WIDE, rows=2, length=64, predictions=10)
    assert whole - training_flops(local, rows=2, length=64, predictions=10) == spared


def test_a_log_line_is_json_whatever_the_values_are(tmp_path):
    """JSON has numbers only: parsers other than Python's refuse NaN and Infinity."""
    not_finite = {
        "nan": math.nan,
        "inf": math.inf,
        "negative": -math.inf,
        "of_numpy": float(np.float32(np.inf)),
        "absent": None,
    }
    writer = MetricsWriter(tmp_path, 0)
    writer.write(1, not_finite | {"loss": 1.5, "skipped": 2.0})
    writer.close()
    [line] = (tmp_path / METRICS_FILE).read_text().splitlines()

    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    values = json.loads(line, parse_constant=refuse)
    assert {name: values[name] for name in not_finite} == dict.fromkeys(not_finite)
    assert (values["step"], values["loss"], values["skipped"]) == (1, 1.5, 2)
    assert read_metrics(tmp_path) == [values]


def test_only_the_line_of_the_named_step_is_corrected(tmp_path):
    begun = MetricsWriter(tmp_path, 0)
    for step in (2, 4):
        begun.write(step, {"loss": 1.0, "budget_fraction": step / 4})
    begun.close()
    resumed = MetricsWriter(tmp_path, 4)
    resumed.correct(2, {"budget_fraction": 0.1})  # not the last one
    resumed.correct(4, {"budget_fraction": 0.3})
    resumed.write(6, {"loss": 0.5})
    resumed.close()
    lines = read_metrics(tmp_path)
    assert [(line["step"], line["loss"], line.get("budget_fraction")) for line in lines] == [
        (2, 1.0, 0.5),
        (4, 1.0, 0.3),
        (6, 0.5, None),
    ]


@pytest.mark.parametrize("start_step", [0, 3])
def test_tensorboard_events_are_those_of_the_library(tmp_path, start_step):
    """They hide those of an earlier process from the step after the one at which the run begins or resumes."""
    with_library = SummaryWriter(str(tmp_path / "library"), purge_step=start_step + 1)
    log = MetricsWriter(tmp_path, start_step=start_step)
    for step, loss in ((4, 0.5), (5, 0.25)):
        with_library.add_scalar("loss", loss, step)
        log.write(step, {"loss": loss})
    with_library.close()
    log.close()
    assert events_in(tmp_path / "tensorboard") == events_in(tmp_path / "library")


def events_in(folder):
    """What is in the only file of events of a folder, without the times."""
    (path,) = folder.glob("events.out.tfevents.*")
    found, data = [], path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + length])
        event.ClearField("wall_time")
        found.append(str(event))
        data = data[16 + length :]
    return [text for text in found if text]


def test_a_full_disk_fails_at_the_line_that_does_not_fit(tmp_path, monkeypatch):
    log = MetricsWriter(tmp_path, start_step=0)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr("tensorboardX.record_writer.RecordWriter.write", full)
        log.write(1, {"loss": 0.5})
    log.close()


def test_flops_of_electra_are_those_of_both_models():
    generator = dataclasses.replace(
        WIDE, width=64, heads=1, feed_forward=128, embedding_width=256
    )  # a quarter of the width, and the embeddings of the model
    both = training_flops(WIDE, rows=2, length=64, predictions=10, heads=Heads(generator=64))
    classified = 3 * 2 * 64 * (2 * WIDE.width**2 + 2 * WIDE.width)
    model = training_flops(WIDE, rows=2, length=64, predictions=0)
    generated = training_flops(generator, rows=2, length=64, predictions=10, read=10)
    assert both == generated + model + classified


@pytest.mark.parametrize("embedding_width", [0, 128])
def test_flops_of_the_span_boundary_head_are_three_times_its_matmuls_without_look_ups(embedding_width):
    config = dataclasses.replace(WIDE, embedding_width=embedding_width)
    heads = Heads(mlm=True, span_boundary=True)
    around = jax.ShapeDtypeStruct((2, 10, config.width), jnp.float32)
    offsets = jax.ShapeDtypeStruct((2, 10), jnp.int32)

    def forward(params, left, right, offsets):
        return span_boundary_product(bind(config, heads, params, Runtime()), left, right, offsets).logits()

    params = jax.eval_shape(lambda: init_params(config, heads, jax.random.key(0)))
    counted = count_flops(jax.make_jaxpr(forward)(params, around, around, offsets)).total
    places = params["span_boundary_head"]["position"]["table"]
    looked_up = 2 * 2 * 10 * places.shape[0] * places.shape[1]
    both = training_flops(config, rows=2, length=64, predictions=10, heads=heads)
    assert both - training_flops(config, rows=2, length=64, predictions=10) == 3 * (counted - looked_up)


# Log lines in an object store: segments written whole, of which those of the newest start count.


@pytest.fixture
def workdir(tmp_path: Path) -> epath.Path:
    """A folder on disk by the interface of a store; only the folder of segments exists."""
    (tmp_path / FOLDER).mkdir()
    return epath.Path(tmp_path)


def names(workdir: epath.Path) -> list[str]:
    return sorted(path.name for path in (workdir / FOLDER).iterdir())


def test_lines_appear_with_a_flush_and_a_newer_start_replaces_those_it_does_not_keep(workdir):
    assert read_segments(workdir) == []
    first = Segments(workdir, [])
    for line in ("one", "two", "three"):
        first.append(line)
    assert read_segments(workdir) == []
    first.flush()
    first.append("of a step that the next start repeats")
    first.flush()
    second = Segments(workdir, ["one", "two"])
    assert read_segments(workdir) == ["one", "two"]
    second.append("three again")
    second.close()
    assert read_segments(workdir) == ["one", "two", "three again"]
    assert names(workdir) == ["000002-000000.jsonl"]


def test_a_start_that_is_killed_before_it_removed_older_segments_counts(workdir, monkeypatch):
    for kept in ([], ["one"]):
        Segments(workdir, [*kept, "lost"])
        with monkeypatch.context() as killed:
            killed.setattr(type(workdir), "unlink", lambda *_, **__: None)
            Segments(workdir, [*kept, "kept"])
        assert read_segments(workdir) == [*kept, "kept"]


def test_a_full_segment_is_not_written_again(workdir, monkeypatch):
    monkeypatch.setattr(metrics, "SEGMENT_BYTES", 100)
    lines = [f"{number:04d} {'x' * 30}" for number in range(20)]
    segments = Segments(workdir, lines[:1])
    for line in lines[1:]:
        segments.append(line)
        segments.flush()
    assert read_segments(workdir) == lines
    sizes = [len((workdir / FOLDER / name).read_bytes()) for name in names(workdir)]
    assert len(sizes) > 3 and max(sizes) <= 100 + 36


def test_a_line_is_written_after_a_minute_without_a_checkpoint(workdir, monkeypatch):
    segments = Segments(workdir, [])
    segments.append("early")
    monkeypatch.setattr(metrics, "SECONDS", 0.0)
    segments.append("late")
    assert read_segments(workdir) == ["early", "late"]


def test_a_reader_whose_segments_are_removed_meanwhile_reads_those_of_the_new_start(workdir, monkeypatch):
    Segments(workdir, ["old"])
    read, restarts = type(workdir).read_bytes, iter([True])

    def read_late(path: epath.Path) -> bytes:
        if next(restarts, False):
            Segments(workdir, ["new"])
        return read(path)

    monkeypatch.setattr(type(workdir), "read_bytes", read_late)
    assert read_segments(workdir) == ["new"]


def test_a_copy_of_a_workdir_on_disk_or_in_a_store_keeps_its_log(workdir, tmp_path):
    Segments(workdir, ['{"step": 1}', '{"step": 2}'])
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2}]  # as it is on a disk
    (tmp_path / METRICS_FILE).write_text('{"step": 3}\n')
    assert read_metrics(tmp_path) == [{"step": 3}]
    assert read_metrics(workdir) == [{"step": 1}, {"step": 2}]
    (workdir / FOLDER / names(workdir)[0]).unlink()
    assert read_metrics(workdir) == [{"step": 3}]
