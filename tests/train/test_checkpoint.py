"""Checkpoints: what is saved is what is restored, and nothing half-written or damaged passes for whole."""

import json
import resource
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from random_checkpoints import odd_config, random_checkpoint, write_vocabulary

from bert_jax import command_line
from bert_jax.commands import convert, embed, export, fill_mask
from bert_jax.config import CheckpointConfig
from bert_jax.errors import UserError
from bert_jax.interop import export as bert_jax_export
from bert_jax.interop import huggingface, huggingface_export
from bert_jax.model.heads.config import Heads
from bert_jax.storage.files import read_json
from bert_jax.train.checkpoint import Checkpoints, restore
from bert_jax.train.orbax_io import DamagedCheckpoint
from bert_jax.train.workdir import latest_step

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())


def sharding(*axes: str) -> NamedSharding:
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec(*axes))


def make_state(seed: int = 0):
    first, second = jax.random.split(jax.random.key(seed))
    params = {"table": jax.random.normal(first, (16, 4)), "norm": {"scale": jax.random.normal(second, (3,))}}
    params = jax.device_put(params, sharding())
    return params, jax.jit(OPTIMIZER.init)(params)


def abstract(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding()), tree)


def assert_equal_trees(got, wanted) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, wanted)  # raises for another structure, too


def save_all(folder: Path, states: dict, keep: int = 0, **options) -> None:
    with Checkpoints(folder, keep, **options) as checkpoints:
        for step, state in states.items():
            checkpoints.save(step, *state, {"at": step})


@pytest.fixture
def checkpoints(tmp_path):
    with Checkpoints(tmp_path, keep=0) as opened:
        yield opened


def test_restores_the_optimizer_state_in_its_own_types_and_in_the_sharding_asked_for(checkpoints):
    params, optimizer_state = make_state()
    checkpoints.save(7, params, optimizer_state, {"fraction": 0.5})
    checkpoints.wait()
    wanted = abstract(params)
    wanted["table"] = jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=sharding("data"))
    restored = restore(checkpoints.directory / str(7), wanted, abstract(optimizer_state))
    assert_equal_trees(restored.params, params)
    assert_equal_trees(restored.optimizer_state, optimizer_state)
    assert restored.params["table"].sharding == wanted["table"].sharding
    assert restored.meta == {"fraction": 0.5}


def test_sums_that_change_while_a_step_is_written_do_not_damage_it(checkpoints, monkeypatch):
    """Orbax serializes metadata in a thread, and on a busy machine that thread runs late."""
    serialize = json.dumps

    def late(*arguments, **options):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.5)
        return serialize(*arguments, **options)

    monkeypatch.setattr(json, "dumps", late)
    state, sums = make_state(), {"loss": 1.0}
    checkpoints.save(1, *state, {"unlogged": {"sums": sums}})
    sums["loss"] = 2.0
    checkpoints.wait()
    assert restore(checkpoints.directory / str(1), *map(abstract, state)).meta == {"unlogged": {"sums": {"loss": 1.0}}}


def test_saving_continues_while_donated_steps_overwrite_the_state(checkpoints):
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 1.5 + 1, tree), donate_argnums=0)
    _, optimizer_state = make_state()
    state = {"wide": jax.device_put(jnp.arange(400_000.0).reshape(400, 1000), sharding())}
    expected = {}
    for number in range(4):
        expected[number] = jax.tree.map(lambda leaf: np.array(leaf, copy=True), state)
        checkpoints.save(number, state, optimizer_state, {})
        for _ in range(3):
            state = step(state)
    checkpoints.wait()
    assert checkpoints.steps() == [0, 1, 2, 3]
    for number, wanted in expected.items():
        assert_equal_trees(
            restore(checkpoints.directory / str(number), abstract(state), abstract(optimizer_state)).params, wanted
        )


