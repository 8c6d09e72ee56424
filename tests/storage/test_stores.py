"""Runs in object stores, on emulators of this machine: checkpoints, commands, kills and what is refused."""

import contextlib
import dataclasses
import errno
import gzip
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import store_emulators
from building import contents
from streamed_outputs import check_streaming
from tiny_runs import RECIPE, ROOT, TINY

from benchmarks import resume
from bert_jax.commands import build_examples, clean, merge_shards, pretrain
from bert_jax.config import AutoTaskConfig, FinetuneConfig
from bert_jax.errors import RunAgain, UserError
from bert_jax.interop import export
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.reporting import report
from bert_jax.storage import hold
from bert_jax.storage import location as stores
from bert_jax.storage.hold import open_objects
from bert_jax.storage.location import Location, check_access, is_store_failure, location
from bert_jax.storage.remote import Folder
from bert_jax.tasks import evaluation
from bert_jax.tasks.finetuning import finetune
from bert_jax.tasks.prediction import predict
from bert_jax.train import checkpoint, metrics
from bert_jax.train.checkpoint import Checkpoints
from bert_jax.train.metrics import read_metrics
from bert_jax.train.workdir import latest_step, open_branch, read_config, read_params, saved_steps, write_params
from data_prep.readers.corpus import Corpus, find_sources

EMULATORS = {"gs": store_emulators.GOOGLE, "s3": store_emulators.S3}


