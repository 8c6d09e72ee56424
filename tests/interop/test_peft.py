"""Adapters of peft: read as peft computes them, and written as peft saves them."""

import dataclasses
import json
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from families import MODERN
from golden import assert_close, read_arrays, task_batch
from random_checkpoints import assert_same_tensors, odd_config, random_checkpoint, write_vocabulary
from tokenizer_kinds import byte_pairs

from bert_jax.config.model import LoraConfig
from bert_jax.errors import UserError
from bert_jax.interop import export as bert_jax_export
from bert_jax.interop import huggingface, huggingface_export, peft, sentence_transformers
from bert_jax.interop.export import export
from bert_jax.interop.loaded_model import LoadedModel, load_vocabulary
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import bert, layers, lora
from bert_jax.model.heads.config import Heads
from bert_jax.model.runtime import Runtime
from bert_jax.tasks.kinds.classification import ClassificationTask
from bert_jax.tokenization import tokenizer

SCRIPT = Path(__file__).parent.parent / "tools" / "peers.py"
CASES = {
    "peft_query_value": LoraConfig(rank=3, alpha=6.0, targets="attention/(query|value)$"),
    "peft_all": LoraConfig(rank=4, alpha=2.0, dropout=0.1, targets=".*", rank_stabilized=True),
}
LAYER_NAMES = {  # peft's modules in a layer, by the path of their matrix
    "attention/query": "attention.self.query",
    "attention/key": "attention.self.key",
    "attention/value": "attention.self.value",
    "attention/output": "attention.output.dense",
    "feed_forward/input": "intermediate.dense",
    "feed_forward/output": "output.dense",
}
# Families whose masked language models hold tensors that their classifiers lack.
SEPARATE = {
    "modernbert": odd_config(heads=5, **MODERN),
    "distilbert": odd_config(segment_types=0, pooler="relu"),
    "mpnet": odd_config(relative="buckets", relative_distance=128, segment_types=0, position_offset=2),
    "electra": odd_config(embedding_width=12, pooler="gelu"),
}
VECTORS = {"name": "own", "kind": "embedding", "labels": [], "max_length": 16, "pooling": "cls", "normalize": True}
TASK = ClassificationTask("own", ("a", "b", "c"))
HEADS = Heads(pooler=True, classes=3)


