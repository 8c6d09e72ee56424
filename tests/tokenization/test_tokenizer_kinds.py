"""Every kind of tokenizer: the library's ids, always, and one tokenizer however it is loaded or saved."""

import itertools
import json
import lzma
import pickle
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizer_kinds import KINDS, Encode, make, of_library, random_texts, train_sentencepiece
from tokenizers import models, normalizers, pre_tokenizers

from bert_jax.data.masking.masker import Masker
from bert_jax.data.masking.rule import MaskingRule
from bert_jax.errors import UserError
from bert_jax.tasks.rows import encode_pairs
from bert_jax.tokenization import sentencepiece_model, tokenizer
from bert_jax.tokenization.sentencepiece_engine import SentencePieceEngine
from bert_jax.tokenization.specification import ALBERT_ROLES, BERT_ROLES, Roles

# A little of other scripts, so that the vocabularies have some of their characters.
SCRIPTS = [
    "Die Straße führt über den Fluß; « très élégant ! » dit-elle à l’été.",
    "Мост через реку построен в 1905 году. Η γέφυρα χτίστηκε.",
    "第二次世界大戦後、東京の人口は増えた。北京是中国的首都。서울은 한국의 수도이다.",
    "الجسر فوق النهر قديم. पुल नदी के ऊपर है। สะพานข้ามแม่น้ำ",
] * 5
SENTENCEPIECE = [kind for kind in KINDS if kind.startswith(("unigram", "sentencepiece"))]


class Made:
    def __init__(self, folder: Path, library: Encode) -> None:
        self.folder, self.library, self.ours = folder, library, tokenizer.load(folder)


@pytest.fixture(scope="session")
def lines(sample_text) -> list[str]:
    return sample_text.read_text(encoding="utf-8").split("\n") + SCRIPTS


@pytest.fixture(scope="session")
def made(lines, tmp_path_factory):
    """A tokenizer of each kind, trained when it is first asked for."""
    kinds: dict[str, Made] = {}

    def of(kind: str) -> Made:
        if kind not in kinds:
            folder = tmp_path_factory.mktemp("kinds") / kind
            kinds[kind] = Made(folder, make(kind, lines, folder))
        return kinds[kind]

    return of


def assert_equal_ids(kind: Made, texts: list[str]) -> None:
    ids, offsets = kind.ours.encode_many(texts)
    for text, start, end, expected in zip(texts, offsets, offsets[1:], kind.library(texts), strict=False):
        found = ids[start:end].tolist()
        assert found == expected, f"{text!a}: {kind.ours.tokens(found)}, library {kind.ours.tokens(expected)}"


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_the_librarys(made, lines, kind):
    texts = lines + random_texts(seed=11, count=1500)
    assert_equal_ids(made(kind), texts)
    assert_equal_ids(made(kind), texts[::-1])  # from a warm cache


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("unigram")])
def test_words_one_by_one_have_the_ids_of_the_text(made, lines, kind):
    texts = [line.split() for line in lines[::40] + SCRIPTS]
    ids, _ = made(kind).ours.encode_many([word for words in texts for word in made(kind).ours.as_in_text(words)])
    found = made(kind).library([" ".join(words) for words in texts])
    assert ids.tolist() == [index for text in found for index in text]


@pytest.mark.parametrize("kind", KINDS)
def test_white_space_and_controls_part_words_as_in_the_library(made, kind):
    codes = [code for code in range(0x3100) if chr(code).isspace() or code < 0x100 or 0x2000 <= code < 0x2070]
    forms = ("a{}b", "a {} b", " {0}a", "b{0} ", "a{0}{0}b", " a {}")
    assert_equal_ids(made(kind), [form.format(chr(code)) for code in codes for form in forms])


@pytest.mark.parametrize("kind", KINDS)
def test_one_tokenizer_however_loaded_and_saved(made, tmp_path, kind):
    ours = made(kind).ours
    ours.save(tmp_path / "saved")
    again = tokenizer.load(tmp_path / "saved")
    again.save(tmp_path / "again")
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"} < names
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "saved" / name).read_bytes()
    copies = [again, pickle.loads(pickle.dumps(ours))]
    if ours.kind in ("wordpiece", "bpe"):
        shutil.copytree(tmp_path / "saved", tmp_path / "no_json")
        if kind != "bpe_nfc":  # merges.txt does not say how text is normalised
            (tmp_path / "no_json" / "tokenizer.json").unlink()
        copies.append(tokenizer.load(tmp_path / "no_json"))
        copies.append(tokenizer.load(tmp_path / "saved" / "tokenizer.json"))
    for copy in copies:
        assert copy.content_hash == ours.content_hash and copy.kind == ours.kind
        np.testing.assert_array_equal(copy.encode("It’s été."), ours.encode("It’s été."))


