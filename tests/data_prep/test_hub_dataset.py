"""Data sets of the Hugging Face Hub, read by the real client from a local server that answers as the Hub does."""

import io
import json
import os
import re
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from store_emulators import HubHandler, serving

from bert_jax.data.shards import open_dataset

pytest.importorskip("huggingface_hub")

READ = """
import json, sys
from bert_jax.errors import RunAgain, UserError
from data_prep.readers.corpus import Corpus, Reading, find_sources
for address in sys.argv[1:]:
    try:
        corpus = Corpus(find_sources(address))
        texts = list(corpus.documents())
        paths = [source.path for source in corpus.sources]
        print(json.dumps([texts[:3], len(texts), paths, corpus.bytes_read == corpus.total_bytes]))
    except (UserError, RunAgain) as error:
        print(json.dumps(f"{type(error).__name__} {error}"))
"""
STREAM = """
import json, sys
import numpy as np
from bert_jax.data.streaming import open_streamed
address, cache = sys.argv[1:]
dataset = open_streamed(address, 1e9, cache, False, lambda line: None)
print(json.dumps([dataset.rows, dataset.gather(np.array([5, 0])).input_ids.tolist()]))
"""
WINDOWS = """
import contextlib, sys
import numpy as np
from bert_jax.data.streaming import WindowCache, open_streamed, window_order
address, cache = sys.argv[1:]
dataset = open_streamed(address, 1e9, cache, False, lambda line: None)
with contextlib.closing(WindowCache(window_order(dataset, 4, 0), dataset)) as windows:
    print(sorted(windows.read(np.arange(dataset.rows)).sequence_keys[:, 0].tolist()))
"""
CONVERTED = "refs/convert/parquet"


def parquet(texts: list[str]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), file)
    return file.getvalue()


# By data set, revision and path.
FILES = {
    ("org/one", "main", "data/a.jsonl"): b'{"text": "one"}\n{"text": "two"}\n',
    ("org/one", "main", "data/b.txt"): b"three\n\nfour",
    ("org/one", "main", "data/deep/c.txt"): b"five\n\n" + b"six " * 8_000_000,
    ("org/one", "main", "README.md"): b"# Read me",
    ("org/one", CONVERTED, "default/train/0000.parquet"): parquet(["one", "two"]),
    ("org/one", CONVERTED, "default/train/0001.parquet"): parquet(["three"]),
    ("org/one", CONVERTED, "default/test/0000.parquet"): parquet(["four"]),
    ("org/wiki", CONVERTED, "20231101.de/train/0000.parquet"): parquet(["eins"]),
    ("org/wiki", CONVERTED, "20231101.en/train/0000.parquet"): parquet(["one"]),
    ("org/large", CONVERTED, "default/partial-train/0000.parquet"): parquet(["one"]),
}


REQUESTS: list[str] = []


