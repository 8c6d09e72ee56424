"""The rules of bert-jax clean, near-duplicates, jobs (also after a crash), and its counts in the manifest of shards."""

import dataclasses
import hashlib
import itertools
import json
import os
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from building import contents
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.commands import clean as commands_clean
from bert_jax.commands import inspect_shards
from bert_jax.commands.clean import CleanOptions, clean
from bert_jax.data.manifest import read_manifest
from bert_jax.errors import UserError
from data_prep.build import build
from data_prep.build_options import BuildOptions
from data_prep.cleaning import job as command
from data_prep.cleaning import rules, unit
from data_prep.cleaning.unit import BANDS, ROWS, Index, bands, minhash, shingles
from data_prep.merge import merge
from data_prep.readers import corpus as readers

SENTENCES = [
    "The harbour was quiet when the last of the boats came home with its lamps still burning.",
    "Nobody on the pier had slept, and the children were wrapped in blankets that smelled of salt.",
    "An old woman counted the masts aloud, as she had done in every storm for forty years.",
    "When she reached eleven she stopped, and the men beside her looked down at their boots.",
    "Somewhere behind the warehouses a dog began to bark at the rising water.",
    "It was then that the lighthouse keeper remembered the twelfth boat and the boy who steered it.",
]
PROSE = "\n".join(SENTENCES)


def test_prose_passes_every_rule_unchanged():
    for rule in rules.RULES.values():
        assert rule(PROSE) == (PROSE, "")


WORDS = [f"{first}{second}{third}" for first in "bdfgklm" for second in "aeiou" for third in "nrst"]


COMMON = ("the", "of", "and", "that", "with", "to", "be", "have")
UNCOMMON = " ".join(word for word in PROSE.split() if word.lower() not in COMMON)
TRAILING = "\n".join(line[:-1] + ("..." if number < 2 else ".") for number, line in enumerate(SENTENCES))
GROUPS = [" ".join(f"{word}x" for word in WORDS[start : start + 6]) for start in range(0, 36, 6)]
REPEATED = " ".join([*GROUPS, *WORDS, *GROUPS[::-1]])


@pytest.mark.parametrize(
    ("rule", "text", "reason"),
    [
        ("gopher", "The end of a very short text.", "gopher_length"),
        ("gopher", "the of " * 50_001, "gopher_length"),
        ("gopher", "of a i " * 30, "gopher_word_length"),
        ("gopher", "internationalization of globalization " * 30, "gopher_word_length"),
        ("gopher", PROSE + " #" * 12, "gopher_symbols"),
        ("gopher", PROSE + "..." * 5, ""),
        ("gopher", PROSE + "..." * 12, "gopher_symbols"),
        ("gopher", "\n".join("• " + line for line in SENTENCES), "gopher_bullets"),
        ("gopher", TRAILING, "gopher_ellipses"),
        ("gopher", PROSE + " 1234" * 30, "gopher_letters"),
        ("gopher", UNCOMMON, "gopher_common_words"),
        ("gopher", UNCOMMON + " the" * 2, "gopher_common_words"),
        ("gopher", UNCOMMON + ' "The end of, and', ""),
        ("gopher", " ".join(PROSE.split()[:45]) + " -- …" * 5, "gopher_length"),
        ("gopher", PROSE + " ½" * 30, "gopher_letters"),
        ("gopher", PROSE + " --" * 30, "gopher_letters"),
        ("gopher_repetition", "\n\n".join([*SENTENCES[:4], *SENTENCES[:2]]), "gopher_repeated_paragraphs"),
        ("gopher_repetition", "\n".join([*SENTENCES[:4], *SENTENCES[:2]]), "gopher_repeated_lines"),
        ("gopher_repetition", PROSE + " rain wind" * 25, "gopher_top_2_gram"),
        ("gopher_repetition", REPEATED, "gopher_repeated_5_grams"),
        ("c4", PROSE.replace("storm", "lorem ipsum"), "c4_lorem_ipsum"),
        ("c4", PROSE.replace("storm", "{storm}"), "c4_curly_bracket"),
        ("c4", PROSE + "\nBy these terms of use, {you} agree.", "c4_curly_bracket"),
        ("c4", "\n".join([*SENTENCES[:4], "Two [edit] words."]), "c4_few_sentences"),
        ("c4", "\n".join(SENTENCES[:4]), "c4_few_sentences"),
        ("c4", PROSE.replace(".", ""), "c4_few_sentences"),
        ("fineweb", PROSE.replace(".", ""), "fineweb_punctuation"),
        ("fineweb", "\n".join(["Menu.", "Home.", "News."] * 3 + SENTENCES[:2]), "fineweb_repeated_lines"),
        ("fineweb", "\n".join([f"Item {number}." for number in range(9)] + SENTENCES[:3]), "fineweb_short_lines"),
    ],
)
def test_a_rule_drops_what_it_is_for(rule, text, reason):
    assert rules.RULES[rule](text)[1] == reason


