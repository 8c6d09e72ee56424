"""Texts encoded and embedded as by transformers, from the folder that it saves (tests/tools/make_golden_texts.py)."""

import dataclasses
import json
import shutil
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from golden import REFRESH, TOLERANCE, read_arrays
from random_checkpoints import odd_config, random_checkpoint
from tokenizer_kinds import make, random_texts

from bert_jax.config import AutoTaskConfig, FinetuneConfig, ModelOptions
from bert_jax.data.shards import open_dataset
from bert_jax.errors import UserError
from bert_jax.interop import export, huggingface, huggingface_export, stablehlo
from bert_jax.model.heads.config import Heads
from bert_jax.tasks import embedder as texts_lib
from bert_jax.tasks.embedder import embed
from bert_jax.tasks.fill_mask import fill_mask
from bert_jax.tasks.finetuning import finetune
from bert_jax.tasks.kinds.question_data import Question, encode_questions
from bert_jax.tasks.rows import Sentence, Split, encode_pairs
from bert_jax.tasks.word_rows import encode_words
from bert_jax.tokenization import tokenizer, vocabulary
from bert_jax.tokenization.byte_bpe import ByteBPEEngine
from bert_jax.tokenization.engine import template
from bert_jax.tokenization.specification import BERT_ROLES, MPNET_ROLES
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.tokenization.wordpiece import WordPieceEngine, WordPieceSpec
from data_prep.build import build
from data_prep.build_options import BuildOptions
from data_prep.inspection import verify

END = "<|endoftext|>"
NAMES = ("gpt2", "mpnet")
HASH_BEFORE = "2aafbf2ab36ddabbc8d9fd2cc41381ba4c3b82713509bd8e9b28c22db57a456a"


@pytest.fixture
def folder(tmp_path):
    """Returns a function that writes the folder of a reference and returns it with its arrays."""

    def write(name):
        arrays = read_arrays(f"{name}_texts")
        out = tmp_path / name
        out.mkdir()
        for key, value in arrays.items():
            if key.startswith("files/"):
                (out / key.removeprefix("files/")).write_text(str(value), encoding="utf-8")
        weights = {key.removeprefix("weights/"): value for key, value in arrays.items() if key.startswith("weights/")}
        safetensors.numpy.save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
        return out, arrays

    return write


def numbered(arrays, kind):
    return [arrays[f"{kind}/{index}"] for index in range(sum(key.startswith(f"{kind}/") for key in arrays))]


def rows_of(encoded):
    return [row.tolist() for row in np.split(encoded.input_ids, encoded.offsets[1:-1])]


@pytest.mark.parametrize("name", NAMES)
def test_texts_and_pairs_have_the_ids_of_transformers(folder, name):
    path, arrays = folder(name)
    texts, pairs = json.loads(str(arrays["texts"])), json.loads(str(arrays["pairs"]))
    wanted = [ids.tolist() for kind in ("ids", "pair_ids") for ids in numbered(arrays, kind)]
    encoded = texts_lib.encode([*texts, *map(tuple, pairs)], tokenizer.load(path), 64, by_word=False)
    assert rows_of(encoded.rows) == wanted, REFRESH


@pytest.mark.parametrize("name", NAMES)
def test_texts_have_the_vectors_of_transformers(folder, name):
    path, arrays = folder(name)
    texts, hidden = json.loads(str(arrays["texts"])), numbered(arrays, "hidden")
    loaded = huggingface.read(path)
    vectors = embed(loaded, texts, pool="none")
    assert vectors["offsets"].tolist() == np.cumsum([0, *map(len, hidden)]).tolist()
    np.testing.assert_allclose(vectors["embeddings"], np.concatenate(hidden), atol=TOLERANCE, err_msg=REFRESH)
    means = np.stack([vectors_of_text.mean(axis=0) for vectors_of_text in hidden])
    np.testing.assert_allclose(embed(loaded, texts)["embeddings"], means, atol=TOLERANCE, err_msg=REFRESH)


