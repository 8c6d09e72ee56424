import io
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bert_jax.command import UserError
from bert_jax.data.example import Rows
from bert_jax.data.manifest import read_unigram_counts
from bert_jax.data.masking import Masker
from bert_jax.data.shards import Corrupt, open_dataset, read_shard, write_shard
from bert_jax.reporting.terminal import excerpt_text
from data_prep import checksums, inspect_shards
from data_prep.build_examples import build
from data_prep.build_options import BuildOptions
from data_prep.fill import mask_rows
from data_prep.inspection.contents import first_rows
from data_prep.inspection.statistics import unmasked_ids
from data_prep.inspection.verification import open_tokenizer, verify

ROOT = Path(__file__).parent.parent
FIRST = "train/shard-00000.arrow"


@pytest.fixture(scope="module")
def static_dir(sample_text: Path, vocab_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("static") / "static"
    build(
        BuildOptions(
            str(sample_text), vocab_dir, directory, 64, masking="static", mask_unit="word", unit_mb=0.03, workers=1
        )
    )
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
    (output / checksums.SUMS).write_bytes(checksums.render(output, json.loads(content), content))


def rewrite(output: Path, change, name: str = FIRST) -> None:
    """Replaces a shard by changed rows and updates its size and hash in the manifest."""
    rows = change(copied(read_shard(output / name)))
    written = write_shard(output / name, rows)
    manifest = json.loads((output / "manifest.json").read_text())
    for shard in manifest["shards"]:
        if shard["name"] == name:
            shard.update(written._asdict())
    (output / "manifest.json").write_text(json.dumps(manifest))
    seal(output)


def change_manifest(output: Path, change) -> None:
    manifest = json.loads((output / "manifest.json").read_text())
    change(manifest)
    (output / "manifest.json").write_text(json.dumps(manifest))
    seal(output)


def masked_again(output: Path, rows: Rows) -> Rows:
    """Masks rows whose keys have changed: masks depend on the keys."""
    dataset = open_dataset(output, "train")
    masker = Masker(dataset.vocabulary(), dataset.masking, dataset.manifest["seed"])
    return mask_rows(Rows(unmasked_ids(rows), *rows[1:5]), masker, dataset.max_predictions)


def test_output_of_build_examples_verifies(output: Path, shards_dir: Path) -> None:
    verify(output)
    verify(shards_dir)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9, 0.999])
def test_flipped_bit_is_detected_and_its_shard_named(output: Path, share: float) -> None:
    manifest = json.loads((output / "manifest.json").read_text())
    name = manifest["shards"][-1]["name"]
    content = bytearray((output / name).read_bytes())
    content[int(share * len(content))] ^= 1
    (output / name).write_bytes(content)
    with pytest.raises(UserError, match=f"damaged .*{name}: its sha256 is not that of SHA256SUMS"):
        verify(output)


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
            assert name in str(told.value) or name == checksums.SUMS, (name, str(told.value))
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
        ["sha256sum", "--check", "--strict", checksums.SUMS], cwd=output, capture_output=True, text=True, check=True
    )
    listed = {line.removesuffix(": OK") for line in found.stdout.splitlines()}
    assert listed == {path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()} - {
        checksums.SUMS
    }


def test_a_note_next_to_the_manifest_is_not_damage(output: Path) -> None:
    (output / "notes.html").write_text("mine")
    verify(output)


