"""Law 1: a batch is a function of (dataset, configuration, seed, step)."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from row_tables import CLS, WORDS, Facts, Table, packed_rows
from streamed_outputs import assert_rows_equal, joined, originals, picked, texts

from bert_jax.data import loader
from bert_jax.data.example import Batch, Rows, max_predictions
from bert_jax.data.loader import DatasetLoader
from bert_jax.data.masking.masker import Masker
from bert_jax.data.masking.rule import MaskingRule, ReplacementShares
from bert_jax.data.phases import PhasedLoader
from bert_jax.data.schedules import StepSchedule, mask_rates
from bert_jax.data.shards import Dataset, open_dataset
from bert_jax.errors import UserError
from tests.helpers import shard_tables


def make(
    rows: Rows, batch_size: int = 8, seed: int = 7, rule: MaskingRule = WORDS, rates: StepSchedule[float] | None = None
) -> PhasedLoader:
    table = Table(rows, rows.masked_ids is not None, rule)
    return PhasedLoader.single(table, Facts(), batch_size=batch_size, seed=seed, rates=rates)


def evaluated(stored: Rows, *options: object, seed: int = 7, **others: object) -> list[Batch]:
    return list(DatasetLoader(Table(stored), Facts(), seed=seed).evaluation_batches(*options, **others))


def row_numbers(batch: Batch, rows: Rows) -> list[int]:
    """The rows of a batch, identified by their ids."""
    known = {ids.astype(np.int32).tobytes(): number for number, ids in enumerate(rows.input_ids)}
    return [known[text] for text in texts(batch)]


def test_fields_are_the_batch_of_the_design():
    batch = make(packed_rows(30)).batch(0)
    room = max_predictions(40, 3, 0.15)
    for name, field in zip(Batch._fields[:10], batch[:10], strict=True):
        floating = name in ("masked_weights", "next_sentence_weight")
        assert field.dtype == (np.float32 if floating else np.int32), name
        width = 40 if name in Batch._fields[:4] else room if name.startswith("masked") else 3
        assert field.shape == (8, width), name
        assert field.flags["C_CONTIGUOUS"], name


@pytest.mark.parametrize("pack", [1, 3])
def test_layout_spells_out_the_lengths(pack):
    rows = packed_rows(24, pack=pack)
    layout = loader.token_layout(rows)
    for row in range(24):
        sequence_ids, segment_ids, positions, starts = [], [], [], []
        for s, (length, first) in enumerate(
            zip(rows.sequence_lengths[row], rows.first_segment_lengths[row], strict=True)
        ):
            starts.append(len(positions) if length else 0)
            sequence_ids += [s + 1] * int(length)
            segment_ids += [0] * int(first) + [1] * int(length - first)
            positions += range(length)
        padding = [0] * (40 - len(positions))
        assert layout.sequence_ids[row].tolist() == sequence_ids + padding
        assert layout.segment_ids[row].tolist() == segment_ids + padding
        assert layout.positions[row].tolist() == positions + padding
        assert layout.cls_positions[row].tolist() == starts


def test_labels_weigh_where_there_is_one():
    rows = packed_rows(30)
    [held_out] = evaluated(rows, 30)
    present = rows.sequence_lengths > 0
    np.testing.assert_array_equal(held_out.next_sentence_weight, (rows.next_sentence_labels >= 0) & present)
    np.testing.assert_array_equal(held_out.next_sentence_label, np.maximum(rows.next_sentence_labels, 0))
    starts = np.take_along_axis(held_out.input_ids, held_out.cls_positions, axis=1)
    assert (starts[present] == CLS).all()


def test_every_epoch_reads_every_row_once():
    rows = packed_rows(30)
    batches = make(rows)
    order = [number for step in range(15) for number in row_numbers(batches.batch(step), rows)]
    assert len(order) == 120
    epochs = [order[start : start + 30] for start in range(0, 120, 30)]
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4, "two epochs have one order"


def test_a_batch_over_two_epochs_wears_the_masks_of_each():
    rows = packed_rows(30)
    batches = make(rows)
    straddling = batches.batch(3)  # global rows 24..31: six of epoch 0, two of epoch 1
    for epoch, of_epoch in ((0, slice(0, 6)), (1, slice(6, 8))):
        numbers = row_numbers(straddling, rows)[of_epoch]
        gathered = Table(rows).gather(np.array(numbers))
        masked = Masker(Facts(), WORDS, 7).apply(gathered, np.full(len(numbers), epoch), max_predictions(40, 3, 0.15))
        np.testing.assert_array_equal(straddling.input_ids[of_epoch], masked.input_ids)
        np.testing.assert_array_equal(straddling.masked_positions[of_epoch], masked.positions)
        np.testing.assert_array_equal(straddling.masked_weights[of_epoch].sum(axis=1), masked.counts)


def test_a_batch_larger_than_the_dataset_wraps_around():
    rows = packed_rows(3)
    numbers = row_numbers(make(rows, batch_size=10).batch(0), rows)
    assert [sorted(numbers[start : start + 3]) for start in (0, 3, 6)] == [[0, 1, 2]] * 3


def test_global_rows_do_not_depend_on_the_batch_size():
    rows = packed_rows(30)
    small = [make(rows, batch_size=4).batch(step) for step in range(10)]
    assert_rows_equal(make(rows, batch_size=40).batch(0), joined(small))


@pytest.mark.parametrize(
    "rows", [slice(0, 2), slice(2, 8), slice(6, 8), slice(3, 3), slice(None, None, 3), np.array([0, 1, 6, 7])]
)
def test_rows_that_are_picked_are_those_of_the_batch(rows):
    batches = make(packed_rows(30))
    for step in (0, 3):
        whole = batches.batch(step)
        assert_rows_equal(batches.batch(step, rows), picked(whole, rows))


def test_batches_do_not_depend_on_what_was_read_before():
    rows = packed_rows(30)
    used = make(rows)
    for step in (5, 2, 9):
        used.batch(step)
    assert_rows_equal(used.batch(4), make(rows).batch(4))


def test_seeds_change_rows_and_masks():
    rows = packed_rows(30)
    assert row_numbers(make(rows, seed=1).batch(0), rows) != row_numbers(make(rows, seed=2).batch(0), rows)


def test_a_fingerprint_depends_on_the_masks():
    """And on the data, but not on the configuration."""
    rows = packed_rows(30)

    def fingerprint(rule: MaskingRule, batch_size: int = 8, seed: int = 7) -> str:
        [(key, value)] = make(rows, batch_size, seed, rule).fingerprints.items()
        assert key == "data.train"
        return value

    assert fingerprint(WORDS, 4, 1) == fingerprint(WORDS)
    rules = [WORDS, MaskingRule("span"), MaskingRule("word", 0.2), MaskingRule("word", random="unigram")]
    rules += [MaskingRule("word", split=ReplacementShares(0.5, 0.4, 0.1))]
    assert len(set(map(fingerprint, rules))) == len(rules)
    facts = ["rows", Facts.content_hash, "word", 0.15]  # what it was made of before there was a choice
    assert fingerprint(WORDS) == hashlib.sha256(json.dumps(facts).encode()).hexdigest()


@pytest.mark.parametrize("rule", [WORDS, MaskingRule("ngram"), MaskingRule("span")])
def test_static_rows_are_passed_on(rule):
    rows = packed_rows(30)
    room = max_predictions(40, 3, 0.15)
    masked = Masker(Facts(), rule, 7).apply(rows, np.zeros(30, np.int64), room)
    static = rows._replace(
        input_ids=masked.input_ids.astype(np.uint16),
        masked_positions=masked.positions.astype(np.uint16),
        masked_ids=masked.ids.astype(np.uint16),
        masked_counts=masked.counts.astype(np.uint16),
    )
    stored, drawn = make(static, rule=rule), make(rows, rule=rule)
    for step in range(3):  # epoch 0: what dynamic masking gives there
        assert_rows_equal(stored.batch(step), drawn.batch(step))
    assert (stored.batch(0).span_left is not None) == (rule.unit == "span")


def test_spans_come_with_their_borders():
    rows = packed_rows(30)
    batch = make(rows, rule=MaskingRule("span", 0.3)).batch(0)
    ids = originals(batch)
    row, column = np.nonzero(batch.masked_weights)
    here = batch.masked_positions[row, column]
    left, right = batch.span_left[row, column], batch.span_right[row, column]
    assert (left < here).all() and (here < right).all()
    assert (here - batch.span_offsets[row, column] == left).all()
    for position in (left, right):  # never masked: the model sees them as they are
        assert (batch.input_ids[row, position] == ids[row, position]).all()
        assert (batch.sequence_ids[row, position] == batch.sequence_ids[row, here]).all()
    for field in batch[10:]:
        assert field.dtype == np.int32 and field.shape == batch.masked_ids.shape
        assert not field[batch.masked_weights == 0].any()


@pytest.mark.parametrize(
    ("rates", "wanted"),
    [
        (mask_rates(None, {0: 0.3, 3: 0.1}), [0.3, 0.3, 0.3, 0.1, 0.1, 0.1]),
        (mask_rates(None, {0: 0.3, 7: 0.1}, "linear"), np.interp(range(9), [0, 7], [0.3, 0.1]).tolist()),
    ],
)
def test_a_schedule_sets_the_rate_of_each_step(rates, wanted):
    """The rows of a step are those of a loader whose constant rate is the step's; M holds the highest."""
    rows = packed_rows(30)
    scheduled = make(rows, rates=rates)
    for step, rate in enumerate(wanted):
        constant = make(rows, rule=MaskingRule("word", rate)).batch(step)
        batch = scheduled.batch(step)
        width = constant.masked_ids.shape[1]
        np.testing.assert_array_equal(batch.input_ids, constant.input_ids)
        assert batch.masked_ids.shape[1] == max_predictions(40, 3, 0.3), "M changes with the step"
        np.testing.assert_array_equal(batch.masked_positions[:, :width], constant.masked_positions)
        np.testing.assert_array_equal(batch.masked_ids[:, :width], constant.masked_ids)
        assert not batch.masked_weights[:, width:].any()
    held_out = DatasetLoader(Table(rows), Facts(), seed=7, rates=rates).evaluation_batches(8)
    for mine, plain in zip(held_out, evaluated(rows, 8), strict=True):
        assert_rows_equal(mine, plain)


