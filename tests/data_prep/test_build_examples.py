import dataclasses
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from building import PATIENCE, ROOT, command_line, contents, finished_units, wait_for

from bert_jax import command_line as command
from bert_jax import errors
from bert_jax.commands import build_examples as commands_build_examples
from bert_jax.data.example import Rows, unmasked_ids
from bert_jax.data.manifest import OBJECTIVES, PAIRS, PARTS, Part, read_manifest
from bert_jax.data.masking.masker import Masker
from bert_jax.data.masking.rule import MaskingRule
from bert_jax.data.shards import open_dataset
from bert_jax.errors import UserError
from bert_jax.tokenization import tokenizer as tokenizers
from data_prep import build as build_lib
from data_prep import build_options, joining
from data_prep.build import build
from data_prep.build_options import WHOLE, Arguments, BuildOptions
from data_prep.inspection import verify
from data_prep.readers import corpus as readers
from data_prep.sentences import document_sentences
from data_prep.units import UnitSplitter
from data_prep.worker import encode
from tests.helpers.built_units import built_units


def plain(corpus: Path, vocab_dir: Path, output: Path) -> dict:
    """Arguments of a job with half a dozen units in this process."""
    return {
        "input": str(corpus),
        "tokenizer": vocab_dir,
        "output": output,
        "seq_len": 64,
        "eval_fraction": 0.1,
        "unit_mb": 0.05,
        "workers": 1,
    }


@pytest.fixture
def arguments(corpus: Path, vocab_dir: Path, tmp_path: Path) -> dict:
    """Those of `built`, for another output; a test changes what it is about."""
    return plain(corpus, vocab_dir, tmp_path / "out")


