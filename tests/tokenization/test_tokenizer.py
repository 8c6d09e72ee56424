"""The ids are always the ones of the library, and every way to load a vocabulary gives the same tokenizer."""

import json
import lzma
import pickle
import random
import re
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizer_kinds import random_texts
from tokenizers import models, normalizers, pre_tokenizers

from bert_jax.errors import UserError
from bert_jax.tokenization import engine, tokenizer
from bert_jax.tokenization.specification import AddedToken
from bert_jax.tokenization.wordpiece import WordPieceSpec

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["hello", "world", "##ing", "##es", "un", "##aff", "##able", "the", "The", "Hello", "isn", "mask"]
# Every character outside of and inside a word is a token, so that no change to a text can hide behind [UNK].
CHARACTERS = [chr(code) for code in range(1, 0x10000) if not 0xD800 <= code < 0xE000 and code not in (9, 10, 13, 32)]


def wide_tokens() -> list[str]:
    return [*SPECIAL, *WORDS, *CHARACTERS, *("##" + character for character in CHARACTERS if character != "#")]


def bare_library(tokens: list[str], **settings: bool) -> tokenizers.Tokenizer:
    """The library as its users configure it for BERT, without code of bert_jax."""
    library = tokenizers.Tokenizer(
        models.WordPiece(
            {token: index for index, token in enumerate(tokens)}, unk_token="[UNK]", max_input_chars_per_word=100
        )
    )
    library.normalizer = normalizers.BertNormalizer(**settings)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return library


def assert_equal_ids(ours: tokenizer.Tokenizer, library: tokenizers.Tokenizer, texts: list[str]) -> None:
    ids, offsets = ours.encode_many(texts)
    expected = [encoding.ids for encoding in library.encode_batch_fast(texts, add_special_tokens=False)]
    assert offsets[0] == 0 and offsets[-1] == len(ids) and len(offsets) == len(texts) + 1
    for index, text in enumerate(texts):
        found = ids[offsets[index] : offsets[index + 1]].tolist()
        assert found == expected[index], f"{text!a}: {ours.tokens(found)}, library {ours.tokens(expected[index])}"


@pytest.mark.parametrize("clean_text", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "lowercase, strip_accents, split_chinese", [(True, True, True), (False, False, True), (True, False, False)]
)
def test_ids_are_the_librarys_on_all_of_unicode(lowercase, strip_accents, split_chinese, clean_text):
    tokens = wide_tokens()
    ours = tokenizer.Tokenizer(
        WordPieceSpec(tuple(tokens), lowercase, strip_accents, split_chinese=split_chinese, clean_text=clean_text)
    )
    library = bare_library(
        tokens,
        lowercase=lowercase,
        strip_accents=strip_accents,
        handle_chinese_chars=split_chinese,
        clean_text=clean_text,
    )
    texts = random_texts(seed=7, count=3000)
    assert_equal_ids(ours, library, texts)
    assert_equal_ids(ours, library, texts[::-1])  # from a warm cache


