"""The notebooks of docs/notebooks run, and were saved with what they print."""

import json
import re
from pathlib import Path

import pytest
from tiny_runs import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def test_notebooks_are_saved_with_their_outputs_and_no_path_of_a_machine():
    assert len(NOTEBOOKS) == 2
    for path in NOTEBOOKS:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"/(home|root|tmp|work|Users)/", text), path.name
        cells = json.loads(text)["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        assert 10 <= len(cells) <= 14
        assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), (
            f"run: make notebooks ({path})"
        )
        kinds = [output["output_type"] for cell in code for output in cell["outputs"]]
        assert kinds and "error" not in kinds


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_an_empty_folder(path: Path, tmp_path: Path, monkeypatch):
    pytest.importorskip("nbclient")
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("XLA_FLAGS")  # it trains for some minutes, on one device and with optimized programs
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    import run

    run.run(path, tmp_path)  # raises what a cell raises
    (files,) = tmp_path.iterdir()
    assert files.name == f"{path.stem}_files"
