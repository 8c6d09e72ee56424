"""A whole corpus: formats, mixtures, duplicates, and what is refused."""

import bz2
import gzip
import hashlib
import json
import lzma
import os
import random
import re
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.errors import UserError
from data_prep import units
from data_prep.build import build
from data_prep.build_options import BuildOptions
from data_prep.inspection import verify
from data_prep.readers.corpus import Corpus, Reading, find_sources
from data_prep.units import Seen, UnitSplitter, UnusableCorpus, summarise
from tests.helpers.built_units import built_units

TEXTS = ["One.\nTwo.", "¿Qué? Sí.", "三。四。", "a\r\nb \u2028 c"]


def corpus(pattern: object, weights: tuple[float, ...] = (), **reading: str) -> Corpus:
    return Corpus(find_sources(str(pattern), weights), Reading(**reading))


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> None:
    path.write_text("".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts), encoding="utf-8")


def write_parquet(path: Path, texts: object, field: str = "text", **options: object) -> None:
    pq.write_table(pa.table({"id": pa.array(range(len(texts))), field: texts}), path, **options)


def zstd(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data, asbytes=True)


@pytest.mark.parametrize("write, name", [(write_jsonl, "a.jsonl"), (write_parquet, "a.parquet")])
@pytest.mark.parametrize(
    "suffix, compress",
    [("", bytes), (".bz2", bz2.compress), (".gz", gzip.compress), (".xz", lzma.compress), (".zst", zstd)],
)
def test_records_give_their_field_however_compressed(tmp_path, write, name, suffix, compress):
    write(tmp_path / name, TEXTS, "content")
    path = tmp_path / (name + suffix)
    path.write_bytes(compress((tmp_path / name).read_bytes()))
    read = corpus(path, text_field="content")
    assert list(read.documents()) == TEXTS
    assert read.bytes_read == read.total_bytes == path.stat().st_size and not read.refused


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
def test_parquet_text_of_every_kind_is_read(tmp_path, kind):
    values = pa.array(TEXTS * 50, pa.binary() if pa.types.is_binary(kind) else pa.string()).cast(kind)
    write_parquet(tmp_path / "a.parquet", values, row_group_size=70)
    assert list(corpus(tmp_path / "a.parquet").documents()) == TEXTS * 50


def test_parquet_is_streamed_within_a_row_group(tmp_path):
    """Arrow reports its memory: 1 MB of pages and a batch, not the 50 MB of the row group."""
    texts = ["".join(random.Random(number).choices("abcdefgh ", k=50_000)) for number in range(40)] * 25
    write_parquet(tmp_path / "a.parquet", texts, use_dictionary=False, data_page_size=1 << 18, write_batch_size=4)
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 1
    before, peak, count = pa.total_allocated_bytes(), 0, 0
    for _ in corpus(tmp_path / "a.parquet").texts():
        count += 1
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert count == 1000 and peak < 16_000_000, f"{peak} bytes"


def test_null_and_missing_fields_are_refused_and_blank_ones_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"text": "one"}\n{"txet": "x"}\n\n{"text": null}\n[1]\n{"text": ""}\n{"text": "\\u0000"}\n'
    )
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: expected .*'text'; its fields are txet\. Use"):
        list(corpus(tmp_path / "a.jsonl").documents())
    read = corpus(tmp_path / "a.jsonl", on_error="skip")
    assert list(read.documents()) == ["one"]
    assert read.refused == {"no_text_field": 3, "empty_text": 1, "nul_character": 1}
    write_parquet(tmp_path / "a.parquet", ["one", None, "", "two"])
    with pytest.raises(UserError, match=r"a\.parquet, row 2: expected text in 'text', got null"):
        list(corpus(tmp_path / "a.parquet").documents())
    read = corpus(tmp_path / "a.parquet", on_error="skip")
    assert list(read.documents()) == ["one", "two"] and read.refused == {"no_text_field": 1, "empty_text": 1}


