"""Text for measuring data preparation: whole documents of real files, in the same mixture at any size in MB."""

import bz2
import itertools
import string
import xml.sax.saxutils
from collections.abc import Iterator
from pathlib import Path

from data_prep import readers
from data_prep.sentences import document_sentences

ARTICLES = 100  # in a stream of a dump, as in those of Wikipedia
_PERTURBED = 8  # one of so many words changes from pass to pass


def write_mixture(paths: list[Path], megabytes: float, target: Path) -> int:
    """Writes documents of the files, each followed by a blank line, up to a size in MB, and returns the bytes.

    Files take turns so that each contributes in proportion to its size; a short text then resembles a long one. A file
    that has no more documents starts again, with other words in every line, so that neither a cache of words nor a
    comparison of documents finds what it has seen.
    """
    sizes = [path.stat().st_size for path in paths]
    streams = [_endless(path) for path in paths]
    given = [0] * len(paths)
    with target.open("wb") as file:
        while sum(given) < megabytes * 1e6:
            turn = min(range(len(paths)), key=lambda number: given[number] / sizes[number])
            given[turn] += file.write(next(streams[turn]).encode() + b"\n\n")
    return sum(given)


def write_sentences(text: Path, target: Path) -> int:
    """Writes the documents with one sentence per line, as google-research/bert needs; returns the sentence count."""
    sentences = 0
    with target.open("w", encoding="utf-8") as file:
        for document in readers.documents(text):
            lines = document_sentences(document)
            sentences += len(lines)
            file.write("\n".join(lines) + "\n\n")
    return sentences


def write_dump(paths: list[Path], megabytes: float, target: Path) -> int:
    """Writes articles of a wiki, as a multistream dump, whose markup has a size in MB; returns its bytes.

    Each article is a document of the files. Every eighth word is a link, every fortieth is followed by a template in a
    reference, and the article begins with a template of ten parameters, as those of Wikipedia do.
    """
    written, number = 0, 0
    streams = [_endless(path) for path in paths]
    with target.open("wb") as file:
        file.write(bz2.compress(b'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11">\n'))
        while written < megabytes * 1e6:
            articles = [_article(next(streams[(number + one) % len(streams)])) for one in range(ARTICLES)]
            pages = (
                f"  <page><title>Article {number + one}</title><ns>0</ns><revision><model>wikitext</model>"
                f"<text>{xml.sax.saxutils.escape(article)}</text></revision></page>\n"
                for one, article in enumerate(articles)
            )
            file.write(bz2.compress("".join(pages).encode()))
            written += sum(len(article.encode()) for article in articles)
            number += ARTICLES
        file.write(bz2.compress(b"</mediawiki>\n"))
    return written


def _article(text: str) -> str:
    parameters = "".join(f"| name{number} = [[value {number}]]\n" for number in range(10))
    lines = []
    for line in text.split("\n"):
        words = line.split(" ")
        words[3::8] = [f"[[{word} (disambiguation)|{word}]]" for word in words[3::8]]
        words[20::40] = [f"{word}<ref>{{{{cite book |title=''{word}'' |year=1920}}}}</ref>" for word in words[20::40]]
        lines.append(" ".join(words))
    return f"{{{{Infobox\n{parameters}}}}}\n" + "\n\n".join(lines)


def _endless(path: Path) -> Iterator[str]:
    """The documents of a file, again and again, from the second pass on with changed words."""
    for number in itertools.count():
        for document in readers.documents(path):
            yield "\n".join(_perturbed(line, number) for line in document.split("\n")) if number else document


def _perturbed(line: str, number: int) -> str:
    """A line in which every eighth word, from one that the pass chooses, has letters of the pass in its middle.

    Five of eight runs of five words are then new, so the passes are no near-duplicates of each other.
    """
    words = line.split(" ")
    letters = string.ascii_lowercase[number % 26] * (1 + number // 26)
    for place in range(number % min(_PERTURBED, len(words)), len(words), _PERTURBED):
        middle = len(words[place]) // 2
        words[place] = f"{words[place][:middle]}{letters}{words[place][middle:]}"
    return " ".join(words)
