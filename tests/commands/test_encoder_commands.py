"""Encoders without attention in the commands that take any model: fine-tuning, features, StableHLO programs."""

import dataclasses
from pathlib import Path

import jax
import jaxtyping
import numpy as np
import pytest
import safetensors.numpy
from families import FAMILIES
from golden import SCAN
from random_checkpoints import random_checkpoint

from bert_jax.config import AdamW, AutoTaskConfig, FinetuneConfig, LinearSchedule, ModelConfig, TaskConfig
from bert_jax.interop import export, stablehlo
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.lineage import FeedForward
from bert_jax.model import layers
from bert_jax.model.bert import bind
from bert_jax.model.heads.config import Heads
from bert_jax.model.outputs import vocabulary_logits
from bert_jax.tasks.evaluation import evaluate
from bert_jax.tasks.features import FeatureOptions, features
from bert_jax.tasks.finetuning import finetune
from bert_jax.tasks.prediction import predict

WINDOWED = {"encoder": FeedForward(window=3), "layers": 1}
CONFIGS: dict[str, ModelConfig] = {
    "rnn": dataclasses.replace(FAMILIES["rnn"], layers=2),
    "lstm": dataclasses.replace(FAMILIES["lstm"], layers=2),
    "bilstm": dataclasses.replace(FAMILIES["bilstm"], layers=2),
    "feed_forward": dataclasses.replace(FAMILIES["rnn"], **WINDOWED),
}


# Compiling is what takes time: the others are of the slow tests.
EACH = [name if name == "bilstm" else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]
WORDS = {"the": "O", "a": "O", "cat": "B-X", "dog": "B-X", "river": "B-Y", "sat": "O", "on": "O", "mat": "B-X"}


@pytest.fixture(params=EACH)
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> LoadedModel:
    return random_checkpoint(tmp_path / "vocabulary", CONFIGS[request.param], Heads(lm=True))


def test_stablehlo_programs_equal_the_model(loaded: LoadedModel, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the sizes of a program are symbolic
    stablehlo.write(loaded, tmp_path / "out")
    parameters = safetensors.numpy.load_file(tmp_path / "out" / "parameters.safetensors")
    real = (np.arange(9) < np.array([9, 4])[:, None]).astype(np.int32)
    ids = np.random.default_rng(1).integers(5, loaded.model.vocab_size, real.shape).astype(np.int32)
    batch = stablehlo.Rows(ids, real * 0, real, np.arange(9, dtype=np.int32) * real)
    model = bind(loaded.model, loaded.heads, layers.unflatten(dict(loaded.params)), SCAN)
    last = model.encode(batch).last
    parts, names = [last], ["lm_logits"]
    if loaded.model.encoder.kind == "bilstm":
        parts, names = np.split(np.asarray(last), 2, axis=-1), ["forward_lm_logits", "backward_lm_logits"]
    wanted = {name: vocabulary_logits(model, jax.numpy.asarray(part)) for name, part in zip(names, parts, strict=True)}
    wanted = {name: np.asarray(value)[..., : loaded.model.vocab_size] for name, value in wanted.items()}
    got = {}
    for name in ("hidden_states", "predictions"):
        program = jax.export.deserialize((tmp_path / "out" / f"{name}.stablehlo").read_bytes())
        got |= jax.jit(program.call)(parameters, {"input_ids": ids, "attention_mask": real})
    assert got.keys() == {"last", *wanted}
    for name, value in (wanted | {"last": last}).items():
        np.testing.assert_allclose(np.asarray(got[name])[real == 1], np.asarray(value)[real == 1], atol=1e-5)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> TaskConfig:
    """Sentences whose tags follow from the word."""
    folder, draw = tmp_path_factory.mktemp("tags"), np.random.default_rng(0)
    for split, count in (("train", 160), ("dev", 16)):
        sentences = [draw.choice(list(WORDS), draw.integers(2, 9)) for _ in range(count)]
        text = "\n\n".join("\n".join(f"{word}\t{WORDS[word]}" for word in sentence) for sentence in sentences)
        (folder / f"{split}.conll").write_text(text + "\n")
    return AutoTaskConfig(train=str(folder / "train.conll"), dev=str(folder / "dev.conll"), max_length=16)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_tagger_is_trained_measured_and_used(loaded: LoadedModel, task: TaskConfig, tmp_path: Path) -> None:
    export.write(loaded, tmp_path / "start")
    config = FinetuneConfig(
        task=task,
        optimizer=AdamW(learning_rate=3e-2, schedule=LinearSchedule(warmup_steps=-1)),
        batch_size=16,
        epochs=6.0,
        log_every=10,
        init_from=str(tmp_path / "start"),
    )
    result = finetune(config, tmp_path / "tagger")
    measured = evaluate(tmp_path / "tagger", task.dev)
    assert measured["f1"] == pytest.approx(result["metrics"]["f1"]["mean"])
    assert measured["f1"] > 0.9
    [found] = predict(tmp_path / "tagger", ["the cat sat on a river"])
    assert found["tags"] == ["O", "B-X", "O", "O", "O", "B-Y"]
    options = FeatureOptions("linear", epochs=4, batch_size=8, learning_rate=0.1, layers="last,mix", seeds=1)
    layers = features(tmp_path / "tagger", config, options)["layers"]
    for line in layers.values():
        assert line["width"] == loaded.model.width and line["dev"]["f1"]["mean"] > 0.9
    assert np.shape(layers["mix"]["weights"]) == (1, loaded.model.layers + 1)