@pytest.mark.parametrize("name", NAMES)
def test_exports_encode_texts_as_the_folder_that_was_read(folder, tmp_path, name):
    path, arrays = folder(name)
    loaded = huggingface.read(path)
    huggingface_export.write(loaded, tmp_path / "again")
    again = huggingface.read(tmp_path / "again")
    export.write(loaded, tmp_path / "orbax")
    for words in (again.vocabulary, vocabulary.load(tmp_path / "orbax" / "tokenizer")):
        assert words.spec == loaded.vocabulary.spec
        assert words.content_hash == loaded.vocabulary.content_hash
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "again" / "tokenizer.json"))
    texts, pairs = json.loads(str(arrays["texts"])), json.loads(str(arrays["pairs"]))
    assert [library.encode(text).ids for text in texts] == [ids.tolist() for ids in numbered(arrays, "ids")]
    assert [library.encode(*pair).ids for pair in pairs] == [ids.tolist() for ids in numbered(arrays, "pair_ids")]


def test_rows_of_tasks_have_no_special_tokens_either(folder):
    words = tokenizer.load(folder("gpt2")[0])
    the, cat, space_cat, end = (words.encode(text).tolist() for text in ("the", "cat", " cat", ""))
    assert end == []
    end = [words.token_id(END)]
    pairs, cut = encode_pairs(["the", "", "cat", ""], ["cat", "the", "", ""], words, 64)
    assert rows_of(pairs) == [the + cat, the, cat, end]  # a row has at least one token
    assert pairs.first_lengths.tolist() == [len(the), 0, len(cat), 0] and not cut.any()
    singles, cut = encode_pairs(["the cat", ""], None, words, len(the) + 1)
    assert rows_of(singles) == [(the + space_cat)[: len(the) + 1], end]
    assert cut.tolist() == [len(space_cat) > 1, False]
    sentences = Split(Path("file"), (Sentence(("the", "cat", "the"), None, (1, 2, 3)),), labelled=False)
    rows = encode_words(sentences, words, 64)
    assert rows_of(rows) == [the + space_cat + words.encode(" the").tolist()]
    assert rows.word_slots.tolist() == [0, len(the), len(the) + len(space_cat)]


def test_windows_begin_right_after_the_question(folder):
    words = tokenizer.load(folder("gpt2")[0])
    question, context = words.encode("the cat").tolist(), words.encode("on the mat").tolist()
    split = Split(Path("file"), (Question("q", "the cat", "on the mat", None, "q"),), labelled=False)
    rows = encode_questions(split, words, max_length=64, max_query_length=32, doc_stride=16)
    assert rows_of(rows) == [question + context]
    assert rows.places[0, 2:4].tolist() == [len(question), len(question + context)]
    empty = Split(Path("file"), (Question("q", "", "on the mat", None, "q"),), labelled=False)
    with pytest.raises(UserError, match="question 1 is empty, but the vocabulary adds no special tokens"):
        encode_questions(empty, words, max_length=64, max_query_length=32, doc_stride=16)


def test_the_first_vector_is_refused_where_no_token_stands_for_the_text(folder):
    loaded = huggingface.read(folder("gpt2")[0])
    with pytest.raises(UserError, match="in a causal model the first token sees only itself"):
        embed(loaded, ["the"], pool="cls")
    encoder = dataclasses.replace(loaded, model=dataclasses.replace(loaded.model, causal=False))
    with pytest.raises(UserError, match=r"adds no \[CLS\] to a text"):
        embed(encoder, ["the"], pool="cls")


def test_shards_keep_special_tokens_and_a_tokenizer_that_adds_them(folder, tmp_path):
    path, _ = folder("gpt2")
    words = tokenizer.load(path)
    letters = np.random.default_rng(0).choice(list("abcdefgh    "), (40, 60))
    (tmp_path / "text.txt").write_text("\n\n".join("".join(line) for line in letters))
    build(BuildOptions(str(tmp_path / "text.txt"), path, tmp_path / "data", 24, objective="single", workers=1))
    verify(tmp_path / "data")
    kept = open_dataset(str(tmp_path / "data"), "train").vocabulary()
    assert kept.adds_special_tokens and not words.adds_special_tokens
    assert kept.content_hash == words.content_hash
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "data" / "tokenizer" / "tokenizer.json"))
    assert library.encode("the cat").ids == [kept.cls_id, *words.encode("the cat").tolist(), kept.sep_id]
    again = Tokenizer(kept.spec)
    assert rows_of(encode_pairs(["the cat"], None, again, 64)[0]) == [library.encode("the cat").ids]


