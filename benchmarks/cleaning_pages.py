"""Web-like pages for benchmarks.cleaning: pieces of real documents with the faults that the cleaning rules look for.

Each page has one fault, in a strength between none and all of its lines, so that pages lie on both sides of each limit.
"""

import random
from collections.abc import Callable, Iterator, Sequence

from data_prep.sentences import document_sentences

_LINES = 4, 40
_MENU = ("Home", "News", "About us", "Contact", "Sign in", "Next page", "Share this", "Tags", "Archive", "Shop")
_NOTICES = ("This site uses cookies.", "Please enable Javascript to read this.", "Read our privacy policy first.")
_SOME_LOREM = "Lorem ipsum dolor sit amet, consectetur adipiscing elit."

Fault = Callable[[list[str], float, random.Random], list[str]]


def pages(documents: Sequence[str], count: int, seed: int) -> Iterator[str]:
    """Yields pages: every fault in turn, on some consecutive sentences of a document, one a line."""
    draw = random.Random(seed)
    sentences = [lines for lines in map(document_sentences, documents) if len(lines) >= _LINES[0]]
    for number in range(count):
        lines = draw.choice(sentences)
        start = draw.randrange(len(lines) - _LINES[0] + 1)
        chosen = lines[start : start + draw.randint(*_LINES)]
        fault = FAULTS[number % len(FAULTS)]
        yield "\n".join(fault(chosen, draw.random(), draw))


def _of_some_lines(change: Callable[[str, random.Random], str]) -> Fault:
    """The fault that changes each line with the probability `strength`."""

    def fault(lines: list[str], strength: float, draw: random.Random) -> list[str]:
        return [change(line, draw) if draw.random() < strength else line for line in lines]

    return fault


def _in_one_place(extra: Callable[[random.Random], str]) -> Fault:
    """The fault that adds a line to half of the pages."""

    def fault(lines: list[str], strength: float, draw: random.Random) -> list[str]:
        place = draw.randrange(len(lines) + 1)
        return [*lines[:place], *([extra(draw)] if strength < 0.5 else []), *lines[place:]]

    return fault


def _menu(lines: list[str], strength: float, draw: random.Random) -> list[str]:
    entries = [f"{draw.choice(_MENU)} {draw.randrange(100)}" for _ in range(int(4 * strength * len(lines)))]
    return [*entries, *lines]


def _same_menu(lines: list[str], strength: float, draw: random.Random) -> list[str]:
    return [part for line in lines for part in ([line, *_MENU[:3]] if draw.random() < strength else [line])]


def _repeated_lines(lines: list[str], strength: float, draw: random.Random) -> list[str]:
    return lines + [draw.choice(lines) for _ in range(int(strength * len(lines)))]


def _repeated_paragraphs(lines: list[str], strength: float, draw: random.Random) -> list[str]:
    whole = [" ".join(lines[start : start + 2]) for start in range(0, len(lines), 2)]
    return "\n\n".join(_repeated_lines(whole, strength, draw)).split("\n")


def _repeated_phrase(lines: list[str], strength: float, draw: random.Random) -> list[str]:
    words = draw.choice(lines).split()[: draw.randint(1, 12)]
    phrase = " ".join(words)
    return [f"{line} {phrase}" if draw.random() < strength else line for line in lines]


def _paragraphs(lines: list[str], strength: float, draw: random.Random) -> list[str]:
    ends = ("\n\n" if draw.random() < strength else " " for _ in lines)
    return "".join(line + end for line, end in zip(lines, ends, strict=True)).strip().split("\n")


def _narrow(lines: list[str], strength: float, draw: random.Random) -> list[str]:
    """Lines of a fixed number of words, as in a page of plain text."""
    words, width = " ".join(lines).split(), 2 + int(14 * strength)
    return [" ".join(words[start : start + width]) for start in range(0, len(words), width)]


def _shorter(lines: list[str], strength: float, draw: random.Random) -> list[str]:
    return lines[: 1 + int(8 * strength)]


def _one_line(lines: list[str], strength: float, draw: random.Random) -> list[str]:
    return [" ".join(lines[: 2 + int(8 * strength)])]


def _words_of_other_lengths(lines: list[str], strength: float, draw: random.Random) -> list[str]:
    """Joins words to long ones, or cuts them to their first letters."""
    words = " ".join(lines).split()
    if draw.random() < 0.5:
        return [" ".join(word if draw.random() > strength else word[: draw.randint(1, 2)] for word in words)]
    return ["".join(word + (" " if draw.random() > strength else "") for word in words)]


def _rare_words(lines: list[str], strength: float, draw: random.Random) -> list[str]:
    """Leaves few of the commonest English words."""
    common = {"the", "be", "to", "of", "and", "that", "have", "with"}
    return [
        " ".join(w for w in line.split() if w.lower() not in common or draw.random() < strength / 10) for line in lines
    ]


def _rule_lines(lines: list[str], strength: float, draw: random.Random) -> list[str]:
    """Separators and dashes between words and lines."""
    spaced = [line.replace(" ", " -- ") if draw.random() < strength else line for line in lines]
    return [part for line in spaced for part in ([line, "* * *"] if draw.random() < strength else [line])]


FAULTS: tuple[Fault, ...] = (
    lambda lines, strength, draw: lines,
    _menu,
    _same_menu,
    _repeated_lines,
    _repeated_paragraphs,
    _repeated_phrase,
    _paragraphs,
    _narrow,
    _shorter,
    _one_line,
    _words_of_other_lengths,
    _rare_words,
    _rule_lines,
    _of_some_lines(lambda line, draw: line.rstrip(".!?\"'”’")),
    _of_some_lines(lambda line, draw: line.rstrip(".!?") + draw.choice(("...", "…"))),
    _of_some_lines(lambda line, draw: f"{draw.choice('•-*')} {line}"),
    _of_some_lines(lambda line, draw: " ".join(f"#{word}" if draw.random() < 0.3 else word for word in line.split())),
    _of_some_lines(lambda line, draw: " ".join(str(draw.randrange(10**4)) for _ in range(10)) + "."),
    _of_some_lines(lambda line, draw: f"{line.rstrip('.')}[{draw.randrange(30)}]."),
    _of_some_lines(lambda line, draw: draw.choice(_NOTICES)),
    _in_one_place(lambda draw: _SOME_LOREM),
    _in_one_place(lambda draw: "function call(a) { return a + 1; } is an example."),
    _in_one_place(lambda draw: "By our terms of use, {name} is not a name."),
    _in_one_place(lambda draw: "x" * draw.randint(900, 1100) + " is a long word."),
)