@pytest.fixture(scope="module")
def built(corpus: Path, vocab_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output to be read."""
    output = tmp_path_factory.mktemp("built") / "out"
    build(BuildOptions(**plain(corpus, vocab_dir, output)))
    return output


def all_rows(directory: Path, part: Part) -> Rows:
    dataset = open_dataset(directory, part)
    return dataset.gather(np.arange(dataset.rows))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"masking": "static", "dupe_factor": 2},
        {"masking": "static", "mask_unit": "word", "mask_rate": 0.3},
        {"masking": "static", "mask_unit": "ngram", "reorder_rate": 0.1, "pack": 3},
        {"mask_unit": "span", "mask_split": (0.5, 0.5, 0.0), "random_tokens": "unigram"},
        {"objective": "full_sentences"},
        {"objective": "full_sentences", "masking": "static", "seq_len": 16},
        {"short_seq_prob": 0.5, "seq_len": 33, "seed": 5},
        {"objective": "sop"},
        {"objective": "doc_sentences", "pack": 4, "masking": "static", "mask_unit": "word"},
        {"objective": "single", "pack": 2, "dupe_factor": 2},
        {"objective": "sop", "pack": 3, "masking": "static"},
        {"pack": 4, "seq_len": 128},
        {"delete_rate": 0.1, "insert_rate": 0.05, "masking": "static"},
        {"objective": "full_sentences", "insert_rate": 0.2, "pack": 3},
    ],
    ids=str,
)
def test_manifest_is_true_of_the_shards(arguments: dict, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """verify counts everything again, and checks each row against the format's guarantees."""
    monkeypatch.setattr(joining, "TARGET_BYTES", 1)  # a shard for each unit
    manifest = build(BuildOptions(**arguments | options))
    assert (
        verify(arguments["output"]).manifest
        == json.loads((arguments["output"] / "manifest.json").read_text())
        == manifest
    )
    assert not (arguments["output"] / "job").exists()
    assert not list(arguments["output"].rglob("*.tmp"))
    assert manifest["shards"]["count"] > 4 and manifest["parts"]["eval"]["rows"] > 0
    for name in ("documents", "rows", "tokens", "predictions"):
        assert manifest["counts"][name] == sum(part[name] for part in manifest["parts"].values())


def test_manifest_counts_what_was_read(arguments: dict, built: Path) -> None:
    manifest = read_manifest(built)
    documents = list(readers.documents(arguments["input"]))
    sentences = [sentence for document in documents for sentence in document_sentences(document)]
    assert manifest["counts"]["documents"] == len(documents)
    assert manifest["counts"]["sentences"] == len(sentences)
    loaded = tokenizers.load(arguments["tokenizer"])
    assert manifest["counts"]["source_tokens"] == sum(len(loaded.encode(sentence)) for sentence in sentences)
    size = Path(arguments["input"]).stat().st_size
    assert manifest["sources"] == [{"path": arguments["input"], "bytes": size, "weight": 1.0}]
    libraries = {"tokenizers", "sentencepiece", "pyarrow", "numpy", "array_record"}  # that decide bytes
    assert set(manifest["versions"]) == {"python", "bert_jax", *libraries}


def documents_of(directory: Path, arguments: dict) -> dict[int, list[bytes]]:
    """The ids of each document, by the unit number that sequence keys hold."""
    manifest = json.loads((directory / "manifest.json").read_text())
    loaded = tokenizers.load(directory / "tokenizer")
    splitter = UnitSplitter(manifest["unit_bytes"], manifest["eval_fraction"], 2)
    found = {}
    for unit in splitter.split(readers.documents(arguments["input"])):
        ids, offsets, documents, _ = encode(loaded, unit)
        found[unit.key] = [ids[offsets[first] : offsets[last]].tobytes() for first, last in documents]
    return found


def holds(document: bytes, segment: np.ndarray) -> bool:
    """Whether the ids of a segment lie one after the other in a document."""
    wanted, place = segment.tobytes(), -1
    while (place := document.find(wanted, place + 1)) >= 0:
        if place % segment.itemsize == 0:
            return True
    return False


def test_segments_are_contiguous_text_of_the_unit(arguments: dict, built: Path) -> None:
    """A is from a document; with label 0 A and B are from one, with label 1 B is from another one of the unit."""
    documents = documents_of(built, arguments)
    rows = all_rows(built, "train")
    for row in range(0, len(rows.input_ids), 7):
        first, length = int(rows.first_segment_lengths[row, 0]), int(rows.sequence_lengths[row, 0])
        a, b = rows.input_ids[row, 1 : first - 1], rows.input_ids[row, first : length - 1]
        of_unit = documents[int(rows.sequence_keys[row, 0]) >> 32]
        with_a = {number for number, document in enumerate(of_unit) if holds(document, a)}
        with_b = {number for number, document in enumerate(of_unit) if holds(document, b)}
        assert with_a and with_b
        if rows.next_sentence_labels[row, 0] == 0:
            assert with_a & with_b
        else:
            assert len(with_a | with_b) > 1


def test_full_sentences_hold_the_text_in_order(arguments: dict) -> None:
    """The rows without [CLS] and [SEP] are the unit's ids, every one, once; separators stand between documents."""
    build(BuildOptions(**arguments | {"objective": "full_sentences"}))
    loaded = tokenizers.load(arguments["tokenizer"])
    special = [loaded.cls_id, loaded.sep_id, loaded.pad_id]
    whole: dict[int, list[np.ndarray]] = {}
    rows = all_rows(arguments["output"], "train")
    for ids, key in zip(rows.input_ids, rows.sequence_keys[:, 0], strict=True):
        whole.setdefault(int(key) >> 32, []).append(ids[~np.isin(ids, special)])
        assert not ((ids[1:] == loaded.sep_id) & (ids[:-1] == loaded.sep_id)).any()
    documents = documents_of(arguments["output"], arguments)
    for unit, parts in whole.items():
        assert np.concatenate(parts).tobytes() == b"".join(documents[unit])


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_packed_sequences_are_pieces_of_the_text(arguments: dict, objective: str) -> None:
    """Each with its own [CLS], label and key; a row has several, and padding only where nothing fitted."""
    manifest = build(BuildOptions(**arguments | {"objective": objective, "pack": 6, "seq_len": 128}))
    documents = documents_of(arguments["output"], arguments)
    loaded = tokenizers.load(arguments["tokenizer"])
    rows = all_rows(arguments["output"], "train")
    assert (
        manifest["counts"]["sequences"]
        > manifest["counts"]["rows"]
        == len(rows.input_ids) + (manifest["parts"]["eval"]["rows"])
    )
    assert rows.sequence_lengths.sum() / rows.input_ids.size > 0.97
    for row, number in zip(*np.nonzero(rows.sequence_lengths), strict=True):
        start = int(rows.sequence_lengths[row, :number].sum())
        ids = rows.input_ids[row, start : start + int(rows.sequence_lengths[row, number])]
        assert ids[0] == loaded.cls_id
        first = int(rows.first_segment_lengths[row, number])
        of_unit = documents[int(rows.sequence_keys[row, number]) >> 32]
        segments = [ids[1 : first - 1], ids[first:-1]] if objective in PAIRS else [ids[1:-1]]
        if objective == "full_sentences":
            segments = np.split(segments[0], np.flatnonzero(segments[0] == loaded.sep_id))
            segments = [segments[0], *(segment[1:] for segment in segments[1:])]
        assert all(len(segment) for segment in segments)
        if row % 5 == 0:
            assert all(any(holds(document, segment) for document in of_unit) for segment in segments)
    if objective in PAIRS:
        labels = rows.next_sentence_labels[rows.sequence_lengths > 0]
        assert 0.3 < labels.mean() < 0.8


def test_shards_do_not_depend_on_the_number_of_workers(arguments: dict, built: Path) -> None:
    build(BuildOptions(**arguments | {"workers": 2}))
    assert contents(arguments["output"]) == contents(built)


def test_seed_changes_pairs_but_not_parts(arguments: dict, built: Path) -> None:
    first = read_manifest(built)
    second = build(BuildOptions(**arguments | {"seed": 1}))
    assert first["parts"]["eval"]["documents"] == second["parts"]["eval"]["documents"]
    assert first["shards"] != second["shards"]


def test_eval_documents_are_chosen_by_their_text(arguments: dict, built: Path, tmp_path: Path) -> None:
    """Doubling the corpus doubles both parts: a document's copy is where the document is."""
    once = read_manifest(built)
    doubled = tmp_path / "doubled.txt"
    doubled.write_text(Path(arguments["input"]).read_text() + "\n\n" + Path(arguments["input"]).read_text())
    twice = build(BuildOptions(**arguments | {"input": str(doubled)}))
    for part in PARTS:
        assert twice["parts"][part]["documents"] == 2 * once["parts"][part]["documents"] > 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"objective": "sop"},
        {"objective": "single", "masking": "static"},
        {"objective": "full_sentences", "insert_rate": 0.1},
        {"objective": "doc_sentences", "delete_rate": 0.1},
    ],
    ids=str,
)
def test_dupes_are_rows_of_their_own(arguments: dict, options: dict) -> None:
    build(BuildOptions(**arguments | {"dupe_factor": 3} | options))
    rows = all_rows(arguments["output"], "train")
    keys = rows.sequence_keys[:, 0]
    assert len(np.unique(keys)) == len(keys)
    unit = rows.input_ids[keys >> np.uint64(32) == 0]
    assert len(np.unique(unit, axis=0)) > 0.9 * len(unit)


