"""Shards on disk: what is written is read, damage is refused, and copies of shards in stores equal the originals."""

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pyarrow import fs

from bert_jax.config import PretrainConfig, PretrainDataConfig
from bert_jax.data.example import Rows
from bert_jax.data.manifest import COUNTED, PARTS, SCHEMA_VERSION, ShardTable, read_manifest, read_unigram_counts
from bert_jax.data.masking.rule import MaskingRule
from bert_jax.data.phases import open_held_out, open_phases
from bert_jax.data.shards import local_copy, open_dataset, read_shard, write_shard
from bert_jax.errors import UserError
from bert_jax.storage import remote
from bert_jax.tokenization.vocabulary import Vocabulary
from tests.helpers import shard_tables

SEQ_LEN, MOST = 16, 3


def random_rows(count: int, seed: int, static: bool = False) -> Rows:
    generator = np.random.default_rng(seed)

    def column(width: int, dtype: type) -> np.ndarray:
        return generator.integers(0, 100, (count, width)).astype(dtype)

    def ones(highest: int, dtype: type) -> np.ndarray:
        return generator.integers(1, highest, (count, 1), endpoint=True).astype(dtype)

    rows = Rows(
        column(SEQ_LEN, np.uint16),
        ones(SEQ_LEN, np.uint16),
        ones(1, np.uint16),
        ones(1, np.int8),
        np.arange(seed << 32, (seed << 32) + count, dtype=np.uint64)[:, None],
    )
    if static:
        rows = rows._replace(
            masked_positions=column(MOST, np.uint16) % SEQ_LEN,
            masked_ids=column(MOST, np.uint16),
            masked_counts=column(1, np.uint16)[:, 0],
        )
    return rows


def write_output(directory: Path, counts: list[int], static: bool = False) -> Rows:
    """Writes a train part of shards with these numbers of rows, and its manifest; returns all rows in order."""
    (directory / "train").mkdir(parents=True)
    shards, parts = [], []
    for number, count in enumerate(counts):
        name = f"train/shard-{number:05d}.arrow"
        parts.append(random_rows(count, number, static))
        shards.append({"name": name} | write_shard(directory / name, parts[-1])._asdict())
    held = dict.fromkeys(COUNTED, 0) | {"skipped": {}}
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "format": "arrow",
        "objective": "nsp",
        "seed": 0,
        "dupe_factor": 1,
        "eval_fraction": 0.0,
        "short_seq_prob": 0.1,
        "corruption": {"delete_rate": 0.0, "insert_rate": 0.0},
        "unit_bytes": 1_000_000,
        "sources": [],
        "reading": {"document": "blank_line", "text_field": "text", "dedup": False},
        "counts": held,
        "skipped_reading": {},
        "parts": dict.fromkeys(("train", "eval"), held | {"filled": 1.0}),
        "unigram_counts": "unigram_counts.npy",
        "seq_len": SEQ_LEN,
        "pack": 1,
        "masking": {
            "kind": "static" if static else "dynamic",
            "max_predictions": MOST,
            **MaskingRule("token").to_manifest(),
        },
        "tokenizer": {"hash": "0" * 64, "vocab_size": 100, "lowercase": True},
        "versions": {},
    }
    shard_tables.replace(directory, shards, manifest)
    columns = zip(*parts, strict=True)
    return Rows(*(None if column[0] is None else np.concatenate(column) for column in columns))


def assert_rows_equal(got: Rows, wanted: Rows) -> None:
    for name, values in wanted._asdict().items():
        np.testing.assert_array_equal(getattr(got, name), values, err_msg=name)
        if values is not None:
            assert getattr(got, name).dtype == values.dtype, name


def edit_manifest(directory: Path, **changes: object) -> None:
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps(manifest | changes))


@pytest.mark.parametrize("static", [False, True])
def test_shard_is_read_as_written(tmp_path: Path, static: bool) -> None:
    rows = random_rows(7, 3, static)
    written = write_shard(tmp_path / "shard.arrow", rows)
    assert written.rows == 7 and written.bytes == (tmp_path / "shard.arrow").stat().st_size
    assert_rows_equal(read_shard(tmp_path / "shard.arrow"), rows)


def test_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    first = write_shard(tmp_path / "a.arrow", random_rows(9, 1))
    assert write_shard(tmp_path / "b.arrow", random_rows(9, 1)) == first


