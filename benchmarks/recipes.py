"""Runs the commands of docs/data.md on real text, and reports what each takes and writes, one JSON line each.

    python -m benchmarks.recipes                  all commands
    python -m benchmarks.recipes --only roberta   only commands whose output path contains this
    python -m benchmarks.recipes --markdown       the table of benchmarks/results/recipes.md instead of JSON

The text is wiki_en_0.txt.xz of BERT_JAX_DATA (48 MB), or --text; other languages come from its folder multilingual.
This takes about eight minutes on two cores. Run nothing else on the machine.
"""

import argparse
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import REPOSITORY, emit, shared_data
from benchmarks.data_prep_runs import hold_to_cores, load_average, watched
from bert_jax.data.shards import read_manifest
from bert_jax.tokenizer import load as load_tokenizer
from data_prep import readers

PAGE = REPOSITORY / "docs" / "data.md"
MB = 1e6
HEADER = """\
| command | seconds | CPU seconds | memory, MB | tokens, M | rows | MB on disk | bytes a token |
|---|---|---|---|---|---|---|---|"""


def commands() -> list[list[str]]:
    """The command lines of the page that train a vocabulary or build rows, as words after `bert-jax`."""
    text = PAGE.read_text(encoding="utf-8")
    lines = re.findall(r"^bert-jax ((?:train-tokenizer|build-examples) .+)$", text, re.M)
    return [shlex.split(line) for line in lines]


def on_real_text(words: list[str], text: Path, languages: Path) -> list[str]:
    """The command with existing files instead of the page's patterns."""

    def found(pattern: str) -> str:
        language = pattern.split("/")[1]
        return str(text if language in ("*", "en") else languages / f"{language}.txt.xz")

    place = words.index("--input") + 1
    return [*words[:place], ",".join(map(found, words[place].split(","))), *words[place + 1 :]]


def written(output: Path) -> dict[str, Any]:
    """The results of a command: the size of a vocabulary, or numbers from the manifest."""
    if not (output / "manifest.json").exists():
        return {"vocab_size": load_tokenizer(output).vocab_size}
    manifest = read_manifest(output)
    counts, size = manifest["counts"], sum(shard["bytes"] for shard in manifest["shards"])
    return {
        "tokens": counts["source_tokens"],
        "rows": counts["rows"],
        "filled_share": round(counts["tokens"] / (counts["rows"] * manifest["seq_len"]), 4),
        "output_mb": round(size / MB, 2),
        "bytes_a_token": round(size / counts["tokens"], 3),
    }


def measure(arguments: argparse.Namespace, folder: Path) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Each command in the order of the page, and its measurements. Later commands can use earlier outputs."""
    text_bytes = sum(len(document.encode()) + 2 for document in readers.documents(arguments.text))
    for words in commands():
        output = words[words.index("--output") + 1]
        if arguments.only in output:
            real = on_real_text(words, arguments.text, arguments.languages)
            seconds, found = watched([sys.executable, "-m", "bert_jax", *real], folder)
            yield (
                words,
                {
                    "text_mb": round(text_bytes / MB, 2),
                    "seconds": round(seconds, 2),
                    **found.as_dict(),
                    **written(folder / output),
                    "load_average": load_average(),
                },
            )


def row(words: list[str], details: Mapping[str, Any]) -> str:
    """One row of the table."""
    tokens = f"{details['tokens'] / 1e6:.2f}" if "tokens" in details else f"{details['vocab_size']:,} in all"
    rows = f"{details['rows']:,}" if "rows" in details else ""
    name = f"`{words[0]} ... --output {words[words.index('--output') + 1]}`"
    cells = (details["seconds"], details["cpu_seconds"], details["peak_mb"], tokens, rows)
    disk = (details.get("output_mb", ""), details.get("bytes_a_token", ""))
    return f"| {' | '.join(map(str, (name, *cells, *disk)))} |"


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.recipes", description=__doc__.splitlines()[0])
    data = shared_data()
    add = parser.add_argument
    add("--text", type=Path, default=data and data / "pretrain" / "wiki_en_0.txt.xz", help="a file of English text")
    add("--languages", type=Path, default=data and data / "multilingual", help="a folder of de.txt.xz and others")
    add("--only", default="", help="run only commands whose --output contains this")
    add("--workers", type=int, default=2, help="cores; default 2")
    add("--markdown", action="store_true", help="print the table of benchmarks/results/recipes.md; default: JSON")
    arguments = parser.parse_args()
    if not arguments.text or not arguments.languages:
        parser.exit(0, "skipped: no --text and --languages, and BERT_JAX_DATA is not set\n")
    arguments.text, arguments.languages = arguments.text.absolute(), arguments.languages.absolute()
    hold_to_cores(arguments.workers)
    folder = Path(tempfile.mkdtemp(prefix="bench_recipes_"))
    try:
        if arguments.markdown:
            print(HEADER)
        for words, details in measure(arguments, folder):
            if arguments.markdown:
                print(row(words, details), flush=True)
            else:
                settings = {"command": shlex.join(words)} | details
                emit(f"recipe {words[words.index('--output') + 1]}", details["seconds"], "s", None, None, settings)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
