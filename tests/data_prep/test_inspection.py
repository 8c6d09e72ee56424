"""What verification finds, and statistics that are counted again here row by row, as the format documents columns."""

import json
import os
import random
import shutil
import subprocess
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from bert_jax.data.example import Rows, unmasked_ids
from bert_jax.data.manifest import read_shard_table, read_unigram_counts
from bert_jax.data.masking.masker import Masker
from bert_jax.data.shard_file import Corrupt, read_shard, write_shard
from bert_jax.data.shards import open_dataset
from bert_jax.errors import UserError
from bert_jax.reporting.document import excerpt_text
from data_prep import joining, output_files
from data_prep.build import build
from data_prep.build_options import BuildOptions
from data_prep.inspection import REPLACEMENTS, excerpts, open_tokenizer, verify
from data_prep.worker import mask_rows
from tests.helpers import shard_tables

FIRST = "train/shard-00000.arrow"
OPTIONS = {
    "nsp_static_word": {"masking": "static", "mask_unit": "word"},
    "nsp_dynamic_token": {"masking": "dynamic", "mask_unit": "token"},
    "sop_static_packed": {"objective": "sop", "masking": "static", "mask_unit": "word", "pack": 4, "mask_rate": 0.3},
    "single_dynamic_packed": {"objective": "single", "masking": "dynamic", "mask_unit": "word", "pack": 3},
    "sentences_static_token": {"objective": "full_sentences", "masking": "static", "mask_unit": "token"},
    "doc_sentences_static": {"objective": "doc_sentences", "masking": "static", "mask_unit": "word"},
}