@pytest.mark.parametrize("static", [False, True])
def test_gather_gives_the_rows_asked_for_in_order(tmp_path: Path, static: bool) -> None:
    """Rows over many shards, some alone in theirs, some several, repeated ones too."""
    everything = write_output(tmp_path, [5, 1, 40, 3, 17], static)
    dataset = open_dataset(tmp_path, "train")
    assert dataset.rows == 66 and dataset.static is static
    generator = np.random.default_rng(0)
    for count in (0, 1, 2, 20, 200):
        indices = generator.integers(0, 66, count)
        got = dataset.gather(indices)
        assert_rows_equal(got, Rows(*(None if column is None else column[indices] for column in everything)))
        assert all(column is None or (column.flags.c_contiguous and column.flags.writeable) for column in got)


@pytest.mark.parametrize("index", [-1, 5])
def test_gather_refuses_rows_that_are_not_there(tmp_path: Path, index: int) -> None:
    write_output(tmp_path, [5])
    with pytest.raises(IndexError):
        open_dataset(tmp_path, "train").gather(np.array([0, index]))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files in /proc, which is Linux's")
def test_any_number_of_shards_keeps_no_file_open(tmp_path: Path) -> None:
    everything = write_output(tmp_path, [2] * 300)
    before = len(os.listdir("/proc/self/fd"))
    dataset = open_dataset(tmp_path, "train")
    rows = dataset.gather(np.arange(600))
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert_rows_equal(rows, everything)


def test_shards_are_opened_only_when_a_row_is_asked_for(tmp_path: Path) -> None:
    """A shard of the right length that is no Arrow file shows nowhere but in its own rows."""
    write_output(tmp_path, [4, 4])
    path = tmp_path / "train" / "shard-00001.arrow"
    path.write_bytes(b"\0" * path.stat().st_size)
    dataset = open_dataset(tmp_path, "train")
    dataset.gather(np.arange(4))
    with pytest.raises(UserError, match=r"damaged shard .*shard-00001\.arrow"):
        dataset.gather(np.arange(8))


def test_path_of_a_part_decides_the_part(shards_dir: Path) -> None:
    train, held_out = open_dataset(shards_dir, "train"), open_dataset(shards_dir, "eval")
    assert open_dataset(shards_dir / "eval", "train").fingerprint == held_out.fingerprint
    assert open_dataset(shards_dir / "train", "eval").fingerprint == train.fingerprint
    assert train.fingerprint != held_out.fingerprint
    assert (train.part, held_out.part, train.directory) == ("train", "eval", shards_dir)


def test_fingerprint_follows_content(tmp_path: Path) -> None:
    write_output(tmp_path / "a", [4, 4])
    write_output(tmp_path / "b", [4, 4])
    write_output(tmp_path / "c", [4, 5])
    a, b, c = (open_dataset(tmp_path / name, "train").fingerprint for name in "abc")
    assert a == b != c


def test_dataset_has_the_values_of_the_manifest(shards_dir: Path) -> None:
    dataset = open_dataset(shards_dir, "train")
    tokenizer = dataset.vocabulary()
    assert isinstance(tokenizer, Vocabulary)
    assert (dataset.seq_len, dataset.pack, dataset.static, dataset.masking.unit) == (64, 1, False, "word")
    assert (dataset.masking.rate, dataset.max_predictions) == (0.15, 10)
    assert dataset.vocab_size == tokenizer.vocab_size and dataset.tokenizer_hash == tokenizer.content_hash
    assert dataset.rows == dataset.manifest["parts"]["train"]["rows"]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), r"no manifest\.json"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "manifest.json").write_text('{"schema_version": 2}'), "format is missing"),
        (lambda folder: edit_manifest(folder, schema_version=99), "schema_version 99"),
        (lambda folder: edit_manifest(folder, schema_version=1), "schema_version 1, .* Build the examples again"),
        (lambda folder: edit_manifest(folder, seq_len=SEQ_LEN * 2), "column input_ids"),
        (lambda folder: shard_tables.replace(folder, []), "lower --eval_fraction"),
        (lambda folder: (folder / "train" / "shard-00000.arrow").unlink(), r"missing shard .*shard-00000\.arrow"),
        (
            lambda folder: os.truncate(folder / "train" / "shard-00001.arrow", 9),
            r"00001\.arrow: it has 9 bytes instead",
        ),
        (lambda folder: folder.rename(f"{folder}.incomplete"), r"Run the same .* command again"),
    ],
)
def test_a_damaged_output_is_refused(tmp_path: Path, damage: Callable[[Path], object], told: str) -> None:
    write_output(tmp_path / "out", [4, 4])
    damage(tmp_path / "out")
    with pytest.raises(UserError, match=told):
        open_dataset(tmp_path / "out", "train").gather(np.arange(8))


