"""Compares exports with transformers, which tests/tools/peers.py runs in a separate environment."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model import layers
from bert_jax.model.bert import bind
from bert_jax.model.outputs import (
    answer_logits,
    class_logits,
    next_sentence_logits,
    pool_vectors,
    replaced_token_logits,
    sequence_vectors,
    tag_logits,
    vocabulary_logits,
)
from bert_jax.model.runtime import Runtime
from bert_jax.model.transformer import gather_positions
from bert_jax.tasks.rows import TaskBatch

SCRIPT = Path(__file__).parent.parent / "tools" / "peers.py"
TEXT = "The cat sat on a mat, unwantable dogs."


def our_outputs(loaded: LoadedModel, length: int = 24) -> dict[str, np.ndarray]:
    """Returns the outputs for three random rows of different lengths, by the names of tests/tools/peers.py.

    For a multiple-choice model the rows are the choices of one question.
    """
    generator = np.random.default_rng(1)
    position = np.arange(length, dtype=np.int32)
    mask = (position < np.array([length, 5, 13])[:, None]).astype(np.int32)
    ids = generator.integers(5, loaded.model.vocab_size, mask.shape)
    ids = np.where(mask == 1, ids, loaded.vocabulary.pad_id).astype(np.int32)
    segments = (position >= 4).astype(np.int32) * mask
    none = np.zeros(3, np.float32)
    batch = TaskBatch(ids, segments, mask, position * mask, none, none)
    heads, vocab_size = loaded.heads, loaded.model.vocab_size

    @jax.jit
    def run(params, batch):
        model = bind(loaded.model, heads, params, Runtime(layer_loop="scan"))
        encoded = model.encode(batch, all_layers=True)
        outputs = {"hidden_0": encoded.embeddings}
        outputs |= {f"hidden_{depth + 1}": encoded.layers[depth] for depth in range(loaded.model.layers)}
        first = jnp.zeros((3, 1), jnp.int32)
        if heads.mlm or heads.lm:
            outputs["vocabulary_logits"] = vocabulary_logits(model, encoded.last)[..., :vocab_size]
        if heads.replaced_tokens:
            outputs["replaced_token_logits"] = replaced_token_logits(model, encoded.last)
        if heads.tags:
            outputs["tag_logits"] = tag_logits(model, encoded.last)
        if heads.question:
            answers = answer_logits(model, encoded.last)
            outputs |= {"start_logits": answers[..., 0], "end_logits": answers[..., 1]}
        if heads.next_sentence or (heads.pooler and loaded.model.pooler == "tanh"):
            pooled = pool_vectors(model, gather_positions(encoded.last, first))
            outputs["pooled"] = pooled[:, 0]
            if heads.next_sentence:
                outputs["next_sentence_logits"] = next_sentence_logits(model, pooled)[:, 0]
        if heads.classes or heads.choices:
            vectors = sequence_vectors(model, encoded.last, batch.sequence_ids, first)
            name = "class_logits" if heads.classes else "choice_logits"
            outputs[name] = class_logits(model, vectors)[:, 0]
        return outputs

    inputs = {"input_ids": ids, "attention_mask": mask} | (
        {"segment_ids": segments} if loaded.model.segment_types > 1 else {}
    )
    outputs = jax.device_get(run(layers.unflatten(loaded.params), batch))
    return outputs | {name: value.astype(np.int64) for name, value in inputs.items()}


def assert_transformers_agrees(
    peer_python: str, exports: Sequence[tuple[Path, LoadedModel]], tolerance: float
) -> list[dict]:
    """Asserts that transformers loads each folder completely with equal outputs and ids; returns its reports."""
    arguments: list[str] = []
    for index, (folder, loaded) in enumerate(exports):
        outputs = folder.parent / f"{folder.name}-{index}.npz"
        np.savez(outputs, text=np.array(TEXT), **our_outputs(loaded))
        arguments += [str(folder), str(outputs)]
    done = subprocess.run([peer_python, str(SCRIPT), "export", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for (_, loaded), said in zip(exports, lines, strict=True):
        assert (said["missing"], said["unexpected"], said["mismatched"]) == ([], [], []), said
        heads = loaded.heads
        more = bool(heads.pooler or heads.mlm or heads.lm or heads.tags or heads.question)
        assert len(said["differences"]) >= loaded.model.layers + 1 + more, said
        assert max(said["differences"].values()) < tolerance, said
        words = loaded.vocabulary
        assert said["tokens"] == [words.cls_id, *words.encode(TEXT).tolist(), words.sep_id]
    return lines