@pytest.fixture(scope="module", params=EMULATORS, autouse=True)
def bucket(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of an empty bucket, which this process and its children can use."""
    emulator = EMULATORS[request.param]
    if emulator.missing():
        pytest.skip(emulator.missing())
    with emulator.run() as variables, pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield f"{request.param}://bucket"


@pytest.fixture
def google(bucket: str) -> None:
    if not bucket.startswith("gs:"):
        pytest.skip("for Google Cloud Storage only")


@pytest.fixture
def s3(bucket: str) -> None:
    if not bucket.startswith("s3:"):
        pytest.skip("for S3 only")


def arguments(shards: Path, workdir: str | Path, steps: int, *more: str) -> list[str]:
    return [f"--config={RECIPE}", *resume.arguments(shards, workdir, steps, 2, TINY)[1:], *more]


@pytest.fixture(scope="module")
def trained(bucket: str, shards_dir: Path) -> Location:
    """A run of four steps in the store."""
    pretrain.main(arguments(shards_dir, f"{bucket}/trained", 4))
    return location(f"{bucket}/trained")


def tensors(value: float) -> dict[str, np.ndarray]:
    return {"a/kernel": np.full((2, 3), value, np.float32), "bias": np.arange(3, dtype=np.float32) + value}


def abstract(tree: dict[str, np.ndarray]) -> dict[str, jax.ShapeDtypeStruct]:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)


def test_steps_are_complete_once_they_are_marked_and_old_ones_are_deleted(bucket):
    folder = location(f"{bucket}/steps/checkpoints")
    with Checkpoints(folder, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, tensors(step), {"mu": np.ones(2, np.float32)}, {"step": step})
    with Checkpoints(folder, keep=2) as checkpoints:
        assert checkpoints.steps() == [2, 3] and checkpoints.meta(3) == {"step": 3}
    (folder / "3" / "commit_success.txt").unlink()  # as if the run had been killed before it was written
    assert latest_step(f"{bucket}/steps") == 2
    with Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.save(3, tensors(4), {"mu": np.ones(2, np.float32)}, {})
    read = read_params(f"{bucket}/steps", 3)
    assert all(read[name].tobytes() == value.tobytes() for name, value in tensors(4).items())


def test_a_lease_that_has_run_out_by_the_stores_clock_is_not_waited_for(bucket, monkeypatch):
    folder = location(f"{bucket}/left")
    objects = open_objects(folder)
    far = dataclasses.replace(hold.Record.of_this_process(), boot="another", host="far")
    objects.write(hold.HOLDER_FILE, far.encoded(), None)
    time.sleep(2.5)  # S3's clock counts whole seconds
    assert 1 <= objects.age(hold.HOLDER_FILE) < 60 and objects.age("nothing") == 0
    for lease, waits in ((1.0, False), (6.0, True)):
        monkeypatch.setattr(hold, "TIMES", hold.Times(lease=lease, poll_stored=0.1, renew_stored=60.0))
        lines: list[str] = []
        began = time.monotonic()
        with hold.hold(folder, lines.append):
            assert bool(lines) == waits and time.monotonic() - began < lease
        objects.write(hold.HOLDER_FILE, far.encoded(), None)
        time.sleep(2.5)


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # from gcsfs, above 1 MB
def test_tensorboard_events_and_profiles_are_uploaded(bucket, shards_dir, monkeypatch):
    monkeypatch.setattr(metrics, "SEGMENT_BYTES", 2000)
    pace = ["--config.log_every=1", "--config.profile=1,2"]
    pretrain.main(arguments(shards_dir, f"{bucket}/watched", 6, *pace))
    folder = location(f"{bucket}/watched")
    events = sorted(folder.joinpath("tensorboard").iterdir())
    assert b"mlm_loss" in b"".join(file.read_bytes() for file in events)
    [trace] = [file for file in folder.joinpath("profile").glob("plugins/profile/*/*") if file.name.endswith(".pb")]
    assert trace.stat().length > 0


def test_the_best_step_is_kept(bucket):
    folder = location(f"{bucket}/best/checkpoints")

    def save(checkpoints: Checkpoints, step: int, loss: float) -> None:
        checkpoints.save(step, tensors(loss), None, {"evaluation": {"loss": loss}})

    with Checkpoints(folder, keep=1, best="eval_loss") as checkpoints:
        for step, loss in ((1, 5.0), (2, 1.0), (3, 4.0)):
            save(checkpoints, step, loss)
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3]
    with Checkpoints(folder, keep=1, best="eval_loss") as checkpoints:  # as after a restart
        save(checkpoints, 4, 3.0)
        checkpoints.wait()
        assert checkpoints.steps() == [2, 4] and json.loads((folder / "best.json").read_text())["step"] == 2
    for step, value in ((2, 1.0), (4, 3.0)):
        np.testing.assert_array_equal(read_params(f"{bucket}/best", step)["bias"], tensors(value)["bias"])


def test_a_deletion_that_is_killed_leaves_an_incomplete_step(bucket, monkeypatch):
    folder = location(f"{bucket}/deleted/checkpoints")
    write_params(f"{bucket}/deleted", 1, tensors(1))
    with Checkpoints(folder, keep=1) as checkpoints:
        monkeypatch.setattr(checkpoint, "remove_folder", lambda _: None)
        checkpoints.save(2, tensors(2), None, {})
    assert (folder / "1" / "params" / "_METADATA").exists() and latest_step(f"{bucket}/deleted") == 2
    with pytest.raises(UserError, match=f"no checkpoint of step 1 in {bucket}/deleted/checkpoints; its steps are 2"):
        read_params(f"{bucket}/deleted", 1)
    monkeypatch.undo()
    with Checkpoints(folder, keep=1):
        pass
    assert not (folder / "1").exists()


@pytest.mark.slow
def test_an_upload_that_ends_after_any_number_of_writes_leaves_complete_steps_only(s3):
    """The store refuses everything from some write of step 2 on, until it has answered all of them."""
    url, optimizer = os.environ["AWS_ENDPOINT_URL"], {"mu": np.ones(2, np.float32)}
    ends = dict[int, list[int]]()
    while max(ends.values(), default=[]) != [2]:
        name = f"s3://bucket/cut-{len(ends)}"
        folder = location(f"{name}/checkpoints")
        with Checkpoints(folder, keep=1) as checkpoints:
            checkpoints.save(1, tensors(1), optimizer, {})
        store_emulators.allow_writes(url, len(ends))
        try:
            with contextlib.suppress(UserError), Checkpoints(folder, keep=1) as checkpoints:  # permission is denied
                checkpoints.save(2, tensors(2), optimizer, {})
        finally:
            store_emulators.allow_writes(url, None)
        ends[len(ends)] = saved_steps(name)
        for step in saved_steps(name):
            for each, value in read_params(name, step).items():
                np.testing.assert_array_equal(value, tensors(step)[each])
        with Checkpoints(folder, keep=1) as checkpoints:
            assert {path.name for path in folder.iterdir()} == {str(step) for step in checkpoints.steps()}
    found = list(ends.values())
    assert found == sorted(found) and [1] in found and [1, 2] in found, found


def test_a_run_that_was_suspended_removes_nothing_of_the_run_that_replaced_it(s3):
    def lost() -> None:
        raise hold.NoLongerHeld("replaced")

    folder = location("s3://bucket/replaced/checkpoints")
    with pytest.raises(hold.NoLongerHeld), Checkpoints(folder, keep=1, check_held=lost) as checkpoints:
        write_params("s3://bucket/replaced", 2, tensors(2))
        checkpoints.save(2, tensors(5), None, {})
        checkpoints.wait()
    np.testing.assert_array_equal(read_params("s3://bucket/replaced", 2)["bias"], tensors(2)["bias"])


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(121, "Server Error"), RunAgain),
        (PermissionError("The provided token has expired."), RunAgain),
        (PermissionError("Access Denied"), UserError),
        (OSError("Forbidden: b/bucket/o"), UserError),  # of gcsfs
        (ValueError("PERMISSION_DENIED: no access"), UserError),  # of tensorstore
    ],
)
def test_a_folder_that_cannot_be_listed_says_so_in_one_line(s3, monkeypatch, error, raised):
    def fail(*_: object, **__: object) -> None:
        raise error

    write_params("s3://bucket/silent", 1, tensors(1))
    folder = location("s3://bucket/silent/checkpoints")
    monkeypatch.setattr(stores.file_system(folder), "isdir", fail)
    with pytest.raises(raised, match="cannot list s3://bucket/silent/checkpoints: "):
        saved_steps("s3://bucket/silent")


def test_a_device_without_memory_is_no_failure_of_the_store():
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    assert not is_store_failure(error) and not is_store_failure(MemoryError())
    wrapped = ValueError("orbax: cannot restore")
    wrapped.__cause__ = error
    assert not is_store_failure(wrapped)
    assert is_store_failure(ValueError("RESOURCE_EXHAUSTED: too many requests"))


def test_an_answer_that_ends_early_is_an_error_of_the_store(s3, monkeypatch):
    class Cut:
        async def read(self) -> bytes:
            raise RuntimeError("payload is not complete")

    folder = location("s3://bucket/cut")
    monkeypatch.setattr(stores.file_system(folder), "call_s3", lambda *_, **__: {"Body": Cut(), "ETag": "1"})
    with pytest.raises(OSError, match="cannot read: payload is not complete"):
        open_objects(folder).read("holder.json")


def test_a_full_disk_is_reported_as_such_and_damages_no_checkpoint(s3, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = location("s3://bucket/full/checkpoints")
    saved = {"kernel": np.ones(3, np.float32)}, {"mu": np.ones(2, np.float32)}
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(1, *saved, {})
    monkeypatch.setattr(stores.file_system(folder), "get", full)
    with pytest.raises(
        UserError, match=r"has no space for a copy of s3://bucket/full/checkpoints/1/params\. .* set TMPDIR"
    ):
        read_params("s3://bucket/full", 1)
    with Checkpoints(folder, keep=1) as checkpoints, pytest.raises(UserError, match="has no space"):
        checkpoints.restore_newest(*map(abstract, saved))
    monkeypatch.undo()
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(folder, keep=1) as checkpoints:
        try:  # a limit on the size of a file stands in for the end of the disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
            checkpoints.save(2, {"table": np.random.default_rng(0).random((1000, 500), np.float32)}, None, {})
            with pytest.raises(OSError, match=r"bert_jax-staging-[^/]+/checkpoints/2"):
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        assert checkpoints.steps() == [1]
        checkpoints.save(2, *saved, {})  # once there is room again
        checkpoints.wait()
        assert checkpoints.steps() == [2]


def test_a_save_returns_while_its_upload_runs_and_the_end_waits_for_it(s3):
    begun, allowed = threading.Event(), threading.Event()

    def hold_up() -> None:
        begun.set()
        assert allowed.wait(60)

    with Checkpoints("s3://bucket/slow/checkpoints", keep=1, check_held=hold_up) as checkpoints:
        checkpoints.save(1, tensors(1), None, {})
        assert begun.wait(60) and checkpoints.steps() == []
        allowed.set()
    assert latest_step("s3://bucket/slow") == 1


def test_a_run_that_has_lost_its_workdir_marks_no_step(s3):
    held = iter([True])  # when the upload begins, and no more when it ends

    def lost() -> None:
        if not next(held, False):
            raise hold.NoLongerHeld("replaced")

    write_params("s3://bucket/lost", 1, tensors(1))
    folder = location("s3://bucket/lost/checkpoints")
    with (
        pytest.raises(hold.NoLongerHeld, match="replaced"),
        Checkpoints(folder, keep=1, check_held=lost) as checkpoints,
    ):
        checkpoints.save(2, tensors(2), None, {})
        checkpoints.wait()
    assert (folder / "2" / "params" / "_METADATA").exists() and latest_step("s3://bucket/lost") == 1


def test_a_damaged_step_is_moved_away_and_stays_there(bucket, capsys):
    folder = location(f"{bucket}/damaged/checkpoints")
    saved = {"kernel": np.ones(3, np.float32)}, {"mu": np.ones(2, np.float32)}
    with Checkpoints(folder, keep=0) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, *saved, {})
    (folder / "2" / "meta" / "metadata").unlink()
    with Checkpoints(folder, keep=0) as checkpoints:
        found = checkpoints.restore_newest(*map(abstract, saved))
    assert found is not None and found[0] == 1
    assert f"moved to {folder}/damaged/2" in capsys.readouterr().err
    with Checkpoints(folder, keep=0):
        pass
    assert (folder / "damaged" / "2" / "params" / "_METADATA").exists()


def test_a_run_is_recorded_and_released(trained):
    assert [line["step"] for line in read_metrics(trained)] == [1, 2, 3, 4]
    assert json.loads((trained / "result.json").read_text())["step"] == 4
    assert read_config(trained).kind == "pretraining" and latest_step(trained) == 4
    assert not (trained / hold.HOLDER_FILE).exists()


def test_commands_read_a_run_from_the_store(bucket, trained, shards_dir, tmp_path, capsys):
    assert evaluation.evaluate(f"{bucket}/trained", shards_dir, max_rows=16)["loss"] > 0
    export.export(f"{bucket}/trained", tmp_path / "exported")
    exported, there = open_checkpoint(tmp_path / "exported"), open_checkpoint(f"{bucket}/trained/checkpoints/4")
    assert exported.vocabulary.content_hash == there.vocabulary.content_hash
    np.testing.assert_array_equal(exported.params["mlm_head/bias"][:10], there.params["mlm_head/bias"][:10])
    assert str(report.report(f"{bucket}/trained")) == f"{bucket}/trained/report.html"
    assert b"</html>" in (trained / "report.html").read_bytes()
    assert open_branch(f"{bucket}/trained/checkpoints/4").step == 4
    capsys.readouterr()


@pytest.mark.slow
def test_several_seeds_are_fine_tuned_in_the_store_from_a_run_in_the_store(bucket, trained, tmp_path):
    for split, count in (("train", 32), ("dev", 8)):
        rows = [f"the sea was {('dark', 'good')[number % 2]}\t{number % 2}" for number in range(count)]
        (tmp_path / f"{split}.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    files = {split: str(tmp_path / f"{split}.tsv") for split in ("train", "dev")}
    task = AutoTaskConfig(text="text", label="label", max_length=16, **files)
    tuning = FinetuneConfig(task=task, batch_size=8, epochs=1.0, log_every=1, seeds=(0, 1), init_from=str(trained))
    result = finetune(tuning, f"{bucket}/tuned")
    workdir = location(f"{bucket}/tuned")
    assert json.loads((workdir / "result.json").read_text()) == result
    best, loaded = result["best"]["run"], open_checkpoint(f"{bucket}/tuned")
    for name, value in read_params(workdir / best).items():
        np.testing.assert_array_equal(loaded.params[name], value)
    assert read_metrics(workdir) == read_metrics(workdir / best) != []
    assert finetune(tuning, f"{bucket}/tuned") == result  # nothing is left to do
    (answer,) = predict(loaded, ["the sea was good"])
    assert answer["label"] in ("0", "1")
    assert report.report(f"{bucket}/tuned").exists()


def test_a_finished_run_is_left_as_it_is_and_a_longer_one_resumes(bucket, trained, shards_dir, capsys):
    pretrain.main(arguments(shards_dir, f"{bucket}/trained", 6, "--config.checkpoint.keep=1"))
    assert f"resuming from step 4 of {bucket}/trained" in capsys.readouterr().err
    assert [line["step"] for line in read_metrics(trained)] == [1, 2, 3, 4, 5, 6]


def use_account(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a service account, without which pyarrow asks Google for a token."""
    from cryptography.hazmat.primitives import serialization  # which the extra `stores` brings
    from cryptography.hazmat.primitives.asymmetric import rsa

    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = rsa.generate_private_key(65537, 2048).private_bytes(*form).decode()
    account = {"type": "service_account", "client_email": "nobody@localhost", "private_key": pem, "private_key_id": "1"}
    (folder / "account.json").write_text(json.dumps(account | {"token_uri": "http://localhost"}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(folder / "account.json"))


def test_text_is_read_and_rows_are_streamed_from_the_store(google, shards_dir, tmp_path, monkeypatch):
    """By pyarrow, which also needs credentials: a service account, whose key signs its own tokens."""
    use_account(tmp_path, monkeypatch)
    Folder("gs://bucket/text").write("deep/a.txt.gz", gzip.compress(b"One.\n\nTwo.\n"))
    assert list(Corpus(find_sources("gs://bucket/text/**/*.txt*")).documents()) == ["One.", "Two."]
    check_streaming(shards_dir, "gs://bucket/shards/sample", tmp_path / "cache")


def test_a_killed_job_in_the_store_resumes_and_gives_the_local_shards(bucket, corpus, vocab_dir, tmp_path, monkeypatch):
    """Text, units and output are in the store; the process is killed while it builds units."""
    if bucket.startswith("gs:"):
        use_account(tmp_path, monkeypatch)
    text = Folder(f"{bucket}/text")
    content = corpus.read_bytes()[:200_000]
    text.write("a.txt", content)
    (tmp_path / "a.txt").write_bytes(content)
    flags = ["--seq_len=64", "--eval_fraction=0.1", "--unit_mb=0.01", "--workers=2", f"--tokenizer={vocab_dir}"]
    build_examples.main([f"--input={tmp_path}/a.txt", f"--output={tmp_path}/shards", *flags])
    output = Folder(f"{bucket}/built")
    line = [sys.executable, "-m", "bert_jax", "build-examples", *flags]
    line += [f"--input={bucket}/text/*.txt", f"--output={output.address}"]
    with subprocess.Popen(line, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        until = time.monotonic() + 300
        while not any(name.endswith(".json") for name in output.names("job/units")):
            assert process.poll() is None and time.monotonic() < until, "no unit was finished"
            time.sleep(0.05)
        process.kill()
    assert "manifest.json" not in output.names()
    units = {name: output.read(name) for name in output.names("job/units")}
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and f"resuming {output.address}: " in done.stderr, done.stderr
    assert len(units) > 1
    built = {name: hashlib.sha256(output.read(name)).hexdigest() for name in output.names()}
    local = contents(tmp_path / "shards")
    manifests = [json.loads(read("manifest.json")) for read in (output.read, Folder(str(tmp_path / "shards")).read)]
    for files, manifest in zip((built, local), manifests, strict=True):
        del files["manifest.json"], files["SHA256SUMS"], manifest["sources"]  # they name the text
    assert built == local and manifests[0] == manifests[1]
    with pytest.raises(UserError, match=rf"output {output.address} exists"):
        build_examples.main([*line[4:]])


def test_clean_and_merge_shards_write_to_the_store(bucket, corpus, vocab_dir, tmp_path, monkeypatch):
    """A copy that fails is made again from the finished folder in TMPDIR, which is removed at the end."""
    if bucket.startswith("gs:"):
        use_account(tmp_path, monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "a.txt").write_bytes(corpus.read_bytes()[:50_000])
    (tmp_path / "b.txt").write_bytes(corpus.read_bytes()[50_000:90_000])
    clean_flags = [f"--input={tmp_path}/a.txt", "--near_duplicates", "--workers=1"]
    clean.main([*clean_flags, f"--output={tmp_path}/clean"])
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "write", lambda *_: (_ for _ in ()).throw(RunAgain("the store does not answer")))
        with pytest.raises(RunAgain):
            clean.main([*clean_flags, f"--output={bucket}/clean"])
    before = list((tmp_path / "temporary").glob("*/clean/report.json"))
    assert len(before) == 1
    clean.main([*clean_flags, f"--output={bucket}/clean"])
    stored = Folder(f"{bucket}/clean")
    assert stored.names() == Folder(str(tmp_path / "clean")).names() > {"report.json", "signatures.npy"}
    documents = next(name for name in stored.names() if name.endswith(".jsonl.zst"))
    assert stored.read(documents) == (tmp_path / "clean" / documents).read_bytes()
    assert not list((tmp_path / "temporary").iterdir())
    with pytest.raises(UserError, match=f"output {bucket}/clean exists"):
        clean.main([*clean_flags, f"--output={bucket}/clean"])

    flags = [f"--tokenizer={vocab_dir}", "--seq_len=64", "--workers=1", f"--input={tmp_path}/a.txt,{tmp_path}/b.txt"]
    for number in range(2):
        build_examples.main([*flags, f"--part={number}/2", f"--output={tmp_path}/parts/{number}"])
    for output in (f"{tmp_path}/merged", f"{bucket}/merged"):
        merge_shards.main([f"--input={tmp_path}/parts/*", f"--output={output}"])
    merged = Folder(f"{bucket}/merged")
    assert {name: hashlib.sha256(merged.read(name)).hexdigest() for name in merged.names()} == contents(
        tmp_path / "merged"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nobucket/run", "the bucket nobucket does not exist"),
        ("bucket/nothing", "no checkpoint at {scheme}bucket/nothing"),
        ("bucket/trained/checkpoints/9", "no checkpoint at {scheme}bucket/trained/checkpoints/9"),
        ("bucket/trained/tokenizer", "is not a workdir with checkpoints. Copy a checkpoint of another kind"),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(bucket, trained, name, message):
    scheme = bucket.removesuffix("bucket")
    with pytest.raises(UserError, match=message.format(scheme=scheme)) as refused:
        open_checkpoint(scheme + name)
    assert "\n" not in str(refused.value)


def test_missing_credentials_are_reported_in_one_line(bucket, tmp_path):
    of_emulators = {name for emulator in EMULATORS.values() for name in emulator.variables("")}
    clean = {name: value for name, value in os.environ.items() if name not in of_emulators}
    clean["GOOGLE_APPLICATION_CREDENTIALS"] = str(tmp_path / "none.json")
    clean |= {"HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true"}
    line = [sys.executable, "-m", "bert_jax", "evaluate", "--checkpoint", f"{bucket}/run", "--data", "shards"]
    ended = subprocess.run(line, cwd=ROOT, env=clean, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2 and ended.stdout == ""
    google = ("Google Cloud", "gcloud auth application-default login")
    cloud, advice = google if bucket.startswith("gs:") else ("AWS", "aws configure")
    assert ended.stderr.startswith(f"error: {bucket}/run: no credentials for {cloud}")
    assert advice in ended.stderr and ended.stderr.count("\n") == 1


def test_the_store_grants_one_of_two_requests_that_expect_the_same_version(bucket):
    folder = location(f"{bucket}/held")
    check_access(folder)
    with hold.hold(folder, print) as mine:
        mine.check()
        objects = open_objects(folder)
        objects.write(hold.HOLDER_FILE, b"other", None)
        mine.check()
        first = objects.read(hold.HOLDER_FILE)
        assert first is not None
        objects.write(hold.HOLDER_FILE, first.content, first.version)
        second = objects.read(hold.HOLDER_FILE)
        assert second is not None and second.content == first.content and second.version != first.version
        for content in (b"other", None):
            objects.write(hold.HOLDER_FILE, content, first.version)
            mine.check()
        objects.write(hold.HOLDER_FILE, b"other", second.version)
        with pytest.raises(hold.NoLongerHeld):
            mine.check()
    objects.write("none", b"x", second.version)
    assert objects.read("none") is None


@pytest.mark.slow
def test_a_second_command_is_refused_while_the_holder_lives_and_replaces_a_killed_one_at_once(bucket, shards_dir):
    workdir = f"{bucket}/shared"
    holding = "import sys; from bert_jax.storage import hold as holder, location\n"
    holding += f"with holder.hold(location.location('{workdir}'), print): print('held'); sys.stdin.read()"
    line, pipe = [sys.executable, "-u", "-c", holding], subprocess.PIPE
    second = [sys.executable, "-m", "bert_jax", "pretrain", *arguments(shards_dir, workdir, 2)]
    with subprocess.Popen(line, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        ended = subprocess.run(second, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 2
        assert f"error: {workdir} is held by another run: process {process.pid} on " in ended.stderr
        process.kill()
        process.wait()
        began = time.monotonic()
        with hold.hold(location(workdir), pytest.fail):
            assert time.monotonic() - began < hold.TIMES.lease / 2


@pytest.mark.slow
def test_a_run_in_a_store_killed_at_random_instants_ends_bit_for_bit_as_one_on_disk(
    bucket, shards_dir, tmp_path, monkeypatch
):
    monkeypatch.delenv("XLA_FLAGS")
    figures = resume.kills(shards_dir, tmp_path, 3, 60, 1, TINY, killed=location(f"{bucket}/killed"))
    assert sum(figures["kills"].values()) == 3 and figures["differing"] == []


def test_only_a_store_that_does_not_answer_is_asked_again(bucket, monkeypatch):
    """Code 75 restarts a job, which a mistake in the settings would end again and again."""
    if bucket.startswith("s3:"):
        from botocore import exceptions as errors

        again = [
            errors.EndpointConnectionError(endpoint_url="x"),
            OSError(errno.EBUSY, "slow down"),
            TimeoutError("late"),
        ]
        mistakes = [errors.ProfileNotFound(profile="typo"), OSError(errno.EINVAL, "no such region")]
        patched = SimpleNamespace(), "call_s3"
        monkeypatch.setattr(stores, "file_system", lambda _: patched[0])
    else:
        from google.api_core import exceptions
        from google.cloud import storage

        again = [exceptions.ServiceUnavailable("x"), exceptions.TooManyRequests("x"), ConnectionError("refused")]
        mistakes = [exceptions.BadRequest("not a bucket's name")]
        patched = storage.Client, "list_blobs"
    for error in (*again, *mistakes):

        def fail(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(*patched, fail, raising=False)
        with pytest.raises(RunAgain if error in again else UserError, match="Check the address and the network"):
            check_access(location(f"{bucket}-other/run"))
