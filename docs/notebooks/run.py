"""Runs notebooks and saves them with what they print: python docs/notebooks/run.py [NOTEBOOK ...]"""

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent


def run(path: Path, folder: Path) -> nbformat.NotebookNode:
    """Returns the notebook with its outputs, after running it in a folder. Raises CellExecutionError if a cell does."""
    notebook = nbformat.read(path, as_version=4)
    settings = {"timeout": 900, "record_timing": False, "coalesce_streams": True}
    NotebookClient(notebook, **settings, resources={"metadata": {"path": str(folder)}}).execute()
    notebook.metadata.pop("language_info", None)  # the version of Python, which changes from machine to machine
    return notebook


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as scratch:
            nbformat.write(run(Path(name), Path(scratch)), name)