def test_static_rows_take_no_other_rate():
    static = packed_rows(3)
    with pytest.raises(UserError, match="static, with the rate of build_examples"):
        DatasetLoader(Table(static, static=True), Facts(), seed=0, rates=mask_rates(None, {0: 0.3}))


def test_steps_made_together_are_those_made_alone():
    rows = packed_rows(30)
    together = make(rows)
    for order in ([*range(9)], [4, 5, 6, 2, 3], [0, 0, 1, 1, 2]):
        for step in order:
            for part in (slice(0, 8), slice(2, 5), slice(3, 3)):
                assert_rows_equal(together.batch(step, part), picked(make(rows).batch(step), part))


def test_batches_cannot_be_written_to():
    with pytest.raises(ValueError, match="read-only"):
        make(packed_rows(30)).batch(0).input_ids[0, 0] = 1


def test_evaluation_reads_each_row_once_in_order():
    rows = packed_rows(30)
    held_out = evaluated(rows, 8)
    assert [len(batch.input_ids) for batch in held_out] == [8] * 4
    whole = joined(held_out)
    assert row_numbers(picked(whole, slice(0, 30)), rows) == list(range(30))
    assert all(not field[30:].any() for field in whole if field is not None), "fillers are not zero"
    limited = evaluated(rows, 8, max_rows=10)
    assert_rows_equal(limited[0], held_out[0])
    assert [int(batch.sequence_ids.any(axis=1).sum()) for batch in limited] == [8, 2]


