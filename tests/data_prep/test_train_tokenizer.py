"""A trained vocabulary depends on the text and options alone, and is as good as the library's own trainer makes it."""

import json
import os
import random
import subprocess
import sys
import unicodedata
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import CHINESE, THAI
from tokenizers import models, normalizers, pre_tokenizers, trainers

from bert_jax.commands import train_tokenizer
from bert_jax.config.options import parse
from bert_jax.errors import UserError
from bert_jax.storage.files import MARKER
from bert_jax.tokenization import tokenizer
from bert_jax.tokenization import vocabulary as tokenization_vocabulary
from bert_jax.tokenization.wordpiece import SPECIAL_TOKENS
from data_prep import counting, learners, vocabulary
from data_prep.readers import corpus as readers
from data_prep.vocabulary import TokenizerOptions

BOOKS = Path(vocabulary.__file__).parent / "sample" / "books"


def joined(word: tuple[str, ...], left: str, right: str, merged: str) -> tuple[str, ...]:
    """The word with each left-right pair joined, the leftmost first."""
    for index, pair in enumerate(pairwise(word)):
        if pair == (left, right):
            return (*word[:index], merged, *joined(word[index + 2 :], left, right, merged))
    return word


def brute_force(word_counts: dict[str, int], vocab_size: int, min_frequency: int) -> list[str]:
    """Byte-pair encoding as in the paper: every pair is counted again before each merge."""
    words = {(word[0], *("##" + character for character in word[1:])): count for word, count in word_counts.items()}
    tokens = [*SPECIAL_TOKENS, *sorted(set("".join(word_counts)))]
    tokens += sorted({piece for word in words for piece in word[1:]})
    while len(tokens) < vocab_size:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        frequent = [
            (-count, tokens.index(left), tokens.index(right))
            for (left, right), count in pairs.items()
            if count >= min_frequency
        ]
        if not frequent:
            break
        left, right = (tokens[index] for index in min(frequent)[1:])
        merged = left + right.removeprefix("##")
        if merged not in tokens:
            tokens.append(merged)
        words = {joined(word, left, right, merged): count for word, count in words.items()}
    return tokens


def word_counts(text: Path, lowercase: bool = True) -> dict[str, int]:
    splitter = learners.WordPieceSplitter(lowercase)
    counter = counting.ChunkCounter(splitter)
    counter.add(readers.documents(text))
    return counting.count_words(counter.counts, splitter)


@given(
    words=st.dictionaries(st.text("abc", min_size=1, max_size=9), st.integers(1, 9), min_size=1, max_size=12),
    more=st.integers(0, 40),
    min_frequency=st.integers(1, 4),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_merges_are_those_of_brute_force(words, more, min_frequency):
    size = 5 + 6 + more
    assert learners.learn_wordpiece(words, size, min_frequency=min_frequency) == brute_force(words, size, min_frequency)


def test_merges_are_those_of_brute_force_on_real_words(sample_text):
    counts = word_counts(sample_text)
    some = dict(sorted(counts.items())[:600])
    assert learners.learn_wordpiece(some, 400) == brute_force(some, 400, learners.MIN_FREQUENCY)


def test_order_of_the_words_decides_nothing(sample_text):
    counts = word_counts(sample_text)
    shuffled = list(counts.items())
    random.Random(0).shuffle(shuffled)
    assert learners.learn_wordpiece(dict(shuffled), 1500) == learners.learn_wordpiece(counts, 1500)


FILES = {
    "wordpiece": {"vocab.txt"},
    "bpe": {"vocab.json", "merges.txt"},
    "unigram": {"sentencepiece.bpe.model"},
    "sentencepiece_bpe": {"sentencepiece.bpe.model"},
}


@pytest.mark.parametrize("kind", tokenization_vocabulary.LEARNED_KINDS)
def test_same_text_gives_the_same_bytes_in_any_process(kind, sample_text, tmp_path):
    written = []
    for seed in ("1", "2"):
        output = tmp_path / seed
        command = [sys.executable, "-m", "bert_jax", "train-tokenizer", "--vocab_size=1500", f"--kind={kind}"]
        subprocess.run(
            [*command, f"--input={sample_text}", f"--output={output}"],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
        )
        written.append({path.name: path.read_bytes() for path in sorted(output.iterdir())})
    assert written[0] == written[1]
    shared = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    assert set(written[0]) == FILES[kind] | shared
    assert all(str(tmp_path).encode() not in content for content in written[0].values())
    loaded = tokenizer.load(tmp_path / "1")
    assert (loaded.kind, loaded.vocab_size, loaded.lowercase) == (kind, 1500, False)
    documents = list(readers.documents(sample_text))
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "1" / "tokenizer.json"))
    for document in documents[:3]:
        assert loaded.encode(document).tolist() == library.encode(document, add_special_tokens=False).ids
    # Hardly any character of the text is without a token.
    assert np.sum(loaded.encode_many(documents)[0] == loaded.unk_id) <= 0.0005 * sum(map(len, documents))
    if kind != "wordpiece":
        assert loaded.tokens(range(4)) == ["<s>", "<pad>", "</s>", "<unk>"] and loaded.tokens([1499]) == ["<mask>"]