def test_c4_keeps_the_sentences_of_a_page_and_no_notices():
    page = "\n".join(
        [
            "Home | News | Contact",
            "[2] " + SENTENCES[0] + "[3]",
            "This site uses cookies to do its work.",
            *SENTENCES[1:4],
            "Please enable Javascript to read this page.",
            "Two words.",
            "This line has no end...",
            f"A {'very' * 300} long word is here.",
            SENTENCES[4] + " " + SENTENCES[5],
        ]
    )
    kept = [*SENTENCES[:4], SENTENCES[4] + " " + SENTENCES[5]]
    assert rules.c4(page) == ("\n".join(kept), "")


@given(st.lists(st.sampled_from(["ab", "cde", "f"]), max_size=30), st.integers(1, 6))
def test_characters_of_repeated_n_grams_are_counted_as_by_brute_force(words, n):
    grams = [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
    repeated = {start + k for start, gram in enumerate(grams) if gram in grams[:start] for k in range(n)}
    assert rules.NGrams(words).repeated_characters(n) == sum(len(words[place]) for place in repeated)
    counts = Counter(grams)
    most = max(counts.values(), default=0)
    sizes = {count * len(" ".join(gram)) for gram, count in counts.items() if count == most} if most > 1 else {0}
    assert rules.NGrams(words).top_characters(n) in sizes


def test_no_text_makes_a_rule_fail():
    generator = random.Random(0)
    for size in (0, 1, 2, 5, 100):
        for _ in range(50):
            text = "".join(generator.choice("ab.\n \t#…•{[1]é中") for _ in range(size))
            for rule in rules.RULES.values():
                kept, reason = rule(text)
                assert kept == text or not reason


BOOKS = Path(__file__).parent.parent.parent / "data_prep" / "sample" / "books"
PASSAGE = 200


def test_shared_hashes_estimate_the_jaccard_similarity():
    generator = np.random.default_rng(0)
    for similarity in (0.0, 0.2, 0.5, 0.8, 0.95):
        errors = []
        for _ in range(40):
            values = np.unique(generator.integers(0, 1 << 63, 1200).astype(np.uint64))[:1000]
            shared = round(1000 * 2 * similarity / (1 + similarity)) // 2 * 2
            left, right = values[: 500 + shared // 2], values[500 - shared // 2 :]
            exact = len(np.intersect1d(left, right)) / len(np.union1d(left, right))
            errors.append((minhash(left) == minhash(right)).mean() - exact)
        deviation = np.sqrt(0.25 / (BANDS * ROWS) / len(errors))
        assert abs(np.mean(errors)) < 4 * deviation


def test_shingles_are_runs_of_five_words_in_any_case_and_punctuation():
    same = [shingles(text) for text in ("One, two; three four FIVE six", "one two three four five SIX!")]
    assert len(same[0]) == 2 and (same[0] == same[1]).all()
    assert len(shingles("one two three four five six one two three four five")) == 6  # of 7 runs, the last is the first
    assert len(shingles("")) == 0 and len(shingles("two words")) == 1
    assert len(shingles("लड़का गया और लड़की गयी थी")) == 2  # vowel signs are parts of words
    assert len(shingles("港口很安静最后的船")) == 5  # of scripts without spaces, characters are words
    assert len(shingles("12港口, A4港口")) == 2  # also after a digit or a Latin letter
    assert len(shingles("\U0001e922\U0001e944\U0001e923 " * 4 + "\U0001e924\U0001e94a\U0001e925")) == 1  # Adlam


def documents() -> list[str]:
    """Passages of 200 words of novels, which share nothing."""
    texts = (text for path in readers.expand(str(BOOKS / "*.txt.xz")) for text in readers.documents(path))
    words = [word for text in texts for word in text.split()]
    return [" ".join(words[start : start + PASSAGE]) for start in range(0, len(words) - PASSAGE, PASSAGE)][:1000]


def test_planted_near_duplicates_are_found_and_distinct_documents_stay():
    distinct = documents()
    generator = random.Random(1)
    planted = []
    for text in distinct:
        words = text.split()
        for place in generator.sample(range(PASSAGE), 3):  # a similarity of about 0.86
            words[place] = generator.choice(("north", "seven", "lamps"))
        planted.append(" ".join(words).upper() + " Read more!")
    index = Index()
    kept = sum(index.add(bands(text)) for text in distinct)
    lost = sum(index.add(bands(text)) for text in planted)
    assert len(distinct) >= 500 and kept >= 0.99 * len(distinct)
    assert lost <= 0.05 * len(planted)


def test_a_dropped_document_does_not_drop_others():
    text = documents()[0].split()
    steps = [" ".join([*text[number * 12 :], *(f"new{n}" for n in range(number * 12))]) for number in range(8)]
    index = Index()
    kept = [index.add(bands(step)) for step in steps]
    assert kept[0] and not kept[1] and any(kept[2:])  # a chain of near-duplicates does not end in one document


def prose(number: int) -> str:
    """A text of six sentences that shares no run of five words with another."""

    mark = "".join("abcdefghij"[int(digit)] for digit in str(number))

    def marked(word: str) -> str:
        return word + mark if word.isalpha() and len(word) > 4 else word

    return "\n".join(" ".join(map(marked, line.split())) for line in SENTENCES)


TEXTS = [
    *map(prose, range(40)),
    "Too short.",
    prose(3),
    prose(5).replace("quietf", "loud"),
    *map(prose, range(40, 60)),
    "\n".join([prose(70), SENTENCES[0], prose(71)]),
    "\n".join([prose(72), SENTENCES[0].upper(), prose(73)]),
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    monkeypatch.setattr(commands_clean, "UNIT_MB", 0.004)


def kept(output: Path) -> list[str]:
    paths = sorted(output.glob("part-*.jsonl.zst"))
    return [text for path in paths for text in readers.documents(path)]


def test_each_document_is_kept_or_counted_by_reason(corpus, tmp_path):
    output = tmp_path / "clean"
    found = clean(CleanOptions(corpus, output, rules="gopher", near_duplicates=True, workers=1))
    wanted = [text for text in TEXTS if text not in ("Too short.", TEXTS[42])]
    del wanted[40]  # the copy of number 3
    assert kept(output) == wanted
    assert found["dropped"] == {"gopher_length": 1, "duplicate": 1, "near_duplicate": 1}
    assert found["documents"] == {"read": len(TEXTS), "kept": len(TEXTS) - 3}
    assert found["samples"]["near_duplicate"] == [TEXTS[42][: unit.EXCERPT]]
    assert set(found["mb_a_second"]) == {"gopher", "near_duplicates"}
    assert json.loads((output / "report.json").read_text()) == found
    page = (output / "index.html").read_text()
    assert "gopher_length" in page and "Too short." in page
    assert not (output / "job").exists() and len(np.load(output / command.SIGNATURES)) == len(wanted)


def test_the_speed_of_a_step_counts_only_the_text_that_reaches_it(corpus, tmp_path, monkeypatch):
    """By a clock that shows 0.1 ms for each document and step, a speed is the mean size of the documents."""
    ticks = itertools.count()
    monkeypatch.setattr("time.process_time", lambda: next(ticks) / 10_000)
    monkeypatch.setitem(rules.RULES, "gopher", lambda text: (text, "short" if len(text) < 100 else ""))
    monkeypatch.setitem(rules.RULES, "c4", lambda text: (text[:100], ""))
    found = clean(CleanOptions(corpus, tmp_path / "clean", rules="gopher,c4,fineweb", workers=1))
    long = [text for text in TEXTS if len(text) >= 100]
    assert found["dropped"]["short"] == len(TEXTS) - len(long) == 1
    sizes = {"gopher": np.mean([*map(len, TEXTS)]), "c4": np.mean([*map(len, long)]), "fineweb": 100}
    assert found["mb_a_second"] == pytest.approx({name: size / 100 for name, size in sizes.items()}, abs=0.01)
    assert found["mb_a_second"]["gopher"] < found["mb_a_second"]["c4"]


def test_repeated_lines_are_removed_wherever_they_occur(corpus, tmp_path):
    found = clean(CleanOptions(corpus, tmp_path / "clean", duplicate_lines=True, workers=1))
    texts = kept(tmp_path / "clean")
    # Of a repeated line the first one stays. In lower case, the second one is the same.
    assert SENTENCES[0] in texts[-2] and SENTENCES[0].upper() not in texts[-1]
    assert prose(5).replace("quietf", "loud").splitlines()[0] in texts
    assert found["removed_lines"] == 1 + 5 and found["dropped"] == {"duplicate": 1}


def test_against_drops_what_an_earlier_output_holds(corpus, tmp_path):
    clean(CleanOptions(corpus, tmp_path / "first", near_duplicates=True, workers=1))
    more = tmp_path / "more.jsonl"
    texts = [prose(7).replace("boats", "ships"), prose(100), prose(8)]
    more.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = CleanOptions(more, tmp_path / "second", near_duplicates=True, against=str(tmp_path / "first"), workers=1)
    assert clean(options)["dropped"] == {"near_duplicate": 2}
    assert kept(tmp_path / "second") == [prose(100)]


def test_a_document_is_dropped_that_resembles_a_near_duplicate_in_one_of_two_outputs(tmp_path):
    """Outputs that were cleaned apart may have documents that are near-duplicates of each other."""
    one, other = np.arange(BANDS, dtype=np.uint64), np.arange(100, 100 + BANDS, dtype=np.uint64)
    other[0] = one[0]
    for name, signature in (("a", one), ("b", other)):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / command.SIGNATURES, signature[None])
    seen = command.Merging(CleanOptions("x", "y", near_duplicates=True).steps)
    for name in ("a", "b"):
        seen.add_others(tmp_path / name)
    new = np.arange(200, 200 + BANDS, dtype=np.uint64)
    assert seen.index.add(new)
    new[:2] = 300, other[1]
    assert not seen.index.add(new)


def test_the_documents_are_the_same_with_any_number_of_workers_and_after_a_crash(corpus, tmp_path, monkeypatch):
    options = {"rules": "gopher_repetition,gopher,c4,fineweb", "near_duplicates": True, "duplicate_lines": True}
    clean(CleanOptions(corpus, tmp_path / "one", workers=1, **options))
    clean(CleanOptions(corpus, tmp_path / "two", workers=2, **options))
    done = []

    def failing(*arguments):
        if len(done) == 3:
            raise RuntimeError("the machine fails")
        done.append(unit.clean_unit(*arguments))
        return done[-1]

    with monkeypatch.context() as patch:
        patch.setattr(commands_clean, "clean_unit", failing)
        with pytest.raises(RuntimeError):
            clean(CleanOptions(corpus, tmp_path / "three", workers=1, **options))
    with pytest.raises(UserError, match="was started with other arguments"):
        clean(CleanOptions(corpus, tmp_path / "three", workers=1))
    count = iter(range(100))
    monkeypatch.setattr(
        commands_clean, "clean_unit", lambda *arguments: next(count) is None or unit.clean_unit(*arguments)
    )
    clean(CleanOptions(corpus, tmp_path / "three", workers=1, **options))
    written = [
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir() if path.suffix in (".zst", ".npy")}
        for name in ("one", "two", "three")
    ]
    assert written[0] == written[1] == written[2] and len(written[0]) > 4
    assert next(count) == len(written[0]) - 1 - len(done)  # what was finished is not done again


def test_only_texts_in_the_chosen_languages_stay(tmp_path):
    pytest.importorskip("py3langid")
    texts = [PROSE, "Der Hafen war still, als die letzten Boote nach Hause kamen und die Kinder schliefen. " * 3]
    (tmp_path / "text.txt").write_text("\n\n".join(texts))
    found = clean(CleanOptions(tmp_path / "text.txt", tmp_path / "clean", languages="en", workers=1))
    assert kept(tmp_path / "clean") == [PROSE] and found["dropped"] == {"language_de": 1}
    with pytest.raises(UserError, match=r"unknown language 'english'; choose from .*, en, "):
        clean(CleanOptions(tmp_path / "text.txt", tmp_path / "other", languages="english"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rules": "gopher,c5"}, "--rules: unknown name 'c5'; choose from gopher_repetition, gopher, c4, fineweb"),
        ({"against": "x"}, "add --near_duplicates"),
        ({"against": "x", "near_duplicates": True}, "it has no signatures.npy"),
        ({"language_score": 1.5}, "--language_score is 1.5. Use a number from 0 to 1"),
        ({"language_score": 0.9}, "--language_score is for --languages; add --languages, or leave it out"),
        ({"rules": "gopher", "input": "one.txt"}, "none of the 1 documents of --input is left"),
    ],
)
def test_mistakes_are_refused_in_one_line_and_nothing_is_written(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    Path("one.txt").write_text("A text.\n")
    with pytest.raises(UserError) as caught:
        clean(CleanOptions(**{"input": "one.txt", "output": "clean", "workers": 1} | options))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["one.txt"]


def test_lines_that_differ_in_vowel_signs_are_not_duplicates(tmp_path):
    chakma = ["\U00011103\U00011127", "\U00011103\U00011128", "\U00011103\U00011127 \U0001f600"]  # beyond U+FFFF
    lines = ["लड़का गया", "लड़की गयी", "लड़के गये", *chakma, "लड़का गया!"]
    (tmp_path / "a.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    clean(CleanOptions(tmp_path / "a.txt", tmp_path / "clean", duplicate_lines=True, workers=1, rules=""))
    assert kept(tmp_path / "clean") == ["\n".join(lines[:5])]


def test_lines_of_symbols_are_not_duplicates(tmp_path):
    lines = ["\u26a0\ufe0f", "\u2708\ufe0f", "A line.", "\u2764\ufe0f", "\u26a0\ufe0f"]
    (tmp_path / "a.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = clean(CleanOptions(tmp_path / "a.txt", tmp_path / "clean", duplicate_lines=True, workers=1))
    assert kept(tmp_path / "clean") == ["\n".join(lines)] and found["removed_lines"] == 0


def test_documents_without_words_are_near_duplicates_only_of_equal_ones(tmp_path):
    texts = ["\U0001f389\U0001f389", "\U0001f44d", "\u2014 * \u2014", "\U0001f44d", "- * -"]
    (tmp_path / "a.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    found = clean(CleanOptions(tmp_path / "a.txt", tmp_path / "clean", near_duplicates=True, workers=1))
    assert found["dropped"] == {"duplicate": 1} and kept(tmp_path / "clean") == [*texts[:3], texts[4]]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:100], "signatures.npy is damaged"),
        (lambda content: b"", "signatures.npy is damaged"),
        (lambda content: content.replace(b"<u8", b"<i8"), "signatures.npy is damaged .expected uint64"),
    ],
)
def test_damaged_signatures_are_refused_before_anything_is_cleaned(corpus, tmp_path, damage, message):
    clean(CleanOptions(corpus, tmp_path / "first", near_duplicates=True, workers=1))
    file = tmp_path / "first" / command.SIGNATURES
    file.write_bytes(damage(file.read_bytes()))
    options = CleanOptions(corpus, tmp_path / "second", near_duplicates=True, against=str(tmp_path / "first"))
    with pytest.raises(UserError, match=message):
        clean(options)
    assert not list(tmp_path.glob("second*"))


def test_signatures_of_another_version_are_refused(corpus, tmp_path):
    clean(CleanOptions(corpus, tmp_path / "first", near_duplicates=True, workers=1))
    report = tmp_path / "first" / "report.json"
    report.write_text(json.dumps(json.loads(report.read_text()) | {"version": 0}))
    with pytest.raises(UserError, match=r"another version of bert-jax clean made it"):
        clean(CleanOptions(corpus, tmp_path / "second", near_duplicates=True, against=str(tmp_path / "first")))


def test_a_resumed_job_compares_with_the_same_outputs_and_leaves_no_document_that_it_drops(
    corpus, tmp_path, monkeypatch
):
    clean(CleanOptions(corpus, tmp_path / "first", near_duplicates=True, workers=1))
    options = CleanOptions(
        corpus, tmp_path / "second", near_duplicates=True, against=str(tmp_path / "first"), workers=1
    )

    def crash(*_: object) -> None:
        raise RuntimeError("crashed")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="crashed"):
        patched.setattr(command.Merging, "add_others", lambda *_: None)
        patched.setattr(command.Merging, "write_signatures", crash)
        clean(options)
    assert list((tmp_path / "second.incomplete").glob("part-*"))
    with pytest.raises(UserError, match=r"none of the .* documents of --input is left"):
        clean(options)
    assert not list(tmp_path.glob("second*/part-*"))
    np.save(tmp_path / "first" / command.SIGNATURES, np.zeros((1, BANDS), np.uint64))
    assert clean(options)["documents"]["kept"] > 50
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="crashed"):
        patched.setattr(command.Merging, "write_signatures", crash)
        clean(dataclasses.replace(options, output=tmp_path / "third"))
    np.save(tmp_path / "first" / command.SIGNATURES, np.ones((1, BANDS), np.uint64))
    with pytest.raises(UserError, match=r"third\.incomplete"):
        clean(dataclasses.replace(options, output=tmp_path / "third"))


