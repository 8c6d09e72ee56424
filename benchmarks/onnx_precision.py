"""Compares the int8 and float32 ONNX programs of a model for vectors: size, vectors, and scores on STS-B.

    python -m benchmarks.onnx_precision --model FOLDER

FOLDER is a sentence-transformers folder. Both programs are exported to a temporary folder and run by onnxruntime on the
pairs of STS-B's dev part in BERT_JAX_DATA. The line gives, for each program, its size and Spearman's correlation of
cosines with the scores, and the cosines between the two vectors of a sentence. Needs the extra onnx.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

import bert_jax
from benchmarks import common
from bert_jax import command
from bert_jax.config import TaskConfig
from bert_jax.tasks import registry
from bert_jax.tasks.metric_functions import REGRESSION_METRICS

DTYPES = ("float32", "int8")
OUTPUT = "sentence_embedding"
ROWS = 32  # texts of a batch

Vectors = Float32[np.ndarray, "N W"]


def unit(vectors: Vectors) -> Vectors:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def compared(first: dict[str, Vectors], second: dict[str, Vectors], scores: Sequence[float]) -> dict[str, Any]:
    """Figures of the vectors of both texts of each pair, by dtype."""
    cosines = {name: np.sum(unit(first[name]) * unit(second[name]), axis=1) for name in DTYPES}
    both = {name: unit(np.concatenate([first[name], second[name]])) for name in DTYPES}
    same = np.sum(both["float32"] * both["int8"], axis=1)
    correlation = REGRESSION_METRICS["spearman"]
    return {
        "spearman": {name: round(correlation(np.asarray(scores), cosines[name]), 4) for name in DTYPES},
        "cosine_mean": round(float(same.mean()), 4),
        "cosine_least": round(float(same.min()), 4),
    }


def run(folder: Path, texts: Sequence[str]) -> Vectors:
    """The vectors of an exported program, for texts truncated as the folder's tokenizer does."""
    import onnxruntime  # of the extra
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding()
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    names = {given.name for given in session.get_inputs()}
    found = []
    for begin in range(0, len(texts), ROWS):
        rows = tokenizer.encode_batch(list(texts[begin : begin + ROWS]))
        fields = {
            "input_ids": [row.ids for row in rows],
            "attention_mask": [row.attention_mask for row in rows],
            "token_type_ids": [row.type_ids for row in rows],
        }
        inputs = {name: np.array(fields[name], np.int64) for name in names}
        found.append(session.run([OUTPUT], inputs)[0])
    return np.concatenate(found)


def measure(model: Path) -> dict[str, Any]:
    """Exports and runs both programs. Raises UserError as `export --format onnx` does."""
    task, files = registry.resolve(TaskConfig(name="stsb"))
    items = registry.read(task, files["dev"]).items
    loaded = bert_jax.load(model)
    megabytes, first, second = {}, {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        for dtype in DTYPES:
            folder = Path(temporary) / dtype
            loaded.save(folder, format="onnx", dtype=dtype)
            megabytes[dtype] = round(os.path.getsize(folder / "model.onnx") / 1e6, 1)
            first[dtype] = run(folder, [item.text for item in items])
            second[dtype] = run(folder, [item.text_pair for item in items])
    return {"megabytes": megabytes, **compared(first, second, [float(item.label) for item in items])}


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("python -m benchmarks.onnx_precision", __doc__ or "")
    parser.add_argument("--model", required=True, type=Path, help="a sentence-transformers folder")
    options = parser.parse_args(arguments)
    common.emit_results("onnx_precision", measure(options.model), {"model": options.model.name, "task": "stsb dev"})


if __name__ == "__main__":
    command.run(main)
