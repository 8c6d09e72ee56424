"""Every recipe in configs/ loads, and its model has a shape and a place on the mesh."""

from pathlib import Path

import jax
import pytest

from bert_jax import config
from bert_jax.config import FinetuneConfig, PretrainConfig
from bert_jax.model import bert, sizes
from bert_jax.train import optim, partitioning
from bert_jax.train.losses import PretrainingObjective

ROOT = Path(__file__).parent.parent
PRETRAINING = sorted(ROOT.glob("configs/bert_*.py"))
FINETUNING = {"glue.py": ":task=sst2", "tagging.py": ":task=ewt"}
OTHERS = sorted(path for path in ROOT.glob("configs/*.py") if path.name != "__init__.py" and path not in PRETRAINING)


@pytest.mark.parametrize("path", PRETRAINING, ids=lambda path: path.stem)
def test_a_pretraining_recipe_builds_its_model_on_the_mesh(path):
    recipe = config.load(PretrainConfig, config.read_flags(str(path)))
    model = sizes.model_config(recipe.model, vocab_size=30522)
    params = bert.abstract_params(model, PretrainingObjective().heads)
    mesh = partitioning.make_mesh(recipe.mesh)
    partitioning.check_batch(recipe.batch_size, recipe.microbatches, mesh)
    state = jax.eval_shape(optim.build(recipe.optimizer, params).init, params)
    placed = partitioning.with_shardings(mesh, (params, state))
    assert all(leaf.sharding.mesh.size == 8 for leaf in jax.tree.leaves(placed))
    assert recipe.model.preset == path.stem.removeprefix("bert_")


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.stem)
def test_a_fine_tuning_recipe_loads(path):
    recipe = config.load(FinetuneConfig, config.read_flags(f"{path}{FINETUNING.get(path.name, '')}"))
    assert recipe.batch_size > 0


@pytest.mark.parametrize("path", [*PRETRAINING, *OTHERS], ids=lambda path: path.stem)
def test_a_recipe_says_its_command_hardware_and_expected_number(path):
    text = path.read_text(encoding="utf-8")
    assert f"--config configs/{path.name}" in text
    for word in ("Hardware", "Hours", "Expected", "Source"):
        assert f"\n{word}" in text, f"{path.name} does not say {word}"
