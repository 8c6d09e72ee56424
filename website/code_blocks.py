"""The code blocks of a Markdown document, and the marks that say which of them the tests run.

A comment directly above a block is its mark. `<!-- run -->`: a slow test runs the block, after the earlier ones of the
document and in the same folder. `<!-- checked -->`: a test checks the flags and configuration keys of its commands, and
does not run them. `<!-- not run: REASON -->`: the same, with the reason. Every block with a command has a mark
(tests/test_readme.py).
"""

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass

_FENCE = re.compile(r"( *)(```+|~~~+) *([\w-]*)")
_MARK = re.compile(r"<!-- *(?:(run|checked)|not run: *(.+?)) *-->")
_PREFIX = r"(?:\$ |\w+=\S* |srun (?:-\S+ )*|exec |nice (?:-n \d+ )?)*"  # what may stand before a command on its line
COMMAND = re.compile(rf"\s*{_PREFIX}(?:\.venv/bin/)?(?:python -m (?:bert_jax|benchmarks)|bert-jax [a-z])")


@dataclass(frozen=True)
class CodeBlock:
    """A fenced block, or one that is indented by four spaces after an empty line.

    start, end   its lines in the document, from 0; end is the line after the block
    mark         "run", "checked", "not run", or "" without a mark
    reason       why it is not run
    """

    start: int
    end: int
    language: str
    code: str
    mark: str = ""
    reason: str = ""

    @property
    def has_command(self) -> bool:
        """Whether a line of it is a command of bert_jax."""
        return any(COMMAND.match(line) for line in self.code.splitlines())


def code_blocks(text: str) -> list[CodeBlock]:
    """Returns the blocks of a document in order."""
    lines = text.splitlines()
    return [_marked(lines, block) for block in _found(lines)]


def outside_of_code(text: str) -> list[tuple[int, str]]:
    """Returns the lines of a document that belong to no code block, with their numbers from 0."""
    inside = {line for block in code_blocks(text) for line in range(block.start, block.end)}
    return [(number, line) for number, line in enumerate(text.splitlines()) if number not in inside]


def _found(lines: list[str]) -> Iterator[CodeBlock]:
    number = 0
    in_list = False
    while number < len(lines):
        line = lines[number]
        end = number + 1
        if fence := _FENCE.match(line):
            indent, marker, language = len(fence[1]), fence[2], fence[3]
            while end < len(lines) and lines[end].strip() != marker:
                end += 1
            content = [one[indent:] if not one[:indent].strip() else one for one in lines[number + 1 : end]]
            end = min(end + 1, len(lines))
            yield CodeBlock(number, end, language, "\n".join(content) + "\n")
        elif line.startswith("    ") and line.strip() and not in_list and not (number and lines[number - 1].strip()):
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            while not lines[end - 1].strip():
                end -= 1
            yield CodeBlock(number, end, "", "\n".join(one[4:] for one in lines[number:end]) + "\n")
        elif line.strip() and not line.startswith(" "):
            in_list = re.match(r"([-*+]|\d+\.) ", line) is not None
        number = end


def _marked(lines: list[str], block: CodeBlock) -> CodeBlock:
    above = block.start - 1
    while above >= 0 and not lines[above].strip():
        above -= 1
    if above < 0 or not (found := _MARK.fullmatch(lines[above].strip())):
        return block
    return dataclasses.replace(block, mark=found[1] or "not run", reason=found[2] or "")
