"""What stands between sentences: the text that ids decode to, and with kept line breaks the library's ids."""

import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizer_kinds
import tokenizers
from tokenizer_kinds import unspaced_documents

from bert_jax.errors import UserError
from bert_jax.tokenization import tokenizer
from data_prep.sentences import document_sentences, joined_sentences, kept_pieces
from data_prep.units import Unit
from data_prep.worker import encode, refuse_newlines

KEEPING = ("bpe", "bpe_prefix_space", "bpe_nfc", "bpe_spaces")
CODE = [
    "def add(a, b):\n    return a + b\n\n\nclass C:\n\tx = 1  # two\n\n\tdef f(self):\n\t\tpass\n",
    "   indented. First line\r\n  second line\u3000here\n\n\n  and\t\tmore. \n \n",
    "他说：“你好。”「再见。」然后。Then he left。她笑了！\n第二行。\n",
    "wait...\x1cwhat? No\x1f\nyes\u2028no. \u0301\n\nThe end\n\u0301\n\n\nreally",
]


def unit_of(*documents: str) -> Unit:
    return Unit("train", 0, tuple(document.encode() for document in documents), "")


def ids_of_documents(ours: tokenizer.Tokenizer, documents: list[str], newlines: str) -> list[list[int]]:
    encoded = encode(ours, unit_of(*documents), newlines=newlines)
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
    found = joined_sentences(document)
    assert found.direct == direct and found.sentences == document_sentences(document)


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