def test_second_length_tokenizes_nothing_and_writes_the_same(
    arguments: dict, tmp_path: Path, monkeypatch, capsys
) -> None:
    """Nor does another objective, and what the cache holds is bounded."""
    cached = arguments | {"token_cache": tmp_path / "cache"}
    build(BuildOptions(**cached), quiet=False)
    units = len(list((tmp_path / "cache").glob("*/*.ids")))
    assert f"holds the tokens of {units} of {units} units" in capsys.readouterr().err
    build(
        BuildOptions(
            **cached | {"output": tmp_path / "half", "token_cache": tmp_path / "small", "token_cache_gb": 5e-5}
        ),
        quiet=False,
    )
    assert "it is full: raise --token_cache_gb" in capsys.readouterr().err
    changes = {"seq_len": 96}, {"objective": "sop", "pack": 2}
    for number, change in enumerate(changes):
        build(BuildOptions(**arguments | change | {"output": tmp_path / f"without_{number}"}))
    with monkeypatch.context() as patched:
        patched.setattr(tokenizers.Tokenizer, "encode_many", None)
        for number, change in enumerate(changes):
            build(BuildOptions(**cached | change | {"output": tmp_path / f"with_{number}"}))
    for number in range(len(changes)):
        assert contents(tmp_path / f"with_{number}") == contents(tmp_path / f"without_{number}")
    assert len(list((tmp_path / "cache").glob("*/*"))) == units