def words_and_tokens(library: tokenizers.Tokenizer, texts: list[str]) -> tuple[int, int]:
    words = sum(len(library.pre_tokenizer.pre_tokenize_str(library.normalizer.normalize_str(text))) for text in texts)
    return words, sum(len(encoding.ids) for encoding in library.encode_batch_fast(texts, add_special_tokens=False))


def test_vocabulary_is_as_good_as_the_librarys(tmp_path):
    """Tokens a word on text that neither trainer saw, against the library's own WordPieceTrainer at equal size."""
    book = BOOKS / "alcott_little_men.txt.xz"
    held_out = list(readers.documents(BOOKS / "stevenson_jekyll_and_hyde.txt.xz"))
    ours = vocabulary.train(TokenizerOptions(book, tmp_path / "ours", vocab_size=2048, lowercase=True))
    library = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.train_from_iterator(
        readers.documents(book),
        trainers.WordPieceTrainer(
            vocab_size=2048,
            min_frequency=2,
            special_tokens=list(SPECIAL_TOKENS),
            limit_alphabet=1000,
            show_progress=False,
        ),
    )
    for texts in (held_out, list(readers.documents(book))):
        words, expected = words_and_tokens(library, texts)
        found = len(ours.encode_many(texts)[0])
        assert abs(found - expected) <= 0.005 * expected, (
            f"{found / words:.4f} tokens a word, library {expected / words:.4f}"
        )
    shared = set(ours.tokens(range(2048))) & set(library.get_vocab())
    assert len(shared) > 0.97 * 2048


def test_trained_vocabulary_is_well_formed(sample_text, tmp_path):
    trained = vocabulary.train(TokenizerOptions(sample_text, tmp_path / "out" / "vocab", 1200, lowercase=False))
    tokens = trained.tokens(range(trained.vocab_size))
    assert tokens[:5] == list(SPECIAL_TOKENS) and trained.vocab_size == 1200 == len(set(tokens))
    assert not trained.lowercase and any(token != token.lower() for token in tokens[5:])
    assert tokenizer.load(tmp_path / "out" / "vocab").content_hash == trained.content_hash
    # Every character of the text has a token, so nothing of it is unknown.
    ids, _ = trained.encode_many(list(readers.documents(sample_text)))
    assert not np.any(ids == trained.unk_id)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["vocab"]


def test_rare_characters_are_left_out_beyond_the_share():
    counts = {"ab": 50, "ac": 40, "bé": 1, "é": 1, "zzz": 20}
    options = {"alphabet_minimum": 4, "min_frequency": 1}
    some = learners.learn_wordpiece(counts, 100, character_coverage=0.9, **options)
    assert some == [*SPECIAL_TOKENS, *"abcz", "##b", "##c", "##z", "ab", "ac", "zz", "zzz"]
    assert {"é", "##é"} < set(learners.learn_wordpiece(counts, 100, character_coverage=1.0, **options))


def test_inside_of_a_word_is_no_beginning():
    """What windows of a long word give: characters and merges with ## throughout."""
    tokens = learners.learn_wordpiece({"ab": 5, "##cde": 7, "#": 3, "##": 2}, 100, min_frequency=6)
    assert tokens[5:] == ["#", *"abcde", "###", "##b", "##c", "##d", "##e", "##cd", "##cde"]


