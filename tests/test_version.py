"""The version has one source, which a checkout that is on the path but not installed can read too."""

import configparser
import subprocess
import sys
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


def test_the_distribution_and_a_checkpoint_have_the_version_of_the_package() -> None:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    assert settings["metadata"]["version"] == "attr: bert_jax.__version__"
    assert workdir.versions()["bert_jax"] == bert_jax.__version__