def test_keeps_the_newest_and_never_sees_an_unfinished_one(tmp_path):
    state, folder = make_state(), tmp_path / "checkpoints"
    with Checkpoints(folder, keep=2) as checkpoints:
        assert checkpoints.latest_step() is None
        for number in (10, 20, 30):
            checkpoints.save(number, *state, {})
        checkpoints.save(30, *state, {"again": True})  # there already: stays as it is
        assert checkpoints.steps() == [20, 30] and checkpoints.meta(30) == {}
    assert sorted(path.name for path in folder.iterdir()) == ["20", "30"]
    for left in ("40.orbax-checkpoint-tmp/params", "removed/10/params"):  # by a save and a removal that were killed
        (folder / left).mkdir(parents=True)
    assert latest_step(tmp_path) == 30
    with Checkpoints(folder, keep=2) as checkpoints:
        assert checkpoints.latest_step() == 30
        assert sorted(path.name for path in folder.iterdir()) == ["20", "30"]


def test_checkpoints_survive_a_copy_to_a_bucket_and_back(tmp_path):
    """A bucket holds objects and no folders, and there Orbax takes a step for complete by its commit_success.txt."""
    states = {step: make_state(step) for step in (1, 2)}
    save_all(tmp_path / "checkpoints", states)
    for path in (tmp_path / "checkpoints").rglob("*"):
        if path.is_file():
            target = tmp_path / "copy" / path.relative_to(tmp_path / "checkpoints")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    assert steps_in_a_bucket(tmp_path / "copy") == [1, 2]
    with Checkpoints(tmp_path / "copy", keep=0) as checkpoints:
        for step, state in states.items():
            restored = restore(checkpoints.directory / str(step), *map(abstract, state))
            assert_equal_trees(restored.params, state[0])
            assert_equal_trees(restored.optimizer_state, state[1])
        checkpoints.save(3, *states[1], {})
    assert steps_in_a_bucket(tmp_path / "copy") == [1, 2, 3]


def steps_in_a_bucket(folder) -> list[int]:
    """The steps that Orbax would find complete if the folder were in an object store."""
    by_mark = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)
    options = ocp.CheckpointManagerOptions(atomicity_options=by_mark, read_only=True)
    with ocp.CheckpointManager(folder, options=options) as manager:
        return sorted(manager.all_steps())


def test_saving_does_not_ask_when_to_stop_which_the_loop_alone_counts(checkpoints, monkeypatch):
    asked = []
    monkeypatch.setattr("jax.experimental.multihost_utils.reached_preemption_sync_point", asked.append)
    checkpoints.save(4000, *make_state(), {})
    checkpoints.wait()
    assert asked == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree | {"more": jnp.zeros(2)}, "no tensor params/more"),
        (lambda tree: {"table": tree["table"]}, "extra tensor params/norm/scale"),
        (lambda tree: tree | {"table": jnp.zeros((4, 16))}, r"params/table is float32\[16, 4\], expected float32\[4,"),
        (lambda tree: tree | {"table": jnp.zeros((16, 4), jnp.bfloat16)}, "table is float32.*expected bfloat16"),
    ],
)
def test_another_structure_shape_or_dtype_names_the_tensor(checkpoints, change, message):
    params, optimizer_state = make_state()
    checkpoints.save(1, params, optimizer_state, {})
    checkpoints.save(2, params, None, {})
    checkpoints.wait()
    with pytest.raises(UserError, match=message):
        restore(checkpoints.directory / str(1), abstract(change(params)), abstract(optimizer_state))
    with pytest.raises(UserError, match=r"no optimizer state.*init_from"):  # parameters alone resume no run
        restore(checkpoints.directory / str(2), abstract(params), abstract(optimizer_state))


def break_file(path: Path, how: str) -> None:
    content = path.read_bytes()
    middle = len(content) // 2
    if how == "missing":
        path.unlink()
    elif how == "torn":
        path.write_bytes(content[:middle])
    else:
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])


