"""The packages of a wheel. Everything else is in setup.cfg, which cannot give the recipes their place."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["bert_jax*", "data_prep*"]), "bert_jax.configs"],
    # In the repository they are in configs/. An installed top-level package of that name would hide a user's own.
    package_dir={"bert_jax.configs": "configs"},
)
