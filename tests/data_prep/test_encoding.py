"""The ids of a unit, from the tokenizer and from the token cache."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import tokenizer_kinds
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.tokenization import tokenizer
from data_prep import sentences, worker
from data_prep.sequences import Encoded
from data_prep.units import Unit
from data_prep.worker import TokenCache, encode

DOCUMENTS = ("It was well. As such, he left! “Why?” she asked.\nNobody knew.", "Another one. It ends.")


@pytest.mark.parametrize("kind", ["bpe", "bpe_prefix_space"])
def test_sentences_of_byte_pairs_keep_the_space_before_them(kind: str, sample_text: Path, tmp_path: Path) -> None:
    """The ids of a document are those of its text in one piece, as the library encodes it."""
    library = tokenizer_kinds.make(kind, [*sample_text.read_text(encoding="utf-8").split("\n"), *DOCUMENTS], tmp_path)
    loaded = tokenizer.load(tmp_path)
    unit = Unit("train", 0, tuple(text.encode() for text in DOCUMENTS), "")
    encoded = encode(loaded, unit)
    whole = library([text.replace("\n", " ") for text in DOCUMENTS])
    for (first, last), ids in zip(encoded.documents, whole, strict=True):
        assert encoded.ids[encoded.offsets[first] : encoded.offsets[last]].tolist() == ids
        begins = encoded.ids[encoded.offsets[first + 1 : last]]
        assert last - first > 1 and not loaded.continuation[begins].any()


def encoded(documents: list[list[int]], dtype: type, empty: int) -> Encoded:
    """Documents as the lengths of their sentences."""
    offsets = np.cumsum([0, *(length for document in documents for length in document)])
    lasts = np.cumsum([len(document) for document in documents], dtype=np.int64)
    ranges = np.stack([lasts - [len(document) for document in documents], lasts], axis=1)
    ids = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, offsets[-1]).astype(dtype)
    return Encoded(ids, offsets, ranges.astype(np.int64), empty)


def same(one: Encoded | None, other: Encoded) -> bool:
    return one is not None and all(
        np.array_equal(a, b) and np.asarray(a).dtype == np.asarray(b).dtype for a, b in zip(one, other, strict=True)
    )


@pytest.fixture
def cache(tmp_path: Path) -> TokenCache:
    cache = TokenCache(tmp_path / "cache", 1_000_000)
    cache.prepare()
    return cache


UNIT = encoded([[3, 4], [5]], np.uint16, 1)


@given(
    st.lists(st.lists(st.integers(1, 70_000), min_size=1, max_size=4), max_size=4),
    st.sampled_from([np.uint16, np.uint32]),
    st.integers(0, 5),
)
def test_what_is_stored_comes_back(tmp_path_factory, documents: list[list[int]], dtype: type, empty: int) -> None:
    cache = TokenCache(tmp_path_factory.mktemp("cache"), 10**9)
    unit = encoded(documents, dtype, empty)
    cache.store("t" * 64, "x", unit)
    assert same(cache.load("t" * 64, "x"), unit)


def test_another_tokenizer_text_or_rule_finds_nothing(cache: TokenCache, monkeypatch) -> None:
    cache.store("t" * 64, "x", UNIT)
    assert cache.load("t" * 16 + "u" * 48, "x") is None, "the same first characters"
    assert cache.load("u" * 64, "x") is None
    assert cache.load("t" * 64, "y") is None
    keeping = TokenCache(cache.directory, cache.limit, "keep")
    assert keeping.load("t" * 64, "x") is None
    keeping.store("t" * 64, "x", UNIT._replace(empty=7))
    assert same(keeping.load("t" * 64, "x"), UNIT._replace(empty=7)) and same(cache.load("t" * 64, "x"), UNIT)
    monkeypatch.setattr(worker, "RULE_VERSION", sentences.RULE_VERSION + 1)
    assert cache.load("t" * 64, "x") is None


def test_torn_or_changed_files_are_as_good_as_none(cache: TokenCache) -> None:
    cache.store("t" * 64, "x", UNIT)
    (path,) = cache.directory.glob("*/*")
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place])
        assert cache.load("t" * 64, "x") is None
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert cache.load("t" * 64, "x") is None
    cache.store("t" * 64, "x", UNIT)
    assert same(cache.load("t" * 64, "x"), UNIT)


def test_it_never_holds_more_than_its_limit(tmp_path: Path) -> None:
    unit = encoded([[1000]], np.uint16, 0)
    cache = TokenCache(tmp_path, 9_000)
    for number in range(20):
        cache.store("t" * 64, str(number), unit)
    assert 6_000 < cache.bytes() <= 9_000
    assert cache.holds("t" * 64, "0") and not cache.holds("t" * 64, "19")


def test_storing_units_does_not_list_the_cache_each_time(tmp_path: Path, monkeypatch) -> None:
    listed = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (listed.append(path), scandir(path))[1])
    cache = TokenCache(tmp_path, 10**9)
    for number in range(50):
        cache.store("t" * 64, str(number), UNIT)
    assert listed.count(tmp_path) == 1


def test_a_file_that_vanishes_while_the_cache_is_listed_is_ignored(cache: TokenCache, monkeypatch) -> None:
    cache.store("t" * 64, "x", UNIT)
    folder = next(cache.directory.iterdir())
    (folder / "gone.unfinished").symlink_to("nowhere")  # as a name that was listed and is renamed before its stat
    (folder / "gone.ids").symlink_to("nowhere")
    cache.prepare()
    assert cache.bytes() == (folder / "x.ids").stat().st_size


def test_writers_of_one_unit_do_not_meet(cache: TokenCache) -> None:
    def write() -> None:
        for _ in range(50):
            cache.store("t" * 64, "x", UNIT)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        found = cache.load("t" * 64, "x")
        assert found is None or same(found, UNIT)
    assert same(cache.load("t" * 64, "x"), UNIT)
    assert len(list(cache.directory.glob("*/*"))) == 1


def test_old_unfinished_files_are_removed(cache: TokenCache) -> None:
    cache.store("t" * 64, "x", UNIT)
    folder = next(cache.directory.iterdir())
    for name, age in (("old", 2 * 24 * 3600), ("new", 0)):
        path = folder / f"{name}.unfinished"
        path.write_bytes(b"half")
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age))
    cache.prepare()
    assert sorted(path.name for path in folder.iterdir()) == ["new.unfinished", "x.ids"]