def test_a_file_whose_name_is_not_utf_8_is_cleaned(tmp_path):
    path = os.fsencode(tmp_path / "caf") + b"\xe9.txt"
    with open(path, "wb") as file:
        file.write(prose(1).encode())
    clean(CleanOptions(os.fsdecode(path), tmp_path / "clean", workers=1))
    assert json.loads((tmp_path / "clean" / "report.json").read_text())["settings"]["input"] == os.fsdecode(path)


@pytest.fixture(scope="module")
def cleaned(sample_text, tmp_path_factory) -> Path:
    """Two outputs of bert-jax clean, of four files and of one."""
    folder = tmp_path_factory.mktemp("cleaned")
    documents = list(readers.documents(sample_text))
    (folder / "many.txt").write_text("\n\n".join([*documents, "Too short.", "Also short.", documents[0]]))
    (folder / "few.txt").write_text("\n\n".join([*(text[::-1] for text in documents[:4]), documents[0]]))
    size = sum(map(len, documents))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands_clean, "UNIT_MB", size / 4e6)
        clean(CleanOptions(folder / "many.txt", folder / "many", rules="gopher", duplicate_lines=True, workers=1))
    clean(CleanOptions(folder / "few.txt", folder / "few", workers=1))
    assert len(list((folder / "many").glob("part-*"))) > 2
    return folder


