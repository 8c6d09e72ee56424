"""Measures the peak memory of `bert-jax embed` at growing numbers of short texts, and what ten million would need.

    python -m benchmarks.embed_memory --model FOLDER

FOLDER is any checkpoint. Only its first `--layers` layers are used: memory depends on the width of the vectors, not on
how long a text takes. The texts are the sentences of STS-B in BERT_JAX_DATA, each time with another number at the end.
The command writes shards in float32. The line gives the peak of the largest count; `ten_million_gb` adds the slope
between the smallest count and the largest. Give counts above 65,536, because memory grows until a shard is full.
"""

import dataclasses
import itertools
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import common
from benchmarks.data_prep_runs import watched
from bert_jax import command
from bert_jax.command import UserError
from bert_jax.config import TaskConfig
from bert_jax.export import export_loaded
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.tasks import registry

GB = 1e9
AT = 10_000_000  # texts of which the memory is extrapolated
LAYERS = "encoder/layers/"  # the beginning of the paths of stacked layers


def first_layers(loaded: LoadedModel, count: int) -> LoadedModel:
    """The model with its first layers only. Raises UserError for a model whose layers are not stacked."""
    stacked = [path for path in loaded.params if path.startswith(LAYERS)]
    if not stacked:
        raise UserError(f"{loaded.origin}: its layers differ from one another; name a model of equal layers")
    params = {path: value[:count] if path in stacked else value for path, value in loaded.params.items()}
    layers = min(count, loaded.model.layers)
    return dataclasses.replace(loaded, model=dataclasses.replace(loaded.model, layers=layers), params=params)


def sentences() -> list[str]:
    """The sentences of the training part of STS-B, each on one line."""
    task, files = registry.resolve(TaskConfig(name="stsb"))
    pairs = [(item.text, item.text_pair) for item in registry.read(task, files["train"]).items]
    return [" ".join(text.split()) for pair in pairs for text in pair]


def measure(model: Path, texts: Sequence[str], count: int, folder: Path) -> dict[str, float]:
    """Embeds `count` texts that all differ with the command, and returns its seconds and its peak of memory."""
    file, output = folder / f"{count}.txt", folder / f"{count}"
    with file.open("w", encoding="utf-8") as written:
        for number, text in enumerate(itertools.islice(itertools.cycle(texts), count)):
            written.write(f"{text} {number}\n")
    line = [sys.executable, "-m", "bert_jax", "embed", f"--checkpoint={model}", f"--input={file}", f"--output={output}"]
    seconds, used = watched([*line, "--format=npy"], folder)
    shutil.rmtree(output)
    return {"texts": count, "seconds": round(seconds, 1), "peak_gb": round(used.peak_bytes / GB, 3)}


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("python -m benchmarks.embed_memory", __doc__ or "")
    add = parser.add_argument
    add("--model", required=True, metavar="FOLDER", help="any checkpoint of equal layers, such as all-MiniLM-L6-v2")
    add("--layers", type=int, default=1, help="layers of it to keep (default: 1)")
    add("--texts", type=int, nargs="+", default=[100_000, 1_000_000], help="counts (default: 100000 1000000)")
    flags = parser.parse_args(arguments)
    if common.shared_data() is None:
        raise UserError("BERT_JAX_DATA is not set; it names the folder that holds glue/STS-B")
    texts = sentences()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = first_layers(open_checkpoint(flags.model), flags.layers)
        export_loaded(model, folder / "model")
        found = [measure(folder / "model", texts, count, folder) for count in sorted(flags.texts)]
    first, last = found[0], found[-1]
    slope = (last["peak_gb"] - first["peak_gb"]) / (last["texts"] - first["texts"]) if last != first else 0.0
    common.emit(
        f"peak memory of embed, {last['texts']:,} short texts",
        last["peak_gb"],
        "GB",
        peer=None,
        peer_value=None,
        settings={
            "model": Path(flags.model).name,
            "layers": model.model.layers,
            "width": model.model.width,
            "runs": found,
            "ten_million_gb": round(last["peak_gb"] + max(slope, 0.0) * (AT - last["texts"]), 3),
        },
    )


if __name__ == "__main__":
    command.run(main)