@pytest.mark.parametrize(
    ("name", "how", "message"),
    [
        ("meta/metadata", "missing", "No such file"),
        ("meta/metadata", "torn", "JSONDecodeError"),
        ("meta/metadata", "flipped", r"JSONDecodeError|UnicodeDecodeError|does not have the content"),
        ("params/_METADATA", "missing", "FileNotFoundError"),
        ("params/_METADATA", "torn", "JSONDecodeError"),
        ("params/d/*", "torn", "ValueError"),
        ("params/d/*", "flipped", "ValueError|does not have the content that was saved"),
        ("optimizer/d/*", "missing", "ValueError"),
        ("optimizer/_METADATA", "missing", "FileNotFoundError"),
    ],
)
def test_a_damaged_file_is_named_with_the_step_before_it_and_a_run_resumes_there(tmp_path, capsys, name, how, message):
    states = {step: make_state(step) for step in (1, 2)}
    save_all(tmp_path, states)
    for path in (tmp_path / "2").glob(name):
        break_file(path, how)
    with Checkpoints(tmp_path, keep=0) as checkpoints:
        with pytest.raises(DamagedCheckpoint, match=rf"{tmp_path}/2 is damaged \(.*({message}).*fall back to .*/1$"):
            restore(checkpoints.directory / str(2), *map(abstract, states[2]))
        step, restored = checkpoints.restore_newest(*map(abstract, states[2]))
        assert_equal_trees(restored.params, states[step][0])
    line = capsys.readouterr().err
    assert step == 1 and line.count("\n") == 1 and f"{tmp_path}/damaged/2" in line and "from step 1" in line


@pytest.mark.slow
def test_a_run_resumes_from_a_whole_checkpoint_if_any_file_of_the_newest_is_damaged(tmp_path, capsys):
    states = {step: make_state(step) for step in (1, 2)}
    wanted = tuple(map(abstract, states[2]))
    save_all(tmp_path / "sound", states)
    files = [path for path in (tmp_path / "sound" / "2").rglob("*") if path.is_file() and path.stat().st_size]
    fallen_back = set()
    for number, (file, how) in enumerate((file, how) for file in files for how in ("missing", "torn", "flipped")):
        folder, name = tmp_path / str(number), file.relative_to(tmp_path / "sound")
        shutil.copytree(tmp_path / "sound", folder)
        break_file(folder / name, how)
        with Checkpoints(folder, keep=0) as checkpoints:
            step, restored = checkpoints.restore_newest(*wanted)
            assert_equal_trees(restored.params, states[step][0])  # 2: a file that nothing depends on
            assert checkpoints.steps() == ([1, 2] if step == 2 else [1])
            if step == 1:
                fallen_back.add((how, name.parts[1]))
                checkpoints.save(2, *states[2], {})  # and reaches that step again
                checkpoints.wait()
                assert checkpoints.steps() == [1, 2] and (folder / "damaged" / "2").is_dir()
    hows = ("missing", "torn", "flipped")
    assert fallen_back >= {(how, item) for how in hows for item in ("params", "optimizer", "meta")}


def test_a_second_damaged_copy_of_a_step_has_a_name_of_its_own_and_all_damaged_is_refused(tmp_path, capsys):
    state = make_state()
    wanted = tuple(map(abstract, state))
    (tmp_path / "damaged" / "2").mkdir(parents=True)
    with Checkpoints(tmp_path, keep=0) as checkpoints:
        assert checkpoints.restore_newest(*wanted) is None
    save_all(tmp_path, dict.fromkeys((1, 2, 3), state))
    with Checkpoints(tmp_path, keep=0) as checkpoints:
        for step in (2, 3):
            break_file(tmp_path / str(step) / "meta" / "metadata", "flipped")
        assert checkpoints.newest_meta() == {"at": 1}
        assert checkpoints.restore_newest(*wanted)[0] == 1
        assert "damaged/3" in (said := capsys.readouterr().err) and "damaged/2-2" in said
        break_file(tmp_path / "1" / "params" / "_METADATA", "missing")
        with pytest.raises(UserError, match=r"every checkpoint in .* is damaged \(steps 1; 1: .*another --workdir"):
            checkpoints.restore_newest(*wanted)
        with pytest.raises(DamagedCheckpoint, match=r"1 is damaged .* there is none before it"):
            restore(checkpoints.directory / str(1), *wanted)
        assert checkpoints.steps() == [1]


