"""Tests that StableHLO programs equal the model for any batch size and length, and run without this package."""

import json
import re
import subprocess
import sys

import jax
import jaxtyping
import numpy as np
import pytest
import safetensors.numpy
from families import FAMILIES
from random_checkpoints import PRETRAINING, odd_config, random_checkpoint

from bert_jax.errors import UserError
from bert_jax.interop import stablehlo
from bert_jax.interop.export import export_loaded
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import layers
from bert_jax.model.bert import bind
from bert_jax.model.heads.config import Heads, SpanHeads
from bert_jax.model.outputs import (
    answer_logits,
    class_logits,
    next_sentence_logits,
    sequence_vectors,
    span_logits,
    span_vectors,
    tag_logits,
    vocabulary_logits,
)
from bert_jax.model.runtime import Runtime
from bert_jax.tasks import embedder
from bert_jax.tasks.embedder import embed
from bert_jax.tokenization.tokenizer import Tokenizer

WITHOUT_BERT_JAX = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name.split(".")[0] not in ("bert_jax", "flax"), f"{name} is imported"

sys.meta_path.insert(0, Refuse())
"""


@pytest.fixture(autouse=True)
def symbolic_sizes(monkeypatch):
    """Disables checks of int arguments, since the number of rows of a program is symbolic."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def rows_of(loaded, lengths, slots):
    generator = np.random.default_rng(len(lengths))
    real = (np.arange(slots) < np.array(lengths)[:, None]).astype(np.int32)
    ids = generator.integers(5, loaded.model.vocab_size, real.shape).astype(np.int32)
    segments = (np.arange(slots) >= np.array(lengths)[:, None] // 2).astype(np.int32)
    return {"input_ids": ids, "attention_mask": real, "segment_ids": segments}


def outputs_of_the_model(loaded, inputs):
    """Returns the model's outputs for rows as the commands build them."""
    real = inputs["attention_mask"]
    positions = np.arange(real.shape[1], dtype=np.int32) * real

    @jax.jit
    def outputs(params, rows):
        model = bind(loaded.model, loaded.heads, layers.unflatten(params), Runtime())
        last = model.encode(rows).last
        found = {"last": last}
        if loaded.heads.pooler:
            pooled = sequence_vectors(model, last, rows.sequence_ids, jax.numpy.zeros((len(real), 1), int))
            found["pooled"] = pooled[:, 0]
        if loaded.heads.mlm or loaded.heads.lm:
            names = ["mlm_logits" if loaded.heads.mlm else "lm_logits"]
            if loaded.model.encoder.kind == "bilstm":
                names = ["forward_lm_logits", "backward_lm_logits"]
            for name, half in zip(names, jax.numpy.split(last, len(names), axis=-1), strict=True):
                found[name] = vocabulary_logits(model, half)[..., : loaded.model.vocab_size]
        if loaded.heads.next_sentence:
            found["next_sentence_logits"] = next_sentence_logits(model, pooled)[:, 0]
        if loaded.heads.classes:
            found["class_logits"] = class_logits(model, pooled)[:, 0]
        if loaded.heads.tags:
            found["tag_logits"] = tag_logits(model, last)
        if loaded.heads.question:
            found["answer_logits"] = answer_logits(model, last)
        return found

    return outputs(
        dict(loaded.params), stablehlo.Rows(inputs["input_ids"], inputs["segment_ids"] * real, real, positions)
    )


def test_programs_equal_the_model_for_any_batch_and_length(tmp_path):
    loaded = random_checkpoint(tmp_path / "vocabulary", odd_config(layers=1), PRETRAINING)
    stablehlo.write(loaded, tmp_path / "out")
    parameters = safetensors.numpy.load_file(tmp_path / "out" / "parameters.safetensors")
    said = json.loads((tmp_path / "out" / "programs.json").read_text())
    assert [tensor["name"] for tensor in said["parameters"]] == sorted(parameters)
    assert set(said["programs"]) == {"hidden_states", "predictions"}
    programs = {
        name: jax.export.deserialize((tmp_path / "out" / program["file"]).read_bytes())
        for name, program in said["programs"].items()
    }
    for lengths, slots in (([7, 3, 1], 7), ([11], 24)):
        inputs = rows_of(loaded, lengths, slots)
        wanted = outputs_of_the_model(loaded, inputs)
        got = jax.jit(lambda *given: {k: v for program in programs.values() for k, v in program.call(*given).items()})(
            parameters, inputs
        )
        assert set(got) == set(wanted)
        real = inputs["attention_mask"] == 1
        for name, value in wanted.items():
            by_slot = name in ("last", "mlm_logits")
            ours, theirs = (np.asarray(array)[real] if by_slot else np.asarray(array) for array in (value, got[name]))
            np.testing.assert_allclose(theirs, ours, atol=1e-5, err_msg=name)
        for program in said["programs"].values():
            assert [tensor["name"] for tensor in program["inputs"]] == sorted(inputs)
            for tensor in program["outputs"]:
                sizes = {"batch": len(lengths), "length": slots}
                assert got[tensor["name"]].shape == tuple(sizes.get(size, size) for size in tensor["shape"])
                assert got[tensor["name"]].dtype == tensor["dtype"]
    with pytest.raises(UserError, match="holds StableHLO programs, not a checkpoint"):
        open_checkpoint(tmp_path / "out")
    with pytest.raises(ValueError):  # "length <= 24" does not hold
        programs["hidden_states"].call(parameters, rows_of(loaded, [25], 25))


@pytest.mark.slow
def test_the_program_in_the_readme_runs_without_this_package(tmp_path):
    loaded = random_checkpoint(tmp_path / "vocabulary", odd_config(layers=1), Heads(pooler=True, classes=3))
    stablehlo.write(loaded, tmp_path / "out")
    [shown] = re.findall(r"```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text(), re.DOTALL)
    shown = shown.replace("Some text.", "the cat sat unwantable") + "print(outputs['class_logits'].tolist())\n"
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_BERT_JAX + shown], cwd=tmp_path / "out", capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    shapes, logits = run.stdout.splitlines()
    assert shapes == "{'class_logits': (1, 3)}"
    rows = embedder.encode(["the cat sat unwantable"], Tokenizer(loaded.vocabulary.spec), 24, by_word=False).rows
    batch = rows.batch(np.array([0]), int(rows.lengths[0]))
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.sequence_ids, "segment_ids": batch.segment_ids}
    np.testing.assert_allclose(json.loads(logits), outputs_of_the_model(loaded, inputs)["class_logits"], atol=1e-5)