def test_every_damaged_shard_is_counted(output: Path) -> None:
    names = [shard["name"] for shard in json.loads((output / "manifest.json").read_text())["shards"]]
    assert len(names) > 1
    for name in names:
        content = bytearray((output / name).read_bytes())
        content[len(content) // 2] ^= 1
        (output / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"\(and {len(names) - 1} more files\)"):
        verify(output)


def set_column(name: str, row: int, slot: int, value: int):
    def change(rows: Rows) -> Rows:
        column = getattr(rows, name)
        column[row, slot] = value
        return rows

    return change


def unmask_order(rows: Rows) -> Rows:
    assert rows.masked_positions is not None
    rows.masked_positions[0, :2] = rows.masked_positions[0, [1, 0]]
    return rows


def more_masks(rows: Rows) -> Rows:
    assert rows.masked_counts is not None
    rows.masked_counts[2] = 60000
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
        (more_masks, "row 2 has more predictions than fit"),
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


def test_wrong_counts_are_detected(output: Path) -> None:
    manifest = json.loads((output / "manifest.json").read_text())
    manifest["parts"]["train"]["predictions"] += 1
    manifest["counts"]["predictions"] += 1
    (output / "manifest.json").write_text(json.dumps(manifest))
    seal(output)
    with pytest.raises(UserError, match="predictions in train"):
        verify(output)


def test_a_wrong_share_of_filled_positions_is_detected(output: Path) -> None:
    change_manifest(output, lambda manifest: manifest["parts"]["train"].update(filled=0.5))
    with pytest.raises(UserError, match=r"states 0\.5 filled in train, but the shards hold 0\.\d+"):
        verify(output)


@pytest.mark.parametrize("name", ["documents", "rows"])
def test_counts_that_are_not_the_sum_of_the_parts_are_detected(output: Path, name: str) -> None:
    change_manifest(output, lambda manifest: manifest["counts"].update({name: manifest["counts"][name] + 1}))
    with pytest.raises(UserError, match=f"{name} in total"):
        verify(output)


def test_documents_that_are_neither_used_nor_skipped_are_detected(output: Path) -> None:
    def change(manifest: dict) -> None:
        for counts in (manifest["counts"], manifest["parts"]["train"]):
            counts["used"] -= 1

    change_manifest(output, change)
    with pytest.raises(UserError, match="states 12 documents, but 11 used and 0 skipped"):
        verify(output)


def test_skipped_documents_that_are_not_the_sum_of_the_parts_are_detected(output: Path) -> None:
    change_manifest(output, lambda manifest: manifest["counts"]["skipped"].update(no_tokens=1))
    with pytest.raises(UserError, match=r"1 no_tokens in total, but 0 \+ 0 \+ 0 in the parts"):
        verify(output)


def test_wrong_unigram_counts_are_detected(output: Path) -> None:
    counts = np.load(output / "unigram_counts.npy")
    counts[100] += 1
    np.save(output / "unigram_counts.npy", counts)
    seal(output)
    with pytest.raises(UserError, match="unigram_counts"):
        verify(output)


def test_repeated_keys_are_detected(output: Path) -> None:
    """Two shards with the same keys, each in order."""
    first = read_shard(output / FIRST)
    names = [shard["name"] for shard in json.loads((output / "manifest.json").read_text())["shards"]]

    def repeat(rows: Rows) -> Rows:
        keys = first.sequence_keys[0] + np.arange(len(rows.input_ids), dtype=np.uint64)[:, None]
        return masked_again(output, rows._replace(sequence_keys=keys))

    rewrite(output, repeat, names[1])
    with pytest.raises(UserError, match="occurs twice"):
        verify(output)


@pytest.mark.parametrize(
    ("offset", "told"),
    [(1 << 63, "sequence keys that are not those of train"), ((1 << 32) - 2, "sequence keys of two work units")],
)
def test_keys_of_another_part_or_unit_are_detected(output: Path, offset: int, told: str) -> None:
    rewrite(output, lambda rows: masked_again(output, rows._replace(sequence_keys=rows.sequence_keys + offset)))
    with pytest.raises(UserError, match=told):
        verify(output)


def test_masks_of_another_seed_are_detected(output: Path) -> None:
    change_manifest(output, lambda manifest: manifest.update(seed=manifest["seed"] + 1))
    with pytest.raises(UserError, match="static masks that are not those of epoch 0"):
        verify(output)


@pytest.mark.parametrize("change", [lambda lines: lines[:-1], lambda lines: [*lines[:-1], "else"]])
def test_a_vocab_txt_of_another_tokenizer_is_detected(output: Path, change) -> None:
    path = output / "tokenizer" / "vocab.txt"
    path.write_text("\n".join(change(path.read_text(encoding="utf-8").splitlines())) + "\n", encoding="utf-8")
    seal(output)
    with pytest.raises(UserError, match=r"vocab\.txt does not hold the tokens"):
        verify(output)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product(
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


def test_another_tokenizer_is_detected(output: Path) -> None:
    vocabulary = output / "tokenizer" / "vocab.txt"
    lines = vocabulary.read_text(encoding="utf-8").splitlines()
    for path in (output / "tokenizer").iterdir():
        path.unlink()
    lines[-1], lines[-2] = lines[-2], lines[-1]
    vocabulary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    seal(output)
    with pytest.raises(UserError, match="not the tokenizer that made the shards"):
        verify(output)


def test_rows_are_shown_as_text_with_labels(output: Path, sample_text: Path) -> None:
    """The text has words of the source; masked ones are in braces with their labels."""
    dataset = open_dataset(output, "train")
    shown = [excerpt_text(row) for row in first_rows(dataset, open_tokenizer(dataset.directory, dataset.manifest), 20)]
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
        for row in first_rows(dataset, open_tokenizer(dataset.directory, dataset.manifest), 30)
    )


def test_command_prints_statistics(shards_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect_shards.main([str(shards_dir)])
    told = capsys.readouterr().out
    manifest = json.loads((shards_dir / "manifest.json").read_text())
    assert f"{manifest['parts']['train']['rows']:,}" in told
    for field in (
        "nsp",
        "by word",
        "B is random",
        "positions filled",
        "Most frequent tokens",
        "documents used",
        "[UNK]",
    ):
        assert field in told


def test_brackets_in_names_are_shown_as_they_are(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "[bold]a[/x]:cat:"
    Path(name).parent.mkdir()
    output.rename(name)
    inspect_shards.main([name, "--verify", "--html", f"{name}.html", "--show", "1"])
    told = "".join(capsys.readouterr().out.split())  # a long title of a table is wrapped
    assert told.count(name) == 3 and "[UNK]inthetext" in told and "{[MASK]:" in told and "[dim]" not in told


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_characters_that_the_terminal_lacks_are_escaped(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """A euro sign in a name, and bars."""
    name = tmp_path / "a€"
    output.rename(name)
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))
    inspect_shards.main([str(name)])
    sys.stdout.flush()
    told = written.getvalue().decode(encoding)
    assert ("a€\n" if encoding == "utf-8" else "a\\u20ac\n") in told.replace(" ", "")
    assert ("#####" if encoding != "utf-8" else "\u2588" * 5) in told and "\\u2588" not in told


def test_command_shows_a_part_and_verifies(shards_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect_shards.main([str(shards_dir / "train"), "--show", "2", "--verify"])
    told = capsys.readouterr().out
    assert "match the manifest" in told and told.count("  A: ") == 2
    assert "0x0:0" in told


@pytest.mark.parametrize("show", [[], ["--show", "3"]])
@pytest.mark.parametrize("damage", ["zeros", "id"])
def test_statistics_and_text_of_a_damaged_shard_name_it(output: Path, damage: str, show: list[str]) -> None:
    """A shard of the right size that is not an Arrow file, and one with an id outside of the vocabulary."""
    path = output / FIRST
    if damage == "zeros":
        path.write_bytes(bytes(path.stat().st_size))
    else:
        rewrite(output, set_column("input_ids", 1, 5, 65000))
    with pytest.raises(UserError, match=r"damaged shard .*shard-00000\.arrow"):
        inspect_shards.main([str(output), *show])


@pytest.mark.parametrize("content", [None, b"", b"\x93NUMPY\x01", "cut"])
def test_damaged_unigram_counts_are_reported(output: Path, content) -> None:
    path = output / "unigram_counts.npy"
    whole = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(whole[:-8] if content == "cut" else content)
    seal(output)
    with pytest.raises(UserError, match=r"(missing|damaged) .*unigram_counts\.npy"):
        inspect_shards.main([str(output), "--verify"])


def test_verify_prints_nothing_on_a_stderr_that_is_not_a_terminal(
    shards_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect_shards.main([str(shards_dir), "--verify"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("flags", [[], ["--verify"], ["--show", "1"]])
def test_a_folder_without_a_manifest_is_refused_before_its_files_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    monkeypatch.setattr(checksums, "files", lambda folder: pytest.fail(f"searched {folder}"))
    with pytest.raises(UserError, match=r"no manifest\.json"):
        inspect_shards.main([str(tmp_path), *flags])


def test_command_reports_damage_in_one_line_with_exit_code_2(output: Path) -> None:
    path = output / "tokenizer" / "special_tokens_map.json"
    path.write_bytes(path.read_bytes().replace(b"CLS", b"CLs", 1))
    command = [sys.executable, "-m", "data_prep.inspect_shards", str(output), "--verify"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith("error: damaged ") and ended.stderr.count("\n") == 1
    assert "special_tokens_map.json: its sha256" in ended.stderr