def test_another_tokenizer_under_the_same_output_is_loaded(arguments: dict, tmp_path: Path) -> None:
    """In one process, as a notebook builds, looks, removes and builds again."""
    build(BuildOptions(**arguments))
    shutil.rmtree(arguments["output"])
    tokens = (arguments["tokenizer"] / "vocab.txt").read_text().splitlines()
    (tmp_path / "vocab.txt").write_text("\n".join(tokens[:5] + tokens[:4:-1]) + "\n")
    other = arguments | {"tokenizer": tmp_path / "vocab.txt", "lowercase": True}
    build(BuildOptions(**other))
    build(BuildOptions(**other | {"output": tmp_path / "fresh"}))
    assert contents(arguments["output"]) == contents(tmp_path / "fresh")


def test_manifest_has_lengths_and_the_share_of_filled_positions(built: Path) -> None:
    manifest = read_manifest(built)
    for part in PARTS:
        lengths = all_rows(built, part).sequence_lengths
        told = manifest["parts"][part]
        assert told["lengths"]["max"] == lengths.max() and told["lengths"]["min"] == lengths.min()
        assert told["lengths"]["mean"] == round(lengths.mean(), 3)
        assert sum(count for _, count in told["lengths"]["histogram"]) == len(lengths)
        assert told["filled"] == round(lengths.sum() / (64 * len(lengths)), 6)


@pytest.mark.parametrize("mask_unit", ["token", "word", "ngram", "span"])
def test_static_masks_are_those_of_epoch_zero(arguments: dict, built: Path, mask_unit: str) -> None:
    build(BuildOptions(**arguments | {"mask_unit": mask_unit, "masking": "static"}))
    dataset = open_dataset(built, "train")
    rows, static = all_rows(built, "train"), all_rows(arguments["output"], "train")
    masked = Masker(dataset.vocabulary(), MaskingRule(mask_unit), 0).apply(
        rows, np.zeros(dataset.rows, np.int64), dataset.max_predictions
    )
    np.testing.assert_array_equal(unmasked_ids(static), rows.input_ids)
    np.testing.assert_array_equal(static.input_ids, masked.input_ids)
    np.testing.assert_array_equal(static.masked_positions, masked.positions)
    np.testing.assert_array_equal(static.masked_ids, masked.ids)
    np.testing.assert_array_equal(static.masked_counts, masked.counts)


def others(process: subprocess.Popen) -> list[psutil.Process]:
    """The worker processes; the process of the job builds units, too."""
    servers = [child for child in psutil.Process(process.pid).children() if "forkserver" in " ".join(child.cmdline())]
    return [worker for server in servers for worker in server.children()]


