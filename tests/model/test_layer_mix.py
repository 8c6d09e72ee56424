"""The learned mix of layers: its formula, frozen heads and fine-tuning with it, refusals."""

import dataclasses
import io

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import safetensors.numpy
from families import FAMILIES
from golden import SCAN
from random_checkpoints import odd_config, random_checkpoint
from rich.console import Console
from scipy.special import softmax
from tiny_batches import lay, random_sequence

from bert_jax.commands.features import result_table
from bert_jax.config import AdamW, AutoTaskConfig, FinetuneConfig, LinearSchedule
from bert_jax.errors import UserError
from bert_jax.interop import export
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import layers
from bert_jax.model.bert import bind, init_params
from bert_jax.model.heads.config import Heads
from bert_jax.model.outputs import encode_for_task, tag_logits
from bert_jax.tasks.embedder import embed
from bert_jax.tasks.evaluation import evaluate
from bert_jax.tasks.features import HeadOptions, WordVectors, train_head
from bert_jax.tasks.finetuning import finetune
from bert_jax.tasks.prediction import predict
from bert_jax.train.optim import decays

HEADS = Heads(tags=4, layer_mix=True)


def mixed(states: np.ndarray, scores: np.ndarray, gamma: float) -> np.ndarray:
    """Peters et al. 2018, equation 1, in float64."""
    weights = np.exp(scores) / np.exp(scores).sum()
    return gamma * sum(weight * state for weight, state in zip(weights, states.astype(np.float64), strict=True))


def mix_parameters(layers: int) -> tuple[np.ndarray, float]:
    return np.random.default_rng(0).normal(size=layers + 1), 1.7


@pytest.mark.parametrize("family", [pytest.param("pre_norm", marks=pytest.mark.slow), "bilstm"])
def test_heads_read_the_mix_of_the_embeddings_and_all_layers(family):
    config = FAMILIES[family]
    flat = layers.flatten(init_params(config, HEADS, jax.random.key(0)))
    assert (flat["layer_mix/scores"] == 0).all() and (flat["layer_mix/gamma"] == 1).all()
    scores, gamma = mix_parameters(config.layers)
    flat |= {"layer_mix/scores": jnp.float32(scores), "layer_mix/gamma": jnp.full(1, gamma)}
    batch = jax.tree.map(jnp.asarray, lay([[random_sequence(9, config.vocab_size, 1)]], 12, 2))

    @jax.jit
    def run(params):
        model = bind(config, HEADS, params, SCAN)
        states = encode_for_task(model, batch)
        return model.encode(batch, all_layers=True), states, tag_logits(model, states)

    encoded, states, logits = run(layers.unflatten(flat))
    wanted = mixed(np.concatenate([encoded.embeddings[None], encoded.layers]), scores, gamma)
    np.testing.assert_allclose(states, wanted, atol=1e-5)
    tags = wanted @ np.asarray(flat["tagger/dense/kernel"], np.float64) + np.asarray(flat["tagger/dense/bias"])
    np.testing.assert_allclose(logits, tags, atol=1e-5)


def test_the_weights_of_a_mix_do_not_decay():
    params = layers.flatten(decays(AdamW(), init_params(FAMILIES["bert"], HEADS, jax.random.key(0))))
    assert params["layer_mix/scores"] == params["layer_mix/gamma"] == 0 < params["tagger/dense/kernel"]