@pytest.mark.parametrize("kind", KINDS)
def test_facts_of_the_vocabulary(made, kind):
    ours = made(kind).ours
    tokens = ours.tokens(range(ours.vocab_size))
    assert len(set(tokens)) == ours.vocab_size and [ours.token_id(token) for token in tokens] == [
        *range(ours.vocab_size)
    ]
    assert tokens[ours.mask_id] == ours.roles.mask_token and ours.mask_id in ours.special_ids
    if kind == "word_bpe":  # its pieces show where words end
        assert not ours.continuation.any() and ours.surfaces([ours.token_id("the</w>")]) == ["the"]
        return
    assert not ours.continuation[list(ours.special_ids)].any() and 0 < ours.continuation.sum() < ours.vocab_size
    starts = {"wordpiece": lambda token: not token.startswith("##"), "bpe": lambda token: token[0] in "ĠĉĊċČč"}
    starts_word = starts.get(ours.kind, lambda token: token.startswith("▁"))
    ordinary = [index for index in range(ours.vocab_size) if index not in ours.special_ids]
    assert all(ours.continuation[index] != starts_word(tokens[index]) for index in ordinary)
    roberta = ours.roles == Roles("<pad>", "<unk>", "<s>", "</s>", "<mask>")
    assert ours.pair_separators == (2 if roberta else 1)
    if ours.kind in ("unigram", "sentencepiece_bpe") and roberta:
        assert tokens[:4] == ["<s>", "<pad>", "</s>", "<unk>"] and ours.mask_id == ours.vocab_size - 1


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "word_bpe"])
def test_words_of_a_text_begin_where_the_continuation_table_marks(made, kind):
    ours = made(kind).ours
    words = ["the", "river", "and", "the", "little", "house", "were", "there"]
    ids = ours.encode(" " + " ".join(words))
    assert (~ours.continuation[ids]).sum() == len(words)
    begins = np.flatnonzero(~ours.continuation[ids])
    joined = ["".join(ours.surfaces(part)) for part in np.split(ids, begins[1:])]
    assert joined == words


