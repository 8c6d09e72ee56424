"""The ids of a unit, from the tokenizer and from the token cache, and what stands between its sentences."""

import json
import os
import random
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizer_kinds
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_kinds import unspaced_documents

from bert_jax.errors import UserError
from bert_jax.tokenization import tokenizer
from data_prep import sentences, worker
from data_prep.sentences import document_sentences, joined_sentences, kept_pieces
from data_prep.sequences import Encoded
from data_prep.units import Unit
from data_prep.worker import TokenCache, encode, refuse_newlines

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


KEEPING = ("bpe", "bpe_prefix_space", "bpe_nfc", "bpe_spaces")
CODE = [
    "def add(a, b):\n    return a + b\n\n\nclass C:\n\tx = 1  # two\n\n\tdef f(self):\n\t\tpass\n",
    "   indented. First line\r\n  second line\u3000here\n\n\n  and\t\tmore. \n \n",
    "他说：“你好。”「再见。」然后。Then he left。她笑了！\n第二行。\n",
    "wait...\x1cwhat? No\x1f\nyes\u2028no. \u0301\n\nThe end\n\u0301\n\n\nreally",
]


def ids_of_documents(ours: tokenizer.Tokenizer, documents: list[str], newlines: str) -> list[list[int]]:
    encoded = encode(ours, Unit("train", 0, tuple(document.encode() for document in documents), ""), newlines=newlines)
    assert len(encoded.documents) == len(documents)
    return [encoded.ids[encoded.offsets[first] : encoded.offsets[last]].tolist() for first, last in encoded.documents]


@pytest.fixture(scope="module")
def made(sample_text: Path, tmp_path_factory):
    """A tokenizer by kind, with the encoding of the library."""
    lines = [*sample_text.read_text(encoding="utf-8").split("\n"), *unspaced_documents(12), *CODE]
    held = {}

    def make(kind: str) -> tuple[tokenizer.Tokenizer, tokenizer_kinds.Encode]:
        if kind not in held:
            folder = tmp_path_factory.mktemp(kind)
            encoding = tokenizer_kinds.make("bpe_nfc" if kind == "bpe_spaces" else kind, lines, folder)
            if kind == "bpe_spaces":
                encoding = with_tokens_of_spaces(folder / "tokenizer.json")
            held[kind] = tokenizer.load(folder), encoding
        return held[kind]

    return make


def with_tokens_of_spaces(path: Path) -> tokenizer_kinds.Encode:
    """Adds a token for each number of spaces from 2 to 24, as ModernBERT's vocabulary has them."""
    library = tokenizers.Tokenizer.from_file(str(path))
    library.add_tokens([tokenizers.AddedToken(" " * count, normalized=True) for count in range(24, 1, -1)])
    library.save(str(path))
    library.encode_special_tokens = True
    return lambda texts: [found.ids for found in library.encode_batch_fast(list(texts), add_special_tokens=False)]


def source_files(count: int) -> Iterator[str]:
    """Source files of the standard library, at even distances."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    found = 0
    for path in paths[:: max(1, len(paths) // (count + count // 4))]:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip() and found < count:
            found += 1
            yield text
    assert found == count


@pytest.mark.parametrize("kind", KEEPING)
def test_kept_lines_have_the_ids_of_the_library(made, kind: str, sample_text: Path) -> None:
    ours, library = made(kind)
    small = [text for text in source_files(15) if len(text) < 20_000]
    running = sample_text.read_text(encoding="utf-8").split("\n\n")
    odd = [text for text in tokenizer_kinds.random_texts(3, 150) if not text.isspace() and text]
    lines = ["\n".join(odd[start : start + 3]) for start in range(0, len(odd), 3)]
    documents = [*CODE, *small, *running, *unspaced_documents(6), *lines]
    assert ids_of_documents(ours, documents, "keep") == library(documents)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bpe", "bpe_spaces"])
def test_hundreds_of_source_files_have_the_ids_of_the_library(made, kind: str) -> None:
    ours, library = made(kind)
    for document in source_files(300):
        assert ids_of_documents(ours, [document], "keep") == library([document])


def test_kept_pieces_are_the_sentences_with_the_white_space_before_them() -> None:
    """Only white space is added, and a border is left out where the library might not split."""
    assert kept_pieces("a = 1\n\n  b = 2. Then c\n") == ["a = 1", "\n\n  b = 2.", " Then c\n"]
    assert kept_pieces("你好。再见。") == ["你好。", "再见。"]
    assert kept_pieces("「你好。」「再见。」") == ["「你好。」「再见。」"]
    for document in [*CODE, *unspaced_documents(6)]:
        assert "".join(kept_pieces(document)) == document
    draw = random.Random(0)
    for _ in range(200):
        document = "".join(draw.choices("ab.。 你「」\n\t!?\u0301", k=30))
        assert "".join(kept_pieces(document)) == document


@pytest.mark.parametrize(
    ("document", "direct"),
    [
        ("他来了。她走了。", [False, True]),
        ("他来了。\n她走了。", [False, True]),
        ("他来了。 她走了。", [False, False]),
        ("他说：“来了。”\n“好。”她说。", [False, True, True]),
        ("使用Python\n3.11。", [False, False]),
        ("彼は来た。\nJohn came.\n彼女", [False, True, False]),
        ("ภาษาไทย\nภาษาลาว", [False, True]),
        ("한국어입니다.\n한국어입니다.", [False, False]),
        ("वह आया।वह गया।", [False, False]),
        ("He came.\nShe left. Fine", [False, False, False]),
        ("\n\n", []),
    ],
)
def test_sentences_follow_each_other_without_a_space_where_the_text_does(document: str, direct: list[bool]) -> None:
    assert joined_sentences(document) == (document_sentences(document), direct)


@pytest.mark.parametrize("kind", ["bpe", "bpe_prefix_space", "unigram", "unigram_bytes", "sentencepiece_bpe"])
def test_ids_of_unspaced_text_decode_to_it_without_a_space_between_sentences(made, kind: str) -> None:
    """SentencePiece drops the space before a text, and normalizes some punctuation."""
    ours, _ = made(kind)
    for document in unspaced_documents(9):
        [ids] = ids_of_documents(ours, [document], "join")
        wanted = document.replace("\n", "")
        if kind in ("unigram", "unigram_bytes", "sentencepiece_bpe"):
            wanted = ours.decode(ours.encode(wanted))
        assert ours.decode(ids).removeprefix(" ") == wanted


@pytest.mark.parametrize("kind", ["wordpiece_cased", "unigram"])
def test_vocabularies_without_line_breaks_are_refused(made, kind: str) -> None:
    with pytest.raises(UserError, match="has no tokens for line breaks") as caught:
        refuse_newlines(made(kind)[0])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFKC"}},
        {"added": {"content": "end. of", "rstrip": False}},
        {"added": {"content": "end", "rstrip": True}},
    ],
    ids=str,
)
def test_byte_pairs_whose_white_space_moves_are_refused(made, tmp_path: Path, change: dict) -> None:
    ours, _ = made("bpe_nfc")
    ours.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    if "added" in change:
        flags = {"single_word": False, "lstrip": False, "normalized": False, "special": False}
        content["added_tokens"].append({"id": ours.vocab_size, **flags, **change["added"]})
    else:
        content |= change
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    refuse_newlines(ours)
    with pytest.raises(UserError, match="or its normalizer or added tokens join white space"):
        refuse_newlines(tokenizer.load(tmp_path))