class Hub(HubHandler):
    """The parts of the Hub's HTTP API that HfFileSystem uses."""

    def do_GET(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        REQUESTS.append(f"{path} {self.headers.get('Range', '')}")
        if match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self.information(*match.groups())
        elif match := re.fullmatch(rf"/api/datasets/([^/]+/[^/]+)/tree/({CONVERTED}|[^/]+)/?(.*)", path):
            self.tree(*match.groups())
        elif match := re.fullmatch(rf"/datasets/([^/]+/[^/]+)/resolve/({CONVERTED}|[^/]+)/(.+)", path):
            self.content(*match.groups())
        else:
            self.missing("EntryNotFound")

    do_HEAD = do_GET

    def information(self, name: str, revision: str | None) -> None:
        found = [key for key in FILES if key[0] == name]
        if not found:
            self.missing("RepoNotFound")
        elif not any(key[1] == (revision or "main") for key in found):
            self.missing("RevisionNotFound")
        else:
            about = {"id": name, "sha": "0" * 40, "private": False, "gated": False, "disabled": False, "tags": []}
            self.answer(json.dumps({**about, "downloads": 0, "likes": 0, "siblings": []}).encode())

    def tree(self, name: str, revision: str, folder: str) -> None:
        recursive = "recursive=true" in self.path.lower()
        entries: dict[str, dict[str, object]] = {}
        for (repository, branch, path), content in FILES.items():
            if (repository, branch) != (name, revision) or not path.startswith(f"{folder}/" if folder else ""):
                continue
            parts = path.split("/")
            depth = len(folder.split("/")) if folder else 0
            for end in range(depth + 1, len(parts)):
                parent = "/".join(parts[:end])
                if recursive or end == depth + 1:
                    entries[parent] = {"type": "directory", "oid": "0", "size": 0, "path": parent}
            if recursive or len(parts) == depth + 1:
                entries[path] = {"type": "file", "oid": "0", "size": len(content), "path": path}
        if entries:
            self.answer(json.dumps(list(entries.values())).encode())
        else:
            self.missing("EntryNotFound")

    def content(self, *key: str) -> None:
        if key not in FILES:
            self.missing("EntryNotFound")
        elif match := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            first, last = map(int, match.groups())
            piece, size = FILES[key][first : last + 1], len(FILES[key])
            self.answer(piece, 206, Content_Range=f"bytes {first}-{first + len(piece) - 1}/{size}")
        else:
            self.answer(FILES[key])


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with serving(Hub) as address:
        yield address


def read(endpoint: str, home: object, *arguments: str, program: str = READ) -> list:
    """What a program prints in a new process, because the client asks for its endpoint only once."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.slow
def test_data_sets_of_the_hub_are_listed_and_read_in_ranges(endpoint, tmp_path):
    converted = f"hf://datasets/org/one@{CONVERTED}/default"
    cases = {
        "hf://datasets/org/one/data/a.jsonl": (["one", "two"], ["hf://datasets/org/one/data/a.jsonl"]),
        "hf://datasets/org/one/data/*.*": (
            ["one", "two", "three", "four"],
            ["hf://datasets/org/one/data/a.jsonl", "hf://datasets/org/one/data/b.txt"],
        ),
        f"{converted}/train/*.parquet": (
            ["one", "two", "three"],
            [f"{converted}/train/0000.parquet", f"{converted}/train/0001.parquet"],
        ),
        "hf:org/one": (
            ["one", "two", "three"],
            [f"{converted}/train/0000.parquet", f"{converted}/train/0001.parquet"],
        ),
        "hf:org/one:default:test": (["four"], [f"{converted}/test/0000.parquet"]),
        "hf:org/wiki:20231101.de": (["eins"], [f"hf://datasets/org/wiki@{CONVERTED}/20231101.de/train/0000.parquet"]),
        "hf:org/large:default:partial-train": (
            ["one"],
            [f"hf://datasets/org/large@{CONVERTED}/default/partial-train/0000.parquet"],
        ),
    }
    for (texts, paths), found in zip(cases.values(), read(endpoint, tmp_path, *cases), strict=True):
        assert found == [texts[:3], len(texts), paths, True]
    REQUESTS.clear()
    ((texts, count, paths, complete),) = read(endpoint, tmp_path, "hf://datasets/org/one/**/*.txt")
    assert texts[:3] == ["three", "four", "five"] and count == 4 and complete
    ranges = [request for request in REQUESTS if "c.txt bytes=" in request]
    assert len(ranges) > 1 and not any(request.endswith("c.txt ") for request in REQUESTS)


@pytest.mark.slow
def test_shards_on_the_hub_are_streamed_by_exact_ranges(endpoint, shards_dir, tmp_path, monkeypatch):
    """Of the training shards, only the ends of the first one, and the bytes of the rows that are asked for."""
    for path in shards_dir.rglob("*"):
        if path.is_file():
            monkeypatch.setitem(FILES, ("org/rows", "main", str(path.relative_to(shards_dir))), path.read_bytes())
    dataset = open_dataset(shards_dir, "train")
    REQUESTS.clear()
    [[rows, ids]] = read(endpoint, tmp_path, "hf://datasets/org/rows", str(tmp_path / "cache"), program=STREAM)
    assert rows == dataset.rows and ids == dataset.gather(np.array([5, 0])).input_ids.tolist()
    read_bytes = [
        int(last) - int(first) + 1
        for request in REQUESTS
        for first, last in re.findall(r"/train/.* bytes=(\d+)-(\d+)", request)
    ]
    row = 2 * dataset.seq_len + 2 + 2 + 1 + 8
    assert sum(read_bytes) <= 2 * 4096 + 2 * row and len(read_bytes) == 2 + 2 * 5
    [keys] = read(endpoint, tmp_path, "hf://datasets/org/rows", str(tmp_path / "cache"), program=WINDOWS)
    assert keys == sorted(dataset.gather(np.arange(rows)).sequence_keys[:, 0].tolist())


def test_what_the_hub_does_not_have_is_reported_in_one_line(endpoint, tmp_path):
    cases = {
        "hf://datasets/org/one/absent*.txt": "matches no file",
        "hf://datasets/org/absent/*.txt": "matches no file",
        "hf:org/absent": "the Hub has no data set org/absent, does not have it as Parquet, or gives no access",
        "hf:org/one:nonsense": "needs a configuration; choose from hf:org/one:CONFIG with default",
        "hf:org/one:default:nonsense": "unknown split nonsense; choose from test, train",
        "hf:org/wiki": "needs a configuration; choose from hf:org/wiki:CONFIG with 20231101.de, 20231101.en",
        "hf:org/large": "the first part of the split train as Parquet, which is hf:org/large:default:partial-train",
        "org/one": "'org/one' matches no file. Check the path, and quote the pattern; hf:org/one is a data set of",
        "hf:nonsense": r"hf:nonsense is not of the form hf:ORG/NAME[:CONFIG[:SPLIT]]",
    }
    for message, found in zip(cases.values(), read(endpoint, tmp_path, *cases), strict=True):
        assert isinstance(found, str) and message in found and "\n" not in found and found.startswith("UserError")


def test_a_hub_that_does_not_answer_is_reported_in_one_line(tmp_path):
    for found in read("http://127.0.0.1:9", tmp_path, "hf:org/one", "hf://datasets/org/one/*.txt"):
        assert isinstance(found, str) and found.startswith("RunAgain hf:") and "Check the address" in found