def test_no_room_on_the_disk_is_an_os_error_and_leaves_the_older_checkpoint_whole(tmp_path, caplog):
    state = make_state()
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    big = {"table": jax.random.normal(jax.random.key(0), (1000, 500))}
    try:
        with Checkpoints(tmp_path, keep=1) as checkpoints:
            checkpoints.save(1, *state, {})
            checkpoints.wait()
            # A limit on the size of a file stands in for the end of the disk: it fails in the same place.
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
            with pytest.raises(OSError, match=f"{tmp_path}/2"):
                checkpoints.save(2, big, state[1], {})
                checkpoints.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert checkpoints.steps() == [1]
            assert_equal_trees(restore(checkpoints.directory / str(1), *map(abstract, state)).params, state[0])
            checkpoints.save(2, big, state[1], {})  # once there is room again
            checkpoints.wait()
            assert checkpoints.steps() == [2]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(("metric", "best"), [("eval_loss", 20), ("eval_accuracy", 30)])
def test_every_kth_and_the_best_are_kept_with_the_newest(tmp_path, metric, best):
    state, name = make_state(), metric.removeprefix("eval_")
    measured = {10: 3.0, 20: 1.0, 30: 5.0, 40: 2.0, 50: float("nan"), 60: None, 70: None}

    def save(checkpoints, steps):
        for step in steps:
            checkpoints.save(step, *state, {"evaluation": {} if measured[step] is None else {name: measured[step]}})

    with Checkpoints(tmp_path, keep=1, keep_every=40, best=metric) as checkpoints:
        save(checkpoints, (10, 20, 30, 40))
        assert checkpoints.best.beaten_by({name: 0.5}) == (metric == "eval_loss")
        checkpoints.wait()
        assert checkpoints.steps() == sorted({best, 40})
    with Checkpoints(tmp_path, keep=1, keep_every=40, best=metric) as checkpoints:  # as before a restart
        save(checkpoints, (50, 60, 70))
    assert sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal()) == [best, 40, 70]
    better = "lower" if metric == "eval_loss" else "higher"
    note = {"step": best, "metric": metric, "value": measured[best], "better": better}
    assert json.loads((tmp_path / "best.json").read_text()) == note


def test_a_restart_knows_the_best_step_that_was_evaluated_after_it_was_saved(tmp_path):
    """SIGTERM interrupts an evaluation in the same way, and the resumed run repeats it."""
    state = make_state()
    with Checkpoints(tmp_path, keep=1, best="eval_loss") as checkpoints:
        checkpoints.save(10, *state, {})
        checkpoints.wait()
        checkpoints.measured(10, {"loss": 1.0})
    with Checkpoints(tmp_path, keep=1, best="eval_loss") as checkpoints:
        assert not checkpoints.best.beaten_by({"loss": 1.5})
        checkpoints.save(20, *state, {"evaluation": {"loss": 2.0}})
        checkpoints.save(30, *state, {"evaluation": {"loss": 3.0}})
        checkpoints.wait()
        assert checkpoints.steps() == [10, 30]
    assert json.loads((tmp_path / "best.json").read_text())["step"] == 10
    with Checkpoints(tmp_path, keep=1, best="eval_accuracy") as checkpoints:  # which was not measured at all
        assert checkpoints.best.values == {}