@pytest.fixture(scope="module", params=OPTIONS)
def measured(request: pytest.FixtureRequest, sample_text: Path, vocab_dir: Path, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("statistics") / "out"
    options = OPTIONS[request.param] | {"eval_fraction": 0.25, "workers": 1}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(joining, "TARGET_BYTES", 1)  # a shard for each unit
        build(BuildOptions(str(sample_text), vocab_dir, directory, 64, **options))
    return directory


def test_statistics_equal_a_count_by_hand(measured: Path) -> None:
    """With static masks; `verify` compares the counts of dynamic ones with the manifest."""
    found = verify(measured)
    for part, statistics in found.statistics.items():
        dataset = open_dataset(measured, part)
        rows = dataset.gather(np.arange(dataset.rows))
        names = ("lengths", "filled", "packed", "labels", "predictions", "replaced", "unigrams")
        by_hand: dict[str, Counter] = {name: Counter() for name in names}
        for row in range(dataset.rows):
            ids = rows.input_ids[row].tolist()
            lengths = [length for length in rows.sequence_lengths[row].tolist() if length]
            count = 0 if rows.masked_counts is None else int(rows.masked_counts[row])
            positions = [] if rows.masked_positions is None else rows.masked_positions[row, :count].tolist()
            labels = {position: int(rows.masked_ids[row, number]) for number, position in enumerate(positions)}
            by_hand["filled"][sum(lengths)] += 1
            by_hand["packed"][len(lengths)] += 1
            by_hand["unigrams"].update(
                labels.get(position, token) for position, token in enumerate(ids[: sum(lengths)])
            )
            start = 0
            for sequence, length in enumerate(lengths):
                by_hand["lengths"][length] += 1
                by_hand["labels"][int(rows.next_sentence_labels[row, sequence])] += 1
                by_hand["predictions"][sum(start <= position < start + length for position in positions)] += 1
                start += length
            for position, label in labels.items():
                mask = ids[position] == found.tokenizer.mask_id
                by_hand["replaced"]["[MASK]" if mask else "kept" if ids[position] == label else "random"] += 1
        drawn = {"predictions", "replaced"} if not dataset.static else set()
        for name in set(names) - drawn - {"labels", "replaced"}:
            assert Counter(dict(enumerate(getattr(statistics, name).tolist()))) == by_hand[name], name
        assert Counter(statistics.labels) == by_hand["labels"]
        assert statistics.tokens == sum(length * count for length, count in by_hand["lengths"].items())
        if dataset.static:
            assert statistics.replaced.tolist() == [by_hand["replaced"][name] for name in REPLACEMENTS]


def test_share_of_each_replacement_is_that_of_the_paper(measured: Path) -> None:
    """80, 10, 10 (Devlin et al. 2019), within five standard deviations: one false alarm in 10**6."""
    counts = sum(part.replaced for part in verify(measured).statistics.values())
    for count, share in zip(counts, (0.8, 0.1, 0.1), strict=True):
        assert abs(count - share * counts.sum()) < 5 * (share * (1 - share) * counts.sum()) ** 0.5


@pytest.fixture(scope="module")
def static_dir(sample_text: Path, vocab_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("static") / "static"
    options = OPTIONS["nsp_static_word"] | {"unit_mb": 0.03, "workers": 1}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(joining, "TARGET_BYTES", 1)  # a shard for each unit
        build(BuildOptions(str(sample_text), vocab_dir, directory, 64, **options))
    return directory


@pytest.fixture
def output(static_dir: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(static_dir, tmp_path / "out")
    return tmp_path / "out"


def copied(rows: Rows) -> Rows:
    return Rows(*(None if column is None else column.copy() for column in rows))


def seal(output: Path) -> None:
    """Lists the hashes of the changed files, so that only their contents can fail the verification."""
    content = (output / "manifest.json").read_bytes()
    (output / output_files.SUMS).write_bytes(
        output_files.render_sums(output, read_shard_table(output, json.loads(content)), content)
    )


def rewrite(output: Path, change, name: str = FIRST) -> None:
    """Replaces a shard by changed rows and updates its size and hash in the manifest."""
    rows = change(copied(read_shard(output / name)))
    written = write_shard(output / name, rows)
    shards = shard_tables.entries(output)
    shard_tables.replace(output, [shard | (written._asdict() if shard["name"] == name else {}) for shard in shards])
    seal(output)


def masked_again(output: Path, rows: Rows) -> Rows:
    """Masks rows whose keys have changed: masks depend on the keys."""
    dataset = open_dataset(output, "train")
    masker = Masker(dataset.vocabulary(), dataset.masking, dataset.manifest["seed"])
    return mask_rows(Rows(unmasked_ids(rows), *rows[1:5]), masker, dataset.max_predictions)


def test_output_of_build_examples_verifies(output: Path, shards_dir: Path) -> None:
    verify(output)
    verify(shards_dir)


def test_every_flipped_byte_of_every_file_is_detected_and_the_file_named(output: Path) -> None:
    """Damage of SHA256SUMS itself may name the file of the damaged line."""
    generator = random.Random(0)
    for path in sorted(path for path in output.rglob("*") if path.is_file()):
        name, whole = path.relative_to(output).as_posix(), path.read_bytes()
        for _ in range(6):
            damaged = bytearray(whole)
            damaged[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
            path.write_bytes(damaged)
            with pytest.raises(UserError) as told:
                verify(output)
            assert name in str(told.value) or name == output_files.SUMS, (name, str(told.value))
        path.write_bytes(whole)
    verify(output)


@pytest.mark.parametrize("name", [FIRST, "unigram_counts.npy"])
def test_damage_in_the_head_or_tail_of_a_file_raises_an_error_that_commands_report(output: Path, name: str) -> None:
    """Arrow and numpy store names, shapes and sizes there, which readers that do not hash may find damaged."""
    generator = random.Random(1)
    manifest, whole = json.loads((output / "manifest.json").read_text()), (output / name).read_bytes()
    told = 0
    for place in {*range(0, min(len(whole), 1400), 11), *range(max(len(whole) - 1400, 0), len(whole), 11)}:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << generator.randrange(8)
        (output / name).write_bytes(damaged)
        try:
            read_shard(output / name) if name == FIRST else read_unigram_counts(output, manifest)
        except (UserError, Corrupt):
            told += 1
    assert told > 3


def test_list_of_hashes_is_that_of_sha256sum(output: Path) -> None:
    found = subprocess.run(
        ["sha256sum", "--check", "--strict", output_files.SUMS], cwd=output, capture_output=True, text=True, check=True
    )
    listed = {line.removesuffix(": OK") for line in found.stdout.splitlines()}
    assert listed == {path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()} - {
        output_files.SUMS
    }


def test_a_note_next_to_the_manifest_is_not_damage(output: Path) -> None:
    (output / "notes.html").write_text("mine")
    verify(output)


def test_every_damaged_shard_is_counted(output: Path) -> None:
    names = [shard["name"] for shard in shard_tables.entries(output)]
    assert len(names) > 1
    for name in names:
        content = bytearray((output / name).read_bytes())
        content[len(content) // 2] ^= 1
        (output / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"\(and {len(names) - 1} more files\)"):
        verify(output)


def set_column(name: str, *place_and_value: int):
    def change(rows: Rows) -> Rows:
        *place, value = place_and_value
        getattr(rows, name)[tuple(place)] = value
        return rows

    return change


def unmask_order(rows: Rows) -> Rows:
    assert rows.masked_positions is not None
    rows.masked_positions[0, :2] = rows.masked_positions[0, [1, 0]]
    return rows


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (set_column("input_ids", 3, 0, 7), r"row 3 has a sequence that does not begin with \[CLS\]"),
        (set_column("input_ids", 3, 5, 65000), "row 3 has an id outside of the vocabulary"),
        (set_column("sequence_lengths", 2, 0, 65), "row 2 has sequences longer than the row"),
        (set_column("sequence_lengths", 2, 0, 0), "row 2 has no sequence"),
        (set_column("first_segment_lengths", 1, 0, 1), "row 1 has"),
        (set_column("next_sentence_labels", 1, 0, 3), "row 1 has an invalid next-sentence label"),
        (set_column("sequence_keys", 1, 0, 99), "sequence keys that do not count up"),
        (set_column("masked_ids", 0, 0, 0), "row 0 has a special token that is predicted"),
        (unmask_order, "row 0 has masked positions that do not ascend"),
        (set_column("masked_counts", 2, 60000), "row 2 has more predictions than fit"),
        (lambda rows: rows._replace(masked_counts=None), "column masked_counts"),
        (
            lambda rows: Rows(*(column if column is None else column[:-1] for column in rows)),
            "states .* sequences in train",
        ),
    ],
)
def test_rows_that_break_a_guarantee_are_detected(output: Path, change, told: str) -> None:
    rewrite(output, change)
    with pytest.raises(UserError, match=told):
        verify(output)


def move(name: str, by: int, *places: str):
    """A change of a count of the manifest, in total or in a part."""

    def change(manifest: dict) -> None:
        for place in places:
            counts = manifest["counts"] if place == "counts" else manifest["parts"][place]
            counts[name] += by

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (move("predictions", 1, "counts", "train"), "predictions in train, but the shards hold"),
        (move("documents", 1, "counts"), "documents in total"),
        (move("rows", 1, "counts"), "rows in total"),
        (move("used", -1, "counts", "train"), "states 12 documents, but 11 used and 0 skipped"),
        (
            lambda manifest: manifest["counts"]["skipped"].update(no_tokens=1),
            "1 no_tokens in total, but 0 in the parts and in reading",
        ),
        (lambda manifest: manifest["parts"]["train"].update(filled=0.5), r"0\.5 filled in train, but the shards hold"),
        (lambda manifest: manifest.update(seed=1), "static masks that are not those of epoch 0"),
    ],
)
def test_a_manifest_that_does_not_match_is_detected(output: Path, change, told: str) -> None:
    manifest = json.loads((output / "manifest.json").read_text())
    change(manifest)
    (output / "manifest.json").write_text(json.dumps(manifest))
    seal(output)
    with pytest.raises(UserError, match=told):
        verify(output)


def test_a_file_that_does_not_match_is_detected_although_its_hash_is_listed(output: Path) -> None:
    counts = np.load(output / "unigram_counts.npy")
    counts[100] += 1
    np.save(output / "unigram_counts.npy", counts)
    seal(output)
    with pytest.raises(UserError, match="unigram_counts"):
        verify(output)
    vocabulary = output / "tokenizer" / "vocab.txt"
    lines = vocabulary.read_text(encoding="utf-8").splitlines()
    shutil.rmtree(output / "tokenizer")
    vocabulary.parent.mkdir()
    vocabulary.write_text("\n".join([*lines[:-2], lines[-1], lines[-2]]) + "\n", encoding="utf-8")
    seal(output)
    with pytest.raises(UserError, match="not the tokenizer that made the shards"):
        verify(output)


def test_repeated_keys_are_detected(output: Path) -> None:
    """Two shards with the same keys, each in order."""
    first = read_shard(output / FIRST)
    names = [shard["name"] for shard in shard_tables.entries(output)]

    def repeat(rows: Rows) -> Rows:
        keys = first.sequence_keys[0] + np.arange(len(rows.input_ids), dtype=np.uint64)[:, None]
        return masked_again(output, rows._replace(sequence_keys=keys))

    rewrite(output, repeat, names[1])
    with pytest.raises(UserError, match="occurs twice"):
        verify(output)


@pytest.mark.parametrize(
    ("offset", "told"),
    [
        (1 << 63, "sequence keys that are not those of train"),
        ((1 << 32) - 2, "sequence key 4294967296 occurs twice"),
    ],
)
def test_keys_of_another_part_or_unit_are_detected(output: Path, offset: int, told: str) -> None:
    rewrite(output, lambda rows: masked_again(output, rows._replace(sequence_keys=rows.sequence_keys + offset)))
    with pytest.raises(UserError, match=told):
        verify(output)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *product(
            ["train/shard-99999.arrow", "tokenizer/x", "more/shard.arrow"],
            ["file", "pipe", "dangling", "link", "folder"],
        ),
        *(("notes", kind) for kind in ("pipe", "dangling", "link", "folder")),
    ],
)
def test_files_that_are_not_listed_are_detected(output: Path, name: str, kind: str) -> None:
    """A folder with contents is named by what it contains."""
    path = output / name
    path.parent.mkdir(exist_ok=True)
    match kind:
        case "file":
            path.write_bytes(b"stray")
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case _:
            path.symlink_to(output.parent / ("nothing" if kind == "dangling" else ""))
    with pytest.raises(UserError, match=rf"{path}: SHA256SUMS does not list it;"):
        verify(output)


