"""The packages and the description of a wheel. Everything else is in setup.cfg, which can express neither."""

import sys
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))  # a build frontend does not put this folder on the path

from website.links import without_relative_links  # noqa: E402

setup(
    packages=[*find_packages(include=["bert_jax*", "data_prep*"]), "bert_jax.configs"],
    # In the repository they are in configs/. An installed top-level package of that name would hide a user's own.
    package_dir={"bert_jax.configs": "configs"},
    # A page that shows the description has none of the files that the README links to.
    long_description=without_relative_links((ROOT / "README.md").read_text(encoding="utf-8")),
)