def part_of(arrays: dict[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    return {key.removeprefix(f"{kind}/"): value for key, value in arrays.items() if key.startswith(f"{kind}/")}


def write_golden(name: str, folder: Path) -> dict[str, np.ndarray]:
    """Writes the base model to folder/base and the adapters to folder/adapters."""
    arrays = read_arrays(name)
    for part in ("base", "adapters"):
        (folder / part).mkdir(parents=True)
    safetensors.numpy.save_file(part_of(arrays, "weights"), folder / "base" / "model.safetensors")
    safetensors.numpy.save_file(part_of(arrays, "adapters"), folder / "adapters" / "adapter_model.safetensors")
    config = json.loads(str(arrays["config"]))
    (folder / "base" / "config.json").write_text(json.dumps(config))
    write_vocabulary(folder / "base", config["vocab_size"])
    values = json.loads(str(arrays["adapter_config"])) | {"base_model_name_or_path": "../base"}
    (folder / "adapters" / "adapter_config.json").write_text(json.dumps(values))
    return arrays


def logits(loaded: LoadedModel, arrays: dict[str, np.ndarray]) -> jax.Array:
    params = layers.unflatten({path: jnp.asarray(value) for path, value in loaded.params.items()})
    model = bert.bind(loaded.model, loaded.heads, params, Runtime())
    batch = jax.tree.map(jnp.asarray, task_batch(arrays))
    return TASK.objective().outputs(model, batch, None)


def adapted_workdir(name: str, folder: Path, arrays: dict[str, np.ndarray]) -> Path:
    """Writes the workdir of a run that trained the golden adapters, each transposed by hand, from folder/base."""
    base, lora = huggingface.read(folder / "base"), CASES[name]
    adapters = part_of(arrays, "adapters")
    model = dataclasses.replace(base.model, lora=lora)
    params = {path: value for path, value in base.params.items() if path in expected(model)}
    start = "base_model.model.bert.encoder.layer"
    for matrix in lora.matrices:
        module = LAYER_NAMES[matrix.removeprefix("encoder/layers/")]
        for end, letter in (("a", "A"), ("b", "B")):
            path = f"{matrix}_lora/{end}"
            layers = [adapters[f"{start}.{layer}.{module}.lora_{letter}.weight"].T for layer in range(model.layers)]
            params[path] = np.stack(layers).reshape(expected(model)[path].shape)
    for path, tensor in (("classifier/dense", "classifier"), ("pooler/dense", "bert.pooler.dense")):
        if f"base_model.model.{tensor}.weight" in adapters:
            params[f"{path}/kernel"] = adapters[f"base_model.model.{tensor}.weight"].T
            params[f"{path}/bias"] = adapters[f"base_model.model.{tensor}.bias"]
    training = {"init_from": str(folder / "base")}
    task = {"name": "own", "kind": "classification", "labels": ["a", "b", "c"], "max_length": 16}
    words = base.vocabulary
    bert_jax_export.write(LoadedModel(model, HEADS, params, words, task, training=training), folder / "run")
    return folder / "run"


def trained(base: LoadedModel, heads: Heads, folder: Path, **known: object) -> LoadedModel:
    """A run with LoRA from the folder of a base model: random adapters and heads."""
    model = dataclasses.replace(base.model, lora=LoraConfig(rank=2, targets="attention/output"))
    random = random_checkpoint(folder.parent / "unused", model, heads).params
    adapted = {path: base.params.get(path, value) for path, value in random.items()}
    return LoadedModel(model, heads, adapted, base.vocabulary, training={"init_from": str(folder)}, **known)


def expected(model: object) -> dict[str, jax.ShapeDtypeStruct]:
    return layers.flatten(bert.abstract_params(model, HEADS))


@pytest.mark.parametrize("name", [*CASES, "peft_electra"])
def test_adapters_of_peft_are_read_merged_and_compute_its_outputs(name, tmp_path):
    arrays = write_golden(name, tmp_path)
    loaded = open_checkpoint(tmp_path / "adapters")
    assert loaded.heads.classes == 3 and loaded.model.lora is None
    assert_close(logits(loaded, arrays), arrays["outputs/logits"], "logits")


def test_labels_of_the_base_are_not_those_of_a_classifier_of_another_size(tmp_path):
    """ELECTRA's classifier has two layers; the last one has an output for each label."""
    write_golden("peft_electra", tmp_path)
    file = tmp_path / "base" / "config.json"
    for count in (2, 3):
        labels = {str(number): f"label {number}" for number in range(count)}
        file.write_text(json.dumps(json.loads(file.read_text()) | {"id2label": labels}))
        task = open_checkpoint(tmp_path / "adapters").task
        named = [] if task is None else task["labels"]
        assert (named == list(labels.values())) == (count == 3), named


@pytest.mark.parametrize("name", SEPARATE)
def test_the_head_of_a_masked_language_model_is_left_out_where_its_adapters_have_another(name, tmp_path, capsys):
    written = random_checkpoint(tmp_path / "words", SEPARATE[name], Heads(mlm=True))
    huggingface_export.write(written, tmp_path / "base")
    base = huggingface.read(tmp_path / "base")
    assert json.loads((tmp_path / "base" / "config.json").read_text())["model_type"] == name
    run = trained(base, HEADS, tmp_path / "base")
    peft.write(run, tmp_path / "adapters")
    loaded = open_checkpoint(tmp_path / "adapters")
    assert loaded.heads == HEADS
    model, params = lora.merge(run.model, run.params)
    assert loaded.model == model and loaded.params.keys() == params.keys()
    for path, value in params.items():
        np.testing.assert_allclose(loaded.params[path], value, atol=1e-6, err_msg=path)
    assert "ForSequenceClassification, left out: " in capsys.readouterr().err
    file = tmp_path / "adapters" / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    safetensors.numpy.save_file(tensors | {"base_model.model.other.weight": np.zeros(3, np.float32)}, file)
    with pytest.raises(UserError, match=r"tensor other\.weight is not part of the architecture"):
        open_checkpoint(tmp_path / "adapters")


def test_adapters_of_a_causal_language_model_are_read(tmp_path):
    words = tokenizer.load(byte_pairs(tmp_path / "words", []))
    config = odd_config(
        vocab_size=words.vocab_size, segment_types=0, norm="pre", embedding_norm=False, causal=True, layers=1
    )
    base = dataclasses.replace(random_checkpoint(tmp_path / "other", config, Heads(lm=True)), vocabulary=words)
    huggingface_export.write(base, tmp_path / "base")
    (tmp_path / "adapters").mkdir()
    a, b = np.ones((1, 20), np.float32), np.arange(60, dtype=np.float32)[:, None]
    name = "base_model.model.transformer.h.0.attn.c_attn.lora"
    tensors = {f"{name}_A.weight": a, f"{name}_B.weight": b}
    safetensors.numpy.save_file(tensors, tmp_path / "adapters" / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "lora_alpha": 1, "fan_in_fan_out": True}
    values["base_model_name_or_path"] = "../base"
    (tmp_path / "adapters" / "adapter_config.json").write_text(json.dumps(values))
    loaded = open_checkpoint(tmp_path / "adapters")
    assert loaded.heads == Heads(lm=True)
    path = "encoder/layers/attention/qkv/kernel"
    changed = loaded.params[path] - base.params[path]
    np.testing.assert_allclose(changed.reshape(20, 60), np.broadcast_to(b.T, (20, 60)), atol=1e-5)


def test_the_settings_of_vectors_are_written_and_read_with_their_adapters(tmp_path):
    """Those of the adapters precede those of the base; sentence-transformers saves them as modules.json."""
    base = random_checkpoint(tmp_path / "words", odd_config(), Heads())
    others = VECTORS | {"pooling": "max", "normalize": False}
    huggingface_export.write_sentence_transformer(dataclasses.replace(base, task=others), tmp_path / "base")
    task = VECTORS | {"query_prompt": "query: ", "prompts": [["query", "query: "]]}
    peft.write(trained(base, Heads(), tmp_path / "base", task=task), tmp_path / "adapters")
    read = open_checkpoint(tmp_path / "adapters").task
    assert {key: read[key] for key in task} == task
    described = sentence_transformers.read_task(tmp_path / "adapters", base.model, base.vocabulary)
    assert {"name": "own", **described} == read
    for file in ("task.json", "modules.json"):
        (tmp_path / "adapters" / file).unlink()
    for pooling in ("max", "last"):
        assert open_checkpoint(tmp_path / "adapters").task["pooling"] == pooling
        if pooling == "max":
            sentence_transformers.write(VECTORS | {"pooling": "last"}, 20, tmp_path / "adapters")


def test_adapters_of_multiple_choice_which_peft_has_no_task_type_for_are_read_with_their_head(tmp_path):
    huggingface_export.write(random_checkpoint(tmp_path / "words", odd_config(), Heads(pooler=True)), tmp_path / "base")
    heads = Heads(pooler=True, choices=True)
    task = {"name": "own", "kind": "choice", "labels": [], "max_length": 16}
    run = trained(huggingface.read(tmp_path / "base"), heads, tmp_path / "base", task=task)
    peft.write(run, tmp_path / "adapters")
    loaded = open_checkpoint(tmp_path / "adapters")
    assert loaded.heads == heads and loaded.task == task
    _, params = lora.merge(run.model, run.params)
    assert loaded.params.keys() == params.keys()
    np.testing.assert_allclose(loaded.params["classifier/dense/kernel"], params["classifier/dense/kernel"], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["peft_query_value", "peft_all"])
def test_trained_adapters_are_written_as_peft_saves_them(name, tmp_path):
    arrays = write_golden(name, tmp_path)
    run = adapted_workdir(name, tmp_path, arrays)
    export(run, tmp_path / "written", "peft")
    tensors = safetensors.numpy.load_file(tmp_path / "written" / "adapter_model.safetensors")
    assert_same_tensors(tensors, part_of(arrays, "adapters"))
    values = json.loads((tmp_path / "written" / "adapter_config.json").read_text())
    reference = json.loads(str(arrays["adapter_config"]))
    for key in ("peft_type", "task_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "bias", "fan_in_fan_out"):
        assert values[key] == reference[key], key
    assert set(values["modules_to_save"]) == set(reference["modules_to_save"]) - {"score"}
    assert set(values["target_modules"]) <= set(LAYER_NAMES.values())
    unmerged = open_checkpoint(run, merged=False)
    assert_close(logits(unmerged, arrays), arrays["outputs/logits"], "unmerged logits")
    for folder in (run, tmp_path / "written"):
        assert_close(logits(open_checkpoint(folder), arrays), arrays["outputs/logits"], f"logits of {folder.name}")
    assert open_checkpoint(tmp_path / "written").task["labels"] == ["a", "b", "c"]


@pytest.mark.slow
def test_peft_computes_the_same_with_the_adapters_that_are_written(peer_python, tmp_path):
    arguments = []
    for name in CASES:
        arrays = write_golden(name, tmp_path / name)
        export(adapted_workdir(name, tmp_path / name, arrays), tmp_path / name / "written", "peft")
        inputs = {key: value.tolist() for key, value in part_of(arrays, "inputs").items()}
        (tmp_path / f"{name}.json").write_text(json.dumps(inputs))
        arguments += [str(tmp_path / name / "written"), str(tmp_path / f"{name}.json")]
    done = subprocess.run(
        [peer_python, str(SCRIPT), "adapters", *arguments], capture_output=True, text=True, check=False
    )
    if "No module named 'peft'" in done.stderr:
        pytest.skip(f"{peer_python} has no peft")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    for name, found in zip(CASES, lines, strict=True):
        assert_close(np.array(found), read_arrays(name)["outputs/logits"], f"peft's logits with {name}")


@pytest.mark.slow
def test_a_target_that_ends_as_another_matrix_does_is_written_as_a_regex(tmp_path):
    """In BERT, the name of feed_forward/output also ends that of attention/output."""
    arrays = write_golden("peft_all", tmp_path)
    run = adapted_workdir("peft_all", tmp_path, arrays)
    config = json.loads((run / "config.json").read_text())
    loaded = open_checkpoint(run, merged=False)
    lora = dataclasses.replace(loaded.model.lora, targets="feed_forward/output")
    params = {
        path: value for path, value in loaded.params.items() if "_lora" not in path or "feed_forward/output" in path
    }
    changed = dataclasses.replace(
        loaded, model=dataclasses.replace(loaded.model, lora=lora), params=params, training=config["training"]
    )
    bert_jax_export.write(changed, tmp_path / "one")
    export(tmp_path / "one", tmp_path / "written", "peft")
    pattern = json.loads((tmp_path / "written" / "adapter_config.json").read_text())["target_modules"]
    assert pattern == r"(.*\.)?(encoder\.layer\.\d+\.output\.dense)"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is 'pissa_niter_16'"),
        ({"alora_invocation_tokens": [5]}, r"alora_invocation_tokens is \[5\]"),
        ({"task_type": "CAUSAL_LM"}, "task_type is 'CAUSAL_LM'; choose from 'SEQ_CLS', .*'FEATURE_EXTRACTION'$"),
        ({"base_model_name_or_path": "no/such/folder"}, "base_model_name_or_path is 'no/such/folder'"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path is None"),
        ({"lora_alpha": None}, "lora_alpha is None; expected a number"),
    ],
)
def test_adapters_that_cannot_be_merged_are_refused(change, message, tmp_path):
    write_golden("peft_query_value", tmp_path)
    file = tmp_path / "adapters" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=message) as caught:
        open_checkpoint(tmp_path / "adapters")
    assert "\n" not in str(caught.value)


def test_a_base_model_may_be_one_of_the_hub(tmp_path, monkeypatch):
    write_golden("peft_query_value", tmp_path)
    expected = open_checkpoint(tmp_path / "adapters").params
    file = tmp_path / "adapters" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "someone/model"}))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(tmp_path / "base"))
    found = open_checkpoint(tmp_path / "adapters").params
    assert all(np.array_equal(found[path], value) for path, value in expected.items())

    def fail(name: str, **_: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(UserError, match=r"json: base_model_name_or_path: no checkpoint at someone/model"):
        open_checkpoint(tmp_path / "adapters")


@pytest.mark.parametrize(
    ("name_b", "rank", "message"),
    [
        ("7.attention.self.query.lora_B", 3, r"adapts encoder\.layer\.7\.attention\.self\.query\.weight, which"),
        ("1.attention.self.query.lora_C", 3, r"is not supported; expected pairs of \.lora_A\.weight and \.lora_B"),
        ("1.attention.self.query.lora_B", 2, r"with the shapes \(2, \d+\) and \(\d+, 3\); expected \[r, in\]"),
    ],
    ids=["no such layer", "no pair", "two ranks"],
)
def test_a_tensor_that_adapts_nothing_in_the_base_is_refused(name_b, rank, message, tmp_path):
    tensors = part_of(write_golden("peft_query_value", tmp_path), "adapters")
    start = "base_model.model.bert.encoder.layer."
    a, b = (tensors.pop(f"{start}1.attention.self.query.lora_{letter}.weight") for letter in "AB")
    tensors |= {f"{start}{name_b[:-1]}A.weight": a[:rank], f"{start}{name_b}.weight": b}
    safetensors.numpy.save_file(tensors, tmp_path / "adapters" / "adapter_model.safetensors")
    with pytest.raises(UserError, match=message):
        open_checkpoint(tmp_path / "adapters")


@pytest.mark.slow
def test_what_is_no_adapter_is_not_exported_as_one(tmp_path):
    arrays = write_golden("peft_query_value", tmp_path)
    with pytest.raises(UserError, match="has no adapters"):
        export(tmp_path / "base", tmp_path / "out", "peft")
    run = adapted_workdir("peft_query_value", tmp_path, arrays)
    with pytest.raises(UserError, match="--format hf writes a whole model"):
        export(run, tmp_path / "out", base=str(tmp_path / "base"))
    weights = safetensors.numpy.load_file(tmp_path / "base" / "model.safetensors")
    weights["encoder.layer.0.output.dense.bias"] += 1
    safetensors.numpy.save_file(weights, tmp_path / "base" / "model.safetensors")
    with pytest.raises(UserError, match="is not the model that was adapted: encoder/layers/feed_forward/output/bias"):
        export(run, tmp_path / "out", "peft")
    with pytest.raises(UserError, match="needs the Hugging Face folder of the base model"):
        export(run, tmp_path / "out", "peft", base=str(run))
    assert not (tmp_path / "out").exists()


def test_adapters_come_with_their_tokenizer_labels_and_a_card(tmp_path):
    base = random_checkpoint(tmp_path / "words", odd_config(), Heads())
    huggingface_export.write(base, tmp_path / "base")
    task = {"name": "own", "kind": "classification", "labels": ["a", "b", "c"], "max_length": 16}
    peft.write(trained(huggingface.read(tmp_path / "base"), HEADS, tmp_path / "base", task=task), tmp_path / "adapters")
    words = load_vocabulary(tmp_path / "adapters", base.model)
    assert words.spec == load_vocabulary(tmp_path / "base", base.model).spec
    assert json.loads((tmp_path / "adapters" / "task.json").read_text())["id2label"] == {"0": "a", "1": "b", "2": "c"}
    card = (tmp_path / "adapters" / "README.md").read_text()
    assert "library_name: peft\n" in card and "- lora\n" in card and "PeftModel.from_pretrained(base, " in card
    assert "Answers: `a`, `b`, `c`" in card and "num_labels=3" in card and str(tmp_path) not in card