def rename(folder: Path, name: str) -> None:
    first, *others = shard_tables.entries(folder)
    shard_tables.replace(folder, [first | {"name": name}, *others])


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: (folder / "shards.arrow").unlink(), r"missing .*shards\.arrow\. Copy the folder again"),
        (
            lambda folder: os.truncate(folder / "shards.arrow", 50),
            r"damaged .*shards\.arrow: its sha256 is not",
        ),
        (lambda folder: rename(folder, "../a.arrow"), r"'\.\./a\.arrow' is not the name of a file in the folder"),
        (lambda folder: rename(folder, "train/../../a"), r"'train/\.\./\.\./a' is not the name of"),
        (lambda folder: rename(folder, "train/a\neval/b"), r"'train/a\\neval/b' is not the name of"),
        (lambda folder: rename(folder, "/tmp/a"), r"'/tmp/a' is not the name of"),
    ],
)
def test_a_damaged_table_of_shards_is_refused_in_a_line(
    tmp_path: Path, damage: Callable[[Path], object], told: str
) -> None:
    write_output(tmp_path, [4, 4])
    damage(tmp_path)
    with pytest.raises(UserError, match=told) as caught:
        open_dataset(tmp_path, "train")
    assert "\n" not in str(caught.value)


def test_a_table_with_impossible_rows_or_of_other_columns_is_refused(tmp_path: Path) -> None:
    write_output(tmp_path, [4, 4])
    shards = shard_tables.entries(tmp_path)
    shard_tables.replace(tmp_path, [shards[0] | {"rows": -1}, shards[1]])
    with pytest.raises(UserError, match=r"shards\.arrow: a shard has an impossible number of rows"):
        open_dataset(tmp_path, "train")
    content = (tmp_path / "train" / "shard-00000.arrow").read_bytes()  # an Arrow file, but of rows
    (tmp_path / "shards.arrow").write_bytes(content)
    edit_manifest(tmp_path, shards=ShardTable.of_entries([]).summary(content))
    with pytest.raises(UserError, match="it is not a table of name, rows, bytes and sha256"):
        open_dataset(tmp_path, "train")


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("seq_len",), None, "seq_len is missing"),
        (("masking", "rate"), None, r"masking\.rate is missing"),
        (("masking",), 7, "masking is not an object"),
        (("masking", "split"), "0.8", r"masking\.split is not a list"),
        (("masking", "split"), [1, "a", 0], r"masking\.split\[1\] is 'a'"),
        (("masking", "random"), 3, r"masking\.random is 3"),
        (("masking", "reorder_rate"), "0", r"masking\.reorder_rate is '0'"),
        (("format",), None, "format is missing"),
        (("parts", "eval", "rows"), None, r"parts\.eval\.rows is missing"),
        (("shards",), "x", "shards is not an object"),
        (("shards", "count"), "many", r"shards\.count is 'many'"),
        (("shards", "table"), "../shards.arrow", "'../shards.arrow' is not the name of a file"),
        (("skipped_reading",), [], "skipped_reading is not an object"),
        (("skipped_reading",), {"duplicate": "x"}, r"skipped_reading\.duplicate is 'x'"),
        (("counts", "used"), "7", r"counts\.used is '7'"),
        (("parts", "eval", "used"), [], r"parts\.eval\.used is \[\]"),
        (("parts", "train", "skipped"), {"duplicate": -1}, r"parts\.train\.skipped\.duplicate is -1"),
        (("parts", "train", "filled"), float("nan"), r"parts\.train\.filled is nan"),
        (("masking", "max_predictions"), 2**70, rf"masking\.max_predictions is {2**70}"),
        (("pack",), 2**70, rf"pack is {2**70}"),
        (("pack",), True, "pack is True"),
        (("dupe_factor",), 0, "dupe_factor is 0"),
        (("eval_fraction",), 1.0, r"eval_fraction is 1\.0"),
        (("short_seq_prob",), "x", "short_seq_prob is 'x'"),
        (("unit_bytes",), 0, "unit_bytes is 0"),
        (("corruption",), {"delete_rate": 0.0}, r"corruption\.insert_rate is missing"),
        (("reading",), {"document": "file", "text_field": "text", "dedup": 1}, r"reading\.dedup is 1"),
        (("sources",), [{"path": "x", "bytes": 1, "weight": 0}], r"sources\[0\]\.weight is 0"),
    ],
)
def test_damaged_manifest_is_refused_with_what_is_missing(
    tmp_path: Path, path: tuple, value: object, told: str
) -> None:
    write_output(tmp_path, [4])
    manifest = inner = json.loads((tmp_path / "manifest.json").read_text())
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    if value is None:
        del inner[path[-1]]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=rf"damaged .*manifest\.json: {told}"):
        open_dataset(tmp_path, "train")


