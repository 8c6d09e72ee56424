"""Reads randomly damaged Hugging Face folders of every family.

    python tests/tools/fuzz_checkpoints.py --inputs 1000 [--seed 0]

Reading may raise nothing but a UserError of one line. Prints how many folders were read and refused, by kind of change.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import safetensors.numpy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "helpers"))
from families import FAMILIES
from random_checkpoints import random_checkpoint
from tokenizer_kinds import byte_pairs

from bert_jax.errors import UserError
from bert_jax.interop import huggingface, huggingface_export
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model.heads.config import Heads
from bert_jax.tokenization import tokenizer

MODELS = {
    "bert": Heads(mlm=True, next_sentence=True, pooler=True),
    "roberta": Heads(pooler=True, classes=3),
    "modernbert": Heads(mlm=True),
    "gpt": Heads(lm=True),
}
NUMBERS = [0, 1, -1, 2, 3, 1.5, True, False, float("nan"), float("inf"), 1e30, 10**18]
OTHERS = [None, "x", "", [], {}, [1], [None], [["a"]], {"0": 1}, {"a": {}}, "relu", "bert", "roberta"]
OTHERS += [["full_attention"] * 3, {"full_attention": {"rope_theta": "x"}}, {"sliding_attention": {"rope_theta": 0}}]
FURTHER_FIELDS = ["pruned_heads", "id2label", "bert_jax_task", "problem_type", "rope_scaling", "n_inner"]
DTYPES = [np.int32, np.float64, np.bool_, np.uint8]
SHAPES = [(), (0,), (1,), (0, 20), (3, 3, 3)]


def change_config(folder: Path, generator: random.Random) -> None:
    file = folder / "config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    for _ in range(generator.randint(1, 2)):
        name = generator.choice([*values, *FURTHER_FIELDS])
        values[name] = generator.choice(NUMBERS + OTHERS)
        if generator.random() < 0.1:
            del values[name]
    file.write_text(json.dumps(values))


def change_tensor(folder: Path, generator: random.Random) -> None:
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    name = generator.choice(sorted(tensors))
    match generator.randrange(5):
        case 0:
            del tensors[name]
        case 1:
            tensors[f"{name}x"] = tensors[name]
        case 2:
            tensors[name] = tensors[name].reshape(-1)
        case 3:
            tensors[name] = tensors[name].astype(generator.choice(DTYPES))
        case 4:
            tensors[name] = np.zeros(generator.choice(SHAPES), np.float32)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


def change_bytes(folder: Path, generator: random.Random) -> None:
    """Makes one to four changes to a file: replaces a byte, truncates it, removes or repeats bytes."""
    file = generator.choice(sorted(path for path in folder.iterdir() if path.suffix != ".md"))
    content = bytearray(file.read_bytes())
    for _ in range(generator.randint(1, 4)):
        position = generator.randrange(len(content) + 1)
        end = position + generator.choice((1, 2, 8, 100))
        match generator.randrange(4):
            case 0:
                content[position : position + 1] = bytes([generator.randrange(256)])
            case 1:
                del content[position:]
            case 2:
                del content[position:end]
            case 3:
                content[position:position] = content[position:end]
    file.write_bytes(bytes(content))


def model(name: str, folder: Path) -> LoadedModel:
    loaded = random_checkpoint(folder, FAMILIES[name], MODELS[name])
    if name != "roberta":
        return loaded
    words = tokenizer.load(byte_pairs(folder / "pairs", []))  # their padding id equals RoBERTa's
    return LoadedModel(loaded.model, loaded.heads, loaded.params, words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    generator = random.Random(options.seed)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in MODELS:
            huggingface_export.write(model(name, folder / f"{name}_words"), folder / name)
        for index in range(options.inputs):
            damaged = shutil.copytree(folder / generator.choice(sorted(MODELS)), folder / f"damaged_{index}")
            change = generator.choice((change_config, change_config, change_tensor, change_bytes))
            change(damaged, generator)
            try:
                huggingface.read(damaged)
                counts[f"{change.__name__}: read"] += 1
            except UserError as error:
                assert "\n" not in str(error).strip(), error
                counts[f"{change.__name__}: refused"] += 1
            shutil.rmtree(damaged)
    print(*(f"{what} {count}" for what, count in sorted(counts.items())), sep="\n")


if __name__ == "__main__":
    main()
