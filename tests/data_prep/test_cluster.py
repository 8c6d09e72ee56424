"""Jobs whose workers read the text and write the shards: the output of one process, also after a stop."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from building import contents

from bert_jax.errors import UserError
from data_prep import cluster, engines
from data_prep.build import build
from data_prep.build_options import BuildOptions
from data_prep.readers import ranges
from data_prep.readers.corpus import Source


@pytest.fixture
def elsewhere(monkeypatch) -> Callable[..., list[str]]:
    """Runs the tasks of Ray in this process, in some other order. Returns what has run; may stop after some tasks."""

    def start(seed: int = 0, stop_after: int = 10**9) -> list[str]:
        ran: list[str] = []

        def run(engine: engines.Engine, task, names, finished):
            names = list(names)
            random.Random(seed).shuffle(names)
            for name in names:
                if len(ran) == stop_after:
                    raise UserError("the cluster is gone")
                task(name)
                assert name in finished()
                ran.append(name)
                yield name

        monkeypatch.setattr(engines.Engine, "run", run)
        monkeypatch.setattr(engines, "choose", lambda *settings: engines.Engine("ray", 1, []))
        return ran

    return start


@pytest.fixture
def text(tmp_path: Path, corpus: Path, monkeypatch) -> str:
    """Patterns of files that are read in many ranges, with duplicates, bad lines, and an empty and a damaged file."""
    monkeypatch.setattr(ranges, "RANGE_BYTES", 6_000)
    monkeypatch.setattr(cluster, "FILE_BYTES", 2_000)
    monkeypatch.setattr(cluster, "GROUP", 3)
    documents = corpus.read_text(encoding="utf-8").split("\n\n")[:120]
    (tmp_path / "text").mkdir()
    first, second = documents[:60], documents[60:]
    (tmp_path / "text" / "a.txt").write_text("\n\n".join([*first, *first[:20], "x\0y"]), encoding="utf-8")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in second)
    (tmp_path / "text" / "b.jsonl").write_text(lines + "{\n", encoding="utf-8")
    (tmp_path / "text" / "empty.txt").write_text("\n \n")
    (tmp_path / "text" / "zip.txt.gz").write_bytes(gzip.compress("\n\n".join(first[:9]).encode())[:-20])
    return ",".join(str(tmp_path / "text" / name) for name in ("a.txt", "b.jsonl", "empty.txt", "zip.txt.gz"))


def options(text: str, vocab_dir: Path, output: Path, **changed) -> BuildOptions:
    usual = {"eval_fraction": 0.1, "unit_mb": 0.01, "on_error": "skip", "workers": 1}
    return BuildOptions(text, vocab_dir, output, 64, **usual | changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"dedup": True, "weights": (1.5, 2.0, 1.0, 1.0)},
        pytest.param({"eval_fraction": 0.0, "dupe_factor": 2}, marks=pytest.mark.slow),
        pytest.param({"part": "+3"}, marks=pytest.mark.slow),
    ],
)
def test_workers_elsewhere_give_the_same_files(text, vocab_dir, tmp_path, elsewhere, changed) -> None:
    expected = build(options(text, vocab_dir, tmp_path / "here", **changed))
    ran = elsewhere()
    assert build(options(text, vocab_dir, tmp_path / "away", engine="ray", **changed)) == expected
    assert contents(tmp_path / "away") == contents(tmp_path / "here")
    assert len([name for name in ran if " " not in name]) > 8 and len([name for name in ran if " " in name]) > 8


def test_a_stopped_job_resumes_at_its_range_and_at_its_unit(text, vocab_dir, tmp_path, elsewhere, monkeypatch) -> None:
    build(options(text, vocab_dir, tmp_path / "here"))
    job = options(text, vocab_dir, tmp_path / "away", engine="ray")
    every: list[str] = []
    for stop_after in (4, 15, 10**9):
        every += (ran := elsewhere(seed=len(every), stop_after=stop_after))
        if stop_after == 10**9:
            build(job)
        else:
            with pytest.raises(UserError, match="the cluster is gone"):
                build(job)
            assert len(ran) == stop_after and not (tmp_path / "away").exists()
            with pytest.raises(UserError, match=r"was started with other arguments \(seq_len 64, now 65\)"):
                build(BuildOptions(**vars(job) | {"seq_len": 65}))
    finished = [name.split()[-1] for name in every]
    assert len(finished) == len(set(finished)), "something was done twice"
    assert contents(tmp_path / "away") == contents(tmp_path / "here")


def test_a_mistake_in_the_text_stops_the_job_with_its_place(text, vocab_dir, tmp_path, elsewhere) -> None:
    elsewhere()
    with pytest.raises(UserError, match=r"a\.txt, after byte \d+, line \d+: a NUL character"):
        build(options(text.split(",")[0], vocab_dir, tmp_path / "away", engine="ray", on_error="fail"))
    assert not (tmp_path / "away.incomplete").exists() or list((tmp_path / "away.incomplete").glob("job/lists/*"))


def test_relative_paths_are_found_by_workers_in_other_folders(text, vocab_dir, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path / "text")
    job = options("a.txt", vocab_dir, tmp_path / "away")
    divided = cluster.ranges((Source("a.txt", 13_000), Source("gs://b/a.txt", 9)), job)
    assert [source.path for source, _ in divided] == [str(tmp_path / "text" / "a.txt")] * 2 + ["gs://b/a.txt"]
