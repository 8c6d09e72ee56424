"""The sample is as its README describes it."""

import lzma
import re
from pathlib import Path

import pytest

import data_prep
from data_prep.readers.corpus import documents, expand

SAMPLE = Path(data_prep.__file__).parent / "sample"
README = (SAMPLE / "README.md").read_text(encoding="utf-8")


def table(first_cell: str) -> list[list[str]]:
    """The rows of the README's table whose header begins with the cell."""
    lines = README[README.index(f"| {first_cell} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]


def test_books_have_the_counts_of_the_readme():
    rows = table("file | author")
    assert {f"{row[0]}.txt.xz" for row in rows} == {path.name for path in (SAMPLE / "books").iterdir()}
    totals = [0, 0, 0, 0]
    for name, _, _, *stated in rows:
        path = SAMPLE / "books" / f"{name}.txt.xz"
        chapters = list(documents(path))
        text = lzma.decompress(path.read_bytes())
        counts = [
            len(chapters),
            sum(chapter.count("\n") + 1 for chapter in chapters),
            sum(len(chapter.split()) for chapter in chapters),
            len(text),
        ]
        assert counts == [int(number.replace(",", "")) for number in stated], name
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
    for total in totals:
        assert f"{total:,} " in README


def test_books_are_whole():
    first = {path.name: next(documents(path)) for path in expand(f"{SAMPLE}/books/*.txt.xz")}
    assert first["dickens_a_tale_of_two_cities.txt.xz"].startswith(
        "It was the best of times, it was the worst of times"
    )
    assert first["dickens_a_christmas_carol.txt.xz"].startswith("Marley was dead: to begin with.")
    *_, last = documents(SAMPLE / "books" / "dickens_a_tale_of_two_cities.txt.xz")
    assert last.endswith('than I have ever known."')


@pytest.mark.parametrize("part", ["train", "dev", "test"])
def test_treebank_parts_are_whole_documents_with_the_counts_of_the_readme(part):
    stated = next(row for row in table("file | documents") if row[0] == f"{part}.conllu.xz")
    sentences = lzma.decompress((SAMPLE / "ewt" / stated[0]).read_bytes()).decode().removesuffix("\n\n").split("\n\n")
    lines = [line for sentence in sentences for line in sentence.split("\n")]
    words = [line for line in lines if re.match(r"\d+\t", line)]
    found = [sum(line.startswith("# newdoc") for line in lines), len(sentences), len(words)]
    assert found == [int(number.replace(",", "")) for number in stated[1:4]]
    assert lines[0].startswith("# newdoc id = ")
    assert all(line.count("\t") == 9 for line in words)
    assert all("# sent_id = " in sentence and "# text = " in sentence for sentence in sentences)


def test_treebank_parts_share_no_document():
    seen: set[str] = set()
    for part in ("train", "dev", "test"):
        text = lzma.decompress((SAMPLE / "ewt" / f"{part}.conllu.xz").read_bytes()).decode()
        found = set(re.findall(r"^# newdoc id = (.+)$", text, re.MULTILINE))
        assert not seen & found
        seen |= found


def test_readme_gives_credit_and_licence():
    for needed in ("CC BY-SA 4.0", "Silveira", "public domain", "classic-books-markdown", "UD_English-EWT", "Changes"):
        assert needed in README
