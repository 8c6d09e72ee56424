import importlib
import importlib.util
import sys

import pytest

from bert_jax.renamed_modules import RENAMED, RefuseRenamed, refuse_renamed_modules

NAMES = dict(line.split() for line in RENAMED.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("old", ["bert_jax.train.together", "data_prep.recut"])
def test_an_old_name_is_refused_with_the_new_one(old):
    with pytest.raises(ModuleNotFoundError, match=rf"{old} has been renamed: import {NAMES[old]} \(CHANGELOG"):
        importlib.import_module(old)


def test_names_that_never_existed_are_unknown_as_ever():
    for name in ("bert_jax.train.nowhere", "data_prep.nowhere", "nowhere"):
        with pytest.raises(ModuleNotFoundError, match="No module named"):
            importlib.import_module(name)


def test_every_new_name_exists_and_no_old_one_does():
    for old, new in NAMES.items():
        assert importlib.util.find_spec(new) is not None, new
        with pytest.raises(ModuleNotFoundError):
            importlib.util.find_spec(old)


def test_the_finder_is_added_once():
    refuse_renamed_modules()
    assert sum(isinstance(finder, RefuseRenamed) for finder in sys.meta_path) == 1