@pytest.mark.parametrize("kind", KINDS)
def test_sentences_are_encoded_as_in_their_document(made, kind):
    ours = made(kind).ours
    sentences = ["There was no doubt.", "“Whatever!”", "The river (it was old) was there.", "été"]
    parts = [sentences[0], *(" " + sentence for sentence in sentences[1:])]
    assert ours.encode_many(parts)[0].tolist() == ours.encode(" ".join(sentences)).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_name_the_characters_of_each_id(made, kind):
    ours = made(kind).ours
    text = "There  was no doubt,\u00a0whatever\tabout “that” house at all. ÉTÉ"
    ids, spans = ours.encode_offsets(text)
    np.testing.assert_array_equal(ids, ours.encode(text))
    covered = set()
    for surface, (start, end) in zip(ours.surfaces(ids), spans, strict=True):
        covered |= set(range(start, end))
        if text[start:end].strip() and text[start:end].isascii():
            assert text[start:end].lower() == surface.lower().strip()
    assert {text[index] for index in set(range(len(text))) - covered} <= {" ", "\t", "\u00a0"}


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_are_those_of_the_tokenizers_library(made, lines, tmp_path, kind):
    ours = made(kind).ours
    ours.save(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.encode_special_tokens = True
    texts = lines + random_texts(seed=13, count=150)
    ids, boundaries, offsets = ours.encode_offsets_many(texts)
    np.testing.assert_array_equal(ids, ours.encode_many(texts)[0])
    compared = 0
    for text, start, stop in zip(texts, boundaries, boundaries[1:], strict=False):
        spans, expected = offsets[start:stop].tolist(), library.encode(text, add_special_tokens=False)
        assert all(0 <= begin <= end <= len(text) for begin, end in spans)
        assert [begin for begin, _ in spans] == sorted(begin for begin, _ in spans)
        if ours.kind in ("wordpiece", "bpe"):
            assert spans == [list(span) for span in expected.offsets]
        elif text in lines and expected.ids == ids[start:stop].tolist():
            # The library gives the space before a word to its first piece, a character after it to a lone space, and
            # characters that are neighbours to all bytes of both.
            for span, (begin, end), surface in zip(
                spans, expected.offsets, ours.surfaces(ids[start:stop]), strict=True
            ):
                if surface and not surface.startswith("<0x"):
                    assert span == [end - len(text[begin:end].lstrip()), end]
        else:
            continue
        compared += 1
    assert compared > len(lines) // 2


@pytest.mark.parametrize("kind", KINDS)
def test_words_are_those_of_the_tokenizers_library(made, lines, tmp_path, kind):
    ours = made(kind).ours
    ours.save(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.encode_special_tokens = True
    ids, boundaries, words = ours.encode_words_many(lines)
    np.testing.assert_array_equal(ids, ours.encode_many(lines)[0])
    compared = 0
    for text, start, stop in zip(lines, boundaries, boundaries[1:], strict=False):
        expected = library.encode(text, add_special_tokens=False)
        if expected.ids == ids[start:stop].tolist():  # nearly always: SentencePiece's library has its own rules
            numbers = np.array(expected.word_ids, np.int64)
            # The same words; only their numbers may differ, because a word may have no piece.
            np.testing.assert_array_equal(np.diff(words[start:stop]) > 0, np.diff(numbers) > 0, err_msg=text)
            compared += len(numbers) > len(set(numbers))
    assert compared


@pytest.mark.parametrize("kind", ["bpe", "unigram_bytes", "sentencepiece_bpe_bytes"])
def test_every_byte_of_a_character_has_its_offsets(made, kind):
    ours = made(kind).ours
    ids, spans = ours.encode_offsets("a 㐀 b")
    bytes_of_it = [span for span, token in zip(spans.tolist(), ours.tokens(ids), strict=True) if span[0] == 2]
    assert [span for span in bytes_of_it if span != [2, 2]] == [[2, 3]] * 3, ours.tokens(ids)  # [2, 2]: a lone space


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_in_a_text_are_text_unless_asked_for(made, kind):
    ours = made(kind).ours
    mask = ours.roles.mask_token
    plain = ours.encode(f"the {mask} of {ours.roles.cls_token}{ours.roles.sep_token}").tolist()
    assert not set(plain) & (set(ours.special_ids) - {ours.unk_id})
    with_mask = ours.encode_special(f"the {mask} of")
    after = ours.encode("of" if ours.kind != "bpe" else " of")
    assert with_mask.tolist() == [*ours.encode("the"), ours.mask_id, *after]
    np.testing.assert_array_equal(ours.encode_special("no markers here"), ours.encode("no markers here"))


@pytest.mark.parametrize("kind", KINDS)
def test_decode_reads_back(made, kind):
    ours = made(kind).ours
    text = "there is no doubt whatever about that."
    assert ours.decode(ours.encode(text)).strip() == (text if kind != "word_bpe" else text.replace(".", " ."))
    whole = ours.decode(
        [ours.cls_id, *ours.encode_special(f"there is {ours.roles.mask_token} doubt").tolist(), ours.sep_id]
    )
    for part in (ours.roles.cls_token, "there is", ours.roles.mask_token, "doubt", ours.roles.sep_token):
        assert part in whole


def test_xlm_r_and_albert_number_as_the_published_models(made):
    xlm_r, albert = made("unigram"), made("unigram_albert")
    library = sentencepiece.SentencePieceProcessor(model_file=str(xlm_r.folder / "sentencepiece.bpe.model"))
    assert xlm_r.ours.vocab_size == library.get_piece_size() + 2
    assert xlm_r.ours.tokens(range(4, xlm_r.ours.vocab_size - 1)) == [
        library.id_to_piece(index) for index in range(3, library.get_piece_size())
    ]
    library = sentencepiece.SentencePieceProcessor(model_file=str(albert.folder / "spiece.model"))
    assert albert.ours.tokens(range(albert.ours.vocab_size)) == [
        library.id_to_piece(index) for index in range(library.get_piece_size())
    ]
    roles = Roles("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
    assert albert.ours.roles == roles and albert.ours.pad_id == 0 and albert.ours.lowercase


@pytest.mark.parametrize("kind", ["unigram", "unigram_bytes"])
def test_the_sentencepiece_model_is_made_again_of_tokenizer_json(made, lines, tmp_path, kind):
    ours, path = made(kind).ours, tmp_path / "tokenizer.json"
    ours.save(tmp_path)
    again = tokenizer.load(path)
    assert again.content_hash == ours.content_hash
    for found, expected in zip(again.encode_many(lines), ours.encode_many(lines), strict=True):
        np.testing.assert_array_equal(found, expected)
    library = tokenizers.Tokenizer.from_file(str(path))
    runs, strip = tokenizers.Regex(" {2,}"), normalizers.Strip(left=False, right=True)
    for converted in ([normalizers.Replace(runs, " ")], [strip, normalizers.Replace(runs, "▁")]):  # by transformers
        changed = tokenizers.Tokenizer.from_str(library.to_str())
        changed.normalizer = normalizers.Sequence([library.normalizer, *converted])
        changed.pre_tokenizer = pre_tokenizers.Metaspace()
        changed.save(str(path))
        assert tokenizer.load(path).content_hash == ours.content_hash


@pytest.mark.parametrize("changes", [{"precompiled_charsmap": b""}, {"add_dummy_prefix": False}])
def test_a_model_of_unusual_rules_is_made_again_of_tokenizer_json(made, tmp_path, changes):
    model = sentencepiece_model_pb2.ModelProto.FromString(made("unigram").ours.spec.model)
    for name, value in changes.items():
        setattr(model.normalizer_spec, name, value)
    ours = tokenizer.Tokenizer(sentencepiece_model.SentencePieceSpec(model.SerializeToString()))
    ours.save(tmp_path)
    assert tokenizer.load(tmp_path / "tokenizer.json").content_hash == ours.content_hash
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("the  river", " the river ", "the\u00a0river", "the\triver\n", " \n the", "  ", ""):
        assert library.encode(text, add_special_tokens=False).ids == ours.encode(text).tolist(), text


QUOTES = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
ACCENTS = [normalizers.NFKD(), normalizers.StripAccents()]
JOINED = normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
WHITE_SPACE, METASPACE = pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()
SPLIT = pre_tokenizers.Sequence([WHITE_SPACE, METASPACE])


def unigram(roles: Roles, steps: list[Any], splitter: pre_tokenizers.PreTokenizer) -> tokenizers.Tokenizer:
    """A Unigram model of the `tokenizers` library, in which each text has one best segmentation."""
    draw = random.Random(3)
    characters = "▁abcdefghijklmnopqrstuvwxyzABCXYZ019.,'\"`-éÀßがぎ각一丁"
    pieces = [*characters, "▁the", "the", "▁hello", "mask", "ask", "▁1"]
    scores = [(piece, -draw.randrange(512, 2304) / 256 / len(piece)) for piece in pieces]
    library = tokenizers.Tokenizer(models.Unigram([(token, 0.0) for token in roles] + scores, unk_id=1))
    library.normalizer, library.pre_tokenizer = normalizers.Sequence(steps), splitter
    library.add_special_tokens(list(roles))
    return library


@pytest.mark.parametrize("roles", [ALBERT_ROLES, BERT_ROLES])
@pytest.mark.parametrize(
    "steps",
    [[], QUOTES, ACCENTS, [normalizers.Lowercase()], [JOINED], [*QUOTES, *ACCENTS, normalizers.Lowercase(), JOINED]],
    ids=["nothing", "quotes", "accents", "lower", "joined", "all"],
)
def test_a_unigram_model_of_the_tokenizers_library_has_its_ids_also_after_saving(tmp_path, roles, steps):
    library = unigram(roles, steps, SPLIT)
    library.save(str(tmp_path / "tokenizer.json"))
    ours = Made(tmp_path, of_library(library))
    ours.ours.save(tmp_path / "saved")
    saved = tokenizers.Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json"))
    # U+2581 stands for a space in the library, which also takes the special tokens in its vocabulary for pieces.
    texts = ["ﬁne ①", "x\u00a0y", "``a''", *random_texts(seed=17, count=600)]
    texts = [text.replace("▁", "") for text in texts if "[MASK]" not in text]
    assert_equal_ids(ours, texts)
    assert_equal_ids(Made(tmp_path / "saved", of_library(saved)), texts)
    for again in (tmp_path / "saved", tmp_path / "saved" / "tokenizer.json"):
        assert tokenizer.load(again).content_hash == ours.ours.content_hash


@pytest.mark.parametrize(
    ("steps", "splitter", "message"),
    [
        ([normalizers.NFKD(), normalizers.Lowercase()], SPLIT, "unsupported normalizer NFKD for a Unigram model; supp"),
        ([normalizers.StripAccents()], SPLIT, "unsupported normalizer StripAccents"),
        ([normalizers.Lowercase(), *ACCENTS], SPLIT, "unsupported normalizer NFKD"),
        ([normalizers.Replace("«", '"')], SPLIT, "unsupported normalizer Replace"),
        ([], METASPACE, "Metaspace keeps white space that SentencePiece drops. Put WhitespaceSplit before it"),
        ([JOINED], METASPACE, "Metaspace keeps white space"),
        (
            [],
            pre_tokenizers.Sequence([WHITE_SPACE, pre_tokenizers.Metaspace(prepend_scheme="never")]),
            "WhitespaceSplit and prepend_scheme 'never'. Only 'always' is supported",
        ),
        ([], pre_tokenizers.Metaspace(replacement="_"), "pre_tokenizer Metaspace. Only Metaspace with ▁ is supported"),
    ],
)
def test_steps_that_sentencepiece_does_not_follow_are_refused(tmp_path, steps, splitter, message):
    unigram(ALBERT_ROLES, steps, splitter).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=message):
        tokenizer.load(tmp_path)


def test_albert_keeps_case_and_accents_if_configured(made, tmp_path):
    shutil.copy(made("unigram_albert").folder / "spiece.model", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false, "keep_accents": true}')
    kept = tokenizer.load(tmp_path)
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spiece.model"))
    assert not kept.lowercase
    assert kept.encode("The Été").tolist() == library.encode("The Été")
    with pytest.raises(UserError, match="--lowercase contradicts the tokenizer's files, by which it keeps capitals"):
        tokenizer.load(tmp_path, lowercase=True)
    (tmp_path / "tokenizer_config.json").unlink()
    assert tokenizer.load(tmp_path).lowercase  # no piece has a capital


def test_case_folding_by_the_model_is_detected(lines):
    content = train_sentencepiece(lines, normalization_rule_name="nmt_nfkc_cf")
    folded = tokenizer.Tokenizer(sentencepiece_model.SentencePieceSpec(content))
    assert folded.lowercase and folded.encode("The").tolist() == folded.encode("the").tolist()


def test_added_tokens_of_byte_pairs_are_honoured(made, tmp_path):
    shutil.copytree(made("bpe").folder, tmp_path / "folder")
    made("bpe").ours.save(tmp_path / "folder")
    path = tmp_path / "folder" / "tokenizer.json"
    library = tokenizers.Tokenizer.from_file(str(path))
    library.add_tokens(["new york"])
    library.save(str(path))
    ours = tokenizer.load(path)
    assert ours.vocab_size == made("bpe").ours.vocab_size + 1
    library.encode_special_tokens = True
    for text in ("in new york today", "in new  york", "nothing of it", "été new york"):
        assert ours.encode(text).tolist() == library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("kind", "part", "change", "message"),
    [
        ("bpe", "normalizer", {"type": "Strip"}, "unsupported normalizer Strip; choose from NFC"),
        ("bpe", "pre_tokenizer", {"type": "Metaspace"}, "its model is BPE with pre_tokenizer Metaspace. Only"),
        ("bpe", "model", {"byte_fallback": True}, "its model has byte_fallback True"),
        ("bpe", "model", {"merges": [["no", "such piece"]]}, "the merges do not fit"),
        ("unigram", "normalizer", {"type": "Strip"}, "unsupported normalizer Strip for a Unigram model"),
        ("unigram", "pre_tokenizer", {"type": "Whitespace"}, "its model is Unigram with pre_tokenizer Whitespace"),
    ],
)
def test_what_is_half_supported_is_refused_by_name(made, tmp_path, kind, part, change, message):
    made(kind).ours.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content[part] = content[part] | change if part == "model" else change
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        tokenizer.load(path)


PIECES = {token: index for index, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", "a", "b", "ab"])}


@pytest.mark.parametrize(
    ("vocabulary", "merges", "message"),
    [
        ({}, None, r"vocab\.json: byte-level BPE needs merges\.txt in the same folder"),
        ({}, "a b", "no token for mask_token"),
        ({"<mask>": 7}, "a b", None),
        ({"<mask>": 7}, "a b c", r"merges\.txt has the line 'a b c', not two tokens"),
        ({"<mask>": 7}, "a b</w>", r"merges\.txt marks the ends of words \(</w>\)"),
        ({"<mask>": 9}, "a b", "ids are not contiguous from 0"),
    ],
)
def test_broken_files_of_byte_pairs_are_refused_with_the_file(tmp_path, vocabulary, merges, message):
    (tmp_path / "vocab.json").write_text(json.dumps(PIECES | vocabulary))
    if merges is not None:
        (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    if message is None:
        assert tokenizer.load(tmp_path).encode("ab").tolist() == [6]
    else:
        with pytest.raises(UserError, match=message):
            tokenizer.load(tmp_path)


def test_broken_sentencepiece_models_are_refused_with_the_file(tmp_path):
    (tmp_path / "spiece.model").write_bytes(b"rubbish")
    with pytest.raises(UserError, match=r"spiece\.model: not a SentencePiece model"):
        tokenizer.load(tmp_path)
    model = sentencepiece_model_pb2.ModelProto()
    for piece, kind in (("<pad>", 3), ("<unk>", 2), ("a", 1)):
        model.pieces.add(piece=piece, type=kind)
    (tmp_path / "spiece.model").write_bytes(model.SerializeToString())
    with pytest.raises(UserError, match="XLM-R's numbering requires <unk>, <s>, </s>"):
        tokenizer.load(tmp_path)


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_a_sentencepiece_model_is_not_read_by_another_numbering_than_its_folder_has(made, kind, tmp_path):
    made(kind).ours.save(tmp_path)
    assert tokenizer.load(tmp_path).content_hash == made(kind).ours.content_hash
    file = tmp_path / "tokenizer.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    added = written["added_tokens"]
    word = {**added[-1], "content": "bert_jax", "id": made(kind).ours.vocab_size, "special": False}
    shifted = [{**token, "id": token["id"] + 1} for token in added]
    for changed, expected in ([*added, word], "'bert_jax' the id"), (shifted, f"{added[0]['content']!r} the id"):
        file.write_text(json.dumps(written | {"added_tokens": changed}), encoding="utf-8")
        with pytest.raises(UserError, match=rf"\.model: tokenizer\.json gives {re.escape(expected)}"):
            tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("merges.txt", r"it is half of .* Give vocab\.json of the same folder"),
        ("tokenizer_config.json", r"it has no field `model`\. Give the folder, or its .*vocab\.json"),
    ],
)
def test_a_file_next_to_the_vocabulary_is_refused_with_the_one_to_use(name, message, tmp_path):
    (tmp_path / name).write_text('{"a": "b"}')
    with pytest.raises(UserError, match=f"{name}: {message}"):
        tokenizer.load(tmp_path / name)


@pytest.mark.parametrize("kind", ["unigram", "sentencepiece_bpe"])
def test_a_damaged_sentencepiece_model_is_refused_and_nothing_else_happens(made, kind, tmp_path):
    shutil.copytree(made(kind).folder, tmp_path / "damaged")
    (file,) = (tmp_path / "damaged").glob("*.model")
    whole, draw = file.read_bytes(), random.Random(1)
    refused = []
    for _ in range(80):
        damaged = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(draw.choice([300, 3000, len(whole)]))] = draw.randrange(256)
        file.write_bytes(damaged[: draw.choice([len(whole), draw.randrange(len(whole))])])
        try:
            tokenizer.load(tmp_path / "damaged").encode("Hello, the <mask> world, naïve 第二")
        except UserError as error:
            refused.append(str(error))
    assert len(refused) > 40 and all(str(file) in line and "\n" not in line for line in refused)
    assert any("a piece is not UTF-8" in line for line in refused) and any("INTERNAL" in line for line in refused)


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_is_not_unicode_is_refused(made, kind):
    ours = made(kind).ours
    for encode in (ours.encode, ours.encode_special, ours.encode_offsets):
        with pytest.raises(UserError, match=r"lone surrogate U\+DC80"):
            encode("caf\udc80")