def test_invalid_options_for_keeping_are_refused_before_a_folder_is_made(tmp_path):
    for keeping in ({"keep": -1}, {"keep_every": -5}):
        with pytest.raises(UserError, match=r"config\.checkpoint\.keep\w* is -\d\. Use a finite number of at least 0"):
            CheckpointConfig(**keeping)
    with pytest.raises(UserError, match=r"checkpoint\.best is 'loss'; expected a held-out metric"):
        Checkpoints(tmp_path / "checkpoints", keep=1, best="loss")
    assert not (tmp_path / "checkpoints").exists()


# Tests that a bad checkpoint or input gives exit code 2 and one line that names the tensor or field.


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    huggingface_export.write(random_checkpoint(folder / "vocabulary", odd_config()), folder / "model")
    return folder / "model"


@pytest.fixture
def folder(whole, tmp_path):
    """A pretrained model in Hugging Face format, for a test to damage."""
    return shutil.copytree(whole, tmp_path / "model")


@pytest.fixture
def error_of(monkeypatch, capsys):
    """Runs a command that fails with exit code 2, and returns the one line that it prints."""

    def run(main, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            command_line.run(main)
        message = capsys.readouterr().err
        assert stopped.value.code == 2, message
        assert message.count("\n") == 1 and message.startswith("error: "), message
        return message

    return run


def change_config(folder: Path, **changes: object) -> None:
    values = read_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps(values | changes))


def change_tensors(folder: Path, **changes: np.ndarray | None) -> None:
    """Replaces tensors by name, with __ for a dot; None removes one."""
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors |= {name.replace("__", "."): value for name, value in changes.items()}
    kept = {name: value for name, value in tensors.items() if value is not None}
    safetensors.numpy.save_file(kept, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": "t5"}, "model_type is 't5'"),
        ({"model_type": None}, "model_type is None"),
        ({"model_type": ["bert"]}, "model_type is ['bert']"),
        ({"architectures": ["BertLMHeadModel"]}, "architectures is 'BertLMHeadModel'"),
        ({"architectures": [7]}, "architectures is 7"),
        ({"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ({"hidden_act": ["gelu"]}, "hidden_act is ['gelu']"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"position_embedding_type": "relative_key_query"}, "position_embedding_type is 'relative_key_query'"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads is {'0': [1]}"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers is '3'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": 10**6}, "1000000 layers"),
        ({"hidden_size": 10**7}, "word_embeddings.weight has shape [131, 20], but config.json expects [131, 10000000]"),
        ({"hidden_size": 22}, "config.json: hidden_size 22 is not a multiple of num_attention_heads 4"),
        ({"hidden_size": -20}, "hidden_size is -20"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"intermediate_size": 2.5}, "intermediate_size is 2.5"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps is nan"),
        ({"hidden_dropout_prob": 1.0}, "hidden_dropout_prob is 1.0"),
    ],
)
def test_an_unsupported_field_is_named(folder, tmp_path, error_of, changes, field):
    change_config(folder, **changes)
    message = error_of(convert.main, "--input", folder, "--output", tmp_path / "out")
    assert field in message and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "tensor"),
    [
        ({"bert__pooler__dense__bias": None}, "pooler.dense.bias is missing"),
        ({"bert__encoder__layer__1__output__dense__weight": None}, "encoder.layer.1.output.dense.weight is missing"),
        ({"bert__encoder__layer__3__output__dense__bias": np.zeros(20, np.float32)}, "encoder.layer.3.output.dense"),
        ({"cls__predictions__bias": np.zeros((131, 1), np.float32)}, "cls.predictions.bias has shape [131, 1]"),
        ({"bert__pooler__dense__bias": np.zeros((), np.float32)}, "pooler.dense.bias has shape []"),
        ({"bert__pooler__dense__bias": np.zeros(20, np.int64)}, "pooler.dense.bias has dtype int64"),
    ],
)
def test_a_missing_unexpected_or_misshapen_tensor_is_named(folder, tmp_path, error_of, changes, tensor):
    change_tensors(folder, **changes)
    assert tensor in error_of(convert.main, "--input", folder, "--output", tmp_path / "out")


