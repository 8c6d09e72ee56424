"""predict and transformers give the same labels, scores, tags, answers and choices for exports of every kind."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from random_checkpoints import odd_config, random_checkpoint

from bert_jax.errors import UserError
from bert_jax.interop import huggingface, huggingface_export
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model.heads.config import Heads, SpanHeads
from bert_jax.tasks.prediction import predict

SCRIPT = Path(__file__).parent.parent / "tools" / "peers.py"
SENTENCES = ["the cat sat on a mat .", "un unwantable dog", "river.river a"]
PAIRS = [("the cat sat", "a dog sat on the mat"), ("river", "."), ("a", "the dog dogs")]
HEADS = {
    "texts": (Heads(pooler=True, classes=3), "classification", ["glad", "sad", "so so"]),
    "pairs": (Heads(pooler=True, classes=2), "classification", ["no", "yes"]),
    "scores": (Heads(pooler=True, classes=1), "regression", []),
    "tags": (Heads(tags=5), "tagging", ["O", "B-X", "I-X", "B-Y", "I-Y"]),
    "numbers": (Heads(tags=1), "token_regression", []),
    "questions": (Heads(question=True), "question", []),
    "choices": (Heads(pooler=True, choices=True), "choice", []),
}
INPUTS: dict[str, list[dict[str, Any]]] = {
    "texts": [{"text": text} for text in SENTENCES],
    "pairs": [{"text": first, "text_pair": second} for first, second in PAIRS],
    "scores": [{"text": text} for text in SENTENCES],
    "tags": [{"text": text} for text in SENTENCES],
    "questions": [{"question": first, "context": second} for first, second in PAIRS],
    "choices": [{"context": "the cat", "choices": ["sat on a mat", "a dog", "river ."]}] * 2,
}


def loaded_of(name: str, folder: Path) -> LoadedModel:
    heads, kind, labels = HEADS[name]
    task = {"name": "own", "kind": kind, "labels": labels, "max_length": 24}
    return random_checkpoint(folder, odd_config(layers=2, max_positions=32), heads, task=task)


@pytest.mark.slow
def test_transformers_predicts_the_same_with_every_export(peer_python: str, tmp_path: Path) -> None:
    arguments, ours = [], {}
    for name, inputs in INPUTS.items():
        huggingface_export.write(loaded_of(name, tmp_path / "vocabulary" / name), tmp_path / name)
        (tmp_path / f"{name}.json").write_text(json.dumps(inputs))
        arguments += [str(tmp_path / name), str(tmp_path / f"{name}.json")]
        ours[name] = predict(tmp_path / name, inputs, all_scores=True)
    done = subprocess.run(
        [peer_python, str(SCRIPT), "predict", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    theirs = dict(zip(INPUTS, lines, strict=True))

    for name in ("texts", "pairs"):
        for mine, found in zip(ours[name], theirs[name], strict=True):
            assert mine["scores"] == pytest.approx({one["label"]: one["score"] for one in found}, abs=1e-5)
            assert mine["label"] == max(found, key=lambda one: one["score"])["label"]
    for mine, found in zip(ours["scores"], theirs["scores"], strict=True):
        assert mine["score"] == pytest.approx(found[0]["score"], abs=1e-5)
    for mine, found in zip(ours["tags"], theirs["tags"], strict=True):
        pieces = {piece["start"]: piece for piece in found}
        assert len(mine["words"]) <= len(found) and not any(word.startswith("##") for word in mine["words"])
        for (start, _), tag, score in zip(mine["offsets"], mine["tags"], mine["tag_scores"], strict=True):
            assert (pieces[start]["entity"], pieces[start]["score"]) == (tag, pytest.approx(score, abs=1e-5))
    for mine, found in zip(ours["questions"], theirs["questions"], strict=True):
        assert {name: mine[name] for name in ("answer", "start", "end")} == found
    for mine, found in zip(ours["choices"], theirs["choices"], strict=True):
        assert list(mine["scores"].values()) == pytest.approx(found, abs=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_an_export_is_a_checkpoint_of_its_task(name: str, tmp_path: Path) -> None:
    loaded = loaded_of(name, tmp_path / "vocabulary")
    huggingface_export.write(loaded, tmp_path / "out")
    again = huggingface.read(tmp_path / "out")
    assert again.task == loaded.task and again.heads == loaded.heads
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config[huggingface.TASK_FIELD]  # as another wrote it
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    foreign = huggingface.read(tmp_path / "out").task
    assert foreign is not None and foreign["kind"] == HEADS[name][1] and foreign["labels"] == HEADS[name][2]
    assert config.get("problem_type") == ("regression" if name == "scores" else config.get("problem_type"))


@pytest.mark.parametrize(
    ("heads", "field"),
    [
        (Heads(tags=3, crf=True), "crf"),
        (Heads(spans=SpanHeads(length=3, classes=2)), "spans"),
        (Heads(pooling="mean", pooler=True, classes=2), "pooling"),
    ],
)
def test_what_the_layout_has_no_place_for_is_refused_by_name(heads: Heads, field: str, tmp_path: Path) -> None:
    loaded = random_checkpoint(tmp_path / "vocabulary", odd_config(layers=1), heads)
    with pytest.raises(UserError, match=rf"cannot hold heads\.{field}="):
        huggingface_export.write(loaded, tmp_path / "out")