@pytest.mark.slow
def test_saved_folders_load_in_transformers_with_equal_ids(made, lines, peer_python, tmp_path):
    texts = [text for text in lines + random_texts(seed=5, count=2000) if "[MASK]" not in text and "<mask>" not in text]
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    for kind in KINDS:
        made(kind).ours.save(tmp_path / kind)
    script = Path(__file__).parent.parent / "tools" / "peers.py"
    arguments = [str(tmp_path / name) for name in ("texts.json", *KINDS)]
    command = [peer_python, str(script), "tokenizers", *arguments]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    for kind, line in zip(KINDS, told, strict=True):
        ours, theirs = made(kind).ours, json.loads(line)
        first, second = (ours.encode(text).tolist() for text in texts[:2])
        separators = [ours.sep_id] * ours.pair_separators
        assert theirs["pair"] == [ours.cls_id, *first, *separators, *second, ours.sep_id], kind
        assert theirs["roles"] == [ours.pad_id, ours.unk_id, ours.cls_id, ours.sep_id, ours.mask_id], kind
        assert theirs["size"] == ours.vocab_size
        differing = [text for text, ids in zip(texts, theirs["ids"], strict=True) if ours.encode(text).tolist() != ids]
        if ours.kind in ("wordpiece", "bpe"):
            assert not differing, (kind, differing[0])
        else:
            # On text as people write it; transformers' normaliser and its ties are not SentencePiece's everywhere.
            assert len(set(differing) & set(lines)) <= 2, (kind, differing[:3])