def test_part_without_rows_may_be_a_folder_or_none(sample_text: Path, vocab_dir: Path, tmp_path: Path) -> None:
    """A copy through an object store has no empty folders."""
    output = tmp_path / "out"
    build(BuildOptions(str(sample_text), vocab_dir, output, 64, eval_fraction=0.0, workers=1))
    verify(output)
    (output / "eval").rmdir()
    verify(output)


@pytest.mark.parametrize("content", [None, b"", b"\x93NUMPY\x01", "cut"])
def test_damaged_unigram_counts_are_reported(output: Path, content) -> None:
    path = output / "unigram_counts.npy"
    whole = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(whole[:-8] if content == "cut" else content)
    seal(output)
    with pytest.raises(UserError, match=r"(missing|damaged) .*unigram_counts\.npy"):
        verify(output)


def test_rows_are_shown_as_text_with_labels(output: Path, sample_text: Path) -> None:
    """The text has words of the source; masked ones are in braces with their labels."""
    dataset = open_dataset(output, "train")
    shown = [excerpt_text(row) for row in excerpts(dataset, open_tokenizer(output, dataset.manifest), range(20))]
    assert len(shown) == 20
    rows = dataset.gather(np.arange(20))
    source = set(sample_text.read_text(encoding="utf-8").lower().split())
    for row, text in enumerate(shown):
        assert ("B is random" if rows.next_sentence_labels[row, 0] else "B is next") in text
        assert "  A: [CLS]" in text and "  B: " in text and text.count("[SEP]") == 2
        assert 0 < text.count("{") <= int(rows.masked_counts[row])
        words = [word for word in text.split("\n", 1)[1].split() if word.isalpha() and len(word) > 3]
        assert sum(word in source for word in words) > 0.5 * len(words)


def test_dynamic_rows_show_no_masks(shards_dir: Path) -> None:
    dataset = open_dataset(shards_dir, "train")
    assert all(
        "[MASK]" not in excerpt_text(row)
        for row in excerpts(dataset, open_tokenizer(shards_dir, dataset.manifest), range(30))
    )