def test_a_smaller_vocabulary_than_requested_is_written_and_reported(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("low lower lowest low low\n\nnew newer newest\n")
    trained = vocabulary.train(TokenizerOptions(tmp_path / "text.txt", tmp_path / "vocab", vocab_size=5000))
    assert trained.vocab_size < 60 and trained.token_id("low") is not None
    assert f"the text gives {trained.vocab_size} tokens, fewer than --vocab_size 5000" in capsys.readouterr().err


@pytest.mark.parametrize("alpha", [None, 0.5])
def test_phrases_too_long_for_wordpiece_are_reported(tmp_path, capsys, alpha):
    """A phrase of 124 characters is [UNK]; of Chinese, Python code and addresses, the parts are words."""
    phrase = "".join(THAI[:4])
    assert len(phrase) > 100
    texts = {
        "khmer": f"{phrase}\n\n" * 2 + "ครู\n\n",
        "short": f"{THAI[0]}\n\n" + "".join(CHINESE) * 3,
        "code": "see https://example.org/" + "a/b_c.d-e" * 30 + " and others",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
        for kind in ("wordpiece", "bpe"):
            options = TokenizerOptions(tmp_path / f"{name}.txt", tmp_path / f"{name}_{kind}", 700, kind, alpha=alpha)
            trained = vocabulary.train(options)
            told = capsys.readouterr().err
            assert ("is in words of more than 100 characters, each of which" in told) == (
                name + kind == "khmerwordpiece"
            )
            assert ("[UNK]" in trained.tokens(trained.encode(text).tolist())) == (name + kind == "khmerwordpiece")
    counter = counting.ChunkCounter(learners.WordPieceSplitter(lowercase=False))
    counter.add([texts["khmer"]])
    assert (counter.unknown, counter.characters) == (2 * len(phrase), len(texts["khmer"]))


def test_mistakes_are_one_line_and_leave_nothing(sample_text, tmp_path):
    empty, output = tmp_path / "empty.txt", tmp_path / "vocab"
    empty.write_text("\n\n  \n")
    cases = [
        ({"kind": "words"}, "unknown --kind 'words'; choose from wordp"),
        ({"kind": "bpe", "vocab_size": 90}, "--vocab_size 90 is too small"),
        ({"kind": "unigram", "vocab_size": 20}, "--vocab_size 20 is too small"),
        ({"kind": "sentencepiece_bpe", "vocab_size": 1}, "--vocab_size 1 is too small"),
        ({"input": empty}, "no document in it"),
        ({"input": tmp_path / "absent.txt"}, "matches no file"),
        ({"vocab_size": 20}, "--vocab_size 20 is too small"),
        ({"vocab_size": -1}, "--vocab_size is -1. Use a positive number"),
        ({"alpha": 1.5}, "--alpha is 1.5. Use a number from 0"),
        ({"character_coverage": 0.0}, "--character_coverage is 0.0. Use a share above 0"),
        ({"max_words": 10}, "--max_words is 10. Use 1000 or more"),
    ]
    usual = {"input": sample_text, "output": output, "vocab_size": 900}
    for arguments, message in cases:
        with pytest.raises(UserError, match=message) as caught:
            vocabulary.train(TokenizerOptions(**usual | arguments))
        assert "\n" not in str(caught.value)
        assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]
    output.mkdir()
    with pytest.raises(UserError, match=r"vocab exists"):
        vocabulary.train(TokenizerOptions(sample_text, output, vocab_size=900))


def test_unfinished_folder_of_another_is_left_alone(sample_text, tmp_path):
    """Only what a killed run of atomic_folder left is replaced, which its marker tells."""
    other = tmp_path / "vocab.incomplete"
    other.mkdir()
    (other / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match=r"vocab\.incomplete already exists and was not left by an interrupted run"):
        vocabulary.train(TokenizerOptions(sample_text, tmp_path / "vocab", vocab_size=900))
    assert [path.name for path in other.iterdir()] == ["mine.txt"]
    (other / MARKER).touch()
    vocabulary.train(TokenizerOptions(sample_text, tmp_path / "vocab", vocab_size=900))
    assert not other.exists() and not (tmp_path / "vocab" / MARKER).exists()
    with pytest.raises(UserError, match=r"ends in \.incomplete"):
        vocabulary.train(TokenizerOptions(sample_text, tmp_path / "x.incomplete", vocab_size=900))


@pytest.mark.parametrize("kind", tokenization_vocabulary.LEARNED_KINDS)
def test_command_trains_and_teaches(kind, sample_text, tmp_path, capsys):
    name = tokenization_vocabulary.LEARNED_KINDS[kind]
    for flags, case in ((["--nolowercase"], "cased"), (["--lowercase"], "lower-cased")):
        output = tmp_path / case
        train_tokenizer.main(
            [f"--input={sample_text}", f"--output={output}", "--vocab_size=700", f"--kind={kind}", *flags]
        )
        assert f"{name}, 700 tokens, {case}\n" in capsys.readouterr().out
        loaded = tokenizer.load(output)
        lowered = case == "lower-cased"
        assert loaded.lowercase is lowered
        assert (loaded.encode("The Doctor").tolist() == loaded.encode("the doctor").tolist()) is lowered
        assert lowered or any(token != token.lower() for token in loaded.tokens(range(5, 699)))
    with pytest.raises(SystemExit):
        train_tokenizer.main(["--help"])
    assert "bert-jax train-tokenizer --input" in capsys.readouterr().out


MARKED = ["हिन्दी का वाक्य", "Tiếng Việt Đà", "한국어 문장", "Größe Öl", "ガギグ", "IŞIK İçin", "El Niño"]


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
@pytest.mark.parametrize("lowercase", [False, True, "tr", "az"])
@pytest.mark.parametrize("strip_accents", [False, True, None])
def test_marks_are_stripped_only_if_asked_for(kind, lowercase, strip_accents, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("\n".join(MARKED * 5), encoding="utf-8")
    options = TokenizerOptions(tmp_path / "text.txt", tmp_path / "words", 400, kind, lowercase, strip_accents)
    trained = vocabulary.train(options)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "words" / "tokenizer.json"))
    changed = 0
    for text in MARKED:
        wanted = text
        if lowercase in ("tr", "az"):
            wanted = wanted.replace("İ", "i").replace("I", "ı")
        if lowercase:
            wanted = wanted.lower()
        if strip_accents:
            marks = ("Mn",) if kind == "wordpiece" else ("Mn", "Mc", "Me")  # BERT's rule, the library's StripAccents
            wanted = "".join(c for c in unicodedata.normalize("NFD", wanted) if unicodedata.category(c) not in marks)
        ids = trained.encode(text).tolist()
        assert trained.decode(ids).strip() == wanted and trained.unk_id not in ids
        assert library.encode(text, add_special_tokens=False).ids == ids
        changed += sum(after != before for after, before in zip(wanted.split(), text.split(), strict=True))
    assert tokenizer.load(tmp_path / "words").content_hash == trained.content_hash
    told = capsys.readouterr().err
    flags = ["--lowercase"] * bool(lowercase) + ["--strip_accents yes"] * bool(strip_accents)
    words = sum(len(text.split()) for text in MARKED)
    if flags:
        assert f"{' and '.join(flags)}: {changed / words:.1%} of the words change, such as " in told
    assert ("of the words change" in told) == bool(flags)
    assert ("Use --lowercase tr or az" in told) == (lowercase is True)