def rules_of(charsmap: bytes) -> dict[str, str]:
    """The rules of normalising in a model, read from its double-array trie (darts-clone)."""
    size = int.from_bytes(charsmap[:4], "little")
    units = np.frombuffer(charsmap[4 : 4 + size], "<u4").astype(np.int64)
    values = charsmap[4 + size :]
    label, leaf = units & ((1 << 31) | 0xFF), (units >> 8) & 1
    offset = (units >> 10) << ((units & (1 << 9)) >> 6)
    letters = np.arange(1, 256)
    nodes, prefixes, rules = offset[:1].copy(), [b""], {}
    while len(nodes):
        candidates = nodes[:, None] ^ letters
        inside = candidates < len(units)
        candidates = np.where(inside, candidates, 0)
        parents, found = np.nonzero(inside & (label[candidates] == letters))
        children = candidates[parents, found]
        prefixes = [prefixes[parent] + bytes([letter + 1]) for parent, letter in zip(parents, found, strict=True)]
        nodes = children ^ offset[children]
        for index in np.flatnonzero(leaf[children]):
            start = int(units[nodes[index]]) & 0x7FFFFFFF
            rules[prefixes[index].decode()] = values[start : values.index(b"\0", start)].decode()
    return rules


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["nmt_nfkc", "nfkc_cf"])
def test_no_rule_of_sentencepiece_looks_across_a_space(rule):
    content = train_sentencepiece(["a b c d e f g h"] * 50, normalization_rule_name=rule)
    model = sentencepiece_model_pb2.ModelProto.FromString(content)
    engine = SentencePieceEngine(sentencepiece_model.SentencePieceSpec(content))
    assert engine.split(["a b"]) is None  # Unigram: texts go to the library whole
    rules = rules_of(model.normalizer_spec.precompiled_charsmap)
    assert len(rules) > 200_000 and rules["\u00a0"] == " "
    spaces = {key for key, value in rules.items() if value == " "} | {" "}
    assert not [key for key in rules if len(key) > 1 and spaces & set(key)]
    assert not [key for key, value in rules.items() if "  " in value or "▁" in value]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_the_librarys_on_twenty_thousand_random_texts(made, kind):
    assert_equal_ids(made(kind), random_texts(seed=101, count=20_000))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_the_librarys_on_nineteen_languages(bert_jax_data, tmp_path, kind):
    files = sorted((bert_jax_data / "multilingual").glob("*.txt.xz"))
    assert len(files) == 19
    lines: list[str] = []
    for file in files:
        lines += lzma.decompress(file.read_bytes()).decode()[:20_000].split("\n")
    assert_equal_ids(Made(tmp_path, make(kind, lines[::10], tmp_path)), lines)


