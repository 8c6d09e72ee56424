import gzip
import io
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorflow_datasets.proto import tf_example_pb2

from bert_jax.data.example import Rows
from bert_jax.data.shards import Corrupt
from data_prep.formats import tfrecord

ORIGINAL = Path(__file__).parent / "testdata" / "original_bert"
UINT16 = np.dtype(np.uint16)


def records_of(content: bytes) -> list[bytes]:
    return list(itertools.chain.from_iterable(tfrecord.blocks(io.BytesIO(content))))


@pytest.fixture(scope="module")
def original() -> bytes:
    """A file by google-research/bert's own script (tests/tools/make_original_tfrecord.py)."""
    return (ORIGINAL / "rows.tfrecord").read_bytes()


@pytest.fixture(scope="module")
def rows(original: bytes) -> Rows:
    return tfrecord.to_rows(tfrecord.parse(records_of(original)), UINT16, 5 << 32)


def test_fields_of_the_original_script_are_those_that_tensorflow_reads(original: bytes) -> None:
    examples = tfrecord.parse(records_of(original))
    with np.load(ORIGINAL / "fields.npz") as wanted:
        for name, values in examples._asdict().items():
            np.testing.assert_array_equal(values, wanted[name], err_msg=name)
            assert values.dtype == wanted[name].dtype, name


def test_rows_of_the_original_script_are_written_as_its_examples(original: bytes, rows: Rows, tmp_path: Path) -> None:
    """Messages are compared, not bytes, because the script does not sort the fields."""
    written = tfrecord.write(tmp_path / "rows.tfrecord", rows)
    again = records_of((tmp_path / "rows.tfrecord").read_bytes())
    parse = tf_example_pb2.Example.FromString
    assert [parse(record) for record in again] == [parse(record) for record in records_of(original)]
    assert written["rows"] == len(again) == 43 and written["first_sequence_key"] == 5 << 32


def test_gzipped_file_reads_as_the_plain_one(original: bytes) -> None:
    assert records_of(gzip.compress(original)) == records_of(original)
    with pytest.raises(Corrupt, match="damaged gzip"):
        records_of(gzip.compress(original)[:-200])


def test_no_rows_are_an_empty_file(rows: Rows, tmp_path: Path) -> None:
    manifest = {
        "seq_len": 48,
        "pack": 1,
        "tokenizer": {"vocab_size": 600},
        "masking": {"kind": "static", "max_predictions": 8},
        "shards": [{"name": "train/none.tfrecord"}],
    }
    path = tmp_path / "train" / "none.tfrecord"
    path.parent.mkdir()
    assert tfrecord.write(path, Rows(*(column[:0] for column in rows)))["bytes"] == 0
    for got, wanted in zip(tfrecord.reader(manifest)(path), rows, strict=True):
        assert got.shape == (0, *wanted.shape[1:]) and got.dtype == wanted.dtype


def test_any_flipped_byte_is_detected(original: bytes) -> None:
    generator = np.random.default_rng(0)
    for place in [0, 7, 8, 11, 12, len(original) - 1, *generator.integers(0, len(original), 100).tolist()]:
        changed = bytearray(original)
        changed[place] ^= 1 << generator.integers(8)
        with pytest.raises(Corrupt):
            records_of(bytes(changed))


@given(st.integers(1, 17_233))
def test_truncated_file_is_refused(size: int) -> None:
    """A file that ends between two records cannot be distinguished from a complete one."""
    content = (ORIGINAL / "rows.tfrecord").read_bytes()
    whole = set(np.cumsum([len(record) + 16 for record in records_of(content)]).tolist())
    if size in whole:
        assert len(records_of(content[:size])) < 43
    else:
        with pytest.raises(Corrupt, match="ends within a record"):
            records_of(content[:size])


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(content: bytes) -> None:
    if content:
        with pytest.raises(Corrupt):
            records_of(content)


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=3))
def test_records_that_are_not_examples_are_refused(records: list[bytes]) -> None:
    with pytest.raises(Corrupt, match=r"record \d+"):
        tfrecord.parse(records)