def test_processes_evaluate_the_rows_that_one_would_with_masks_of_no_seed():
    rows = packed_rows(30)
    whole = evaluated(rows, 16)
    for part in (slice(0, 8), slice(8, 16), np.array([3, 4, 12, 15]), slice(15, 16)):  # of the last: a filler
        for mine, batch in zip(evaluated(rows, 16, rows=part, seed=2), whole, strict=True):
            assert_rows_equal(mine, picked(batch, part))


def test_errors_of_the_user_are_reported():
    rows = packed_rows(3)
    for size in (0, -4):
        for read in (make, evaluated):
            with pytest.raises(UserError, match=f"batch_size is {size}"):
                read(rows, size)
    other = Facts()
    other.content_hash = "0" * 64
    with pytest.raises(UserError, match=r"tokenizer \(hash 0+\) differs.*shards in DIR \(hash f+\)\. Use DIR"):
        DatasetLoader(Table(rows), other, seed=0)
    with pytest.raises(ValueError, match="step -1"):
        make(rows).batch(-1)


# On what build_examples wrote.


@pytest.mark.slow
def test_ten_thousand_shards_are_read_with_few_open_files(shards_dir, tmp_path):
    """All shards are mapped at once by a process that may open 64 files; the usual limit is 1,024."""
    count = 10_000
    shard = shard_tables.entries(shards_dir, "train/")[0]
    (tmp_path / "train").mkdir()
    for i in range(count):
        (tmp_path / "train" / f"shard-{i:05d}.arrow").hardlink_to(shards_dir / shard["name"])
    manifest = json.loads((shards_dir / "manifest.json").read_text())
    shards = [shard | {"name": f"train/shard-{i:05d}.arrow"} for i in range(count)]
    shard_tables.replace(tmp_path, shards, manifest)
    shutil.copytree(shards_dir / "tokenizer", tmp_path / "tokenizer")
    program = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "import numpy as np\n"
        "from bert_jax.data import shards\n"
        "from bert_jax.data.phases import PhasedLoader\n"
        f"dataset = shards.open_dataset({str(tmp_path)!r}, 'train')\n"
        "PhasedLoader.single(dataset, dataset.vocabulary(), batch_size=256, seed=3).batch(0)\n"
        f"starts = np.arange({count}) * (dataset.rows // {count})\n"
        "rows = dataset.gather(starts)\n"
        "assert (rows.input_ids == rows.input_ids[0]).all()\n"
        "with open('/proc/self/maps') as file:\n"
        "    print(len({line.split()[-1] for line in file if 'train/shard-' in line}))\n"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert printed == str(count)