@pytest.fixture
def running(arguments: dict) -> Iterator[subprocess.Popen]:
    """The job with two workers, some of its 240 units in and both at work: what is left takes a while."""
    text = arguments["output"].with_name("text.txt")
    text.write_text("\n\n".join([Path(arguments["input"]).read_text(encoding="utf-8")] * 8), encoding="utf-8")
    arguments |= {"unit_mb": 0.01, "input": str(text)}
    process = subprocess.Popen(command_line(arguments | {"workers": 2}), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(
            lambda: (finished_units(arguments["output"]) >= 3 and bool(others(process))) or process.poll() is not None
        )
        assert process.poll() is None, process.communicate()[1]
        yield process
    finally:
        process.kill()
        process.communicate()


def test_job_killed_in_the_middle_ends_with_the_same_bytes(
    arguments: dict, running: subprocess.Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = psutil.Process(running.pid).children(recursive=True)
    running.kill()
    running.wait()
    assert not arguments["output"].exists()
    wait_for(lambda: not any(worker.is_running() and worker.status() != "zombie" for worker in workers), 20)
    finished = finished_units(arguments["output"])
    assert finished >= 3

    incomplete = arguments["output"].with_name("out.incomplete")
    units = {path.stem for path in incomplete.glob("job/units/*.json")}
    cut_off = min(unit for unit in units if unit.startswith("train"))
    with pytest.raises(UserError, match=r"started with other arguments .*seq_len 64, now 32"):
        build(BuildOptions(**arguments | {"seq_len": 32}))
    assert finished_units(arguments["output"]) == finished
    (incomplete / "train" / "shard-99999.arrow.tmp").write_bytes(b"half")
    os.truncate(incomplete / "job" / "units" / f"{cut_off}-0.arrow", 100)
    again = built_units(monkeypatch)
    build(BuildOptions(**arguments | {"workers": 1}))
    assert units & set(again) == {cut_off} and set(again) - units

    build(BuildOptions(**arguments | {"output": arguments["output"].with_name("fresh")}))
    assert contents(arguments["output"]) == contents(arguments["output"].with_name("fresh"))


def unfinished(arguments: dict) -> Path:
    """The folder of a job that failed at the end of its input, and that resumes with on_error=skip."""
    text = arguments["output"].with_name("text.txt")
    text.write_bytes(Path(arguments["input"]).read_bytes() + b"\n\nbad \xff")
    arguments |= {"input": str(text), "unit_mb": 0.01}
    with pytest.raises(UserError, match="not UTF-8"):
        build(BuildOptions(**arguments))
    assert finished_units(arguments["output"]) >= 3
    arguments |= {"on_error": "skip"}
    return arguments["output"].with_name("out.incomplete")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_units_that_are_not_what_their_records_say_are_done_again(
    arguments: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no others. A power cut leaves such files: of the right size with other bytes, empty, or none at all."""
    folder = unfinished(arguments)
    records = sorted((folder / "job" / "units").glob("train-*.json"))
    shards = [folder / json.loads(record.read_text())["shards"][0]["name"] for record in records]
    damages = [
        lambda record, shard: flip(shard),
        lambda record, shard: os.truncate(record, 0),
        lambda record, shard: os.truncate(record, 30),
        lambda record, shard: record.write_text("{}"),
        lambda record, shard: record.write_text("[]"),
        lambda record, shard: os.truncate(record.with_suffix(".npy"), 30),
        lambda record, shard: flip(record.with_suffix(".npy")),
        lambda record, shard: record.with_suffix(".npy").unlink(),
        lambda record, shard: shard.unlink(),
    ]
    assert len(records) > len(damages)
    finished = {path.stem for path in (folder / "job" / "units").glob("*.json")}
    for damage, record, shard in zip(damages, records, shards, strict=False):
        damage(record, shard)
    again = built_units(monkeypatch)
    build(BuildOptions(**arguments | {"workers": 1}))
    assert finished & set(again) == {record.stem for record in records[: len(damages)]}
    build(BuildOptions(**arguments | {"output": arguments["output"].with_name("fresh")}))
    assert contents(arguments["output"]) == contents(arguments["output"].with_name("fresh"))


@pytest.mark.parametrize("damage", ['{"seq', "[]", "", None])
def test_damaged_arguments_of_a_job_are_refused_in_one_line(arguments: dict, damage: str | None) -> None:
    folder = unfinished(arguments)
    kept, before = folder / "job" / "arguments.json", finished_units(arguments["output"])
    kept.unlink() if damage is None else kept.write_text(damage)
    with pytest.raises(UserError, match=r"damaged .*arguments\.json.*; remove .*out\.incomplete to start") as caught:
        build(BuildOptions(**arguments))
    assert "\n" not in str(caught.value) and finished_units(arguments["output"]) == before
    shutil.rmtree(folder)
    build(BuildOptions(**arguments))


@pytest.mark.slow
def test_another_job_is_refused_and_sigterm_stops_with_143(arguments: dict, running: subprocess.Popen) -> None:
    running.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(UserError, match="another job is writing"):
            build(BuildOptions(**arguments))
    finally:
        running.send_signal(signal.SIGCONT)
    running.terminate()
    _, told = running.communicate(timeout=PATIENCE)
    assert running.returncode == command.EXIT_STOPPED
    assert "out.incomplete; run the same command again" in told.strip().splitlines()[-1]
    assert not arguments["output"].exists() and finished_units(arguments["output"]) >= 3
    build(BuildOptions(**arguments))
    verify(arguments["output"])


@pytest.mark.parametrize("kept", [True, False])
def test_sigterm_reports_kept_units_and_further_signals_change_nothing(
    arguments: dict, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    if kept:
        unfinished(arguments)
    ended = []

    def stopped(options: BuildOptions, quiet: bool) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)  # as what stops is cleaned up
            ended.append(options)

    monkeypatch.setattr(commands_build_examples, "build", stopped)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(errors.Stopped) as caught:
        commands_build_examples.main(command_line(arguments)[4:])
    assert ended and signal.getsignal(signal.SIGTERM) == before
    assert str(caught.value).startswith("SIGTERM: ")
    assert ("out.incomplete; run the same command again" in str(caught.value)) == kept


def test_killed_worker_ends_the_job_in_one_line(arguments: dict, running: subprocess.Popen) -> None:
    others(running)[0].send_signal(signal.SIGKILL)
    _, told = running.communicate(timeout=PATIENCE)
    assert running.returncode == command.EXIT_USER_ERROR
    assert "a worker process was killed" in told.strip().splitlines()[-1]
    assert not arguments["output"].exists() and finished_units(arguments["output"]) >= 3


def test_full_disk_keeps_finished_units(arguments: dict, tmp_path: Path, capsys) -> None:
    """A real failure of the operating system: the last unit's shard is larger than files may be."""
    documents = list(readers.documents(arguments["input"]))
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join([*documents[:30], "\n".join(documents), documents[0]]))
    arguments |= {"input": text}
    limited = ["bash", "-c", 'ulimit -f 64; exec "$@"', "bash", *command_line(arguments)]
    ended = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == command.EXIT_USER_ERROR
    assert len(ended.stderr.strip().splitlines()) == 1 and ".arrow" in ended.stderr
    assert not arguments["output"].exists() and finished_units(arguments["output"]) > 0

    build(BuildOptions(**arguments), quiet=False)
    assert "resuming " in capsys.readouterr().err
    build(BuildOptions(**arguments | {"output": tmp_path / "fresh"}))
    assert contents(arguments["output"]) == contents(tmp_path / "fresh")


@pytest.mark.parametrize(
    ("name", "told"),
    [("out", r"out exists"), ("out.incomplete", "already exists and was not left by an interrupted run")],
)
def test_a_folder_of_another_is_refused_and_left_alone(arguments: dict, name: str, told: str) -> None:
    folder = arguments["output"].with_name(name)
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match=told):
        build(BuildOptions(**arguments))
    assert contents(folder).keys() == {"mine.txt"} and [folder] == list(folder.parent.glob("out*"))


@pytest.mark.parametrize(
    ("text", "objective", "told"),
    [
        ("", "nsp", "no document in it"),
        (" \n\n \n", "full_sentences", "no document in it"),
        ("One document. Of two sentences.", "nsp", "holds one document, and --objective nsp"),
        ("One document. Of two.\n\n\u200b\u200b", "nsp", "one document with tokens"),
        ("\u200b\n\n\u200b", "full_sentences", "no document of --input has a token"),
    ],
)
def test_corpus_that_gives_no_rows_is_refused(
    arguments: dict, tmp_path: Path, text: str, objective: str, told: str
) -> None:
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=told):
        build(BuildOptions(**arguments | {"input": path, "objective": objective}))
    assert not list(arguments["output"].parent.glob("out*")), "nothing half-written stays"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"input": "nowhere/*.txt"}, "matches no file"),
        ({"tokenizer": "nowhere"}, "nowhere"),
        (
            {"objective": "mlm"},
            "unknown --objective mlm; choose from nsp, sop, full_sentences, doc_sentences, single. mlm is an objective "
            "of training: bert-jax pretrain --config.objective=mlm",
        ),
        ({"masking": "none"}, "unknown --masking 'none'; choose from dynamic, static"),
        ({"mask_unit": "sentence"}, "unknown --mask_unit 'sentence'; choose from token, word, ngram, span"),
        ({"mask_split": (0.8, 0.2)}, "--mask_split is 0.8,0.2. Use three shares"),
        ({"mask_split": (0.8, 0.1, 0.2)}, "mask split 0.8,0.1,0.2 is invalid. Give three shares that sum to 1"),
        ({"mask_unit": "span", "reorder_rate": 0.1}, "reorder rate 0.1 is invalid with unit span"),
        ({"random_tokens": "zipf"}, "unknown choice of random tokens 'zipf'; choose from uniform, unigram"),
        (
            {"random_tokens": "unigram", "masking": "static"},
            "--random_tokens unigram needs --masking dynamic",
        ),
        ({"mask_unit": "infill", "masking": "static"}, "--mask_unit infill needs --masking dynamic"),
        ({"mask_unit": "infill", "reorder_rate": 0.1}, "reorder rate 0.1 is invalid with unit infill"),
        ({"engine": "spark"}, "unknown --engine 'spark'; choose from local, beam, ray"),
        ({"format": "parquet"}, "unknown --format 'parquet'; choose from arrow, tfds"),
        ({"pack": 0}, "--pack is 0. Use a number from 1 to 256"),
        ({"seq_len": 4}, "--seq_len is 4. Use a number from 8"),
        ({"mask_rate": 0.0}, "--mask_rate is 0.0. Use a share above 0"),
        ({"dupe_factor": 0}, "--dupe_factor is 0. Use a number from 1"),
        ({"eval_fraction": 1.0}, "--eval_fraction is 1.0. Use a share of at least 0 and below 1"),
        ({"seed": -1}, "--seed is -1. Use a whole number from 0"),
        ({"newlines": "keep"}, "--newlines keep: the WordPiece vocabulary has no tokens for line breaks"),
        ({"newlines": "drop"}, "unknown --newlines 'drop'; choose from join, keep"),
        ({"token_cache": __file__}, r"--token_cache .* is a file. Choose a folder"),
        ({"delete_rate": 0.6}, "--delete_rate is 0.6. Use a number from 0 to 0.5"),
        ({"insert_rate": -0.1}, "--insert_rate is -0.1. Use a number from 0"),
        ({"permute_sentences": 1.5}, "--permute_sentences is 1.5. Use a number from 0 to 1"),
        ({"permute_sentences": 0.5}, "the labels of --objective nsp describe; leave them out, or use full_sentences"),
        ({"objective": "sop", "rotate_documents": 1.0}, "the labels of --objective sop describe; leave them out"),
        ({"output": "runs/out.incomplete"}, r"ends in \.incomplete"),
        ({"eval_fraction": 0.9999}, "lower --eval_fraction"),  # the units of eval are finished by then
        (
            {"objective": "full_sentences", "short_seq_prob": 0.1},
            "--short_seq_prob is only for --objective nsp",
        ),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused_and_write_nothing(arguments: dict, change: dict, told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        build(BuildOptions(**arguments | change))
    assert "\n" not in str(caught.value)
    assert not list(arguments["output"].parent.glob("out*"))


def test_eval_of_a_single_document_goes_to_train(arguments: dict, tmp_path: Path, capsys) -> None:
    """Half of the three documents at most would be eval: too few for a random segment."""
    documents = list(readers.documents(arguments["input"]))
    by_hash = sorted(documents, key=lambda text: hashlib.blake2b(text.encode(), digest_size=16).digest())
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join([by_hash[-1], by_hash[0], by_hash[-2]]), encoding="utf-8")
    manifest = build(BuildOptions(**arguments | {"input": str(path)}), quiet=False)
    assert (manifest["parts"]["train"]["documents"], manifest["parts"]["eval"]["documents"]) == (3, 0)
    assert "nothing is held out for eval, which needs 4 documents or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("count", "objective", "eval_fraction", "told"),
    [
        (2, "nsp", 0.5, "which needs 4 documents or more. Use more text"),
        (1, "full_sentences", 0.5, "which needs 2 documents or more. Use more text"),
        (9, "nsp", 1e-9, "no document was chosen for eval (--eval_fraction 1e-09). Raise it"),
        (9, "nsp", 1 - 1e-9, "left too few for it. Lower it"),
    ],
)
def test_empty_eval_names_the_flags_that_fill_it(
    arguments: dict, tmp_path: Path, capsys, count: int, objective: str, eval_fraction: float, told: str
) -> None:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"A cat sat {number} times. It slept." for number in range(count)), encoding="utf-8")
    options = {"input": path, "objective": objective, "eval_fraction": eval_fraction}
    assert build(BuildOptions(**arguments | options), quiet=False)["parts"]["eval"]["documents"] == 0
    assert told in capsys.readouterr().err