def test_the_pooled_vector_is_the_input_of_the_classifier(tmp_path):
    """By the functions that are exported, without the time of an export."""
    heads = Heads(pooling="mean", pooler=True, classes=3)
    loaded = random_checkpoint(tmp_path / "vocabulary", odd_config(layers=1), heads)
    inputs = rows_of(loaded, [7, 3], 9)
    wanted = outputs_of_the_model(loaded, inputs)
    for program, output in ((stablehlo.hidden_states, "pooled"), (stablehlo.predictions, "class_logits")):
        got = jax.jit(program(loaded, Runtime(attention=stablehlo.ATTENTION)))(dict(loaded.params), inputs)
        np.testing.assert_allclose(got[output], wanted[output], atol=1e-5, err_msg=output)


@pytest.mark.parametrize(
    ("settings", "described"),
    [
        (
            {"pooling": "mean", "normalize": True, "truncate_dim": 5},
            "(mean), divided by its length, cut to its first 5",
        ),
        ({"pooling": "cls", "normalize": False}, "(cls). With its prompt, a text has at most 16 tokens"),
    ],
)
def test_a_program_gives_the_vectors_of_texts_that_embed_gives(tmp_path, settings, described):
    task = {"name": "own", "kind": "embedding", "labels": [], "max_length": 16, **settings}
    task |= {"prompt": "the ", "prompts": [["other", "the "]], "query_prompt": "a "}
    loaded = random_checkpoint(tmp_path / "vocabulary", odd_config(layers=1), Heads(pooler=True), task=task)
    stablehlo.write(loaded, tmp_path / "out")
    said = json.loads((tmp_path / "out" / "programs.json").read_text())
    assert said["vectors"].items() >= {"max_length": 16, "default_prompt_name": "other", **settings}.items()
    assert said["vectors"]["prompts"] == {"other": "the ", "query": "a "}
    program = jax.export.deserialize((tmp_path / "out" / said["programs"]["text_vectors"]["file"]).read_bytes())
    rows = embedder.encode(["the cat sat", "the unwantable"], Tokenizer(loaded.vocabulary.spec), 16, by_word=False).rows
    batch = rows.batch(np.arange(2), int(rows.lengths.max()))
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.sequence_ids, "segment_ids": batch.segment_ids}
    got = jax.jit(program.call)(dict(loaded.params), inputs)["vector"]
    np.testing.assert_allclose(got, embed(loaded, ["cat sat", "unwantable"])["embeddings"], atol=1e-5)
    readme = (tmp_path / "out" / "README.md").read_text()
    assert described in readme and 'prompts: other "the ", query "a ".' in readme
    assert 'open("text_vectors.stablehlo"' in readme and 'words.encode("the Some text."' in readme