def bad_inputs(folder: Path) -> dict[str, tuple[str, bytes | None, str]]:
    """Files with one error each: name, content (None: a folder), and the message."""
    write_parquet(folder / "good.parquet", ["a text of some length"] * 2000, "other", compression="none")
    parquet = (folder / "good.parquet").read_bytes()
    (folder / "good.parquet").unlink()
    return {
        "invalid_utf8": ("x.txt", b"fine\n\nbad \xff\n", r"x\.txt, line 3: not UTF-8"),
        "nul_character": ("x.txt", b"a\0b", r"x\.txt, line 1: a NUL"),
        "control_character": ("x.txt", b"a\x07b", r"x\.txt, line 1: a control character, U\+0007"),
        "empty_file": ("x.txt", b"", r"x\.txt: no document in it"),
        "folder": ("x.txt", None, r"x\.txt: expected a file, got a folder"),
        "damaged_file": ("x.xz", lzma.compress(b"text\n\n" * 999)[:-20], r"x\.xz: damaged file \(truncated\)"),
        "damaged_file gz": (
            "x.gz",
            gzip.compress(b"text\n\n" * 999, mtime=0)[:-9],
            r"x\.gz: damaged file \(truncated\)",
        ),
        "damaged_file zst": ("x.zst", zstd(b"text\n\n" * 999)[:-9], r"x\.zst: damaged file \(truncated"),
        "not_json": ("x.jsonl", b'{"text": "a"}\n{"text": \n', r"x\.jsonl, line 2: not JSON"),
        "not_json deep": ("x.jsonl", b"[" * 100_000, r"x\.jsonl, line 1: nested too deep"),
        "no_text_field": (
            "x.jsonl",
            b'{"text": "a"}\n{}\n',
            r"x\.jsonl, line 2: expected a JSON object with",
        ),
        "invalid_utf8 json": ("x.jsonl", b'{"text": "\\ud800"}\n', r"x\.jsonl, line 1: half of a surrogate pair"),
        "no_text_column": (
            "x.parquet",
            parquet,
            r"x\.parquet: no text column 'text'; the columns are id \(int",
        ),
        "damaged_file parquet": ("x.parquet", parquet[:-5], r"x\.parquet: damaged file"),
        "damaged_file short": ("x.parquet", b"PAR1", r"x\.parquet: damaged file"),
        "damaged_file bz2": ("x.bz2", bz2.compress(b"text\n\n" * 999)[:-9], r"x\.bz2: damaged file \(truncated\)"),
        "other_format": ("x.7z", b"7z", r"x\.7z: \.7z files are not supported"),
    }


def test_bad_input_fails_in_one_line_or_is_counted(tmp_path):
    for case, (name, content, message) in bad_inputs(tmp_path).items():
        folder = tmp_path / case
        folder.mkdir()
        (folder / "a.txt").write_text("good one\n\ngood two")
        (folder / name).mkdir() if content is None else (folder / name).write_bytes(content)
        (folder / "z.txt").write_text("good three")
        with pytest.raises(UserError, match=message) as raised:
            list(corpus(f"{folder}/*.*").documents())
        assert "--on_error skip" in str(raised.value) and "\n" not in str(raised.value), case
        read = corpus(f"{folder}/*.*", on_error="skip")
        good = [text for text in read.documents() if text.startswith("good")]
        assert good == ["good one", "good two", "good three"], case
        assert read.refused == {case.split()[0]: 1}, case


def test_unreadable_file_is_reported_or_counted(tmp_path):
    (tmp_path / "a.txt").symlink_to("nowhere.txt")
    with pytest.raises(UserError, match=r"a\.txt: no such file"):
        list(corpus(f"{tmp_path}/*.txt").documents())
    read = corpus(f"{tmp_path}/*.txt", on_error="skip")
    assert not list(read.documents()) and read.refused == {"unreadable_file": 1}


def test_manifest_counts_what_reading_skipped_and_verify_adds_it_up(tmp_path, sample_text, vocab_dir):
    text = sample_text.read_bytes()
    (tmp_path / "a.txt").write_bytes(text + b"\n\nbad \xff\n\n" + text)
    (tmp_path / "b.jsonl").write_text("no JSON\n")
    arguments = {"tokenizer": vocab_dir, "output": tmp_path / "out", "seq_len": 64, "workers": 1}
    arguments["input"] = f"{tmp_path}/*.*"
    with pytest.raises(UserError, match="not UTF-8"):
        build(BuildOptions(**arguments))
    manifest = build(BuildOptions(**arguments, on_error="skip", dedup=True))
    documents = len(text.decode().split("\n\n"))
    assert manifest["skipped_reading"] == {"duplicate": documents, "invalid_utf8": 1, "not_json": 1}
    assert manifest["counts"]["skipped"] == manifest["skipped_reading"]
    assert manifest["counts"]["documents"] == 2 * documents + 2
    assert sum(part["documents"] for part in manifest["parts"].values()) == documents
    assert verify(tmp_path / "out").manifest == manifest