def test_a_folder_that_is_no_finished_output_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out.incomplete").mkdir()
    for path, told in (
        (Path("/"), r"no manifest\.json in /"),
        (tmp_path / "out.incomplete", "Run the same .* command"),
    ):
        with pytest.raises(UserError, match=told):
            read_manifest(path)


def test_unigram_counts_are_read_or_refused(tmp_path: Path) -> None:
    write_output(tmp_path, [4])
    manifest = read_manifest(tmp_path)
    np.save(tmp_path / "unigram_counts.npy", np.arange(100))
    np.testing.assert_array_equal(read_unigram_counts(tmp_path, manifest), np.arange(100))
    for wrong in (np.arange(99), np.arange(100.0), np.array("text")):
        np.save(tmp_path / "unigram_counts.npy", wrong)
        with pytest.raises(UserError, match=r"unigram_counts\.npy: not an int64\[100\]"):
            read_unigram_counts(tmp_path, manifest)


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("input_ids", 100, "an id outside of the vocabulary of 100"),
        ("sequence_lengths", 17, "sequences longer than the row of 16 positions"),
        ("first_segment_lengths", 17, "a segment longer than its sequence"),
        ("next_sentence_labels", 2, "a next-sentence label over 1"),
        ("masked_ids", 100, "a masked id outside"),
        ("masked_positions", 16, "a masked position outside"),
    ],
)
def test_values_that_cannot_be_are_refused_with_the_shard(tmp_path: Path, column: str, value: int, told: str) -> None:
    """Rows of other shards, and other rows of that shard, may still be read."""
    rows = write_output(tmp_path, [4, 4], static=True)
    getattr(rows, column)[5, 0] = value
    write_shard(tmp_path / "train" / "shard-00001.arrow", Rows(*(values[4:] for values in rows)))
    dataset = open_dataset(tmp_path, "train")
    dataset.gather(np.array([0, 1, 4, 6]))
    with pytest.raises(UserError, match=rf"damaged shard .*shard-00001\.arrow: {told}.*--verify"):
        dataset.gather(np.array([0, 5]))


def test_part_without_rows_names_the_flag_to_change(tmp_path: Path) -> None:
    write_output(tmp_path, [4])
    with pytest.raises(UserError, match="raise --eval_fraction"):
        open_dataset(tmp_path, "eval")


def test_wrong_tokenizer_for_the_shards_is_refused(tmp_path: Path, vocab_dir: Path) -> None:
    write_output(tmp_path, [4])
    (tmp_path / "tokenizer").symlink_to(vocab_dir)
    with pytest.raises(UserError, match="wrong tokenizer for the shards"):
        open_dataset(tmp_path, "train").vocabulary()


