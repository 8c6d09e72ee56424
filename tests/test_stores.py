"""Runs in Google Cloud Storage, on an emulator of this machine: checkpoints, commands, kills and what is refused."""

import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from streamed_outputs import check_streaming
from tiny_runs import RECIPE, ROOT, TINY

from benchmarks import chaos, gcs_emulator, store_kills
from bert_jax import evaluate, export, pretrain, report
from bert_jax.command import UserError
from bert_jax.config import FinetuneConfig, TaskConfig
from bert_jax.finetune import finetune
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.predict import predict
from bert_jax.storage import holder
from bert_jax.storage.location import Location, check_access, location
from bert_jax.storage.remote import Folder
from bert_jax.storage.stored_hold import open_objects
from bert_jax.train.branch import open_branch
from bert_jax.train.checkpoint import Checkpoints
from bert_jax.train.metrics import read_metrics
from bert_jax.train.workdir import latest_step, read_config, read_params, write_params
from data_prep.readers import Corpus, find_sources

pytestmark = pytest.mark.skipif(bool(gcs_emulator.missing()), reason=gcs_emulator.missing() or "installed")


@pytest.fixture(scope="module", autouse=True)
def store() -> Iterator[None]:
    """A store with one bucket, which this process and its children use."""
    with gcs_emulator.emulator() as variables, pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


def arguments(shards: Path, workdir: str | Path, steps: int, *more: str) -> list[str]:
    return [f"--config={RECIPE}", *chaos.arguments(shards, workdir, steps, 2, TINY)[1:], *more]


@pytest.fixture(scope="module")
def trained(store: None, shards_dir: Path) -> Location:
    """A run of four steps in the store."""
    pretrain.main(arguments(shards_dir, "gs://bucket/trained", 4))
    return location("gs://bucket/trained")


def tensors(value: float) -> dict[str, np.ndarray]:
    return {"a/kernel": np.full((2, 3), value, np.float32), "bias": np.arange(3, dtype=np.float32) + value}


def test_steps_are_complete_once_orbax_has_marked_them_and_old_ones_are_deleted():
    folder = location("gs://bucket/steps/checkpoints")
    with Checkpoints(folder, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, tensors(step), {"mu": np.ones(2, np.float32)}, {"step": step})
    with Checkpoints(folder, keep=2) as checkpoints:
        assert checkpoints.steps() == [2, 3] and checkpoints.meta(3) == {"step": 3}
    (folder / "3" / "commit_success.txt").unlink()  # as if the run had been killed before it was written
    assert latest_step("gs://bucket/steps") == 2
    with Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.save(3, tensors(4), {"mu": np.ones(2, np.float32)}, {})
    read = read_params("gs://bucket/steps", 3)
    assert all(read[name].tobytes() == value.tobytes() for name, value in tensors(4).items())


def test_a_deletion_that_is_killed_leaves_an_incomplete_step(monkeypatch):
    write_params("gs://bucket/deleted", 1, tensors(1))
    monkeypatch.setattr(ocp._src.path.deleter.gcs_utils, "rmtree", lambda *_, **__: None)
    with Checkpoints(location("gs://bucket/deleted/checkpoints"), keep=1) as checkpoints:
        checkpoints.save(2, tensors(2), None, {})
    assert location("gs://bucket/deleted/checkpoints/1/params/_METADATA").exists()
    assert latest_step("gs://bucket/deleted") == 2
    with pytest.raises(UserError, match="no checkpoint of step 1 in gs://bucket/deleted/checkpoints; its steps are 2"):
        read_params("gs://bucket/deleted", 1)


def test_a_damaged_step_is_moved_next_to_the_checkpoints_and_stays_there(capsys):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    folder = location("gs://bucket/damaged/checkpoints")
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        ({"kernel": np.ones(3, np.float32)}, {"mu": np.ones(2, np.float32)}),
    )
    with Checkpoints(folder, keep=0) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"kernel": np.full(3, step, np.float32)}, {"mu": np.ones(2, np.float32)}, {})
    (folder / "2" / "meta" / "metadata").unlink()
    with Checkpoints(folder, keep=0) as checkpoints:
        found = checkpoints.restore_newest(*abstract)
    assert found is not None and found[0] == 1
    assert "moved to gs://bucket/damaged/damaged/2" in capsys.readouterr().err
    with Checkpoints(folder, keep=0):  # Orbax removes what has no mark next to the steps
        pass
    assert location("gs://bucket/damaged/damaged/2/params/_METADATA").exists()


def test_a_run_is_recorded_and_released(trained):
    assert [line["step"] for line in read_metrics(trained)] == [1, 2, 3, 4]
    assert json.loads((trained / "result.json").read_text())["step"] == 4
    assert read_config(trained).kind == "pretraining" and latest_step(trained) == 4
    assert not (trained / holder.HOLDER_FILE).exists()


def test_commands_read_a_run_from_the_store(trained, shards_dir, tmp_path, capsys):
    assert evaluate.evaluate("gs://bucket/trained", shards_dir, max_rows=16)["loss"] > 0
    export.export("gs://bucket/trained", tmp_path / "exported")
    exported, there = open_checkpoint(tmp_path / "exported"), open_checkpoint("gs://bucket/trained/checkpoints/4")
    assert exported.vocabulary.content_hash == there.vocabulary.content_hash
    np.testing.assert_array_equal(exported.params["mlm_head/bias"][:10], there.params["mlm_head/bias"][:10])
    assert str(report.report("gs://bucket/trained")) == "gs://bucket/trained/report.html"
    assert b"</html>" in (trained / "report.html").read_bytes()
    assert open_branch("gs://bucket/trained/checkpoints/4").step == 4
    capsys.readouterr()


