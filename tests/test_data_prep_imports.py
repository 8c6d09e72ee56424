"""Data preparation runs where there is no jax: importing all of it brings none in, nor what only annotates."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for folder in ("data_prep", "bert_jax/data")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
PROGRAM = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:  # an extra that is not installed
        assert not (error.name or "").startswith(("bert_jax", "data_prep")), error
    unwanted = {"jax", "jaxlib", "jaxtyping", "flax", "tensorflow", "torch"}
    found = {module.split(".")[0] for module in sys.modules} & unwanted
    assert not found, f"{name} imports {found}"
"""


def test_one_module_draws_progress() -> None:
    """Every long job tells of itself through bert_jax.progress."""
    for path in (ROOT / "data_prep").rglob("*.py"):
        assert "rich.progress" not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize("modules", [[*MODULES, "bert_jax.tokenizer", "bert_jax.reporting.page"]], ids=["all"])
def test_data_preparation_imports_no_jax(modules: list[str]) -> None:
    assert "data_prep.build_examples" in modules and len(modules) > 20
    subprocess.run([sys.executable, "-c", PROGRAM, *modules], cwd=ROOT, check=True, timeout=120)
