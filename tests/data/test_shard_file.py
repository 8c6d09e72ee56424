"""Rows are where the arithmetic of data/shard_file.py finds them, in files that pyarrow wrote and reads."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from bert_jax.data import shard_file
from bert_jax.data.example import Rows
from bert_jax.data.shard_file import Corrupt, ShardLayout, read_shard, write_shard

MOST = 5


def manifest(seq_len: int, pack: int, static: bool) -> dict:
    masking = {"kind": "static" if static else "dynamic", "max_predictions": MOST}
    return {"seq_len": seq_len, "pack": pack, "tokenizer": {"vocab_size": 100}, "masking": masking}


def random_rows(layout: ShardLayout, count: int) -> Rows:
    generator = np.random.default_rng(count)
    columns = {
        name: generator.integers(0, 100, (count, *shape)).astype(kind) for name, (shape, kind) in layout.columns.items()
    }
    return Rows(**columns)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_file, "BLOCK_BYTES", 1 << 12)


@pytest.mark.parametrize(("seq_len", "pack", "static"), [(128, 1, False), (33, 3, True), (17, 1, True)])
def test_rows_are_where_the_layout_finds_them(tmp_path: Path, seq_len: int, pack: int, static: bool) -> None:
    layout, path = ShardLayout(manifest(seq_len, pack, static)), tmp_path / "shard.arrow"
    size, framings = layout.block_rows, set()
    for count in (1, size - 1, size, size + 1, 2 * size, 40 * size + 3):
        rows = random_rows(layout, count)
        written = write_shard(path, rows)
        content = path.read_bytes()
        framing = layout.read_framing(lambda offset, length: content[offset : offset + length], count, written.bytes)  # noqa: B023
        assert layout.file_bytes(count, framing) == written.bytes == len(content)
        framings.add(framing)
        numbers = np.arange(count)
        same = (np.full(count, each) for each in (len(framing.schema), framing.header, count))
        begins = layout.offsets(*same, numbers)
        for (name, (shape, kind)), begin, width in zip(layout.columns.items(), begins, layout.widths, strict=True):
            stored = b"".join(content[offset : offset + width] for offset in begin.tolist())
            np.testing.assert_array_equal(np.frombuffer(stored, kind).reshape(count, *shape), getattr(rows, name))
            np.testing.assert_array_equal(getattr(read_shard(path), name), getattr(rows, name))
    assert len(framings) == 1, "the framing depends on the number of rows"


def test_another_layout_is_refused(tmp_path: Path) -> None:
    layout, path = ShardLayout(manifest(16, 1, False)), tmp_path / "shard.arrow"
    count = layout.block_rows + 8
    rows = random_rows(layout, count)

    def problem(wanted: int = count) -> str:
        content = path.read_bytes()
        with pytest.raises(Corrupt) as caught:
            layout.read_framing(lambda offset, length: content[offset : offset + length], wanted, len(content))
        return str(caught.value)

    write_shard(path, rows)
    assert "record batches instead of 1" in problem(8) and "too few for" in problem(10 * count)
    content = path.read_bytes()
    path.write_bytes(b"\0" * len(content))
    assert "not an Arrow IPC file (no message at its beginning)" in problem()
    path.write_bytes(content[:-4] + b"\0" * 4)
    assert problem().startswith("not an Arrow IPC file")
    write_shard(path, rows)
    with pa.memory_map(str(path)) as file:
        table = pa.ipc.open_file(file).read_all().combine_chunks()
        for changed, told in (
            (table, "1 record batches instead of 2"),
            (table.select(["sequence_keys", *table.column_names[:-1]]), "too few for|record batches|another order"),
        ):
            with pa.ipc.new_file(str(tmp_path / "other.arrow"), changed.schema) as writer:
                writer.write_table(changed, layout.block_rows if told[0] == "t" else None)
            path = tmp_path / "other.arrow"
            assert any(each in problem() for each in told.split("|"))