def test_corpus_of_refused_documents_alone_is_an_error(tmp_path, vocab_dir):
    (tmp_path / "a.txt").write_bytes(b"\xff\n\n\xfe")
    with pytest.raises(UserError, match=r"no document in --input.*skipped: 2 invalid_utf8"):
        build(BuildOptions(tmp_path / "a.txt", vocab_dir, tmp_path / "out", 64, workers=1, on_error="skip"))
    assert not (tmp_path / "out").exists()


@pytest.fixture
def failed(tmp_path, sample_text, vocab_dir) -> dict:
    """Arguments of a job that has failed at its last document, after several units."""
    (tmp_path / "a.txt").write_bytes(sample_text.read_bytes() + b"\n\nbad \xff")
    arguments = {"input": f"{tmp_path}/**/*.txt", "tokenizer": vocab_dir, "output": tmp_path / "out", "seq_len": 64}
    arguments |= {"workers": 1, "unit_mb": 0.01}
    with pytest.raises(UserError, match="not UTF-8"):
        build(BuildOptions(**arguments))
    return arguments


def test_a_failed_job_resumes_with_on_error_skip(tmp_path, failed, monkeypatch):
    finished = sorted((tmp_path / "out.incomplete" / "job" / "units").glob("*.json"))
    assert len(finished) >= 2
    # The pattern now also matches the tokenizer's files in out.incomplete, which are not read.
    assert (tmp_path / "out.incomplete" / "tokenizer" / "vocab.txt").exists()
    again = built_units(monkeypatch)
    manifest = build(BuildOptions(**failed, on_error="skip"))
    assert again and not {path.stem for path in finished} & set(again)
    assert [source["path"] for source in manifest["sources"]] == [str(tmp_path / "a.txt")]
    fresh = failed | {"input": tmp_path / "a.txt", "output": tmp_path / "fresh"}
    assert manifest == build(BuildOptions(**fresh, on_error="skip"))
    assert manifest["counts"]["skipped"] == {"invalid_utf8": 1}


def test_a_finished_output_among_the_input_is_refused(tmp_path, sample_text, vocab_dir):
    (tmp_path / "a.txt").write_bytes(sample_text.read_bytes())
    arguments = {"input": f"{tmp_path}/**/*.txt", "tokenizer": vocab_dir, "seq_len": 64, "workers": 1}
    build(BuildOptions(**arguments, output=tmp_path / "out"))
    with pytest.raises(UserError, match=r"\*\*/\*.txt' matches .*out/tokenizer/vocab\.txt, which belongs to "):
        build(BuildOptions(**arguments, output=tmp_path / "again"))
    (tmp_path / "out" / "note.txt").write_text("A note of mine.")
    assert [source.path for source in find_sources(f"{tmp_path}/out/*.txt")] == [f"{tmp_path}/out/note.txt"]


def test_a_job_does_not_resume_with_another_rule_for_sentences(tmp_path, failed):
    stored = tmp_path / "out.incomplete" / "job" / "arguments.json"
    stored.write_text(json.dumps(json.loads(stored.read_text()) | {"sentence_rule": 1}))
    with pytest.raises(UserError, match=r"started with other arguments \(sentence_rule 1, now \d+\)"):
        build(BuildOptions(**failed, on_error="skip"))


def test_a_word_longer_than_any_vocabulary_allows_is_used(tmp_path, sample_text, vocab_dir):
    (tmp_path / "a.txt").write_bytes(
        b"x" * 300_000 + b" and\n" + "日".encode() * 50_000 + b"\n\n" + sample_text.read_bytes()
    )
    manifest = build(BuildOptions(tmp_path / "a.txt", vocab_dir, tmp_path / "out", 64, workers=1))
    assert manifest["counts"]["used"] == manifest["counts"]["documents"]
    assert verify(tmp_path / "out").manifest == manifest