def test_sentencepiece_refuses_what_it_cannot_do(tmp_path):
    for refused in ({"lowercase": "tr"}, {"strip_accents": True}):
        with pytest.raises(
            UserError, match=r"is not for --kind unigram\. Use --kind bpe or wordpiece, or leave it out"
        ):
            TokenizerOptions("text.txt", tmp_path, 400, "unigram", **refused)
    with pytest.raises(UserError, match=r"--lowercase is de\. Use no value, or tr or az"):
        TokenizerOptions("text.txt", tmp_path, 400, lowercase="de")


def test_flags_of_casing_are_parsed():
    def parsed(*flags: str) -> tuple[object, object]:
        options = parse("x", "", TokenizerOptions, ["--input=a", "--output=b", "--vocab_size=9", *flags])
        return options.lowercase, options.strip_accents

    assert parsed() == (None, None) and parsed("--lowercase") == (True, None) and parsed("--nolowercase")[0] is False
    assert parsed("--lowercase", "tr", "--strip_accents", "yes") == ("tr", True)
    assert parsed("--lowercase=az", "--strip_accents=no") == ("az", False)
    with pytest.raises(UserError, match="'maybe' is neither yes nor no"):
        parsed("--strip_accents=maybe")


def test_other_files_are_read_as_examples_are(sample_text, tmp_path, capsys):
    """JSON lines give the vocabulary of the same text; unusable lines are skipped and reported."""
    lines = [json.dumps({"body": document}) for document in readers.documents(sample_text)]
    (tmp_path / "text.jsonl").write_text("\n".join([lines[0], "no JSON", *lines[1:]]))
    options = ["--vocab_size=700", "--kind=bpe"]
    train_tokenizer.main([f"--output={tmp_path / 'text'}", f"--input={sample_text}", *options])
    options += [f"--input={tmp_path / 'text.jsonl'}", "--text_field=body"]
    with pytest.raises(UserError, match=r"text\.jsonl, line 2"):
        train_tokenizer.main([f"--output={tmp_path / 'json'}", *options])
    train_tokenizer.main([f"--output={tmp_path / 'json'}", *options, "--on_error=skip"])
    assert ": 1 documents" in capsys.readouterr().err
    first, second = (tokenizer.load(tmp_path / name) for name in ("text", "json"))
    assert first.content_hash == second.content_hash