def test_record_without_a_field_or_of_another_width_is_named(original: bytes) -> None:
    records = records_of(original)
    message = tf_example_pb2.Example.FromString(records[2])
    message.features.feature["segment_ids"].int64_list.value.pop()
    with pytest.raises(Corrupt, match="record 2 has 47 segment_ids, but record 0 has 48"):
        tfrecord.parse([*records[:2], message.SerializeToString()])
    with pytest.raises(Corrupt, match="record 0 has 47 segment_ids and 48 input_ids"):
        tfrecord.parse([message.SerializeToString()])
    with pytest.raises(Corrupt, match="record 2049 has 47 segment_ids, but record 2048 has 48"):
        tfrecord.parse([records[0], message.SerializeToString()], before=2048)
    with pytest.raises(Corrupt, match="record 7 has 47 segment_ids and 48 input_ids"):
        tfrecord.parse([message.SerializeToString()], before=7)
    del message.features.feature["masked_lm_ids"]
    with pytest.raises(Corrupt, match="record 0 has no masked_lm_ids"):
        tfrecord.parse([message.SerializeToString()])


def test_mutated_messages_are_rows_or_refused(original: bytes) -> None:
    """Checksums are valid, so only the content can be refused; rows that are read have valid values."""
    records = records_of(original)
    generator = np.random.default_rng(0)
    outcomes = {"rows": 0, "refused": 0}
    for _ in range(2000):
        changed = bytearray(records[generator.integers(len(records))])
        for _ in range(generator.integers(1, 4)):
            place = int(generator.integers(len(changed)))
            if generator.random() < 0.3:
                del changed[place : place + int(generator.integers(1, 30))]
            else:
                changed[place] = int(generator.integers(256))
        try:
            rows = tfrecord.to_rows(tfrecord.parse([bytes(changed)]), UINT16, 0)
        except Corrupt as refused:
            assert "\n" not in str(refused)
            outcomes["refused"] += 1
        else:
            assert 0 < rows.sequence_lengths[0, 0] <= rows.input_ids.shape[1]
            assert rows.masked_positions is not None and rows.masked_counts is not None
            assert (rows.masked_positions < rows.sequence_lengths).all()
            assert (np.diff(rows.masked_positions[0, : rows.masked_counts[0]].astype(int)) > 0).all()
            outcomes["rows"] += 1
    assert min(outcomes.values()) > 20, outcomes


def test_missing_next_sentence_labels_are_no_labels(original: bytes) -> None:
    message = tf_example_pb2.Example.FromString(records_of(original)[0])
    del message.features.feature["next_sentence_labels"]
    examples = tfrecord.parse([message.SerializeToString()])
    assert tfrecord.to_rows(examples, UINT16, 0).next_sentence_labels.tolist() == [[-1]]


def test_masked_positions_in_any_order_are_sorted(original: bytes, rows: Rows) -> None:
    """Some scripts write them in the order in which they were sampled."""
    examples = tfrecord.parse(records_of(original))
    mixed = np.random.default_rng(0).permuted(np.tile(np.arange(8), (43, 1)), axis=1)
    fields = ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights")
    turned = {name: np.take_along_axis(getattr(examples, name), mixed, axis=1) for name in fields}
    for got, wanted in zip(tfrecord.to_rows(examples._replace(**turned), UINT16, 5 << 32), rows, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("field", "place", "value", "message"),
    [
        ("input_mask", 0, 0, "an input_mask that is not ones and then zeros"),
        ("segment_ids", 0, 1, "segment_ids that are not zeros and then ones"),
        ("input_ids", 3, -1, "an id outside of the vocabulary"),
        ("input_ids", 3, 70_000, "an id outside of the vocabulary"),
        ("masked_lm_positions", 0, 48, "a masked position outside of the sequence"),
        ("masked_lm_positions", 0, -1, "a masked position outside of the sequence"),
        ("masked_lm_weights", 0, 0.5, "masked_lm_weights other than 0 and 1"),
        ("next_sentence_labels", 0, 2, "a next_sentence_label other than"),
    ],
)
def test_example_that_is_not_a_valid_row_is_named(
    original: bytes, field: str, place: int, value: float, message: str
) -> None:
    examples = tfrecord.parse(records_of(original))
    getattr(examples, field)[7, place] = value
    with pytest.raises(Corrupt, match=f"example 7 has {message}"):
        tfrecord.to_rows(examples, UINT16, 0)


def test_repeated_masked_position_is_refused(original: bytes) -> None:
    examples = tfrecord.parse(records_of(original))
    examples.masked_lm_positions[4, 1] = examples.masked_lm_positions[4, 0]
    with pytest.raises(Corrupt, match="example 4 has a masked position twice"):
        tfrecord.to_rows(examples, UINT16, 0)
