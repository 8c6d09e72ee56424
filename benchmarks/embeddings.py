"""Compares sentence embeddings with sentence-transformers: texts per second, training speed, and scores on STS-B.

    python -m benchmarks.embeddings --model FOLDER --peer_python PYTHON                  texts embedded per second
    python -m benchmarks.embeddings --part train --model FOLDER --peer_python PYTHON     pairs trained per second
    python -m benchmarks.embeddings --part parity --model FOLDER --peer_python PYTHON    Spearman on dev over seeds
    python -m benchmarks.embeddings --part int8 --model FOLDER                           int8 and float32 ONNX programs

FOLDER is a folder of sentence-transformers, such as all-MiniLM-L6-v2 (benchmarks/finetune.py says where to get it), and
PYTHON has torch and sentence-transformers. The pairs are those of STS-B in BERT_JAX_DATA. Both programs train with
CoSENT, learning rate 2e-5, batches of 32, warmup over a tenth of the steps, weight decay 0.01, clipping at 1, the
folder's pooling, at most 128 tokens, and the model's dropout.

embed   chunks of texts, which both programs sort by length within a chunk, in batches of 32, in turns
train   whole training steps including batches, but not tokenization, in turns. The peer pads random batches to the
        longest text. bert_jax groups rows by length (length_pool); with --length_pool=1 it takes random batches, too.
        Both programs keep freed memory.
parity  both programs train `--seeds` times. The line gives the difference of the means of Spearman on dev, and twice
        its standard error, which the difference should not exceed.
int8    exports the model as an int8 and as a float32 ONNX program (the peer), and runs both by onnxruntime on the pairs
        of dev. The line has Spearman's correlation, the sizes, and the cosines between the two vectors of a sentence.
"""

import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32

import bert_jax
from benchmarks import common
from benchmarks.finetune import compared, our_turn
from benchmarks.turns import Turn, alternate, leave_gpu_memory, peer_answers, peer_turn
from bert_jax import command_line
from bert_jax.config import AdamW, EmbeddingConfig, FinetuneConfig, LinearSchedule
from bert_jax.errors import UserError
from bert_jax.host import keep_freed_memory
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.tasks import finetuning, registry, trials
from bert_jax.tasks.embedder import Embedder, EncodeOptions, vector_settings
from bert_jax.tasks.metrics import REGRESSION_METRICS
from bert_jax.train.compilation import enable_compilation_cache
from bert_jax.train.run import make_runtime

CHUNK = 512  # texts of a step of the part embed
DTYPES = ("float32", "int8")  # of the ONNX programs

Vectors = Float32[np.ndarray, "N W"]


def config_of(flags: Any, data: Path) -> FinetuneConfig:
    """The configuration of both programs."""
    folder = registry.find_folder("stsb", data)
    train, dev = (str(registry.find_split("stsb", folder, split)) for split in ("train", "dev"))
    return FinetuneConfig(
        task=EmbeddingConfig(train=train, dev=dev, text="sentence1", text_pair="sentence2", label="score"),
        optimizer=AdamW(learning_rate=2e-5, schedule=LinearSchedule(warmup_steps=0, warmup_share=0.1), epsilon=1e-8),
        init_from=str(flags.model),
        seeds=tuple(range(flags.seeds)),
        epochs=flags.epochs,
        length_pool=flags.length_pool,
    )


def pairs_of(config: FinetuneConfig) -> dict[str, list[tuple[str, str, float]]]:
    """The rows of both programs, by split."""
    task, files = registry.resolve(config.task)
    found = {split: registry.read(task, files[split]).items for split in ("train", "dev")}
    return {split: [(*item.texts, item.score) for item in items] for split, items in found.items()}