def test_a_vocabulary_without_special_tokens_is_refused_with_the_first_vector_of_a_new_encoder(folder, tmp_path):
    words = tokenizer.load(folder("gpt2")[0])
    (tmp_path / "train.tsv").write_text("text\tlabel\nthe cat\tx\na mat\ty\n")
    files = {"train": str(tmp_path / "train.tsv"), "dev": str(tmp_path / "train.tsv")}
    task = AutoTaskConfig(text="text", label="label", **files)
    config = FinetuneConfig(model=ModelOptions(preset="tiny"), task=task)
    with pytest.raises(UserError, match=r"adds no \[CLS\]\. Use --config\.task\.pooling=mean"):
        finetune(config, tmp_path / "run", words)


@pytest.mark.parametrize(
    ("name", "ids", "pair"),
    [
        ("gpt2", "[*{}]", "a b, without special tokens"),
        ("mpnet", "[{cls}, *{}, {sep}]", "<s> a </s> </s> b </s>"),
        ("bert", "[{cls}, *{}, {sep}]", "[CLS] a [SEP] b [SEP]"),
    ],
)
def test_the_description_of_programs_shows_the_same_sequences(folder, tmp_path, monkeypatch, name, ids, pair):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the number of rows of a program is symbolic
    if name == "bert":
        loaded = random_checkpoint(tmp_path / "vocabulary", odd_config(layers=1), Heads(pooler=True))
    else:
        loaded = huggingface.read(folder(name)[0])
    stablehlo.write(loaded, tmp_path / "programs")
    page = (tmp_path / "programs" / "README.md").read_text()
    text = 'words.encode("Some text.", add_special_tokens=False).ids'
    words = loaded.vocabulary
    assert f"ids = {ids.format(text, cls=words.cls_id, sep=words.sep_id)}\n" in page
    assert f"A pair of texts is {pair}; rows are padded" in page
    if name == "mpnet":  # what embed and fine-tuning make of a pair is what transformers makes of it
        assert (words.between, read_arrays("mpnet_texts")["pair_ids/0"].tolist().count(words.sep_id)) == (2, 3)


@pytest.mark.parametrize(
    ("processor", "settings", "message"),
    [
        ("bos", {}, r"post_processor makes <\|endoftext\|> TEXT of a text; supported are"),
        ("none", {"add_bos_token": True}, r"add_bos_token, which adds <\|endoftext\|> before a text only"),
    ],
)
def test_half_of_the_special_tokens_is_refused(folder, processor, settings, message):
    path, _ = folder("gpt2")
    whole = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    if processor == "bos":
        whole.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{END} $A", special_tokens=[(END, whole.token_to_id(END))]
        )
    whole.save(str(path / "tokenizer.json"))
    known = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(known | settings))
    with pytest.raises(UserError, match=message):
        vocabulary.load(path)


@pytest.mark.parametrize("steps", [["ByteLevel"], ["ByteLevel", "END"], []])
def test_other_forms_of_the_post_processor_are_read(folder, steps):
    """Published GPT-2 has ByteLevel alone; bert_jax writes a template after it where sequences have special tokens."""
    path, _ = folder("gpt2")
    whole = json.loads((path / "tokenizer.json").read_text())
    parts = {
        "ByteLevel": tokenizers.processors.ByteLevel(trim_offsets=False),
        "END": tokenizers.processors.TemplateProcessing(
            single=f"{END} $A {END}", pair=f"{END} $A {END} $B {END}", special_tokens=[(END, 0)]
        ),
    }
    library = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    library.post_processor = tokenizers.processors.Sequence([parts[step] for step in steps])
    library.save(str(path / "tokenizer.json"))
    if not steps:
        (path / "tokenizer.json").write_text(json.dumps(whole | {"post_processor": None}))
    assert vocabulary.load(path).adds_special_tokens == ("END" in steps)


def test_the_special_tokens_of_mpnet_are_its_own(folder):
    words = huggingface.read(folder("mpnet")[0]).vocabulary
    assert words.roles == ("<pad>", "[UNK]", "<s>", "</s>", "<mask>")
    assert (words.pad_id, words.unk_id, words.cls_id, words.sep_id) == (1, 4, 0, 2)
    assert words.has_mask and words.pair_separators == 2 and words.special_ids == (0, 1, 2, 4, words.mask_id)