def split_in_two(folder: Path) -> None:
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for part, held in parts.items():
        safetensors.numpy.save_file({name: tensors[name] for name in held}, folder / part)
    write_index(folder, {name: part for part, held in parts.items() for name in held})


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_an_index_with_a_missing_or_wrong_part_is_refused(folder, tmp_path, error_of):
    arguments = ("--input", folder, "--output", tmp_path / "out")
    split_in_two(folder)
    whole = read_json(folder / "model.safetensors.index.json")["weight_map"]
    write_index(folder, dict.fromkeys(whole, "a.safetensors"))
    assert "but the file does not hold it" in error_of(convert.main, *arguments)
    for broken in (["a.safetensors"], {"bert.pooler.dense.bias": 1}, None):
        write_index(folder, broken)
        assert "weight_map does not map each tensor to a file" in error_of(convert.main, *arguments)
    write_index(folder, whole)
    (folder / "b.safetensors").unlink()
    assert "names b.safetensors" in error_of(convert.main, *arguments)
    (folder / "b.safetensors").write_bytes(b"\0" * 100)
    assert "b.safetensors is damaged" in error_of(convert.main, *arguments)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "weights.pt"])
def test_a_pickle_is_refused_in_a_folder_and_as_a_path(folder, tmp_path, error_of, name):
    (folder / "model.safetensors").rename(folder / name)
    for path in (folder, folder / name):
        message = error_of(convert.main, "--input", path, "--output", tmp_path / "out")
        assert f"{name}, a pickle: reading one can run any code" in message and "save_pretrained(NEW_FOLDER)" in message
    assert "a pickle" in error_of(export.main, "--checkpoint", folder / name, "--output", tmp_path / "out")


def test_sequences_longer_than_the_positions_are_refused(folder, tmp_path, error_of):
    (tmp_path / "texts.txt").write_text("the cat\n")
    arguments = ("--checkpoint", folder, "--input", tmp_path / "texts.txt", "--output", tmp_path / "out.npz")
    message = error_of(embed.main, *arguments, "--max_length", 25)
    assert "max_length is 25; use 5 to 24 (the model's positions)" in message
    message = error_of(fill_mask.main, "--checkpoint", folder, "the [MASK] " * 20)
    assert "42 tokens does not fit the model's 24 positions" in message


def test_a_tokenizer_with_ids_outside_the_vocabulary_is_refused(folder, tmp_path, error_of):
    bert_jax_export.write(huggingface.read(folder), tmp_path / "workdir")
    for place, tokenizer in ((folder, folder), (tmp_path / "workdir", tmp_path / "workdir" / "tokenizer")):
        for file in tokenizer.glob("*token*.json"):
            file.unlink()
        write_vocabulary(tokenizer, 140)
        message = error_of(fill_mask.main, "--checkpoint", place, "the [MASK] sat")
        assert "the tokenizer has 140 tokens, but config.json has vocab_size 131" in message


def test_a_command_that_needs_a_missing_head_is_refused(tmp_path, error_of):
    bare = random_checkpoint(tmp_path / "vocabulary", odd_config(), Heads(pooler=True))
    huggingface_export.write(bare, tmp_path / "bare")
    message = error_of(fill_mask.main, "--checkpoint", tmp_path / "bare", "the [MASK] sat")
    assert "has no masked language model head" in message
    change_config(tmp_path / "bare", architectures=["BertForMaskedLM"])
    message = error_of(convert.main, "--input", tmp_path / "bare", "--output", tmp_path / "out")
    assert "tensor cls.predictions." in message and "is missing (5 in all)" in message


def test_json_nested_too_deeply_is_refused(folder, tmp_path, error_of):
    (folder / "config.json").write_text("[" * 100_000)
    assert "config.json is not valid JSON" in error_of(convert.main, "--input", folder, "--output", tmp_path / "out")