@pytest.mark.slow
def test_a_line_of_200_mb_is_refused_in_bounded_memory(tmp_path, sample_text, vocab_dir):
    with gzip.open(tmp_path / "long.txt.gz", "wb", compresslevel=1) as file:
        for _ in range(200):
            file.write(b"no end " * 142_858)
    command = [
        sys.executable,
        *("-m", "bert_jax", "build-examples"),
        f"--input={tmp_path}/*.gz,{sample_text}",
        "--workers=1",
    ]
    command += [f"--tokenizer={vocab_dir}", f"--output={tmp_path}/out", "--seq_len=64"]
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 2 and "Traceback" not in failed.stderr
    assert re.search(r"long\.txt\.gz, line 1: a document of more than 64 MiB\. .*--on_error skip\n\Z", failed.stderr)
    # VmHWM: ru_maxrss of a child begins at what its parent held when it was started.
    measured = (
        "import sys; from bert_jax.commands import main as commands; commands.main(sys.argv[1:])\n"
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    skipped = subprocess.run(
        [sys.executable, "-c", measured, *command[3:], "--on_error=skip"], capture_output=True, text=True
    )
    assert skipped.returncode == 0, skipped.stderr
    assert "skipped: 1 document_too_long" in skipped.stderr
    assert int(skipped.stdout) < 500_000, f"{skipped.stdout} KB"


MESSAGES = {
    "a.txt": [
        (gzip.compress(b"x", mtime=0), "It looks compressed: rename the file to end in .gz"),
        (lzma.compress(b"x"), "It looks compressed: rename the file to end in .xz"),
        (zstd(b"x"), "It looks compressed: rename the file to end in .zst"),
        (bz2.compress(b"x"), "It looks compressed: rename the file to end in .bz2"),
        ("one\n\ntwo".encode("utf-16"), "It looks like UTF-16: convert"),
        ("one\n\ntwo".encode("utf-16-le"), "It looks like UTF-16: convert"),
        (b"a text with\0 one", "a NUL character (column 12). Remove it"),
        (b"a text with\x1f one", "U+001F (column 12). Remove it"),
    ],
    "a.jsonl": [
        ('{"text": "x"}'.encode("utf-16"), "It looks like UTF-16: convert"),
        (b'{"n": ' + b"9" * 5000 + b"}", "JSON with a number that is too long"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deep to be parsed as JSON"),
        (b'{"text": x}', "not JSON ("),
        (b'{"text": null}', "expected text in 'text', got null."),
        (b'{"text": 1.5}', "expected text in 'text', got a number."),
        (b'{"text": [1]}', "expected text in 'text', got a list."),
    ],
}


@pytest.mark.parametrize(
    "name, content, message",
    [pytest.param(name, *case, id=case[1]) for name, cases in MESSAGES.items() for case in cases],
)
def test_reasons_for_refusing_text_are_right(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(message)):
        list(corpus(tmp_path / name).documents())


def test_a_store_without_such_a_file_is_not_called_unsupported(monkeypatch):
    monkeypatch.setattr("data_prep.readers.corpus.find_files", lambda pattern: [])
    with pytest.raises(UserError, match=r"--input 'gs://bucket/none\*\.txt' matches no file"):
        find_sources("gs://bucket/none*.txt")


def test_repeated_columns_and_unsupported_addresses_are_refused(tmp_path):
    texts = pa.array(["one", None])
    pq.write_table(pa.table([texts, texts], names=["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="2 columns are called 'text'"):
        list(corpus(tmp_path / "a.parquet").documents())
    for address in ("https://a.org/b.txt", f"file://{tmp_path}/a.parquet"):
        with pytest.raises(UserError, match=r"is not supported\. Use local paths, gs://, s3://, hf://, hf:ORG/NAME or"):
            corpus(address)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.txt.gz"])
def test_pipes_and_devices_are_refused_and_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    (tmp_path / f"link_{name}").symlink_to("/dev/zero")
    (tmp_path / "b.txt").write_text("one")
    with pytest.raises(UserError, match=rf"{re.escape(name)}: pipes and devices are not supported\. .* name that"):
        corpus(f"{tmp_path}/*")
    read = corpus(f"{tmp_path}/*", on_error="skip")
    assert list(read.documents()) == ["one"] and read.refused == {"unreadable_file": 2}


def test_standard_input_is_read_from_a_file_and_not_from_a_pipe(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    code = "from data_prep.readers.corpus import documents; print(list(documents('/dev/stdin')))"
    with open(tmp_path / "a.txt") as file:
        run = subprocess.run([sys.executable, "-c", code], stdin=file, capture_output=True, text=True)
    assert run.stdout == "['one', 'two']\n"
    run = subprocess.run([sys.executable, "-c", code], input="one\n\ntwo", capture_output=True, text=True)
    assert "/dev/stdin: pipes and devices are not supported" in run.stderr


def test_weights_are_copies_in_later_passes(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("\n\n".join(f"{name} {number}" for number in range(400)))
    patterns = f"{tmp_path}/a.txt,{tmp_path}/b.txt,{tmp_path}/c.txt"
    read = corpus(patterns, (1.0, 2.25, 0.5))
    passes: list[list[str]] = [[]]
    for item in read.texts():
        passes.append([]) if item is None else passes[-1].append(item.decode())
    counts = [Counter(text[0] for text in each) for each in passes]
    assert [each["a"] for each in counts] == [400, 0, 0]
    assert [each["b"] for each in counts[:2]] == [400, 400]
    # Binomial: 4 standard deviations, a false alarm in 16 000 for each; but the hash is fixed, so never or always.
    assert abs(counts[2]["b"] - 100) < 35 and abs(counts[0]["c"] - 200) < 40
    assert read.refused == {"not_sampled": 400 - counts[0]["c"]}
    assert all(len(set(each)) == len(each) for each in passes)
    assert read.bytes_read == read.total_bytes
    for files, weights, message in (
        (patterns, (1.0, 2.0), "2 numbers and --input 3 patterns"),
        (patterns, (1.0, 0.0, 1.0), "each weight must be above 0"),
        (f"{tmp_path}/a.txt,{tmp_path}/*.txt", (1.0, 2.0), "two patterns of --input match"),
    ):
        with pytest.raises(UserError, match=message):
            corpus(files, weights)


@pytest.mark.parametrize("eval_fraction", [0.0, 0.2])
def test_copies_share_a_part_and_never_a_unit(eval_fraction):
    texts = [f"document {number} " * (1 + number % 7) for number in range(300)]
    for unit_bytes in (1, 500, 10**9):
        splitter = UnitSplitter(unit_bytes, eval_fraction, 2)
        units = list(splitter.split([*texts, None, *texts, None, *texts[:50]]))
        assert all(len(set(unit.documents)) == len(unit.documents) >= 2 for unit in units)
        parts = {text: {unit.part for unit in units if text.encode() in unit.documents} for text in texts}
        assert all(len(found) == 1 for found in parts.values())
        assert sum(len(unit.documents) for unit in units) == splitter.documents == 650


def test_duplicates_are_skipped_within_a_pass_only():
    stream = ["a", "b", "a", "c", "b", "a", None, "a", "b", "a"]
    splitter = UnitSplitter(10**9, 0.0, 1, dedup=True)
    units = list(splitter.split(stream))
    assert [unit.documents for unit in units] == [(b"a", b"b", b"c"), (b"a", b"b")]
    assert splitter.skipped == {"duplicate": 4} and splitter.documents == 5


def test_texts_that_differ_in_white_space_are_duplicates():
    same = [
        "one two\nthree",
        " one two\r\nthree\n",
        "one\ttwo  three",
        "one\u00a0two\u3000three",
        "one\n\ntwo\u2028three",
    ]
    others = ["onetwo three", "one two three.", "One two three", "1 23", "12 3", "1 2 3"]
    splitter = UnitSplitter(10**9, 0.0, 1, dedup=True)
    (unit,) = splitter.split([*same, *others])
    assert unit.documents == tuple(text.encode() for text in [same[0], *others])
    assert splitter.skipped == {"duplicate": 4}
    # Without --dedup, and for the choice of the part, white space counts.
    assert (
        UnitSplitter(10**9, 0.0, 1).documents == 0 and len(next(UnitSplitter(10**9, 0.0, 1).split(same)).documents) == 5
    )


@given(st.lists(st.one_of(st.integers(0, 40), st.integers((1 << 64) - 5000, (1 << 64) - 1)), max_size=300))
def test_seen_is_a_set(values):
    seen, truth = Seen(), set()
    for value in values:
        value = value or 1  # 0 and 1 are one
        assert seen.add(bytes(8) + value.to_bytes(8, "little")) == (value not in truth)
        truth.add(value)
    assert len(seen) == len(truth)


def test_seen_grows():
    generator = np.random.default_rng(0)
    seen = Seen()
    values = generator.integers(1, 1 << 63, 6_000, np.uint64).tolist() + list(range((1 << 64) - 400, 1 << 64))
    assert all(seen.add(value.to_bytes(8, "little")) for value in values)
    assert not any(seen.add(value.to_bytes(8, "little")) for value in values)
    assert len(seen) == len(values)


@pytest.mark.slow
def test_seen_takes_24_bytes_a_document_at_most():
    digests = np.random.default_rng(0).integers(1, 1 << 63, 6_400, np.uint64)
    tracemalloc.start()
    try:
        seen = Seen()
        assert all(seen.add(digest.tobytes()) for digest in digests)
        assert tracemalloc.get_traced_memory()[0] <= 24 * len(digests) + 10_240
    finally:
        tracemalloc.stop()


def lines_run(run: Callable[[], object]) -> int:
    """The number of lines of data_prep.units that a function runs."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Callable | None:
        nonlocal lines
        if frame.f_code.co_filename != units.__file__:
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return lines


def test_a_sample_of_the_documents_takes_no_longer_than_others(tmp_path):
    """A weight and Seen both use the hash: a tenth of the documents could crowd into a tenth of the table."""
    texts = [str(number) for number in range(20_000)]
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    sample = [text.encode() for text in corpus(tmp_path / "a.txt", (0.1,)).documents()]
    assert 1_500 < len(sample) < 2_500

    def add(documents: list[bytes]) -> None:
        seen = Seen()
        assert all(seen.add(hashlib.blake2b(text, digest_size=16).digest()) for text in documents)

    others = [text.encode() for text in texts[: len(sample)]]
    assert lines_run(lambda: add(sample)) < 1.5 * lines_run(lambda: add(others))


@pytest.mark.parametrize("unit_bytes", [10**9, 12_000])  # 16 kB of text
@pytest.mark.parametrize(("eval_fraction", "fewest", "divided"), [(0.01, 2, False), (0.99, 2, False), (0.01, 2, True)])
def test_a_part_that_is_too_small_in_one_pass_does_not_grow_by_copies(eval_fraction, fewest, divided, unit_bytes):
    chosen = UnitSplitter(10**9, eval_fraction, 1)
    texts = [f"document {number}" for number in range(1000)]
    few = next(unit for unit in chosen.split(texts) if unit.part == ("eval" if eval_fraction < 0.5 else "train"))
    lone = few.documents[0].decode()
    texts = [lone, *(text for text in texts if text.encode() not in few.documents)]
    for passes in (2, 3):
        splitter = UnitSplitter(unit_bytes, eval_fraction, fewest, divided=divided)
        stream = [*texts, *([None, *texts] * (passes - 1))]
        units = list(splitter.split(stream))
        assert all(unit.part == "train" and len(set(unit.documents)) == len(unit.documents) for unit in units)
        lost = splitter.skipped["too_few_for_eval"]
        assert lost == (passes if divided else 0)
        assert sum(len(unit.documents) for unit in units) == splitter.documents == passes * len(texts) - lost


def test_copies_of_one_document_are_too_few():
    with pytest.raises(UnusableCorpus, match="--input holds one document"):
        list(UnitSplitter(10**9, 0.1, 2).split(["a", None, "a"]))


@given(st.lists(st.integers(1, 100), min_size=1, max_size=300), st.sampled_from([100, 101, 128, 512]))
def test_statistics_are_those_of_the_lengths_one_by_one(lengths: list[int], seq_len: int) -> None:
    told = summarise(np.bincount(lengths, minlength=seq_len + 1))
    assert (told["min"], told["max"]) == (min(lengths), max(lengths))
    assert abs(told["mean"] - np.mean(lengths)) < 1e-3
    for name, share in (("median", 0.5), ("p95", 0.95)):
        assert told[name] == np.quantile(lengths, share, method="inverted_cdf")
    uppers = [upper for upper, _ in told["histogram"]]
    assert len(uppers) <= 32 and uppers[-1] == seq_len and uppers == sorted(set(uppers))
    lower = 0
    for upper, count in told["histogram"]:
        assert count == sum(lower < length <= upper for length in lengths)
        lower = upper


def test_no_sequence_has_no_length() -> None:
    assert summarise(np.zeros(9, np.int64))["histogram"] == []
