"""Checkpoints: what is saved is what is restored, and nothing half-written or damaged passes for whole."""

import json
import resource
import shutil
import signal
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from bert_jax.config import CheckpointConfig
from bert_jax.errors import UserError
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