def test_failed_write_leaves_nothing_and_names_the_file(tmp_path: Path) -> None:
    """A real failure of the operating system in the middle of a write: the file-size limit."""
    path = tmp_path / "shard.arrow"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError) as caught:
            write_shard(path, random_rows(1000, 0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(path)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def store(shards_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of all buckets, with the shards as gs://bucket/books."""
    folder = tmp_path / "store"
    shutil.copytree(shards_dir, folder / "bucket" / "books")
    pretended = fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem())
    monkeypatch.setattr(remote, "open_store", lambda address: (pretended, address[5:]))
    return folder / "bucket" / "books"


@pytest.fixture
def copy(tmp_path: Path):
    """Calls local_copy with one cache; returns the path of the copy and the printed lines."""

    def copy(address: str, parts=PARTS) -> tuple[Path, list[str]]:
        lines: list[str] = []
        return Path(local_copy(address, str(tmp_path / "cache"), parts, lines.append)), lines

    return copy


def test_a_copy_is_made_once_and_equals_the_original(store, copy, shards_dir, tmp_path):
    there, lines = copy("gs://bucket/books")
    assert there.parent == tmp_path / "cache" and there.name.startswith("books-")
    assert len(lines) == 1 and lines[0].startswith("copying ") and "gs://bucket/books" in lines[0]
    for part in PARTS:
        assert open_dataset(there, part).fingerprint == open_dataset(shards_dir, part).fingerprint
    assert open_dataset(there, "train").vocabulary().content_hash == open_dataset(shards_dir, "train").tokenizer_hash
    assert copy("gs://bucket/books/") == (there, [])
    assert copy("gs://bucket/books/eval") == (there / "eval", [])
    assert copy(str(shards_dir))[0].name == there.name.replace("books", "shards")


@pytest.mark.parametrize("named", ["books", "books/train", "books/train/"])
def test_the_train_folder_of_a_store_has_its_held_out_rows(store, shards_dir, tmp_path, named):
    data = PretrainDataConfig(train=f"gs://bucket/{named}", cache_dir=str(tmp_path / "cache"))
    phases = open_phases(data)
    ((held_out,),) = open_held_out(PretrainConfig(data=data), phases)
    assert held_out.dataset.fingerprint == open_dataset(shards_dir, "eval").fingerprint
    assert phases[0].mixture.dataset.fingerprint == open_dataset(shards_dir, "train").fingerprint


def test_only_requested_parts_are_copied(store, copy):
    there, _ = copy("gs://bucket/books/eval")
    assert not (there.parent / "train").exists()
    assert open_dataset(there, "train").part == "eval"
    with pytest.raises(UserError, match="missing shard"):
        open_dataset(there.parent, "train").gather(np.array([0]))
    _, lines = copy("gs://bucket/books")
    assert len(lines) == 1
    open_dataset(there.parent, "train").gather(np.array([0]))


def test_a_truncated_or_missing_file_is_copied_again(store, copy):
    there, _ = copy("gs://bucket/books")
    shard, vocabulary = there / "train" / "shard-00000.arrow", next((there / "tokenizer").iterdir())
    content = shard.read_bytes()
    os.truncate(shard, 100)
    vocabulary.unlink()
    assert copy("gs://bucket/books")[1][0].startswith("copying 2 files")
    assert shard.read_bytes() == content and vocabulary.exists()


def test_damaged_files_are_refused_and_not_kept(store, copy, tmp_path):
    shard = store / "train" / "shard-00000.arrow"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(
        UserError, match=r"damaged gs://bucket/books/train/shard-00000\.arrow: its sha256 is \w+\.\.\., expected"
    ) as caught:
        copy("gs://bucket/books")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").rglob("manifest.json")) and not list((tmp_path / "cache").rglob("*.tmp"))


def test_a_rebuilt_output_is_another_copy(store, copy):
    first, _ = copy("gs://bucket/books")
    manifest = store / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"seed": 0', '"seed": 1'))
    second, lines = copy("gs://bucket/books")
    assert second != first and lines


def test_errors_are_one_line(store, copy):
    with pytest.raises(UserError, match=r"gs://bucket/nowhere/manifest\.json does not exist. Check the address"):
        copy("gs://bucket/nowhere")
    with pytest.raises(UserError, match="cache_dir=gs://bucket/cache is in an object store"):
        local_copy("gs://bucket/books", "gs://bucket/cache", PARTS, print)
    for content, told in (("{", "gs://bucket/books/manifest.json is not"), ('{"schema_version": 99}', "_version 99")):
        (store / "manifest.json").write_text(content)
        with pytest.raises(UserError, match=told):
            copy("gs://bucket/books")


def test_a_cache_without_locks_is_refused(store, copy, monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(UserError, match=r"cache is on a file system without locks; choose one on a local disk"):
        copy("gs://bucket/books")