def stated(folder: Path) -> dict:
    """What the manifest should hold of a report, from the report."""
    content = (folder / "report.json").read_bytes()
    report = json.loads(content)
    counts = {name: report[name] for name in ("documents", "bytes", "dropped", "removed_lines", "refused")}
    return {"report": f"{folder}/report.json", "sha256": hashlib.sha256(content).hexdigest(), **counts}


def build_options(text: str, vocab: Path, output: Path, part: str = "") -> BuildOptions:
    return BuildOptions(text, vocab, output, 64, objective="single", part=part, workers=1)


def test_the_manifest_and_the_page_state_what_cleaning_dropped(cleaned, vocab_dir, tmp_path, capsys):
    manifest = build(build_options(f"{cleaned}/*/*.zst", vocab_dir, tmp_path / "out"))
    assert manifest["cleaning"] == [stated(cleaned / "few"), stated(cleaned / "many")]
    many = manifest["cleaning"][1]
    assert many["dropped"]["duplicate"] == 1 and many["dropped"]["gopher_length"] >= 2
    kept = sum(report["documents"]["kept"] for report in manifest["cleaning"])
    assert kept == manifest["counts"]["documents"]
    inspect_shards.main([str(tmp_path / "out"), "--verify", "--html", str(tmp_path / "page.html")])
    for told in (capsys.readouterr().out, (tmp_path / "page.html").read_text()):
        assert "dropped: gopher_length" in told and "By bert-jax clean, as in" in told
    damaged = json.loads((tmp_path / "out" / "manifest.json").read_text())
    damaged["cleaning"][0]["documents"] = {"read": 3}
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(damaged))
    with pytest.raises(UserError, match=r"cleaning\[0\]\.documents\.kept is missing"):
        read_manifest(tmp_path / "out")


