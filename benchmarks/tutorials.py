"""Runs the tutorials with a given encoder, for the figures that they show.

    python -m benchmarks.tutorials --encoder FOLDER --output runs/tutorials [--only own_csv own_entities]

FOLDER is an export in Hugging Face layout: for the figures of the pages, that of the speedrun's model
(docs/speedrun.md), and for adapting that of the quickstart. The marked blocks of each document run in a
folder of their own, OUTPUT/NAME, in which `encoder` is FOLDER. distant_domain is the rest of adapting,
whose text is in BERT_JAX_DATA. The output has a JSON line for each name: of each block, by its first line in the
document, the CPU seconds and the JSON that it printed; the metrics in the result.json of each workdir; the tokens of
each folder of shards, and vocabulary and parameters of each checkpoint.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from bert_jax import command
from bert_jax.command import UserError
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.storage.local import read_json
from website.run_blocks import Ran, run_blocks

DOCUMENTS = ("own_csv", "own_entities", "sentence_embeddings", "adapting")
DISTANT = "distant_domain"
REASON = "its text is not distributed"  # the mark of its blocks in adapting.md


def printed_values(printed: str) -> list[dict[str, Any]]:
    """The objects among the lines that a block printed, each a line of JSON."""
    found = []
    for line in printed.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:  # a line of a text
                continue
    return found


def results_of(ran: Sequence[Ran], folder: Path) -> dict[str, Any]:
    """What the blocks of a document printed, and the metrics of the workdirs in its folder."""
    blocks = {
        str(one.line): {"cpu_seconds": round(one.cpu_seconds, 1), "printed": printed_values(one.printed)} for one in ran
    }
    results = {file.parent.name: read_json(file) for file in sorted(folder.glob("runs/*/result.json"))}
    shards = {file.parent.name: read_json(file) for file in sorted(folder.glob("*/manifest.json"))}
    models = {file.parent.name: open_checkpoint(file.parent) for file in sorted(folder.glob("*/config.json"))}
    return {
        "blocks": blocks,
        "metrics": {name: result.get("metrics", {}) for name, result in results.items()},
        "tokens": {name: manifest["counts"]["tokens"] for name, manifest in shards.items()},
        "models": {name: [model.vocabulary.vocab_size, parameters(model)] for name, model in models.items()},
    }


def parameters(model: LoadedModel) -> int:
    return sum(value.size for value in model.params.values())


def measure(name: str, encoder: Path, output: Path) -> dict[str, Any]:
    """Runs a document, prints its JSON line, and returns it.

    Raises UserError for an output that exists, an encoder that is no checkpoint, and a block that fails.
    """
    folder = output / name
    if folder.exists():
        raise UserError(f"{folder} exists. A tutorial begins in an empty folder: name another --output, or remove it")
    count = parameters(open_checkpoint(encoder))
    shutil.copytree(encoder, folder / "encoder")
    pages = common.REPOSITORY / "docs"
    if name == DISTANT:
        ran = run_blocks(pages / "adapting.md", folder, lambda block: block.reason == REASON)
    else:
        ran = run_blocks(pages / f"{name}.md", folder)
    settings = {"document": name, "encoder": encoder.name, "parameters": count}
    return common.emit_results("tutorial", results_of(ran, folder), settings)


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("python -m benchmarks.tutorials", __doc__ or "")
    parser.add_argument("--encoder", required=True, type=Path, help="an export in Hugging Face layout")
    parser.add_argument("--output", required=True, type=Path, help="the folder of the tutorials' folders")
    parser.add_argument(
        "--only", nargs="+", choices=(*DOCUMENTS, DISTANT), default=DOCUMENTS, help="default: all documents"
    )
    options = parser.parse_args(arguments)
    for name in options.only:
        measure(name, options.encoder.absolute(), options.output.absolute())


if __name__ == "__main__":
    command.run(main)