def test_byte_pairs_follow_the_settings_where_transformers_does(made, tmp_path):
    """RobertaTokenizer makes its steps from tokenizer_config.json, other classes take them from tokenizer.json."""
    made("bpe").ours.save(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    ends = [["</s>", content["model"]["vocab"]["</s>"]], ["<s>", content["model"]["vocab"]["<s>"]]]
    content["post_processor"] = {"type": "BertProcessing", "sep": ends[0], "cls": ends[1]}
    content["pre_tokenizer"]["add_prefix_space"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    for kind, model, space, separators in (
        ("RobertaTokenizer", {"model_type": "bert"}, False, 2),
        ("PreTrainedTokenizerFast", {"model_type": "roberta"}, True, 1),
        (None, {"model_type": "roberta"}, False, 2),  # config.json decides
        (None, {"model_type": "bert", "tokenizer_class": "RobertaTokenizerFast"}, False, 2),
        (None, {"model_type": "roberta", "tokenizer_class": "PreTrainedTokenizerFast"}, True, 1),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": kind}))
        (tmp_path / "config.json").write_text(json.dumps(model))
        read = tokenizer.load(tmp_path)
        library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        assert (read.spec.add_prefix_space, read.pair_separators) == (space, separators)
        assert (read.encode("the end").tolist() == library.encode("the end", add_special_tokens=False).ids) == space
        saved_as = tmp_path / f"{kind}_{'_'.join(model.values())}"
        read.save(saved_as)
        again = tokenizer.load(saved_as)
        assert (again.content_hash, again.pair_separators) == (read.content_hash, separators)
        saved = tokenizers.Tokenizer.from_file(str(saved_as / "tokenizer.json"))
        assert saved.encode("the", "end").tokens.count("</s>") == separators + 1


def special_template(single, pair):
    ids = [("[CLS]", 2), ("[SEP]", 3), ("x", 7)]
    return tokenizers.processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)


TEMPLATES = {  # with the sequences of a pair that transformers 5.24 makes with a general class
    "none": (None, "a b"),
    "bert": (special_template("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]"), "[CLS] a [SEP] b [SEP]"),
    "two": (special_template("[CLS] $A [SEP]", "[CLS] $A [SEP] [SEP] $B [SEP]"), "[CLS] a [SEP] [SEP] b [SEP]"),
    "roberta": (tokenizers.processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2)), "[CLS] a [SEP] [SEP] b [SEP]"),
    "prefix": (special_template("[CLS] $A", "[CLS] $A [SEP] $B"), ""),
    "end": (special_template("$A [SEP]", "$A [SEP] $B [SEP]"), ""),
    "other": (special_template("[CLS] x $A [SEP]", "[CLS] x $A [SEP] $B [SEP]"), ""),
    "pair": (special_template("[CLS] $A [SEP]", "$A $B"), ""),
}