def test_a_pooling_that_no_program_computes_is_reported(tmp_path, capsys):
    task = {"name": "own", "kind": "embedding", "labels": [], "max_length": 16, "pooling": "mean, Dense"}
    loaded = random_checkpoint(tmp_path / "vocabulary", odd_config(layers=1), Heads(), task=task)
    stablehlo.write(loaded, tmp_path / "out")
    said = json.loads((tmp_path / "out" / "programs.json").read_text())
    assert set(said["programs"]) == {"hidden_states"} and "vectors" not in said
    assert "no program of the pooling of its vectors, left out: mean, Dense" in capsys.readouterr().err


def test_bfloat16_programs_hold_rounded_parameters_and_have_outputs_near_those_of_float32(tmp_path):
    loaded = random_checkpoint(tmp_path / "vocabulary", odd_config(layers=1), PRETRAINING)
    stablehlo.write(loaded, tmp_path / "out", "bfloat16")
    parameters = safetensors.numpy.load_file(tmp_path / "out" / "parameters.safetensors")
    for path, value in loaded.params.items():
        assert parameters[path].dtype == jax.numpy.bfloat16
        np.testing.assert_array_equal(parameters[path], value.astype(jax.numpy.bfloat16))
    described = json.loads((tmp_path / "out" / "programs.json").read_text())
    assert {tensor["dtype"] for tensor in described["parameters"]} == {"bfloat16"}
    assert "parameters and matmuls in bfloat16" in (tmp_path / "out" / "README.md").read_text()
    inputs = rows_of(loaded, [7, 3, 1], 7)
    wanted = outputs_of_the_model(loaded, inputs)
    for name, outputs in (("hidden_states", ("last", "pooled")), ("predictions", ("mlm_logits",))):
        program = jax.export.deserialize((tmp_path / "out" / f"{name}.stablehlo").read_bytes())
        got = jax.jit(program.call)(parameters, inputs)
        for output in outputs:
            ours, theirs = (np.asarray(value) for value in (wanted[output], got[output]))
            if output != "pooled":
                ours, theirs = (value[inputs["attention_mask"] == 1] for value in (ours, theirs))
            error = np.abs(theirs - ours).max() / np.abs(ours).max()
            assert theirs.dtype == np.float32 and 1e-4 < error < 0.03, (output, error)


def test_relations_are_refused(tmp_path):
    heads = Heads(spans=SpanHeads(length=3, relations=2))
    loaded = random_checkpoint(tmp_path / "vocabulary", odd_config(layers=1), heads)
    with pytest.raises(UserError, match=r"heads\.spans\.relations has no StableHLO programs"):
        stablehlo.write(loaded, tmp_path / "out")