@pytest.fixture
def dataset(shards_dir: Path) -> Dataset:
    return open_dataset(shards_dir, "train")


@pytest.fixture
def written(dataset: Dataset) -> PhasedLoader:
    return PhasedLoader.single(dataset, dataset.vocabulary(), batch_size=32, seed=3)


def test_written_rows_are_read_masked_and_whole(dataset, written):
    tokenizer = dataset.vocabulary()
    steps = -(-dataset.rows // 32)
    batches = [written.batch(step) for step in range(steps)]
    read = picked(joined(batches), slice(0, dataset.rows))
    original = dataset.gather(np.arange(dataset.rows))
    assert sorted(map(bytes, originals(read))) == sorted(map(bytes, original.input_ids.astype(np.int32)))
    real = read.masked_weights > 0
    assert real.any(axis=1).all(), "a row without a prediction"
    assert not np.isin(read.masked_ids[real], tokenizer.special_ids).any()
    share = real.sum() / (read.sequence_ids > 0).sum()
    assert abs(share - 0.15) < 0.02  # rounding in rows of at most 64 positions, and words too long for what is left
    np.testing.assert_array_equal(read.input_ids == tokenizer.pad_id, read.sequence_ids == 0)
    assert set(read.next_sentence_label[:, 0].tolist()) == {0, 1} and read.next_sentence_weight.all()


def test_another_process_reads_the_same_batches(written, shards_dir):
    program = (
        "import hashlib\n"
        "from bert_jax.data import shards\n"
        "from bert_jax.data.phases import PhasedLoader\n"
        f"dataset = shards.open_dataset({str(shards_dir)!r}, 'train')\n"
        "batch = PhasedLoader.single(dataset, dataset.vocabulary(), batch_size=32, seed=3).batch(11)\n"
        "print(hashlib.sha256(b''.join(field.tobytes() for field in batch[:10])).hexdigest())\n"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert printed == hashlib.sha256(b"".join(field.tobytes() for field in written.batch(11)[:10])).hexdigest()