def test_the_published_vocabulary_of_mpnet_contains_berts_special_tokens(tmp_path):
    """It is BERT's vocabulary after <s>, <pad>, </s> and <unk>, and before <mask>."""
    bert = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s"]
    (tmp_path / "vocab.txt").write_text("\n".join(["<s>", "<pad>", "</s>", "<unk>", *bert, "<mask>"]) + "\n")
    words = tokenizer.load(tmp_path)
    assert words.roles == MPNET_ROLES and (words.unk_id, words.mask_id) == (5, 12)
    assert words.encode_special("the <mask> cats").tolist() == [9, 12, 10, 11]
    (tmp_path / "vocab.txt").write_text("\n".join([*bert, "<s>", "</s>", "<pad>", "<mask>"]) + "\n")
    assert vocabulary.load(tmp_path).roles == BERT_ROLES
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "MPNetTokenizer"}')
    assert vocabulary.load(tmp_path).roles == MPNET_ROLES
    (tmp_path / "vocab.txt").write_text("\n".join(["<s>", "<pad>", "</s>", "[UNK]", "the"]) + "\n")
    with pytest.raises(UserError, match="no token for mask_token"):
        vocabulary.load(tmp_path)


@pytest.mark.parametrize("kind", ["wordpiece_uncased", "bpe", "bpe_nfc"])
def test_special_tokens_without_a_role_are_matched_in_texts_of_tasks(tmp_path, kind):
    """As by the library, like those with a role."""
    make(kind, ["The old man and the sea.", "He was an old man who fished alone."] * 9, tmp_path)
    tokenizer.load(tmp_path).save(tmp_path / "plain")
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "plain" / "tokenizer.json"))
    library.add_special_tokens(["[E1]", tokenizers.AddedToken("[/E1]", lstrip=True, special=True)])
    shutil.copytree(tmp_path / "plain", tmp_path / "marked")
    library.save(str(tmp_path / "marked" / "tokenizer.json"))
    words = tokenizer.load(tmp_path / "marked")
    texts = ["the [E1] old man [/E1] and", "the sea", "[e1] [E1]man,[/E1] he[SEP]</s>it"]
    found = texts_lib.encode([*texts, (texts[0], texts[2])], words, 64, by_word=False)
    assert rows_of(found.rows) == [
        *(library.encode(text).ids for text in texts),
        library.encode(texts[0], texts[2]).ids,
    ]
    pairs, _ = encode_pairs(texts, None, words, 64)
    assert rows_of(pairs)[0] == rows_of(found.rows)[0]
    marked = words.token_id("[E1]")
    sentences = Split(Path("file"), (Sentence(("the", "[E1]", "man"), None, (1, 2, 3)),), labelled=False)
    assert rows_of(encode_words(sentences, words, 64))[0].count(marked) == 1
    questions = Split(Path("file"), (Question("1", "[E1]?", "the [E1] old man", None, "1"),), labelled=False)
    options = {"max_length": 64, "max_query_length": 9, "doc_stride": 9}
    assert rows_of(encode_questions(questions, words, **options))[0].count(marked) == 2
    role = words.roles.mask_token
    assert words.mask_id in words.of_tasks.encode(f"the {role} [E1]") and marked not in words.encode("[E1]")
    assert tokenizer.load(tmp_path / "plain").of_tasks.spec == tokenizer.load(tmp_path / "plain").spec


def marked_and_library(folder, kind, *, normalized):
    """A tokenizer of tasks with special tokens without a role, and the library that matches all special tokens."""
    lines = ["The old man and the new sea.", "He was an old man who fished alone.", "unk E1 <unk>"]
    make(kind, lines * 9, folder)
    tokenizer.load(folder).save(folder / "plain")
    contents = ("[E1]", "<Unk>") if kind.startswith("bpe") else ("[E1]", "<Unk>", "New Sea", "Åe", "\u4e00x")
    library = tokenizers.Tokenizer.from_file(str(folder / "plain" / "tokenizer.json"))
    library.add_special_tokens([tokenizers.AddedToken(content, normalized=normalized) for content in contents])
    shutil.copytree(folder / "plain", folder / "marked")
    library.save(str(folder / "marked" / "tokenizer.json"))
    return tokenizer.load(folder / "marked").of_tasks, library


