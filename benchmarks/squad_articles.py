"""Splits SQuAD's dev file by article into a training and an evaluation part, where the training file is missing.

    python -m benchmarks.squad_articles --input $BERT_JAX_DATA/squad/dev-v1.1.json.xz --output runs/squad_articles

Writes train.json and dev.json in the format of the input. An article belongs to dev if the SHA-256 of its title (UTF-8,
read as a number) is divisible by 5: of SQuAD 1.1, 13 of 48 articles with 2,494 of 10,570 questions. No text is in both.
Scores on this dev part, after training on 35 articles instead of 442, say nothing about the official dev set.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_jax import command
from bert_jax.storage.local import write_json
from bert_jax.tasks.reading import numbered_lines

ONE_OF = 5
PARTS = ("train", "dev")


def part_of(title: str) -> str:
    """The part to which the article with this title belongs."""
    return PARTS[int(hashlib.sha256(title.encode()).hexdigest(), 16) % ONE_OF == 0]


def split(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The content of SQuAD's JSON of each part, with the articles in order. Raises UserError for an empty one."""
    found = {
        part: dict(content) | {"data": [article for article in content["data"] if part_of(article["title"]) == part]}
        for part in PARTS
    }
    for part, one in found.items():
        if not one["data"]:
            raise command.UserError(f"{part} would have no article of {len(content['data'])}. Split a larger file")
    return found


def write(source: Path, output: Path) -> None:
    """Writes the parts, OUTPUT/train.json and OUTPUT/dev.json."""
    content = json.loads("\n".join(line for _, line in numbered_lines(source)))
    output.mkdir(parents=True, exist_ok=True)
    for part, one in split(content).items():
        write_json(output / f"{part}.json", one)


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("python -m benchmarks.squad_articles", __doc__ or "")
    parser.add_argument("--input", type=Path, required=True, help="SQuAD's dev file; .xz, .gz and .zst are read too")
    parser.add_argument("--output", type=Path, required=True, help="the folder for train.json and dev.json")
    flags = parser.parse_args(arguments)
    write(flags.input, flags.output)


if __name__ == "__main__":
    command.run(main)