def test_languages_are_sampled_by_the_power_of_their_share(sample_text, tmp_path, capsys):
    """English outweighs a language of 36 words a hundredfold; alpha 0 gives it half of the counts, so its own words."""
    small = tmp_path / "small.txt"
    small.write_text("zurekin etorriko naiz bihar arratsaldean liburutegira " * 6)
    options = ["--vocab_size=700", f"--input={sample_text}, {small}"]
    train_tokenizer.main([f"--output={tmp_path / 'plain'}", *options])
    assert "%" not in capsys.readouterr().out
    train_tokenizer.main([f"--output={tmp_path / 'equal'}", "--alpha=0", *options])
    told = capsys.readouterr().out
    assert f"{sample_text}: 99." in told and f"{small}: 0." in told and told.count("counted as 50.0") == 2
    plain, equal = (tokenizer.load(tmp_path / name) for name in ("plain", "equal"))
    assert plain.token_id("arratsaldean") is None and equal.token_id("arratsaldean") is not None
    # One pattern of two files: each file is a language.
    train_tokenizer.main(
        [f"--output={tmp_path / 'files'}", "--alpha=0.3", "--vocab_size=700", f"--input={tmp_path}/*.txt"]
    )
    assert capsys.readouterr().out.startswith(f"{small}: 100.00% of the text, counted as 100.00%")


def test_of_much_text_a_sample_by_hash_is_counted(tmp_path, capsys, monkeypatch):
    """Whatever the division into files: the same documents, about as many bytes as were asked for."""
    generator = random.Random(0)
    texts = [" ".join(f"w{generator.randrange(50)}" for _ in range(30)) for _ in range(2000)]
    counted = []
    monkeypatch.setattr(counting.ChunkCounter, "add", lambda self, documents: counted.append(list(documents)))
    (tmp_path / "one.txt").write_text("\n\n".join(texts))
    (tmp_path / "first.txt").write_text("\n\n".join(texts[:700]))
    (tmp_path / "second.txt").write_text("\n\n".join(texts[700:]))
    for number, name in enumerate(("one.txt", "{first,second}.txt")):
        files = ",".join(f"{tmp_path}/{file}.txt" for file in name[1:-5].split(",")) if "{" in name else tmp_path / name
        for max_gb in (5e-5, 10.0):
            options = TokenizerOptions(files, tmp_path / f"out{number}", 500, max_gb=max_gb, workers=1)
            with pytest.raises(UserError, match="no words"):
                vocabulary.train(options)
    sample, everything, again, _ = counted
    assert everything == texts and sample == again
    assert 0.7 * 5e4 < sum(map(len, sample)) < 1.3 * 5e4 and set(sample) < set(texts)
    told = capsys.readouterr().err
    assert "% of the documents, chosen by their hash: about 5e-05 of 0.0 GB" in told and "not_sampled" not in told