@pytest.mark.slow
def test_a_frozen_head_learns_which_layer_is_informative():
    """Of three layers, the tag is the sign in the second one; the others are noise."""
    draw = np.random.default_rng(0)

    def split(sentences: int) -> WordVectors:
        sizes = draw.integers(1, 12, sentences)
        vectors = draw.normal(size=(sizes.sum(), 6)).astype(np.float32)
        labels = (vectors[:, 2] > 0).astype(np.int32)
        return WordVectors(vectors, labels, np.concatenate([[0], np.cumsum(sizes)]))

    splits = {"train": split(300), "dev": split(40)}
    options = HeadOptions("linear", batch_size=16, learning_rate=0.1, epochs=12)
    trained = train_head(splits, 2, options, 0, lambda found: float((found == splits["dev"].labels).mean()), mixed=3)
    assert trained.mix is not None
    assert sum(trained.mix.weights) == pytest.approx(1) and trained.mix.weights[1] > 0.8
    assert (trained.predictions["dev"] == splits["dev"].labels).mean() > 0.9
    assert train_head(splits, 2, dataclasses.replace(options, epochs=1), 0, lambda found: 0.0).mix is None


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A table whose label is whether the text contains "cat"."""
    folder, draw = tmp_path_factory.mktemp("reviews"), np.random.default_rng(0)
    for split, count in (("train", 96), ("dev", 24)):
        lines = ["text\tlabel"]
        for _ in range(count):
            cat = bool(draw.integers(2))
            lines.append(f"{draw.choice(['the', 'a'])} {'cat' if cat else 'river'} sat\t{'yes' if cat else 'no'}")
        (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return {split: str(folder / f"{split}.tsv") for split in ("train", "dev")}


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_fine_tuned_mix_is_saved_measured_and_exported(reviews, tmp_path, monkeypatch):
    start = random_checkpoint(tmp_path / "vocabulary", odd_config(layers=2, dropout=0.0), Heads(pooler=True))
    ones = {path: value * 0 + 1 for path, value in start.params.items() if path.endswith("norm/scale")}
    start = dataclasses.replace(start, params={**start.params, **ones})
    export.write(start, tmp_path / "start")
    columns = {"text": "text", "label": "label"}
    config = FinetuneConfig(
        task=AutoTaskConfig(**reviews, **columns, max_length=16, layer_mix=True),
        optimizer=AdamW(learning_rate=1e-2, schedule=LinearSchedule(warmup_steps=-1)),
        batch_size=16,
        epochs=4.0,
        log_every=10,
        init_from=str(tmp_path / "start"),
    )
    result = finetune(config, tmp_path / "run")
    loaded = open_checkpoint(tmp_path / "run")
    assert loaded.heads.layer_mix and loaded.task["layer_mix"]
    assert np.abs(loaded.params["layer_mix/scores"]).max() > 1e-3
    assert abs(loaded.params["layer_mix/gamma"][0] - 1) > 1e-3
    assert evaluate(tmp_path / "run", reviews["dev"])["accuracy"] == result["metrics"]["accuracy"]["mean"] > 0.9

    # By hand, from the vectors of each layer.
    states = [embed(loaded, ["the cat sat"], layers=str(layer), pool="none")["embeddings"] for layer in range(3)]
    mix = mixed(np.stack(states), loaded.params["layer_mix/scores"], loaded.params["layer_mix/gamma"][0])
    pooled = np.tanh(mix[0] @ loaded.params["pooler/dense/kernel"] + loaded.params["pooler/dense/bias"])
    logits = pooled @ loaded.params["classifier/dense/kernel"] + loaded.params["classifier/dense/bias"]
    [found] = predict(loaded, ["the cat sat"], all_scores=True)
    assert list(found["scores"].values()) == pytest.approx(softmax(logits), abs=1e-5)

    with monkeypatch.context() as patched:
        patched.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the sizes of a program are symbolic
        export.export(tmp_path / "run", tmp_path / "program", "stablehlo")
    program = jax.export.deserialize((tmp_path / "program" / "predictions.stablehlo").read_bytes())
    words = loaded.vocabulary
    ids = np.array([[words.cls_id, *(words.token_id(word) for word in ("the", "cat", "sat")), words.sep_id]], np.int32)
    inputs = {"input_ids": ids, "attention_mask": ids * 0 + 1, "segment_ids": ids * 0}
    parameters = safetensors.numpy.load_file(tmp_path / "program" / "parameters.safetensors")
    np.testing.assert_allclose(jax.jit(program.call)(parameters, inputs)["class_logits"][0], logits, atol=1e-4)
    with pytest.raises(UserError, match=r"cannot hold heads\.layer_mix=True. Use --format orbax"):
        export.export(tmp_path / "run", tmp_path / "hf", "hf")
    export.export(tmp_path / "run", tmp_path / "orbax", "orbax")
    assert predict(tmp_path / "orbax", ["the cat sat"], all_scores=True) == [found]


def test_embed_refuses_a_mix_that_is_not_learned(tmp_path):
    loaded = random_checkpoint(tmp_path, odd_config(layers=1))
    with pytest.raises(UserError, match="--layers is mix, whose weights are learned together with a head"):
        embed(loaded, ["the cat"], layers="mix")


def test_the_table_of_features_shows_the_learned_weights():
    line = {"width": 8, "dev": {"f1": {"mean": 0.5, "std": None, "values": [0.5]}}}
    mix = line | {"weights": [[0.2, 0.8], [0.4, 0.6]], "gamma": [1.5, 1.7]}
    result = {"task": "own", "head": {"head": "linear"}, "seeds": [0, 1], "layers": {"last": line, "mix": mix}}
    shown = io.StringIO()
    Console(width=120, file=shown).print(result_table(result, "f1"))
    assert "mix: weights 0.300 0.700 (from the embeddings up), gamma 1.600" in " ".join(shown.getvalue().split())
