"""Log lines in an object store: segments written whole, of which those of the newest start count."""

from pathlib import Path

import pytest
from etils import epath

from bert_jax.train import metrics
from bert_jax.train.metrics import FOLDER, METRICS_FILE, Segments, read_metrics, read_segments


@pytest.fixture
def workdir(tmp_path: Path) -> epath.Path:
    """A folder on disk by the interface of a store; only the folder of segments exists."""
    (tmp_path / FOLDER).mkdir()
    return epath.Path(tmp_path)


def names(workdir: epath.Path) -> list[str]:
    return sorted(path.name for path in (workdir / FOLDER).iterdir())


def test_lines_appear_with_a_flush_and_a_newer_start_replaces_those_it_does_not_keep(workdir):
    assert read_segments(workdir) == []
    first = Segments(workdir, [])
    for line in ("one", "two", "three"):
        first.append(line)
    assert read_segments(workdir) == []
    first.flush()
    first.append("of a step that the next start repeats")
    first.flush()
    second = Segments(workdir, ["one", "two"])
    assert read_segments(workdir) == ["one", "two"]
    second.append("three again")
    second.close()
    assert read_segments(workdir) == ["one", "two", "three again"]
    assert names(workdir) == ["000002-000000.jsonl"]


def test_a_start_that_is_killed_before_it_removed_older_segments_counts(workdir, monkeypatch):
    for kept in ([], ["one"]):
        Segments(workdir, [*kept, "lost"])
        with monkeypatch.context() as killed:
            killed.setattr(type(workdir), "unlink", lambda *_, **__: None)
            Segments(workdir, [*kept, "kept"])
        assert read_segments(workdir) == [*kept, "kept"]


def test_a_full_segment_is_not_written_again(workdir, monkeypatch):
    monkeypatch.setattr(metrics, "SEGMENT_BYTES", 100)
    lines = [f"{number:04d} {'x' * 30}" for number in range(20)]
    segments = Segments(workdir, lines[:1])
    for line in lines[1:]:
        segments.append(line)
        segments.flush()
    assert read_segments(workdir) == lines
    sizes = [len((workdir / FOLDER / name).read_bytes()) for name in names(workdir)]
    assert len(sizes) > 3 and max(sizes) <= 100 + 36


def test_a_line_is_written_after_a_minute_without_a_checkpoint(workdir, monkeypatch):
    segments = Segments(workdir, [])
    segments.append("early")
    monkeypatch.setattr(metrics, "SECONDS", 0.0)
    segments.append("late")
    assert read_segments(workdir) == ["early", "late"]


def test_a_reader_whose_segments_are_removed_meanwhile_reads_those_of_the_new_start(workdir, monkeypatch):
    Segments(workdir, ["old"])
    read, restarts = type(workdir).read_bytes, iter([True])

    def read_late(path: epath.Path) -> bytes:
        if next(restarts, False):
            Segments(workdir, ["new"])
        return read(path)

    monkeypatch.setattr(type(workdir), "read_bytes", read_late)
    assert read_segments(workdir) == ["new"]


def test_a_copy_of_a_workdir_on_disk_or_in_a_store_keeps_its_log(workdir, tmp_path):
    Segments(workdir, ['{"step": 1}', '{"step": 2}'])
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2}]  # as it is on a disk
    (tmp_path / METRICS_FILE).write_text('{"step": 3}\n')
    assert read_metrics(tmp_path) == [{"step": 3}]
    assert read_metrics(workdir) == [{"step": 1}, {"step": 2}]
    (workdir / FOLDER / names(workdir)[0]).unlink()
    assert read_metrics(workdir) == [{"step": 3}]