@pytest.mark.slow
def test_several_seeds_are_fine_tuned_in_the_store_from_a_run_in_the_store(trained, tmp_path):
    for split, count in (("train", 32), ("dev", 8)):
        rows = [f"the sea was {('dark', 'good')[number % 2]}\t{number % 2}" for number in range(count)]
        (tmp_path / f"{split}.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    files = {split: str(tmp_path / f"{split}.tsv") for split in ("train", "dev")}
    task = TaskConfig(text="text", label="label", max_length=16, **files)
    tuning = FinetuneConfig(task=task, batch_size=8, epochs=1.0, log_every=1, seeds=(0, 1), init_from=str(trained))
    result = finetune(tuning, "gs://bucket/tuned")
    workdir = location("gs://bucket/tuned")
    assert json.loads((workdir / "result.json").read_text()) == result
    best, loaded = result["best"]["run"], open_checkpoint("gs://bucket/tuned")
    for name, value in read_params(workdir / best).items():
        np.testing.assert_array_equal(loaded.params[name], value)
    assert read_metrics(workdir) == read_metrics(workdir / best) != []
    assert finetune(tuning, "gs://bucket/tuned") == result  # nothing is left to do
    (answer,) = predict(loaded, ["the sea was good"])
    assert answer["label"] in ("0", "1")
    assert report.report("gs://bucket/tuned").exists()


def test_a_finished_run_is_left_as_it_is_and_a_longer_one_resumes(trained, shards_dir, capsys):
    pretrain.main(arguments(shards_dir, "gs://bucket/trained", 6, "--config.checkpoint.keep=1"))
    assert "resuming from step 4 of gs://bucket/trained" in capsys.readouterr().err
    assert [line["step"] for line in read_metrics(trained)] == [1, 2, 3, 4, 5, 6]


def test_text_is_read_and_rows_are_streamed_from_the_store(shards_dir, tmp_path, monkeypatch):
    """By pyarrow, which also needs credentials: a service account, whose key signs its own tokens."""
    from cryptography.hazmat.primitives import serialization  # which the extra `stores` brings
    from cryptography.hazmat.primitives.asymmetric import rsa

    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = rsa.generate_private_key(65537, 2048).private_bytes(*form).decode()
    account = {"type": "service_account", "client_email": "nobody@localhost", "private_key": pem, "private_key_id": "1"}
    (tmp_path / "account.json").write_text(json.dumps(account | {"token_uri": "http://localhost"}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "account.json"))
    Folder("gs://bucket/text").write("deep/a.txt.gz", gzip.compress(b"One.\n\nTwo.\n"))
    assert list(Corpus(find_sources("gs://bucket/text/**/*.txt*")).documents()) == ["One.", "Two."]
    check_streaming(shards_dir, "gs://bucket/shards/sample", tmp_path / "cache")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("gs://nobucket/run", "the bucket nobucket does not exist"),
        ("gs://bucket/nothing", "no checkpoint at gs://bucket/nothing"),
        ("gs://bucket/trained/checkpoints/9", "no checkpoint at gs://bucket/trained/checkpoints/9"),
        ("gs://bucket/trained/tokenizer", "is not a workdir with checkpoints. Copy a checkpoint of another kind"),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(trained, address, message):
    with pytest.raises(UserError, match=message) as refused:
        open_checkpoint(address)
    assert "\n" not in str(refused.value)


def test_missing_credentials_are_reported_in_one_line(tmp_path):
    clean = {name: value for name, value in os.environ.items() if name not in gcs_emulator.variables("")}
    clean["GOOGLE_APPLICATION_CREDENTIALS"] = str(tmp_path / "none.json")
    line = [sys.executable, "-m", "bert_jax.evaluate", "--checkpoint", "gs://bucket/run", "--data", "shards"]
    ended = subprocess.run(line, cwd=ROOT, env=clean, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith("error: gs://bucket/run: no credentials for Google Cloud (")
    assert "gcloud auth application-default login" in ended.stderr and ended.stderr.count("\n") == 1


def test_the_emulator_grants_one_of_two_requests_that_expect_the_same_generation():
    location("gs://bucket/any")
    check_access(location("gs://bucket/any"))
    folder = location("gs://bucket/held")
    with holder.hold(folder, print) as mine:
        mine.check()
        objects = open_objects(folder)
        objects.write(holder.HOLDER_FILE, b"other", if_equal=b"\x02").result()
        mine.check()
        objects.write(holder.HOLDER_FILE, b"other").result()
        with pytest.raises(holder.NoLongerHeld):
            mine.check()


@pytest.mark.slow
def test_a_live_process_keeps_the_folder_and_a_killed_one_is_replaced_at_once():
    holding = "import sys; from bert_jax.storage import holder, location\n"
    holding += "with holder.hold(location.location('gs://bucket/shared'), print): print('held'); sys.stdin.read()"
    line, pipe = [sys.executable, "-u", "-c", holding], subprocess.PIPE
    with subprocess.Popen(line, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with pytest.raises(
            holder.Held, match=rf"^gs://bucket/shared is held by another run: process {process.pid} on "
        ):
            holder.hold(location("gs://bucket/shared"), lambda _: None).__enter__()
        process.kill()
        process.wait()
        began = time.monotonic()
        with holder.hold(location("gs://bucket/shared"), pytest.fail):
            assert time.monotonic() - began < holder.TIMES.lease / 2


@pytest.mark.slow
def test_a_run_in_a_store_killed_at_random_instants_ends_bit_for_bit_as_one_on_disk(shards_dir, tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")
    figures = store_kills.killed_in_a_store(shards_dir, tmp_path, kills=3, steps=60, seed=1)
    assert sum(figures["kills"].values()) == 3 and figures["differing"] == []