@pytest.mark.slow
def test_programs_of_crfs_and_spans_equal_the_model(tmp_path):
    heads = Heads(tags=4, crf=True, spans=SpanHeads(length=3, classes=2))
    loaded = random_checkpoint(tmp_path / "vocabulary", odd_config(layers=1), heads)
    stablehlo.write(loaded, tmp_path / "out")
    program = jax.export.deserialize((tmp_path / "out" / "predictions.stablehlo").read_bytes())
    inputs = rows_of(loaded, [9, 4], 9)
    tagged = np.broadcast_to(np.arange(9) % 3 > 0, (2, 9))
    got = jax.jit(program.call)(dict(loaded.params), inputs | {"tagged": tagged.astype(np.int32)})
    real = inputs["attention_mask"] == 1

    @jax.jit
    def wanted(params, rows):
        model = bind(loaded.model, loaded.heads, layers.unflatten(params), Runtime())
        last = model.encode(rows).last
        logits = tag_logits(model, last)
        tags, _ = model.head("crf").decode(logits, tagged & real, rows.sequence_ids)
        return {"tag_logits": logits, "tags": tags, "span_logits": span_logits(model, span_vectors(model, last))}

    positions = np.arange(9, dtype=np.int32) * inputs["attention_mask"]
    segments = inputs["segment_ids"] * inputs["attention_mask"]
    rows = stablehlo.Rows(inputs["input_ids"], segments, inputs["attention_mask"], positions)
    theirs = wanted(dict(loaded.params), rows)
    assert set(got) == set(theirs)
    for name, value in theirs.items():
        np.testing.assert_allclose(np.asarray(got[name])[real], np.asarray(value)[real], atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_programs_of_every_family_equal_the_model(tmp_path, family):
    config = FAMILIES[family]
    language_model = config.causal or config.encoder.kind == "bilstm"
    heads = Heads(mlm=not language_model, lm=language_model, pooler=True, next_sentence=True, tags=4, question=True)
    loaded = random_checkpoint(tmp_path / "vocabulary", config, heads)
    stablehlo.write(loaded, tmp_path / "out")
    program = jax.export.deserialize((tmp_path / "out" / "predictions.stablehlo").read_bytes())
    inputs = rows_of(loaded, [9, 4], 9)
    wanted = outputs_of_the_model(loaded, inputs)
    given = {name: value for name, value in inputs.items() if name != "segment_ids" or config.segment_types > 1}
    got = jax.jit(program.call)(dict(loaded.params), given)
    real = inputs["attention_mask"] == 1
    assert set(got) == set(wanted) - {"last", "pooled"}
    for name, value in got.items():
        theirs, ours = (np.asarray(array) for array in (value, wanted[name]))
        by_slot = name != "next_sentence_logits"
        ours, theirs = (array[real] if by_slot else array for array in (ours, theirs))
        np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-5, err_msg=name)


def test_programs_of_one_shape_have_no_symbolic_size_and_equal_the_model(tmp_path):
    loaded = random_checkpoint(tmp_path / "vocabulary", odd_config(layers=1), Heads(pooler=True, classes=3))
    export_loaded(loaded, tmp_path / "out", "stablehlo", shape="2x9")
    program = jax.export.deserialize((tmp_path / "out" / "predictions.stablehlo").read_bytes())
    text = program.mlir_module()
    assert "tensor<2x9xi32>" in text and "tensor<?" not in text and "shape_assertion" not in text
    inputs = rows_of(loaded, [9, 4], 9)
    got = program.call(safetensors.numpy.load_file(tmp_path / "out" / "parameters.safetensors"), inputs)
    wanted = outputs_of_the_model(loaded, inputs)["class_logits"]
    np.testing.assert_allclose(got["class_logits"], wanted, atol=1e-5)
    assert "Batches of 2 x 9;" in (tmp_path / "out" / "README.md").read_text()
    for shape, format, message in (
        ("2x25", "stablehlo", "--shape has length 25, but the model has 24 positions"),
        ("2,9", "stablehlo", "--shape is 2,9; expected batch size and length"),
        ("0x9", "stablehlo", "expected batch size and length"),
        ("2x9", "hf", "only --format stablehlo has it"),
    ):
        with pytest.raises(UserError, match=message):
            export_loaded(loaded, tmp_path / "refused", format, shape=shape)
    assert not (tmp_path / "refused").exists()
