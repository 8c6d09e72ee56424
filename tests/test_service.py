"""The service of docs/service.md answers, warmed up, and its own test passes."""

import subprocess
import sys
from pathlib import Path

import pytest
from model_answers import CLASSES
from random_checkpoints import odd_config, random_checkpoint

from bert_jax.interop.export import export_loaded
from bert_jax.model.heads.config import Heads
from website.code_blocks import code_blocks

ROOT = Path(__file__).parent.parent
LABELS = ["alcott", "austen", "kipling", "verne"]


@pytest.mark.slow
@pytest.mark.usefixtures("one_device_processes")
def test_the_service_of_the_page_passes_the_test_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi", reason="fastapi is not installed: pip install -e '.[dev]'")
    blocks = [block.code for block in code_blocks((ROOT / "docs" / "service.md").read_text(encoding="utf-8"))]
    [service] = [code for code in blocks if "FastAPI(" in code]
    [test] = [code for code in blocks if "TestClient(" in code]
    assert len([line for line in service.splitlines() if line.strip()]) <= 20

    task = {**CLASSES, "labels": LABELS, "max_length": 128}
    heads = Heads(pooler=True, classes=len(LABELS))
    loaded = random_checkpoint(tmp_path / "words", odd_config(layers=1, max_positions=128), heads, task=task)
    export_loaded(loaded, tmp_path / "exported")
    (tmp_path / "service.py").write_text(service, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    ended = subprocess.run([sys.executable, "-c", test], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