def test_a_report_that_several_parts_have_is_merged_once(cleaned, vocab_dir, tmp_path):
    text = f"{cleaned}/many/*.zst"
    whole = build(build_options(text, vocab_dir, tmp_path / "whole", "all/2"))
    for number in range(2):
        assert (
            build(build_options(text, vocab_dir, tmp_path / f"{number}", f"{number}/2"))["cleaning"]
            == whole["cleaning"]
        )
    merged = merge([tmp_path / "1", tmp_path / "0"], tmp_path / "merged")
    assert merged["cleaning"] == whole["cleaning"] == [stated(cleaned / "many")]
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")
    build(build_options(f"{cleaned}/few/*.zst", vocab_dir, tmp_path / "more", "+2"))
    both = merge([tmp_path / "more", tmp_path / "whole"], tmp_path / "both")
    assert both["cleaning"] == [stated(cleaned / "many"), stated(cleaned / "few")]


@pytest.mark.parametrize("report", [None, "no JSON", "[]", '{"documents": {"read": 1}}'])
def test_text_without_a_report_of_cleaning_has_no_lineage(cleaned, vocab_dir, tmp_path, report):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "part-00000.jsonl.zst").write_bytes((cleaned / "few" / "part-00000.jsonl.zst").read_bytes())
    if report is not None:
        (tmp_path / "text" / "report.json").write_text(report)
    assert "cleaning" not in build(build_options(f"{tmp_path}/text/*.zst", vocab_dir, tmp_path / "out"))
    # A file that cleaning did not write is none of its text, though the report is next to it.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "report.json").write_bytes((cleaned / "few" / "report.json").read_bytes())
    (tmp_path / "other" / "notes.txt").write_text("One text. It is short.\n\nAnother one.")
    assert "cleaning" not in build(build_options(f"{tmp_path}/other/*.txt", vocab_dir, tmp_path / "notes"))