def test_documents_without_tokens_are_counted_as_skipped(arguments: dict, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("A cat sat. It slept.\n\n\u200b\n\nA dog ran. It fell.", encoding="utf-8")
    manifest = build(BuildOptions(**arguments | {"input": str(path), "eval_fraction": 0.0}))
    assert manifest["counts"]["documents"] == 3 and manifest["counts"]["skipped"] == {"no_tokens": 1}


def test_units_hold_two_documents_and_every_document_once() -> None:
    for seed in range(30):
        generator = random.Random(seed)
        texts = [f"{i} " + "x" * generator.randrange(1, 400) for i in range(generator.randrange(2, 40))]
        splitter = UnitSplitter(generator.randrange(100, 900), 0.3, 2)
        units = list(splitter.split(texts))
        assert sorted(text for unit in units for text in unit.documents) == sorted(text.encode() for text in texts)
        assert all(len(unit.documents) >= 2 for unit in units)
        for part in ("train", "eval"):
            numbers = [unit.number for unit in units if unit.part == part]
            assert numbers == list(range(len(numbers)))
        assert splitter.documents == len(texts)


def test_command_teaches_its_flags(capsys) -> None:
    with pytest.raises(SystemExit):
        commands_build_examples.main(["--help"])
    told = capsys.readouterr().out
    for field in ("--input", "--dupe_factor", "--mask_unit", "--workers", "--eval_fraction", "manifest.json"):
        assert field in told


def test_lists_of_numbers_are_flags_with_commas() -> None:
    required = ["--input=a", "--tokenizer=b", "--output=c", "--seq_len=64"]
    parsed = build_options.parse([*required, "--weights=1,0.5", "--mask_split=1,0,0", "--nolowercase", "--dedup"])
    changed = {"weights": (1.0, 0.5), "mask_split": (1.0, 0.0, 0.0), "lowercase": False, "dedup": True}
    assert parsed == BuildOptions("a", "b", "c", 64, **changed)
    with pytest.raises(UserError, match="--weights: 1,many: expected numbers separated by commas"):
        build_options.parse([*required, "--weights=1,many"])


def test_arguments_that_decide_the_bytes_are_all_compared(arguments: dict) -> None:
    compared = Arguments(BuildOptions(**arguments), 0.1, 0.01, 1, WHOLE, (), "", "").to_json()
    # weights are in sources; what on_error leaves out changes the units, whose text is compared.
    decide_nothing = {"weights", "on_error", "token_cache", "token_cache_gb", "input", "tokenizer", "output", "workers"}
    decide_nothing |= {"engine", "engine_options", "lowercase", "unit_mb"}
    assert {field.name for field in dataclasses.fields(BuildOptions)} - decide_nothing <= compared.keys()


def test_eval_holds_at_most_ten_million_tokens_by_default() -> None:
    def share(size: int, name: str = "a.txt", weight: float = 1.0, dupe_factor: int = 1) -> float:
        return build_lib.held_out_share([readers.Source(name, size, weight)], dupe_factor)

    assert share(0) == share(4 * 10**9) == 0.01
    assert share(3 * 10**12) == 1.33e-05  # 3 TB: 7.5e11 tokens
    assert share(10**12, "a.jsonl.zst") == share(10**12, weight=3) == share(10**12, dupe_factor=3) == 1.33e-05


def test_a_large_corpus_holds_out_less_unless_told_otherwise(
    arguments: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build_lib, "EVAL_FRACTION", 0.5)
    monkeypatch.setattr(build_lib, "EVAL_TOKENS", Path(arguments["input"]).stat().st_size / 4 * 0.2)
    given = {name: value for name, value in arguments.items() if name != "eval_fraction"}
    manifests = {}
    for name, options in (("lowered", {}), ("chosen", {"eval_fraction": 0.2}), ("more", {"eval_fraction": 0.5})):
        manifests[name] = build_lib.build(BuildOptions(**given | options | {"output": tmp_path / name}), quiet=False)
        assert ("20.000% of the documents are held out" in capsys.readouterr().err) == (name == "lowered")
    assert contents(tmp_path / "lowered") == contents(tmp_path / "chosen")
    assert manifests["lowered"]["eval_fraction"] == 0.2 and manifests["more"]["eval_fraction"] == 0.5
