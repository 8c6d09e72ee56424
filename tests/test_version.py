"""The version has one source, which a checkout that is not installed can read too; what is imported is required."""

import ast
import configparser
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import bert_jax
from bert_jax.train import workdir

ROOT = Path(__file__).parent.parent
PROGRAM = """
import importlib.metadata
import bert_jax
from data_prep import job
try:
    importlib.metadata.version("bert_jax")
except importlib.metadata.PackageNotFoundError:
    pass
else:
    raise SystemExit("the distribution is installed here")
assert job.versions()["bert_jax"] == bert_jax.__version__
"""


def test_a_checkout_that_is_not_installed_knows_its_version(tmp_path: Path) -> None:
    """A Python without site-packages, whose path has the packages of the checkout and everything installed but them.

    The checkout itself is not on the path, since an editable install leaves its metadata there.
    """
    installed = Path(np.__file__).parent.parent
    for path in installed.iterdir():
        if "bert_jax" not in path.name:
            (tmp_path / path.name).symlink_to(path)
    for package in ("bert_jax", "data_prep"):
        (tmp_path / package).symlink_to(ROOT / package)
    environment = {"PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-S", "-c", PROGRAM], cwd=tmp_path, env=environment, check=True)


def test_the_distribution_the_citation_and_a_checkpoint_have_the_version_of_the_package() -> None:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    assert settings["metadata"]["version"] == "attr: bert_jax.__version__"
    assert workdir.versions()["bert_jax"] == bert_jax.__version__
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    assert f"version: {bert_jax.__version__}" in citation


def imported_by(path: Path) -> Iterator[str]:
    """The top-level packages that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def test_every_package_that_is_imported_is_required_with_its_purpose() -> None:
    """By requirements.txt or an extra; a package that only another one requires may disappear."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    settings = (ROOT / "setup.cfg").read_text(encoding="utf-8").partition("[options.extras_require]")[2]
    extras = re.findall(r"^(?:\w+ =)? +([a-zA-Z]\S+)", settings.partition("[tool:pytest]")[0], re.MULTILINE)
    names = {re.split(r"[<>=\[]", one)[0] for one in [*(line for line in lines if line and line[0] != "#"), *extras]}
    other = {"google": "protobuf", "sklearn": "scikit-learn", "absl": "absl-py", "orbax": "orbax-checkpoint"}
    sources = [path for package in ("bert_jax", "data_prep", "configs") for path in (ROOT / package).rglob("*.py")]
    imported = {name for path in sources for name in imported_by(path)}
    for name in imported - set(sys.stdlib_module_names) - {"bert_jax", "data_prep"}:
        assert {name, name.replace("_", "-"), other.get(name)} & names, f"{name} is imported, but not required"
    for line, below in itertools.pairwise(lines):
        assert line.startswith("#") or not below or below.startswith("#"), f"requirements.txt: say what needs {below}"