@pytest.mark.parametrize("clean_text", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_code_point_parts_words_as_the_library_does(clean_text):
    ours = tokenizer.Tokenizer(WordPieceSpec(tuple(wide_tokens()), True, True, clean_text=clean_text))
    library = bare_library(wide_tokens(), lowercase=True, strip_accents=True, clean_text=clean_text)
    codes = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    # Unassigned planes and ideographs by the thousand behave alike: every code of the first 0x3400, then a sample.
    codes = codes[:0x3400] + random.Random(3).sample(codes[0x3400:], 6000)
    assert_equal_ids(ours, library, [f"a{chr(code)}b" for code in codes])


@pytest.fixture(scope="module")
def trained(vocab_dir):
    return tokenizer.load(vocab_dir)


@pytest.fixture(scope="module")
def lines(sample_text) -> list[str]:
    return sample_text.read_text(encoding="utf-8").split("\n")


def test_small_caches_and_blocks_change_no_id(vocab_dir, lines, monkeypatch):
    expected = tokenizer.load(vocab_dir).encode_many(lines)
    monkeypatch.setattr(engine, "CACHE_CHUNKS", 100)
    monkeypatch.setattr(engine, "BLOCK_CHARACTERS", 500)
    monkeypatch.setattr(engine, "LIBRARY_CHUNKS", 7)
    monkeypatch.setattr(engine, "CACHED_CHUNK_LENGTH", 3)
    small = tokenizer.load(vocab_dir)
    for _ in range(2):
        for found, wanted in zip(small.encode_many(lines), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


class RecordingLibrary(engine.Engine):
    """An engine whose only id for a chunk is its length, and which records the chunks that it encodes."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        raise AssertionError("no text needs to be encoded as a whole")

    def split(self, texts: Sequence[str]) -> engine.ChunkedTexts:
        return engine.ChunkedTexts("\n".join(texts))

    def encode_chunks(self, keys: Sequence[str]) -> list[bytes]:
        self.encoded += keys
        return [np.uint16(len(key)).tobytes() for key in keys]


def test_cache_is_bounded_and_keeps_recent_short_chunks(monkeypatch):
    monkeypatch.setattr(engine, "CACHE_CHUNKS", 1000)
    library = RecordingLibrary()
    cache = engine.ChunkCache(library, np.uint16)
    texts = [f"word{number} {'long' * 20}{number}" for number in range(8000)]
    for start in range(0, len(texts), 400):
        cache.encode(texts[start : start + 400])
    library.encoded.clear()
    ids, counts = cache.encode(texts)
    np.testing.assert_array_equal(ids, [len(chunk) for text in texts for chunk in text.split()])
    assert counts.tolist() == [2] * len(texts)
    words = [text.split()[0] for text in texts]
    known = set(words) - set(library.encoded)
    assert 400 <= len(known) <= 1000 + 400 and known == set(words[-len(known) :])
    assert sum(len(chunk) > engine.CACHED_CHUNK_LENGTH for chunk in library.encoded) == len(texts)


def test_texts_are_encoded_one_by_one_or_together_alike(trained, lines):
    ids, offsets = trained.encode_many(lines)
    assert ids.dtype == trained.id_dtype == np.uint16 and ids.flags.writeable
    for line, start, end in zip(lines, offsets, offsets[1:], strict=False):
        np.testing.assert_array_equal(trained.encode(line), ids[start:end])
        np.testing.assert_array_equal(trained.encode_offsets(line)[0], ids[start:end])
    assert trained.encode_many([])[1].tolist() == [0]


def test_special_tokens_have_the_ids_of_the_vocabulary(trained):
    assert [trained.pad_id, trained.unk_id, trained.cls_id, trained.sep_id, trained.mask_id] == [0, 1, 2, 3, 4]
    assert trained.token_id("no such token") is None


def test_ids_over_65536_are_wider():
    wide = tokenizer.Tokenizer(WordPieceSpec(tuple(wide_tokens()), False, False))
    assert wide.vocab_size > 65536 and wide.id_dtype is np.uint32
    assert wide.encode("a\uffe6b").max() > 65536
    np.testing.assert_array_equal(wide.encode("a b"), wide.encode_many(["a b"])[0])


def test_content_hash_is_equal_however_loaded_and_saved(trained, vocab_dir, tmp_path):
    trained.save(tmp_path / "again")
    for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (tmp_path / "again" / name).read_bytes() == (vocab_dir / name).read_bytes()
    shutil.copytree(vocab_dir, tmp_path / "no_json")
    (tmp_path / "no_json" / "tokenizer.json").unlink()
    shutil.copy(vocab_dir / "vocab.txt", tmp_path / "vocab.txt")
    # As published folders have it: accents are left to lower-casing.
    content = json.loads((vocab_dir / "tokenizer.json").read_text(encoding="utf-8"))
    content["normalizer"]["strip_accents"] = None
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "tokenizer.json").write_text(json.dumps(content))
    loaded = [tokenizer.load(tmp_path / name) for name in ("again", "no_json", "vocab.txt", "published")]
    loaded += [tokenizer.load(tmp_path / "vocab.txt", lowercase=True), pickle.loads(pickle.dumps(trained))]
    assert {other.content_hash for other in loaded} == {trained.content_hash}
    assert tokenizer.load(tmp_path / "vocab.txt", lowercase=False).content_hash != trained.content_hash


def test_casing_comes_from_the_config_then_the_flag_then_the_vocabulary(tmp_path):
    lower, capitals = tmp_path / "lower.txt", tmp_path / "capitals.txt"
    lower.write_text("\n".join([*SPECIAL, "<S>", "the"]) + "\n")
    capitals.write_text("\n".join([*SPECIAL, "the", "The"]) + "\n")
    assert tokenizer.load(lower).lowercase and not tokenizer.load(capitals).lowercase
    assert not tokenizer.load(lower, lowercase=False).lowercase and tokenizer.load(capitals, lowercase=True).lowercase
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true, "strip_accents": false}')
    assert tokenizer.load(capitals).lowercase
    with pytest.raises(UserError, match="--nolowercase contradicts the tokenizer's files, by which it lower"):
        tokenizer.load(capitals, lowercase=False)


@pytest.mark.parametrize("name", ["do_lower_case", "strip_accents", "tokenize_chinese_chars"])
def test_switch_that_is_neither_on_nor_off_is_refused(tmp_path, vocab_dir, name):
    shutil.copy(vocab_dir / "vocab.txt", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({name: None}))
    tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({name: "yes"}))
    with pytest.raises(UserError, match=rf"{name} is 'yes' in tokenizer_config\.json"):
        tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("normalizer", {"lowercase": "yes"}, "its normalizer's lowercase is 'yes'"),
        ("normalizer", {"lowercase": None}, "its normalizer's lowercase is None"),
        ("normalizer", {"strip_accents": "yes"}, "its normalizer's strip_accents is 'yes'"),
        ("normalizer", "lowercase", "field 'lowercase' is missing"),
        ("normalizer", "clean_text", "field 'clean_text' is missing"),
        ("model", "vocab", "field 'vocab' is missing"),
        ("normalizer", None, "a field has the wrong type"),
        ("model", None, "a field has the wrong type"),
    ],
)
def test_files_with_a_missing_or_wrong_field_are_refused_with_its_name(tmp_path, vocab_dir, part, change, message):
    content = json.loads((vocab_dir / "tokenizer.json").read_text(encoding="utf-8"))
    if isinstance(change, str):
        del content[part][change]
    else:
        content[part] = ["something else"] if change is None else content[part] | change
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"tokenizer\.json: {message}"):
        tokenizer.load(tmp_path)


def test_added_tokens_are_honoured(tmp_path):
    added = [*(AddedToken(token) for token in SPECIAL), AddedToken("<name>"), AddedToken("new york", special=False)]
    ours = tokenizer.Tokenizer(WordPieceSpec((*SPECIAL, "new", "york", "a"), True, True, added=tuple(added)))
    assert ours.vocab_size == 10 and ours.special_ids == (0, 1, 2, 3, 4, 8)
    assert ours.tokens(ours.encode("a new york [MASK] <name>"))[:2] == ["a", "new york"]
    assert ours.encode("[MASK] <name>").max() < 8 and ours.encode_special("<name> [MASK]").tolist() == [8, 4]
    ours.save(tmp_path)
    assert tokenizer.load(tmp_path).content_hash == ours.content_hash


@pytest.mark.parametrize(
    ("content", "refused"),
    [({}, ""), ({"[MASK]": 4, "[PAD]": 0}, ""), ({"<e1>": 5}, "'<e1>'"), ({"[MASK]": 9}, "MASK"), ({"a": 5}, "'a'")],
)
def test_added_tokens_without_tokenizer_json_are_read_if_they_add_nothing(tmp_path, content, refused):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL, "a"]) + "\n")
    plain = tokenizer.load(tmp_path).content_hash
    (tmp_path / "added_tokens.json").write_text(json.dumps(content))
    if refused:
        with pytest.raises(UserError, match=f"{refused}.*no tokenizer.json"):
            tokenizer.load(tmp_path)
    else:
        assert tokenizer.load(tmp_path).content_hash == plain


# Lower-cased by ICU (uconv -x tr-Lower), whose rules are those of Unicode's SpecialCasing.txt.
TURKISH = {
    "IĞDIR": "ığdır",
    "İSTANBUL": "istanbul",
    "I\u0307zmir": "izmir",
    "ŞIRNAK ili": "şırnak ili",
    "Ilıca ısı iyi": "ılıca ısı iyi",
    "Ì ÂÎ": "ì âî",
    "I\u0300": "ı\u0300",
    "XIII": "xııı",
}


def test_turkish_is_lower_cased_as_icu_does(tmp_path):
    letters = sorted(set("".join(TURKISH.values())) - {" "})
    tokens = (*SPECIAL, *letters, *(f"##{letter}" for letter in letters))
    ours = tokenizer.Tokenizer(WordPieceSpec(tokens, True, False, turkic=True))
    small = tokenizer.Tokenizer(WordPieceSpec(tokens, False, False))
    ids, offsets = ours.encode_many([*TURKISH, *TURKISH.values()])
    texts = [ids[begin:end].tolist() for begin, end in pairwise(offsets)]
    assert texts[: len(TURKISH)] == texts[len(TURKISH) :] == [small.encode(text).tolist() for text in TURKISH.values()]
    ours.save(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [library.encode(text, add_special_tokens=False).ids for text in TURKISH] == texts[: len(TURKISH)]
    for path in (tmp_path, tmp_path / "vocab.txt"):  # settings of its folder
        assert tokenizer.load(path).content_hash == ours.content_hash
    assert tokenizer.load(tmp_path).lowercase
    usual = tokenizer.Tokenizer(WordPieceSpec(tokens, True, False))
    assert usual.content_hash != ours.content_hash and usual.encode("XIII").tolist() == small.encode("xiii").tolist()


def test_byte_order_mark_before_a_vocabulary_is_no_part_of_it(tmp_path):
    for name, encoding in (("plain.txt", "utf-8"), ("marked.txt", "utf-8-sig")):
        (tmp_path / name).write_text("\n".join([*SPECIAL, "the", "\ufeff"]) + "\n", encoding=encoding)
    plain, marked = (tokenizer.load(tmp_path / name) for name in ("plain.txt", "marked.txt"))
    assert plain.content_hash == marked.content_hash and plain.token_id("\ufeff") == 6


@pytest.mark.parametrize(
    ("lines", "ids", "told"),
    [
        (
            ["the", "old", "the", "river"],
            {"the": 7, "old": 6, "river": 8},
            r"\(1, the first is line 6\)",
        ),
        (["the ", "old\t", "river\u00a0"], {"the": 5, "old": 6, "river": 7}, r"white space at the ends of lines \(3\)"),
        (["the", "old", "the ", "river"], {"the": 7, "old": 6, "river": 8}, r"white space at the ends of lines \(1\)"),
        (["the\r", "old \r", "the\r"], {"the": 7, "old": 6}, r"white space at the ends of lines \(1\)"),
        (
            ["the", "", "of", "", "", "old"],
            {"the": 5, "of": 7, "old": 10},
            r"\(3, the first is line 7\)",
        ),
        (["the", "old", "", ""], {"the": 5, "old": 6}, ""),  # empty lines at the end of the file
        (["the", "\u2028", "##\u2028", "\u3000", "old"], {"the": 5, "\u2028": 6, "##\u2028": 7, "old": 9}, ""),
        (["[MASK]", " the", "the", "[PAD]"], {"[MASK]": 5, "the": 7, "[PAD]": 8}, r"\(2, the first is line 1\)"),
    ],
)
def test_lines_are_read_as_the_library_reads_them(tmp_path, capsys, lines, ids, told):
    (tmp_path / "vocab.txt").write_bytes("\n".join([*SPECIAL, *lines, ""]).encode())
    ours = tokenizer.load(tmp_path / "vocab.txt")
    assert {token: ours.token_id(token) for token in ids} == ids and ours.mask_id == ids.get("[MASK]", 4)
    library = models.WordPiece.read_file(str(tmp_path / "vocab.txt"))
    assert {token: index for token, index in library.items() if token.strip("#")}.items() >= {
        token: index for token, index in ids.items() if token.strip("#\u2028")
    }.items()
    text = " ".join(token for token in ids if token.isalpha())
    assert ours.encode(text).tolist() == [ids[token] for token in text.split()]
    printed = capsys.readouterr().err
    assert re.search(told, printed) if told else not printed
    # Our own folder, and a tokenizer.json with gaps, as the library writes it, give the same ids.
    ours.save(tmp_path / "saved")
    content = json.loads((tmp_path / "saved" / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {token: index for token, index in vocabulary.items() if "[line" not in token}
    (tmp_path / "gaps.json").write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "gaps").mkdir()
    (tmp_path / "gaps.json").rename(tmp_path / "gaps" / "tokenizer.json")
    for folder in ("saved", "gaps"):
        assert tokenizer.load(tmp_path / folder).content_hash == ours.content_hash


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.txt", b"[PAD]\n[UNK]\nthe\n[CLS]\n", r"the vocabulary lacks \[SEP\], \[MASK\]\. Add a line for each"),
        ("vocab.txt", b"[PAD]\n\xff\xfe\n", "not UTF-8 at byte 6"),
        (
            "tokenizer.json",
            b'{"model": {"type": "WordLevel", "vocab": {}}}',
            "unsupported model type WordLevel; choose",
        ),
        ("tokenizer.json", b'{"model": {"type": "WordPiece"}, "normalizer": {"type": "NFC"}}', "its normalizer is NFC"),
        ("tokenizer.json", b'{"model": {"type": ', r"tokenizer\.json is not valid JSON"),
    ],
)
def test_broken_vocabularies_are_refused_with_the_file(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(UserError, match=rf"tokenizer {tmp_path}/{name}: .*{message}"):
            tokenizer.load(path)


def test_a_path_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no tokenizer at .*absent"):
        tokenizer.load(tmp_path / "absent")
    with pytest.raises(UserError, match=r"contains no tokenizer: no tokenizer\.json, vocab\.txt"):
        tokenizer.load(tmp_path)
    with pytest.raises(UserError, match="path is empty"):  # not the current folder
        tokenizer.load("")


def read(path: Path) -> str:
    return lzma.decompress(path.read_bytes()).decode()


@pytest.mark.slow
def test_ids_are_those_of_the_published_vectors(bert_jax_data):
    uncased = tokenizer.load(bert_jax_data / "vocab" / "bert-base-uncased.txt")
    lines = read(bert_jax_data / "tokenizer" / "bert_uncased_vectors.jsonl.xz").splitlines()
    vectors = [json.loads(line) for line in lines]
    assert len(vectors) == 10_570
    ids, offsets = uncased.encode_many([vector["text"] for vector in vectors])
    for vector, start, end in zip(vectors, offsets, offsets[1:], strict=False):
        assert ids[start:end].tolist() == vector["ids"]
        assert uncased.tokens(ids[start:end]) == vector["wordpiece"]


@pytest.mark.slow
@pytest.mark.parametrize("name, lowercase", [("uncased", True), ("cased", False), ("multilingual-cased", False)])
def test_ids_are_the_librarys_on_nineteen_languages(bert_jax_data, name, lowercase):
    path = bert_jax_data / "vocab" / f"bert-base-{name}.txt"
    ours = tokenizer.load(path)
    assert ours.lowercase is lowercase
    library = bare_library(path.read_text(encoding="utf-8").split("\n")[: ours.vocab_size], lowercase=lowercase)
    files = sorted((bert_jax_data / "multilingual").glob("*.txt.xz"))
    assert len(files) == 19
    for file in files:
        # The first 120 000 characters of each keep this within seconds.
        assert_equal_ids(ours, library, read(file)[:120_000].split("\n"))


def test_a_workdir_and_an_export_with_the_shards_have_a_tokenizer(tmp_path, vocab_dir):
    shutil.copytree(vocab_dir, tmp_path / "run" / "tokenizer")
    assert tokenizer.load(tmp_path / "run").content_hash == tokenizer.load(vocab_dir).content_hash
    (tmp_path / "run" / "vocab.txt").write_text("\n".join([*SPECIAL, "the"]) + "\n")  # its own comes first
    assert tokenizer.load(tmp_path / "run").vocab_size == len(SPECIAL) + 1