def embed_turn(config: FinetuneConfig) -> Turn:
    """A step embeds the next chunk of the texts of dev."""
    loaded = open_checkpoint(config.init_from)
    settings = vector_settings(loaded, EncodeOptions(max_length=config.task.max_length))
    model = Embedder(loaded, settings, batch_size=config.batch_size)
    rows = pairs_of(config)["dev"]
    texts = [(text,) for text, *_ in rows] + [(text,) for _, text, _ in rows]
    chunks = [texts[start : start + CHUNK] for start in range(0, len(texts) - CHUNK + 1, CHUNK)]
    for chunk in chunks:
        model.vectors(chunk)  # compiles each length
    done = 0

    def run(count: int) -> list[float]:
        nonlocal done
        seconds = []
        for number in range(done, done + count):
            start = time.perf_counter()
            model.vectors(chunks[number % len(chunks)])
            seconds.append(time.perf_counter() - start)
        done += count
        return seconds

    return run


def measure_speed(flags: Any, config: FinetuneConfig) -> None:
    """Prints the rate of both programs."""
    embeds = flags.part == "embed"
    turns = [embed_turn(config) if embeds else our_turn(config)[0]]
    versions: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        if flags.peer_python:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            line = peer_line(flags, config, flags.part, folder)
            turn, versions = stack.enter_context(peer_turn(line, flags.keep_memory))
            turns.append(turn)
        seconds = alternate(turns, flags.rounds, flags.steps, flags.warmup)
    size = CHUNK if embeds else config.batch_size
    medians = [
        statistics.median(
            flags.steps * size / sum(found[start : start + flags.steps]) for start in range(0, len(found), flags.steps)
        )
        for found in seconds
    ]
    common.emit(
        f"sentence embeddings, {flags.part}, {jax.devices()[0].device_kind}",
        medians[0],
        "texts/s" if embeds else "pairs/s",
        peer=peer_name("float32" if embeds else make_runtime(config).compute_dtype) if flags.peer_python else None,
        peer_value=medians[1] if flags.peer_python else None,
        settings={
            "model": flags.model.name,
            "batch_size": config.batch_size,
            "length_pool": config.length_pool,
            "keep_memory": flags.keep_memory,
        },
        peer_versions={name: str(value) for name, value in versions.items()},
    )


def measure_parity(flags: Any, config: FinetuneConfig) -> None:
    """Prints the means of Spearman over seeds, their difference, and twice its standard error."""
    enable_compilation_cache()  # so that the program is compiled once for all seeds
    versions: dict[str, str] = {}
    peers: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        values = finetuning.finetune(config, Path(folder) / "run")["metrics"]["spearman"]["values"]
        if flags.peer_python:
            line = peer_line(
                flags, config, ",".join(str(trial.seed) for trial in trials.list_trials(config)), Path(folder)
            )
            versions, scores = peer_answers(line)
            peers = [one["spearman"] for one in scores]
    common.emit(
        f"dev spearman of STS-B over {len(values)} seeds, CoSENT",
        statistics.mean(values),
        "spearman",
        peer=peer_name(make_runtime(config).compute_dtype) if peers else None,
        peer_value=statistics.mean(peers) if peers else None,
        settings={"epochs": config.epochs, **compared(values, peers)},
        peer_versions=versions,
    )