@pytest.mark.parametrize("kind", ["BertTokenizer", "BertTokenizerFast", "PreTrainedTokenizerFast", None, "modernbert"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_post_processor_decides_which_special_tokens_a_text_gets(tmp_path, name, kind):
    """Classes of a family build their own template in transformers 5; general ones take that of tokenizer.json."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "x"]
    library = tokenizers.Tokenizer(tokenizers.models.WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="[UNK]"))
    library.normalizer = tokenizers.normalizers.BertNormalizer()
    library.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    processor, wanted = TEMPLATES[name]
    if processor:
        library.post_processor = processor
    library.save(str(tmp_path / "tokenizer.json"))
    field = "model_type" if kind == "modernbert" else "tokenizer_class"
    (tmp_path / "config.json").write_text(json.dumps({field: kind}))
    if str(kind).startswith("Bert"):
        wanted = "[CLS] a [SEP] b [SEP]"
    if not wanted:
        with pytest.raises(UserError, match=r"its post_processor makes .*tokenizer_class"):
            tokenizer.load(tmp_path)
        return
    ours = tokenizer.load(tmp_path)
    rows, _ = encode_pairs(["a"], ["b"], ours, 16)
    assert " ".join(ours.tokens(rows.input_ids)) == wanted
    ours.save(tmp_path / "saved")
    saved = tokenizers.Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json"))
    assert " ".join(saved.encode("a", "b").tokens) == wanted
    again = tokenizer.load(tmp_path / "saved")
    assert (again.begin, again.between, again.end) == (ours.begin, ours.between, ours.end)


def test_the_numbering_of_camembert(made, tmp_path):
    """Its ids were compared with those of CamembertTokenizer in transformers 5.24, on 1,000 texts."""
    ours, folder = made("unigram").ours, tmp_path / "camembert"
    shutil.copytree(made("unigram").folder, folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "CamembertTokenizer"}')
    words = tokenizer.load(folder)
    assert words.tokens(range(7)) == ["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>"]
    assert (words.pad_id, words.unk_id, words.cls_id, words.sep_id) == (1, 3, 5, 6)
    assert words.mask_id == words.vocab_size - 1 == ours.vocab_size + 2
    text = "the river </s>and été <mask> 京 <s>NOTUSED"
    assert words.tokens(words.of_tasks.encode(text)) == ours.tokens(ours.of_tasks.encode(text))
    words.save(tmp_path / "saved")
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json"))
    assert library.encode("the", "and").ids[:1] == [5] and library.encode("the", "and").ids.count(6) == 3
    (tmp_path / "json").mkdir()
    shutil.copy(tmp_path / "saved" / "tokenizer.json", tmp_path / "json")
    for copy in (tokenizer.load(tmp_path / "saved"), tokenizer.load(tmp_path / "json")):
        assert copy.content_hash == words.content_hash != ours.content_hash


def test_a_bpe_of_words_is_read_from_tokenizer_json_and_by_its_class(made, tmp_path):
    """transformers 5.24 gives the same ids for a folder of HerbertTokenizer, from either form."""
    ours = made("word_bpe").ours
    rows, _ = encode_pairs(["the and"], ["the"], ours, 32)
    assert ours.tokens(rows.input_ids) == ["<s>", "the</w>", "and</w>", "</s>", "the</w>", "</s>"]
    ours.save(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "HerbertTokenizer"
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"pre_tokenizer": {"type": "Whitespace"}}))
    with pytest.raises(UserError, match="normalizer BertNormalizer and pre_tokenizer Whitespace for words that end"):
        tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"post_processor": None}))
    assert tokenizer.load(tmp_path).adds_special_tokens  # the class adds them
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": None}))
    assert not tokenizer.load(tmp_path).adds_special_tokens
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="only HerbertTokenizer as tokenizer_class"):
        tokenizer.load(tmp_path)
    with pytest.raises(UserError, match="masking unit word needs pieces that show where words begin"):
        Masker(ours, MaskingRule(unit="word"), 0)


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece_bpe", "unigram", "wordpiece_cased"])
def test_the_json_has_the_form_of_earlier_libraries(made, kind, tmp_path):
    """tokenizers 0.19 reads merges as text only; that version gave the ids of this one for every kind."""
    made(kind).ours.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    assert all(merge.count(" ") == 1 for merge in content["model"].get("merges", ()))
    assert ("merges" in content["model"]) == kind.endswith("bpe")


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "PreTrainedTokenizerFast", None])
def test_gpt2_with_other_special_tokens_in_its_vocabulary_adds_none(tmp_path, kind):
    tokens = ["<|endoftext|>", "<s>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    named = dict.fromkeys(("bos_token", "eos_token", "unk_token"), tokens[0])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named | {"tokenizer_class": kind}))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    for whole in (False, True):
        if whole:
            library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
            library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
            library.save(str(tmp_path / "tokenizer.json"))
        ours = tokenizer.load(tmp_path)
        assert not ours.adds_special_tokens and set(ours.roles) == {"<|endoftext|>"}


SPECIAL_TEXTS = (
    *("tea [SEP] leaves", "title[SEP]abstract", "[CLS]x[MASK] y [PAD]", "a <s> b</s>c <mask> d", "  [SEP] ", "<mask>"),
    *("the  <mask>  cat</s>", "[sep] [SEP][SEP]", "plain text", "été [MASK] ü", "x<pad>y <unk> [UNK]", ""),
)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_in_the_texts_of_tasks_are_these_tokens(made, kind, tmp_path):
    """As in transformers 5.24, whose ids for these texts were compared for every kind."""
    ours = made(kind).ours
    tasks = ours.of_tasks
    wanted = [ours.encode_special(text).tolist() for text in SPECIAL_TEXTS]
    ids, offsets = tasks.encode_many(SPECIAL_TEXTS)
    assert [ids[a:b].tolist() for a, b in itertools.pairwise(offsets)] == wanted
    assert tasks.encode_offsets_many(SPECIAL_TEXTS)[0].tolist() == ids.tolist()
    for text in ("a [SEP]b", "a </s>b"):
        token = text[2:-1]
        if ours.token_id(token) in ours.special_ids:
            ids, places = tasks.encode_offsets(text)
            first, last = places[ids.tolist().index(ours.token_id(token))]
            assert text[first:last] == token and last == len(text) - 1
            assert ours.encode(text).tolist() != tasks.encode(text).tolist()
    assert pickle.loads(pickle.dumps(tasks)).encode_many(SPECIAL_TEXTS)[0].tolist() == [
        index for row in wanted for index in row
    ]
    # With split_special_tokens, they are ordinary text.
    ours.save(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"split_special_tokens": True}))
    split = tokenizer.load(tmp_path)
    split.save(tmp_path / "again")
    for read in (split, tokenizer.load(tmp_path / "again")):
        assert read.content_hash == ours.content_hash
        assert read.of_tasks.encode_many(SPECIAL_TEXTS)[0].tolist() == ours.encode_many(SPECIAL_TEXTS)[0].tolist()


def test_the_class_of_a_vocabulary_is_also_that_of_config_json(made, tmp_path):
    shutil.copy(made("wordpiece_cased").folder / "vocab.txt", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert", "tokenizer_class": "BertJapaneseTokenizer"}')
    with pytest.raises(UserError, match=r"vocab\.txt: its tokenizer_class is BertJapaneseTokenizer, whose words"):
        tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    assert tokenizer.load(tmp_path).kind == "wordpiece"