MARKED = [
    "the [E1] old man",
    "≮UNK> <\x00unk> x",
    "new\u3000sea, new  sea",
    "the<Unk>sea",
    "NEW SEÅ A\u030ae ae",
    "一x 一 x",
]
UNMARKED = ["the old man, E1", "< unk >", "a ≮ b", "news ea", "≮ unk>", "Größe – “x” 一", ""]


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("kind", ["wordpiece_uncased", "wordpiece_cased", "bpe", "bpe_nfc"])
def test_texts_with_tokens_without_a_role_have_the_ids_of_the_library(tmp_path, kind, normalized):
    words, library = marked_and_library(tmp_path, kind, normalized=normalized)
    parts = [*MARKED, *UNMARKED, *(f"{a[:30]}{b}{a[30:]}" for a in random_texts(3, 80) for b in ("<Unk>", "≮unk>"))]
    texts = parts + random_texts(4, 200)
    ids, offsets = words.encode_many(texts)
    for text, found in zip(texts, np.split(ids, offsets[1:-1]), strict=True):
        assert found.tolist() == library.encode(text, add_special_tokens=False).ids, text


def test_other_texts_are_encoded_word_by_word(tmp_path):
    """Which the cache of words makes many times faster; only the library finds tokens in normalized text."""
    words, _ = marked_and_library(tmp_path / "wordpiece", "wordpiece_uncased", normalized=True)
    engine = WordPieceEngine(words.spec)
    assert list(engine.split(MARKED).exceptions) == list(range(len(MARKED)))
    assert not engine.split(UNMARKED).exceptions
    for normalized in (False, True):
        words, _ = marked_and_library(tmp_path / f"bpe-{normalized}", "bpe_nfc", normalized=normalized)
        chunked = ByteBPEEngine(words.spec).split(["the [E1] old man", "the old man"])
        assert chunked is None if normalized else chunked.exceptions == {0: None}


def test_the_mask_of_mpnet_is_filled_as_by_transformers(folder):
    path, arrays = folder("mpnet")
    (filled,) = fill_mask(path, ["the <mask> sat"], top=45)
    (also,) = fill_mask(path, ["the [MASK] sat"], top=45)
    assert also.masks == filled.masks
    names = vocabulary.load(path)
    found = np.zeros(45)
    for prediction in filled.masks[0]:
        found[names.token_id(prediction.token)] = prediction.probability
    np.testing.assert_allclose(found, arrays["mask_probabilities"], atol=TOLERANCE, err_msg=REFRESH)


@pytest.mark.parametrize(
    ("processor", "separators"),
    [
        (tokenizers.processors.BertProcessing(("</s>", 2), ("<s>", 0)), 1),
        (template(("<s>", 0), ("</s>", 2), separators=1), 1),
        (template(("<s>", 0), ("</s>", 2), separators=2), 2),
    ],
)
def test_the_separators_of_a_pair_are_those_of_the_folder(folder, processor, separators):
    path, _ = folder("mpnet")
    library = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    library.post_processor = processor
    library.save(str(path / "tokenizer.json"))
    words = tokenizer.load(path)
    assert words.pair_separators == separators
    (row,) = rows_of(texts_lib.encode([("the cat", "x")], words, 64, by_word=False).rows)
    assert row == library.encode("the cat", "x").ids
    words.save(path / "again")
    assert vocabulary.load(path / "again").spec == words.spec
    assert tokenizers.Tokenizer.from_file(str(path / "again" / "tokenizer.json")).encode("the cat", "x").ids == row


def test_a_role_at_its_default_does_not_enter_the_hash():
    """Shards name the hash of their vocabulary. This one was computed before WordPiece had roles."""
    spec = WordPieceSpec((*BERT_ROLES, "the", "##s"), lowercase=True, strip_accents=True)
    assert spec.content_hash() == HASH_BEFORE
    assert dataclasses.replace(spec, pair_separators=2).content_hash() != spec.content_hash()