def measure_int8(flags: Any, config: FinetuneConfig) -> None:
    """Prints Spearman of the two ONNX programs, their sizes and how close their vectors are."""
    rows = pairs_of(config)["dev"]
    sides = [text for text, _, _ in rows], [text for _, text, _ in rows]
    loaded = bert_jax.load(flags.model)
    megabytes: dict[str, float] = {}
    vectors: dict[str, tuple[Vectors, Vectors]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for dtype in DTYPES:
            folder = Path(temporary) / dtype
            loaded.save(folder, format="onnx", dtype=dtype)
            [program] = (folder / "onnx").glob("*.onnx")
            megabytes[dtype] = round(os.path.getsize(program) / 1e6, 1)
            first, second = (onnx_vectors(program, texts, config.batch_size) for texts in sides)
            vectors[dtype] = first, second
    found = compared_programs(vectors, [score for *_, score in rows])
    common.emit(
        "spearman of STS-B's dev, int8 ONNX program",
        found["spearman"]["int8"],
        "spearman",
        peer="float32 ONNX program",
        peer_value=found["spearman"]["float32"],
        settings={"model": flags.model.name, "megabytes": megabytes, **found},
    )


def compared_programs(vectors: Mapping[str, tuple[Vectors, Vectors]], scores: Sequence[float]) -> dict[str, Any]:
    """Compares the vectors of two dtypes for pairs of texts."""
    units = {name: [one / np.linalg.norm(one, axis=1, keepdims=True) for one in both] for name, both in vectors.items()}
    cosines = {name: np.sum(first * second, axis=1) for name, (first, second) in units.items()}
    same = np.concatenate([np.sum(units["float32"][side] * units["int8"][side], axis=1) for side in (0, 1)])
    return {
        "spearman": {
            name: round(REGRESSION_METRICS["spearman"](np.asarray(scores), cosines[name]), 4) for name in DTYPES
        },
        "cosine_mean": round(float(same.mean()), 4),
        "cosine_least": round(float(same.min()), 4),
    }


def onnx_vectors(program: Path, texts: Sequence[str], batch_size: int) -> Vectors:
    """The vectors of a folder's exported program, for texts truncated as the folder's tokenizer does."""
    import onnxruntime  # of the extra onnx
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(program.parent.parent / "tokenizer.json"))
    tokenizer.enable_padding()
    session = onnxruntime.InferenceSession(program, providers=["CPUExecutionProvider"])
    names = {given.name for given in session.get_inputs()}
    found = []
    for begin in range(0, len(texts), batch_size):
        rows = tokenizer.encode_batch(list(texts[begin : begin + batch_size]))
        fields = {
            "input_ids": [row.ids for row in rows],
            "attention_mask": [row.attention_mask for row in rows],
            "token_type_ids": [row.type_ids for row in rows],
        }
        inputs = {name: np.array(fields[name], np.int64) for name in names}
        found.append(session.run(["sentence_embedding"], inputs)[0])
    return np.concatenate(found)


def peer_name(compute_dtype: str) -> str:
    return f"sentence-transformers, torch, {compute_dtype}"


def peer_line(flags: Any, config: FinetuneConfig, work: str, folder: Path) -> list[str]:
    """The command that starts the peer, with the pairs in a file of the folder. work: embed, train, or seeds."""
    file = folder / "pairs.json"
    file.write_text(json.dumps(pairs_of(config)), encoding="utf-8")
    values = {
        "model": flags.model,
        "rows": file,
        "work": work,
        "compute_dtype": make_runtime(config).compute_dtype,
        "epochs": config.epochs,
        "batch_size": config.batch_size,
        "max_length": config.task.max_length,
        "chunk": CHUNK,
    }
    script = Path(__file__).with_name("embeddings_peer.py")
    return [str(flags.peer_python), str(script), *(f"--{name}={value}" for name, value in values.items())]


def main(arguments: Sequence[str]) -> None:
    parser = command_line.Parser("python -m benchmarks.embeddings", __doc__ or "")
    add = parser.add_argument
    add(
        "--part", choices=("embed", "train", "parity", "int8"), default="embed", help="what to measure (default: embed)"
    )
    add("--model", type=Path, required=True, metavar="FOLDER", help="a folder of sentence-transformers")
    add("--peer_python", type=Path, help="a Python with sentence-transformers; without it the peer is omitted")
    add("--seeds", type=int, default=3, help="parity: runs of each program (default: 3)")
    add("--epochs", type=float, default=1.0, help="parity: epochs (default: 1)")
    add("--length_pool", type=int, default=32, help="steps within which rows are grouped by length (default: 32)")
    add("--rounds", type=int, default=4, help="speed: turns of each program (default: 4)")
    add("--steps", type=int, default=8, help="speed: steps per turn (default: 8)")
    add("--warmup", type=int, default=5, help="speed: warmup steps of each program (default: 5)")
    flags = parser.parse_args(arguments)
    data = common.shared_data()
    if data is None:
        raise UserError("BERT_JAX_DATA is not set; it names the folder that holds glue/STS-B")
    flags.keep_memory = keep_freed_memory()
    leave_gpu_memory()
    measures = {"parity": measure_parity, "int8": measure_int8}
    measures.get(flags.part, measure_speed)(flags, config_of(flags, data))


if __name__ == "__main__":
    command_line.run(main)
